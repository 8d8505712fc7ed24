//! `walvisor log dump`, and a second reader, in Python, written from `storage/FORMAT.md` alone.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use walvisor_storage::{DiskOptions, Operation, Port, Retention, Store, StoreOptions, create_disk};
use walvisor_testkit::{Random, wait_until};
use walvisor_tests::{have_python, second_reader};

use crate::{
    MIB, SMALL, WALVISOR, crash, done, end, json, names, objects, refused, unclosed, walvisor,
    write,
};

/// How many bits the test flips in a log that both readers then read.
const FLIPS: u64 = 12;

/// The records that the second reader finds in a log; `None` if it reports damage.
fn second_records(log: &Path) -> Option<Vec<Value>> {
    let output = second_reader().arg(log).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        assert!(error.starts_with("damaged: "), "{error}");
        return None;
    }
    Some(objects(&String::from_utf8(output.stdout).unwrap()))
}

/// Asserts that both readers find the same records, and returns them.
#[track_caller]
fn both_read(dir: &Path, log: &str) -> Option<Vec<Value>> {
    let second = second_records(&dir.join(log));
    let output = walvisor(dir, &format!("log dump {log} --records --json"));
    match &second {
        Some(records) => {
            assert!(output.status.success());
            let first = objects(&String::from_utf8(output.stdout).unwrap());
            assert_eq!(&first, records);
        }
        None => {
            let error = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(1), "{error}");
            assert!(error.contains("damaged"), "{error}");
        }
    }
    second
}

/// Makes `count` random requests to the two disks of a log, from a seed, with a flush after every
/// seventh.
fn work(ports: &mut [Port], seed: u64, count: usize) {
    let mut random = Random(seed);
    for i in 0..count {
        let port = &mut ports[random.below(2) as usize];
        let (sector, sectors) = (random.below(2000), random.below(24) as u32 + 1);
        match random.below(8) {
            0 => end(port, Operation::Discard { sector, sectors }),
            1 => end(
                port,
                Operation::WriteZeroes {
                    sector,
                    sectors,
                    unmap: false,
                },
            ),
            _ => write(port, sector, i as u8, sectors as usize),
        }
        if i % 7 == 6 {
            end(port, Operation::Flush);
        }
    }
    ports
        .iter_mut()
        .for_each(|port| end(port, Operation::Flush));
}

/// The log has two disks and has wrapped. KernelAction come a crash, more requests, a second crash,
/// a torn tail, and damage.
#[test]
fn a_reader_written_from_the_format_page_finds_the_same_records() {
    if !have_python() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let disks = [at("a.img"), at("b.img")];
    for disk in &disks {
        create_disk(disk, 2 * MIB, &at("log"), &SMALL).unwrap();
    }
    let open = |dir: &Path| {
        let options = disks
            .each_ref()
            .map(|disk| DiskOptions::new(dir.join(disk.file_name().unwrap())));
        Store::open(&dir.join("log"), &options, &SMALL).unwrap()
    };
    let ports = |store: &Store| -> Vec<Port> {
        let disks = store.disks().iter();
        disks.map(|disk| disk.open_port().unwrap()).collect()
    };
    let both = [disks[0].as_path(), disks[1].as_path()];
    let store = open(dir.path());
    let mut queues = ports(&store);
    work(&mut queues, 1, 900);
    assert!(store.log_counters().checkpoints > 0, "the ring went round");
    drop(queues);
    store.close().unwrap();
    // A closed log has no records.
    assert_eq!(both_read(dir.path(), "log"), Some(Vec::new()));
    let store = open(dir.path());
    let mut queues = ports(&store);
    work(&mut queues, 2, 150);
    let (first, second) = (at("first"), at("second"));
    crash(&at("log"), &both, &first);
    drop(queues);
    store.close().unwrap();
    let records = both_read(&first, "log").unwrap();
    assert_eq!(records.len(), 150);

    // The log is opened after the crash and crashes again: a segment follows another's end, perhaps
    // with a gap.
    let copied = [first.join("a.img"), first.join("b.img")];
    let store = open(&first);
    let mut queues = ports(&store);
    store.mark(&"a mark — \"quoted\"".parse().unwrap()).unwrap();
    work(&mut queues, 3, 60);
    let copies = [copied[0].as_path(), copied[1].as_path()];
    crash(&first.join("log"), &copies, &second);
    drop(queues);
    store.close().unwrap();
    let records = both_read(&second, "log").unwrap();
    assert!(records.len() >= 60, "{}", records.len());
    let kinds = ["write", "write_zeroes", "discard", "mark"];
    let has = |kind: &&str| records.iter().any(|record| record["kind"] == **kind);
    assert!(kinds.iter().all(has));

    let mark = records.iter().find(|record| record["kind"] == "mark");
    assert_eq!(mark.unwrap()["text"], "a mark — \"quoted\"");

    // A flipped byte in the last payload is a torn tail: both readers drop its batch.
    let flip = |record: &Value| {
        let name = record["segment"].as_str().unwrap();
        let file = File::options()
            .read(true)
            .write(true)
            .open(second.join("log").join(name))
            .unwrap();
        let offset = record["payload_offset"].as_u64().unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 1], offset).unwrap();
    };
    let is_write = |record: &&Value| record["kind"] == "write";
    let last = records.last().unwrap();
    let torn = records
        .iter()
        .rev()
        .take_while(|record| record["cid"] == last["cid"])
        .find(is_write)
        .expect("the last group wrote something");
    flip(torn);
    let kept = both_read(&second, "log").unwrap();
    assert!(!kept.is_empty() && kept[..] == records[..kept.len()]);
    assert!(kept.len() < records.len());
    assert!(kept.iter().all(|record| record["cid"] != last["cid"]));
    flip(torn);
    assert_eq!(both_read(&second, "log").unwrap(), records);
    // In an earlier payload a flipped byte damages that record alone. That of a mark is its text.
    for written in [records.iter().find(is_write).unwrap(), mark.unwrap()] {
        flip(written);
        let found = both_read(&second, "log").unwrap();
        assert_eq!(found.len(), records.len());
        for (found, record) in found.iter().zip(&records) {
            assert_eq!(found["damaged"], record == written);
            assert!(found == record || record == written);
        }
        flip(written);
    }

    // A flipped bit anywhere else: both readers must agree on the result.
    let mut damaged = 0;
    for i in 0..FLIPS {
        let random = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let files = names(&second.join("log"));
        let path = second
            .join("log")
            .join(&files[(random >> 32) as usize % files.len()]);
        let file = File::options().read(true).write(true).open(path).unwrap();
        // Every second flip is near the start, where most records are.
        let reach = if i % 2 == 0 { 128 << 10 } else { MIB };
        let offset = (random >> 16) % reach.min(file.metadata().unwrap().len());
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        let bit = 1 << (random >> 61);
        file.write_all_at(&[byte[0] ^ bit], offset).unwrap();
        damaged += u32::from(both_read(&second, "log").is_none());
        file.write_all_at(&byte, offset).unwrap();
    }
    assert_eq!(both_read(&second, "log").unwrap(), records);
    println!("{FLIPS} flipped bits, {damaged} of them damage");
}

/// A disk restored in place, twice, and the disk beside it: both readers know which records that
/// undid.
#[test]
fn both_readers_know_what_a_restore_in_place_undid() {
    if !have_python() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let disks = [at("a.img"), at("b.img")];
    let options = StoreOptions {
        max_segments: 16,
        retain: Some(Retention::All),
        ..SMALL
    };
    for disk in &disks {
        create_disk(disk, 2 * MIB, &at("log"), &options).unwrap();
    }
    let mut undone = 0;
    for (seed, (disk, to)) in (3..).zip([("a.img", 9), ("a.img", 20), ("b.img", 15)]) {
        let opened = disks.each_ref().map(DiskOptions::new);
        let store = Store::open(&at("log"), &opened, &options).unwrap();
        let mut ports: Vec<Port> = store
            .disks()
            .iter()
            .map(|disk| disk.open_port().unwrap())
            .collect();
        work(&mut ports, seed, 30);
        drop(ports);
        store.close().unwrap();
        done(
            dir.path(),
            &format!("disk restore {disk} --log log --at lsn:{to} --in-place"),
        );
        let records = both_read(dir.path(), "log").expect("a good log");
        let now = records.iter().filter(|record| record["undone"] == true);
        let before = std::mem::replace(&mut undone, now.count());
        assert_ne!(undone, before);
    }
}

/// Both readers take the batches of sealed segments from the summaries, and read a segment whose
/// summary is damaged.
#[test]
fn both_readers_use_and_refuse_the_same_summaries() {
    const SEGMENT: u64 = 128 << 10;
    const FOOTER: u64 = SEGMENT - 56;
    if !have_python() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("a.img");
    let log = dir.path().join("log");
    let options = StoreOptions {
        segment_size: SEGMENT,
        max_segments: 64,
        ..SMALL
    };
    create_disk(&disk, MIB, &log, &options).unwrap();
    let store = Store::open(&log, &[DiskOptions::new(&disk)], &options).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    let open = |path: &Path| {
        let mut options = File::options();
        options.read(true).write(true).open(path).unwrap()
    };
    for i in 0..30 {
        write(&mut port, i * 40, i as u8 + 1, 24);
        end(&mut port, Operation::Flush);
    }
    // No request waits for a summary to be written.
    let magic = |slot: usize| {
        let mut magic = [0; 8];
        let file = open(&log.join(format!("segment-{slot:05}")));
        file.read_exact_at(&mut magic, FOOTER).unwrap();
        &magic == b"WALVSUMM"
    };
    wait_until("three summaries", || (0..3).all(magic));
    let crashed = dir.path().join("crashed");
    crash(&log, &[&disk], &crashed);
    drop(port);
    store.close().unwrap();
    let records = both_read(&crashed, "log").unwrap();
    assert_eq!(records.len(), 30);

    let sealed = crashed.join("log/segment-00001");
    let first = records
        .iter()
        .find(|record| record["segment"] == "segment-00001")
        .unwrap();
    let payload = first["payload_offset"].as_u64().unwrap();
    let changes = [
        // Fields of the footer, and the headers before it: the summary is not used.
        (FOOTER, true),
        (FOOTER + 12, true),
        (FOOTER + 17, true),
        (FOOTER + 33, true),
        (FOOTER + 41, true),
        (FOOTER + 49, true),
        (FOOTER - 30, true),
        // A header in its place: the summary replaces it.
        (payload - 4096 + 60, true),
        // A payload.
        (payload + 5000, false),
    ];
    for (at, same) in changes {
        let mut byte = [0];
        open(&sealed).read_exact_at(&mut byte, at).unwrap();
        open(&sealed).write_all_at(&[byte[0] ^ 4], at).unwrap();
        let found = both_read(&crashed, "log").unwrap();
        assert_eq!(found.len(), records.len(), "byte {at}");
        assert_eq!(found == records, same, "byte {at}");
        let check = walvisor(&crashed, "disk check a.img --log log");
        let clean = at >= FOOTER - 30;
        assert_eq!(check.status.success(), clean, "byte {at}");
        open(&sealed).write_all_at(&byte, at).unwrap();
    }
    // A damaged header whose copy is damaged too: the record is missing, which both notice.
    open(&sealed)
        .write_all_at(&[0xff], payload - 4096 + 60)
        .unwrap();
    open(&sealed).write_all_at(&[0xff; 2], FOOTER - 30).unwrap();
    assert!(both_read(&crashed, "log").is_none());
}

#[test]
fn a_dump_has_one_line_per_group_or_per_record() {
    let dir = tempfile::tempdir().unwrap();
    let crashed = unclosed(dir.path());
    let groups = objects(&done(&crashed, "log dump disk.img.wal --json"));
    let records = objects(&done(&crashed, "log dump disk.img.wal --records --json"));
    assert_eq!((groups.len(), records.len()), (4, 5));
    let number = |value: &Value, key: &str| value[key].as_u64().unwrap_or_else(|| panic!("{key}"));
    for (group, (records, bytes)) in groups.iter().zip([(2, 8192), (1, 0), (1, 0), (1, 4096)]) {
        assert_eq!(number(group, "records"), records, "{group}");
        assert_eq!(number(group, "payload_bytes"), bytes, "{group}");
        let lsns = number(group, "last_lsn") - number(group, "first_lsn") + 1;
        assert_eq!(lsns, records, "{group}");
        assert!(number(group, "age_us") < 600_000_000, "{group}");
        assert!(number(group, "unix_us") > 1_600_000_000_000_000, "{group}");
        let disks = group["disks"].as_array().unwrap();
        assert!(disks.len() == 1 && disks[0].as_str().unwrap().ends_with("disk.img"));
    }
    assert!(
        groups
            .windows(2)
            .all(|pair| number(&pair[0], "cid") < number(&pair[1], "cid"))
    );
    let kinds: Vec<_> = records
        .iter()
        .map(|r| r["kind"].as_str().unwrap())
        .collect();
    assert_eq!(
        kinds,
        ["write", "write", "discard", "write_zeroes", "write"]
    );
    // The payload is at the offset that the record gives.
    let log = crashed.join("disk.img.wal");
    let segment = File::open(log.join(records[1]["segment"].as_str().unwrap())).unwrap();
    let mut payload = [0; 4096];
    segment
        .read_exact_at(&mut payload, number(&records[1], "payload_offset"))
        .unwrap();
    assert_eq!(payload, [3; 4096]);
    // The text output has a heading, then one line per record.
    assert_eq!(done(&crashed, "log dump disk.img.wal").lines().count(), 5);
    let text = done(&crashed, "log dump disk.img.wal --records");
    assert_eq!(text.lines().count(), 6);
    assert!(text.contains("write_zeroes") && text.contains("segment-0000"));
    // A closed stdout is no error.
    let mut child = Command::new(WALVISOR)
        .args(["log", "dump", "disk.img.wal"])
        .current_dir(&crashed)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    assert!(child.wait().unwrap().success());
    done(&crashed, "disk checkpoint disk.img");
    let empty = done(&crashed, "log dump disk.img.wal");
    assert!(empty.contains("no records"), "{empty}");
    assert_eq!(done(&crashed, "log dump disk.img.wal --json"), "");
}

/// The medium has changed a payload: `disk check` names it, and reads of it fail.
#[test]
fn disk_check_names_disk_sectors_and_lsn_of_damage() {
    let dir = tempfile::tempdir().unwrap();
    let crashed = unclosed(dir.path());
    let records = objects(&done(&crashed, "log dump disk.img.wal --records --json"));
    let number = |key: &str| records[1][key].as_u64().unwrap();
    let segment = crashed
        .join("disk.img.wal")
        .join(records[1]["segment"].as_str().unwrap());
    let file = File::options().write(true).open(&segment).unwrap();
    file.write_all_at(&[0xff], number("payload_offset") + 5)
        .unwrap();

    let (first, lsn) = (number("sector"), number("lsn"));
    let output = walvisor(&crashed, "disk check disk.img");
    assert_eq!(output.status.code(), Some(1));
    let (text, error) = (
        String::from_utf8(output.stdout).unwrap(),
        String::from_utf8(output.stderr).unwrap(),
    );
    let wanted = format!(
        "damaged: sectors {first} to {}, written by LSN {lsn}",
        first + 7
    );
    assert!(
        text.contains(&wanted) && text.lines().count() == 1,
        "{text}"
    );
    assert!(
        error.contains("1 blocks") && error.lines().count() == 1,
        "{error}"
    );

    let output = walvisor(&crashed, "disk check disk.img --json");
    assert_eq!(output.status.code(), Some(1));
    let report = &objects(&String::from_utf8(output.stdout).unwrap())[0];
    assert_eq!(report["clean"], false);
    let damaged = report["log"]["damaged"].as_array().unwrap();
    assert_eq!(damaged.len(), 1);
    assert_eq!(damaged[0]["lsn"], lsn);
    assert_eq!(damaged[0]["sector"], first);

    let dumped = objects(&done(&crashed, "log dump disk.img.wal --records --json"));
    assert!(dumped[1]["damaged"] == true && dumped[1]["payload_crc32c"].is_null());
    assert!(dumped[0] == records[0] && dumped[2..] == records[2..]);
    refused(
        &crashed,
        "disk export disk.img out",
        1,
        &["damaged", "segment-0000"],
    );
    let output = walvisor(&crashed, "disk checkpoint disk.img");
    let error = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{error}");
    assert!(
        error.contains("disk check") && error.contains("segment-0000"),
        "{error}"
    );
    // All other records are in the image, and the log keeps the damaged one.
    assert_eq!(
        walvisor(&crashed, "disk check disk.img").status.code(),
        Some(1)
    );
}

#[test]
fn a_dump_of_a_damaged_log_shows_what_is_before_the_damage() {
    let dir = tempfile::tempdir().unwrap();
    let crashed = unclosed(dir.path());
    let records = objects(&done(&crashed, "log dump disk.img.wal --records --json"));
    let name = records[1]["segment"].as_str().unwrap();
    let segment = File::options()
        .write(true)
        .open(crashed.join("disk.img.wal").join(name))
        .unwrap();
    // Damages the second group's descriptor; the groups after it prove that the group was
    // acknowledged.
    let behind = records[1]["payload_offset"].as_u64().unwrap() + 4096;
    segment.write_all_at(&[0xff], behind + 97).unwrap();
    let output = walvisor(&crashed, "log dump disk.img.wal --json");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        error.lines().count() == 1 && error.contains("damaged"),
        "{error}"
    );
    assert_eq!(
        objects(&String::from_utf8(output.stdout).unwrap()).len(),
        1,
        "the first group"
    );
    refused(&crashed, "disk export disk.img out", 1, &["damaged"]);
    refused(&crashed, "disk resize disk.img --size 16M", 1, &["damaged"]);
    assert!(names(&crashed).iter().all(|name| !name.starts_with("out")));
}

#[test]
fn a_log_is_resized_and_too_small_a_size_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    done(dir, "disk create disk.img --size 8M");
    assert_eq!(
        done(dir, "log resize disk.img.wal --size 3000M"),
        "disk.img.wal: 2.9 GiB now, 2 GiB before\n"
    );
    assert_eq!(
        json(&done(dir, "log resize disk.img.wal --size 256M --json")),
        serde_json::json!({
            "log": "disk.img.wal",
            "size_bytes": 256 << 20,
            "old_size_bytes": 3_154_116_608_u64,
        })
    );
    refused(
        dir,
        "log resize disk.img.wal --size 192M",
        1,
        &["use 268435456 to 4398046511104"],
    );
    refused(dir, "log resize none --size 1G", 1, &["this is not a log"]);
    // A large disk: the advice is one line, what it says to type works, and then there is none.
    let made = walvisor(dir, "disk create big.img --size 1T");
    let told = String::from_utf8(made.stderr).unwrap();
    assert!(made.status.success() && told.lines().count() == 1, "{told}");
    let (_, command) = told.trim_end().split_once("walvisor log resize").unwrap();
    assert_eq!(
        done(dir, &format!("log resize{command}")),
        "big.img.wal: 32 GiB now, 2 GiB before\n"
    );
    done(dir, "disk create other.img --size 1T --log big.img.wal");
}

/// The disks go on for several rounds of the ring after two snapshots, so what these need of the
/// images is saved. Both readers see the same disks as of each snapshot, and both report a damaged
/// file.
#[test]
fn both_readers_see_the_same_disks_as_of_a_snapshot() {
    if !have_python() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    // What is not copied when the log is closed stays in it.
    let options = StoreOptions {
        close_time: Some(std::time::Duration::ZERO),
        ..SMALL
    };
    let at = |name: &str| dir.path().join(name);
    let disks = [at("a.img"), at("b.img")];
    for disk in &disks {
        create_disk(disk, 2 * MIB, &at("log"), &options).unwrap();
    }
    let opened = disks.each_ref().map(DiskOptions::new);
    let store = Store::open(&at("log"), &opened, &options).unwrap();
    let open = |disk: &walvisor_storage::Disk| disk.open_port().unwrap();
    let mut ports: Vec<Port> = store.disks().iter().map(open).collect();
    work(&mut ports, 11, 200);
    store.disks()[0].snapshot("both".parse().unwrap()).unwrap();
    work(&mut ports, 12, 600);
    let alone = store.disks()[1].snapshot_alone("b-alone".parse().unwrap());
    assert_eq!(alone.unwrap().disk_id, Some(2));
    work(&mut ports, 13, 900);
    // The images have not gone past this one.
    store.disks()[0].checkpoint().unwrap();
    work(&mut ports, 14, 20);
    store.disks()[0].snapshot("last".parse().unwrap()).unwrap();
    work(&mut ports, 15, 20);
    drop(ports);
    store.close().unwrap();

    let snapshots = json(&done(dir.path(), "disk snapshots a.img --log log --json"));
    let bytes = |i: usize| snapshots[i]["saved_bytes"].as_u64().unwrap();
    assert!(bytes(0) > 0 && bytes(1) > 0 && bytes(2) == 0, "{snapshots}");
    let second = |name: &str, disk: usize| {
        let output = second_reader()
            .args(["log", name, &format!("{}", disk + 1)])
            .args([["a.img", "b.img"][disk], "second"])
            .current_dir(dir.path())
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.success() {
            Ok(std::fs::read(at("second")).unwrap())
        } else {
            Err(error)
        }
    };
    let first = |name: &str, disk: usize| {
        let image = ["a.img", "b.img"][disk];
        let _ = std::fs::remove_file(at("first"));
        walvisor(
            dir.path(),
            &format!("disk restore {image} --log log --at snapshot:{name} -o first"),
        )
    };
    let seen = [
        ("both", 0),
        ("both", 1),
        ("b-alone", 1),
        ("last", 0),
        ("last", 1),
    ];
    let seen = seen.map(|(name, disk)| {
        let output = first(name, disk);
        assert!(output.status.success(), "{name}: {output:?}");
        let bytes = std::fs::read(at("first")).unwrap();
        assert!(
            second(name, disk).unwrap() == bytes,
            "{name} of disk {disk}"
        );
        bytes
    });
    assert!(seen[0] != seen[3] && seen[1] != seen[2] && seen[2] != seen[4]);

    let part = names(&at("log"))
        .into_iter()
        .find(|name| name.starts_with("saved-"))
        .expect("a saved file");
    let path = at("log").join(part);
    let file = File::options().read(true).write(true).open(path).unwrap();
    // The header of the file, of its first batch, and a payload behind it.
    for offset in [40, 4096 + 60, 4096 + 4096 + 5000] {
        let mut byte = [0];
        file.read_exact_at(&mut byte, offset).unwrap();
        file.write_all_at(&[byte[0] ^ 4], offset).unwrap();
        let error = String::from_utf8_lossy(&first("both", 0).stderr).into_owned();
        assert!(error.contains("saved-"), "byte {offset}: {error}");
        let error = second("both", 0).expect_err("damage");
        assert!(
            error.starts_with("damaged: saved-"),
            "byte {offset}: {error}"
        );
        // The snapshot behind it, and the disk, are as they were.
        assert!(first("last", 0).status.success(), "byte {offset}");
        file.write_all_at(&byte, offset).unwrap();
    }
    assert!(first("both", 0).status.success());
}
