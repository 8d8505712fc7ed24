//! The jobs: what the clients do.

use clap::ValueEnum;

use super::side::Side;
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

impl Job {
    /// Its title in tables.
    pub fn title(self) -> &'static str {
        match self {
            Self::InFlight => "32 in flight",
            Self::Fsync => "16 connections, fsync each",
            Self::Connections => "64 connections, fsync each",
            Self::Disks => "4 disks x 4 clients, fsync each",
            Self::One => "1 connection, fsync each",
            Self::Eight => "8 connections, fsync each",
            Self::ThirtyTwo => "32 connections, fsync each",
            Self::KeptInFlight => "32 in flight, history kept or not",
            Self::KeptFsync => "16 connections, fsync each, history kept or not",
            Self::Mix => "mix of a database, 32 in flight",
        }
    }

    /// Whether it shows the price of an honest FLUSH, beside a disk that answers it without a sync.
    pub fn shows_price(self) -> bool {
        matches!(self, Self::One | Self::Eight | Self::ThirtyTwo)
    }

    /// Whether it shows what keeping history costs.
    fn shows_history(self) -> bool {
        matches!(self, Self::KeptInFlight | Self::KeptFsync)
    }

    /// The sides that do it.
    pub fn sides(self) -> Vec<Side> {
        let sides = Side::ALL.into_iter();
        let does = |side: &Side| match side {
            Side::Wal => true,
            Side::QemuNbd | Side::Raw => !self.shows_history(),
            Side::QemuNbdWriteback => !self.shows_history() && !self.work().flush,
            Side::Unsafe => self.shows_price(),
            Side::Keeping => self.shows_history(),
        };
        sides.filter(does).collect()
    }

    /// Its name on the command line and in file names.
    pub fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// The number of disks, which share the size.
    pub fn disks(self) -> usize {
        if self == Self::Disks { 4 } else { 1 }
    }

    /// Connections to each disk.
    pub fn connections(self) -> usize {
        match self {
            Self::InFlight | Self::KeptInFlight | Self::One | Self::Mix => 1,
            Self::Disks => 4,
            Self::Eight => 8,
            Self::Fsync | Self::KeptFsync => 16,
            Self::ThirtyTwo => 32,
            Self::Connections => 64,
        }
    }

    /// Requests in flight on each connection.
    pub fn depth(self) -> usize {
        match self {
            Self::InFlight | Self::KeptInFlight | Self::Mix => 32,
            _ => 1,
        }
    }

    /// The requests.
    pub fn work(self) -> Work {
        let mix = self == Self::Mix;
        Work {
            block: if mix { 16 << 10 } else { 4 << 10 },
            reads_per_cent: if mix { 70 } else { 0 },
            flush: self.depth() == 1,
            hot: mix,
        }
    }
}
