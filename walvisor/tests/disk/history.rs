//! The past of a disk that is not in use, where it takes a file system or an image to show it.

use serde_json::Value;
use walvisor_storage::{DiskOptions, Store};
use walvisor_testkit::process::walvisor;
use walvisor_testkit::queue::write;
use walvisor_tests::LoopFs;

use crate::{MIB, copy_image, done, json, refused, small, states, unclosed};

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

/// Not in part: every command that shows the past refuses, the check says why, and the open says
/// what is lost.
#[test]
fn a_snapshot_is_refused_over_another_image() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (disk, old, own) = (dir.join("disk.img"), dir.join("old"), dir.join("own"));
    done(dir, "disk create disk.img --size 1M");
    copy_image(&disk, &old);
    let options = [DiskOptions::new(&disk)];
    let store = Store::open(&dir.join("disk.img.wal"), &options, &small()).unwrap();
    let live = store.disks()[0].clone();
    let mut port = live.open_port().unwrap();
    write(&mut port, 0, 1, 64);
    live.snapshot("monday".parse().unwrap()).unwrap();
    write(&mut port, 0, 2, 8);
    live.checkpoint().unwrap();
    drop((port, live));
    store.close().unwrap();
    let clean = done(dir, "disk check disk.img");
    assert!(clean.contains("clean"), "{clean}");

    std::fs::rename(&disk, &own).unwrap();
    copy_image(&old, &disk);
    let why = ["disk.img is not the image", "put that image back"];
    for arguments in [
        "disk restore disk.img --at snapshot:monday -o new.img",
        "disk clone disk.img new.img --at snapshot:monday",
        "disk changes disk.img --from snapshot:monday",
        "serve nbd --disk path=disk.img,at=snapshot:monday,socket=s",
    ] {
        refused(dir, arguments, 1, &why);
    }
    let check = walvisor(dir, "disk check disk.img");
    let told = String::from_utf8(check.stdout).unwrap();
    assert_eq!(check.status.code(), Some(1), "{told}");
    assert!(
        told.contains("monday") && why.iter().all(|part| told.contains(part)),
        "{told}"
    );
    let check = walvisor(dir, "disk check disk.img --json");
    let told = json(&String::from_utf8(check.stdout).unwrap());
    assert_eq!(told["clean"], false);
    let fault = &told["log"]["snapshot_faults"][0];
    assert_eq!(fault["snapshots"], Value::from(vec!["monday"]));

    // With the image that it is of, all is there again.
    std::fs::rename(&own, &disk).unwrap();
    done(dir, "disk check disk.img");
    done(dir, "disk restore disk.img --at snapshot:monday -o new.img");
    let mut monday = vec![0; MIB as usize];
    monday[..64 * 512].fill(1);
    assert!(std::fs::read(dir.join("new.img")).unwrap() == monday);

    std::fs::remove_file(&disk).unwrap();
    copy_image(&old, &disk);
    let opened = walvisor(dir, "disk checkpoint disk.img");
    let told = String::from_utf8(opened.stderr).unwrap();
    assert!(opened.status.success(), "{told}");
    assert!(
        told.contains("depend on the previous one: monday"),
        "{told}"
    );
    std::fs::remove_file(dir.join("new.img")).unwrap();
    let lost = "disk restore disk.img --at snapshot:monday -o new.img";
    refused(dir, lost, 1, &["had another image", "is lost"]);
    done(dir, "disk snapshot-delete disk.img monday");
    done(dir, "disk check disk.img");
}
