//! The sides that take turns, the jobs, the length of the turns, and the results.

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use clap::ValueEnum;
use walvisor::commands::CommandError;

use crate::daemon::{Daemon, HaltGuard};
use crate::load::point::LoadJob;
use crate::peer::Peer;
use crate::session::Session;

/// How a disk is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PeerDoor {
    /// Compared with qemu-storage-daemon
    VhostUser,
    /// Compared with qemu-nbd
    Nbd,
    /// As a disk of an emulated machine, compared with QEMU's own disks with cache=none and cache=writeback
    Qemu,
    /// Compared with tcmu-runner, in user-mode Linux
    Tcmu,
}

/// A job, of 4 KiB requests at random offsets.
#[derive(Debug)]
pub struct PeerJob {
    pub name: &'static str,
    pub work: LoadJob,
    pub disks: usize,
    /// Number of queues or connections.
    pub queues: usize,
    /// Requests in flight in each queue.
    pub depth: usize,
    /// The ratio to its peer that `walvisor` should reach at least.
    pub goal: f64,
}

/// The number of rounds and the length of a turn.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    pub rounds: usize,
    pub turn: Duration,
    pub quick: bool,
}

/// The result of a job: requests or commits per second in each round.
#[derive(Debug)]
pub struct PeerRow {
    pub door: PeerDoor,
    pub job: String,
    pub goal: Option<f64>,
    pub ours: Vec<f64>,
    /// The results of each peer, by its name.
    pub peers: BTreeMap<String, Vec<f64>>,
    /// Whether the measurement ran on an emulated machine.
    pub emulated: bool,
}

impl PeerRow {
    pub fn new(door: PeerDoor, job: &str, goal: Option<f64>) -> Self {
        Self {
            door,
            job: job.to_owned(),
            goal,
            ours: Vec::new(),
            peers: BTreeMap::new(),
            emulated: door == PeerDoor::Qemu,
        }
    }

    /// Adds a round of `walvisor`, or of the peer of that name.
    pub fn add(&mut self, peer: Option<&str>, rate: f64) {
        match peer {
            None => self.ours.push(rate),
            Some(peer) => self.peers.entry(peer.to_owned()).or_default().push(rate),
        }
    }
}

/// Why a door was not measured.
pub enum PeerFailure {
    /// A program is missing; the text names it and its package.
    Missing(String),
    Failed(CommandError),
}

impl From<CommandError> for PeerFailure {
    fn from(error: CommandError) -> Self {
        Self::Failed(error)
    }
}

/// Unmeasured work of each side before its first turn, to reach the steady state: all segment files of the log exist, and
/// all blocks of the peers' images are allocated.
pub const WARM_UP: (LoadJob, Duration) = (LoadJob::Write, Duration::from_secs(5));

/// Estimated time of the turns of `jobs` with this many sides. Each turn takes `before` longer than the pace specifies.
pub fn expected(jobs: &[&PeerJob], sides: usize, pace: Schedule, before: Duration) -> Duration {
    let warm_up = if pace.quick { 0 } else { sides as u32 };
    WARM_UP.1 * warm_up + (pace.turn + before) * (sides * pace.rounds * jobs.len()) as u32
}

/// A side that takes turns with `walvisor`: a peer, or `walvisor` with another setting.
pub trait Side {
    /// Stops the side's process until the returned value is dropped.
    fn halt(&self) -> HaltGuard;

    /// Finishes pending work, such as a checkpoint, before a job begins.
    fn settle(&self) -> Result<(), CommandError> {
        Ok(())
    }
}

impl Side for Peer {
    fn halt(&self) -> HaltGuard {
        Self::halt(self)
    }
}

impl Side for Daemon {
    fn halt(&self) -> HaltGuard {
        Self::halt(self)
    }

    fn settle(&self) -> Result<(), CommandError> {
        self.checkpoint()
    }
}

/// Lets the sides take turns at each of `jobs`; `walvisor` is the first side. While one side is measured, all others are
/// stopped. `rate` measures the side with the given number for the given time. A turn takes `before` longer than the pace
/// specifies.
pub fn take_turns(
    (door, jobs): (PeerDoor, &[&'static PeerJob]),
    pace: Schedule,
    before: Duration,
    session: &Session,
    sides: &[(&str, &dyn Side)],
    rate: impl Fn(usize, &PeerJob, Duration) -> Result<f64, CommandError>,
) -> Result<Vec<PeerRow>, CommandError> {
    let value = door.to_possible_value();
    let title = value.as_ref().map_or("", |door| door.get_name());
    let measured = |what: String, side: usize, job: &PeerJob, turn: Duration| {
        let others = sides.iter().enumerate();
        let others = others.filter(|(other, _)| *other != side);
        let _halted: Vec<HaltGuard> = others.map(|(_, (_, other))| other.halt()).collect();
        session.step(&what, turn + before, || rate(side, job, turn))
    };
    if let (Some(job), false) = (jobs.first(), pace.quick) {
        let (work, turn) = WARM_UP;
        let (disks, queues, depth) = (job.disks, 1, 32);
        let job = PeerJob {
            work,
            disks,
            queues,
            depth,
            ..**job
        };
        for side in 0..sides.len() {
            measured(format!("{title}: warming up"), side, &job, turn)?;
        }
    }
    let mut rows = Vec::new();
    for job in jobs {
        let mut row = PeerRow::new(door, job.name, Some(job.goal));
        sides.iter().try_for_each(|(_, side)| side.settle())?;
        for round in 0..pace.rounds {
            for turn in 0..sides.len() {
                // The order rotates, so that no side is always the first.
                let side = (round + turn) % sides.len();
                let (round, rounds) = (round + 1, pace.rounds);
                let what = format!("{title}: {}, round {round} of {rounds}", job.name);
                if let Some(rate) = measured(what, side, job, pace.turn)? {
                    row.add((side > 0).then_some(sides[side].0), rate);
                }
            }
        }
        rows.push(row);
    }
    Ok(rows)
}

/// Checks that a program is installed.
pub fn need(program: &str, package: &str) -> Result<(), PeerFailure> {
    match Command::new(program).arg("--version").output() {
        Ok(_) => Ok(()),
        Err(_) => Err(PeerFailure::Missing(format!(
            "Not measured: {program} is missing: install the package {package}"
        ))),
    }
}
