//! A guest may write what it likes to its first sector: its disk is raw all the same.

use std::fs;
use std::path::Path;

use walvisor_testkit::MemoryFs;
use walvisor_testkit::nbd::RawClient;

use super::{Daemon, MIB, create, refused, succeed, test_dir};

/// How a guest's first sector begins when cryptsetup has encrypted the whole disk.
const LUKS: &[u8] = b"LUKS\xba\xbe\0\x02";

#[test]
fn a_guest_that_encrypts_its_whole_disk_keeps_it() {
    let dir = tempfile::tempdir().unwrap();
    encrypts_and_keeps(dir.path(), true);
    if let Some(ramfs) = MemoryFs::ramfs() {
        encrypts_and_keeps(ramfs.path(), false);
    }
}

/// `marks`: the file system has extended attributes.
fn encrypts_and_keeps(dir: &Path, marks: bool) {
    create(dir, "created.img", "1M");
    fs::write(dir.join("raw"), vec![7; 1 << 20]).unwrap();
    succeed(dir, "disk import imported.img raw");
    // The first use of a raw image makes it a disk.
    fs::rename(dir.join("raw"), dir.join("used.img")).unwrap();
    let mut sector = vec![0; 512];
    sector[..LUKS.len()].copy_from_slice(LUKS);
    let names = ["created.img", "imported.img", "used.img"];
    let disks = names.map(|name| format!("--disk path={name},socket=s,serial={name} "));
    let serve = || Daemon::start(dir, &disks.concat());
    let first = serve();
    for name in names {
        let mut client = RawClient::extended_to(&dir.join("s"), name);
        client.write(1, 0, &sector);
        client.flush(2);
    }
    // After a kill the header is in the log only; after a clean end it is in the image.
    first.kill();
    serve().kill();
    assert_eq!(serve().stop(), "");
    serve().kill();
    assert_eq!(serve().stop(), "");
    for name in names {
        assert!(fs::read(dir.join(name)).unwrap().starts_with(LUKS));
        // The mark tells it without the log.
        if marks {
            let raw = format!("--disk path={name},backend=raw,socket=s");
            assert_eq!(Daemon::start(dir, &raw).stop(), "");
        }
        for command in ["info", "check", "checkpoint"] {
            succeed(dir, &format!("disk {command} {name}"));
        }
    }
}

#[test]
fn format_raw_is_remembered() {
    let dir = &test_dir();
    let mut bytes = vec![0; MIB as usize];
    bytes[..LUKS.len()].copy_from_slice(LUKS);
    fs::write(dir.join("disk.img"), &bytes).unwrap();
    let start = |keys: &str| {
        let daemon = Daemon::start(dir, &format!("--disk path=disk.img,socket=s{keys}"));
        assert_eq!(daemon.stop(), "");
    };
    start(",backend=raw,format=raw");
    let serve = "serve nbd --disk path=disk.img,socket=s";
    refused(dir, serve, 1, &["LUKS", "format=raw"]);
    assert!(!fs::exists(dir.join("disk.img.wal")).unwrap());
    start(",format=raw");
    start("");
    assert!(fs::read(dir.join("disk.img")).unwrap() == bytes);
}
