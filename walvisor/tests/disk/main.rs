//! `walvisor disk` and `walvisor log`, as scripts call them: exit statuses, one-line errors, round
//! trips, and a second reader of the format that finds the same records.

mod file;
mod formats;
mod history;
mod identity;
mod log;
mod losses;
mod membership;

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use walvisor_storage::{
    CommitWait, DiskOptions, Operation, Port, Store, StoreOptions, create_disk, default_log_dir,
};
use walvisor_testkit::copy_image;
use walvisor_testkit::process::walvisor;
use walvisor_testkit::queue::{run, write};
use walvisor_tests::{have, run_sessions};

const WALVISOR: &str = env!("CARGO_BIN_EXE_walvisor");
const MIB: u64 = 1 << 20;
const SMALL: StoreOptions = StoreOptions {
    segment_size: MIB,
    max_segments: 4,
    engine: walvisor_storage::EngineKind::Auto,
    group_commit: true,
    commit_wait: CommitWait::NONE,
    write_per_waiter: false,
    sync_latency: std::time::Duration::ZERO,
    operations_per_second: None,
    operation_latency: std::time::Duration::ZERO,
    close_time: None,
    index_memory: 64 << 20,
    retain: None,
    on_full: walvisor_storage::FullLogPolicy::Fail,
    await_replica: false,
    spill_limit: None,
    threads: None,
};

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

/// Runs `walvisor`, and asserts exit `status`, an empty stdout, and one line on stderr that
/// contains each of `parts`.
#[track_caller]
fn refused(dir: &Path, arguments: &str, status: i32, parts: &[&str]) {
    let output = walvisor(dir, arguments);
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(status), "{arguments}: {error}");
    assert!(output.stdout.is_empty(), "{arguments}: stdout is not empty");
    assert_eq!(error.lines().count(), 1, "{arguments}: {error}");
    assert!(error.starts_with("walvisor: "), "{error}");
    for part in parts {
        assert!(
            error.contains(part),
            "{arguments}: {part:?} is missing: {error}"
        );
    }
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

fn end(port: &mut Port, operation: Operation) {
    run(port, operation).unwrap();
}

/// Copies the files of an open log and its disks to `to`, as a crash would leave them. No
/// checkpoint may run.
fn crash(log: &Path, disks: &[&Path], to: &Path) {
    let log_copy = to.join(log.file_name().unwrap());
    std::fs::create_dir_all(&log_copy).unwrap();
    for name in names(log).iter().filter(|name| !name.ends_with(".new")) {
        std::fs::copy(log.join(name), log_copy.join(name)).unwrap();
    }
    for disk in disks {
        copy_image(disk, &to.join(disk.file_name().unwrap()));
    }
}

/// Makes a disk of 8 MiB in `crashed/`: 0..64 KiB in the base image; four commit groups in the log,
/// which overwrite, discard and zero parts of that, and write the last page.
fn unclosed(dir: &Path) -> PathBuf {
    let disk = dir.join("disk.img");
    let log = default_log_dir(&disk);
    create_disk(&disk, 8 * MIB, &log, &SMALL).unwrap();
    let open = || Store::open(&log, &[DiskOptions::new(&disk)], &SMALL).unwrap();
    let store = open();
    write(&mut store.disks()[0].open_port().unwrap(), 0, 1, 128);
    store.close().unwrap();
    let store = open();
    let mut port = store.disks()[0].open_port().unwrap();
    write(&mut port, 8, 2, 8);
    write(&mut port, 12, 3, 8);
    end(&mut port, Operation::Flush);
    let (sector, sectors) = (32, 16);
    end(&mut port, Operation::Discard { sector, sectors });
    end(&mut port, Operation::Flush);
    let operation = Operation::WriteZeroes {
        sector: 50,
        sectors: 1,
        unmap: false,
    };
    end(&mut port, operation);
    end(&mut port, Operation::Flush);
    write(&mut port, 8 * MIB / 512 - 8, 9, 8);
    end(&mut port, Operation::Flush);
    let crashed = dir.join("crashed");
    crash(&log, &[&disk], &crashed);
    crashed
}

/// The contents of the disk that `unclosed` makes, as its guest would read them.
fn unclosed_bytes() -> Vec<u8> {
    let mut bytes = vec![0; 8 << 20];
    let mut fill = |sectors: std::ops::Range<usize>, byte| {
        bytes[sectors.start * 512..sectors.end * 512].fill(byte);
    };
    fill(0..128, 1);
    fill(8..12, 2);
    fill(12..20, 3);
    fill(32..48, 0);
    fill(50..51, 0);
    fill(16376..16384, 9);
    bytes
}

#[test]
fn a_sparse_image_goes_in_and_comes_out_with_its_holes() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
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
    assert!(done(dir, "disk check disk.img").contains("clean"));
    let text = done(dir, "disk export disk.img out");
    assert!(
        text.starts_with("out: exported disk.img: 256 MiB, "),
        "{text}"
    );
    let want = std::fs::read(dir.join("raw")).unwrap();
    for name in ["disk.img", "out"] {
        assert!(std::fs::read(dir.join(name)).unwrap() == want, "{name}");
        let blocks = std::fs::metadata(dir.join(name)).unwrap().blocks() * 512;
        assert!(
            blocks <= allocated + 64 * 1024,
            "{name}: {blocks} > {allocated}"
        );
    }
    // A raw image without a log is a disk too; a pipe gets no progress bar (`done` asserts that
    // stderr is empty).
    done(dir, "disk export raw out --force --json");
    // The result is the same with any number of threads.
    for threads in ["1", "3"] {
        done(
            dir,
            &format!("disk import again.img raw --threads {threads}"),
        );
        done(
            dir,
            &format!("disk export again.img out --force --threads {threads}"),
        );
        done(dir, &format!("disk check again.img --threads {threads}"));
        for name in ["again.img", "out"] {
            assert!(std::fs::read(dir.join(name)).unwrap() == want, "{name}");
        }
        std::fs::remove_file(dir.join("again.img")).unwrap();
        std::fs::remove_dir_all(dir.join("again.img.wal")).unwrap();
    }
    refused(dir, "disk check raw --threads 0", 2, &["--threads"]);
    assert_eq!(names(dir), ["disk.img", "disk.img.wal", "out", "raw"]);
}

#[test]
fn export_writes_the_current_contents_and_checkpoint_makes_the_image_equal() {
    let dir = tempfile::tempdir().unwrap();
    let crashed = unclosed(dir.path());
    let files = |dir: &Path| -> Vec<Vec<u8>> {
        let log = dir.join("disk.img.wal");
        let mut paths: Vec<_> = names(&log).iter().map(|name| log.join(name)).collect();
        paths.push(dir.join("disk.img"));
        paths
            .iter()
            .map(|path| std::fs::read(path).unwrap())
            .collect()
    };
    let before = files(&crashed);
    assert!(before.last().unwrap() != &unclosed_bytes());
    done(&crashed, "disk export disk.img out");
    assert!(std::fs::read(crashed.join("out")).unwrap() == unclosed_bytes());
    assert!(before == files(&crashed), "an export changes nothing");
    done(&crashed, "disk checkpoint disk.img");
    assert!(std::fs::read(crashed.join("disk.img")).unwrap() == unclosed_bytes());
    if have("qemu-img", "qemu-utils") {
        let compared = Command::new("qemu-img")
            .args(["compare", "-f", "raw", "-F", "raw", "disk.img", "out"])
            .current_dir(&crashed)
            .output()
            .unwrap();
        assert!(compared.status.success(), "{compared:?}");
    }
    // Imports the image again as a second disk of the existing log.
    done(
        &crashed,
        "disk import again.img out --log disk.img.wal --json",
    );
    let info = json(&done(
        &crashed,
        "disk info again.img --log disk.img.wal --json",
    ));
    assert_eq!(info["log"]["disks"].as_array().unwrap().len(), 2);
    assert!(std::fs::read(crashed.join("again.img")).unwrap() == unclosed_bytes());
}

#[test]
fn resizes_keep_the_data_and_refuse_to_lose_it() {
    let dir = tempfile::tempdir().unwrap();
    let crashed = unclosed(dir.path());
    let crashed = crashed.as_path();
    // Resizes with records in the log, and without.
    let report = json(&done(crashed, "disk resize disk.img --size 16M --json"));
    assert_eq!(
        (&report["size_bytes"], &report["old_size_bytes"]),
        (&(16 * MIB).into(), &(8 * MIB).into())
    );
    let mut want = unclosed_bytes();
    want.resize(16 << 20, 0);
    done(crashed, "disk export disk.img grown");
    assert!(std::fs::read(crashed.join("grown")).unwrap() == want);
    let lost = &["disk.img", "8388096", "lose", "--shrink"];
    refused(crashed, "disk resize disk.img --size 8388096", 1, lost);
    let text = done(crashed, "disk resize disk.img --size 8M");
    assert_eq!(text, "disk.img: 8 MiB now, 16 MiB before\n");
    refused(crashed, "disk resize disk.img --size 8388096", 1, lost);
    done(crashed, "disk resize disk.img --size 4M --shrink");
    done(crashed, "disk resize disk.img --size 8M");
    want.truncate(8 << 20);
    want[4 << 20..].fill(0);
    assert!(std::fs::read(crashed.join("disk.img")).unwrap() == want);
    assert!(done(crashed, "disk check disk.img").contains("clean"));
}

#[test]
fn bad_input_is_one_line_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    std::fs::write(dir.join("odd"), [0; 1000]).unwrap();
    std::fs::write(dir.join("raw"), [7; 1024]).unwrap();
    std::fs::write(dir.join("empty"), []).unwrap();
    std::fs::create_dir(dir.join("full.wal")).unwrap();
    std::fs::write(dir.join("full.wal/file"), []).unwrap();
    done(dir, "disk create disk.img --size 1M");
    let before = names(dir);
    let store = {
        let options = [DiskOptions::new(dir.join("open.img"))];
        create_disk(
            &dir.join("open.img"),
            MIB,
            &dir.join("open.img.wal"),
            &SMALL,
        )
        .unwrap();
        Store::open(&dir.join("open.img.wal"), &options, &SMALL).unwrap()
    };
    run_sessions("bad-input", dir, []);
    store.close().unwrap();
    std::fs::remove_file(dir.join("open.img")).unwrap();
    std::fs::remove_dir_all(dir.join("open.img.wal")).unwrap();
    assert_eq!(names(dir), before, "nothing is left behind");
    assert!(std::fs::read(dir.join("raw")).unwrap() == [7; 1024]);
    assert_eq!(std::fs::metadata(dir.join("disk.img")).unwrap().len(), MIB);
}

/// An image is removed while its log stays, and a new disk is made in its place.
#[test]
fn a_new_disk_never_gets_records_of_a_deleted_one() {
    let dir = tempfile::tempdir().unwrap();
    let crashed = unclosed(dir.path());
    std::fs::write(crashed.join("raw"), vec![5; 8 << 20]).unwrap();
    // After the checkpoint everything is in the base image, so the log can forget the disk.
    done(&crashed, "disk checkpoint disk.img");
    std::fs::remove_file(crashed.join("disk.img")).unwrap();
    done(&crashed, "disk import disk.img raw");
    assert!(done(&crashed, "disk check disk.img").contains("clean"));
    let info = json(&done(&crashed, "disk info disk.img --json"));
    assert_eq!(info["log"]["disks"].as_array().unwrap().len(), 1);

    // With records left in the log, a new disk is refused.
    let log = crashed.join("disk.img.wal");
    let disk = crashed.join("disk.img");
    let store = Store::open(&log, &[DiskOptions::new(&disk)], &SMALL).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    write(&mut port, 0, 6, 8);
    end(&mut port, Operation::Flush);
    let kept = crashed.join("kept");
    crash(&log, &[], &kept);
    drop(port);
    store.close().unwrap();
    std::fs::remove_dir_all(&log).unwrap();
    std::fs::rename(kept.join("disk.img.wal"), &log).unwrap();
    std::fs::remove_file(&disk).unwrap();
    let parts = &["disk.img", "unapplied", "disk discard"];
    refused(&crashed, "disk import disk.img raw", 1, parts);
    refused(&crashed, "disk create disk.img --size 8M", 1, parts);
    assert!(!disk.exists());
}
