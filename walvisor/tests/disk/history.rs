//! `walvisor disk restore` and `log dump --since --until`: the commits of a log that was not
//! checkpointed.

use std::path::Path;

use serde_json::{Value, json};
use walvisor_storage::{DiskOptions, Store, StoreOptions};
use walvisor_tests::{LoopFs, have_python};

use crate::{
    MIB, SMALL, copy_image, done, objects, refused, unclosed, unclosed_bytes, walvisor, write,
};

/// The disk that `unclosed` makes after each of its records, beginning with the base image.
fn states() -> Vec<Vec<u8>> {
    let mut bytes = vec![0; 8 * MIB as usize];
    let changes = [
        (0..128, 1),
        (8..16, 2),
        (12..20, 3),
        (32..48, 0),
        (50..51, 0),
        (16376..16384, 9),
    ];
    let states = changes.into_iter().map(|(sectors, byte)| {
        bytes[sectors.start * 512..sectors.end * 512].fill(byte);
        bytes.clone()
    });
    let states: Vec<_> = states.collect();
    assert!(*states.last().unwrap() == unclosed_bytes());
    states
}

fn restored(dir: &Path, at: &str) -> Vec<u8> {
    let new = dir.join("restored.img");
    let _ = std::fs::remove_file(&new);
    let report = crate::json(&done(
        dir,
        &format!("disk restore disk.img --at {at} -o restored.img --json"),
    ));
    assert_eq!(report["size_bytes"], 8 * MIB);
    std::fs::read(new).unwrap()
}

#[test]
fn every_record_and_commit_can_be_brought_back() {
    let dir = tempfile::tempdir().unwrap();
    let dir = &unclosed(dir.path());
    let states = states();
    let log = objects(&done(dir, "log dump disk.img.wal --records --json"));
    assert_eq!(log.len() + 1, states.len());
    let number = |record: &Value, key: &str| record[key].as_u64().unwrap();
    let first = number(&log[0], "lsn");
    // The base image alone.
    assert!(restored(dir, &format!("lsn:{}", first - 1)) == states[0]);
    for (record, state) in log.iter().zip(&states[1..]) {
        let (lsn, cid) = (number(record, "lsn"), number(record, "cid"));
        assert!(restored(dir, &format!("lsn:{lsn}")) == *state, "LSN {lsn}");
        let last = log
            .iter()
            .rposition(|record| number(record, "cid") == cid)
            .unwrap();
        assert!(
            restored(dir, &format!("cid:{cid}")) == states[last + 1],
            "commit {cid}"
        );
    }
    assert!(restored(dir, "-0s") == *states.last().unwrap());
    // The disk itself has not changed.
    done(dir, "disk export disk.img now.raw");
    assert!(std::fs::read(dir.join("now.raw")).unwrap() == unclosed_bytes());
    let all = objects(&done(dir, "log dump disk.img.wal --json"));
    let second = number(&all[1], "cid");
    let cids = |text: String| {
        let groups = objects(&text).into_iter();
        groups
            .map(|group| number(&group, "cid"))
            .collect::<Vec<_>>()
    };
    let since = done(
        dir,
        &format!("log dump disk.img.wal --json --since cid:{second}"),
    );
    assert_eq!(cids(since), [second, second + 1, second + 2]);
    let until = number(&all[1], "last_lsn");
    let until = done(
        dir,
        &format!("log dump disk.img.wal --json --until lsn:{until}"),
    );
    assert_eq!(cids(until), [second - 1, second]);
    assert_eq!(done(dir, "log dump disk.img.wal --json --until -1h"), "");
    assert!(done(dir, "log dump disk.img.wal --until -1h").contains("no records there"));
}

/// On a file system with reflinks a clone copies only what the log has.
#[test]
fn clones_share_blocks_where_the_file_system_can() {
    let Some(place) = LoopFs::xfs() else {
        return;
    };
    let xfs = place.path();
    for (dir, xfs) in [(tempfile::tempdir().unwrap().path(), false), (&*xfs, true)] {
        let dir = &unclosed(dir);
        let states = states();
        let log = objects(&done(dir, "log dump disk.img.wal --records --json"));
        let mut shared = false;
        let numbers = log.iter().map(|record| record["lsn"].as_u64().unwrap());
        for (lsn, state) in numbers.zip(&states[1..]) {
            let clone =
                format!("disk clone disk.img clone-{lsn} --new-log logs --at lsn:{lsn} --json");
            let report = crate::json(&done(dir, &clone));
            assert_eq!(
                (&report["disk"], &report["new"]),
                (&json!("disk.img"), &json!(format!("clone-{lsn}")))
            );
            assert_eq!(report["size_bytes"], 8 * MIB);
            shared = report["shared"].as_bool().unwrap();
            assert!(shared || !xfs);
            if shared {
                // The base image has 64 KiB, of which nothing is copied.
                assert!(
                    report["copied_bytes"].as_u64().unwrap() <= 10240,
                    "{report}"
                );
            }
            assert!(std::fs::read(dir.join(format!("clone-{lsn}"))).unwrap() == *state);
            done(dir, &format!("disk check clone-{lsn} --log logs"));
        }
        // As it is; and a clone of a clone.
        for clone in [
            "disk.img now --new-log logs",
            "now again --log logs --new-log again.wal",
        ] {
            done(dir, &format!("disk clone {clone}"));
        }
        for name in ["now", "again"] {
            assert!(std::fs::read(dir.join(name)).unwrap() == unclosed_bytes());
        }
        assert!(!dir.join("now.wal").exists());
        refused(
            dir,
            "disk clone now new --log logs --new-log ./logs",
            1,
            &["logs: the log of the disk to clone", "another log"],
        );
        let text = done(dir, "disk restore disk.img --at -0s -o restored");
        assert_eq!(text.contains("the others shared"), shared, "{text}");
        assert!(std::fs::read(dir.join("restored")).unwrap() == unclosed_bytes());
        refused(dir, "disk clone disk.img now", 1, &["now: exists already"]);
        refused(
            dir,
            "disk clone disk.img new --at cid:99",
            1,
            &["can't be brought back"],
        );
        assert!(!dir.join("new").exists() && !dir.join("new.wal").exists());
    }
}

/// A copy of the disk at one point becomes that of a later one by the changes between them.
#[test]
fn applying_changes_updates_an_older_copy() {
    let dir = tempfile::tempdir().unwrap();
    let dir = &unclosed(dir.path());
    let states = states();
    let log = objects(&done(dir, "log dump disk.img.wal --records --json"));
    let oldest = log[0]["lsn"].as_u64().unwrap() - 1;
    for (from, old) in states.iter().enumerate() {
        for (to, new) in states.iter().enumerate().skip(from) {
            let (first, last) = (oldest + from as u64, oldest + to as u64);
            let command = format!("disk changes disk.img --from lsn:{first} --to lsn:{last}");
            let report = crate::json(&done(dir, &format!("{command} --json")));
            assert_eq!(
                (
                    &report["from_lsn"],
                    &report["to_lsn"],
                    &report["size_bytes"]
                ),
                (&json!(first), &json!(last), &json!(8 * MIB))
            );
            let (mut copy, mut sum) = (old.clone(), 0);
            for range in report["ranges"].as_array().unwrap() {
                let number = |key: &str| range[key].as_u64().unwrap() as usize;
                let (offset, len) = (number("offset_bytes"), number("length_bytes"));
                let bytes = &new[offset..offset + len];
                copy[offset..offset + len].copy_from_slice(bytes);
                sum += len;
                let zero = bytes.iter().all(|&byte| byte == 0);
                assert_eq!(range["now"] == "data", !zero, "{range}");
            }
            assert!(copy == *new, "{first} to {last}");
            assert_eq!(report["changed_bytes"], sum);
            let text = done(dir, &command);
            assert_eq!(
                text.lines().count(),
                report["ranges"].as_array().unwrap().len() + 2
            );
            let told = format!("disk.img: {sum} of 8388608 bytes changed after LSN {first}");
            assert!(text.lines().last().unwrap().starts_with(&told), "{text}");
        }
    }
    let all = done(dir, &format!("disk changes disk.img --from lsn:{oldest}"));
    let expected = [
        "          offset            bytes  now",
        "            4096             6144  data",
        "           16384             8192  discarded",
        "           25600              512  zero",
        "         8384512             4096  data",
    ];
    assert!(all.lines().take(5).eq(expected), "{all}");
    refused(
        dir,
        &format!(
            "disk changes disk.img --from lsn:{} --to lsn:{oldest}",
            oldest + 1
        ),
        1,
        &["disk.img.wal", "exchange the two points"],
    );
    refused(
        dir,
        "disk changes disk.img --from cid:99",
        1,
        &["the newest is"],
    );
}

/// Times of a log are those of its batches.
#[test]
fn a_time_restores_the_disk_as_of_then() {
    if !have_python() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = &unclosed(dir.path());
    let states = states();
    let log = objects(&done(dir, "log dump disk.img.wal --json"));
    let first = &log[0];
    let time = |us: &Value| {
        let script = "import sys, datetime as d; print((d.datetime(1970, 1, 1) + \
            d.timedelta(microseconds=int(sys.argv[1]))).isoformat() + 'Z')";
        let arguments = ["-c", script, &us.to_string()];
        let output = std::process::Command::new("python3")
            .args(arguments)
            .output();
        String::from_utf8(output.unwrap().stdout)
            .unwrap()
            .trim()
            .to_owned()
    };
    // The next batch may have the same time.
    let same = log
        .iter()
        .filter(|group| group["unix_us"] == first["unix_us"]);
    let records: u64 = same.map(|group| group["records"].as_u64().unwrap()).sum();
    let at = format!("time:{}", time(&first["unix_us"]));
    assert!(restored(dir, &at) == states[records as usize], "{at}");
}

#[test]
fn the_error_for_a_missing_point_names_the_nearest() {
    let dir = tempfile::tempdir().unwrap();
    let dir = &unclosed(dir.path());
    let log = objects(&done(dir, "log dump disk.img.wal --json"));
    let number = |group: &Value, key: &str| group[key].as_u64().unwrap();
    let (first, last) = (&log[0], log.last().unwrap());
    let newest = format!(
        "the newest is lsn:{} of cid:{}",
        number(last, "last_lsn"),
        number(last, "cid")
    );
    let base = number(first, "first_lsn") - 1;
    let oldest = format!(
        "the oldest are LSN {base}, which the base image holds, and lsn:{} of cid:{}",
        base + 1,
        number(first, "cid"),
    );
    for (at, part) in [
        (
            format!("lsn:{}", number(last, "last_lsn") + 1),
            newest.as_str(),
        ),
        (format!("cid:{}", number(last, "cid") + 5), &newest),
        ("lsn:0".to_owned(), &oldest),
        ("cid:0".to_owned(), &oldest),
        ("-1h".to_owned(), &oldest),
    ] {
        let restore = format!("disk restore disk.img --at {at} -o new.img");
        refused(dir, &restore, 1, &["disk.img.wal", part]);
    }
    refused(
        dir,
        "disk restore disk.img --at noon -o new.img",
        2,
        &["'noon' is not a point"],
    );
    refused(
        dir,
        "disk restore disk.img --at cid:1 -o disk.img",
        1,
        &["disk.img"],
    );
    assert!(!dir.join("new.img").exists());
    // A disk without a log has no history.
    done(dir, "disk checkpoint disk.img");
    let last = number(last, "last_lsn");
    refused(
        dir,
        &format!("disk restore disk.img --at lsn:{} -o new.img", last - 1),
        1,
        &[&format!(
            "there is only LSN {last}, which the base image holds"
        )],
    );
    std::fs::remove_dir_all(dir.join("disk.img.wal")).unwrap();
    refused(
        dir,
        "disk restore disk.img --at cid:1 -o new.img",
        1,
        &["no log, so no history"],
    );
    assert!(walvisor(dir, "disk check disk.img").status.success());
}

/// The command at the end of what a restore in place says, without the name of the program.
fn undo(said: &str) -> &str {
    let undo = said.lines().last().unwrap();
    undo.strip_prefix("to undo this: walvisor ").unwrap()
}

#[test]
fn a_disk_is_restored_in_place_and_that_is_undone() {
    let dir = tempfile::tempdir().unwrap();
    let dir = &unclosed(dir.path());
    let states = states();
    let log = objects(&done(dir, "log dump disk.img.wal --records --json"));
    let lsn = |at: usize| log[at]["lsn"].as_u64().unwrap();
    let exported = || {
        done(dir, "disk export disk.img now.img --force");
        std::fs::read(dir.join("now.img")).unwrap()
    };
    let (two, newest) = (lsn(1), lsn(log.len() - 1));
    let said = done(
        dir,
        &format!("disk restore disk.img --at lsn:{two} --in-place"),
    );
    let text = format!("disk.img: restored in place as of LSN {two}: 3 records are undone\n");
    assert!(said.starts_with(&text), "{said}");
    let command = format!("disk restore disk.img --at lsn:{newest} --in-place");
    assert_eq!(undo(&said), command);
    assert!(exported() == states[2]);
    // A second time there is nothing to do.
    let again = done(
        dir,
        &format!("disk restore disk.img --at lsn:{two} --in-place"),
    );
    assert!(again.contains("nothing to do"), "{again}");
    let undone = log.iter().map(|record| record["lsn"].as_u64() > Some(two));
    let now = objects(&done(dir, "log dump disk.img.wal --records --json"));
    assert!(now.iter().map(|record| record["undone"] == true).eq(undone));
    let text = done(dir, "log dump disk.img.wal --records");
    assert_eq!(text.matches("(undone by a restore in place)").count(), 3);
    assert!(restored(dir, &format!("lsn:{newest}")) == *states.last().unwrap());
    // The command undoes it, and says how to undo that.
    let said = done(dir, undo(&said));
    assert!(
        said.contains("0 records are undone, and 3 are back"),
        "{said}"
    );
    assert!(exported() == *states.last().unwrap());
    let report = crate::json(&done(dir, &format!("{} --json", undo(&said))));
    assert_eq!(report["undone_records"], 3);
    assert_eq!(report["from_lsn"], newest + 2);
    assert_eq!(report["lsn"], newest + 3);
    assert_eq!(report["to_lsn"], newest + 1);
    let back = report["undo"].as_str().unwrap().strip_prefix("walvisor ");
    assert!(exported() == states[2]);
    done(dir, back.unwrap());
    let base = format!("disk restore disk.img --at lsn:{} --in-place", lsn(0) - 1);
    let said = done(dir, &base);
    assert!(exported() == states[0]);
    done(dir, undo(&said));
    assert!(exported() == *states.last().unwrap());
    done(
        dir,
        &format!("disk restore disk.img --at lsn:{two} --in-place"),
    );
    // Copied to the image, there is no way back.
    done(dir, "disk checkpoint disk.img");
    assert!(std::fs::read(dir.join("disk.img")).unwrap() == states[2]);
    refused(dir, &command, 1, &["no history", "retain=24h"]);
}

#[test]
fn impossible_restores_in_place_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = &unclosed(dir.path());
    let wrong = ["--in-place", "--output"];
    refused_usage(
        dir,
        "disk restore disk.img --at -0s --in-place -o new.img",
        &wrong,
    );
    refused_usage(dir, "disk restore disk.img --at -0s", &["--output"]);
    for (at, told) in [
        ("lsn:900", "the newest is"),
        ("-1h", "the oldest are LSN"),
        ("snapshot:x", "no snapshot 'x'"),
    ] {
        let restore = format!("disk restore disk.img --at {at} --in-place");
        refused(dir, &restore, 1, &["disk.img.wal", told]);
    }
    let (disk, log) = (dir.join("disk.img"), dir.join("disk.img.wal"));
    let disks = [DiskOptions::new(&disk)];
    let store = Store::open(&log, &disks, &StoreOptions::default()).unwrap();
    let process = format!("process {}", std::process::id());
    refused(
        dir,
        "disk restore disk.img --at -0s --in-place",
        1,
        &[&process],
    );
    drop(store);
    std::fs::remove_dir_all(log).unwrap();
    refused(
        dir,
        "disk restore disk.img --at -0s --in-place",
        1,
        &["disk.img.wal"],
    );
}

/// As `refused`, of a wrong use, which clap reports in several lines.
fn refused_usage(dir: &Path, arguments: &str, parts: &[&str]) {
    let output = walvisor(dir, arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{arguments}: {error}");
    for part in parts {
        assert!(error.contains(part), "{arguments}: {error}");
    }
}

/// How much a log keeps is said when its first disk is created, and by a later one.
#[test]
fn create_sets_how_much_history_a_new_log_keeps() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let told = |disk: &str| {
        let info = crate::json(&done(dir, &format!("disk info {disk} --log log --json")));
        info["log"]["retain"].as_str().unwrap().to_owned()
    };
    done(dir, "disk create a --size 1M --log log --retain 24h");
    assert_eq!(told("a"), "24h");
    done(dir, "disk create b --size 1M --log log");
    assert_eq!(told("b"), "24h");
    done(dir, "disk create c --size 1M --log log --retain 48h");
    assert_eq!(told("a"), "48h");
    refused(
        dir,
        "disk create d --size 1M --retain much",
        2,
        &["'much' is not an amount of history: give off, all"],
    );
    refused(
        dir,
        "disk create d --size 1M --log log --retain 1000T",
        1,
        &["log: ", "this log can keep at most"],
    );
    assert!(!dir.join("d").exists());
}

#[test]
fn a_snapshot_of_a_closed_disk_is_restored() {
    let dir = tempfile::tempdir().unwrap();
    let dir = &unclosed(dir.path());
    let made = crate::json(&done(dir, "disk snapshot disk.img before --json"));
    assert_eq!(made["name"], "before");
    let again = ["snapshot 'before' exists already", "give another name"];
    refused(dir, "disk snapshot disk.img before", 1, &again);
    refused(
        dir,
        "disk snapshot disk.img a/b",
        2,
        &["is not a valid name for a snapshot"],
    );
    done(dir, "disk snapshot disk.img after");
    // They are there as long as they are not deleted. A checkpoint may go as far as the oldest.
    done(dir, "disk checkpoint disk.img");
    assert!(restored(dir, "snapshot:before") == unclosed_bytes());
    let listed = crate::json(&done(dir, "disk snapshots disk.img --json"));
    let names: Vec<_> = listed
        .as_array()
        .unwrap()
        .iter()
        .map(|one| &one["name"])
        .collect();
    assert_eq!(names, ["before", "after"]);
    let text = done(dir, "disk snapshots disk.img");
    assert_eq!(text.lines().count(), 2);
    let info = crate::json(&done(dir, "disk info disk.img --json"));
    assert_eq!(
        (&info["log"]["retain"], &info["log"]["snapshots"]),
        (&json!("off"), &listed)
    );
    assert!(done(dir, "disk info disk.img").contains("snapshot   before (lsn:"));
    done(dir, "disk snapshot-delete disk.img before");
    let unknown = ["no snapshot 'before': the log has after"];
    refused(dir, "disk snapshot-delete disk.img before", 1, &unknown);
    refused(
        dir,
        "disk restore disk.img --at snapshot:before -o new",
        1,
        &unknown,
    );
    done(dir, "disk snapshot-delete disk.img after");
    done(dir, "disk checkpoint disk.img");
    assert!(std::fs::read(dir.join("disk.img")).unwrap() == unclosed_bytes());
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
    let store = Store::open(&dir.join("disk.img.wal"), &options, &SMALL).unwrap();
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
    let told = crate::json(&String::from_utf8(check.stdout).unwrap());
    assert_eq!(told["clean"], false);
    let fault = &told["log"]["snapshot_faults"][0];
    assert_eq!(fault["snapshots"], json!(["monday"]));

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
