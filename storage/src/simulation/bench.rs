//! A disk in use with random changes and checkpoints, for tests of looks at it.

use walvisor_testkit::Random;

use super::fixture::{Fixture, RunningStore, Shape, carry_out, filled};
use super::medium::World;
use crate::sync::stepped::SteppedClock;
use crate::{BackendQueue, CommitWait, Operation, Retention};

pub(super) const SECTORS: u64 = 192;

/// A disk, and what each of its sectors must be.
pub(super) struct Bench {
    pub(super) running: RunningStore,
    pub(super) values: Vec<u32>,
    newest: u32,
    random: Random,
    /// A copy that waits does so in no time.
    _clock: SteppedClock,
}

impl Bench {
    pub(super) fn keeping(seed: u64, retain: Retention) -> Self {
        let shape = Shape::one_disk(SECTORS, 16);
        let mut fixture = Fixture::new(World::new(seed), shape);
        fixture.retain = retain;
        Self {
            running: fixture.open(false, CommitWait::NONE).unwrap(),
            values: vec![0; SECTORS as usize],
            newest: 0,
            random: Random(seed),
            _clock: SteppedClock::start(),
        }
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.random.below(limit)
    }

    pub(super) fn changes(&mut self) {
        let mut port = self.running.disks[0].open_port().unwrap();
        for _ in 0..self.below(6) {
            let zeroes = self.below(4) == 0;
            let sector = self.below(SECTORS);
            let longest = if zeroes { SECTORS } else { 20 };
            let sectors = 1 + self.below(longest.min(SECTORS - sector));
            self.newest += 1;
            let value = if zeroes { 0 } else { self.newest };
            self.values[sector as usize..(sector + sectors) as usize].fill(value);
            let operation = if zeroes {
                Operation::WriteZeroes {
                    sector,
                    sectors: sectors as u32,
                    unmap: self.newest.is_multiple_of(2),
                }
            } else {
                Operation::Write {
                    sector,
                    data: filled(value, sectors),
                }
            };
            carry_out(&mut self.running, &mut port, operation).unwrap();
        }
        port.kick();
        drop(port);
        self.running.finish_writer();
    }

    pub(super) fn checkpoint(&mut self) {
        self.running.keeper.step(true).unwrap();
    }
}
