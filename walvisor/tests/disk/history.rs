//! The past of a disk that is not in use, where it takes a file system or an image to show it.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::Value;
use walvisor_storage::{DiskOptions, Store, StoreOptions};
use walvisor_testkit::process::{program, walvisor};
use walvisor_testkit::queue::{flush, read, write};
use walvisor_testkit::{Process, Random};
use walvisor_tests::{LoopFs, run_sessions};

use crate::{MIB, copy_image, done, json, names, refused, small, states, test_dir, unclosed};

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

/// A clone is read and written while another process fills it, which is killed again and again.
#[test]
fn a_clone_is_used_while_it_is_filled_whoever_is_killed() {
    const CHUNKS: u64 = 192;
    let dir = &test_dir();
    let raw = File::create(dir.join("raw")).unwrap();
    raw.set_len(CHUNKS * MIB).unwrap();
    for chunk in 0..CHUNKS {
        raw.write_all_at(&[chunk as u8 + 1; 512], chunk * MIB)
            .unwrap();
    }
    let mut wanted: Vec<u8> = (0..CHUNKS).map(|chunk| chunk as u8 + 1).collect();
    done(dir, "disk import disk.img raw");
    let (new, log) = (dir.join("new.img"), dir.join("new.img.wal"));
    let mut kills = 0;
    let mut random = Random(5);
    loop {
        let mut command = Command::new(program());
        let arguments = "disk clone disk.img new.img --serve --json";
        command.args(arguments.split(' ')).current_dir(dir);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut cloning = Process::spawn(&mut command);
        if cloning.first_lines(1).is_empty() {
            assert!(!cloning.wait().unwrap().success());
            let errors = cloning.errors();
            assert!(kills > 0 && errors.contains("exists already"), "{errors}");
            break;
        }
        let killed = kills < 6;
        let options = StoreOptions {
            close_time: Some(Duration::ZERO),
            ..StoreOptions::default()
        };
        let store = Store::open(&log, &[DiskOptions::new(&new)], &options).unwrap();
        let mut port = store.disks()[0].open_port().unwrap();
        if !killed || random.one_in(2) {
            for _ in 0..8 {
                let chunk = random.below(CHUNKS);
                let found = read(&mut port, chunk * 2048, 1);
                assert_eq!(found[0], wanted[chunk as usize], "chunk {chunk}");
            }
        }
        if killed {
            cloning.signal(Signal::KILL);
            kills += 1;
        }
        let chunk = random.below(CHUNKS);
        wanted[chunk as usize] = 200 + kills;
        write(&mut port, chunk * 2048, 200 + kills, 1);
        flush(&mut port);
        drop(port);
        // What needs a chunk that nobody fetches stays in the log.
        let closed = store.close();
        assert!(killed || closed.is_ok(), "{closed:?}");
        let ended = cloning.wait().unwrap();
        assert!(killed || ended.success());
    }
    assert!(names(dir).iter().all(|name| !name.contains("fetch")));
    done(dir, "disk export new.img out");
    let out = std::fs::read(dir.join("out")).unwrap();
    for (chunk, wanted) in wanted.iter().enumerate() {
        let bytes = &out[chunk * MIB as usize..][..MIB as usize];
        assert!(
            bytes[..512].iter().all(|byte| byte == wanted),
            "chunk {chunk}"
        );
        assert!(bytes[512..].iter().all(|byte| *byte == 0), "chunk {chunk}");
    }
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
