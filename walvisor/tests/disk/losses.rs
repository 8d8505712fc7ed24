//! Commands that would lose something say so, and want to be told twice.

use walvisor_storage::{DiskOptions, Store, StoreOptions};
use walvisor_testkit::queue::{flush, write};

use crate::{done, json, refused, unclosed, walvisor};

/// A disk whose log was forgotten: each command names the log, and none makes a second one or gives
/// anything up.
#[test]
fn a_command_without_the_disks_log_names_it_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    done(dir, "disk create b.img --size 8M --log shared --retain 24h");
    // Closed, with its newest bytes in the log, because that keeps history.
    let (log, disk) = (dir.join("shared"), dir.join("b.img"));
    let store = Store::open(&log, &[DiskOptions::new(&disk)], &StoreOptions::default()).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    write(&mut port, 0, 6, 8);
    flush(&mut port);
    drop(port);
    store.close().unwrap();
    let named = [
        "b.img: the disk is on the log in ",
        "/shared, not in b.img.wal; name that log",
    ];
    for command in [
        "disk info b.img",
        "disk check b.img",
        "disk checkpoint b.img",
        "disk discard b.img --yes",
        "disk leave b.img",
        "disk resize b.img --size 16M",
        "disk export b.img raw",
        "disk snapshot b.img now",
        "serve vhost-user --disk path=b.img,socket=s",
    ] {
        refused(dir, command, 1, &named);
    }
    assert!(!dir.join("b.img.wal").exists());
    let info = json(&done(dir, "disk info b.img --log shared --json"));
    assert_eq!(info["log"]["records"], 1);
}

#[test]
fn a_discard_says_what_would_be_lost() {
    let dir = tempfile::tempdir().unwrap();
    let crashed = unclosed(dir.path());
    let before = std::fs::read(crashed.join("disk.img.wal/control")).unwrap();
    let told = [
        "nothing is discarded yet",
        "would lose 5 records (12 KiB) in the log disk.img.wal",
        "--yes",
    ];
    refused(&crashed, "disk discard disk.img", 1, &told);
    assert!(std::fs::read(crashed.join("disk.img.wal/control")).unwrap() == before);
    let text = done(&crashed, "disk discard disk.img --yes");
    assert!(text.contains("discarded 5 records (12 KiB)"), "{text}");
    let report = json(&done(&crashed, "disk discard --yes disk.img --json"));
    assert_eq!(report["discarded_records"], 0);
    assert_eq!(report["image_fits"], true);
}

/// The image is removed while its log, which has records of it, stays.
#[test]
fn a_new_disk_never_gets_records_of_a_deleted_one() {
    let dir = tempfile::tempdir().unwrap();
    let crashed = unclosed(dir.path());
    std::fs::write(crashed.join("raw"), vec![5; 8 << 20]).unwrap();
    std::fs::remove_file(crashed.join("disk.img")).unwrap();
    let parts = &["disk.img", "unapplied", "disk discard"];
    refused(&crashed, "disk import disk.img raw", 1, parts);
    refused(&crashed, "disk create disk.img --size 8M", 1, parts);
    // Once they are given up, the path is free.
    assert!(
        walvisor(&crashed, "disk discard disk.img --yes")
            .status
            .success()
    );
    done(&crashed, "disk import disk.img raw");
    let info = json(&done(&crashed, "disk info disk.img --json"));
    assert_eq!(info["log"]["disks"].as_array().unwrap().len(), 1);
}
