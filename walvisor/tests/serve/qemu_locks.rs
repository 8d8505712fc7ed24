//! An image has one writer, or only readers, whether they are Walvisor's or QEMU's programs.

use std::fs;
use std::path::Path;
use std::process::Command;

use walvisor_tests::{QemuNbd, have};

use super::kill::StepProgram;
use super::{Daemon, client, create, foreign, refused, run_client, succeed, test_dir, text};

/// A QEMU whose guest never starts, with a disk.
fn qemu(dir: &Path, drive: &str) -> Command {
    let mut command = foreign(dir, "qemu-system-x86_64");
    command
        .args(["-accel", "tcg", "-nodefaults", "-S", "-display", "none"])
        .args(["-monitor", "stdio"])
        .args(["-drive", &format!("format=raw,if=virtio,{drive}")]);
    command
}

/// Asserts that `walvisor` refuses the image at `path` because of a program that uses it for
/// `what`.
#[track_caller]
fn refused_here(dir: &Path, arguments: &[&String], path: &str, what: &str) {
    let told = format!(
        "{path}: QEMU, qemu-nbd or another program with QEMU's locks has it open for {what};"
    );
    let parts = [
        &told,
        "end that program",
        &format!("'fuser -v {path}' names it"),
    ];
    for arguments in arguments {
        refused(dir, arguments, 1, &parts);
    }
}

/// Asserts that a program of QEMU refuses an image because of a lock.
#[track_caller]
fn refused_there(mut command: Command) {
    let output = command.output().expect("timeout(1) starts");
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{command:?}: {error}");
    assert!(
        error.contains("Failed to get") && error.contains("lock"),
        "{command:?}: {error}"
    );
}

/// Asserts that QEMU's programs refuse the image `path`, even for reading.
#[track_caller]
fn refused_by_qemu(dir: &Path, path: &str) {
    let socket = dir.join("q").display().to_string();
    for (program, arguments) in [
        ("qemu-nbd", &*format!("-f raw -t -k {socket}")),
        ("qemu-nbd", &format!("-r -f raw -t -k {socket}")),
        ("qemu-img", "bench -f raw -c 1"),
    ] {
        let mut command = foreign(dir, program);
        command.args(arguments.split_whitespace()).arg(path);
        refused_there(command);
    }
    refused_there(qemu(dir, &format!("file={path},readonly=on")));
}

/// With an image at `path`, which has a log or not.
fn share(dir: &Path, path: &str, has_log: bool) {
    let disk = format!("path={path},backend=raw");
    let serve = |disk: &str| format!("serve nbd --disk {disk},socket=w");
    let (writer, reader) = (serve(&disk), serve(&format!("{disk},readonly=on")));
    let import = format!("disk import new.img {path}");
    let of_a_log = [
        &serve(&format!("path={path}")),
        &import,
        &format!("disk resize {path} --size 2M"),
        &format!("disk export other.img {path} --force"),
    ];
    // QEMU writes.
    let nbd = QemuNbd::start(dir, path);
    if has_log {
        refused_here(dir, &of_a_log, path, "writing");
    } else {
        refused_here(dir, &[&writer, &reader], path, "writing");
    }
    drop(nbd);

    // Walvisor writes.
    for disk in &[&disk, &format!("path={path}")][..1 + usize::from(has_log)] {
        let daemon = Daemon::start(dir, &format!("--disk {disk},socket=s"));
        refused_by_qemu(dir, path);
        daemon.kill();
        // A kill releases the locks.
        client(dir, "qemu-img", &["bench", "-f", "raw", "-c", "1", path]);
    }
    // The log of the daemon that was killed is closed.
    if has_log {
        succeed(dir, &format!("disk checkpoint {path}"));
    }

    // All read.
    let readers = ["s", "t"].map(|socket| {
        let disk = format!("--disk {disk},readonly=on,socket={socket}");
        Daemon::start(dir, &disk)
    });
    let nbd = QemuNbd::start(dir, &format!("--read-only {path}"));
    succeed(dir, &import);
    refused_there(qemu(dir, &format!("file={path}")));
    refused(dir, &writer, 1, &["already open elsewhere"]);
    // The same with each side alone.
    assert_eq!(readers.map(Daemon::stop), ["", ""]);
    refused_here(dir, &[&writer], path, "reading");
    drop(nbd);
    let reader = Daemon::start(dir, &format!("--disk {disk},readonly=on,socket=s"));
    refused_there(qemu(dir, &format!("file={path}")));
    assert_eq!(reader.stop(), "");
}

fn have_qemu() -> bool {
    have("qemu-nbd", "qemu-utils") && have("qemu-system-x86_64", "qemu-system-x86")
}

#[test]
fn an_image_is_shared_with_qemu_by_readers_only() {
    if !have_qemu() {
        return;
    }
    let dir = &test_dir();
    create(dir, "disk.img", "1M");
    create(dir, "other.img", "1M");
    let control = || fs::read(dir.join("disk.img.wal/control")).unwrap();
    let before = control();
    let mut vm = StepProgram::start(&mut qemu(dir, "file=disk.img"));
    // Its first prompt may come before it has opened the disk.
    vm.say("info status");
    vm.wait_for("VM status: paused");
    let check = "disk check disk.img".to_owned();
    refused_here(dir, &[&check], "disk.img", "writing");
    drop(vm);
    assert!(before == control(), "a refusal changes nothing");
    share(dir, "disk.img", true);
}

/// A loop device. Dropping this detaches it.
struct LoopDevice(String);

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn a_block_device_is_shared_with_qemu_by_readers_only() {
    if !have_qemu() || !have("losetup", "mount") {
        return;
    }
    let dir = &test_dir();
    let backing = fs::File::create(dir.join("backing")).unwrap();
    backing.set_len(1 << 20).unwrap();
    let output = run_client(dir, "losetup", &["--find", "--show", "backing"]);
    if !output.status.success() {
        return println!("skipped: no loop device: {}", text(&output.stderr));
    }
    let device = LoopDevice(text(&output.stdout).trim().to_owned());
    share(dir, &device.0, false);
}
