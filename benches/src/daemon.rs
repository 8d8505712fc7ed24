//! `walvisor serve` as a child of this process.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use walvisor::commands::CommandError;
use walvisor::control_socket::{self, Format};
use walvisor::processor_time;
use walvisor_guest_images::leash;

use crate::load::point::{BackendKind, DISK_BYTES};
use crate::programs;

/// A daemon with some disks. Dropping this sends SIGTERM to the daemon, and waits until it ends.
pub struct Daemon {
    child: Child,
    control: PathBuf,
}

impl Daemon {
    /// Serves `disks` through `door` (`vhost-user` or `nbd`), and returns once all are ready. Each disk is a SPEC whose image
    /// is in `images`. The control socket is in `sockets`.
    ///
    /// # Errors
    /// If the daemon does not start; it prints the reason on stderr.
    pub fn start(
        door: &str,
        disks: &[String],
        images: &Path,
        sockets: &Path,
    ) -> Result<Self, CommandError> {
        let failed = |why: &str| CommandError::Failed(format!("walvisor serve {door}: {why}"));
        let control = sockets.join(format!("{door}.control"));
        let mut command = Command::new(programs::walvisor()?);
        command.args(["serve", door, "--control"]).arg(&control);
        for disk in disks {
            command.args(["--disk", disk]);
        }
        let mut child = leash(&mut command)
            .current_dir(images)
            // In a group of its own the child does not get Ctrl-C: it ends when this process is done with it.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| failed(&error.to_string()))?;
        let stdout = child.stdout.take();
        let daemon = Self { child, control };
        let lines = stdout
            .into_iter()
            .flat_map(|stdout| BufReader::new(stdout).lines());
        if lines.take(disks.len()).filter(Result::is_ok).count() < disks.len() {
            return Err(failed("it ended at once"));
        }
        Ok(daemon)
    }

    /// Stops the daemon until the returned value is dropped.
    pub fn halt(&self) -> HaltGuard {
        HaltGuard::new(&self.child)
    }

    /// The daemon's process.
    pub fn process(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Copies its logs to the images, so that a job does not pay for the one before it.
    ///
    /// # Errors
    /// If the checkpoint fails.
    pub fn checkpoint(&self) -> Result<(), CommandError> {
        let asked = control_socket::ControlCommand::Checkpoint {
            disk: None,
            give_up_history: false,
        };
        let answer = control_socket::ask(&self.control, &asked);
        answer.map(drop).map_err(CommandError::Failed)
    }

    /// Processor time that the daemon has used.
    pub fn cpu(&self) -> Option<Duration> {
        processor_time::of_process(self.child.id())
    }

    /// The control socket's statistics of the disk with this name.
    ///
    /// # Errors
    /// If the daemon does not answer, or has no such disk.
    pub fn counters(&self, name: &str) -> Result<Value, CommandError> {
        let asked = control_socket::ControlCommand::Stats(Format::Json);
        let stats = control_socket::ask(&self.control, &asked).map_err(CommandError::Failed)?;
        let mut disks = stats["disks"].as_array().into_iter().flatten();
        let found = disks.find(|disk| disk["name"] == name).cloned();
        found.ok_or_else(|| CommandError::Failed(format!("the daemon has no disk '{name}'")))
    }

    /// The state of this backend's disk.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub fn disk(&self, backend: BackendKind) -> Result<DaemonDisk, CommandError> {
        let disk = self.counters(backend.name())?;
        Ok(DaemonDisk {
            syncs: disk["log"]["syncs"].as_u64().unwrap_or(0),
            writeback: disk["cache"] == "writeback",
        })
    }
}

/// The state of a disk, from the daemon's statistics.
#[derive(Clone, Copy, Debug)]
pub struct DaemonDisk {
    /// Syncs of its log so far.
    pub syncs: u64,
    /// Whether its write cache is on.
    pub writeback: bool,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Nothing to do if the daemon has ended.
        if let Ok(None) = self.child.try_wait() {
            let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
            let _ = self.child.wait();
        }
    }
}

/// The SPEC of a disk that a daemon serves at `socket`: in memory, or the image `image` with its log beside it.
pub fn spec(backend: BackendKind, image: &str, socket: &Path) -> String {
    let place = match backend {
        BackendKind::Ram => format!("backend=ram,size={DISK_BYTES}"),
        BackendKind::Wal => format!("path={image}"),
    };
    let (name, socket) = (backend.name(), socket.display());
    format!("{place},serial={name},socket={socket}")
}

/// Keeps a process stopped until this is dropped. A disk may have work left after its turn, such as a checkpoint, which
/// must not disturb the measurement of the next disk.
pub struct HaltGuard(Pid);

impl HaltGuard {
    /// Stops a child of this process.
    pub fn new(child: &Child) -> Self {
        let halted = Self(Pid::from_child(child));
        // Fails if the child has ended, which is just as good.
        let _ = kill_process(halted.0, Signal::STOP);
        halted
    }
}

impl Drop for HaltGuard {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    /// No step takes this long.
    const PATIENCE: Duration = Duration::from_secs(60);

    /// Whether a signal has stopped the child, according to the system (proc(5), `stat`).
    fn is_stopped(child: &Child) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        stat.rsplit(')')
            .next()
            .unwrap()
            .trim_start()
            .starts_with('T')
    }

    #[test]
    fn a_halted_process_does_not_run_until_the_guard_is_dropped() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let wait_until = |wanted: bool| {
            let began = Instant::now();
            while is_stopped(&child) != wanted {
                assert!(began.elapsed() < PATIENCE, "stopped: {}", !wanted);
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let halted = HaltGuard::new(&child);
        wait_until(true);
        drop(halted);
        wait_until(false);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
