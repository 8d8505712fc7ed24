//! fio in Linux kernels: on a machine whose KVM runs Linux (this one, or an emulated one), and in user-mode Linux, which
//! runs at near-native speed anywhere.
//!
//! ```text
//!   scripts/load.sh + a script ──▶ walvisor-guest-images run | user-mode ──▶ its console, line by line
//!                                                                                  │
//!            Sample ◀── reader.rs: measure: job, counters, fio .., counters, end ◀──┘
//! ```

mod reader;

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::Path;
use std::time::Duration;

use clap::{Args, ValueEnum};
use walvisor::commands::CommandError;
use walvisor::processor_time::of_host;
use walvisor_storage::{StoreOptions, create_disk, default_log_dir};

use crate::daemon::Daemon;
use crate::guests::{self, write_script};
use crate::place::Place;
use crate::programs::walvisor;
use crate::report::Section;
use crate::sample::{Sample, check_caches};
use crate::session::Session;
use reader::{DiskCounters, EventReader, LinuxEvent};

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
/// Bytes of the disks in user-mode Linux: `SIZE` of its scripts.
const DISK_BYTES: u64 = 64 << 20;

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

/// The measurements in a kernel, which take turns.
#[derive(Clone, Debug)]
pub struct LinuxPlan {
    /// What is measured, for the progress.
    pub title: &'static str,
    /// Where Linux runs.
    pub place: LinuxPlace,
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
    /// Number of paths to a disk of one backend.
    pub paths: u32,
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
    pub samples: Vec<Sample>,
    /// Why each missing path could not be measured.
    missing: Vec<String>,
}

impl LinuxOutcome {
    /// Adds a note for each missing path.
    pub fn tell_missing(&self, section: &mut Section) {
        let missing = self.missing.iter();
        let notes = missing.map(|missing| format!("Missing: {missing}."));
        section.notes.extend(notes);
    }
}

impl LinuxPlan {
    /// Estimated time.
    pub fn expected(&self) -> Duration {
        let jobs = self.jobs.len() * self.loops.len() * self.schedulers.len();
        Duration::from_secs(20)
            + Duration::from_millis(2300) * self.paths * self.rounds * jobs as u32
    }

    /// Measures it, with disks in `dir`. If a signal interrupts it, returns the measurements so far.
    ///
    /// # Errors
    /// If the program that runs guests is missing or fails, a disk cannot be created, or the write caches differ.
    pub fn measure(&self, dir: &Path, session: &Session) -> Result<LinuxOutcome, CommandError> {
        // Measurements before a signal still count, so results are kept outside of the step.
        let mut outcome = LinuxOutcome::default();
        session.step(self.title, self.expected(), || {
            self.run(dir, session, &mut outcome)
        })?;
        check_caches(&outcome.samples)?;
        Ok(outcome)
    }

    fn run(
        &self,
        dir: &Path,
        session: &Session,
        outcome: &mut LinuxOutcome,
    ) -> Result<(), CommandError> {
        let walvisor = walvisor()?;
        let work = Place::new(dir)?;
        let at = work.images();
        let (command, outside) = match self.place {
            LinuxPlace::Kvm {
                machine,
                guest,
                cpus,
                limit_s,
            } => {
                let settings = format!("{}CPUS={cpus}\n{END_OF_SETTINGS}", self.settings());
                let mut command = guests::command("run")?;
                command.args([
                    write_script(at, "job.sh", &format!("{settings}{LOAD}{machine}"))?,
                    write_script(at, "load.sh", LOAD)?,
                    write_script(at, "guest.sh", guest)?,
                ]);
                command.arg("--walvisor").arg(&walvisor);
                command.args(["--seconds", &limit_s.to_string()]);
                (command, None)
            }
            LinuxPlace::UserMode { script } => {
                let text = format!(
                    "WALVISOR='{}' PLACE='{}'\n{}{LOAD}{script}",
                    walvisor.display(),
                    at.display(),
                    self.settings()
                );
                let mut command = guests::command("user-mode")?;
                command.arg(write_script(at, "user-mode.sh", &text)?);
                command.arg("--files-of-this-machine");
                let disks = ["ram", "wal"].map(|name| work.sockets().join(name));
                for disk in &disks {
                    command.arg("--disk").arg(disk);
                }
                for module in MODULES {
                    command.args(["--module", module]);
                }
                let image = at.join("vhost-user.img");
                let log = default_log_dir(&image);
                create_disk(&image, DISK_BYTES, &log, &StoreOptions::default())
                    .map_err(CommandError::failed)?;
                let [ram, wal] = disks.map(|socket| socket.display().to_string());
                let specs = [
                    format!("backend=ram,size={DISK_BYTES},serial=ram,socket={ram}"),
                    format!("path=vhost-user.img,serial=wal,socket={wal}"),
                ];
                let outside = Daemon::start("vhost-user", &specs, at, work.sockets())?;
                (command, Some(outside))
            }
        };
        let mut reader = EventReader::default();
        guests::run(command, session, |line, input| {
            let Some((_, said)) = line.split_once("measure: ") else {
                return Ok(());
            };
            match (reader.take(said)?, &outside) {
                (Some(LinuxEvent::Measured(sample)), _) => outcome.samples.push(*sample),
                (Some(LinuxEvent::Missing(why)), _) => outcome.missing.push(why),
                (Some(LinuxEvent::Ask), Some(outside)) => {
                    reader.add_outside_counters(counters(outside)?);
                    // Fails if the guest has ended, which the end of its lines will show.
                    let _ = input.write_all(b"go\n");
                }
                _ => {}
            }
            Ok(())
        })?;
        // The disks are thrown away, so nothing needs to be copied to them.
        outside.into_iter().for_each(Daemon::kill);
        Ok(())
    }

    fn settings(&self) -> String {
        let mut loops = String::new();
        for (depth, queues) in self.loops {
            let _ = write!(loops, "{depth}:{queues} ");
        }
        let amount = match self.amount {
            Amount::Requests(requests) => format!("REQUESTS={requests} SECONDS_EACH="),
            Amount::Seconds(seconds) => format!("REQUESTS= SECONDS_EACH={seconds}"),
        };
        format!(
            "LOOPS='{loops}' JOBS='{}' ROUNDS={} BLOCK={} SCHEDULERS='{}' {amount}\n",
            self.jobs.join(" "),
            self.rounds,
            self.block,
            self.schedulers.join(" ")
        )
    }
}

/// The counters of the daemon outside.
fn counters(daemon: &Daemon) -> Result<DiskCounters, CommandError> {
    let ns = |time: Option<Duration>| time.map_or(0.0, |time| time.as_secs_f64() * 1e9);
    Ok(DiskCounters {
        cpu_ns: ns(daemon.cpu()),
        machine_cpu_ns: ns(of_host()),
        stats: daemon.stats()?,
    })
}
