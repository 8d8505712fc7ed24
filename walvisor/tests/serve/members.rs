//! Disks that are added to a daemon and removed from it.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use serde_json::json;
use walvisor_testkit::nbd::RawClient;
use walvisor_tests::run_sessions;

use super::{Daemon, create, ctl, ctl_refused, read, succeed};

/// A client of another disk on the same log notices nothing of it.
#[test]
fn a_disk_comes_and_goes_beside_a_writer() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for disk in ["stays", "comes"] {
        create(dir, disk, "4M --log log");
    }
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk-dir . --disk path=stays,log=log,socket=s",
    );
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let mut client = RawClient::extended_to(&dir.join("s"), "stays");
            let mut number = 0;
            while !over.load(Ordering::SeqCst) {
                number += 1;
                client.write(number, number % 64 * 4096, &[number as u8; 4096]);
                client.flush(number);
            }
        });
        for round in 1..=5 {
            let added = ctl(dir, "add-disk path=comes,log=log,socket=s");
            assert_eq!(
                (&added["disk"], &added["log"]),
                (&"comes".into(), &"log".into())
            );
            let mut client = RawClient::extended_to(&dir.join("s"), "comes");
            assert_eq!(read(&mut client, 0, 4096), [round - 1; 4096]);
            // Nothing but its removal makes this durable.
            client.write(1, 0, &[round; 4096]);
            let removed = ctl(dir, "remove-disk comes");
            assert_eq!(
                removed,
                json!({ "disk": "comes", "image": "complete", "log": "log" })
            );
            assert!(client.is_closed());
            // The image can be used elsewhere at once, as a raw one.
            succeed(dir, "disk export --force comes copy");
            assert_eq!(fs::read(dir.join("copy")).unwrap()[..4096], [round; 4096]);
        }
        over.store(true, Ordering::SeqCst);
        writer.join().unwrap();
    });
    assert_eq!(daemon.stop(), "");
}

#[test]
fn impossible_additions_and_removals_are_one_line_errors() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for sub in ["in", "out"] {
        fs::create_dir(dir.join(sub)).unwrap();
    }
    for disk in ["first", "in/a", "in/b", "out/c"] {
        create(dir, disk, "1M");
    }
    std::os::unix::fs::symlink("../out/c", dir.join("in/link")).unwrap();
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk-dir in --disk path=first,socket=s",
    );
    assert_eq!(
        ctl(dir, "add-disk path=in/a,socket=s")["size_bytes"],
        1 << 20
    );
    run_sessions("members", dir, []);
    ctl(dir, "pause");
    ctl_refused(
        dir,
        "add-disk path=in/b,socket=s",
        &["the disks are paused"],
    );
    // A disk that is paused can go.
    ctl(dir, "remove-disk in/a");
    ctl(dir, "resume");
    // None of them has left anything behind, and the first disk may go too.
    assert_eq!(ctl(dir, "add-disk path=in/b,socket=s")["log"], "in/b.wal");
    ctl(dir, "remove-disk first");
    ctl(dir, "remove-disk in/b");
    ctl_refused(
        dir,
        "remove-disk in/b",
        &["no disk 'in/b': there are no disks"],
    );
    assert_eq!(ctl(dir, "stats")["disks"], json!([]));
    assert!(!dir.join("out/log").exists());
    assert_eq!(daemon.stop(), "");

    let daemon = Daemon::start(dir, "--control ctl --disk path=first,socket=s");
    for (disk, part) in [
        (
            "path=in/a",
            "start it with --disk-dir DIR, a directory above in/a",
        ),
        ("backend=ram,size=1M", "start it with --disk-dir DIR\n"),
    ] {
        ctl_refused(dir, &format!("add-disk {disk},socket=s"), &[part]);
    }
    // Without the option disks can go all the same.
    assert_eq!(ctl(dir, "remove-disk first")["image"], "complete");
    assert_eq!(daemon.stop(), "");
    run_sessions("disk-dir", dir, []);
}
