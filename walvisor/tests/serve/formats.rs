//! A guest may write what it likes to its first sector: its disk is raw all the same.

use std::fs;
use std::path::Path;

use walvisor_testkit::MemoryFs;
use walvisor_testkit::nbd::RawClient;

use super::{Daemon, MIB, create, text, walvisor};

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
    let import = walvisor(dir, "disk import imported.img raw");
    assert!(import.status.success(), "{}", text(&import.stderr));
    // The first use of a raw image makes it a disk.
    fs::rename(dir.join("raw"), dir.join("used.img")).unwrap();
    let mut sector = vec![0; 512];
    sector[..LUKS.len()].copy_from_slice(LUKS);
    for name in ["created.img", "imported.img", "used.img"] {
        let serve = || Daemon::start(dir, &format!("--disk path={name},socket=s"));
        let first = serve();
        let mut client = RawClient::extended(&dir.join("s"));
        client.write(1, 0, &sector);
        client.flush(2);
        drop(client);
        // After a kill the header is in the log only; after a clean end it is in the image.
        first.kill();
        serve().kill();
        assert_eq!(serve().stop(), "");
        assert!(fs::read(dir.join(name)).unwrap().starts_with(LUKS));
        serve().kill();
        assert_eq!(serve().stop(), "");
        // The mark tells it without the log.
        if marks {
            let raw = format!("--disk path={name},backend=raw,socket=s");
            assert_eq!(Daemon::start(dir, &raw).stop(), "");
        }
        for command in ["info", "check", "checkpoint"] {
            let output = walvisor(dir, &format!("disk {command} {name}"));
            assert!(output.status.success(), "{}", text(&output.stderr));
        }
    }
}

#[test]
fn format_raw_is_remembered() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let mut bytes = vec![0; MIB as usize];
    bytes[..LUKS.len()].copy_from_slice(LUKS);
    fs::write(dir.join("disk.img"), &bytes).unwrap();
    let raw = "--disk path=disk.img,backend=raw,format=raw,socket=s";
    assert_eq!(Daemon::start(dir, raw).stop(), "");
    let refused = walvisor(dir, "serve nbd --disk path=disk.img,socket=s");
    let error = text(&refused.stderr);
    assert!(
        error.contains("LUKS") && error.contains("format=raw"),
        "{error}"
    );
    assert!(!fs::exists(dir.join("disk.img.wal")).unwrap());
    let said = "--disk path=disk.img,format=raw,socket=s";
    assert_eq!(Daemon::start(dir, said).stop(), "");
    assert_eq!(
        Daemon::start(dir, "--disk path=disk.img,socket=s").stop(),
        ""
    );
    assert!(fs::read(dir.join("disk.img")).unwrap() == bytes);
}
