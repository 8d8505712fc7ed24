//! `walvisor log dump`, and a second reader, in Python, written from `storage/FORMAT.md` alone.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde_json::Value;
use walvisor_storage::{DiskOptions, Operation, Port, Retention, Store, StoreOptions, create_disk};
use walvisor_testkit::queue::{flush, run, write};
use walvisor_testkit::{Random, wait_until};
use walvisor_tests::{have_python, second_reader};

use crate::{
    MIB, assert_says, crash, done, json, names, objects, refused, small, test_dir, unclosed,
    walvisor,
};

/// How many bits the test flips in a log that both readers then read.
const FLIPS: u64 = 12;

const DISKS: [&str; 2] = ["a.img", "b.img"];

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

/// Makes two disks of 2 MiB on a log in `dir`.
fn create(dir: &Path, options: &StoreOptions) {
    for disk in DISKS {
        create_disk(&dir.join(disk), 2 * MIB, &dir.join("log"), options).unwrap();
    }
}

/// Opens them.
fn open(dir: &Path, options: &StoreOptions) -> (Store, Vec<Port>) {
    let disks = DISKS.map(|disk| DiskOptions::new(dir.join(disk)));
    let store = Store::open(&dir.join("log"), &disks, options).unwrap();
    let ports = store.disks().iter().map(|disk| disk.open_port().unwrap());
    let ports = ports.collect();
    (store, ports)
}

/// Copies them as a crash would leave them.
fn crash_both(from: &Path, to: &Path) {
    let disks = DISKS.map(|disk| from.join(disk));
    crash(
        &from.join("log"),
        &disks.each_ref().map(PathBuf::as_path),
        to,
    );
}

fn flip(path: &Path, at: u64, bit: u8) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ bit], at).unwrap();
}

/// Makes `count` random requests to the two disks of a log, from a seed, with a flush after every
/// seventh. Few small ones make a log that the second reader reads in no time.
fn work(ports: &mut [Port], seed: u64, count: usize) {
    let mut random = Random(seed);
    let longest = if count < 200 { 4 } else { 24 };
    for i in 0..count {
        let port = &mut ports[random.below(2) as usize];
        let (sector, sectors) = (random.below(2000), random.below(longest) as u32 + 1);
        match random.below(8) {
            0 => drop(run(port, Operation::Discard { sector, sectors }).unwrap()),
            1 => {
                let unmap = false;
                let zeroes = Operation::WriteZeroes {
                    sector,
                    sectors,
                    unmap,
                };
                run(port, zeroes).unwrap();
            }
            _ => write(port, sector, i as u8, sectors as usize),
        }
        if i % 7 == 6 {
            flush(port);
        }
    }
    ports.iter_mut().for_each(flush);
}

/// The log has two disks and has wrapped. Then come a crash, more requests, a second crash,
/// a torn tail, and damage.
#[test]
fn a_reader_written_from_the_format_page_finds_the_same_records() {
    if !have_python() {
        return;
    }
    let dir = &test_dir();
    create(dir, &small());
    let (store, mut ports) = open(dir, &small());
    work(&mut ports, 1, 900);
    assert!(store.log_counters().checkpoints > 0, "the ring went round");
    drop(ports);
    store.close().unwrap();
    // A closed log has no records.
    assert_eq!(both_read(dir, "log"), Some(Vec::new()));
    let (store, mut ports) = open(dir, &small());
    work(&mut ports, 2, 150);
    let (first, second) = (dir.join("first"), dir.join("second"));
    crash_both(dir, &first);
    drop(ports);
    store.close().unwrap();
    let records = both_read(&first, "log").unwrap();
    assert_eq!(records.len(), 150);

    // The log is opened after the crash and crashes again: a segment follows another's end, perhaps
    // with a gap.
    let (store, mut ports) = open(&first, &small());
    store.mark(&"a mark — \"quoted\"".parse().unwrap()).unwrap();
    work(&mut ports, 3, 60);
    crash_both(&first, &second);
    drop(ports);
    store.close().unwrap();
    let records = both_read(&second, "log").unwrap();
    assert!(records.len() >= 60, "{}", records.len());
    let kinds = ["write", "write_zeroes", "discard", "mark"];
    let has = |kind: &&str| records.iter().any(|record| record["kind"] == **kind);
    assert!(kinds.iter().all(has));

    let mark = records.iter().find(|record| record["kind"] == "mark");
    assert_eq!(mark.unwrap()["text"], "a mark — \"quoted\"");

    // A flipped byte in the last payload is a torn tail: both readers drop its batch.
    let file = |name: &str| second.join("log").join(name);
    let flip_payload = |record: &Value| {
        let offset = record["payload_offset"].as_u64().unwrap();
        flip(&file(record["segment"].as_str().unwrap()), offset, 1);
    };
    let is_write = |record: &&Value| record["kind"] == "write";
    let last = records.last().unwrap();
    let torn = records
        .iter()
        .rev()
        .take_while(|record| record["cid"] == last["cid"])
        .find(is_write)
        .expect("the last group wrote something");
    flip_payload(torn);
    let kept = both_read(&second, "log").unwrap();
    assert!(!kept.is_empty() && kept[..] == records[..kept.len()]);
    assert!(kept.len() < records.len());
    assert!(kept.iter().all(|record| record["cid"] != last["cid"]));
    flip_payload(torn);
    assert_eq!(both_read(&second, "log").unwrap(), records);
    // In an earlier payload a flipped byte damages that record alone. That of a mark is its text.
    for written in [records.iter().find(is_write).unwrap(), mark.unwrap()] {
        flip_payload(written);
        let found = both_read(&second, "log").unwrap();
        assert_eq!(found.len(), records.len());
        for (found, record) in found.iter().zip(&records) {
            assert_eq!(found["damaged"], record == written);
            assert!(found == record || record == written);
        }
        flip_payload(written);
    }

    // A flipped bit anywhere else: both readers must agree on the result.
    let mut damaged = 0;
    for i in 0..FLIPS {
        let random = (i + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let files = names(&second.join("log"));
        let path = file(&files[(random >> 32) as usize % files.len()]);
        // Every second flip is near the start, where most records are.
        let reach = if i % 2 == 0 { 128 << 10 } else { MIB };
        let offset = (random >> 16) % reach.min(path.metadata().unwrap().len());
        let bit = 1 << (random >> 61);
        flip(&path, offset, bit);
        damaged += u32::from(both_read(&second, "log").is_none());
        flip(&path, offset, bit);
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
    let options = StoreOptions {
        max_segments: 16,
        retain: Some(Retention::All),
        ..small()
    };
    create(dir.path(), &options);
    let mut undone = 0;
    for (seed, (disk, to)) in (3..).zip([("a.img", 9), ("a.img", 20), ("b.img", 15)]) {
        let (store, mut ports) = open(dir.path(), &options);
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
    let dir = &test_dir();
    let options = StoreOptions {
        segment_size: SEGMENT,
        max_segments: 64,
        ..small()
    };
    create(dir, &options);
    let (store, mut ports) = open(dir, &options);
    for i in 0..30 {
        write(&mut ports[0], i * 40, i as u8 + 1, 24);
        flush(&mut ports[0]);
    }
    // No request waits for a summary to be written.
    let magic = |slot: usize| {
        let mut magic = [0; 8];
        let file = File::open(dir.join(format!("log/segment-{slot:05}"))).unwrap();
        file.read_exact_at(&mut magic, FOOTER).unwrap();
        &magic == b"WALVSUMM"
    };
    wait_until("three summaries", || (0..3).all(magic));
    let crashed = dir.join("crashed");
    crash_both(dir, &crashed);
    drop(ports);
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
        flip(&sealed, at, 4);
        let found = both_read(&crashed, "log").unwrap();
        assert_eq!(found.len(), records.len(), "byte {at}");
        assert_eq!(found == records, same, "byte {at}");
        let check = walvisor(&crashed, "disk check a.img --log log");
        let clean = at >= FOOTER - 30;
        assert_eq!(check.status.success(), clean, "byte {at}");
        flip(&sealed, at, 4);
    }
    // A damaged header whose copy is damaged too: the record is missing, which both notice.
    flip(&sealed, payload - 4096 + 60, 4);
    flip(&sealed, FOOTER - 30, 4);
    assert!(both_read(&crashed, "log").is_none());
}

/// The medium has changed a payload: `disk check` names it, and reads of it fail.
#[test]
fn disk_check_names_disk_sectors_and_lsn_of_damage() {
    let dir = tempfile::tempdir().unwrap();
    let crashed = unclosed(dir.path());
    let dump = || objects(&done(&crashed, "log dump disk.img.wal --records --json"));
    let records = dump();
    let number = |key: &str| records[1][key].as_u64().unwrap();
    done(&crashed, "disk export disk.img sound");
    let sound = std::fs::read(crashed.join("sound")).unwrap();
    write_byte(
        &segment(&crashed, &records[1]),
        number("payload_offset") + 5,
    );

    let (first, lsn) = (number("sector"), number("lsn"));
    let output = walvisor(&crashed, "disk check disk.img");
    assert_eq!(output.status.code(), Some(1));
    let [text, error] = [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    let last = first + 7;
    let wanted = format!("damaged: sectors {first} to {last}, written by LSN {lsn}");
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
    let report = json(&String::from_utf8(output.stdout).unwrap());
    assert_eq!(report["clean"], false);
    let damaged = report["log"]["damaged"].as_array().unwrap();
    let damaged: Vec<_> = damaged
        .iter()
        .map(|one| (&one["lsn"], &one["sector"]))
        .collect();
    assert_eq!(damaged, [(&lsn.into(), &first.into())]);

    let dumped = dump();
    assert!(dumped[1]["damaged"] == true && dumped[1]["payload_crc32c"].is_null());
    assert!(dumped[0] == records[0] && dumped[2..] == records[2..]);
    let damage = ["damaged", "segment-0000"];
    refused(&crashed, "disk export disk.img out", 1, &damage);
    // A rescue has all but the damaged sectors.
    let salvaged = |options: &str| {
        let output = walvisor(
            &crashed,
            &format!("disk export disk.img out --salvage {options}"),
        );
        assert_eq!(output.status.code(), Some(1));
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.contains("out: not all of disk.img: 4 KiB"), "{error}");
        String::from_utf8(output.stdout).unwrap()
    };
    let wanted = format!("disk.img: unreadable: sectors {first} to {last} (");
    assert!(salvaged("").contains(&wanted));
    let report = json(&salvaged("--force --json"));
    let lost = &report["unreadable"].as_array().unwrap()[..];
    assert_eq!(
        (lost.len(), &lost[0]["sector"], &lost[0]["sectors"]),
        (1, &first.into(), &8.into())
    );
    let lost = first as usize * 512..(last as usize + 1) * 512;
    let copied = std::fs::read(crashed.join("out")).unwrap();
    let mut whole = sound;
    assert!(whole[lost.clone()].iter().any(|&byte| byte != 0));
    whole[lost].fill(0);
    assert!(copied == whole);
    // What a checkpoint, and the log, have of it then, the store shows.
    let output = walvisor(&crashed, "disk checkpoint disk.img");
    let error = String::from_utf8(output.stderr).unwrap();
    assert_says(&error, &["disk check", "segment-0000"]);
}

#[test]
fn a_dump_of_a_damaged_log_shows_what_is_before_the_damage() {
    let dir = tempfile::tempdir().unwrap();
    let crashed = unclosed(dir.path());
    let records = objects(&done(&crashed, "log dump disk.img.wal --records --json"));
    // Damages the second group's descriptor; the groups after it prove that the group was
    // acknowledged.
    let behind = records[1]["payload_offset"].as_u64().unwrap() + 4096;
    write_byte(&segment(&crashed, &records[1]), behind + 97);
    let output = walvisor(&crashed, "log dump disk.img.wal --json");
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert!(
        error.lines().count() == 1 && error.contains("damaged"),
        "{error}"
    );
    let groups = objects(&String::from_utf8(output.stdout).unwrap());
    assert_eq!(groups.len(), 1, "the first group");
    for command in ["export disk.img out", "resize disk.img --size 16M"] {
        refused(&crashed, &format!("disk {command}"), 1, &["damaged"]);
    }
    assert!(names(&crashed).iter().all(|name| !name.starts_with("out")));
}

/// The segment that a record is in.
fn segment(dir: &Path, record: &Value) -> PathBuf {
    dir.join("disk.img.wal")
        .join(record["segment"].as_str().unwrap())
}

fn write_byte(path: &Path, at: u64) {
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(&[0xff], at).unwrap();
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
        ..small()
    };
    let at = |name: &str| dir.path().join(name);
    create(dir.path(), &options);
    let (store, mut ports) = open(dir.path(), &options);
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
            .args([DISKS[disk], "second"])
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
        let image = DISKS[disk];
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
    // The header of the file, of its first batch, and a payload behind it.
    for offset in [40, 4096 + 60, 4096 + 4096 + 5000] {
        flip(&path, offset, 4);
        let error = String::from_utf8_lossy(&first("both", 0).stderr).into_owned();
        assert!(error.contains("saved-"), "byte {offset}: {error}");
        let error = second("both", 0).expect_err("damage");
        assert!(
            error.starts_with("damaged: saved-"),
            "byte {offset}: {error}"
        );
        // The snapshot behind it, and the disk, are as they were.
        assert!(first("last", 0).status.success(), "byte {offset}");
        flip(&path, offset, 4);
    }
    assert!(first("both", 0).status.success());
}
