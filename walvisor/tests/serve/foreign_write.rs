//! Another program writes to the image of a disk whose daemon was killed. The log's records must
//! not be copied over that unasked.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use walvisor_testkit::nbd::RawClient;

use super::{Daemon, client, create, noise, refused, succeed, test_dir};

/// Where the client writes, and where the other program does.
const AT: u64 = 5 << 20;
const OTHER: u64 = 9 << 20;

/// Kills the daemon of a disk of which only its log has a write.
fn killed(dir: &Path) -> File {
    create(dir, "disk.img", "16M");
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    let mut nbd = RawClient::extended(&dir.join("s"));
    nbd.write(1, AT, &noise(4096));
    nbd.flush(2);
    daemon.kill();
    assert!(succeed(dir, "disk check disk.img").contains("1 record"));
    let mut options = fs::OpenOptions::new();
    let image = options.read(true).write(true).open(dir.join("disk.img"));
    image.unwrap()
}

/// Makes the image's time one that no write of the log has, and asserts that each command refuses
/// it. Returns the last error.
#[track_caller]
fn told_later(dir: &Path, image: &File) -> String {
    let later = SystemTime::now() + Duration::from_secs(60);
    image.set_modified(later).unwrap();
    let parts = [
        "another program, or a mount, has written to it since the log did",
        "the log in disk.img.wal holds 1 record of its disk; put the image that they belong to \
         back; if it is this one, say so with: walvisor disk adopt disk.img; or write both into a \
         new file with: walvisor disk export disk.img NEW --log-wins; or discard them with: \
         walvisor disk discard disk.img",
    ];
    let commands = ["info", "checkpoint", "snapshots", "check"];
    let told = commands.map(|command| refused(dir, &format!("disk {command} disk.img"), 1, &parts));
    told[3].clone()
}

fn bytes(image: &File, at: u64) -> Vec<u8> {
    let mut found = vec![0; 4096];
    image.read_exact_at(&mut found, at).unwrap();
    found
}

#[test]
fn what_another_program_wrote_is_not_overwritten() {
    let dir = &test_dir();
    let image = killed(dir);
    image.write_all_at(&[7; 4096], OTHER).unwrap();
    told_later(dir, &image);
    let discarded = succeed(dir, "disk discard disk.img --yes");
    assert!(discarded.contains("discarded 1 record"), "{discarded}");
    assert_eq!(bytes(&image, OTHER), [7; 4096]);
    assert_eq!(bytes(&image, AT), [0; 4096]);
    assert!(succeed(dir, "disk check disk.img").contains("clean"));
}

/// Its user knows that the image is the disk's all the same.
#[test]
fn an_image_is_adopted_with_the_records_of_the_log() {
    let dir = &test_dir();
    let image = killed(dir);
    image.write_all_at(&[7; 4096], OTHER).unwrap();
    told_later(dir, &image);
    let parts = ["nothing is adopted yet", "1 record", "add --yes"];
    refused(dir, "disk adopt disk.img", 1, &parts);
    let adopted = succeed(dir, "disk adopt disk.img --yes");
    assert!(adopted.contains("is this image and 1 record"), "{adopted}");
    succeed(dir, "disk checkpoint disk.img");
    assert_eq!(bytes(&image, OTHER), [7; 4096]);
    assert_eq!(bytes(&image, AT), noise(4096));
}

#[test]
fn an_image_of_which_only_the_time_has_changed_can_be_used_again() {
    let dir = &test_dir();
    let image = killed(dir);
    let told = told_later(dir, &image);
    let touch = told.split_once("set it back with: ").unwrap().1;
    let touch = touch.split_once(')').unwrap().0;
    client(dir, "sh", &["-c", touch]);
    succeed(dir, "disk checkpoint disk.img");
    assert_eq!(bytes(&image, AT), noise(4096));
}
