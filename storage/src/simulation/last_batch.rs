//! Damage to the last batch of a log, which no later header shows to have been durable.

use std::path::Path;

use super::fixture::{Fixture, RunningStore, Shape, carry_out, control_of, filled};
use super::medium::{LOG, World};
use crate::error::ErrorKind;
use crate::format::{BLOCK, CONTROL_SLOT};
use crate::mutant::{Mutant, PLANTED};
use crate::recovery::contents::VerifyScope;
use crate::recovery::scan::{FoundRecord, scan};
use crate::{BackendQueue, CommitWait, Operation, Retention};

/// How a log is left before its last batch is damaged.
#[derive(Clone, Copy, Debug)]
enum EndState {
    /// It was written, and the process was killed: for all that is known, the batch may be torn.
    Killed,
    /// The process was killed, and the next one recovered the log, wrote nothing, and was killed
    /// too.
    Recovered,
    /// A snapshot was made, and the process was killed.
    Snapshot,
    /// It was closed, and keeps its history.
    Closed,
}

/// Writes to sectors 8 to 15, durably.
fn write(running: &mut RunningStore, value: u32) {
    let mut port = running.disks[0].open_port().unwrap();
    let data = filled(value, 8);
    carry_out(running, &mut port, Operation::Write { sector: 8, data }).unwrap();
    carry_out(running, &mut port, Operation::Flush).unwrap();
}

/// An open log that keeps its history, with two durable batches.
fn two_batches() -> (Fixture, RunningStore) {
    let mut fixture = Fixture::new(World::new(1), Shape::one_disk(64, 8));
    fixture.retain = Retention::All;
    let mut running = fixture.open(false, CommitWait::NONE).unwrap();
    running.keeper.step(false).unwrap();
    write(&mut running, 1);
    write(&mut running, 2);
    (fixture, running)
}

/// Whether a read of the last batch's data fails once that is damaged.
fn last_batch_is_missed(left: EndState) -> bool {
    let (fixture, mut running) = two_batches();
    running.finish_writer();
    let keeper = &mut running.keeper;
    match left {
        EndState::Killed => {}
        EndState::Recovered => {
            drop(running);
            fixture.lose_power();
            running = fixture.open(false, CommitWait::NONE).unwrap();
        }
        EndState::Snapshot => keeper.snapshot("then".parse().unwrap(), None).unwrap(),
        EndState::Closed => assert!(!keeper.close().unwrap()),
    }
    drop(running);
    fixture.lose_power();
    {
        let (medium, control) = (
            &fixture.medium,
            control_of(&fixture.medium).unwrap().control,
        );
        let mut last = None;
        let visit =
            &mut |found: FoundRecord<'_>| last = Some((found.segment.path.clone(), found.offset));
        let log = Path::new(LOG);
        scan(
            medium,
            log,
            &control,
            VerifyScope::Tail,
            visit,
            &mut |_, _| {},
        )
        .unwrap();
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

/// A batch known to be durable is never dropped as torn, even if no later header proves it.
#[test]
fn a_lost_last_batch_that_was_known_to_be_durable_is_noticed() {
    for left in [EndState::Recovered, EndState::Snapshot, EndState::Closed] {
        assert!(last_batch_is_missed(left), "{left:?}");
    }
    assert!(!last_batch_is_missed(EndState::Killed));
    PLANTED.set(Some(Mutant::DurableLsnIgnored));
    let killed = !last_batch_is_missed(EndState::Closed);
    PLANTED.set(None);
    assert!(killed);
}

/// Changes bytes of a file of the log.
fn change(world: &mut World, name: &str, offset: u64, len: usize, to: impl Fn(u8) -> u8) {
    let file = world.find(name);
    let mut bytes = world.contents(&Path::new(LOG).join(name));
    let changed = &mut bytes[offset as usize..offset as usize + len];
    changed.iter_mut().for_each(|byte| *byte = to(*byte));
    world.replace(file, &bytes);
}

/// A killed process leaves a log whose last durable batch is then damaged. Only the header of a
/// void segment proves that it was durable, because a power cut took the batch in between.
fn proved_by_a_void_segment() -> Fixture {
    let (fixture, mut running) = two_batches();
    let mut port = running.disks[0].open_port().unwrap();
    for token in 0..3 {
        let (sector, data) = (32, filled(9, 32));
        carry_out(&mut running, &mut port, Operation::Write { sector, data }).unwrap();
        let (mut written, mut done) = (port.notify_written(token), Vec::new());
        for _ in 0..100 {
            port.kick();
            port.completions(&mut done);
            written |= !done.is_empty();
        }
        assert!(written, "batch {token}");
    }
    drop((port, running));
    let control = control_of(&fixture.medium).unwrap().control;
    let mut records = Vec::new();
    let visit = &mut |found: FoundRecord<'_>| {
        let name = found.segment.path.file_name().unwrap();
        records.push((name.to_str().unwrap().to_owned(), found.offset));
    };
    let (medium, log) = (&fixture.medium, Path::new(LOG));
    scan(
        medium,
        log,
        &control,
        VerifyScope::Tail,
        visit,
        &mut |_, _| {},
    )
    .unwrap();
    let mut world = fixture.medium.lock();
    world.restart();
    let (segment, payload) = &records[1];
    change(&mut world, segment, *payload, 1, |byte| byte ^ 1);
    let (torn, void) = records[2..].split_at(1);
    assert!(torn[0].0 == *segment && void.iter().any(|(name, _)| name != segment));
    for (name, payload) in records[2..].iter().filter(|(name, _)| name == segment) {
        change(&mut world, name, payload - BLOCK as u64, BLOCK, |_| 0);
    }
    // Everything else has reached the medium.
    for (name, bytes) in world.segments() {
        let file = world.find(&name);
        world.replace(file, &bytes);
    }
    drop(world);
    fixture
}

/// How often a recovery that was cut, and then lost a control slot, shows the bytes from before the
/// last durable batch.
fn forgotten_proofs() -> u32 {
    let left = proved_by_a_void_segment();
    let mut forgotten = 0;
    for ticks in 0.. {
        let fixture = left.with(left.medium.lock().clone());
        fixture.medium.lock().ticks = Some(ticks);
        let opened = fixture.open(false, CommitWait::NONE);
        let cut = fixture.medium.lock().crashed;
        assert!(cut || opened.is_ok());
        drop(opened);
        fixture.lose_power();
        for slot in 0..2 {
            let fixture = fixture.with(fixture.medium.lock().clone());
            let offset = slot * CONTROL_SLOT as u64 + 100;
            change(&mut fixture.medium.lock(), "control", offset, 1, |byte| {
                !byte
            });
            match fixture.open(false, CommitWait::NONE) {
                Ok(running) => {
                    let found = running.read_sectors();
                    forgotten += u32::from(found[0][8..16].contains(&Some(1)));
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::Damaged, "{error}"),
            }
        }
        if !cut {
            break;
        }
    }
    forgotten
}

/// Before recovery wipes the proof that a batch was durable, both slots of the control file have
/// it.
#[test]
fn a_cut_recovery_and_a_rotten_slot_do_not_turn_a_durable_batch_into_a_torn_one() {
    assert_eq!(forgotten_proofs(), 0);
    PLANTED.set(Some(Mutant::ProofInOneSlot));
    let forgotten = forgotten_proofs();
    PLANTED.set(None);
    assert!(forgotten > 0);
}
