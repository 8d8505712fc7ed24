//! fio in Linux kernels: on a machine whose KVM runs Linux (this one, or an emulated one), and in user-mode Linux, which
//! runs at near-native speed anywhere.
//!
//! ```text
//!   scripts/load.sh + a script ──▶ walvisor-guest-images run | user-mode ──▶ its console, line by line
//!                                                                                  │
//!  LinuxMeasurement ◀── reader.rs: measure: job, counters, fio .., counters, end ◀───┘
//! ```
//! `walvisor-guest-images` runs the guests in a process of its own, which ends with the comparison.

mod outside;
mod reader;

use std::collections::VecDeque;
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use clap::{Args, ValueEnum};

use walvisor::commands::CommandError;

use crate::programs::{GUEST_IMAGES, KillGuard, guest_images, walvisor};
use crate::session::Session;
use outside::OutsideDaemon;
pub use reader::LinuxMeasurement;
use reader::{EventReader, LinuxEvent};

const LOAD: &str = include_str!("../../scripts/load.sh");
/// In a machine's script, ends the settings that the guest's script needs too.
const END_OF_SETTINGS: &str = "# end of settings\n";
/// Modules that the SCSI target and the NBD client of user-mode Linux need.
const MODULES: [&str; 6] = [
    "configfs",
    "sd_mod",
    "uio",
    "target_core_user",
    "tcm_loop",
    "nbd",
];
/// Size of the disks in user-mode Linux: `SIZE` of its scripts.
const SIZE: &str = "64M";

/// A kernel that runs fio.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Linux {
    /// User-mode Linux, near native
    UserMode,
    /// That of a machine whose KVM runs Linux: this one, or an emulated one
    Machine,
}

/// Which of them.
#[derive(Debug, Args)]
pub struct Kernels {
    /// The kernels that run fio, separated by commas [default: both; with --quick the first]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "NAME,NAME..")]
    linux: Vec<Linux>,
}

impl Kernels {
    /// The chosen kernels.
    pub fn chosen(&self, quick: bool) -> &[Linux] {
        match (self.linux.is_empty(), quick) {
            (false, _) => &self.linux,
            (true, true) => &[Linux::UserMode],
            (true, false) => &[Linux::UserMode, Linux::Machine],
        }
    }
}

/// The measurements, which take turns.
#[derive(Clone, Debug)]
pub struct LinuxPlan {
    /// Pairs: requests in flight in each queue, and queues.
    pub loops: &'static [(u32, u32)],
    /// Backend and job: `ram:randread`, `wal:randwrite+fsync`, ...
    pub jobs: Vec<&'static str>,
    /// Number of turns of each measurement.
    pub rounds: u32,
    /// Size of a request in fio's notation: `4k`.
    pub block: &'static str,
    /// The amount of work of each job.
    pub amount: Amount,
    /// I/O schedulers of every disk, which take turns if the kernel has them.
    pub schedulers: &'static [&'static str],
}

/// The amount of work of a job.
#[derive(Clone, Copy, Debug)]
pub enum Amount {
    /// This many requests in all.
    Requests(u32),
    /// This many seconds.
    Seconds(u32),
}

/// The place where Linux runs.
#[derive(Clone, Copy, Debug)]
pub enum LinuxPlace {
    /// On a machine whose KVM can run Linux. It has a script, and another for a guest on it, which may be empty.
    Kvm {
        /// The machine's script.
        machine: &'static str,
        /// The script of a guest of `walvisor run`.
        guest: &'static str,
        /// The guest's vCPUs.
        cpus: u32,
        /// The job's time limit in seconds.
        limit_s: u32,
    },
    /// In user-mode Linux, with two disks over vhost-user: `ram` and `wal`.
    UserMode {
        /// The guest's script.
        script: &'static str,
    },
}

/// The results of a comparison.
#[derive(Debug, Default)]
pub struct LinuxOutcome {
    /// The measurements, in chronological order.
    pub measured: Vec<LinuxMeasurement>,
    /// Why each missing path could not be measured.
    pub missing: Vec<String>,
}

impl LinuxOutcome {
    /// Refuses results that cannot be compared, because the write caches of two paths to one backend differ.
    ///
    /// # Errors
    /// If two paths differ; the error names them.
    pub fn check_caches(&self) -> Result<(), CommandError> {
        for one in &self.measured {
            let other = self.measured.iter().find(|other| {
                other.sample.backend == one.sample.backend
                    && other.sample.write_cache != one.sample.write_cache
            });
            if let Some(other) = other {
                return Err(CommandError::Failed(format!(
                    "{} on {}: its write cache is {:?} and that of {} is {:?}: they cannot be compared",
                    one.sample.path,
                    one.sample.backend,
                    one.sample.write_cache,
                    other.sample.path,
                    other.sample.write_cache
                )));
            }
        }
        Ok(())
    }
}

/// Measures `plan` at `place`, with disks in `dir`. Calls `each` with each measurement as soon as it is complete. If a signal
/// interrupts it, returns the measurements so far.
///
/// # Errors
/// If the program that runs guests is missing or fails, or a disk cannot be created.
pub fn measure(
    place: LinuxPlace,
    plan: &LinuxPlan,
    dir: &Path,
    session: &Session,
    each: &mut dyn FnMut(&LinuxMeasurement),
) -> Result<LinuxOutcome, CommandError> {
    let walvisor = walvisor()?;
    let work = tempfile::tempdir_in(dir).map_err(|error| {
        CommandError::Failed(format!(
            "{}: cannot make a directory: {error}",
            dir.display()
        ))
    })?;
    let at = work.path().canonicalize().map_err(CommandError::failed)?;
    let mut command = Command::new(guest_images()?);
    let outside = match place {
        LinuxPlace::Kvm {
            machine,
            guest,
            cpus,
            limit_s,
        } => {
            let settings = format!("{}CPUS={cpus}\n{END_OF_SETTINGS}", settings(plan));
            let script = write(&at, "job.sh", &format!("{settings}{LOAD}{machine}"))?;
            let load = write(&at, "load.sh", LOAD)?;
            let guest = write(&at, "guest.sh", guest)?;
            command.arg("run").args([script, load, guest]);
            command.arg("--walvisor").arg(&walvisor);
            command.args(["--seconds", &limit_s.to_string()]);
            None
        }
        LinuxPlace::UserMode { script } => {
            let text = format!(
                "WALVISOR='{}' PLACE='{}'\n{}{LOAD}{script}",
                walvisor.display(),
                at.display(),
                settings(plan)
            );
            let script = write(&at, "user-mode.sh", &text)?;
            let outside = OutsideDaemon::start(&walvisor, &at, SIZE)?;
            command.arg("user-mode").arg(script);
            command.arg("--files-of-this-machine");
            for disk in outside.disks() {
                command.arg("--disk").arg(disk);
            }
            for module in MODULES {
                command.args(["--module", module]);
            }
            Some(outside)
        }
    };
    follow(command, outside.as_ref(), session, each)
}

fn settings(plan: &LinuxPlan) -> String {
    let mut loops = String::new();
    for (depth, queues) in plan.loops {
        let _ = write!(loops, "{depth}:{queues} ");
    }
    let amount = match plan.amount {
        Amount::Requests(requests) => format!("REQUESTS={requests} SECONDS_EACH="),
        Amount::Seconds(seconds) => format!("REQUESTS= SECONDS_EACH={seconds}"),
    };
    format!(
        "LOOPS='{loops}' JOBS='{}' ROUNDS={} BLOCK={} SCHEDULERS='{}' {amount}\n",
        plan.jobs.join(" "),
        plan.rounds,
        plan.block,
        plan.schedulers.join(" ")
    )
}

fn write(directory: &Path, name: &str, text: &str) -> Result<PathBuf, CommandError> {
    let path = directory.join(name);
    std::fs::write(&path, text).map_err(|error| {
        CommandError::Failed(format!("{}: cannot write: {error}", path.display()))
    })?;
    Ok(path)
}

/// A line of the program's standard output, or of its standard error.
type OutputLine = Result<String, String>;

/// Reads the guests' lines, and answers their questions, until they end.
fn follow(
    mut command: Command,
    outside: Option<&OutsideDaemon>,
    session: &Session,
    each: &mut dyn FnMut(&LinuxMeasurement),
) -> Result<LinuxOutcome, CommandError> {
    let failed = |error| CommandError::Failed(format!("{GUEST_IMAGES} does not start: {error}"));
    let child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(failed)?;
    let mut child = KillGuard(child);
    let mut input = child.0.stdin.take();
    let (sender, lines) = mpsc::channel();
    if let (Some(output), Some(errors)) = (child.0.stdout.take(), child.0.stderr.take()) {
        forward(output, sender.clone(), Ok);
        forward(errors, sender, Err);
    }
    let (mut reader, mut outcome) = (EventReader::default(), LinuxOutcome::default());
    let (mut last, mut complaint) = (VecDeque::new(), String::new());
    loop {
        let line = match lines.recv_timeout(Duration::from_millis(200)) {
            Ok(Ok(line)) => line,
            Ok(Err(line)) => {
                // The program retries after a machine has crashed, and the user should see its note.
                if line.starts_with("a guest hung") {
                    eprintln!("{GUEST_IMAGES}: {line}");
                }
                complaint = line;
                continue;
            }
            Err(RecvTimeoutError::Timeout) if session.interrupted() => return Ok(outcome),
            Err(RecvTimeoutError::Timeout) => continue,
            Err(RecvTimeoutError::Disconnected) => break,
        };
        let Some((_, said)) = line.split_once("measure: ") else {
            // A kernel that crashes prints the reason some lines before its last one.
            if last.len() == LAST_LINES {
                last.pop_front();
            }
            if !line.trim().is_empty() {
                last.push_back(first_part(line.trim()).to_owned());
            }
            continue;
        };
        match reader.take(said)? {
            None => {}
            Some(LinuxEvent::Measured(measured)) => {
                each(&measured);
                outcome.measured.push(*measured);
            }
            Some(LinuxEvent::Missing(why)) => outcome.missing.push(why),
            Some(LinuxEvent::Ask) => {
                let (Some(outside), Some(input)) = (outside, &mut input) else {
                    continue;
                };
                reader.add_outside_counters(outside.counters()?);
                // Fails if the guest has ended, which the end of its lines will show.
                let _ = input.write_all(b"go\n");
            }
        }
    }
    let status = child.0.wait().map_err(CommandError::failed)?;
    if status.success() || session.interrupted() {
        return Ok(outcome);
    }
    Err(CommandError::Failed(format!(
        "{GUEST_IMAGES} ended with {status} after {} measurements: {}; the guest's last lines: {}",
        outcome.measured.len(),
        first_part(&complaint),
        Vec::from(last).join(" | ")
    )))
}

/// Sends the lines of `from` to `to`, in a thread of its own. `kind` marks which stream they come from.
fn forward(
    from: impl Read + Send + 'static,
    to: mpsc::Sender<OutputLine>,
    kind: impl Fn(String) -> OutputLine + Send + 'static,
) {
    std::thread::spawn(move || {
        for line in BufReader::new(from).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line).trim_end().to_owned();
            if to.send(kind(line)).is_err() {
                return;
            }
        }
    });
}

/// Lines of a guest's console that are printed when it fails.
const LAST_LINES: usize = 30;

/// The part of a line that an error shows.
fn first_part(line: &str) -> &str {
    &line[..line.floor_char_boundary(400)]
}
