//! The daemon that serves the disks of user-mode Linux. It runs outside of the guest.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use walvisor::commands::CommandError;
use walvisor::control_socket::{ControlCommand, Format, ask};

use super::reader::DiskCounters;
use crate::programs::KillGuard;

/// `walvisor serve vhost-user` with the disks `ram` and `wal`. Dropping it kills the daemon: the disks are for one comparison
/// only.
pub struct OutsideDaemon {
    daemon: KillGuard,
    control: PathBuf,
    disks: [PathBuf; 2],
}

impl OutsideDaemon {
    /// Starts the daemon with disks of `size` in `directory`.
    ///
    /// # Errors
    /// If a disk cannot be made or served.
    pub fn start(walvisor: &Path, directory: &Path, size: &str) -> Result<Self, CommandError> {
        let failed = |error: std::io::Error| {
            CommandError::Failed(format!("{}: {error}", walvisor.display()))
        };
        let image = directory.join("vhost-user.img");
        let made = Command::new(walvisor)
            .args(["disk", "create", "--size", size])
            .arg(&image)
            .stdout(Stdio::null())
            .output()
            .map_err(failed)?;
        if !made.status.success() {
            let error = String::from_utf8_lossy(&made.stderr);
            return Err(CommandError::Failed(error.trim().to_owned()));
        }
        let disks = ["ram.sock", "wal.sock"].map(|name| directory.join(name));
        let control = directory.join("vhost-user.ctl");
        let mut daemon = Command::new(walvisor)
            .args(["serve", "vhost-user", "--control"])
            .arg(&control)
            .arg("--disk")
            .arg(format!(
                "backend=ram,size={size},serial=ram,socket={}",
                disks[0].display()
            ))
            .arg("--disk")
            .arg(format!(
                "path={},serial=wal,socket={}",
                image.display(),
                disks[1].display()
            ))
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(failed)?;
        let stdout = daemon.stdout.take();
        let daemon = KillGuard(daemon);
        // The daemon prints a line for each disk that it serves.
        let lines = stdout.map(|stdout| BufReader::new(stdout).lines().take(disks.len()));
        if lines.into_iter().flatten().map_while(Result::ok).count() < disks.len() {
            return Err(CommandError::Failed(format!(
                "{} serve vhost-user ended, for the reason above",
                walvisor.display()
            )));
        }
        Ok(Self {
            daemon,
            control,
            disks,
        })
    }

    /// The sockets of `ram` and `wal`.
    pub fn disks(&self) -> &[PathBuf] {
        &self.disks
    }

    /// The daemon's current counters.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub fn counters(&self) -> Result<DiskCounters, CommandError> {
        let stats = ask(&self.control, &ControlCommand::Stats(Format::Json))
            .map_err(CommandError::failed)?;
        Ok(DiskCounters {
            cpu_ns: threads_ns(self.daemon.0.id()),
            machine_cpu_ns: machine_ns(),
            stats,
        })
    }
}

/// Processor time of a process's threads in nanoseconds; 0 if the kernel does not provide it.
fn threads_ns(process: u32) -> f64 {
    let threads = std::fs::read_dir(format!("/proc/{process}/task"));
    let of = |thread: std::io::Result<std::fs::DirEntry>| {
        let text = std::fs::read_to_string(thread.ok()?.path().join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<f64>().ok()
    };
    threads.into_iter().flatten().filter_map(of).sum()
}

/// Processor time of the whole machine in nanoseconds, without idle and I/O wait time.
fn machine_ns() -> f64 {
    let text = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks = text.lines().next().unwrap_or_default().split_whitespace();
    let ticks: Vec<f64> = ticks.filter_map(|word| word.parse().ok()).collect();
    // user, nice, system, idle, iowait, irq, softirq: proc(5), in hundredths of a second.
    [0, 1, 2, 5, 6]
        .iter()
        .filter_map(|&index| ticks.get(index))
        .sum::<f64>()
        * 1e7
}
