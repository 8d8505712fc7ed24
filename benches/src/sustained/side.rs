//! The sides that take turns. Each turn starts its daemons, and ends them with SIGTERM.

use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use walvisor::commands::CommandError;

use super::medium::Traffic;
use crate::daemon::Daemon;
use crate::peer::Peer;
use crate::session::Session;

/// What serves the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Side {
    /// The disk with its log
    #[value(name = "walvisor")]
    Wal,
    /// The peer
    QemuNbd,
    /// The peer, which writes through the host's page cache; only in jobs whose clients do not flush
    #[value(name = "qemu-nbd-writeback")]
    QemuNbdWriteback,
    /// The same daemon on the image alone
    Raw,
    /// The disk with its log, which answers FLUSHes without a sync
    Unsafe,
    /// The disk with its log, which keeps its history
    Keeping,
}

impl Side {
    /// All sides.
    pub const ALL: [Self; 6] = [
        Self::Wal,
        Self::QemuNbd,
        Self::QemuNbdWriteback,
        Self::Raw,
        Self::Unsafe,
        Self::Keeping,
    ];

    /// Its position in [`Side::ALL`].
    pub fn position(self) -> usize {
        self as usize
    }

    /// Its title in tables.
    pub fn title(self) -> &'static str {
        match self {
            Self::Wal => "walvisor",
            Self::QemuNbd => "qemu-nbd",
            Self::QemuNbdWriteback => "qemu-nbd, cache=writeback",
            Self::Raw => "walvisor, backend=raw",
            Self::Unsafe => "walvisor, cache=unsafe",
            Self::Keeping => "walvisor, retain=1G",
        }
    }

    /// How it caches.
    pub fn cache(self) -> &'static str {
        match self {
            Self::Wal | Self::Raw | Self::Keeping => "writeback",
            Self::Unsafe => "unsafe",
            Self::QemuNbd => "none, aio=io_uring",
            Self::QemuNbdWriteback => "writeback, aio=io_uring",
        }
    }

    /// Whether it is qemu-nbd.
    pub fn is_peer(self) -> bool {
        matches!(self, Self::QemuNbd | Self::QemuNbdWriteback)
    }

    /// Starts the daemons of `disks` disks, whose images are in `images`, at the sockets `disk-N` in `sockets`. Each
    /// disk is the export `disk`.
    ///
    /// # Errors
    /// If one does not start.
    pub fn serve(
        self,
        disks: usize,
        images: &Path,
        sockets: &Path,
    ) -> Result<RunningDaemons, CommandError> {
        let socket = |disk: usize| sockets.join(format!("disk-{disk}"));
        for disk in 0..disks {
            // An earlier daemon may have left it.
            let _ = std::fs::remove_file(socket(disk));
        }
        if self.is_peer() {
            let cache = match self {
                Self::QemuNbdWriteback => "--cache=writeback",
                _ => "--cache=none",
            };
            let peers = (0..disks).map(|disk| {
                let mut peer = Command::new("qemu-nbd");
                peer.args(["--format=raw", cache, "--aio=io_uring"]);
                peer.args(["--discard=unmap", "--shared=64", "--persistent"]);
                peer.arg("--export-name=disk");
                peer.arg(format!("--socket={}", socket(disk).display()));
                peer.arg(format!("raw-{disk}.img"));
                Peer::start(&mut peer, &[socket(disk).display().to_string()], images)
            });
            return Ok(RunningDaemons::Peers(peers.collect::<Result<_, _>>()?));
        }
        let specs = (0..disks).map(|disk| {
            let place = match self {
                Self::Raw => format!("path=raw-{disk}.img,backend=raw"),
                // The log remembers this setting.
                Self::Keeping => format!("path=wal-{disk}.img,log=log,answer=written,retain=1G"),
                _ => format!("path=wal-{disk}.img,log=log,answer=written,retain=off"),
            };
            format!(
                "{place},cache={},serial=disk,socket={}",
                self.cache(),
                socket(disk).display()
            )
        });
        let specs: Vec<String> = specs.collect();
        Daemon::start("nbd", &specs, images, sockets).map(RunningDaemons::Walvisor)
    }
}

/// Running daemons. Dropping them ends them.
pub enum RunningDaemons {
    Walvisor(Daemon),
    Peers(Vec<Peer>),
}

impl RunningDaemons {
    fn processes(&mut self) -> Vec<&mut Child> {
        match self {
            Self::Walvisor(daemon) => vec![daemon.process()],
            Self::Peers(peers) => peers.iter_mut().map(Peer::process).collect(),
        }
    }

    /// Kills the daemons, whose disks are no longer needed.
    pub fn kill(mut self) {
        for process in self.processes() {
            // Fails if it has ended, which is fine.
            let _ = process.kill();
        }
    }

    /// Ends the daemons with SIGTERM. Returns the time until all have ended, and the bytes that they moved in all. If the
    /// session is interrupted, kills them.
    ///
    /// # Errors
    /// If one ends with an error.
    pub fn end(mut self, session: &Session) -> Result<(Duration, Traffic), CommandError> {
        let began = Instant::now();
        let mut processes = self.processes();
        for process in &processes {
            kill_process(Pid::from_child(process), Signal::TERM).map_err(CommandError::failed)?;
        }
        let mut traffic = Traffic::default();
        for process in &mut processes {
            let id = Pid::from_child(process);
            // Leaves the process a zombie, because its counts are still to be read.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | WaitIdOptions::NOHANG;
            while waitid(WaitId::Pid(id), options)
                .map_err(CommandError::failed)?
                .is_none()
            {
                if session.interrupted() {
                    let _ = process.kill();
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            let (read, written) = bytes_moved(process.id())?;
            traffic.read_bytes += read;
            traffic.written_bytes += written;
        }
        let took = began.elapsed();
        for process in processes {
            let status = process.wait().map_err(CommandError::failed)?;
            if !status.success() {
                return Err(CommandError::Failed(format!(
                    "a daemon ended with {status}"
                )));
            }
        }
        Ok((took, traffic))
    }
}

/// Bytes that a process has read from and written to devices (proc(5), `io`).
fn bytes_moved(process: u32) -> Result<(u64, u64), CommandError> {
    let path = format!("/proc/{process}/io");
    let text = std::fs::read_to_string(&path);
    let text = text.map_err(|error| CommandError::Failed(format!("{path}: {error}")))?;
    let field = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|value| value.trim().parse().ok())
            .ok_or_else(|| CommandError::Failed(format!("{path}: no {name}")))
    };
    Ok((field("read_bytes:")?, field("write_bytes:")?))
}
