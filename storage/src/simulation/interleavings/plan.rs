//! The plan of a run, derived from one seed.

use walvisor_testkit::Random;

use super::super::medium::World;
use crate::CommitWait;

/// Sectors that belong to each client of a disk: no other client writes them.
pub(super) const OWN: u64 = 32;

/// A step of one thread.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    Write {
        sector: u64,
        sectors: u64,
    },
    Flush,
    Read,
    /// Starts submitted requests and takes completions.
    Serve,
    /// Waits for all requests.
    Wait,
}

#[derive(Clone, Debug)]
pub(super) struct Client {
    pub disk: usize,
    /// The first of its sectors.
    pub first: u64,
    pub steps: Vec<Step>,
    /// Whether it closes its port without waiting for requests in flight.
    pub leaves: bool,
    /// Whether its thread runs quick syncs itself.
    pub alone: bool,
    /// Whether it submits its requests, and does not look at its port again before all others have
    /// ended.
    pub stalls: bool,
    /// From this step on, its thread ends as soon as a request is in flight, and its port with it.
    /// It does not unwind: `shuttle` runs all threads on one, and others would seem to panic too.
    pub dies: Option<usize>,
}

/// The plan of a run: its disks, clients and faults.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub disks: usize,
    pub clients: Vec<Client>,
    pub through: bool,
    /// Whether writes complete once they are written.
    pub written: bool,
    pub commit_wait: CommitWait,
    /// Whether the store is closed while ports are at work.
    pub closes_early: bool,
    /// Power is lost at the moment this many FLUSHes have completed.
    pub cut_after_flushes: Option<u64>,
    /// The process is killed at the moment this many writes have completed.
    pub kill_after_writes: Option<u64>,
    pub world: World,
}

impl Plan {
    pub(super) fn new(seed: u64) -> Self {
        let (mut random, mut deaths) = (Random(seed), Random(!seed));
        let disks = 1 + random.below(2) as usize;
        // Long writes fill segments and the ring, so that ports wait for room.
        let long = random.one_in(3);
        let clients = (0..1 + random.below(3)).map(|i| {
            let steps = (0..2 + random.below(7)).map(|_| match random.below(8) {
                0..3 => {
                    let sectors = if long && random.one_in(2) {
                        OWN
                    } else {
                        1 + random.below(2)
                    };
                    let sector = random.below(4.min(OWN - sectors + 1));
                    Step::Write { sector, sectors }
                }
                3..5 => Step::Flush,
                5 => Step::Serve,
                6 => Step::Wait,
                _ => Step::Read,
            });
            Client {
                disk: i as usize % disks,
                first: i * OWN,
                steps: steps.collect(),
                leaves: random.one_in(4),
                alone: random.one_in(2),
                stalls: random.one_in(10),
                dies: deaths.one_in(10).then(|| deaths.below(4) as usize),
            }
        });
        let clients = clients.collect();
        let mut world = World::new(random.next());
        world.blocking = random.one_in(2);
        match random.below(5) {
            0 => world.ticks = Some(random.below(30)),
            1 => world.fail_sync = Some(random.below(6)),
            2 => world.fail_write_back = Some(random.below(3)),
            _ => {}
        }
        world.forgetful = random.one_in(2);
        let commit_wait = match random.below(3) {
            0 => CommitWait::NONE,
            1 => CommitWait::default(),
            _ => CommitWait {
                longest: None,
                count: Some(2 + random.below(2) as u32),
            },
        };
        let written = random.one_in(2);
        Self {
            disks,
            clients,
            through: random.one_in(4),
            commit_wait,
            closes_early: random.one_in(3),
            cut_after_flushes: random.one_in(3).then(|| 1 + random.below(3)),
            kill_after_writes: (written && random.one_in(2)).then(|| 1 + random.below(4)),
            written,
            world,
        }
    }
}
