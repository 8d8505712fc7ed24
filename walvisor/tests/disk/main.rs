//! `walvisor disk` and `walvisor log`, as scripts call them: exit statuses, one-line errors, round
//! trips, and a second reader of the format that finds the same records.

mod formats;
mod history;
mod identity;
mod log;
mod losses;

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use serde_json::Value;
use walvisor_storage::{DiskOptions, Operation, Store, StoreOptions, create_disk, default_log_dir};
use walvisor_testkit::process::{assert_says, refused, walvisor};
use walvisor_testkit::queue::{flush, run, write};
use walvisor_testkit::{copy_image, copy_log, test_dir};
use walvisor_tests::run_sessions;

const WALVISOR: &str = env!("CARGO_BIN_EXE_walvisor");
const MIB: u64 = 1 << 20;

#[test]
fn a_new_log_has_the_size_that_is_asked_for() {
    let dir = &test_dir();
    done(dir, "disk create a --size 1M --log-size 64M --retain 1h");
    std::fs::write(dir.join("raw"), vec![7; 4096]).unwrap();
    let said = done(dir, "disk import b raw --log-size 1G --retain 1h");
    assert!(
        said.ends_with("b: its log b.wal keeps the history of the last 1h\n"),
        "{said}"
    );
    for (disk, segment, count) in [("a", 16 << 20, 4), ("b", 64 << 20, 16)] {
        let log = &json(&done(dir, &format!("disk info {disk} --json")))["log"];
        assert_eq!(
            (&log["segment_bytes"], &log["max_segments"]),
            (&segment.into(), &count.into())
        );
        assert_eq!(log["retain"], "1h");
    }
    for (words, status, part) in [
        ("create c --size 1M --log-size 48M", 2, "give at least 64M"),
        ("create c --size 1M --log-size 8P", 1, "4 to 65536"),
        (
            "create c --size 1M --log a.wal --log-size 64M",
            1,
            "walvisor log resize a.wal --size SIZE",
        ),
        (
            "import c raw --log a.wal --log-size 64M",
            1,
            "walvisor log resize a.wal --size SIZE",
        ),
    ] {
        refused(dir, &format!("disk {words}"), status, &[part]);
    }
    assert!(!dir.join("c").exists() && !dir.join("c.wal").exists());
}

#[test]
fn disks_are_listed_by_their_logs() {
    let dir = &test_dir();
    for disk in [
        "a --size 1M",
        "b --size 2M --log a.wal",
        "c --size 3M",
        "d --size 4M",
    ] {
        done(dir, &format!("disk create {disk}"));
    }
    done(dir, "disk snapshot a monday");
    std::fs::remove_file(dir.join("b")).unwrap();
    let rows = |words: &str| {
        let listed: Value =
            serde_json::from_str(&done(dir, &format!("disk list {words} --json"))).unwrap();
        let rows = listed["disks"].as_array().unwrap().clone();
        let row = |row: Value| {
            let path = Path::new(row["disk"].as_str().unwrap());
            assert_eq!(path.parent(), Some(&*dir.canonicalize().unwrap()));
            let names = row["snapshots"].as_array().unwrap().len();
            format!(
                "{:?} {} {} {} {names}",
                path.file_name().unwrap(),
                row["size_bytes"],
                row["image"],
                row["log"]
            )
        };
        rows.into_iter().map(row).collect::<Vec<_>>()
    };
    let of_a = [
        "\"a\" 1048576 \"there\" \"a.wal\" 1",
        "\"b\" 2097152 \"missing\" \"a.wal\" 1",
    ];
    assert_eq!(rows("a.wal"), of_a);
    assert_eq!(rows("")[..2], of_a);
    assert_eq!(rows("").len(), 4);
    assert!(done(dir, "disk list c.wal").contains("nobody"));
    // The control file of one is gone bad: the others are listed.
    std::fs::write(dir.join("d.wal/control"), [7; 100]).unwrap();
    let output = walvisor(dir, "disk list");
    let [listed, error] =
        [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
    assert_eq!((output.status.code(), listed.lines().count()), (Some(1), 4));
    assert!(
        error.contains("d.wal") && error.lines().count() == 1,
        "{error}"
    );
    refused(
        dir,
        "disk list none",
        1,
        &["none: No such file", "name a log"],
    );
}

/// A log of four small segments.
fn small() -> StoreOptions {
    StoreOptions {
        segment_size: MIB,
        max_segments: 4,
        ..StoreOptions::default()
    }
}

/// Runs `walvisor`, asserts success and an empty stderr, and returns stdout.
#[track_caller]
fn done(dir: &Path, arguments: &str) -> String {
    let output = walvisor(dir, arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success() && errors.is_empty(),
        "{arguments}: {errors}"
    );
    String::from_utf8(output.stdout).unwrap()
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn objects(text: &str) -> Vec<Value> {
    text.lines().map(json).collect()
}

/// The names in a directory, sorted.
fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Copies the files of an open log and its disks to `to`, as a crash would leave them. No
/// checkpoint may run.
fn crash(log: &Path, disks: &[&Path], to: &Path) {
    let log_copy = to.join(log.file_name().unwrap());
    std::fs::create_dir_all(&log_copy).unwrap();
    copy_log(log, &log_copy);
    for disk in disks {
        copy_image(disk, &to.join(disk.file_name().unwrap()));
    }
}

/// Makes a disk of 8 MiB in `crashed/`: 0..64 KiB in the base image; four commit groups in the log,
/// which overwrite, discard and zero parts of that, and write the last page.
fn unclosed(dir: &Path) -> PathBuf {
    let disk = dir.join("disk.img");
    let log = default_log_dir(&disk);
    create_disk(&disk, 8 * MIB, &log, &small()).unwrap();
    let open = || Store::open(&log, &[DiskOptions::new(&disk)], &small()).unwrap();
    let store = open();
    write(&mut store.disks()[0].open_port().unwrap(), 0, 1, 128);
    store.close().unwrap();
    let store = open();
    let mut port = store.disks()[0].open_port().unwrap();
    write(&mut port, 8, 2, 8);
    write(&mut port, 12, 3, 8);
    flush(&mut port);
    let (sector, sectors) = (32, 16);
    run(&mut port, Operation::Discard { sector, sectors }).unwrap();
    flush(&mut port);
    let operation = Operation::WriteZeroes {
        sector: 50,
        sectors: 1,
        unmap: false,
    };
    run(&mut port, operation).unwrap();
    flush(&mut port);
    write(&mut port, 8 * MIB / 512 - 8, 9, 8);
    flush(&mut port);
    let crashed = dir.join("crashed");
    crash(&log, &[&disk], &crashed);
    crashed
}

/// The disk that `unclosed` makes, as its guest would read it: the base image, which has LSN 1, and
/// as it was after each of the five records.
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
    states.collect()
}

fn unclosed_bytes() -> Vec<u8> {
    states().pop().unwrap()
}

/// What each command prints, what it makes, and what it changes.
#[test]
fn each_command_answers_and_does_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = unclosed(dir.path());
    run_sessions("answers", &dir, []);
    let states = states();
    for (name, after) in [
        ("lsn-1", 0),
        ("lsn-3", 2),
        ("cid-3", 3),
        ("newest", 5),
        ("clone", 3),
        ("again", 3),
        ("back", 2),
        ("before", 5),
    ] {
        let bytes = std::fs::read(dir.join(name)).unwrap();
        assert!(bytes == states[after], "{name}");
    }
    for name in ["out", "disk.img"] {
        let bytes = std::fs::read(dir.join(name)).unwrap();
        assert!(bytes == states[5][..4 << 20], "{name}");
    }
    // What was refused was not made.
    for none in "none none.wal none.img none.img.wal third clone.wal".split(' ') {
        assert!(!dir.join(none).exists(), "{none}");
    }
}

#[test]
fn a_sparse_image_goes_in_and_comes_out_with_its_holes() {
    let dir = &test_dir();
    let raw = File::create(dir.join("raw")).unwrap();
    raw.set_len(256 * MIB + 512).unwrap();
    // Data at the start, in the middle, and in the odd sector at the end.
    for (at, len) in [(0, 5000), (100 * MIB, MIB as usize), (256 * MIB, 512)] {
        raw.write_all_at(&vec![0xa5; len], at).unwrap();
    }
    raw.sync_all().unwrap();
    let report = json(&done(dir, "disk import disk.img raw --json"));
    assert_eq!(report["size_bytes"], 256 * MIB + 512);
    let copied = report["copied_bytes"].as_u64().unwrap();
    let allocated = raw.metadata().unwrap().blocks() * 512;
    assert!((MIB..2 * MIB).contains(&copied), "{report}");
    // A pipe gets no progress bar: `done` asserts that stderr is empty.
    done(dir, "disk export disk.img out");
    let want = std::fs::read(dir.join("raw")).unwrap();
    for name in ["disk.img", "out"] {
        assert!(std::fs::read(dir.join(name)).unwrap() == want, "{name}");
        let blocks = std::fs::metadata(dir.join(name)).unwrap().blocks() * 512;
        let most = allocated + 64 * 1024;
        assert!(blocks <= most, "{name}: {blocks} > {most}");
    }
    // A raw image without a log is a disk too.
    done(dir, "disk export raw out --force --threads 3");
    assert_eq!(names(dir), ["disk.img", "disk.img.wal", "out", "raw"]);
}

#[test]
fn bad_input_is_one_line_and_changes_nothing() {
    let dir = &test_dir();
    std::fs::write(dir.join("odd"), [0; 1000]).unwrap();
    std::fs::write(dir.join("raw"), [7; 1024]).unwrap();
    std::fs::write(dir.join("empty"), []).unwrap();
    std::fs::create_dir(dir.join("full.wal")).unwrap();
    std::fs::write(dir.join("full.wal/file"), []).unwrap();
    done(dir, "disk create disk.img --size 1M");
    let before = names(dir);
    run_sessions("bad-input", dir, []);
    assert_eq!(names(dir), before, "nothing is left behind");
    assert!(std::fs::read(dir.join("raw")).unwrap() == [7; 1024]);
    assert_eq!(std::fs::metadata(dir.join("disk.img")).unwrap().len(), MIB);
}

/// The file that another process has open is named.
#[test]
fn what_is_open_elsewhere_is_refused_and_stays() {
    let dir = &test_dir();
    std::fs::write(dir.join("raw"), [7; 1024]).unwrap();
    for name in ["disk.img", "other.img", "open.img"] {
        done(dir, &format!("disk create {name} --size 1M"));
    }
    let disks = [DiskOptions::new(dir.join("open.img"))];
    let store = Store::open(&dir.join("open.img.wal"), &disks, &small()).unwrap();
    let before = names(dir);
    let process = &format!("process {}", std::process::id());
    let (log, open) = (
        "open.img.wal/control: already open elsewhere",
        "open.img: already open",
    );
    std::thread::scope(|scope| {
        // Each waits a few seconds, for it could be that a killed process is about to end.
        for (arguments, parts) in [
            ("disk import a.img raw --log open.img.wal", [log, process]),
            ("disk import b.img open.img", [open, ""]),
            (
                "disk export disk.img disk.img --force",
                ["disk.img: already open", ""],
            ),
            ("disk export other.img open.img --force", [open, ""]),
            ("disk export open.img new", [log, process]),
            ("disk resize open.img --size 2M", [log, process]),
            ("disk restore open.img --at -0s --in-place", [log, process]),
            ("log dump open.img.wal", [log, process]),
        ] {
            scope.spawn(move || refused(dir, arguments, 1, &parts));
        }
    });
    store.close().unwrap();
    assert_eq!(names(dir), before, "nothing is left behind");
}
