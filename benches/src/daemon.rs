//! Daemons that serve disks, as children of this process: `walvisor serve`, and those of the peers.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use walvisor::commands::CommandError;
use walvisor::control_socket::{ControlCommand, StatsFormat, ask};
use walvisor::processor_time;
use walvisor_guest_images::leash;
use walvisor_testkit::s3::KEYS;

use crate::programs;

/// No peer takes this long to start or to end.
const PEER_TIMEOUT: Duration = Duration::from_secs(60);

/// A daemon with some disks. Dropping this sends SIGTERM to the daemon, and waits until it ends.
pub struct Daemon {
    child: Child,
    /// The control socket; peers have none.
    control: Option<PathBuf>,
}

impl Daemon {
    /// Serves `disks` through `door` (`vhost-user` or `nbd`), and returns once all are ready. Each
    /// disk is a SPEC whose image is in `images`. The control socket is in `sockets`.
    ///
    /// # Errors
    /// If the daemon does not start; it prints the reason on stderr.
    pub fn start(
        door: &str,
        disks: &[String],
        images: &Path,
        sockets: &Path,
    ) -> Result<Self, CommandError> {
        Self::start_with(door, &[], disks, images, sockets)
    }

    /// The same with further `options`.
    ///
    /// # Errors
    /// As for [`Self::start`].
    pub fn start_with(
        door: &str,
        options: &[&str],
        disks: &[String],
        images: &Path,
        sockets: &Path,
    ) -> Result<Self, CommandError> {
        let failed = |why: &str| CommandError::Failed(format!("walvisor serve {door}: {why}"));
        let control = sockets.join(format!("{door}.control"));
        let mut command = Command::new(programs::walvisor()?);
        command.args(["serve", door, "--control"]).arg(&control);
        // For the store of an archive.
        command.envs(KEYS);
        command.args(options);
        for disk in disks {
            command.args(["--disk", disk]);
        }
        let mut child = leash(&mut command)
            .current_dir(images)
            // In a group of its own the child does not get Ctrl-C: it ends when this process is
            // done with it.
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| failed(&error.to_string()))?;
        let stdout = child.stdout.take();
        let daemon = Self {
            child,
            control: Some(control),
        };
        let lines = stdout
            .into_iter()
            .flat_map(|stdout| BufReader::new(stdout).lines());
        if lines.take(disks.len()).filter(Result::is_ok).count() < disks.len() {
            return Err(failed("it ended at once"));
        }
        Ok(daemon)
    }

    /// Starts the daemon of a peer in `images`, and waits until it listens at each of `sockets`.
    ///
    /// # Errors
    /// If the daemon does not start, or ends before it serves.
    pub fn peer(
        command: &mut Command,
        images: &Path,
        sockets: &[PathBuf],
    ) -> Result<Self, CommandError> {
        let name = command.get_program().to_string_lossy().into_owned();
        let failed = |why: String| CommandError::Failed(format!("{name}: {why}"));
        let child = leash(command)
            .current_dir(images)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(|error| failed(error.to_string()))?;
        let mut peer = Self {
            child,
            control: None,
        };
        let began = Instant::now();
        while !sockets.iter().all(|socket| listens(socket)) {
            if let Ok(Some(status)) = peer.child.try_wait() {
                return Err(failed(format!("it ended ({status}) before it served")));
            }
            if began.elapsed() > PEER_TIMEOUT {
                return Err(failed(format!("it does not serve after {PEER_TIMEOUT:?}")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(peer)
    }

    /// Serves the raw image `image` with qemu-nbd at `socket`, as the export `disk`.
    ///
    /// # Errors
    /// As for [`Self::peer`].
    pub fn qemu_nbd(
        images: &Path,
        image: &str,
        socket: &Path,
        cache: &str,
    ) -> Result<Self, CommandError> {
        let mut command = Command::new("qemu-nbd");
        command.args(["--format=raw", "--aio=io_uring", "--discard=unmap"]);
        command.args(["--shared=64", "--persistent", "--export-name=disk"]);
        command.arg(format!("--cache={cache}"));
        command.arg(format!("--socket={}", socket.display()));
        command.arg(image);
        Self::peer(&mut command, images, &[socket.to_owned()])
    }

    /// Serves the raw images `raw-N.img` with qemu-storage-daemon, which `command` starts. Over
    /// vhost-user each disk has its socket; over NBD all are exports of the first socket, by their
    /// numbers.
    ///
    /// # Errors
    /// As for [`Self::peer`].
    pub fn storage_daemon(
        command: &mut Command,
        door: &str,
        queues: usize,
        images: &Path,
        sockets: &[PathBuf],
    ) -> Result<Self, CommandError> {
        let nbd = door == "nbd";
        if nbd {
            let path = format!("addr.type=unix,addr.path={}", sockets[0].display());
            command.arg("--nbd-server").arg(path);
        }
        for (disk, socket) in sockets.iter().enumerate() {
            command.arg("--blockdev").arg(format!(
                "driver=file,node-name=disk{disk},filename=raw-{disk}.img,aio=io_uring,cache.direct=on,discard=unmap"
            ));
            let socket = socket.display();
            let export = if nbd {
                format!("type=nbd,name={disk}")
            } else {
                format!("type=vhost-user-blk,addr.type=unix,addr.path={socket},num-queues={queues}")
            };
            command.arg("--export").arg(format!(
                "{export},id=export{disk},node-name=disk{disk},writable=on"
            ));
        }
        let served = if nbd { &sockets[..1] } else { sockets };
        Self::peer(command, images, served)
    }

    /// Stops the daemon until the returned value is dropped.
    pub fn halt(&self) -> HaltGuard {
        HaltGuard::new(&self.child)
    }

    /// The daemon's process.
    pub fn process(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Kills the daemon, whose disks are no longer needed.
    pub fn kill(mut self) {
        // Fails if it has ended, which is fine.
        let _ = self.child.kill();
    }

    /// Processor time that the daemon has used.
    pub fn cpu(&self) -> Option<Duration> {
        processor_time::of_process(self.child.id())
    }

    /// Copies the logs to the images, so that a job does not pay for the one before it. A peer has
    /// no log.
    ///
    /// # Errors
    /// If the checkpoint fails.
    pub fn checkpoint(&self) -> Result<(), CommandError> {
        let Some(control) = &self.control else {
            return Ok(());
        };
        let checkpoint = ControlCommand::Checkpoint {
            disk: None,
            give_up_history: false,
        };
        let asked = ask(control, &checkpoint);
        asked.map(drop).map_err(CommandError::Failed)
    }

    /// What the control socket says of all disks; of a peer nothing.
    ///
    /// # Errors
    /// If the daemon does not answer.
    pub fn stats(&self) -> Result<Value, CommandError> {
        let Some(control) = &self.control else {
            return Ok(Value::Null);
        };
        let stats = ControlCommand::Stats {
            format: StatsFormat::Json,
        };
        ask(control, &stats).map_err(CommandError::Failed)
    }

    /// What it says of the disk with this name.
    ///
    /// # Errors
    /// If the daemon does not answer, or has no such disk.
    pub fn counters(&self, name: &str) -> Result<Value, CommandError> {
        let stats = self.stats()?;
        let mut disks = stats["disks"].as_array().into_iter().flatten();
        let found = disks.find(|disk| disk["name"] == name).cloned();
        found.ok_or_else(|| CommandError::Failed(format!("the daemon has no disk '{name}'")))
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // `walvisor` may have a long checkpoint to do.
        let longest = self.control.is_none().then_some(PEER_TIMEOUT);
        programs::end(&mut self.child, longest);
    }
}

/// Keeps a process stopped until this is dropped. A disk may have work left after its turn, such as
/// a checkpoint, which must not disturb the measurement of the next disk.
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

/// Whether somebody listens at a Unix socket. One that was only bound refuses clients.
fn listens(socket: &Path) -> bool {
    // Num RefCount Protocol Flags Type St Inode Path; the flag is __SO_ACCEPTCON.
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    let path = socket.display().to_string();
    sockets.lines().any(|line| {
        let mut words = line.split_whitespace();
        words.nth(3) == Some("00010000") && words.nth(3) == Some(&*path)
    })
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
