//! Images that fail for a while, beside one that works: the other disk does not notice, and nothing
//! is lost.

use walvisor_testkit::Seeds;

use super::fixture::{Fixture, RunningStore, Shape, carry_out as end, filled};
use super::medium::{LOG, World};
use super::oracle::Violation;
use super::{Total, killers, run_all};
use crate::mutant::{Mutant, PLANTED};
use crate::sync::stepped::SteppedClock;
use crate::{
    Backend, BackendQueue, CommitWait, Condition, Failure, FullLogPolicy, Operation, Port,
    Retention, StallCause,
};
use std::path::{Path, PathBuf};
use std::time::Duration;

const SECTORS: u64 = 256;
/// So small that many writes hit the blocks that the control file has samples of.
const FEW_SECTORS: u64 = 64;
const SEGMENTS: u32 = 8;
const WRITE: u64 = 8;

fn open(world: u64, sectors: u64) -> (Fixture, RunningStore) {
    let shape = Shape::two_disks(sectors, SEGMENTS);
    let fixture = Fixture::new(World::new(world), shape);
    let running = opened(&fixture);
    (fixture, running)
}

fn opened(fixture: &Fixture) -> RunningStore {
    let running = fixture.open(false, CommitWait::NONE);
    running.expect("a log that opens")
}

/// Bytes in a spill file, where these are limited.
const LIMIT: u64 = 16 << 10;

/// As [`open`], with a limit for spill files.
fn open_limited(on_full: FullLogPolicy) -> (Fixture, RunningStore) {
    let (mut fixture, running) = open(1, SECTORS);
    drop(running);
    fixture.medium.lock().restart();
    (fixture.on_full, fixture.spill_limit) = (on_full, Some(LIMIT));
    let running = opened(&fixture);
    (fixture, running)
}

fn break_image(fixture: &Fixture, disk: Option<usize>) {
    let path = disk.map(|disk| fixture.image(disk));
    let mut world = fixture.medium.lock();
    world.failing_image = path.and_then(|path| world.names.get(&path));
}

fn write(number: u32) -> Operation {
    let sector = u64::from(number) * WRITE % SECTORS;
    let data = filled(number, WRITE);
    Operation::Write { sector, data }
}

fn durably(
    running: &mut RunningStore,
    port: &mut Port,
    operation: Operation,
) -> Result<(), Failure> {
    end(running, port, operation)?;
    end(running, port, Operation::Flush)?;
    // The keeper is on time: it begins when half of the log is in use, not when it is full.
    let _ = running.keeper.step(false);
    Ok(())
}

/// The spill files in the log's directory.
fn spill_files(fixture: &Fixture) -> Vec<PathBuf> {
    let _files = fixture.medium.enter();
    let names = crate::medium::filesystem::files().names(Path::new(LOG));
    let names = names.unwrap().into_iter();
    names
        .filter(|name| crate::log::spill::is_spill(name))
        .map(|name| Path::new(LOG).join(name))
        .collect()
}

fn spills(fixture: &Fixture) -> usize {
    spill_files(fixture).len()
}

/// The map of the only spill file.
fn spill_map(fixture: &Fixture) -> Vec<u8> {
    let mut files = spill_files(fixture).into_iter();
    let map = files.find(|path| path.extension().is_some_and(|end| end == "map"));
    fixture.medium.lock().contents(&map.expect("a map"))
}

#[test]
fn a_failing_image_does_not_stop_the_other_disk_and_loses_nothing() {
    for crash in [false, true] {
        let (mut fixture, mut running) = open(1, SECTORS);
        let [mut sick, mut well] = [0, 1].map(|disk| running.disks[disk].open_port().unwrap());
        break_image(&fixture, Some(0));
        // Many times the log's room.
        for number in 1..1000 {
            durably(&mut running, &mut well, write(number)).unwrap();
            if number % 3 == 0 {
                durably(&mut running, &mut sick, write(number)).unwrap();
            }
        }
        assert!(running.log().counters.snapshot().checkpoints > 10);
        let conditions = [0, 1].map(|disk| running.disks[disk].condition());
        let told = conditions[0].trouble().expect("a failing image");
        assert!(told.error.contains("at sector"), "{}", told.error);
        assert!(matches!(conditions[0], Condition::CopyFailing(_)));
        assert_eq!(conditions[1], Condition::Ok);
        assert_eq!(spills(&fixture), 2);
        let all = running.read().unwrap();
        drop((sick, well));
        if crash {
            drop(running);
            fixture.lose_power();
            // Its image is moved too.
            fixture.moves = true;
            running = opened(&fixture);
            assert_eq!(running.read().unwrap(), all);
        }
        break_image(&fixture, None);
        running.keeper.close().unwrap();
        assert_eq!(running.disks[0].condition(), Condition::Ok);
        assert_eq!((fixture.bases(), spills(&fixture)), (all, 0));
    }
}

/// A close leaves what the image lacks in the spill file, and closes the other disk for good.
#[test]
fn a_log_is_closed_and_opened_again_with_a_failing_image() {
    let (fixture, mut running) = open(2, SECTORS);
    let [mut sick, mut well] = [0, 1].map(|disk| running.disks[disk].open_port().unwrap());
    break_image(&fixture, Some(0));
    for number in 1..40 {
        durably(&mut running, &mut sick, write(number)).unwrap();
        durably(&mut running, &mut well, write(number)).unwrap();
    }
    let all = running.read().unwrap();
    drop((sick, well));
    assert!(!running.keeper.close().unwrap());
    drop(running);
    let images = [0, 1].map(|disk| fixture.image(disk));
    let open = |disk: usize| {
        let world = fixture.medium.lock();
        let file = world.names.get(&images[disk]).unwrap();
        world.files[file].mark().unwrap().open
    };
    assert_eq!([open(0), open(1)], [true, false]);
    assert_eq!(fixture.bases()[1], all[1]);
    fixture.medium.lock().restart();
    break_image(&fixture, None);
    let mut running = opened(&fixture);
    assert_eq!(running.read().unwrap(), all);
    running.keeper.step(true).unwrap();
    assert!(running.keeper.close().unwrap());
    assert_eq!((fixture.bases(), spills(&fixture)), (all, 0));
}

/// A disk whose spill file is full takes no more writes, and only that disk.
#[test]
fn writes_beyond_the_limit_of_a_spill_file_fail_until_the_image_works() {
    let (fixture, mut running) = open_limited(FullLogPolicy::Fail);
    let [mut sick, mut well] = [0, 1].map(|disk| running.disks[disk].open_port().unwrap());
    break_image(&fixture, Some(0));
    let refused = (1..1000).find(|number| {
        durably(&mut running, &mut well, write(*number)).unwrap();
        durably(&mut running, &mut sick, write(*number)) == Err(Failure::Io)
    });
    assert!(refused.is_some_and(|refused| refused > LIMIT as u32 / 4096));
    let all = running.read().unwrap();
    for number in 1000..2000 {
        durably(&mut running, &mut well, write(number)).unwrap();
        assert!(
            running.disks[0]
                .condition()
                .trouble()
                .unwrap()
                .refuses_writes
        );
    }
    end(&mut running, &mut sick, Operation::Flush).unwrap();
    assert_eq!(durably(&mut running, &mut sick, write(1)), Err(Failure::Io));
    let conditions = [0, 1].map(|disk| running.disks[disk].condition());
    let told = conditions[0].trouble().expect("a failing image");
    assert!(told.error.ends_with("; its spill file is full"), "{told:?}");
    assert_eq!(conditions[1], Condition::Ok);
    assert_eq!(running.read().unwrap()[0], all[0]);
    // It is full in the next process too, until that has copied it back.
    drop((sick, well, running));
    fixture.medium.lock().restart();
    let mut running = opened(&fixture);
    let mut sick = running.disks[0].open_port().unwrap();
    assert_eq!(durably(&mut running, &mut sick, write(1)), Err(Failure::Io));
    running.keeper.step(true).unwrap();
    assert_eq!(running.disks[0].condition(), Condition::Ok);
    durably(&mut running, &mut sick, write(1)).unwrap();
    let all = running.read().unwrap();
    drop(sick);
    assert!(running.keeper.close().unwrap());
    assert_eq!((fixture.bases(), spills(&fixture)), (all, 0));
}

#[test]
fn writes_beyond_the_limit_of_a_spill_file_wait_with_on_full_pause() {
    let _clock = SteppedClock::start();
    let (fixture, mut running) = open_limited(FullLogPolicy::Pause);
    let [mut sick, mut well] = [0, 1].map(|disk| running.disks[disk].open_port().unwrap());
    break_image(&fixture, Some(0));
    let blocks = LIMIT as u32 / 4096;
    for number in 0..blocks {
        durably(&mut running, &mut sick, write(number)).unwrap();
    }
    running.keeper.step(true).unwrap();
    let told = running.disks[0].condition();
    assert!(told.trouble().unwrap().pauses_writes, "{told:?}");
    sick.submit(7, write(5));
    sick.kick();
    for number in 0..500 {
        durably(&mut running, &mut well, write(number)).unwrap();
    }
    let mut done = Vec::new();
    sick.completions(&mut done);
    assert!(done.is_empty(), "it waits");
    let counters = running.disks[0].log.counters.snapshot();
    assert_eq!(counters.stalled.get(StallCause::SpillFull), 1);
    break_image(&fixture, None);
    crate::sync::sleep(Duration::from_secs(2));
    running.keeper.step(true).unwrap();
    sick.completions(&mut done);
    assert_eq!(done.pop().map(|done| done.result.map(drop)), Some(Ok(())));
    end(&mut running, &mut sick, Operation::Flush).unwrap();
    assert_eq!(running.disks[0].condition(), Condition::Ok);
}

/// A map that goes to another directory would leave what the log has given up in neither.
#[test]
fn no_map_of_a_spill_file_is_written_to_another_directory_of_the_same_name() {
    let (fixture, mut running) = open(1, SECTORS);
    let mut sick = running.disks[0].open_port().unwrap();
    break_image(&fixture, Some(0));
    durably(&mut running, &mut sick, write(1)).unwrap();
    running.keeper.step(true).unwrap();
    durably(&mut running, &mut sick, write(2)).unwrap();
    let before = spill_map(&fixture);
    fixture.medium.lock().moved = true;
    running.keeper.step(true).unwrap_err();
    assert_eq!(spill_map(&fixture), before);
    fixture.medium.lock().moved = false;
    running.keeper.step(true).unwrap();
    assert_ne!(spill_map(&fixture), before);
}

/// A checkpoint in which a sync fails, and later a read, and then a kill.
fn twice_failed(world: u64, sync: u64, read: u64) -> Result<(), String> {
    let (fixture, mut running) = open(world, FEW_SECTORS);
    let mut sick = running.disks[0].open_port().map_err(|_| "no port")?;
    for number in [0, 3, 7] {
        durably(&mut running, &mut sick, write(number)).map_err(|_| "a write")?;
    }
    drop(sick);
    let all = running.read().map_err(|_| "the first read")?;
    let mut world = fixture.medium.lock();
    (world.fail_sync, world.fail_read) = (Some(sync), Some(read));
    drop(world);
    let _ = running.keeper.step(true);
    drop(running);
    fixture.medium.lock().restart();
    let running = reopened(&fixture)?;
    let found = running.read().map_err(|_| "the last read")?;
    if found == all {
        Ok(())
    } else {
        Err(format!("{found:?}\nnot {all:?}"))
    }
}

fn all_twice_failed() -> Result<(), String> {
    for world in 0..20 {
        for (sync, read) in (0..10).flat_map(|sync| (0..10).map(move |read| (sync, read))) {
            twice_failed(world, sync, read)
                .map_err(|wrong| format!("world {world}, sync {sync}, read {read}: {wrong}"))?;
        }
    }
    Ok(())
}

#[test]
fn a_sync_that_fails_and_then_a_read_leave_a_log_that_opens() {
    assert_eq!(all_twice_failed(), Ok(()));
    PLANTED.set(Some(Mutant::CopyBackTrustsCache));
    let noticed = std::panic::catch_unwind(all_twice_failed);
    PLANTED.set(None);
    assert!(!matches!(noticed, Ok(Ok(()))), "a fault");
}

/// Counters of random runs.
#[derive(Debug, Default)]
struct Totals {
    /// Steps that ended with a spill file.
    spilled: u64,
    /// Power cuts.
    cuts: u64,
}

impl Total for Totals {
    fn add(&mut self, other: &Self) {
        self.spilled += other.spilled;
        self.cuts += other.cuts;
    }
}

/// Images fail and recover at any time, and power is cut at any time: what a disk was when its last
/// FLUSH ended is there, whether or not the log keeps history.
fn random_run(seed: u64, retain: Retention) -> Result<Totals, Violation> {
    let Totals {
        mut spilled,
        mut cuts,
    } = Totals::default();
    let mut random = walvisor_testkit::Random(seed);
    let (mut fixture, running) = open(seed, FEW_SECTORS);
    drop(running);
    fixture.medium.lock().restart();
    fixture.retain = retain;
    fixture.spill_limit = seed.is_multiple_of(4).then_some(LIMIT);
    let mut running = opened(&fixture);
    let mut model = running.read().map_err(|_| "the first read")?;
    for step in 0..100 {
        let number = step + 1;
        match random.below(40) {
            0 => break_image(&fixture, Some(random.below(2) as usize)),
            1 | 2 => break_image(&fixture, None),
            3 => drop(running.keeper.step(true)),
            4 => fixture.medium.lock().ticks = Some(random.below(60)),
            5 => {
                // Checkpoints with other faults besides, and a kill.
                for _ in 0..1 + random.below(2) {
                    let mut world = fixture.medium.lock();
                    let mut after = || Some(random.below(10)).filter(|after| *after < 7);
                    (world.fail_read, world.fail_write) = (after(), after());
                    (world.fail_sync, world.ticks) = (after(), after().map(|after| after * 5));
                    world.base_full = random.below(2) == 0;
                    drop(world);
                    let _ = running.keeper.step(true);
                }
                drop(running);
                if fixture.medium.lock().crashed {
                    fixture.lose_power();
                } else {
                    fixture.medium.lock().restart();
                }
                running = reopened(&fixture)?;
            }
            6 => {
                // Without a FLUSH before, only what was durable must be there: so each change below
                // has one.
                let closed = running.keeper.close();
                drop(running);
                if fixture.medium.lock().crashed {
                    fixture.lose_power();
                } else {
                    if matches!(closed, Ok(true))
                        && fixture.bases() != model
                        && retain == Retention::Nothing
                    {
                        return Err(format!("step {step}: closed images are not the disks"));
                    }
                    fixture.medium.lock().restart();
                }
                running = reopened(&fixture)?;
            }
            _ => {
                let disk = random.below(2) as usize;
                let sectors = 1 + random.below(24);
                let sector = random.below(FEW_SECTORS + 1 - sectors);
                let range = sector as usize..(sector + sectors) as usize;
                let zero = random.below(6) == 0;
                let operation = if zero {
                    Operation::Discard {
                        sector,
                        sectors: sectors as u32,
                    }
                } else {
                    Operation::Write {
                        sector,
                        data: filled(number, sectors),
                    }
                };
                let opened = running.disks[disk].open_port();
                let ended = opened
                    .map_err(|_| Failure::Io)
                    .and_then(|mut port| durably(&mut running, &mut port, operation));
                let mut next = model.clone();
                next[disk][range].fill(if zero { 0 } else { number });
                let crashed = fixture.medium.lock().crashed;
                if ended.is_ok() {
                    model = next;
                } else if crashed {
                    cuts += 1;
                    drop(running);
                    fixture.lose_power();
                    running = reopened(&fixture)?;
                    let found = running.read().map_err(|_| "reading after a cut")?;
                    if found == next {
                        model = next;
                    }
                } else {
                    // It may have been applied all the same; a failed log has to be opened again.
                    drop(running);
                    fixture.medium.lock().restart();
                    running = reopened(&fixture)?;
                    let found = running.read().map_err(|_| "reading after an error")?;
                    if found == next {
                        model = next;
                    }
                }
            }
        }
        if fixture.medium.lock().crashed {
            cuts += 1;
            drop(running);
            fixture.lose_power();
            running = reopened(&fixture)?;
        }
        spilled += running
            .disks
            .iter()
            .filter(|disk| disk.state.base.is_spilled())
            .count() as u64;
        let planted = fixture.medium.lock().fail_read.take();
        let found = running
            .read()
            .map_err(|failure| format!("step {step}: {failure}"))?;
        fixture.medium.lock().fail_read = planted;
        if found != model {
            return Err(format!("step {step}: {found:?}\nnot {model:?}"));
        }
    }
    // The log may have failed for good, and faults may be due.
    drop(running);
    fixture.medium.lock().restart();
    running = reopened(&fixture)?;
    // History would stay in the log.
    let _ = running
        .keeper
        .change_history(|control| Retention::Nothing.set(control));
    running
        .keeper
        .step(true)
        .map_err(|error| error.to_string())?;
    running.keeper.close().map_err(|error| error.to_string())?;
    if fixture.bases() != model || spills(&fixture) > 0 {
        return Err("the images are not the disks in the end".to_owned());
    }
    Ok(Totals { spilled, cuts })
}

fn reopened(fixture: &Fixture) -> Result<RunningStore, String> {
    let running = fixture.open(false, CommitWait::NONE);
    running.map_err(|error| format!("it does not open: {error}"))
}

#[test]
fn nothing_that_was_flushed_is_lost_however_images_fail() {
    let name = "nothing_that_was_flushed_is_lost_however_images_fail";
    let seeds = Seeds::of(name, "WALVISOR_HISTORIES", 40, 60);
    for retain in [Retention::Nothing, Retention::All] {
        let total = run_all(&seeds, |seed| random_run(seed, retain));
        assert!(
            seeds.fixed.end - seeds.fixed.start < 40 || total.spilled > 10 && total.cuts > 10,
            "{retain:?}: {total:?}"
        );
    }
}

#[test]
fn planted_faults_of_spill_files_are_noticed() {
    killers::SPILLS.assert_all(|seed| {
        let run = std::panic::catch_unwind(|| random_run(seed, Retention::Nothing));
        run.unwrap_or_else(|_| Err("a panic".to_owned())).err()
    });
}
