//! Databases on the disk, and power cuts under load: MariaDB without its doublewrite buffer,
//! PostgreSQL without full-page writes, both also where the kernel knows that the disk writes
//! atomically, and SQLite with either journal. Every commit that a client has reported to the test,
//! outside of the guest, must be there afterwards, and every page must be whole.
//!
//! A cut is a SIGKILL of the guest and of the daemon, at a moment and in an order that a seed
//! decides (`WALVISOR_SEED` repeats them). The data in the memory of both is lost. The data that
//! the daemon had written survives in the host's page cache, even without a sync. So a kill tears
//! no page on any disk, and cannot show whether a disk tears pages. Two tests together can: this
//! test shows that each page that the database writes is one record of the log, never two. And the
//! storage crate's tests, on a medium that loses and tears unsynced data, show that a power cut
//! leaves a record whole or not at all.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde_json::Value;
use tempfile::TempDir;
use walvisor_guest_images::{Cache, Guest, NewestUserMode, Reporter, UserMode};
use walvisor_testkit::Random;
use walvisor_testkit::{Daemon, leash};
use walvisor_tests::{binary, compile, have_all, postgresql, serve, succeed};

const SQLITE: &str = include_str!("../scripts/sqlite.sh");

/// Commands that make the file systems so that the blocks of a page stay together. Otherwise a page
/// could be two requests, and a power cut could leave one of them.
const EXT4: &str = "mkfs.ext4 -q -O bigalloc -C 16384 $DISK && mount $DISK disk";
const XFS: &str = "mkfs.xfs -q $DISK && mount $DISK disk && xfs_io -c 'extsize 64k' disk";

/// Bytes of a block of `filefrag`, and of a sector.
const BLOCK: u64 = 4096;
const SECTOR: u64 = 512;

/// A database server that writes each page once, and nowhere else before.
struct Server {
    script: String,
    /// What it says of its settings.
    settings: &'static str,
    /// Bytes of a page.
    page: u64,
    /// Lines of a report that finds nothing wrong.
    sound: &'static [&'static str],
}

#[test]
fn mariadb_needs_no_doublewrite_buffer_on_an_atomic_disk() {
    mariadb(EXT4, 2, true);
}

#[test]
fn mariadb_needs_no_doublewrite_buffer_on_xfs() {
    mariadb(XFS, 1, false);
}

fn mariadb(make: &str, cuts: usize, atomic: bool) {
    let needs = [
        ("mariadbd", "mariadb-server-core"),
        ("mariadb", "mariadb-client-core"),
    ];
    let Some(mut site) = TestDir::new(&needs) else {
        return;
    };
    if atomic {
        site.use_atomic_disk();
    }
    let server = Server {
        script: include_str!("../scripts/mariadb.sh").to_owned(),
        settings: "0 O_DIRECT 1 1 16384",
        page: 16 << 10,
        sound: &[
            "check bank.accounts status OK",
            "check bank.ledger status OK",
            "wrong balances 0, accounts 8192",
        ],
    };
    site.survives(&server, make, cuts);
}

#[test]
fn postgresql_that_writes_directly_needs_no_full_page_writes_on_an_atomic_disk() {
    let Some(mut site) = TestDir::new(&postgresql::NEEDS) else {
        return;
    };
    site.use_atomic_disk();
    let files = postgresql::prepare(&["--data-checksums", "--wal-segsize=1"]).unwrap();
    let script = include_str!("../scripts/postgresql.sh");
    let server = Server {
        script: format!("POSTGRESQL={}\n{script}", files.path().display()),
        settings: "off on on on 8192 O_DIRECT",
        page: 8 << 10,
        sound: &[
            "checked index accounts_pkey",
            "checked index accounts_balance_idx",
            "checked index ledger_pkey",
            "wrong balances 0, accounts 2048",
        ],
    };
    site.survives(&server, EXT4, 2);
}

#[test]
fn sqlite_keeps_what_it_acknowledged_with_either_journal() {
    let Some(mut site) = TestDir::new(&[("sqlite3", "sqlite3")]) else {
        return;
    };
    let cuts = 2;
    for boot in 0..=cuts {
        let (daemon, mut guest) = site.boot(SQLITE, (boot == 0).then_some(EXT4), boot < cuts);
        if boot == 0 {
            guest.wait_for("guest: created").unwrap();
        } else {
            let report = site.check(&mut guest);
            // The write-ahead log always exists. A rollback journal exists only if the cut came
            // during a transaction.
            assert_that(&report, "left wal.db-wal");
            for journal in ["wal", "delete"] {
                assert_that(&report, &format!("check {journal} ok"));
                assert_that(&report, &format!("mode {journal} {journal} 3"));
                assert_that(&report, &format!("wrong in {journal} 0|0"));
            }
        }
        if boot < cuts {
            // A commit of each client shows that both have begun, and so that the write-ahead log
            // exists.
            let both = ["guest: acknowledged wal ", "guest: acknowledged delete "];
            site.work_until_cut(daemon, guest, &both);
        } else {
            site.end(daemon, guest);
        }
    }
}

/// A disk, the commits acknowledged to its clients, and the random choices of when to cut the
/// power.
struct TestDir {
    dir: TempDir,
    /// The kernel of an atomic disk, and the program that asks it what a file has.
    newest: Option<(NewestUserMode, PathBuf)>,
    random: Random,
    /// The number of each client's last acknowledged commit. The numbers begin with 1.
    journal: BTreeMap<String, u64>,
    boots: u32,
    cuts: u32,
}

impl TestDir {
    /// Returns `None` if a program is missing and cannot be installed, after printing why.
    fn new(needs: &[(&str, &str)]) -> Option<Self> {
        let mut all = vec![
            ("linux.uml", "user-mode-linux"),
            ("modprobe", "kmod"),
            ("mkfs.ext4", "e2fsprogs"),
            ("mkfs.xfs", "xfsprogs"),
        ];
        all.extend(needs);
        if !have_all(&all) {
            return None;
        }
        let seed = match std::env::var("WALVISOR_SEED") {
            Ok(seed) => seed.parse().expect("WALVISOR_SEED is a number"),
            Err(_) => now(),
        };
        println!("WALVISOR_SEED={seed}");
        let dir = tempfile::tempdir().unwrap();
        succeed(dir.path(), "disk create disk.img --size 512M");
        Some(Self {
            dir,
            newest: None,
            random: Random(seed),
            journal: BTreeMap::new(),
            boots: 0,
            cuts: 0,
        })
    }

    /// Makes the disk one of SCSI, and the kernel one that knows which files have atomic writes.
    fn use_atomic_disk(&mut self) {
        let (cache, reporter) = (Cache::open(None).unwrap(), Reporter::quiet(None));
        let kernel = NewestUserMode::unpack(self.dir.path(), &cache, &reporter).unwrap();
        self.newest = Some((kernel, compile(self.dir.path(), "atomic")));
    }

    fn boot(&mut self, script: &str, make: Option<&str>, work: bool) -> (Daemon, Guest) {
        let mut guest = UserMode::default();
        let sockets = vec![self.dir.path().join("s")];
        let (options, disk, atomic) = match &self.newest {
            None => {
                guest.disks = sockets;
                ("", "/dev/vda", Path::new(""))
            }
            Some((kernel, program)) => {
                guest.scsi = sockets;
                guest.newest = Some(kernel.clone());
                (",device=scsi", "/dev/sda", program.as_path())
            }
        };
        let arguments = format!("--disk path=disk.img,socket=s{options} --control c");
        let daemon = serve(self.dir.path(), &arguments);
        let own = self.dir.path().join(format!("boot-{}", self.boots));
        self.boots += 1;
        fs::create_dir(&own).unwrap();
        let script = format!(
            "DISK={disk}\nATOMIC={}\nMAKE={:?}\nSEED={}\nWORK={}\n{script}",
            atomic.display(),
            make.unwrap_or_default(),
            self.random.below(1 << 30),
            if work { "yes" } else { "" }
        );
        (daemon, guest.boot_here(&own, &script).unwrap())
    }

    /// Cuts the power of `server` under load `cuts` times, and checks its database after each.
    fn survives(&mut self, server: &Server, make: &str, cuts: usize) {
        let (mut created, mut writes, mut pages) = (0, Vec::new(), 0);
        for boot in 0..=cuts {
            let make = (boot == 0).then_some(make);
            let (daemon, mut guest) = self.boot(&server.script, make, boot < cuts);
            let settings = guest.wait_for("guest: server ").unwrap();
            assert_eq!(settings, format!("guest: server {}", server.settings));
            if boot == 0 {
                guest.wait_for("guest: created").unwrap();
                created = now();
            } else {
                let report = self.check(&mut guest);
                assert_that(&report, "recovered");
                for line in server.sound {
                    assert_that(&report, line);
                }
                if self.newest.is_some() {
                    // The clusters of the file system.
                    assert_that(&report, "statx 16384");
                }
                pages += whole_pages(&writes, &report, server.page);
            }
            if boot < cuts {
                // MariaDB's page cleaner runs once a second: at least the last cut comes after it.
                let last = boot + 1 == cuts;
                let said: &[_] = if last { &["guest: flushed"] } else { &[] };
                self.work_until_cut(daemon, guest, said);
                writes = self.writes_since(created);
            } else {
                let checksums = guest.wait_for("guest: wrong checksums").unwrap();
                assert_eq!(checksums, "guest: wrong checksums 0");
                self.end(daemon, guest);
            }
        }
        println!("{pages} pages were written to the table, each by one record of the log");
        assert!(pages > 0, "no page was written");
    }

    /// The guest's report. Asserts that all acknowledged commits are there, and that nothing is
    /// damaged.
    #[track_caller]
    fn check(&self, guest: &mut Guest) -> Vec<String> {
        let mut report = Vec::new();
        loop {
            let line = guest.wait_for("guest: ").unwrap();
            match line.trim_start_matches("guest: ") {
                "checked" => break,
                text => report.push(text.to_owned()),
            }
        }
        let bad = |line: &&String| line.starts_with("alarm") || line.starts_with("damaged");
        let damage: Vec<_> = report.iter().filter(bad).collect();
        assert!(damage.is_empty(), "{damage:#?}");
        for (client, acknowledged) in &self.journal {
            let start = format!("ledger {client} ");
            let line = report.iter().find_map(|line| line.strip_prefix(&start));
            let numbers: Vec<u64> = line
                .unwrap_or_else(|| panic!("nothing of client {client}: {report:#?}"))
                .split(' ')
                .map(|number| number.parse().unwrap())
                .collect();
            let [count, first, last] = numbers[..] else {
                panic!("{numbers:?}");
            };
            assert_eq!(
                (count, first),
                (last, 1),
                "of client {client} one is missing"
            );
            assert!(
                last >= *acknowledged,
                "client {client} was told that {acknowledged} is committed, and the last is {last}"
            );
        }
        println!(
            "after cut {}: all of {} acknowledged commits are there",
            self.cuts,
            self.journal.values().sum::<u64>()
        );
        report
    }

    /// Lets the clients work for a while, and until the guest has printed lines with the beginnings
    /// `wanted`. May run a checkpoint of the log. Then cuts the power.
    fn work_until_cut(&mut self, daemon: Daemon, mut guest: Guest, wanted: &[&str]) {
        let (mut commits, mut wanted) = (40 + self.random.below(200), wanted.to_vec());
        while commits > 0 || !wanted.is_empty() {
            let line = guest.wait_for("guest: ").unwrap();
            wanted.retain(|start| !line.starts_with(start));
            if line.starts_with("guest: acknowledged ") {
                self.acknowledged(&line);
                commits = commits.saturating_sub(1);
            }
        }
        let mut checkpoint: Option<Child> = None;
        if self.random.below(2) == 0 {
            let mut ctl = Command::new(binary());
            ctl.args(["ctl", "c", "checkpoint"])
                .current_dir(self.dir.path())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            checkpoint = Some(leash(&mut ctl).spawn().unwrap());
        }
        thread::sleep(Duration::from_micros(self.random.below(60_000)));
        let said = if self.random.below(2) == 0 {
            daemon.kill();
            guest.kill()
        } else {
            let said = guest.kill();
            daemon.kill();
            said
        };
        self.cuts += 1;
        for line in said {
            self.acknowledged(&line);
        }
        if let Some(mut checkpoint) = checkpoint {
            checkpoint.wait().unwrap();
        }
    }

    /// Notes the commit that a client's line acknowledges. A cut may have left only a part of the
    /// line.
    fn acknowledged(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        if let ["guest:", "acknowledged", client, number] = words[..] {
            // A line that was cut short has a smaller number.
            let number = number.parse().unwrap_or(0);
            let last = self.journal.entry(client.to_owned()).or_default();
            *last = number.max(*last);
        }
    }

    /// The writes in the log since `start` (Unix time in microseconds): for each its first byte and
    /// the byte after its last.
    fn writes_since(&self, start: u64) -> Vec<(u64, u64)> {
        let dump = succeed(self.dir.path(), "log dump disk.img.wal --records --json");
        let records = dump
            .lines()
            .map(|line| serde_json::from_str::<Value>(line).unwrap());
        records
            .filter(|record| {
                record["kind"] == "write" && record["unix_us"].as_u64().unwrap() > start
            })
            .map(|record| {
                let first = record["sector"].as_u64().unwrap() * SECTOR;
                (first, first + record["sectors"].as_u64().unwrap() * SECTOR)
            })
            .collect()
    }

    /// Waits until the guest has powered off, and checks the disk.
    fn end(&self, daemon: Daemon, mut guest: Guest) {
        guest.wait_for("guest: end").unwrap();
        guest.end().unwrap();
        daemon.stop();
        succeed(self.dir.path(), "disk check disk.img");
    }
}

/// The number of pages of this many bytes that `writes` wrote to the table whose blocks are in
/// `report`. Asserts that no write wrote part of a page.
#[track_caller]
fn whole_pages(writes: &[(u64, u64)], report: &[String], page: u64) -> u64 {
    let mut pages = 0;
    for line in report
        .iter()
        .filter_map(|line| line.strip_prefix("extent "))
    {
        let blocks: Vec<u64> = line
            .split(' ')
            .map(|block| block.parse().unwrap())
            .collect();
        let [in_file, on_disk, length] = blocks[..] else {
            panic!("{line}");
        };
        let (start, end) = (on_disk * BLOCK, (on_disk + length) * BLOCK);
        for (first, after) in writes {
            let (from, to) = (start.max(*first), end.min(*after));
            if from < to {
                let place = from - start + in_file * BLOCK;
                assert!(
                    place.is_multiple_of(page) && (to - from).is_multiple_of(page),
                    "a record has a part of a page: bytes {first} to {after} of the disk, the \
                     extent is {line}"
                );
                pages += (to - from) / page;
            }
        }
    }
    pages
}

#[track_caller]
fn assert_that(report: &[String], expected: &str) {
    assert!(
        report.iter().any(|line| line == expected),
        "no {expected:?} in {report:#?}"
    );
}

/// Unix time in microseconds.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(since.as_micros()).unwrap()
}
