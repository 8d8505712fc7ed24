//! Commands that would lose something say so, and want to be told twice.

use walvisor_storage::{DiskOptions, Operation, Retention, Store, StoreOptions};

use crate::{done, end, json, refused, unclosed, walvisor, write};

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
    end(&mut port, Operation::Flush);
    drop(port);
    store.close().unwrap();
    let named = [
        "b.img: the disk is on the log in ",
        "/shared, not in b.img.wal; name that log",
    ];
    for command in [
        "info b.img",
        "check b.img",
        "checkpoint b.img",
        "discard b.img",
        "discard b.img --yes",
        "leave b.img",
        "resize b.img --size 16M",
        "export b.img raw",
        "snapshot b.img now",
    ] {
        refused(dir, &format!("disk {command}"), 1, &named);
    }
    let refused = walvisor(dir, "serve vhost-user --disk path=b.img,socket=s");
    assert!(!refused.status.success());
    let told = String::from_utf8(refused.stderr).unwrap();
    assert!(told.contains(named[1]), "{told}");
    assert!(!dir.join("b.img.wal").exists());
    let info = json(&done(dir, "disk info b.img --log shared --json"));
    assert_eq!(info["log"]["retain"], "24h");
    assert_eq!(info["log"]["records"], 1);
}

#[test]
fn a_check_changes_nothing_and_a_discard_says_what_would_be_lost() {
    let dir = tempfile::tempdir().unwrap();
    let crashed = unclosed(dir.path());
    let before = std::fs::read(crashed.join("disk.img.wal/control")).unwrap();
    let instead = ["a check changes nothing", "walvisor disk discard disk.img"];
    refused(&crashed, "disk check --discard-log disk.img", 2, &instead);
    let told = [
        "nothing is discarded yet",
        "would lose 5 records (12 KiB) in the log disk.img.wal",
        "--yes",
    ];
    refused(&crashed, "disk discard disk.img", 1, &told);
    assert!(std::fs::read(crashed.join("disk.img.wal/control")).unwrap() == before);
    assert!(done(&crashed, "disk check disk.img").contains("5 records"));
    let text = done(&crashed, "disk discard disk.img --yes");
    assert!(text.contains("discarded 5 records"), "{text}");
}

#[test]
fn a_checkpoint_that_would_end_history_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    done(dir, "disk create a.img --size 8M --log shared --retain 24h");
    done(dir, "disk create b.img --size 8M --log shared");
    let command = "disk checkpoint a.img --log shared";
    let told = [
        "retain=24h",
        "a.img, ",
        "b.img: what is there since",
        "--give-up-history",
    ];
    refused(dir, command, 1, &told);
    done(dir, &format!("{command} --give-up-history"));
}

#[test]
fn an_amount_of_history_has_a_unit() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for amount in ["24", "0", "7.5"] {
        let command = format!("disk create a.img --size 8M --retain {amount}");
        refused(dir, &command, 2, &["not an amount of history", "24h"]);
    }
    done(dir, "disk create a.img --size 8M --retain 5M");
    let info = json(&done(dir, "disk info a.img --json"));
    assert_eq!(info["log"]["retain"], "5M");
}

#[test]
fn a_log_made_by_move_log_keeps_as_much_history_as_the_one_before() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    done(dir, "disk create a.img --size 8M --retain 12h");
    assert_eq!(
        done(dir, "disk move-log a.img shared"),
        "a.img: on the log in shared now, which keeps the history of the last 12h; what it was before the move is no longer kept; open it with log=shared\n"
    );
    // An existing log keeps what it keeps, which is said.
    done(dir, "disk create b.img --size 8M --log other");
    let said = done(dir, "disk move-log a.img other --log shared");
    assert!(
        said.contains("which keeps no history; what it was"),
        "{said}"
    );
    let options = StoreOptions::default();
    let disks = [DiskOptions::new(dir.join("a.img"))];
    let store = Store::open(&dir.join("other"), &disks, &options).unwrap();
    assert_eq!(store.disks()[0].retain(), Retention::Nothing);
    store.close().unwrap();
}
