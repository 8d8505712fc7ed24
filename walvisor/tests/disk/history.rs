//! The past of a disk that is not in use, where it takes a file system or an image to show it.

use serde_json::Value;
use walvisor_storage::{DiskOptions, Store};
use walvisor_testkit::process::walvisor;
use walvisor_testkit::queue::write;
use walvisor_tests::{LoopFs, run_sessions};

use crate::{copy_image, done, json, refused, small, states, test_dir, unclosed};

/// On a file system with reflinks a clone, and a restored image, copy only what the log has.
#[test]
fn clones_share_blocks_where_the_file_system_can() {
    let Some(place) = LoopFs::xfs() else {
        return;
    };
    let dir = &unclosed(&place.path());
    let states = states();
    for (lsn, state) in (1..).zip(&states) {
        let clone = format!("disk clone disk.img {lsn} --new-log logs --at lsn:{lsn} --json");
        let report = json(&done(dir, &clone));
        assert_eq!(report["shared"], true);
        // The base image has 64 KiB, of which nothing is copied.
        let copied = report["copied_bytes"].as_u64().unwrap();
        assert!(copied <= 10240, "{report}");
        assert!(std::fs::read(dir.join(lsn.to_string())).unwrap() == *state);
    }
    let text = done(dir, "disk restore disk.img --at -0s -o restored");
    assert!(text.contains("the others shared"), "{text}");
    assert!(std::fs::read(dir.join("restored")).unwrap() == states[5]);
}

/// Every command that shows the past refuses, the check says why, and the open says what is lost.
#[test]
fn a_snapshot_is_refused_over_another_image() {
    let dir = &test_dir();
    let (disk, old) = (dir.join("disk.img"), dir.join("old"));
    done(dir, "disk create disk.img --size 1M");
    copy_image(&disk, &old);
    let options = [DiskOptions::new(&disk)];
    let store = Store::open(&dir.join("disk.img.wal"), &options, &small()).unwrap();
    let live = store.disks()[0].clone();
    write(&mut live.open_port().unwrap(), 0, 1, 64);
    live.snapshot("monday".parse().unwrap()).unwrap();
    write(&mut live.open_port().unwrap(), 0, 2, 8);
    live.checkpoint().unwrap();
    drop(live);
    store.close().unwrap();
    let clean = done(dir, "disk check disk.img");
    assert!(clean.contains("clean"), "{clean}");

    std::fs::remove_file(&disk).unwrap();
    copy_image(&old, &disk);
    run_sessions("another-image", dir, []);
    let check = walvisor(dir, "disk check disk.img --json");
    let told = json(&String::from_utf8(check.stdout).unwrap());
    assert_eq!(
        (check.status.code(), &told["clean"]),
        (Some(1), &false.into())
    );
    let fault = &told["log"]["snapshot_faults"][0];
    assert_eq!(fault["snapshots"], Value::from(vec!["monday"]));
    let opened = walvisor(dir, "disk checkpoint disk.img");
    let told = String::from_utf8(opened.stderr).unwrap();
    let lost = "depend on the previous one: monday";
    assert!(opened.status.success() && told.contains(lost), "{told}");
    let lost = "disk restore disk.img --at snapshot:monday -o new.img";
    refused(dir, lost, 1, &["had another image", "is lost"]);
    done(dir, "disk snapshot-delete disk.img monday");
    done(dir, "disk check disk.img");
}
