//! Exports of a disk in use, beside changes and checkpoints in any order.

use std::fs::File;
use std::path::PathBuf;

use walvisor_testkit::Random;

use super::fixture::{Fixture, RunningStore, Shape, carry_out, filled};
use super::medium::World;
use super::oracle::value_of;
use crate::error::ErrorKind;
use crate::log::export::Export;
use crate::mutant::{Mutant, PLANTED};
use crate::sync::Arc;
use crate::{BackendQueue, CommitWait, Operation, Retention, SECTOR_SIZE};

/// Twelve blocks of an export.
pub(super) const SECTORS: u64 = 192;

/// A disk, what each of its sectors must be, and a place for copies.
pub(super) struct Bench {
    pub(super) running: RunningStore,
    pub(super) values: Vec<u32>,
    newest: u32,
    random: Random,
    dir: tempfile::TempDir,
}

impl Bench {
    pub(super) fn new(seed: u64) -> Self {
        Self::keeping(seed, Retention::Nothing)
    }

    /// The same with a log that keeps history.
    pub(super) fn keeping(seed: u64, retain: Retention) -> Self {
        let shape = Shape::one_disk(SECTORS, 16);
        let mut fixture = Fixture::new(World::new(seed), shape);
        fixture.retain = retain;
        Self {
            running: fixture.open(false, CommitWait::NONE).unwrap(),
            values: vec![0; SECTORS as usize],
            newest: 0,
            random: Random(seed),
            dir: tempfile::tempdir().unwrap(),
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

    fn begin(&mut self) -> (PathBuf, Arc<Export>) {
        let path = self.dir.path().join("copy");
        let target = File::create(&path).unwrap();
        let disk = self.running.disks[0].state.clone();
        let export = Arc::new(Export::new(&disk.base, &disk.path, target).unwrap());
        let (newest, keeper) = (self.running.appended(), &mut self.running.keeper);
        keeper.begin_export(newest, &disk, export.clone()).unwrap();
        (path, export)
    }

    fn end(&self, export: &Arc<Export>) {
        self.running.disks[0].state.end_export(export);
    }

    fn has_exports(&self) -> bool {
        let exports = self.running.disks[0].state.exports.lock().unwrap();
        !exports.is_empty()
    }

    /// Whether an export is the disk as it was when the export began.
    fn export(&mut self) -> bool {
        self.changes();
        let expected = self.values.clone();
        let (path, export) = self.begin();
        loop {
            match self.below(4) {
                0 => self.changes(),
                1 => self.checkpoint(),
                _ => {
                    let (passed, size, copied) = export.step().unwrap();
                    assert!(passed <= size && copied <= size);
                    if passed == size {
                        break;
                    }
                }
            }
        }
        self.end(&export);
        // Later writes are not in the copy.
        self.changes();
        self.checkpoint();
        assert!(!self.has_exports());
        let copy = std::fs::read(path).unwrap();
        copy.chunks(SECTOR_SIZE as usize).map(value_of).eq(expected)
    }
}

#[test]
fn an_export_is_the_disk_at_one_moment_whatever_checkpoints_overwrite() {
    for seed in 1..100 {
        let mut bench = Bench::new(seed);
        for round in 0..4 {
            assert!(bench.export(), "seed {seed}, round {round}");
        }
    }
}

#[test]
fn a_checkpoint_that_saves_nothing_for_an_export_is_noticed() {
    PLANTED.set(Some(Mutant::ExportUnsaved));
    let killed = (1..100).any(|seed| {
        let mut bench = Bench::new(seed);
        (0..4).any(|_| !bench.export())
    });
    PLANTED.set(None);
    assert!(killed);
}

/// Two exports of one disk, of different moments, do not disturb each other.
#[test]
fn exports_overlap() {
    for seed in 1..20 {
        let mut bench = Bench::new(seed);
        bench.changes();
        let first = (bench.values.clone(), bench.begin());
        let kept = bench.dir.path().join("first");
        std::fs::rename(&first.1.0, &kept).unwrap();
        for _ in 0..4 {
            bench.changes();
            first.1.1.step().unwrap();
        }
        let second = (bench.values.clone(), bench.begin());
        for (expected, path, export) in [
            (first.0, kept, first.1.1),
            (second.0, second.1.0, second.1.1),
        ] {
            bench.changes();
            bench.checkpoint();
            while {
                let (passed, size, _) = export.step().unwrap();
                passed < size
            } {}
            bench.end(&export);
            let copy = std::fs::read(path).unwrap();
            let copy = copy.chunks(SECTOR_SIZE as usize).map(value_of);
            assert!(copy.eq(expected), "seed {seed}");
        }
    }
}

/// The file is checked before the disk is touched, and an export's error does not affect the disk.
#[test]
fn an_export_that_can_not_be_written_fails_alone() {
    let mut bench = Bench::new(5);
    bench.changes();
    let disk = bench.running.disks[0].state.clone();
    for refused in ["/dev/null", "/proc/self/exe"] {
        let error = Export::new(&disk.base, &disk.path, File::open(refused).unwrap()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
    }
    let path = bench.dir.path().join("copy");
    std::fs::write(&path, "").unwrap();
    let read_only = Export::new(&disk.base, &disk.path, File::open(&path).unwrap());
    let read_only = Arc::new(read_only.unwrap());
    let (newest, keeper) = (bench.running.appended(), &mut bench.running.keeper);
    let refused = keeper.begin_export(newest, &disk, read_only);
    assert!(refused.is_err() && !bench.has_exports());
    bench.changes();
    bench.checkpoint();
}

/// An abandoned export holds up no checkpoint, and gets nothing more.
#[test]
fn an_abandoned_export_gets_nothing_more() {
    let mut bench = Bench::new(6);
    bench.changes();
    let (path, export) = bench.begin();
    export.step().unwrap();
    bench.end(&export);
    let before = std::fs::read(&path).unwrap();
    assert_eq!(export.save(0..SECTORS * SECTOR_SIZE), SECTORS * SECTOR_SIZE);
    for _ in 0..4 {
        bench.changes();
        bench.checkpoint();
    }
    assert!(std::fs::read(&path).unwrap() == before);
}
