//! The jobs, what the clients do in each, and the sides that do it.

use clap::ValueEnum;

use crate::load::loops::Work;

/// A job of closed loops over NBD.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Job {
    /// One connection with 32 writes of 4 KiB in flight
    InFlight,
    /// 16 connections, each a write of 4 KiB and a FLUSH at a time
    Fsync,
    /// 64 connections, each a write of 4 KiB and a FLUSH at a time
    Connections,
    /// 4 disks with 4 connections each, each a write of 4 KiB and a FLUSH at a time
    Disks,
    /// One connection, a write of 4 KiB and a FLUSH at a time; also beside cache=unsafe
    One,
    /// 8 connections, the same
    Eight,
    /// 32 connections, the same
    ThirtyTwo,
    /// 32 writes of 4 KiB in flight, on a log that keeps its history beside one that does not
    KeptInFlight,
    /// 16 connections that flush, on a log that keeps its history beside one that does not
    KeptFsync,
    /// A database: 32 pages of 16 KiB in flight, 70 % reads, 80 % of them on a fifth of the pages
    Mix,
}

/// What the clients of a job do.
pub struct JobPlan {
    /// Its title in tables.
    pub title: &'static str,
    /// Number of disks, which share the size.
    pub disks: usize,
    /// Connections to each disk.
    pub connections: usize,
    /// Requests in flight on each connection.
    pub depth: usize,
    /// The requests.
    pub work: Work,
}

impl Job {
    /// What its clients do.
    pub fn plan(self) -> JobPlan {
        let plan = |title, disks, connections, depth| JobPlan {
            title,
            disks,
            connections,
            depth,
            work: Work {
                block: 4 << 10,
                reads_per_cent: 0,
                flush: depth == 1,
                hot: false,
            },
        };
        match self {
            Self::InFlight => plan("32 in flight", 1, 1, 32),
            Self::Fsync => plan("16 connections, fsync each", 1, 16, 1),
            Self::Connections => plan("64 connections, fsync each", 1, 64, 1),
            Self::Disks => plan("4 disks x 4 clients, fsync each", 4, 4, 1),
            Self::One => plan("1 connection, fsync each", 1, 1, 1),
            Self::Eight => plan("8 connections, fsync each", 1, 8, 1),
            Self::ThirtyTwo => plan("32 connections, fsync each", 1, 32, 1),
            Self::KeptInFlight => plan("32 in flight, history kept or not", 1, 1, 32),
            Self::KeptFsync => plan("16 connections, fsync each, history kept or not", 1, 16, 1),
            Self::Mix => JobPlan {
                work: Work {
                    block: 16 << 10,
                    reads_per_cent: 70,
                    flush: false,
                    hot: true,
                },
                ..plan("mix of a database, 32 in flight", 1, 1, 32)
            },
        }
    }

    /// Whether it shows the price of an honest FLUSH, beside a disk that answers it without a sync.
    pub fn shows_price(self) -> bool {
        matches!(self, Self::One | Self::Eight | Self::ThirtyTwo)
    }

    /// The sides that do it.
    pub fn sides(self) -> impl Iterator<Item = Server> {
        let shows_history = matches!(self, Self::KeptInFlight | Self::KeptFsync);
        let does = move |server: &Server| match server {
            Server::Wal => true,
            Server::QemuNbd | Server::Raw => !shows_history,
            Server::QemuNbdWriteback => !shows_history && !self.plan().work.flush,
            Server::Unsafe => self.shows_price(),
            Server::Keeping => shows_history,
        };
        Server::value_variants().iter().copied().filter(does)
    }

    /// Its name on the command line and in file names.
    pub fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }
}

/// What serves the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Server {
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

impl Server {
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

    /// How it caches, as tables say it.
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
}
