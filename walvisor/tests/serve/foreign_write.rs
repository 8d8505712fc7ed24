//! Another program writes to the image of a disk whose daemon was killed. The log's records must
//! not be copied over that unasked.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use walvisor_testkit::nbd::RawClient;
use walvisor_testkit::process::succeed;
use walvisor_tests::have;

use super::{Daemon, client, noise, text, walvisor};

const SIZE: u64 = 2 << 30;
/// Where the client writes: in the middle of the file system's free space.
const AT: u64 = 1_500_000_256 / 512 * 512;

/// A disk of 2 GiB with a file system, and a write that only its log has.
fn killed(dir: &Path) {
    let raw = dir.join("raw");
    File::create(&raw).unwrap().set_len(SIZE).unwrap();
    client(dir, "mkfs.ext4", &["-q", "raw"]);
    succeed(dir, "disk import disk.img raw");
    fs::remove_file(raw).unwrap();
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    let mut nbd = RawClient::extended(&dir.join("s"));
    nbd.write(1, AT, &noise(4096));
    nbd.flush(2);
    daemon.kill();
    // The image's time counts if it is more than five seconds later.
    thread::sleep(Duration::from_secs(6));
}

/// What each command says now.
#[track_caller]
fn told(dir: &Path) -> String {
    let mut told = String::new();
    for command in ["info", "checkpoint", "snapshots", "check"] {
        let output = walvisor(dir, &format!("disk {command} disk.img"));
        told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{command}: {told}");
        let parts = [
            "another program, or a mount, has written to it since the log did",
            "the log in disk.img.wal holds 1 record of its disk; put the image that they belong to \
             back, or discard them with: walvisor disk discard disk.img",
        ];
        for part in parts {
            assert!(told.contains(part), "{command}: {told}");
        }
    }
    told
}

#[test]
fn a_file_that_a_mount_adds_to_a_killed_disks_image_is_not_overwritten() {
    if !have("mkfs.ext4", "e2fsprogs") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    killed(dir);
    assert!(succeed(dir, "disk check disk.img").contains("1 record"));
    let mounted = dir.join("mounted");
    fs::create_dir(&mounted).unwrap();
    let with_file = |act: &dyn Fn(&Path)| {
        client(dir, "mount", &["-o", "loop", "disk.img", "mounted"]);
        act(&mounted.join("mine"));
        client(dir, "umount", &["mounted"]);
    };
    with_file(&|file| fs::write(file, "kept").unwrap());
    told(dir);
    let discarded = succeed(dir, "disk discard disk.img --yes");
    assert!(discarded.contains("discarded 1 record"), "{discarded}");
    with_file(&|file| assert_eq!(fs::read_to_string(file).unwrap(), "kept"));
    assert!(succeed(dir, "disk check disk.img").contains("clean"));
}

#[test]
fn an_image_of_which_only_the_time_has_changed_can_be_used_again() {
    if !have("mkfs.ext4", "e2fsprogs") {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    killed(dir);
    client(dir, "touch", &["disk.img"]);
    let told = told(dir);
    let touch = told.split_once("set it back with: ").unwrap().1;
    let touch = touch.split_once(')').unwrap().0;
    client(dir, "sh", &["-c", touch]);
    succeed(dir, "disk checkpoint disk.img");
    let mut found = vec![0; 4096];
    let image = File::open(dir.join("disk.img")).unwrap();
    image.read_exact_at(&mut found, AT).unwrap();
    assert!(found == noise(4096));
}
