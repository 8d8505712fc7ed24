//! Restores in place of a disk in use, cut by a power loss anywhere.

use walvisor_testkit::Random;

use super::fixture::{Fixture, RunningStore, Shape, carry_out, filled};
use super::medium::World;
use super::oracle::DiskContents;
use crate::log::holds::HoldOwner;
use crate::sync::atomic::Ordering;
use crate::view::look::Look;
use crate::view::rewind_plan::RewindReport;
use crate::{BackendQueue, CommitWait, Operation, Point, Retention};

const SHAPE: Shape = Shape::two_disks(64, 16);

/// The disks' contents as of some LSNs.
type KnownStates = Vec<(u64, DiskContents)>;

/// Writes to either disk, all durable at the end, and notes what the disks are after each.
fn work(
    running: &mut RunningStore,
    random: &mut Random,
    states: &mut KnownStates,
    newest: &mut u32,
) {
    let mut now = states.last().expect("a state").1.clone();
    for _ in 0..1 + random.below(6) {
        *newest += 1;
        let disk = random.below(2) as usize;
        let (sector, sectors) = (random.below(SHAPE.sectors - 8), 1 + random.below(8));
        now[disk][sector as usize..(sector + sectors) as usize].fill(*newest);
        let mut port = running.disks[disk].open_port().unwrap();
        let data = filled(*newest, sectors);
        carry_out(running, &mut port, Operation::Write { sector, data }).unwrap();
        states.push((running.appended(), now.clone()));
        carry_out(running, &mut port, Operation::Flush).unwrap();
        port.kick();
    }
    running.finish_writer();
}

/// Restores a disk to one of these states, with power lost after a number of operations. Returns
/// the LSN of the restore, if it succeeded, and the resulting state; `None`: the log no longer has
/// records of the disk.
fn rewind(
    fixture: &Fixture,
    running: &mut RunningStore,
    (disk, ticks): (usize, u64),
    (to, then): &(u64, DiskContents),
    now: &DiskContents,
) -> Option<(Option<u64>, DiskContents)> {
    let live = running.disks[disk].clone();
    let newest = live.state.last_lsn.load(Ordering::Relaxed);
    let held = running.keeper.hold(&live.state, HoldOwner::Rewind).unwrap();
    let (_, rewinding) =
        match RewindReport::plan(&live.log, &live.state, Point::Lsn(*to), newest, &held) {
            Ok(plan) => plan,
            Err(error) => {
                let applied = live.log.lock().pipeline.applied();
                assert!(applied > *to || applied >= newest, "{error}");
                return None;
            }
        };
    let mut after = now.clone();
    let Some(rewinding) = rewinding else {
        assert_eq!(now[disk], then[disk], "as of LSN {to} nothing changes");
        return Some((Some(running.appended()), after));
    };
    after[disk].clone_from(&then[disk]);
    fixture.medium.lock().ticks = Some(ticks);
    let done = running.keeper.rewind(&live.state, rewinding);
    let crashed = fixture.medium.lock().crashed;
    assert!(done.is_ok() || crashed, "{done:?}");
    Some((done.ok(), after))
}

/// Wherever it is cut, the disk is what it was before or what it was at the point, and after an
/// answer the latter. The other disk does not change, and all earlier states can be restored.
#[test]
fn a_restore_in_use_is_there_or_not_wherever_power_is_lost() {
    let (mut cut, mut whole) = (0, 0);
    for seed in 1..400 {
        let mut fixture = Fixture::new(World::new(seed), SHAPE);
        fixture.retain = Retention::All;
        let (mut random, mut newest) = (Random(seed), 0);
        let empty = vec![vec![0; SHAPE.sectors as usize]; 2];
        let mut states: KnownStates = vec![(0, empty)];
        let mut running = fixture.open(false, CommitWait::NONE).unwrap();
        for _ in 0..4 {
            work(&mut running, &mut random, &mut states, &mut newest);
            let disk = random.below(2) as usize;
            let point = states[random.below(states.len() as u64) as usize].clone();
            let before = states.last().unwrap().1.clone();
            let case = (disk, random.below(14));
            let Some((lsn, after)) = rewind(&fixture, &mut running, case, &point, &before) else {
                continue;
            };
            let told = format!("seed {seed}, disk {disk}, to LSN {}", point.0);
            if let Some(lsn) = lsn {
                whole += 1;
                states.push((lsn, after.clone()));
                let mut world = fixture.medium.lock();
                world.ticks = None;
                let crashed = world.crashed;
                drop(world);
                if !crashed {
                    assert_eq!(running.read().unwrap(), after, "{told}");
                    if random.one_in(2) {
                        continue;
                    }
                }
            }
            cut += u32::from(lsn.is_none());
            drop(running);
            fixture.lose_power();
            running = fixture.open(false, CommitWait::NONE).unwrap();
            let found = running.read().unwrap();
            match lsn {
                Some(_) => assert_eq!(found, after, "{told}"),
                None => assert!(found == before || found == after, "{told}: {found:?}"),
            }
            states.push((running.newest_point(), found));
        }
        // Everything still in the log can be restored.
        for (lsn, contents) in &states {
            let live = running.disks[0].clone();
            let held = running.keeper.hold(&live.state, HoldOwner::Rewind).unwrap();
            if let Ok(look) = Look::in_use(&live.log, &live.state, Point::Lsn(*lsn), held, None) {
                let shown = super::looks::values_of(&look, SHAPE.sectors);
                assert_eq!(shown, contents[0], "seed {seed}, as of LSN {lsn}");
            }
        }
    }
    assert!(cut > 100 && whole > 300, "{cut} cut, {whole} whole");
}
