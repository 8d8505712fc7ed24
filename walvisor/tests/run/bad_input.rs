//! Bad input: the program prints one line that names the fault and the remedy, and exits with
//! status 1 or 2.

use std::ffi::OsStr;
use std::fs;
use std::process::Output;

use walvisor_tests::{QemuNbd, have, run_sessions};

use crate::kernel::{self, KernelAction};
use crate::{has_kvm, stderr, stdout, walvisor};

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

/// Runs `walvisor`, asserts success and an empty stderr, and returns stdout.
fn shown(arguments: &str) -> String {
    let output = walvisor(arguments, &[]);
    assert_eq!(output.status.code(), Some(0), "{arguments}");
    assert!(output.stderr.is_empty(), "{arguments}");
    stdout(&output)
}

/// What can be written after `--disk` is in the help of each command that takes it.
#[test]
fn help_lists_the_keys_of_a_disk() {
    assert!(shown("--help").starts_with("A small KVM VMM"));
    assert!(shown("--version").starts_with("walvisor "));
    for (command, key, other) in [
        ("run", "  transport=\n", "  socket=\n"),
        ("serve nbd", "  port=\n", "  transport=\n"),
        ("serve vhost-user", "  queue-size=\n", "  port=\n"),
        ("serve tcmu", "  fabric=\n", "  answer=\n"),
        ("serve ublk", "  queue-size=\n", "  fabric=\n"),
    ] {
        let keys = shown(&format!("{command} --disk help"));
        let first = format!("A disk of 'walvisor {command}': ");
        assert!(keys.starts_with(&first), "{keys}");
        assert!(keys.contains(key) && !keys.contains(other), "{keys}");
        assert!(keys.contains("[default: writeback]"), "{keys}");
        let help = shown(&format!("{command} --help"));
        let all = help.contains(keys.trim()) && help.contains("--seccomp");
        assert!(all, "{help}");
        assert!(!shown(&format!("{command} -h")).contains(key));
    }
}

/// Options stand with those of their subject, and keys too.
#[test]
fn help_of_run_has_headings() {
    let help = shown("run --help");
    let (mut heading, mut found) = ("", Vec::new());
    for line in help.lines() {
        match line.strip_suffix(':') {
            Some(name) if !name.starts_with(' ') => {
                heading = name;
                found.push((heading, ""));
            }
            _ => found.push((heading, line.trim_start().trim_start_matches("-h, "))),
        }
    }
    let names = found
        .iter()
        .filter(|(name, line)| line.is_empty() && !name.is_empty());
    let mut names: Vec<_> = names.map(|(name, _)| *name).collect();
    names.dedup();
    let disk = ["The disk", "Its device", "Its limits", "Its log"];
    assert_eq!(names[..4], ["Options", "Guest", "Devices", "Process"]);
    assert_eq!(names[4..], disk);
    for (heading, option) in [
        ("Guest", "--kernel"),
        ("Guest", "--memory"),
        ("Devices", "--disk"),
        ("Devices", "--net"),
        ("Process", "--control"),
        ("Process", "--seccomp"),
    ] {
        let of = found.iter().filter(|(_, line)| line.starts_with(option));
        let of: Vec<_> = of.map(|(name, _)| *name).collect();
        assert_eq!(of, [heading], "{option}: {help}");
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
    let bzimage = kernel::bzimage(KernelAction::PowerOff);
    let kernel = kernel::save(directory.path(), "bzImage", &bzimage);
    let initrd = directory.path().join("initrd");
    fs::write(&initrd, vec![0; 5 << 20]).unwrap();
    let long = "x".repeat(2048);
    let cases: [(&str, &OsStr, &[&str]); 4] = [
        ("--initrd", "/nowhere".as_ref(), &["initrd '/nowhere'"]),
        (
            "--initrd",
            initrd.as_ref(),
            &["initrd", "--memory", "7 MiB"],
        ),
        (
            "--cmdline",
            long.as_ref(),
            &["2048 bytes", "2047", "--cmdline"],
        ),
        (
            "--metrics",
            "/nowhere/m".as_ref(),
            &["metrics '/nowhere/m'"],
        ),
    ];
    for (option, value, parts) in cases {
        let run = "run --memory 4M --console off --kernel";
        let rest = [kernel.as_os_str(), option.as_ref(), value];
        refused(&walvisor(run, &rest), 1, parts);
    }
}

#[test]
fn bad_disks_are_clear_errors_and_stay_unchanged() {
    let directory = tempfile::tempdir().unwrap();
    let dir = directory.path();
    let at = |name: &str| dir.join(name).display().to_string();
    let kernel = kernel::save(dir, "bzImage", &kernel::bzimage(KernelAction::PowerOff));
    for (name, len) in [("odd.img", 513), ("held.img", 1024), ("a.img", 4096)] {
        fs::write(at(name), vec![7; len]).unwrap();
    }
    let held = have("qemu-nbd", "qemu-utils").then(|| QemuNbd::start(dir, "held.img"));
    let mut cases: Vec<(&[&str], &[&str])> = vec![
        (&["none.img"], &["none.img"]),
        (&["odd.img"], &["odd.img", "512"]),
        (
            &["a.img", "a.img"],
            &["a.img", "open already", "its own image"],
        ),
    ];
    if held.is_some() {
        let parts = &["held.img", "QEMU", "open for writing", "fuser -v"];
        cases.push((&["held.img"], parts));
    }
    for (names, parts) in cases {
        let mut rest = vec![kernel.clone().into_os_string()];
        for name in names {
            let log = if names.len() > 1 {
                format!(",log={}", at("log"))
            } else {
                String::new()
            };
            let spec = format!("path={}{log}", at(name));
            rest.extend(["--disk".into(), spec.into()]);
        }
        let rest: Vec<_> = rest.iter().map(AsRef::as_ref).collect();
        refused(
            &walvisor("run --memory 4M --console off --kernel", &rest),
            1,
            parts,
        );
    }
    assert_eq!(fs::read(at("odd.img")).unwrap(), [7; 513]);
    assert!(!fs::exists(at("odd.img.wal")).unwrap(), "a log was made");
    assert_eq!(fs::read(at("a.img")).unwrap(), [7; 4096]);
}

#[test]
fn a_bad_kernel_or_initrd_leaves_no_log_beside_a_raw_image() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name).display().to_string();
    let bzimage = kernel::bzimage(KernelAction::PowerOff);
    for (name, contents) in [
        ("raw.img", &[7; 4096][..]),
        ("whole", &bzimage),
        ("cut", &bzimage[..1200]),
        ("old-metrics", b"old"),
    ] {
        fs::write(at(name), contents).unwrap();
    }
    let cases: [(&str, &[&str], &str); 5] = [
        ("none", &[], "kernel '"),
        ("cut", &[], "truncated"),
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
