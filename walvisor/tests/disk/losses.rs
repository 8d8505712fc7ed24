//! Commands that would lose something say so, and want to be told twice.

use walvisor_storage::default_log_dir;
use walvisor_tests::run_sessions;

use crate::{copy_image, crash, done, json, refused, unclosed, walvisor};

/// After a kill the newest bytes are in the log. What a copy of the image alone lacks is refused or
/// told; a command without the disk's log makes no other one and gives nothing up.
#[test]
fn what_would_be_lost_is_said_and_stays() {
    let dir = tempfile::tempdir().unwrap();
    let dir = unclosed(dir.path());
    let at = |name: &str| dir.join(name);
    let (disk, kept) = (at("disk.img"), at("kept"));
    crash(&default_log_dir(&disk), &[&disk], &kept);
    done(&kept, "disk checkpoint disk.img");
    copy_image(&kept.join("disk.img"), &at("closed.img"));
    copy_image(&disk, &at("marked.img"));
    std::fs::copy(&disk, at("copy.img")).unwrap();
    std::fs::remove_file(&disk).unwrap();
    std::fs::copy(at("copy.img"), &disk).unwrap();
    run_sessions("lost", &dir, []);
    for none in ["out", "new.img", "marked.img.wal", "b.img.wal"] {
        assert!(!at(none).exists(), "{none}");
    }
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
