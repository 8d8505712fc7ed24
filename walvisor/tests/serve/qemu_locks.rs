//! An image has one writer, or only readers, whether they are Walvisor's or QEMU's programs.

use std::fs;
use std::path::Path;
use std::process::Command;

use walvisor_tests::{QemuNbd, have};

use super::kill::StepProgram;
use super::{Daemon, client, create, foreign, run_client, text, walvisor};

/// Whether QEMU's programs are here.
fn have_qemu() -> bool {
    have("qemu-nbd", "qemu-utils") && have("qemu-system-x86_64", "qemu-system-x86")
}

/// The command for a QEMU whose guest never starts, with a disk.
fn qemu_command(dir: &Path, drive: &str) -> Command {
    let mut command = foreign(dir, "qemu-system-x86_64");
    command
        .args(["-accel", "tcg", "-nodefaults", "-S", "-display", "none"])
        .args(["-monitor", "stdio"])
        .args(["-drive", &format!("format=raw,if=virtio,{drive}")]);
    command
}

/// QEMU, with the disk open.
fn qemu(dir: &Path, drive: &str) -> StepProgram {
    let mut qemu = StepProgram::start(&mut qemu_command(dir, drive));
    qemu.wait_for("(qemu) ");
    qemu
}

/// Asserts that `walvisor` refuses the image at `path` because of a program that uses it for
/// `what`.
#[track_caller]
fn refused_here(dir: &Path, arguments: &str, path: &str, what: &str) {
    let output = walvisor(dir, arguments);
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{arguments}: {error}");
    assert_eq!(error.lines().count(), 1, "{arguments}: {error}");
    let parts = [
        &format!(
            "{path}: QEMU, qemu-nbd or another program with QEMU's locks has it open for {what};"
        ),
        "end that program",
        &format!("'fuser -v {path}' names it"),
    ];
    for part in parts {
        assert!(error.contains(part), "{arguments}: {part}: {error}");
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
    let with = |program: &str, arguments: &str| {
        let mut command = foreign(dir, program);
        command.args(arguments.split_whitespace()).arg(path);
        command
    };
    let socket = dir.join("q").display().to_string();
    refused_there(with("qemu-nbd", &format!("-f raw -t -k {socket}")));
    refused_there(with("qemu-nbd", &format!("-r -f raw -t -k {socket}")));
    refused_there(with("qemu-io", "-f raw -c quit"));
    refused_there(with("qemu-img", "bench -f raw -c 1"));
    refused_there(with("qemu-img", "bench -w -f raw -c 1"));
    refused_there(qemu_command(dir, &format!("file={path}")));
    refused_there(qemu_command(dir, &format!("file={path},readonly=on")));
}

#[test]
fn an_image_that_qemu_writes_is_refused_by_writers_and_readers() {
    if !have_qemu() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "1M");
    create(dir, "other.img", "1M");
    let before = fs::read(dir.join("disk.img.wal/control")).unwrap();
    let nbd = QemuNbd::start(dir, "disk.img");
    for arguments in [
        "serve nbd --disk path=disk.img,socket=s",
        "serve nbd --disk path=disk.img,backend=raw,socket=s",
        "serve nbd --disk path=disk.img,backend=raw,readonly=on,socket=s",
        "serve vhost-user --disk path=disk.img,socket=s",
    ] {
        refused_here(dir, arguments, "disk.img", "writing");
    }
    drop(nbd);
    let vm = qemu(dir, "file=disk.img");
    for arguments in [
        "serve nbd --disk path=disk.img,socket=s",
        "disk check disk.img",
        "disk export disk.img out",
        "disk import new.img disk.img",
        "disk resize disk.img --size 2M",
        "disk export other.img disk.img --force",
    ] {
        refused_here(dir, arguments, "disk.img", "writing");
    }
    drop(vm);
    let after = fs::read(dir.join("disk.img.wal/control")).unwrap();
    assert!(before == after, "a refusal changes nothing");
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    assert_eq!(daemon.stop(), "");
}

#[test]
fn qemu_refuses_an_image_that_is_open_for_writing_here() {
    if !have_qemu() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "1M");
    for backend in ["wal", "raw"] {
        let disk = format!("path=disk.img,backend={backend},socket=s");
        let daemon = Daemon::start(dir, &format!("--disk {disk}"));
        refused_by_qemu(dir, "disk.img");
        assert_eq!(daemon.stop(), "");
        client(
            dir,
            "qemu-img",
            &["bench", "-f", "raw", "-c", "1", "disk.img"],
        );
    }
    let daemon = Daemon::start_door(dir, "vhost-user", "--disk path=disk.img,socket=s");
    refused_by_qemu(dir, "disk.img");
    daemon.kill();
    // A kill releases the locks.
    drop(qemu(dir, "file=disk.img,readonly=on"));
}

#[test]
fn readers_share_an_image_and_keep_writers_out() {
    if !have_qemu() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "1M");
    let reader = "--disk path=disk.img,backend=raw,readonly=on,socket=";
    let [first, second] = ["s", "t"].map(|at| Daemon::start(dir, &format!("{reader}{at}")));
    let nbd = QemuNbd::start(dir, "--read-only disk.img");
    let vm = qemu(dir, "file=disk.img,readonly=on");
    for arguments in [
        "disk check disk.img",
        "disk export disk.img out",
        "disk import new.img disk.img",
    ] {
        let output = walvisor(dir, arguments);
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    refused_there(qemu_command(dir, "file=disk.img"));
    let writer = "serve nbd --disk path=disk.img,backend=raw,socket=u";
    let output = walvisor(dir, writer);
    let error = text(&output.stderr);
    assert!(error.contains("already open elsewhere"), "{error}");
    // The same with each side alone.
    assert_eq!([first.stop(), second.stop()], ["", ""]);
    drop(vm);
    refused_here(dir, writer, "disk.img", "reading");
    drop(nbd);
    let reader = Daemon::start(dir, &format!("{reader}s"));
    refused_there(qemu_command(dir, "file=disk.img"));
    assert_eq!(reader.stop(), "");
}

/// A loop device. Dropping this detaches it.
struct LoopDevice(String);

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn block_devices_are_locked_in_the_same_way() {
    if !have_qemu() || !have("losetup", "mount") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let backing = fs::File::create(dir.join("backing")).unwrap();
    backing.set_len(1 << 20).unwrap();
    let output = run_client(dir, "losetup", &["--find", "--show", "backing"]);
    if !output.status.success() {
        return println!("skipped: no loop device: {}", text(&output.stderr));
    }
    let device = LoopDevice(text(&output.stdout).trim().to_owned());
    let path = device.0.as_str();
    let disk = format!("path={path},backend=raw");
    let nbd = QemuNbd::start(dir, path);
    for options in ["", ",readonly=on"] {
        let serve = format!("serve nbd --disk {disk},socket=s{options}");
        refused_here(dir, &serve, path, "writing");
    }
    let import = format!("disk import new.img {path}");
    refused_here(dir, &import, path, "writing");
    drop(nbd);
    let daemon = Daemon::start(dir, &format!("--disk {disk},socket=s"));
    refused_by_qemu(dir, path);
    assert_eq!(daemon.stop(), "");
    let [first, second] =
        ["s", "t"].map(|at| Daemon::start(dir, &format!("--disk {disk},readonly=on,socket={at}")));
    drop(QemuNbd::start(dir, &format!("--read-only {path}")));
    let output = walvisor(dir, &import);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!([first.stop(), second.stop()], ["", ""]);
}
