//! The parameters of a measurement: path, backend, job, depth, queues.

use std::fmt;
use std::time::Duration;

use clap::ValueEnum;

use walvisor_guest::contract::LoadKind;

/// Bytes of a request.
pub const BLOCK: usize = 4096;
/// Bytes of each disk.
pub const DISK_BYTES: u64 = 64 << 20;
/// Queues of each disk. A job may use fewer.
pub const QUEUES: u16 = 4;

/// A way to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Path {
    /// virtio-mmio with ioeventfd and irqfd
    Mmio,
    /// virtio-mmio whose doorbells exit and whose interrupts are ioctls
    MmioExits,
    /// virtio-pci with ioeventfd and irqfd
    Pci,
    /// virtio-pci whose doorbells exit and whose interrupts are ioctls
    PciExits,
    /// vhost-user, driven from this process
    VhostUser,
    /// NBD over a Unix socket, driven from this process
    Nbd,
}

impl Path {
    /// All paths, in the order of tables.
    pub const ALL: [Self; 6] = [
        Self::Mmio,
        Self::MmioExits,
        Self::Pci,
        Self::PciExits,
        Self::VhostUser,
        Self::Nbd,
    ];

    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mmio => "virtio-mmio ioeventfd",
            Self::MmioExits => "virtio-mmio exits",
            Self::Pci => "virtio-pci ioeventfd",
            Self::PciExits => "virtio-pci exits",
            Self::VhostUser => "vhost-user",
            Self::Nbd => "nbd",
        }
    }
}

/// What keeps the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum BackendKind {
    /// Memory: the notification alone
    Ram,
    /// An image and a write-ahead log
    Wal,
}

impl BackendKind {
    /// Its name in tables and SPECs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::Wal => "wal",
        }
    }
}

/// The job of each closed loop, on random 4 KiB blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoadJob {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// A write, then a FLUSH.
    WriteFsync,
}

impl LoadJob {
    /// Its name in tables.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "randread",
            Self::Write => "randwrite",
            Self::WriteFsync => "randwrite+fsync",
        }
    }

    /// The job as a load of the embedded guest.
    pub fn kind(self) -> LoadKind {
        match self {
            Self::Read => LoadKind::RandRead,
            Self::Write => LoadKind::RandWrite,
            Self::WriteFsync => LoadKind::RandWriteFlush,
        }
    }
}

/// One measurement, made on each path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    /// The backend that keeps the data.
    pub backend: BackendKind,
    /// The job of each loop.
    pub job: LoadJob,
    /// Number of loops on each queue.
    pub iodepth: u8,
    /// Number of queues.
    pub queues: u8,
}

impl Point {
    /// Whether syncs are counted. If so, a checkpoint precedes the job, whose first FLUSH would otherwise also sync the writes
    /// of earlier jobs, in any number of the log's segments.
    pub fn counts_syncs(&self) -> bool {
        self.backend == BackendKind::Wal && self.job == LoadJob::WriteFsync
    }
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {}, iodepth {}, {} queues",
            self.backend.name(),
            self.job.name(),
            self.iodepth,
            self.queues
        )
    }
}

/// The measurements, the time of each turn, and the number of rounds.
#[derive(Clone, Debug)]
pub struct LoadPlan {
    /// The measurements.
    pub points: Vec<Point>,
    /// Duration of a turn.
    pub turn: Duration,
    /// Number of rounds.
    pub rounds: usize,
}

impl LoadPlan {
    /// All measurements, or those that fit in a minute, in `rounds` rounds.
    pub fn new(quick: bool, rounds: usize, backends: &[BackendKind]) -> Self {
        let (depths, queues): (&[u8], &[u8]) = if quick {
            (&[1, 32], &[1])
        } else {
            (&[1, 4, 32], &[1, 4])
        };
        let mut points = Vec::new();
        for &backend in backends {
            for job in [LoadJob::Read, LoadJob::Write, LoadJob::WriteFsync] {
                for &queues in queues {
                    points.extend(depths.iter().map(|&iodepth| Point {
                        backend,
                        job,
                        iodepth,
                        queues,
                    }));
                }
            }
        }
        let milliseconds = if quick { 120 } else { 500 };
        Self {
            points,
            turn: Duration::from_millis(milliseconds),
            rounds,
        }
    }
}
