//! `walvisor-guest-images boot`: a guest of one's own from its root image, on any machine. It is talked to on its console,
//! what it writes is in the image, and SIGTERM ends all that the program has started.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use walvisor_guest_images::{obstacle, program};
use walvisor_testkit::Process;
use walvisor_testkit::process::client;
use walvisor_tests::{binary, have, succeed};

const INIT: &str = "#!/bin/sh
/bin/busybox --install -s /bin
printf 'name? '
read name
echo \"hello, $name\" >/greeting
mount -o remount,ro /
poweroff -f
";

/// Makes `disk.img`, a root file system of busybox and `INIT`.
fn root_image(dir: &Path) {
    for name in ["bin", "dev", "proc", "root", "run", "sbin", "sys"] {
        fs::create_dir_all(dir.join("root").join(name)).unwrap();
    }
    let busybox = client(dir, "sh", &["-c", "command -v busybox"]);
    fs::copy(busybox.trim(), dir.join("root/bin/busybox")).unwrap();
    symlink("busybox", dir.join("root/bin/sh")).unwrap();
    fs::write(dir.join("root/sbin/init"), INIT).unwrap();
    client(dir, "chmod", &["755", "root/sbin/init"]);
    client(
        dir,
        "mke2fs",
        &["-q", "-t", "ext4", "-d", "root", "disk.img", "64M"],
    );
}

/// Starts the program with these words after `boot`.
fn boot(dir: &Path, words: &[&str]) -> (Process, ChildStdout) {
    // It takes the walvisor that is beside it.
    let _ = binary();
    let mut command = Command::new(program("walvisor-guest-images", "dev").unwrap());
    command
        .arg("boot")
        .args(words)
        .env_remove("WALVISOR")
        .current_dir(dir)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut child = Process::spawn(&mut command);
    let output = child.stdout.take().unwrap();
    (child, output)
}

/// Reads until `words` come, which may be a part of a line.
#[track_caller]
fn read_until(output: &mut ChildStdout, words: &str) {
    let (mut seen, mut bytes) = (String::new(), [0; 4096]);
    while !seen.contains(words) {
        let count = output.read(&mut bytes).unwrap();
        assert!(count > 0, "{words:?} never came: {seen}");
        seen += &String::from_utf8_lossy(&bytes[..count]);
    }
}

#[test]
fn a_root_image_boots_and_keeps_what_is_written() {
    if let Some(why) = obstacle() {
        return println!("skipped: {why}");
    }
    if !have("busybox", "busybox-static") || !have("debugfs", "e2fsprogs") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    root_image(dir);
    let (mut child, mut output) = boot(dir, &["disk.img"]);
    let mut input = child.stdin.take().unwrap();
    read_until(&mut output, "name? ");
    input.write_all(b"Ada\n").unwrap();
    std::io::copy(&mut output, &mut std::io::stdout()).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(0));
    assert!(succeed(dir, "disk check disk.img").contains("clean"));
    let greeting = client(dir, "debugfs", &["-R", "cat /greeting", "disk.img"]);
    assert_eq!(greeting, "hello, Ada\n");

    // Without an init there is a shell. SIGTERM to the program ends the guest, and leaves no process and no lock.
    let (mut child, mut output) = boot(dir, &["disk.img", "--append", "init=/none"]);
    read_until(&mut output, "has no /none: a shell in its place");
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    // The pipe ends with the last process that has it.
    std::io::copy(&mut output, &mut std::io::stdout()).unwrap();
    let status = child.wait().unwrap().code();
    assert_eq!(status, Some(143));
    assert!(succeed(dir, "disk check disk.img").contains("clean"));
}
