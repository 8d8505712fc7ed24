//! `walvisor ctl export`: copies of disks that clients write meanwhile.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::Signal;
use serde_json::{Value, json};
use walvisor_storage::{StoreOptions, create_disk, default_log_dir};
use walvisor_testkit::nbd::{FLUSH, RawClient, SimpleClient, WRITE};
use walvisor_testkit::{MemoryFs, Process, wait_until};

use super::{Daemon, MIB, WALVISOR, create, noise, text, walvisor};

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 48 * MIB / BLOCK;

/// The range of write number `number`, in blocks: first the whole disk in order, then anything.
fn range(number: u64) -> std::ops::Range<u64> {
    let whole = BLOCKS * BLOCK / MIB;
    if number <= whole {
        let length = MIB / BLOCK;
        return (number - 1) * length..number * length;
    }
    let mixed = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
    let first = mixed % BLOCKS;
    first..(first + 1 + mixed / BLOCKS % 16).min(BLOCKS)
}

/// The disk after the first `count` writes: for each block the number of its last write.
fn after(count: u64) -> Vec<u64> {
    let mut blocks = vec![0; BLOCKS as usize];
    for number in 1..=count {
        let range = range(number);
        blocks[range.start as usize..range.end as usize].fill(number);
    }
    blocks
}

/// The number with which each block of a copy is filled.
fn found(copy: &Path) -> Vec<u64> {
    let bytes = fs::read(copy).unwrap();
    assert_eq!(bytes.len() as u64, BLOCKS * BLOCK);
    let block = |block: &[u8]| {
        let first: [u8; 8] = block[..8].try_into().unwrap();
        assert!(block.chunks(8).all(|word| word == first), "a torn block");
        u64::from_le_bytes(first)
    };
    bytes.chunks(BLOCK as usize).map(block).collect()
}

/// Tells the writer to stop, also when the test fails.
struct StopGuard<'a>(&'a AtomicBool);

impl Drop for StopGuard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// While checkpoints overwrite the image all the time.
#[test]
fn each_export_is_the_disk_at_one_moment_beside_a_writer() {
    export_beside_a_writer("");
}

/// The log can't be copied as long as an export looks at it, so exports give way.
#[test]
fn an_export_of_a_disk_that_keeps_history_fails_no_write() {
    export_beside_a_writer(",retain=1h");
}

/// Each export is the disk after one of the writes, at least the last one that was acknowledged
/// before it began. `keys`: of the log.
fn export_beside_a_writer(keys: &str) {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let disk = dir.join("disk.img");
    // Half of this log is full after 2 MiB.
    let options = StoreOptions {
        segment_size: MIB,
        max_segments: 4,
        ..StoreOptions::default()
    };
    create_disk(&disk, BLOCKS * BLOCK, &default_log_dir(&disk), &options).unwrap();
    let arguments = format!("--control ctl --disk path=disk.img,socket=s{keys}");
    let daemon = Daemon::start(dir, &arguments);
    let (acknowledged, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let whole = BLOCKS * BLOCK / MIB;
    let checkpoints = || {
        let stats = walvisor(dir, "ctl ctl stats --json").stdout;
        let stats: Value = serde_json::from_slice(&stats).unwrap();
        stats["logs"][0]["checkpoints"].as_u64().unwrap()
    };
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut client = RawClient::extended(&dir.join("s"));
            for number in 1.. {
                let range = range(number);
                let len = (range.end - range.start) * BLOCK;
                let data = number.to_le_bytes().repeat(len as usize / 8);
                client.write(number, range.start * BLOCK, &data);
                if number.is_multiple_of(8) || number == whole {
                    client.flush(number);
                    acknowledged.store(number, Ordering::SeqCst);
                }
                if stop.load(Ordering::SeqCst) {
                    break;
                }
            }
        });
        let _stopping = StopGuard(&stop);
        while acknowledged.load(Ordering::SeqCst) < whole {
            thread::yield_now();
        }
        let before = checkpoints();
        for round in 0..6 {
            let least = acknowledged.load(Ordering::SeqCst);
            let output = walvisor(dir, &format!("ctl ctl export -o copy-{round} --json"));
            assert!(output.status.success(), "{}", text(&output.stderr));
            assert!(output.stderr.is_empty(), "{}", text(&output.stderr));
            let done: Value = serde_json::from_slice(&output.stdout).unwrap();
            assert_eq!(
                done,
                json!({
                    "disk": "disk.img",
                    "raw": format!("copy-{round}"),
                    "size_bytes": BLOCKS * BLOCK,
                    "copied_bytes": BLOCKS * BLOCK,
                    "shared": false,
                })
            );
            let copy = found(&dir.join(format!("copy-{round}")));
            let newest = *copy.iter().max().unwrap();
            assert!(newest >= least, "{newest} of {least}");
            assert!(copy == after(newest), "copy {round} is no moment");
        }
        assert!(checkpoints() >= before + 6);
    });
    assert_eq!(
        text(&walvisor(dir, "ctl ctl exports --json").stdout),
        "{\"exports\":[]}\n"
    );
    let output = walvisor(dir, "ctl ctl export-cancel disk.img");
    let error = text(&output.stderr);
    assert!(error.contains("no export of disk 'disk.img'"), "{error}");
    let told = daemon.stop();
    // The log is much smaller than the hour's writes.
    let expected = |line: &str| line.contains("no room for all the history it should keep");
    assert!(told.lines().all(expected), "{told}");
    assert_eq!(told.is_empty(), keys.is_empty());
}

/// One backup after another for three seconds, then none for three seconds, and so on. Prints what
/// commits took with and without one; `WALVISOR_BACKUP_SECONDS=600` goes on for ten minutes.
#[test]
fn commits_go_on_beside_one_backup_after_another() {
    let seconds = std::env::var("WALVISOR_BACKUP_SECONDS");
    let seconds: u64 = seconds.map_or(12, |seconds| seconds.parse().unwrap());
    for keys in ["", ",retain=1h"] {
        commit_beside_backups(keys, Duration::from_secs(seconds / 2));
    }
}

fn commit_beside_backups(keys: &str, time: Duration) {
    const SIZE: u64 = 256 * MIB;
    const TURN: Duration = Duration::from_secs(3);
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let options = StoreOptions {
        segment_size: 4 * MIB,
        max_segments: 16,
        ..StoreOptions::default()
    };
    let disk = dir.join("disk.img");
    create_disk(&disk, SIZE, &default_log_dir(&disk), &options).unwrap();
    let arguments = format!("--control ctl --disk path=disk.img,socket=s{keys}");
    let daemon = Daemon::start(dir, &arguments);
    let mut client = SimpleClient::connect(&dir.join("s"), "").unwrap();
    let mut write = |offset: u64, bytes: usize| {
        let mut data = noise(bytes);
        let done = client.end(WRITE, offset, bytes, &mut data, false);
        done.and_then(|()| client.end(FLUSH, 0, 0, &mut [], false))
    };
    (0..SIZE / MIB).for_each(|place| write(place * MIB, MIB as usize).unwrap());
    let (copying, stop) = (AtomicBool::new(false), AtomicBool::new(false));
    let (took, backups) = thread::scope(|scope| {
        let stopping = StopGuard(&stop);
        let writer = scope.spawn(|| {
            let (mut took, mut number) = ([Vec::new(), Vec::new()], 0_u64);
            while !stop.load(Ordering::Relaxed) {
                number += 1;
                let place = number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
                let (before, began) = (copying.load(Ordering::Relaxed), Instant::now());
                write(place % (SIZE / BLOCK) * BLOCK, BLOCK as usize).expect("no write fails");
                let time = began.elapsed();
                if before == copying.load(Ordering::Relaxed) {
                    took[usize::from(before)].push(time);
                }
            }
            took
        });
        let (end, mut backups) = (Instant::now() + time, 0);
        while Instant::now() < end || backups == 0 {
            thread::sleep(TURN);
            let turn = Instant::now() + TURN;
            while Instant::now() < turn {
                copying.store(true, Ordering::Relaxed);
                let output = walvisor(dir, "ctl ctl export -o copy --force");
                copying.store(false, Ordering::Relaxed);
                assert!(output.status.success(), "{}", text(&output.stderr));
                backups += 1;
            }
        }
        drop(stopping);
        (writer.join().unwrap(), backups)
    });
    let mut p99 = Vec::new();
    for (mut took, with) in took.into_iter().zip(["without", "with"]) {
        took.sort_unstable();
        let at = |part: usize| took[took.len() * part / 1000];
        println!(
            "retain{}: {} commits {with} a backup: p50 {:?}, p99 {:?}, p999 {:?}, longest {:?}",
            keys.get(7..).unwrap_or("=off"),
            took.len(),
            at(500),
            at(990),
            at(999),
            took.last().unwrap()
        );
        p99.push(at(990).as_secs_f64());
    }
    // The first would have ended the test.
    println!(
        "{backups} backups of {} MiB, 0 writes failed (EIO), p99 with a backup: {:.2} times that \
         without",
        SIZE / MIB,
        p99[1] / p99[0]
    );
    drop(client);
    daemon.stop();
}

/// Whoever is killed, the file at the name is whole or missing, and the next export succeeds.
#[test]
fn a_kill_leaves_no_part_of_a_copy_at_its_name() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "8M");
    let start = || Daemon::start(dir, "--control ctl --disk path=disk.img,socket=s");
    let daemon = start();
    RawClient::extended(&dir.join("s")).write(1, 0, &noise(1 << 20));
    let begin = || {
        let mut command = Command::new(WALVISOR);
        command
            .args(["ctl", "ctl", "export", "-o", "copy"])
            .current_dir(dir)
            .stderr(Stdio::piped());
        let client = Process::spawn(&mut command);
        wait_until("a part", || dir.join("copy.walvisor-part").exists());
        client
    };
    // A daemon that is stopped answers nothing, so the kill comes before the end.
    daemon.signal(Signal::STOP);
    let mut client = begin();
    client.kill().unwrap();
    client.wait().unwrap();
    daemon.signal(Signal::CONT);
    assert!(!dir.join("copy").exists());
    let copied = |name: &str| {
        let output = walvisor(dir, &format!("ctl ctl export -o {name}"));
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(
            text(&output.stdout),
            format!("{name}: exported disk.img: 8 MiB, 1 MiB of them copied\n")
        );
        let bytes = fs::read(dir.join(name)).unwrap();
        assert!(bytes[..1 << 20] == noise(1 << 20) && bytes.len() == 8 << 20);
        assert!(!dir.join(format!("{name}.walvisor-part")).exists());
    };
    copied("copy");
    fs::remove_file(dir.join("copy")).unwrap();
    daemon.signal(Signal::STOP);
    let mut client = begin();
    daemon.kill();
    let (status, error) = (client.wait().unwrap(), client.errors());
    assert_eq!(
        (status.code(), error.lines().count()),
        (Some(1), 1),
        "{error}"
    );
    // The kill came after the client's request or before it.
    let told = ["its process", "running with --control ctl"];
    assert!(told.iter().any(|told| error.contains(told)), "{error}");
    assert!(!dir.join("copy").exists() && !dir.join("copy.walvisor-part").exists());
    let daemon = start();
    copied("copy");
    assert_eq!(daemon.stop(), "");
}

#[test]
fn a_failed_export_is_one_line_and_the_disk_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "8M");
    fs::write(dir.join("raw.img"), noise(1 << 20)).unwrap();
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk path=disk.img,socket=s --disk path=raw.img,backend=raw,socket=r",
    );
    let mut client = RawClient::extended(&dir.join("s"));
    client.write(1, 0, &noise(4 << 20));
    let refused = |words: &str, part: &str| {
        let output = walvisor(dir, &format!("ctl ctl export {words}"));
        let error = text(&output.stderr);
        assert_eq!(
            (output.status.code(), error.lines().count()),
            (Some(1), 1),
            "{words}: {error}"
        );
        assert!(error.contains(part), "{words}: {error}");
    };
    refused("-o out", "say which disk: disk.img, raw.img");
    refused(
        "--disk raw.img -o out",
        "a disk without a log can't be exported",
    );
    refused("--disk other -o out", "no disk 'other'");
    refused("--disk disk.img -o none/out", "none/out");
    assert!(!dir.join("out").exists() && !dir.join("out.walvisor-part").exists());
    fs::write(dir.join("out"), "mine").unwrap();
    refused("--disk disk.img -o out", "--force");
    assert_eq!(fs::read(dir.join("out")).unwrap(), b"mine");
    let output = walvisor(dir, "ctl ctl export --disk disk.img -o out --force");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(fs::read(dir.join("out")).unwrap()[..4 << 20] == noise(4 << 20));
    // A disk's own image is no empty file.
    refused("--disk disk.img -o disk.img --force", "open elsewhere");
    let socket = UnixStream::connect(dir.join("ctl")).unwrap();
    let mut lines = BufReader::new(&socket);
    (&socket)
        .write_all(
            b"{\"execute\": \"export\", \"arguments\": {\"disk\": \"disk.img\"}, \"id\": 7}\n",
        )
        .unwrap();
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    assert!(
        line.contains("SCM_RIGHTS") && line.contains("\"id\":7"),
        "{line}"
    );
    if let Some(small) = MemoryFs::tmpfs("size=1m") {
        let out = small.path().join("out");
        let words = format!("--disk disk.img -o {}", out.display());
        refused(&words, "the exported file: ");
        refused(&words, "No space left on device");
        assert_eq!(fs::read_dir(small.path()).unwrap().count(), 0);
    }
    client.write(2, 4 << 20, &noise(4096));
    client.flush(3);
    drop(client);
    assert_eq!(daemon.stop(), "");
}

#[test]
fn a_disk_of_vhost_user_is_exported() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::write(dir.join("source"), noise(2 << 20)).unwrap();
    let imported = walvisor(dir, "disk import disk.img source");
    assert!(imported.status.success(), "{}", text(&imported.stderr));
    let daemon = Daemon::start_door(
        dir,
        "vhost-user",
        "--control ctl --disk path=disk.img,socket=s",
    );
    let output = walvisor(dir, "ctl ctl export -o copy");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(fs::read(dir.join("copy")).unwrap() == noise(2 << 20));
    assert_eq!(daemon.stop(), "");
}
