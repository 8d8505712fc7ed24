//! Kernels that boot, and every way in which a run ends.

use std::os::unix::process::ExitStatusExt;
use std::process::Output;

use rustix::process::Signal;
use walvisor_testkit::Process;
use walvisor_testkit::process::{assert_says, create};
use walvisor_tests::{have, metrics_complaints};

use crate::kernel::{self, KernelAction};
use crate::{command, has_kvm, stderr, stdout, wait_for};

/// Boots a kernel of each format that does `then`, and returns the outputs.
fn boot_both(then: KernelAction, arguments: &[&str]) -> Vec<Output> {
    let directory = tempfile::tempdir().unwrap();
    [
        ("bzImage", kernel::bzimage(then)),
        ("vmlinux", kernel::vmlinux(then, true)),
    ]
    .into_iter()
    .map(|(name, image)| {
        let path = kernel::save(directory.path(), name, &image);
        let kernel = path.to_str().unwrap();
        let mut all = vec!["run", "--memory", "4M", "--kernel", kernel];
        all.extend(arguments);
        command(all).output().expect("walvisor starts")
    })
    .collect()
}

/// Both kernel formats boot. Powering off and every kind of reset are success, and so is a triple
/// fault of any vCPU once the guest has used a device, which the program tells of.
#[test]
fn both_kernel_formats_boot_and_end_with_success() {
    if !has_kvm() {
        return;
    }
    for (then, cpus, told) in [
        (KernelAction::PowerOff, "1", ""),
        (KernelAction::ResetRegister, "2", ""),
        (KernelAction::ResetKeyboard, "2", ""),
        (KernelAction::Fault, "1", "triple fault"),
        (KernelAction::FaultElsewhere, "2", "vCPU 1: triple fault"),
    ] {
        for output in boot_both(then, &["--cmdline", "hello there", "--cpus", cpus]) {
            let error = stderr(&output);
            assert_eq!(output.status.code(), Some(0), "{error}");
            assert_eq!(stdout(&output), "hello there", "{error}");
            assert!(error.contains(told), "{told}: {error}");
        }
    }
}

/// A guest that jumps where nothing is; and one that prints nothing, for want of a command line, and
/// so has used no device when it faults.
#[test]
fn a_crash_is_reported_with_rip_and_cause() {
    if !has_kvm() {
        return;
    }
    for (then, words, parts) in [
        (
            KernelAction::JumpAstray,
            "x",
            ["vCPU 0", "RIP 0xb0000000", "instruction bytes"],
        ),
        (KernelAction::Fault, "", ["vCPU 0", "RIP 0x100", "0f 0b"]),
    ] {
        for output in boot_both(then, &["--cmdline", words]) {
            let error = stderr(&output);
            assert_eq!(output.status.code(), Some(1), "{error}");
            assert_says(&error, &parts);
            assert_eq!(error.matches("walvisor: vCPU").count(), 1, "{error}");
        }
    }
}

#[test]
fn the_console_can_go_to_a_file_or_nowhere() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let log = directory.path().join("console.log");
    let target = format!("file:{}", log.display());
    for output in boot_both(
        KernelAction::PowerOff,
        &["--console", &target, "--cmdline", "logged;"],
    ) {
        assert!(
            output.status.success() && output.stdout.is_empty(),
            "{}",
            stderr(&output)
        );
    }
    assert_eq!(std::fs::read_to_string(log).unwrap(), "logged;logged;");
    for output in boot_both(KernelAction::PowerOff, &["--console", "off"]) {
        assert!(output.status.success() && output.stdout.is_empty());
    }
}

#[test]
fn metrics_tell_exits_disks_and_the_time_to_the_first_instruction() {
    if !has_kvm() {
        return;
    }
    let arguments = "--console off --metrics - --disk backend=ram,size=1M,serial=one,transport=pci";
    let arguments: Vec<&str> = arguments.split(' ').collect();
    let lints = have("promtool", "prometheus");
    for output in boot_both(KernelAction::PowerOff, &arguments) {
        let text = stdout(&output);
        if lints {
            assert_eq!(metrics_complaints(&text), "", "{text}");
        }
        let value = |name: &str| -> f64 {
            let mut values = text.lines().filter_map(|line| line.strip_prefix(name));
            let value = values.find_map(|value| value.strip_prefix(' '));
            value.expect(name).parse().expect(name)
        };
        // The guest powers off with a port write, and uses no disk.
        assert!(value("walvisor_exits_total{vcpu=\"0\",reason=\"port_write\"}") >= 1.0);
        let requests = "walvisor_block_requests_total{disk=\"one\",transport=\"pci\"}";
        assert_eq!(value(requests), 0.0);
        assert!(value("walvisor_start_to_first_instruction_seconds") > 0.0);
        assert!(value("walvisor_vmm_resident_bytes") > 0.0);
        assert!(value("walvisor_guest_resident_bytes") < (4 << 20) as f64);
    }
}

#[test]
fn a_signal_stops_a_running_guest_and_leaves_its_disk_closed() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let kernel = kernel::save(
        directory.path(),
        "bzImage",
        &kernel::bzimage(KernelAction::Echo),
    );
    let disk = directory.path().join("disk.img");
    create(directory.path(), "disk.img", "1M");
    let archive = directory.path().join("archive");
    std::fs::create_dir(&archive).unwrap();
    let url = format!("file://{}", archive.display());
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let console = directory.path().join(format!("console-{signal:?}"));
        let console_target = format!("file:{}", console.display());
        let spec = format!("path={},archive={url},archive-sync=on", disk.display());
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_walvisor"));
        let words = "run --memory 4M --cpus 2 --cmdline up --kernel";
        command.args(words.split(' ')).arg(&kernel);
        command.args(["--disk", &spec, "--console", &console_target]);
        command.stdin(std::process::Stdio::null());
        let mut child = Process::spawn(&mut command);
        wait_for("the guest's print", || {
            std::fs::read_to_string(&console).unwrap_or_default() == "up"
        });
        child.signal(signal);
        let status = child.wait().unwrap();
        assert_eq!(
            (status.code(), status.signal()),
            (Some(0), None),
            "{signal:?}"
        );
    }
    let checked = command(["disk", "check", disk.to_str().unwrap()])
        .output()
        .unwrap();
    assert!(checked.status.success(), "{}", stderr(&checked));
    let archived = command(["archive", "verify", &url]).output().unwrap();
    assert!(archived.status.success(), "{}", stderr(&archived));
}

#[test]
fn a_raw_image_is_a_disk_without_a_log() {
    if !has_kvm() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let image = directory.path().join("disk.img");
    std::fs::write(&image, [7; 8192]).unwrap();
    for transport in ["mmio", "pci"] {
        let disk = format!("path={},backend=raw,transport={transport}", image.display());
        for output in boot_both(KernelAction::PowerOff, &["--cmdline", "x", "--disk", &disk]) {
            assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
        }
    }
    assert_eq!(std::fs::read(&image).unwrap(), [7; 8192]);
    assert!(!directory.path().join("disk.img.wal").exists());
}

/// A guest may have disks as they were, with and without a scratch file.
#[test]
fn a_guest_gets_disks_as_of_points() {
    if !has_kvm() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    create(dir.path(), "disk.img", "1M --retain all");
    let disk = |at: &str| format!("path={},{at}", dir.path().join("disk.img").display());
    let (past, scratch) = (disk("at=lsn:0"), disk("at=lsn:0,scratch=on,transport=pci"));
    for output in boot_both(
        KernelAction::PowerOff,
        &["--disk", &past, "--disk", &scratch],
    ) {
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
    for output in boot_both(KernelAction::PowerOff, &["--disk", &disk("at=lsn:1")]) {
        assert_eq!(output.status.code(), Some(1));
        let error = stderr(&output);
        assert!(error.contains("the only point is LSN 0"), "{error}");
    }
}
