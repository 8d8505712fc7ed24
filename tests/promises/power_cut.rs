//! Real power cuts. In user-mode Linux, image and log are on ext4 or xfs over dm-log-writes, which
//! records each write, FLUSH and FUA. There `power-cut` (`src/bin`) makes disks, serves, kills,
//! closes and resizes them, and puts a mark into the log for each answer that is a promise. Then
//! the medium is filled as a power cut leaves it: right after a FLUSH, a FUA or a mark; within a
//! write; or right before a FLUSH, with all writes with FUA and some of the others. The file
//! system's journal recovers, the disks are checked, exported and checkpointed, and every promise
//! is judged.
//!
//! The same judge must find the violations when one kind of sync is left out. A tracer replaces
//! these system calls by ones that do nothing, so the tested program is the one that ships. And it
//! must find torn pages when the log is left out: a disk with `backend=raw`.
//!
//! Each recording is a test, and has a machine.
//!
//! `WALVISOR_SEED=N` repeats operations and points, though not the machine's timing.
//! `WALVISOR_POWER_CUTS=N` sets how many points are judged of each recording (`each`: all FLUSHes,
//! FUAs and marks). `WALVISOR_POWER_CUT_ROUNDS=N` sets how many recordings are made of each kind.
//! The recording of a violation is kept, and the test prints the line that replays its point.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::process::{Pid, Signal, kill_process};
use walvisor_guest_images::UserMode;
use walvisor_testkit::wait_until;
use walvisor_tests::{binary, have_all};

/// The machine's disk in MiB.
const DISK: u64 = 48;
/// Most bytes that dm-log-writes can write: the size of a sparse file.
const LOG_BYTES: u64 = 4 << 30;
/// Operations of each client in each of the three periods in which disks are served.
const OPERATIONS: u64 = 40;

/// Installs the programs that a machine needs, if they are missing. Returns `false` if that fails,
/// after printing `skipped: why`.
fn installed() -> bool {
    let needs = [
        ("linux.uml", "user-mode-linux"),
        ("modprobe", "kmod"),
        ("mkfs.ext4", "e2fsprogs"),
        ("mkfs.xfs", "xfsprogs"),
    ];
    have_all(&needs)
}

/// A kind of recording.
#[derive(Clone, Copy, Debug)]
struct Kind {
    file_system: &'static str,
    engine: &'static str,
    /// The kind of sync that is left out, or the log.
    fault: Option<&'static str>,
    /// Whether there is only a disk of pages, which are written as a whole.
    pages: bool,
}

/// What is left out of a disk of pages that has no log.
const LOG: &str = "log";

const fn kind(
    file_system: &'static str,
    engine: &'static str,
    fault: Option<&'static str>,
) -> Kind {
    Kind {
        file_system,
        engine,
        fault,
        pages: false,
    }
}

const fn pages(
    file_system: &'static str,
    engine: &'static str,
    fault: Option<&'static str>,
) -> Kind {
    Kind {
        pages: true,
        ..kind(file_system, engine, fault)
    }
}

/// The result of one recording.
#[derive(Debug, Default)]
struct Outcome {
    operations: u64,
    acknowledged: u64,
    durable: u64,
    judged: u64,
    violated: u64,
    /// One line per violation: the point, then what is broken there.
    broken: Vec<String>,
}

fn number(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is a number")),
    )
}

/// Boots a machine that runs these commands of `power-cut`, with the file `log` in `dir` for
/// dm-log-writes.
fn run(dir: &Path, commands: &[String]) -> Outcome {
    let guest = UserMode {
        files: vec![dir.join("log")],
        ..UserMode::default()
    };
    let mut script = format!(
        "modprobe -d {0} sd_mod && modprobe -d {0} scsi_debug dev_size_mb={DISK} delay=0 && modprobe -d {0} dm-log-writes
         until [ -b /dev/sda ]; do sleep 0.1; done
         mkdir /mnt/out && mount -t hostfs none /mnt/out -o {0}\n",
        dir.display()
    );
    let _ = writeln!(script, "{}", commands.join(" && "));
    let mut guest = guest
        .boot_here(dir, &script)
        .expect("user-mode Linux boots");
    let mut outcome = Outcome::default();
    let mut ended = false;
    while let Some(line) = guest.line().expect("a machine that goes on") {
        let words: Vec<&str> = line.split(' ').collect();
        let count = |word: &str| word.parse().expect("a number");
        match words[..] {
            ["guest:", "operations", number] => outcome.operations = count(number),
            ["guest:", "acknowledged", number] => outcome.acknowledged = count(number),
            ["guest:", "durable", number] => outcome.durable = count(number),
            ["guest:", "judged", judged, "violated", violated] => {
                (outcome.judged, outcome.violated) = (count(judged), count(violated));
            }
            ["guest:", "broken", ref what @ ..] => outcome.broken.push(what.join(" ")),
            ["guest:", "end"] => ended = true,
            ["guest:", "failed:", ..] => panic!("{line}\n{}", guest.console()),
            _ => {}
        }
    }
    assert!(ended, "{}", guest.console());
    outcome
}

/// Records a life and judges `points` power cuts of it, a number or `each`. With a `fault`, stops
/// at the first violation.
fn judged(kind: Kind, seed: u64, points: &str) -> Outcome {
    let area = tempfile::tempdir().unwrap();
    let dir = area.path();
    let log = File::create(dir.join("log")).unwrap();
    log.set_len(LOG_BYTES).unwrap();
    let program = env!("CARGO_BIN_EXE_power-cut");
    let walvisor = fs::canonicalize(binary()).unwrap();
    let walvisor = walvisor.display();
    let Kind {
        file_system,
        engine,
        fault,
        pages,
    } = kind;
    let first = if fault.is_some() { " first" } else { "" };
    let fault_name = fault.unwrap_or("none");
    let load = match (pages, fault) {
        (false, _) => "life",
        (true, Some(LOG)) => "raw-pages",
        (true, _) => "pages",
    };
    let commands = [
        format!(
            "{program} record /mnt/out {file_system} {engine} {fault_name} {load} {seed} \
             {OPERATIONS} {walvisor}"
        ),
        format!("{program} judge /mnt/out {points} {walvisor}{first}"),
    ];
    let outcome = run(dir, &commands);
    if fault.is_none() && outcome.violated > 0 {
        let kept = area.keep();
        for broken in &outcome.broken {
            let point = broken.split(' ').next().unwrap_or_default();
            println!(
                "{broken}\nreplay: WALVISOR_RECORDING={} WALVISOR_POINT={point} cargo test -p walvisor-tests --test power_cut a_point -- --nocapture",
                kept.display()
            );
        }
    }
    outcome
}

/// Judges one point of a recording that was kept.
fn replay(recording: &Path) {
    let command = format!(
        "{} judge /mnt/out {} {}",
        env!("CARGO_BIN_EXE_power-cut"),
        std::env::var("WALVISOR_POINT").expect("WALVISOR_POINT is given"),
        fs::canonicalize(binary()).unwrap().display()
    );
    let outcome = run(recording, &[command]);
    assert_eq!(outcome.violated, 0, "{:#?}", outcome.broken);
}

/// The recording's line of the table.
fn row(kind: Kind, seed: u64, outcome: &Outcome) -> String {
    format!(
        "| {}{} | {} | {} | {seed} | {} | {} | {} | {} | {} |\n",
        kind.file_system,
        if kind.pages { ", pages" } else { "" },
        kind.engine,
        kind.fault.unwrap_or("nothing"),
        outcome.operations,
        outcome.acknowledged,
        outcome.durable,
        outcome.judged,
        outcome.violated,
    )
}

/// Power cuts of a recording, unless `WALVISOR_POWER_CUTS` says how many.
const POINTS: &str = "120";
/// Those of the test that takes a few seconds.
const FEW_POINTS: &str = "24";

/// A test for each kind of recording.
macro_rules! recordings {
    ($($name:ident: $kind:expr;)*) => {
        $(#[test] fn $name() { cut_power($kind, POINTS); })*
    };
}

#[test]
fn a_few_cuts_break_no_promise() {
    cut_power(kind("ext4", "io_uring", None), FEW_POINTS);
}

// The product as it is, then with one kind of sync left out.
recordings! {
    ext4_and_io_uring_keep_each_promise: kind("ext4", "io_uring", None);
    xfs_and_io_uring_keep_each_promise: kind("xfs", "io_uring", None);
    ext4_and_threads_keep_each_promise: kind("ext4", "threads", None);
    xfs_and_threads_keep_each_promise: kind("xfs", "threads", None);
    syncs_of_data_that_are_left_out_are_missed: kind("ext4", "io_uring", Some("dsync"));
    syncs_of_segments_that_are_left_out_are_missed: kind("ext4", "io_uring", Some("segments"));
    syncs_of_the_control_file_that_are_left_out_are_missed: kind("ext4", "io_uring", Some("control"));
    syncs_of_the_image_that_are_left_out_are_missed: kind("ext4", "io_uring", Some("base"));
    syncs_of_directories_that_are_left_out_are_missed: kind("ext4", "io_uring", Some("directories"));
}

// Pages of 16 and 64 KiB, with a log and without.
recordings! {
    no_page_is_torn_on_ext4_and_io_uring: pages("ext4", "io_uring", None);
    no_page_is_torn_on_xfs_and_threads: pages("xfs", "threads", None);
    pages_are_torn_without_a_log_on_ext4: pages("ext4", "io_uring", Some(LOG));
    pages_are_torn_without_a_log_on_xfs: pages("xfs", "threads", Some(LOG));
}

#[test]
fn a_point_of_a_recording_that_was_kept_breaks_no_promise() {
    if let Some(recording) = std::env::var_os("WALVISOR_RECORDING") {
        replay(&PathBuf::from(recording));
    }
}

/// Makes recordings of a kind, cuts the power of each, and checks what the judge says.
fn cut_power(kind: Kind, points: &str) {
    if std::env::var_os("WALVISOR_RECORDING").is_some() || !installed() {
        return;
    }
    let seed = number("WALVISOR_SEED").unwrap_or_else(|| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        now.expect("a clock after 1970").as_secs()
    });
    println!("WALVISOR_SEED={seed}");
    println!(
        "| file system | engine | left out | seed | operations | acknowledged | FLUSH, FUA | power cuts | violated |\n\
         |---|---|---|---|---|---|---|---|---|"
    );
    let points = std::env::var("WALVISOR_POWER_CUTS").unwrap_or(points.to_owned());
    let rounds = number("WALVISOR_POWER_CUT_ROUNDS").unwrap_or(1);
    for seed in seed..seed + rounds {
        let outcome = judged(kind, seed, &points);
        print!("{}", row(kind, seed, &outcome));
        let (judged, acknowledged) = (outcome.judged, outcome.acknowledged);
        assert!(judged > 0 && acknowledged > 0, "{kind:?}: {outcome:?}");
        let violated = outcome.violated > 0;
        assert_eq!(violated, kind.fault.is_some(), "{kind:?}: {outcome:#?}");
        // Without the log pages are torn, and nothing else: no FLUSH is lost.
        let torn = |broken: &String| broken.ends_with("found none of its states");
        let only_torn = !kind.pages || outcome.broken.iter().all(torn);
        assert!(only_torn, "{kind:?}: {outcome:#?}");
    }
}

/// The living processes of a machine that boots from `dir`, each with its parent's number.
fn processes(dir: &Path) -> Vec<(u32, Pid)> {
    let dir = dir.display().to_string();
    let of_the_machine = |entry: fs::DirEntry| {
        let line = fs::read_to_string(entry.path().join("cmdline")).ok()?;
        let status = fs::read_to_string(entry.path().join("status")).ok()?;
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
        let pid = Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
        line.contains(&dir)
            .then_some((parent.trim().parse().ok()?, pid))
    };
    let all = fs::read_dir("/proc").unwrap().flatten();
    all.filter_map(of_the_machine).collect()
}

#[test]
fn a_machine_whose_first_process_is_killed_leaves_no_other() {
    if !installed() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let script = "echo guest: here; sleep 1000";
    let machine = UserMode::default().boot_here(dir.path(), script);
    let mut guest = machine.expect("user-mode Linux boots");
    guest.wait_for("guest: here").unwrap();
    let all = processes(dir.path());
    assert!(all.len() > 2, "{all:?}");
    let first = all.iter().find(|(parent, _)| *parent == std::process::id());
    // The kernel does the same when the test is killed.
    kill_process(first.expect("one of ours").1, Signal::KILL).unwrap();
    wait_until("the end of all", || processes(dir.path()).is_empty());
}
