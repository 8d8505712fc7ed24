//! Bad input: the program prints one line that names the fault and the remedy, and exits with
//! status 1 or 2.

use std::fs;

use walvisor_testkit::process::assert_refused;
use walvisor_tests::{QemuNbd, have, run_sessions};

use crate::kernel::{self, KernelAction};
use crate::{has_kvm, stdout, test_dir, walvisor};

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
fn a_bad_kernel_initrd_or_command_line_is_named_with_what_is_wrong() {
    if !has_kvm() {
        return;
    }
    let dir = &test_dir();
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
    for (name, image) in [
        ("empty", &b""[..]),
        ("text", &[b'x'; 4096]),
        ("gzip", b"\x1f\x8b\x08\0compressed"),
        ("bz-cut", &bzimage[..1200]),
        ("bz-head", &bzimage[..0x210]),
        ("bz-old", &old),
        ("bz-wraps", &wrapping),
        ("bz-large", &large),
        ("elf-cut", &vmlinux[..vmlinux.len() - 70]),
        ("elf-head", &vmlinux[..40]),
        ("elf-segments", &segments),
        ("elf-high", &high),
        ("elf-plain", &no_note),
        ("whole", &bzimage),
        ("initrd", &vec![0; 5 << 20]),
    ] {
        kernel::save(dir, name, image);
    }
    run_sessions("kernels", dir, []);
    let long = "x".repeat(2048);
    let run = "run --memory 4M --console off --kernel";
    let whole = dir.join("whole");
    let rest = [whole.as_os_str(), "--cmdline".as_ref(), long.as_ref()];
    let parts = ["2048 bytes", "2047", "--cmdline"];
    assert_refused(&walvisor(run, &rest), 1, &parts);
}

/// Nothing is made, and no file is changed, for a run that has a bad kernel, initrd, console or disk.
#[test]
fn a_run_that_does_not_begin_changes_nothing() {
    let dir = &test_dir();
    let bzimage = kernel::bzimage(KernelAction::PowerOff);
    let files = [
        ("raw.img", &[7; 4096][..]),
        ("whole", &bzimage),
        ("cut", &bzimage[..1200]),
        ("old-metrics", b"old"),
        ("odd.img", &[7; 513]),
        ("held.img", &[7; 1024]),
    ];
    for (name, contents) in files {
        fs::write(dir.join(name), contents).unwrap();
    }
    run_sessions("raw-images", dir, []);
    if have("qemu-nbd", "qemu-utils") {
        let _held = QemuNbd::start(dir, "held.img");
        let [whole, held] = ["whole", "held.img"].map(|name| dir.join(name));
        let disk = format!("path={}", held.display());
        let rest = [whole.as_os_str(), "--disk".as_ref(), disk.as_ref()];
        let parts = ["held.img", "QEMU", "open for writing", "fuser -v"];
        let run = "run --memory 4M --console off --kernel";
        assert_refused(&walvisor(run, &rest), 1, &parts);
    }
    for (name, contents) in files {
        assert_eq!(fs::read(dir.join(name)).unwrap(), contents, "{name}");
        assert!(
            !fs::exists(dir.join(format!("{name}.wal"))).unwrap(),
            "{name}"
        );
    }
}
