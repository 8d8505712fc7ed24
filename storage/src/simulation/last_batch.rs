//! Damage to the last batch of a log, which no later header shows to have been durable.

use std::path::Path;

use super::fixture::{Fixture, Running, Shape, carry_out, control_of, filled};
use super::medium::{LOG, World};
use crate::mutant::{Mutant, PLANTED};
use crate::recovery::contents::Verify;
use crate::recovery::scan::{Found, scan};
use crate::{CommitWait, Operation, Retain};

/// How a log is left, after which the medium changes its last batch.
#[derive(Clone, Copy, Debug)]
enum Left {
    /// It was written, and the process was killed: the batch may be torn, for all that is known.
    Killed,
    /// The process was killed, and the next one recovered the log, wrote nothing, and was killed too.
    Recovered,
    /// A snapshot was made, and the process was killed.
    Snapshot,
    /// It was closed, and keeps its history.
    Closed,
}

/// Whether a read fails of what the last batch has, once the medium has changed that.
fn last_batch_is_missed(left: Left) -> bool {
    let mut fixture = Fixture::new(World::new(1), Shape::one_disk(64, 8));
    fixture.retain = Retain::All;
    let write = |running: &mut Running, value: u32| {
        let mut port = running.disks[0].open_port().unwrap();
        let data = filled(value, 8);
        carry_out(running, &mut port, Operation::Write { sector: 8, data }).unwrap();
        carry_out(running, &mut port, Operation::Flush).unwrap();
    };
    let mut running = fixture.open(false, CommitWait::NONE).unwrap();
    running.keeper.step(false).unwrap();
    write(&mut running, 1);
    write(&mut running, 2);
    running.finish_writer();
    let keeper = &mut running.keeper;
    match left {
        Left::Killed => {}
        Left::Recovered => {
            drop(running);
            fixture.lose_power();
            running = fixture.open(false, CommitWait::NONE).unwrap();
        }
        Left::Snapshot => keeper.snapshot("then".parse().unwrap(), None).unwrap(),
        Left::Closed => assert!(!keeper.close().unwrap()),
    }
    drop(running);
    fixture.lose_power();
    {
        let (medium, control) = (
            &fixture.medium,
            control_of(&fixture.medium).unwrap().control,
        );
        let mut last = None;
        let visit = &mut |found: Found<'_>| last = Some((found.segment.path.clone(), found.offset));
        let log = Path::new(LOG);
        scan(medium, log, &control, Verify::Tail, visit, &mut |_, _| {}).unwrap();
        let (path, payload) = last.expect("a record");
        let name = path.file_name().unwrap().to_str().unwrap();
        let mut world = medium.lock();
        let file = world.find(name);
        let mut bytes = world.contents(&log.join(name));
        bytes[payload as usize] ^= 1;
        world.replace(file, &bytes);
    }
    let found = fixture
        .open(false, CommitWait::NONE)
        .unwrap()
        .read_sectors();
    let sectors = &found[0][8..16];
    assert!(sectors.iter().all(|value| [None, Some(1)].contains(value)));
    sectors.contains(&None)
}

/// A batch that was known to be durable is never dropped as torn, also if no later header has the proof.
#[test]
fn the_last_batch_of_a_log_that_was_known_to_be_durable_is_missed() {
    for left in [Left::Recovered, Left::Snapshot, Left::Closed] {
        assert!(last_batch_is_missed(left), "{left:?}");
    }
    assert!(!last_batch_is_missed(Left::Killed));
    PLANTED.set(Some(Mutant::DurableLsnIgnored));
    let killed = !last_batch_is_missed(Left::Closed);
    PLANTED.set(None);
    assert!(killed);
}
