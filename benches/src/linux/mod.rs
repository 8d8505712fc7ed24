//! fio in Linux kernels: on a machine whose KVM runs Linux (this one, or an emulated one), and in
//! user-mode Linux, which runs at near-native speed anywhere.
//!
//! ```text
//!   scripts/load.sh + a script ──▶ walvisor-guest-images run | user-mode ──▶ its console, line by line
//!                                                                                  │
//!            a side's turn ◀── reader.rs: measure: job, counters, fio .., counters, end ◀──┘
//! ```
//! The script does all jobs of all rounds: it gets the settings of the matrices, and its results go
//! to their sides.

mod reader;

use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use clap::Args;
use walvisor::commands::CommandError;
use walvisor::processor_time::of_host;
use walvisor_storage::{StoreOptions, create_disk, default_log_dir};

use crate::bench::{Matrix, Side};
use crate::bench_dirs::BenchDirs;
use crate::daemon::Daemon;
use crate::guests::{self, write_script};
use crate::programs::walvisor;
use crate::session::Session;
use reader::{DiskCounters, EventReader};

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
/// The kernels.
const KERNELS: [&str; 3] = ["user-mode", "machine", "newer"];

/// Which of them.
#[derive(Debug, Args)]
pub struct Kernels {
    /// The kernels that run fio, separated by commas: user-mode Linux, near native, or that of a
    /// machine whose KVM runs Linux, this one or an emulated one, or Debian's newer kernel,
    /// emulated, which has ublk [default: all that the benchmark has; with --quick the first]
    #[arg(long, value_delimiter = ',', value_name = "NAME,NAME..", value_parser = KERNELS)]
    linux: Vec<String>,
}

impl Kernels {
    /// The chosen kernels, which are names of sections.
    pub fn chosen(&self, quick: bool) -> Vec<String> {
        if !self.linux.is_empty() {
            return self.linux.clone();
        }
        let kernels = KERNELS.iter().take(if quick { 1 } else { KERNELS.len() });
        kernels.map(|&name| name.to_owned()).collect()
    }
}

/// What runs after scripts/load.sh.
#[derive(Clone, Copy, Debug)]
pub struct Scripts {
    /// In user-mode Linux, which has two disks over vhost-user: `ram` and `wal`.
    pub user_mode: &'static str,
    /// On a machine whose KVM can run Linux.
    pub machine: &'static str,
    /// In a guest of `walvisor run` on that machine; may be empty.
    pub guest: &'static str,
    /// On a machine with Debian's newer kernel; may be empty.
    pub newer: &'static str,
}

/// Measures the matrices of a kernel, with disks in `dir`. If a signal interrupts it, what was
/// measured so far stays.
///
/// # Errors
/// If the program that runs guests is missing or fails, a disk cannot be created, or the write
/// caches differ.
pub fn measure(
    matrices: &mut [Matrix],
    scripts: &Scripts,
    dir: &Path,
    session: &Session,
) -> Result<(), CommandError> {
    let Some(kernel) = matrices.first().map(|matrix| matrix.spec.name.clone()) else {
        return Ok(());
    };
    let expected = matrices.iter().map(Matrix::expected).sum();
    session.step(&format!("fio in Linux: {kernel}"), expected, || {
        run(matrices, scripts, dir, session)
    })?;
    if matrices
        .iter()
        .flat_map(Matrix::sides)
        .any(|side| side.emulated)
    {
        matrices
            .iter_mut()
            .for_each(|matrix| matrix.spec.plots.clear());
        matrices[0].notes.push(
            "This machine's KVM runs no Linux: both the machine and its guest are emulated, the \
             times are in brackets and mean nothing, and the counts are those of any KVM."
                .to_owned(),
        );
    }
    Ok(())
}

fn run(
    matrices: &mut [Matrix],
    scripts: &Scripts,
    dir: &Path,
    session: &Session,
) -> Result<(), CommandError> {
    let work = BenchDirs::new(dir)?;
    let settings = settings(matrices);
    let (command, outside) = if matrices[0].spec.name == "user-mode" {
        let (command, outside) = user_mode(&work, &settings, scripts)?;
        (command, Some(outside))
    } else {
        (machine(&work, &settings, &matrices[0], scripts)?, None)
    };
    let mut reader = EventReader::default();
    guests::run(command, session, |line, input| {
        let Some((_, said)) = line.split_once("measure: ") else {
            return Ok(());
        };
        if let (true, Some(outside)) = (reader.take(said, matrices)?, &outside) {
            reader.add_outside_counters(counters(outside)?);
            // Fails if the guest has ended, which the end of its lines will show.
            let _ = input.write_all(b"go\n");
        }
        Ok(())
    })?;
    // The disks are thrown away, so nothing needs to be copied to them.
    outside.into_iter().for_each(Daemon::kill);
    Ok(())
}

/// The settings of the matrices for scripts/load.sh.
fn settings(matrices: &[Matrix]) -> String {
    let each = |of: &dyn Fn(&Side) -> String| {
        let mut words: Vec<String> = Vec::new();
        for word in matrices.iter().flat_map(Matrix::sides).map(of) {
            if !words.contains(&word) {
                words.push(word);
            }
        }
        words.join(" ")
    };
    let loops = each(&|side| format!("{}:{}", side.number("iodepth"), side.number("queues")));
    let jobs = each(&|side| format!("{}:{}", side.text("backend"), side.text("job")));
    let schedulers = each(&|side| match side.text("scheduler") {
        "" => "none".to_owned(),
        name => name.to_owned(),
    });
    let block = each(&|side| side.text("block").to_owned());
    let amount = each(&|side| match side.number("seconds") {
        0 => format!("REQUESTS={} SECONDS_EACH=", side.number("requests")),
        seconds => format!("REQUESTS= SECONDS_EACH={seconds}"),
    });
    let rounds = matrices[0].rounds();
    format!(
        "LOOPS='{loops}' JOBS='{jobs}' ROUNDS={rounds} BLOCK={block} SCHEDULERS='{schedulers}' {amount}\n"
    )
}

/// The command that runs the scripts on a machine with KVM.
fn machine(
    work: &BenchDirs,
    settings: &str,
    matrix: &Matrix,
    scripts: &Scripts,
) -> Result<Command, CommandError> {
    let (at, side) = (work.images(), &matrix.rows[0].sides[0]);
    let (cpus, limit_s) = (side.number("cpus"), side.number("limit_s"));
    let settings = format!("{settings}CPUS={cpus}\n{END_OF_SETTINGS}");
    let newer = matrix.spec.name == "newer";
    let script = if newer {
        scripts.newer
    } else {
        scripts.machine
    };
    let mut command = guests::command("run")?;
    command.args(newer.then_some("--newer-kernel"));
    command.args([
        write_script(at, "job.sh", &format!("{settings}{LOAD}{script}"))?,
        write_script(at, "load.sh", LOAD)?,
        write_script(at, "guest.sh", scripts.guest)?,
    ]);
    command.arg("--walvisor").arg(walvisor()?);
    command.args(["--seconds", &limit_s.to_string()]);
    Ok(command)
}

/// The command that runs the script in user-mode Linux, and the daemon that serves its disks.
fn user_mode(
    work: &BenchDirs,
    settings: &str,
    scripts: &Scripts,
) -> Result<(Command, Daemon), CommandError> {
    let at = work.images();
    let text = format!(
        "WALVISOR='{}' PLACE='{}'\n{settings}{LOAD}{}",
        walvisor()?.display(),
        at.display(),
        scripts.user_mode
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
    let (log, options) = (default_log_dir(&image), StoreOptions::default());
    create_disk(&image, DISK_BYTES, &log, &options).map_err(CommandError::failed)?;
    let [ram, wal] = disks.map(|socket| socket.display().to_string());
    let specs = [
        format!("backend=ram,size={DISK_BYTES},serial=ram,socket={ram}"),
        format!("path=vhost-user.img,serial=wal,socket={wal}"),
    ];
    Ok((
        command,
        Daemon::start("vhost-user", &specs, at, work.sockets())?,
    ))
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
