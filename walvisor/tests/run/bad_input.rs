//! Bad input: the program prints one line that names the fault and the remedy, and exits with
//! status 1 or 2.

use std::ffi::OsStr;
use std::fs;
use std::process::Output;

use walvisor_tests::{QemuNbd, have, run_sessions};

use crate::kernel::{self, KernelAction};
use crate::{has_kvm, stderr, walvisor};

/// Asserts exit `status`, and one line on stderr that contains each of `parts`.
#[track_caller]
fn refused(output: &Output, status: i32, parts: &[&str]) {
    let error = stderr(output);
    assert_eq!(output.status.code(), Some(status), "{error}");
    assert!(output.stdout.is_empty(), "stdout is not empty");
    assert_eq!(error.lines().count(), 1, "not one line: {error}");
    assert!(error.starts_with("walvisor: "), "{error}");
    for part in parts {
        assert!(error.contains(part), "{part:?} is missing: {error}");
    }
}

#[test]
fn wrong_usage_is_one_line_and_status_2() {
    let dir = tempfile::tempdir().unwrap();
    run_sessions("usage", dir.path(), []);
}

#[test]
fn more_memory_than_the_machine_has_needs_overcommit() {
    let told = rustix::system::sysinfo();
    let machine = (told.totalram + told.totalswap) * u64::from(told.mem_unit);
    let memory = (machine + 1).next_multiple_of(1 << 30);
    if memory > 1 << 40 {
        return println!("skipped: this machine has more memory than a guest can have");
    }
    let why = format!("--memory {memory}: this machine has {machine} bytes");
    let parts = [why.as_str(), "give less", "--overcommit"];
    let run = format!("run --kernel /nowhere/vmlinuz --memory {memory}");
    refused(&walvisor(&run, &[]), 2, &parts);
    // The next thing that is wrong.
    let meant = walvisor(&format!("{run} --overcommit"), &[]);
    refused(&meant, 1, &["/nowhere/vmlinuz"]);
}

/// What can be written after `--disk` is in the help of each command that takes it.
#[test]
fn help_lists_the_keys_of_a_disk() {
    for (command, key, other) in [
        ("run", "  transport=\n", "  socket=\n"),
        ("serve nbd", "  port=\n", "  transport=\n"),
        ("serve vhost-user", "  queue-size=\n", "  port=\n"),
        ("serve tcmu", "  fabric=\n", "  answer=\n"),
        ("serve ublk", "  queue-size=\n", "  fabric=\n"),
    ] {
        let shown = |arguments: &str| {
            let output = walvisor(&format!("{command} {arguments}"), &[]);
            assert_eq!(output.status.code(), Some(0));
            String::from_utf8(output.stdout).unwrap()
        };
        let keys = shown("--disk help");
        assert!(keys.contains(key) && !keys.contains(other), "{keys}");
        assert!(keys.contains("[default: writeback]"), "{keys}");
        let help = shown("--help");
        assert!(
            help.contains(keys.trim()) && help.contains("--seccomp"),
            "{help}"
        );
        assert!(!shown("-h").contains(key));
    }
}

/// Options stand with those of their subject, and keys too.
#[test]
fn help_of_run_has_headings() {
    let help = walvisor("run --help", &[]).stdout;
    let help = String::from_utf8(help).unwrap();
    let mut headings: Vec<(&str, Vec<&str>)> = Vec::new();
    for line in help.lines() {
        if let Some(heading) = line.strip_suffix(':').filter(|text| !text.starts_with(' ')) {
            headings.push((heading, vec![]));
        } else if let (Some((_, options)), Some(at)) = (headings.last_mut(), line.find("--"))
            && line[..at].trim().len() <= "-h,".len()
        {
            let name = &line[at..];
            options.push(name.split([' ', '[', '=']).next().unwrap());
        }
    }
    let names: Vec<_> = headings.iter().map(|(name, _)| *name).collect();
    assert_eq!(
        names,
        [
            "Options",
            "Guest",
            "Devices",
            "Process",
            "The disk",
            "Its device",
            "Its limits",
            "Its log"
        ]
    );
    for (heading, option) in [
        ("Guest", "--kernel"),
        ("Guest", "--memory"),
        ("Devices", "--disk"),
        ("Devices", "--net"),
        ("Process", "--control"),
        ("Process", "--seccomp"),
    ] {
        let of = headings.iter().filter(|(_, all)| all.contains(&option));
        let of: Vec<_> = of.map(|(name, _)| *name).collect();
        assert_eq!(of, [heading], "{option}: {help}");
    }
}

#[test]
fn help_and_version_exit_with_success() {
    for (arguments, first) in [
        ("--help", "A small KVM VMM"),
        ("--version", "walvisor "),
        ("run --help", "Boot a Linux guest"),
        ("run --disk help", "A disk of 'walvisor run': "),
        ("serve nbd --disk help", "A disk of 'walvisor serve nbd': "),
        (
            "serve vhost-user --disk path=a,socket=s --disk help",
            "A disk of 'walvisor serve vhost-user': ",
        ),
        (
            "serve tcmu --disk help",
            "A disk of 'walvisor serve tcmu': ",
        ),
    ] {
        let output = walvisor(arguments, &[]);
        assert_eq!(output.status.code(), Some(0));
        let shown = String::from_utf8(output.stdout).unwrap();
        assert!(
            shown.starts_with(first) && output.stderr.is_empty(),
            "{shown}"
        );
    }
}

#[test]
fn a_bad_kernel_is_named_with_what_is_wrong() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (bzimage, vmlinux) = (
        kernel::bzimage(KernelAction::PowerOff),
        kernel::vmlinux(KernelAction::PowerOff, true),
    );
    let mut old = bzimage.clone();
    old[0x206..0x208].copy_from_slice(&0x0205u16.to_le_bytes());
    let mut wrapping = bzimage.clone();
    wrapping[0x258..0x260].copy_from_slice(&u64::MAX.to_le_bytes());
    let mut large = bzimage.clone();
    large[0x260..0x264].copy_from_slice(&0x1000_0000u32.to_le_bytes());
    let mut high = vmlinux.clone();
    high[64 + 24..64 + 32].copy_from_slice(&0x4000_0000u64.to_le_bytes());
    let mut segments = vmlinux.clone();
    segments[54] = 7;
    let no_note = kernel::vmlinux(KernelAction::PowerOff, false);
    let cases: [(&str, &[u8], &[&str]); 13] = [
        ("empty", b"", &["neither a bzImage nor an ELF"]),
        ("text", &[b'x'; 4096], &["neither a bzImage nor an ELF"]),
        ("gzip", b"\x1f\x8b\x08\0compressed", &["uncompressed"]),
        ("bz-cut", &bzimage[..1200], &["truncated", "1200 bytes"]),
        ("bz-head", &bzimage[..0x210], &["truncated", "copy"]),
        ("bz-old", &old, &["not a 64-bit kernel"]),
        ("bz-wraps", &wrapping, &["wrap around"]),
        ("bz-large", &large, &["--memory", "257 MiB"]),
        ("elf-cut", &vmlinux[..vmlinux.len() - 70], &["truncated"]),
        ("elf-head", &vmlinux[..40], &["cannot be loaded"]),
        ("elf-segments", &segments, &["cannot be loaded"]),
        ("elf-high", &high, &["--memory"]),
        ("elf-plain", &no_note, &["no PVH entry", "CONFIG_PVH"]),
    ];
    for (name, image, parts) in cases {
        let path = kernel::save(directory.path(), name, image);
        let mut all = vec!["kernel '", name];
        all.extend(parts);
        refused(
            &walvisor("run --memory 4M --console off --kernel", &[path.as_ref()]),
            1,
            &all,
        );
    }
    let missing = walvisor("run --kernel /nowhere/vmlinuz", &[]);
    refused(
        &missing,
        1,
        &["/nowhere/vmlinuz", "No such file", "give the path"],
    );
    refused(
        &walvisor("run --kernel /", &[]),
        1,
        &["kernel '/'", "directory"],
    );
}

#[test]
fn a_bad_initrd_or_command_line_is_a_clear_error() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let kernel = kernel::save(
        directory.path(),
        "bzImage",
        &kernel::bzimage(KernelAction::PowerOff),
    );
    let kernel = kernel.as_os_str();
    let initrd = directory.path().join("initrd");
    fs::write(&initrd, vec![0; 5 << 20]).unwrap();
    let run = |rest: &[&OsStr]| {
        let mut all = vec![kernel];
        all.extend(rest);
        walvisor("run --memory 4M --console off --kernel", &all)
    };
    refused(
        &run(&["--initrd".as_ref(), "/nowhere".as_ref()]),
        1,
        &["initrd '/nowhere'"],
    );
    refused(
        &run(&["--initrd".as_ref(), initrd.as_ref()]),
        1,
        &["initrd", "--memory", "7 MiB"],
    );
    let long = "x".repeat(2048);
    refused(
        &run(&["--cmdline".as_ref(), long.as_ref()]),
        1,
        &["2048 bytes", "2047", "--cmdline"],
    );
    refused(
        &run(&["--metrics".as_ref(), "/nowhere/m".as_ref()]),
        1,
        &["metrics '/nowhere/m'"],
    );
}

#[test]
fn bad_disks_are_clear_errors_and_stay_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    let kernel = kernel::save(
        directory.path(),
        "bzImage",
        &kernel::bzimage(KernelAction::PowerOff),
    );
    let kernel = kernel.to_str().unwrap();
    let run = |specs: &[String]| {
        let mut all = vec![OsStr::new(kernel), "--console".as_ref(), "off".as_ref()];
        for spec in specs {
            all.extend([OsStr::new("--disk"), spec.as_ref()]);
        }
        walvisor("run --memory 4M --kernel", &all)
    };
    refused(
        &run(&[format!("path={}", at("none.img"))]),
        1,
        &["none.img"],
    );
    fs::write(at("odd.img"), [7; 513]).unwrap();
    refused(
        &run(&[format!("path={}", at("odd.img"))]),
        1,
        &["odd.img", "512"],
    );
    assert_eq!(fs::read(at("odd.img")).unwrap(), [7; 513]);
    if have("qemu-nbd", "qemu-utils") {
        fs::write(at("held.img"), [7; 1024]).unwrap();
        let _held = QemuNbd::start(directory.path(), "held.img");
        let parts = &["held.img", "QEMU", "open for writing", "fuser -v"];
        refused(&run(&[format!("path={}", at("held.img"))]), 1, parts);
    }
    assert!(
        !fs::exists(at("odd.img.wal")).unwrap(),
        "a log was made for a refused disk"
    );
    fs::write(at("a.img"), [7; 4096]).unwrap();
    let twice = format!("path={},log={}", at("a.img"), at("log"));
    refused(
        &run(&[twice.clone(), twice]),
        1,
        &["a.img", "open already", "its own image"],
    );
    assert_eq!(fs::read(at("a.img")).unwrap(), [7; 4096]);
}

#[test]
fn a_bad_kernel_or_initrd_leaves_no_log_beside_a_raw_image() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    let bzimage = kernel::bzimage(KernelAction::PowerOff);
    fs::write(at("raw.img"), [7; 4096]).unwrap();
    fs::write(at("whole"), &bzimage).unwrap();
    fs::write(at("cut"), &bzimage[..1200]).unwrap();
    fs::write(at("text"), [b'x'; 4096]).unwrap();
    fs::write(at("old-metrics"), "old").unwrap();
    let cases: [(&str, &[&str], &str); 6] = [
        ("none", &[], "kernel '"),
        ("cut", &[], "truncated"),
        ("text", &[], "neither a bzImage nor an ELF"),
        ("whole", &["--initrd", "/nowhere"], "initrd '/nowhere'"),
        ("whole", &["--initrd", "/"], "initrd '/'"),
        ("whole", &["--console", "file:/nowhere/c"], "console '"),
    ];
    for (name, rest, part) in cases {
        let (kernel, metrics) = (at(name), at("old-metrics"));
        let disk = format!("path={}", at("raw.img"));
        let mut all = vec![kernel.as_str(), "--disk", &disk, "--metrics", &metrics];
        all.extend(rest);
        let all: Vec<&OsStr> = all.into_iter().map(OsStr::new).collect();
        refused(&walvisor("run --memory 4M --kernel", &all), 1, &[part]);
        assert!(
            !fs::exists(at("raw.img.wal")).unwrap(),
            "{part}: a log was made"
        );
        assert_eq!(fs::read(at("raw.img")).unwrap(), [7; 4096], "{part}");
        assert_eq!(fs::read(at("old-metrics")).unwrap(), b"old", "{part}");
    }
}
