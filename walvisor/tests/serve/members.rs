//! Disks that are added to a daemon and removed from it while clients write to others on the same
//! log.
//!
//! `WALVISOR_MEMBER_CYCLES=N` makes it N additions and removals, and prints how long the flushes of
//! the other disks took with and without them.

use std::collections::HashSet;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use walvisor_testkit::nbd::{FLUSH, READ, RawClient, WRITE};
use walvisor_tests::run_sessions;

use super::control::ctl;
use super::{Daemon, create, text, walvisor};

/// Disks that stay, and disks that come and go.
const STAYING: usize = 6;
const CHANGING: usize = 4;
/// Blocks of 4 KiB that are written on each disk.
const BLOCKS: u64 = 64;
const BLOCK: u64 = 4096;

/// A client of one disk, and what the disk must hold.
struct Oracle {
    client: RawClient,
    held: PossibleBytes,
    writes: u64,
}

/// The bytes that a block may hold: that of its last FLUSH, and those of writes since then.
#[derive(Clone)]
struct PossibleBytes(Vec<HashSet<u8>>);

impl PossibleBytes {
    fn new() -> Self {
        Self(vec![HashSet::from([0]); BLOCKS as usize])
    }

    #[track_caller]
    fn check(&self, disk: &str, contents: &[u8]) {
        for (block, allowed) in self.0.iter().enumerate() {
            let found = &contents[block * BLOCK as usize..][..BLOCK as usize];
            assert!(
                found.iter().all(|byte| *byte == found[0]),
                "{disk}: block {block} is torn"
            );
            assert!(
                allowed.contains(&found[0]),
                "{disk}: block {block} holds {}, not {allowed:?}",
                found[0]
            );
        }
    }
}

impl Oracle {
    fn new(dir: &Path, disk: &str, held: PossibleBytes, writes: u64) -> Self {
        let mut client = RawClient::extended_to(&dir.join("s"), disk);
        held.check(disk, &read(&mut client, BLOCKS * BLOCK));
        Self {
            client,
            held,
            writes,
        }
    }

    /// Writes a block, and returns which; `None`: the connection has ended.
    fn write(&mut self) -> Option<usize> {
        self.writes += 1;
        let block = self.writes.wrapping_mul(0x9e37_79b9) % BLOCKS;
        let byte = (self.writes % 251) as u8;
        self.held.0[block as usize].insert(byte);
        let sent =
            self.client
                .try_request(WRITE, self.writes, block * BLOCK, &[byte; BLOCK as usize]);
        sent.then_some(block as usize)
    }

    /// Flushes; `false`: the connection has ended.
    fn flush(&mut self) -> bool {
        self.client.try_request(FLUSH, self.writes, 0, &[])
    }

    /// Writes some blocks, and flushes them. Returns how long the FLUSH took; `None`: the
    /// connection has ended.
    fn step(&mut self) -> Option<Duration> {
        let mut newest = Vec::new();
        for _ in 0..4 {
            newest.push((self.write()?, (self.writes % 251) as u8));
        }
        let began = Instant::now();
        self.flush().then_some(())?;
        for (block, byte) in newest {
            self.held.0[block] = HashSet::from([byte]);
        }
        Some(began.elapsed())
    }

    /// Writes without flushing, until the connection ends. Returns what the disk holds then: of
    /// each block the last write that was answered, or one that was not.
    fn write_until_the_end(mut self) -> PossibleBytes {
        while let Some(block) = self.write() {
            self.held.0[block] = HashSet::from([(self.writes % 251) as u8]);
        }
        self.held
    }
}

/// Reads the first bytes of a disk.
fn read(client: &mut RawClient, length: u64) -> Vec<u8> {
    client.request(0, READ, 0, 0, length);
    // The offset comes before the data.
    client.reply().data.split_off(8)
}

/// Ends the writers of a test, also if it fails.
struct StopGuard<'a>(&'a AtomicBool);

impl Drop for StopGuard<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

fn names(kind: &str, count: usize) -> Vec<String> {
    (0..count)
        .map(|number| format!("{kind}-{number}"))
        .collect()
}

/// Makes the disks, and starts a daemon with those that stay.
fn start(dir: &Path, staying: &[String]) -> Daemon {
    let disks: Vec<_> = staying
        .iter()
        .map(|disk| format!("--disk {}", spec(disk)))
        .collect();
    Daemon::start(
        dir,
        &format!("--control ctl --disk-dir . {}", disks.join(" ")),
    )
}

fn spec(disk: &str) -> String {
    format!("path={disk},log=log,socket=s")
}

fn make(dir: &Path, staying: &[String], changing: &[String]) {
    for disk in staying {
        create(dir, disk, "4M --log log");
    }
    // These are raw images, and join the log when they are first added.
    for disk in changing {
        fs::File::create(dir.join(disk))
            .unwrap()
            .set_len(4 << 20)
            .unwrap();
    }
}

/// The time below which 99 of 100 are.
fn p99(mut times: Vec<Duration>) -> Duration {
    times.sort();
    times[times.len() * 99 / 100]
}

#[test]
fn disks_come_and_go_while_clients_write_to_others() {
    let cycles = std::env::var("WALVISOR_MEMBER_CYCLES");
    let cycles: usize = cycles.map_or(12, |cycles| cycles.parse().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (staying, changing) = (names("stays", STAYING), names("changes", CHANGING));
    make(dir, &staying, &changing);
    let daemon = start(dir, &staying);
    let (stop, changes) = (AtomicBool::new(false), AtomicBool::new(false));
    let steps = AtomicUsize::new(0);
    let mut held = vec![PossibleBytes::new(); CHANGING];
    let mut took = Vec::new();
    let written: Vec<_> = thread::scope(|scope| {
        let (stop, changes, steps) = (&stop, &changes, &steps);
        let stopping = StopGuard(stop);
        let write = |disk| {
            let mut oracle = Oracle::new(dir, disk, PossibleBytes::new(), 0);
            let mut times = [Vec::new(), Vec::new()];
            while !stop.load(Ordering::SeqCst) {
                let with = usize::from(changes.load(Ordering::SeqCst));
                times[with].push(oracle.step().expect("these disks stay"));
                steps.fetch_add(1, Ordering::SeqCst);
            }
            (oracle.held, times)
        };
        let writers: Vec<_> = staying
            .iter()
            .map(|disk| scope.spawn(move || write(disk)))
            .collect();
        for cycle in 0..cycles {
            let disk = &changing[cycle % CHANGING];
            let held = &mut held[cycle % CHANGING];
            let began = Instant::now();
            changes.store(true, Ordering::SeqCst);
            let added = ctl(dir, &format!("add-disk {}", spec(disk)));
            assert_eq!(
                (&added["disk"], &added["log"]),
                (&json!(disk), &json!("log"))
            );
            let mut oracle = Oracle::new(dir, disk, held.clone(), cycle as u64 * 1000);
            for _ in 0..5 {
                oracle.step().expect("it is not removed yet");
            }
            // The disk is removed while its client writes.
            let writer = thread::spawn(move || oracle.write_until_the_end());
            let removed = ctl(dir, &format!("remove-disk {disk}"));
            assert_eq!(
                removed,
                json!({ "disk": disk, "image": "complete", "log": "log" })
            );
            *held = writer.join().unwrap();
            changes.store(false, Ordering::SeqCst);
            took.push(began.elapsed());
            held.check(disk, &fs::read(dir.join(disk)).unwrap());
            // The image can be used elsewhere at once, as a raw one.
            let info = walvisor(dir, &format!("disk export --force {disk} copy"));
            assert!(info.status.success(), "{}", text(&info.stderr));
            let until = steps.load(Ordering::SeqCst) + 50;
            while steps.load(Ordering::SeqCst) < until {
                thread::yield_now();
            }
        }
        drop(stopping);
        writers
            .into_iter()
            .map(|writer| writer.join().unwrap())
            .collect()
    });
    let stats = ctl(dir, "stats --json");
    let left: Vec<_> = stats["disks"]
        .as_array()
        .unwrap()
        .iter()
        .map(|disk| &disk["name"])
        .collect();
    assert_eq!(left, staying.iter().collect::<Vec<_>>());
    let metrics = text(&walvisor(dir, "ctl ctl stats --prometheus").stdout);
    assert!(!metrics.contains("changes-"), "{metrics}");
    assert_eq!(daemon.stop(), "");
    let mut times = [Vec::new(), Vec::new()];
    for (disk, (held, of_disk)) in staying.iter().zip(written) {
        held.check(disk, &fs::read(dir.join(disk)).unwrap());
        for (all, some) in times.iter_mut().zip(of_disk) {
            all.extend(some);
        }
    }
    let [without, with] = times;
    println!(
        "{cycles} additions and removals with {} disks: p99 of the other disks' flushes {:?} with \
         them ({}), {:?} without ({}); a cycle took {:?} in the mean",
        STAYING + CHANGING,
        p99(with.clone()),
        with.len(),
        p99(without.clone()),
        without.len(),
        took.iter().sum::<Duration>() / cycles as u32,
    );
}

#[test]
fn a_kill_while_disks_come_and_go_loses_nothing_that_a_flush_covered() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let (staying, changing) = (names("stays", 2), names("changes", 1));
    make(dir, &staying, &changing);
    let mut held = vec![PossibleBytes::new(); 3];
    let all = [&staying[..], &changing[..]].concat();
    // Whether the kill comes with an addition or a removal, and after how many steps of the other
    // disks' clients.
    let kills = [
        (false, 0),
        (true, 0),
        (false, 2),
        (true, 2),
        (false, 10),
        (true, 10),
        (true, 40),
    ];
    for (round, (removes, after)) in kills.into_iter().enumerate() {
        let daemon = start(dir, &staying);
        let steps = AtomicUsize::new(0);
        let first = round as u64 * 100_000;
        let (stays, changes) = held.split_at_mut(2);
        thread::scope(|scope| {
            let steps = &steps;
            for (disk, held) in staying.iter().zip(stays) {
                scope.spawn(move || {
                    let mut oracle = Oracle::new(dir, disk, held.clone(), first);
                    while oracle.step().is_some() {
                        steps.fetch_add(1, Ordering::SeqCst);
                    }
                    *held = oracle.held;
                });
            }
            let wait_for = |count: usize| {
                let until = steps.load(Ordering::SeqCst) + count;
                while steps.load(Ordering::SeqCst) < until {
                    thread::yield_now();
                }
            };
            let (disk, held) = (&changing[0], &mut changes[0]);
            let (add, remove) = (
                format!("add-disk {}", spec(disk)),
                format!("remove-disk {disk}"),
            );
            for cycle in 0..3 {
                ctl(dir, &add);
                let mut oracle = Oracle::new(dir, disk, held.clone(), first + cycle * 1000);
                wait_for(5);
                oracle.step().unwrap();
                *held = oracle.held;
                if cycle < 2 || !removes {
                    ctl(dir, &remove);
                }
            }
            let last = if removes { remove } else { add };
            // The answer does not come if the kill is earlier.
            scope.spawn(move || walvisor(dir, &format!("ctl ctl {last}")));
            wait_for(after);
            daemon.kill();
        });
        // All disks on one command line: one that had left the log is opened with it again.
        let daemon = start(dir, &all);
        for (disk, held) in all.iter().zip(&mut held) {
            let mut oracle = Oracle::new(dir, disk, held.clone(), 0);
            let contents = read(&mut oracle.client, BLOCKS * BLOCK);
            // Of the writes that no FLUSH covered, those stay that are there now.
            let bytes = contents
                .chunks(BLOCK as usize)
                .map(|block| HashSet::from([block[0]]));
            held.0 = bytes.collect();
        }
        assert_eq!(daemon.stop(), "");
    }
}

/// What `walvisor ctl` says when it refuses, without its name.
#[track_caller]
fn refused(dir: &Path, words: &str) -> String {
    let output = walvisor(dir, &format!("ctl ctl {words}"));
    let error = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{words}: {error}");
    assert_eq!(error.lines().count(), 1, "{words}: {error}");
    error.trim_start_matches("walvisor: ").trim_end().to_owned()
}

#[test]
fn impossible_additions_and_removals_are_one_line_errors() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for sub in ["in", "out"] {
        fs::create_dir(dir.join(sub)).unwrap();
    }
    for disk in ["first", "in/a", "in/b", "out/c"] {
        create(dir, disk, "1M");
    }
    std::os::unix::fs::symlink("../out/c", dir.join("in/link")).unwrap();
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk-dir in --disk path=first,socket=s",
    );
    assert_eq!(
        ctl(dir, "add-disk path=in/a,socket=s")["size_bytes"],
        1 << 20
    );
    run_sessions("members", dir, []);
    ctl(dir, "pause");
    let error = refused(dir, "add-disk path=in/b,socket=s");
    assert!(error.contains("the disks are paused"), "{error}");
    // A disk that is paused can go.
    ctl(dir, "remove-disk in/a");
    ctl(dir, "resume");
    // None of them has left anything behind, and the first disk may go too.
    assert_eq!(ctl(dir, "add-disk path=in/b,socket=s")["log"], "in/b.wal");
    ctl(dir, "remove-disk first");
    ctl(dir, "remove-disk in/b");
    let error = refused(dir, "remove-disk in/b");
    assert!(
        error.contains("no disk 'in/b': there are no disks"),
        "{error}"
    );
    assert_eq!(ctl(dir, "stats --json")["disks"], json!([]));
    assert!(!dir.join("out/log").exists());
    assert_eq!(daemon.stop(), "");

    let daemon = Daemon::start(dir, "--control ctl --disk path=first,socket=s");
    let error = refused(dir, "add-disk path=in/a,socket=s");
    assert!(
        error.contains("start it with --disk-dir DIR, a directory above in/a"),
        "{error}"
    );
    let error = refused(dir, "add-disk backend=ram,size=1M,socket=s");
    assert!(error.ends_with("start it with --disk-dir DIR"), "{error}");
    // Without the option disks can go all the same.
    assert_eq!(ctl(dir, "remove-disk first")["image"], "complete");
    assert_eq!(daemon.stop(), "");
    run_sessions("disk-dir", dir, []);
}

/// A disk whose log keeps history leaves with its records in the log, and comes back with them.
#[test]
fn removing_a_disk_with_history_says_that_its_image_is_incomplete() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for disk in ["a", "b"] {
        create(dir, disk, "1M --log log");
    }
    let disk = |name| format!("path={name},log=log,socket=s");
    let daemon = Daemon::start(
        dir,
        &format!(
            "--control ctl --disk-dir . --disk {},retain=all --disk {}",
            disk("a"),
            disk("b")
        ),
    );
    let write = |byte: u8| {
        let mut client = RawClient::extended_to(&dir.join("s"), "b");
        client.write(1, 0, &[byte; 4096]);
        client.flush(2);
    };
    write(7);
    let removed = ctl(dir, "remove-disk b");
    assert_eq!(removed["image"], "incomplete");
    assert!(
        removed["note"]
            .as_str()
            .unwrap()
            .contains("open the disk together with its log"),
        "{removed}"
    );
    ctl(dir, &format!("add-disk {}", disk("b")));
    let mut client = RawClient::extended_to(&dir.join("s"), "b");
    assert_eq!(read(&mut client, 4096), [7; 4096]);
    drop(client);
    ctl(dir, "remove-disk b");
    // With its last disk the log is closed, and everything can be opened elsewhere.
    ctl(dir, "remove-disk a");
    let exported = walvisor(dir, "disk export b copy --log log");
    assert!(exported.status.success(), "{}", text(&exported.stderr));
    assert_eq!(fs::read(dir.join("copy")).unwrap()[..4096], [7; 4096]);
    assert_eq!(daemon.stop(), "");
}

/// Requests that a limit holds back do not hold a removal up.
#[test]
fn limits_do_not_delay_a_removal() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "a", "1M");
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk path=a,socket=s,ops-per-second=1,ops-burst=1",
    );
    let mut client = RawClient::extended(&dir.join("s"));
    for cookie in 0..200 {
        client.request(0, READ, cookie, 0, 512);
    }
    // The first has been answered, so the server has begun to take them.
    assert_eq!(client.reply().kind & (1 << 15), 0);
    let removed: Value = ctl(dir, "remove-disk a");
    assert_eq!(removed["image"], "complete");
    assert!(client.is_closed());
    assert_eq!(daemon.stop(), "");
}

/// The disk's records are still in the log, which keeps history, so the process itself has the
/// image locked.
#[test]
fn a_removed_disk_is_not_added_without_its_log() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    fs::create_dir(dir.join("in")).unwrap();
    for disk in ["v1", "v2"] {
        let made = format!("disk create in/{disk} --size 1M --log in/shared");
        assert!(walvisor(dir, &made).status.success());
    }
    let daemon = Daemon::start(
        dir,
        "--control ctl --disk-dir in --disk path=in/v1,log=in/shared,retain=24h,socket=s --disk \
         path=in/v2,log=in/shared,socket=s",
    );
    ctl(dir, "remove-disk in/v2");
    let error = refused(dir, "add-disk path=in/v2,socket=s");
    assert!(error.contains("the disk is on the log in "), "{error}");
    assert!(error.contains("in/shared, not in in/v2.wal"), "{error}");
    assert!(!dir.join("in/v2.wal").exists());
    ctl(dir, "add-disk path=in/v2,log=in/shared,socket=s");
    // A checkpoint would end the history of both.
    let error = refused(dir, "checkpoint --disk in/v1");
    assert!(error.contains("in/v1, in/v2"), "{error}");
    assert!(error.contains("--give-up-history"), "{error}");
    let done = ctl(dir, "checkpoint --disk in/v1 --give-up-history");
    assert_eq!(done["disks"], json!(["in/v1"]));
    assert_eq!(daemon.stop(), "");
}

/// Who gives up a log's history is told of all its disks, also of those that others have.
#[test]
fn a_checkpoint_names_all_disks_whose_history_it_ends() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for disk in ["a", "b"] {
        create(dir, disk, "1M --log log --retain all");
    }
    let daemon = Daemon::start(dir, "--control ctl --disk path=a,log=log,socket=s");
    let b = fs::canonicalize(dir).unwrap().join("b");
    let b = b.display();
    let error = refused(dir, "checkpoint");
    let part = format!("would end it for a, {b}: what is there since the log began would be lost");
    assert!(error.contains(&part), "{error}");
    let mut client = RawClient::extended(&dir.join("s"));
    client.write(1, 0, &[1; 4096]);
    client.flush(2);
    let error = refused(dir, "checkpoint --disk a");
    assert!(
        error.contains(&format!("for a, {b}: what is there since 2")),
        "{error}"
    );
    let output = walvisor(dir, "ctl ctl checkpoint --give-up-history");
    let told = text(&output.stdout);
    let line = format!("a: checkpointed; gave up the history of a, {b} since 2");
    assert!(told.starts_with(&line), "{told}{}", text(&output.stderr));
    client.write(3, 0, &[2; 4096]);
    client.flush(4);
    drop(client);
    let given_up = ctl(dir, "checkpoint --give-up-history")["history_given_up"].clone();
    let log = &given_up[0];
    assert_eq!((&given_up[1], &log["log"]), (&Value::Null, &"log".into()));
    assert_eq!(log["disks"], json!(["a", b.to_string()]));
    assert!(log["since_unix_us"].as_u64() > Some(0), "{log}");
    assert_eq!(daemon.stop(), "");
}

/// A daemon opens the images that it is told of, whatever its log says.
#[test]
fn an_image_that_only_the_log_names_is_not_opened_until_somebody_else_names_it() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for disk in ["a", "b"] {
        assert!(
            walvisor(dir, &format!("disk create {disk} --size 1M --log log"))
                .status
                .success()
        );
    }
    let [a, b] = ["a", "b"].map(|disk| format!("--disk path={disk},log=log,socket={disk}.sock"));
    let daemon = Daemon::start(dir, &format!("{a} {b}"));
    let mut client = RawClient::extended_to(&dir.join("b.sock"), "b");
    client.write(1, 0, &[7; 4096]);
    client.flush(2);
    daemon.kill();

    let first = || fs::read(dir.join("b")).unwrap()[..4096].to_vec();
    let told = |arguments: &str| {
        let output = walvisor(dir, arguments);
        assert_eq!(output.status.code(), Some(1), "{arguments}");
        text(&output.stderr)
    };
    for arguments in [
        format!("serve nbd {a}"),
        "disk checkpoint a --log log".to_owned(),
    ] {
        let told = told(&arguments);
        assert!(
            told.contains("the log holds 1 record of another disk, last at "),
            "{told}"
        );
        assert!(
            told.contains("/b, which is not opened because only the log names it"),
            "{told}"
        );
    }
    assert_eq!(first(), [0; 4096]);

    let daemon = Daemon::start(dir, &format!("{a},detached=a:b"));
    assert_eq!(daemon.stop(), "");
    assert_eq!(first(), [7; 4096]);
}
