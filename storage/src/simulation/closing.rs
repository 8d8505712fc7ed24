//! A close with a time limit, which runs out after each possible number of steps.

use super::fixture::{Fixture, RunningStore, Shape, carry_out, filled};
use super::medium::World;
use crate::{BackendQueue, CommitWait, Operation};

const WRITES: u32 = 12;

fn work(running: &mut RunningStore, first: u32) {
    let mut port = running.disks[0].open_port().unwrap();
    for number in first..first + WRITES {
        // Extents that are not adjacent are copied one by one.
        let (sector, data) = (u64::from(number) * 16 % 384, filled(number, 8));
        carry_out(running, &mut port, Operation::Write { sector, data }).unwrap();
    }
    port.kick();
}

/// Wherever it is cut, with or without an unfinished checkpoint before it, everything survives a
/// power loss, and the next process copies it unasked.
#[test]
fn a_close_is_cut_anywhere_and_the_next_open_goes_on() {
    let shape = Shape::one_disk(384, 16);
    let (mut partly, mut whole) = (0, 0);
    for (steps, under_way) in (0..40).flat_map(|steps| [(steps, false), (steps, true)]) {
        let fixture = Fixture::new(World::new(steps), shape);
        let mut running = fixture.open(false, CommitWait::NONE).unwrap();
        running.keeper.step(false).unwrap();
        work(&mut running, 1);
        let (before, log) = (fixture.bases(), running.disks[0].log.clone());
        log.lock().keeper.copy_steps = Some(steps);
        if under_way {
            running.finish_writer();
            running.keeper.step(true).unwrap();
            work(&mut running, 1 + WRITES);
        }
        let all = running.read().unwrap();
        running.finish_writer();
        let closed = running.keeper.close().unwrap();
        let bases = fixture.bases();
        assert_eq!(closed, bases == all, "{steps} steps");
        drop((running, log));
        whole += u32::from(closed);
        partly += u32::from(!closed && bases != before);
        fixture.lose_power();
        let mut running = fixture.open(false, CommitWait::NONE).unwrap();
        assert_eq!(running.read().unwrap(), all, "{steps} steps");
        let counters = |running: &RunningStore| running.disks[0].log.counters.snapshot();
        running.keeper.step(false).unwrap();
        assert_eq!(counters(&running).checkpoints, u64::from(!closed));
        assert_eq!(fixture.bases(), all, "{steps} steps");
    }
    assert!(partly > 20 && whole > 20, "{partly} partly, {whole} whole");
}
