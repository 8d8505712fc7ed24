//! A medium that fails, below a file system that caches pages. Linux reports that a page could not
//! be written back once to each opened file. So a FLUSH tells the truth only if nobody else takes
//! the report that its sync has to get.
//!
//! A process writes to a disk and flushes, on ext4 or XFS, while pages of the medium below fail. It
//! looks late at what has ended, as a thread does that serves other disks too. It is killed, what
//! the medium has not got is lost, and another process reads the disk: what a FLUSH has
//! acknowledged must be there.

use std::convert::Infallible;
use std::fs::File;
use std::io::{BufRead, BufReader, Lines, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;
use walvisor_storage::{
    BackendQueue, Buffer, CommitWait, DiskOptions, EngineKind, Operation, Port, RescueOptions,
    Store, StoreOptions, create_disk, default_log_dir, export_disk, import_disk, rescue_disk,
};
use walvisor_testkit::Process;
use walvisor_testkit::process::run;

use walvisor_tests::medium_file::MARK;
use walvisor_tests::medium_fs::{ALL, MediumFs};

/// A disk is written in blocks, from the first to the last.
const BLOCK: usize = 256 << 10;
const BLOCKS: u64 = 48;
/// How many writes to the medium succeed before the first that fails, from and to. All blocks take
/// more.
const SOUND: std::ops::Range<u64> = 12..80;
/// How late the process looks at what has ended.
const DELAYS: [u64; 3] = [0, 3, 20];

/// The variable that tells a child process what to do; see [`a_child_process`].
const ROLE: &str = "WALVISOR_TEST_ROLE";

fn options() -> StoreOptions {
    StoreOptions {
        segment_size: 8 << 20,
        max_segments: 8,
        ..StoreOptions::default()
    }
}

/// Opens the disk. `waits`: a group waits a moment for a second FLUSH before its sync, as it does
/// by itself where syncs are slow.
fn open(disk: &Path, waits: bool) -> Result<Store, walvisor_storage::Error> {
    let mut options = options();
    if waits {
        options.commit_wait = CommitWait {
            longest: Some(Duration::from_millis(1)),
            count: Some(2),
        };
    }
    Store::open(&default_log_dir(disk), &[DiskOptions::new(disk)], &options)
}

fn disk_on(fs: &MediumFs) -> PathBuf {
    fs.top().join("disk.img")
}

/// Makes the disk of a file system, anew if there is one.
fn make_disk_on(fs: &MediumFs) {
    let (disk, log) = (disk_on(fs), default_log_dir(&disk_on(fs)));
    let _ = std::fs::remove_file(&disk);
    let _ = std::fs::remove_dir_all(&log);
    create_disk(&disk, BLOCKS * BLOCK as u64, &log, &options()).unwrap();
}

/// The content of a block in a round.
fn content(round: u64, block: u64) -> Vec<u8> {
    let mut sector = MARK.to_vec();
    sector.extend(round.to_ne_bytes());
    sector.extend(block.to_ne_bytes());
    sector.resize(512, round as u8);
    sector.repeat(BLOCK / 512)
}

fn sector(block: u64) -> u64 {
    block * BLOCK as u64 / 512
}

/// A child process: this test program, in a role. Dropping it kills it.
struct Role {
    process: Process,
    lines: Lines<BufReader<ChildStdout>>,
    orders: ChildStdin,
}

impl Role {
    fn start(disk: &Path, role: &str) -> Self {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "failing::a_child_process", "--nocapture"])
            .env(ROLE, format!("{role} {}", disk.display()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut process = Process::spawn(&mut command);
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        let orders = process.stdin.take().unwrap();
        Self {
            process,
            lines,
            orders,
        }
    }

    /// The next line that begins with one of `words`.
    fn told(&mut self, words: &[&str]) -> String {
        let mut lines = self.lines.by_ref().map_while(Result::ok);
        let told = lines.find(|line| words.iter().any(|word| line.starts_with(word)));
        told.unwrap_or_else(|| panic!("the child ends without {words:?}"))
    }

    /// What each block is, to a reader: the round that wrote it (0: none), `failed` or `torn`.
    fn blocks(&mut self) -> Vec<String> {
        self.orders.write_all(b"read\n").unwrap();
        let told = self.told(&["blocks "]);
        told.split(' ').skip(1).map(str::to_owned).collect()
    }

    /// Lets a reader close the disk, which copies the log to the image. Returns the error, if there
    /// is one.
    fn close(mut self) -> Result<(), String> {
        self.orders.write_all(b"close\n").unwrap();
        let told = self.told(&["closed", "refused "]);
        assert!(self.process.wait().unwrap().success());
        (told == "closed").then_some(()).ok_or(told)
    }
}

/// The child processes; does nothing unless it is one.
#[test]
fn a_child_process() {
    let Ok(role) = std::env::var(ROLE) else {
        return;
    };
    let words: Vec<&str> = role.split(' ').collect();
    match words[..] {
        ["write", round, delay, reports, disk] => write_and_flush(
            Path::new(disk),
            round.parse().unwrap(),
            Duration::from_millis(delay.parse().unwrap()),
            reports == "Test",
        ),
        ["read", disk] => read_blocks(Path::new(disk)),
        ["export", copy, disk] => export(Path::new(disk), Path::new(copy)),
        _ => panic!("{role}"),
    }
}

/// Writes all blocks, and flushes now and then, until all are flushed or something fails. Tells of
/// each FLUSH how many blocks it has acknowledged, and waits to be killed. `take`: see
/// [`take_reports`].
fn write_and_flush(disk: &Path, round: u64, delay: Duration, take: bool) {
    // The tokens of FLUSHes follow those of writes, which are the blocks.
    const FLUSHES: u64 = 1 << 32;
    let store = open(disk, round.is_multiple_of(2)).unwrap();
    let mut port = store.disks()[0].open_port().unwrap();
    port.set_clients(2);
    let (mut submitted, mut written, mut acknowledged) = (0, 0, 0);
    // What each FLUSH acknowledges, and how many have not ended.
    let (mut flushed, mut flushing) = (Vec::new(), 0);
    let mut done = Vec::new();
    let began = Instant::now();
    'turns: while acknowledged < BLOCKS {
        assert!(began.elapsed().as_secs() < 60, "it hangs");
        if take {
            take_reports(&default_log_dir(disk));
        }
        // Not at each turn: pages are to be written back without a sync that waits for them.
        let due = submitted == BLOCKS || (round + submitted / 4).is_multiple_of(2);
        if due && flushing < 2 {
            port.submit(FLUSHES + flushed.len() as u64, Operation::Flush);
            flushed.push(written);
            flushing += 1;
        }
        for _ in 0..(BLOCKS - submitted).min(4) {
            let data = Buffer::from(&content(round, submitted)[..]);
            let sector = sector(submitted);
            port.submit(submitted, Operation::Write { sector, data });
            submitted += 1;
        }
        port.kick();
        wait_for_event(&port);
        std::thread::sleep(delay);
        port.completions(&mut done);
        for completion in done.drain(..) {
            match (completion.token, completion.result) {
                (_, Err(_)) => break 'turns,
                (flush @ FLUSHES.., Ok(_)) => {
                    flushing -= 1;
                    acknowledged = acknowledged.max(flushed[(flush - FLUSHES) as usize]);
                    println!("acknowledged {acknowledged}");
                }
                (block, Ok(_)) => {
                    assert_eq!(block, written, "writes end in their order");
                    written += 1;
                }
            }
        }
    }
    println!("ended");
    loop {
        std::thread::park();
    }
}

/// Waits until something has ended, a moment at most.
fn wait_for_event(port: &Port) {
    let mut event = [PollFd::from_borrowed_fd(port.event(), PollFlags::IN)];
    let most = Timespec {
        tv_sec: 0,
        tv_nsec: 1_000_000,
    };
    poll(&mut event, Some(&most)).unwrap();
}

/// The fault that the tests must see. The log opens a segment twice: past the page cache, to write
/// it and to sync it, and through the cache. A call on the file that is synced, other than the
/// sync, takes the report that the sync has to get.
fn take_reports(log: &Path) {
    let opened = std::fs::read_dir("/proc/self/fd").unwrap();
    for opened in opened.map_while(Result::ok) {
        let segment = std::fs::read_link(opened.path()).is_ok_and(|path| {
            path.parent() == Some(log) && path.to_string_lossy().contains("segment-")
        });
        if !segment {
            continue;
        }
        let number = opened.file_name().into_string().unwrap();
        // The store may have closed it meanwhile.
        let Ok(info) = std::fs::read_to_string(format!("/proc/self/fdinfo/{number}")) else {
            continue;
        };
        let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
        let flags = i32::from_str_radix(flags.unwrap().trim(), 8).unwrap();
        if flags & libc::O_DIRECT != 0 {
            let (number, wait) = (number.parse().unwrap(), libc::SYNC_FILE_RANGE_WAIT_BEFORE);
            // SAFETY: it changes no memory. If the store closes the file meanwhile, it fails, or
            // waits for another.
            unsafe { libc::sync_file_range(number, 0, 0, wait) };
        }
    }
}

/// Reads all blocks whenever it is told to, and says what they are.
fn read_blocks(disk: &Path) {
    let store = match open(disk, false) {
        Ok(store) => store,
        Err(error) => return println!("refused {error}"),
    };
    println!("opened");
    let mut port = store.disks()[0].open_port().unwrap();
    for order in std::io::stdin().lines() {
        if order.unwrap() == "close" {
            break;
        }
        let blocks: Vec<String> = (0..BLOCKS).map(|block| what_is(&mut port, block)).collect();
        println!("blocks {}", blocks.join(" "));
    }
    drop(port);
    match store.close() {
        Ok(()) => println!("closed"),
        Err(error) => println!("refused {error}"),
    }
}

/// What a block is; see [`Role::blocks`].
fn what_is(port: &mut Port, block: u64) -> String {
    let (sector, sectors) = (sector(block), (BLOCK / 512) as u32);
    port.submit(block, Operation::Read { sector, sectors });
    port.kick();
    let (mut done, began) = (Vec::new(), Instant::now());
    while done.is_empty() {
        assert!(began.elapsed().as_secs() < 60, "it hangs");
        port.completions(&mut done);
        wait_for_event(port);
    }
    let Ok(Some(data)) = done.remove(0).result else {
        return "failed".to_owned();
    };
    let round = u64::from_ne_bytes(data[8..16].try_into().unwrap());
    let expected = match round {
        0 => vec![0; BLOCK],
        round => content(round, block),
    };
    if data[..] == expected {
        round.to_string()
    } else {
        "torn".to_owned()
    }
}

/// What came of some rounds.
#[derive(Debug, Default)]
struct Tally {
    rounds: u64,
    /// Rounds in which a write failed.
    failed: u64,
    /// FLUSHes that were acknowledged, and those of which something was gone.
    acknowledged: usize,
    lost: usize,
    /// Blocks that were neither what the round wrote nor what they were before.
    wrong: usize,
}

/// Who gets the reports of pages that could not be written back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReportReceiver {
    /// The store.
    Store,
    /// The test, which takes those that the store's syncs would get.
    Test,
}

/// Lets writes fail in `count` rounds; with reports taken, until an acknowledged FLUSH is lost.
fn fail_in_rounds(fs: &mut MediumFs, count: u64, delay: u64, reports: ReportReceiver) -> Tally {
    let mut tally = Tally::default();
    make_disk_on(fs);
    let mut before = vec!["0".to_owned(); BLOCKS as usize];
    for round in 1..=count {
        tally.rounds += 1;
        let random = round.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
        let sound = SOUND.start + random % (SOUND.end - SOUND.start);
        let failing = [1, 1, 4, ALL][round as usize / 2 % 4];
        fs.medium().fail_writes(sound, failing);
        let mut writer = Role::start(&disk_on(fs), &format!("write {round} {delay} {reports:?}"));
        let mut acknowledged: Vec<usize> = Vec::new();
        while let Some(blocks) = writer
            .told(&["acknowledged ", "ended"])
            .strip_prefix("acknowledged ")
        {
            acknowledged.push(blocks.parse().unwrap());
        }
        drop(writer);
        tally.failed += u64::from(fs.medium().heal().0 > 0);
        acknowledged.retain(|&blocks| blocks > 0);
        tally.acknowledged += acknowledged.len();
        fs.lose_power();
        let mut reader = Role::start(&disk_on(fs), "read");
        let opened = reader.told(&["opened", "refused "]);
        let found = match opened.as_str() {
            "opened" => reader.blocks(),
            _ => Vec::new(),
        };
        let this = round.to_string();
        let kept = found.iter().take_while(|&found| *found == this).count();
        let lost = acknowledged.iter().filter(|&&blocks| blocks > kept).count();
        let blocks = found.iter().zip(&before);
        let wrong = blocks.filter(|&(found, before)| *found != this && found != before);
        let wrong = wrong.count();
        if (lost, wrong) == (0, 0) && opened == "opened" {
            reader.close().unwrap();
            before = found;
            continue;
        }
        println!(
            "round {round}: {opened}; {acknowledged:?} blocks acknowledged, {kept} are there: {}",
            found.join(" ")
        );
        tally.lost += lost;
        tally.wrong += wrong;
        match reports {
            // A log that is refused although nothing is lost is a fault of its own.
            ReportReceiver::Store => assert!(lost + wrong > 0, "{opened}"),
            ReportReceiver::Test if lost > 0 => break,
            ReportReceiver::Test => {}
        }
        drop(reader);
        make_disk_on(fs);
        before = vec!["0".to_owned(); BLOCKS as usize];
    }
    println!("{delay} ms late, {reports:?}: {tally:?}");
    tally
}

/// Whether the store can use io_uring here.
fn probe_io_uring() -> Result<(), walvisor_storage::Error> {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk.img");
    let log = default_log_dir(&disk);
    let options = StoreOptions {
        engine: EngineKind::IoUring,
        ..options()
    };
    create_disk(&disk, 512, &log, &options)?;
    Store::open(&log, &[DiskOptions::new(&disk)], &options)?.close()
}

/// Rounds of each delay: those of a test, or as many as `WALVISOR_FAILING_ROUNDS` says.
fn rounds(of_a_test: u64) -> u64 {
    let wanted = std::env::var("WALVISOR_FAILING_ROUNDS").ok();
    wanted.map_or(of_a_test, |wanted| wanted.parse().expect("a number"))
}

/// What an acknowledged FLUSH covers is there, whatever fails and whenever that is seen.
fn nothing_acknowledged_is_lost(kind: &str) {
    let mut fs = match MediumFs::new(kind) {
        Ok(fs) => fs,
        Err(why) => return println!("skipped: no {kind} on a medium that fails: {why}"),
    };
    let tallies =
        DELAYS.map(|delay| fail_in_rounds(&mut fs, rounds(12), delay, ReportReceiver::Store));
    for tally in tallies {
        assert_eq!((tally.lost, tally.wrong), (0, 0));
        assert!(tally.failed == tally.rounds && tally.acknowledged > 0);
    }
}

#[test]
fn a_test_that_panics_leaves_no_mount_and_no_loop_device() {
    let ended = std::panic::catch_unwind(|| -> Result<Infallible, String> {
        let fs = MediumFs::new("ext4")?;
        fs.medium().fail_writes(0, ALL);
        std::panic::resume_unwind(Box::new(fs.top()))
    });
    let place = match ended {
        Ok(Err(why)) => return println!("skipped: no ext4 on a medium that fails: {why}"),
        Err(place) => *place.downcast::<PathBuf>().unwrap(),
    };
    let dir = place.parent().unwrap();
    assert!(!dir.exists());
    let place = dir.to_str().unwrap();
    let mounts = std::fs::read_to_string("/proc/thread-self/mounts").unwrap();
    assert!(!mounts.contains(place), "{mounts}");
    let loops = run("losetup", &["--list", "--noheadings"]).unwrap();
    assert!(!loops.contains(place), "{loops}");
}

#[test]
fn no_flush_is_lost_on_ext4() {
    nothing_acknowledged_is_lost("ext4");
}

#[test]
fn no_flush_is_lost_on_xfs() {
    nothing_acknowledged_is_lost("xfs");
}

#[test]
fn a_report_that_another_call_takes_loses_a_flush() {
    if let Err(why) = probe_io_uring() {
        return println!("skipped: without io_uring nothing goes through the page cache: {why}");
    }
    for kind in ["ext4", "xfs"] {
        let mut fs = match MediumFs::new(kind) {
            Ok(fs) => fs,
            Err(why) => return println!("skipped: no {kind} on a medium that fails: {why}"),
        };
        let tally = fail_in_rounds(&mut fs, 200, 20, ReportReceiver::Test);
        assert!(tally.lost > 0, "{kind}: the test does not see the fault");
    }
}

/// What was acknowledged stays in the log until all of it is in the image.
fn copies_to_the_image_fail(kind: &str) {
    let mut fs = match MediumFs::new(kind) {
        Ok(fs) => fs,
        Err(why) => return println!("skipped: no {kind} on a medium that fails: {why}"),
    };
    make_disk_on(&fs);
    for (round, failing) in (1..).zip([1, 4, ALL]) {
        let mut writer = Role::start(&disk_on(&fs), &format!("write {round} 0 Store"));
        writer.told(&["ended"]);
        drop(writer);
        fs.lose_power();
        let mut reader = Role::start(&disk_on(&fs), "read");
        assert_eq!(reader.told(&["opened", "refused "]), "opened");
        fs.medium().fail_writes(SOUND.start, failing);
        let closed = reader.close();
        let failed = fs.medium().heal().0;
        println!("{failed} writes failed: {closed:?}");
        assert!(failed > 0);
        fs.lose_power();
        let mut reader = Role::start(&disk_on(&fs), "read");
        assert_eq!(reader.told(&["opened", "refused "]), "opened");
        let found = reader.blocks();
        let this = round.to_string();
        assert!(found.iter().all(|found| *found == this), "{found:?}");
        reader.close().unwrap();
    }
}

#[test]
fn a_copy_to_the_image_that_fails_on_ext4_loses_nothing() {
    copies_to_the_image_fail("ext4");
}

#[test]
fn a_copy_to_the_image_that_fails_on_xfs_loses_nothing() {
    copies_to_the_image_fail("xfs");
}

/// A read that fails is an error of that read alone: the guest gets no wrong byte, and nothing is
/// lost.
fn reads_fail_and_heal(kind: &str) {
    let mut fs = match MediumFs::new(kind) {
        Ok(fs) => fs,
        Err(why) => return println!("skipped: no {kind} on a medium that fails: {why}"),
    };
    make_disk_on(&fs);
    let mut writer = Role::start(&disk_on(&fs), "write 1 0 Store");
    writer.told(&["ended"]);
    drop(writer);
    fs.lose_power();
    // The log can't be read while it is opened.
    fs.medium().fail_reads();
    let refused = Role::start(&disk_on(&fs), "read").told(&["opened", "refused "]);
    assert!(refused.contains("Input/output error"), "{refused}");
    assert!(fs.medium().heal().1 > 0);
    // First the blocks are read from the log. Closing copies them to the image.
    for place in ["log", "image"] {
        fs.lose_power();
        let mut reader = Role::start(&disk_on(&fs), "read");
        assert_eq!(reader.told(&["opened", "refused "]), "opened", "{place}");
        fs.medium().fail_reads();
        let found = reader.blocks();
        assert!(
            found.iter().all(|found| found == "failed"),
            "{place}: {found:?}"
        );
        fs.medium().heal();
        let found = reader.blocks();
        assert!(found.iter().all(|found| found == "1"), "{place}: {found:?}");
        reader.close().unwrap();
    }
}

#[test]
fn a_read_that_fails_on_ext4_is_an_error_until_the_medium_is_healed() {
    reads_fail_and_heal("ext4");
}

#[test]
fn a_read_that_fails_on_xfs_is_an_error_until_the_medium_is_healed() {
    reads_fail_and_heal("xfs");
}

/// Blocks of an image can't be read. A rescue has the others, and tells which it lacks.
#[test]
fn a_rescue_has_the_blocks_that_can_be_read() {
    let mut fs = match MediumFs::new("ext4") {
        Ok(fs) => fs,
        Err(why) => return println!("skipped: no ext4 on a medium that fails: {why}"),
    };
    let (disk, dir) = (disk_on(&fs), tempfile::tempdir().unwrap());
    let copy = dir.path().join("copy");
    let blocks = 1024;
    // The medium fails for blocks with a mark.
    let rotten = [3, 4, 300, blocks - 1];
    let (mut bytes, mut readable) = (Vec::new(), Vec::new());
    for block in 0..blocks {
        let sound = vec![block as u8 | 1; 4096];
        let bad = rotten.contains(&block);
        readable.extend(if bad { vec![0; 4096] } else { sound.clone() });
        bytes.extend(if bad {
            content(1, block)[..4096].to_vec()
        } else {
            sound
        });
    }
    let mut file = File::create(&disk).unwrap();
    file.write_all(&bytes).unwrap();
    file.sync_all().unwrap();
    drop(file);
    fs.lose_power();
    fs.medium().fail_reads();
    let rescue = |salvage| {
        let options = RescueOptions {
            salvage,
            ..RescueOptions::default()
        };
        let log = default_log_dir(&disk);
        rescue_disk(&disk, &log, &copy, options, None, &mut |_, _| {})
    };
    let refused = rescue(false).unwrap_err().to_string();
    assert!(refused.contains("Input/output error"), "{refused}");
    assert!(!copy.exists());
    let (done, unreadable) = rescue(true).unwrap();
    assert_eq!(done.copied, (blocks - 4) * 4096);
    let told: Vec<_> = unreadable
        .iter()
        .map(|range| (range.sector, range.sectors))
        .collect();
    let wanted = [(3, 2), (300, 1), (blocks - 1, 1)];
    assert_eq!(told, wanted.map(|(at, blocks)| (at * 8, blocks * 8)));
    assert!(
        unreadable[0].why.contains("Input/output error"),
        "{unreadable:?}"
    );
    assert!(std::fs::read(&copy).unwrap() == readable);
}

/// Copies a disk to a file, and says what came of it.
fn export(disk: &Path, copy: &Path) {
    let log = default_log_dir(disk);
    match export_disk(disk, &log, copy, false, None, &mut |_, _| {}) {
        Ok(_) => println!("exported"),
        Err(error) => println!("refused {error}"),
    }
}

/// A long copy is made durable in steps, and then once more. The report of a page that could not be
/// written back comes to the first of these syncs alone.
#[test]
fn a_copy_of_which_pages_fail_is_no_copy() {
    let fs = match MediumFs::new("ext4") {
        Ok(fs) => fs,
        Err(why) => return println!("skipped: no ext4 on a medium that fails: {why}"),
    };
    let dir = tempfile::tempdir().unwrap();
    let (raw, disk) = (dir.path().join("raw"), dir.path().join("disk.img"));
    let mut file = File::create(&raw).unwrap();
    file.write_all(&content(1, 0)).unwrap();
    // More than a step.
    for _ in 0..260 {
        file.write_all(&vec![0; 1 << 20]).unwrap();
    }
    drop(file);
    let log = default_log_dir(&disk);
    import_disk(&disk, &raw, &log, &options(), &mut |_, _| {}).unwrap();
    let copy = fs.top().join("copy");
    let role = format!("export {}", copy.display());
    let told = || Role::start(&disk, &role).told(&["exported", "refused "]);
    fs.medium().fail_writes(0, 1);
    let refused = told();
    assert_eq!(fs.medium().heal().0, 1, "{refused}");
    assert!(refused.contains("Input/output error"), "{refused}");
    assert!(!copy.exists());
    assert_eq!(told(), "exported");
    assert!(std::fs::read(&copy).unwrap() == std::fs::read(&raw).unwrap());
}
