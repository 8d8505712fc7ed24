//! Writes as long as the pages and clusters of databases, and power cuts: each is whole or absent,
//! as [`max_atomic_bytes`](crate::Backend::max_atomic_bytes) promises.

use walvisor_testkit::Random;

use super::fixture::{Fixture, Shape, carry_out, filled};
use super::medium::World;
use super::oracle::value_of;
use crate::medium::filesystem::{FileSystem, OpenMode};
use crate::{Backend, CommitWait, Operation, SECTOR_SIZE};

const SHAPE: Shape = Shape {
    disks: 1,
    sectors: 512,
    segment_size: 1 << 20,
    max_segments: 4,
};

/// Cuts power in the middle of writes of this many sectors, each at a multiple of them. Returns
/// whether one of them was torn.
fn is_torn_by_a_cut(seed: u64, unit: u64) -> bool {
    let fixture = Fixture::new(World::new(seed), SHAPE);
    let mut random = Random(seed);
    let mut running = fixture.open(false, CommitWait::NONE).unwrap();
    assert!(running.disks[0].max_atomic_bytes() as u64 >= unit * SECTOR_SIZE);
    running.keeper.step(false).unwrap();
    let mut port = running.disks[0].open_port().unwrap();
    fixture.medium.lock().ticks = Some(random.below(60));
    for value in 1..200 {
        let (sector, data) = (
            random.below(SHAPE.sectors / unit) * unit,
            filled(value, unit),
        );
        // What is refused is lost as a whole.
        let _ = carry_out(&mut running, &mut port, Operation::Write { sector, data });
        if random.one_in(3) {
            let _ = carry_out(&mut running, &mut port, Operation::Flush);
        }
        if random.one_in(6) {
            let _ = running.keeper.step(true);
        }
        if fixture.medium.lock().crashed {
            break;
        }
    }
    assert!(fixture.medium.lock().crashed, "power is cut");
    drop((port, running));
    fixture.lose_power();
    let running = fixture.open(false, CommitWait::NONE).unwrap();
    let found = running.read().expect("what is there can be read");
    has_parts(&found[0], unit)
}

/// The same with writes to the image itself, as `backend=raw` makes them.
fn is_torn_without_a_log(seed: u64, unit: u64) -> bool {
    let fixture = Fixture::new(World::new(seed), SHAPE);
    let mut random = Random(seed);
    let path = fixture.image(0);
    let file = fixture.medium.open(&path, OpenMode::Direct).unwrap();
    fixture.medium.lock().ticks = Some(random.below(60));
    for value in 1..200 {
        let at = random.below(SHAPE.sectors / unit) * unit * SECTOR_SIZE;
        let _ = file.write_all_at(&filled(value, unit), at);
        if random.one_in(3) {
            let _ = file.sync_all();
        }
    }
    assert!(fixture.medium.lock().crashed, "power is cut");
    drop(file);
    fixture.lose_power();
    let bytes = fixture.medium.lock().contents(&path);
    let values: Vec<u32> = bytes.chunks(SECTOR_SIZE as usize).map(value_of).collect();
    has_parts(&values, unit)
}

/// Whether any place of so many sectors has parts of several writes.
fn has_parts(sectors: &[u32], unit: u64) -> bool {
    let mut places = sectors.chunks(unit as usize);
    places.any(|place| place.iter().any(|value| *value != place[0]))
}

#[test]
fn no_write_of_16_or_64_kib_is_torn_by_a_thousand_power_cuts() {
    for unit in [32, 128] {
        let torn = (0..1000).filter(|&seed| is_torn_by_a_cut(seed, unit));
        assert_eq!(torn.count(), 0, "{unit} sectors");
    }
}

/// The control.
#[test]
fn power_cuts_tear_such_writes_without_a_log() {
    for unit in [32, 128] {
        let torn = (0..1000).filter(|&seed| is_torn_without_a_log(seed, unit));
        let torn = torn.count();
        println!("{unit} sectors: {torn} of 1000 cuts tear a write");
        assert!(torn > 0);
    }
}
