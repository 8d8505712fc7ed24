//! Two disks of one log that are changed and restored.

use std::collections::BTreeMap;
use std::path::PathBuf;

use walvisor_storage::{
    BackendQueue, DiskOptions, ErrorKind, Operation, Point, Port, Result, Retention, RewindReport,
    Store, StoreOptions, create_disk, export_disk, inspect, rewind_disk,
};

use crate::support::{Random, copy_killed, modify, read, restored, wait_all};

pub(crate) const NAMES: [&str; 2] = ["a", "b"];
pub(crate) const SECTORS: u64 = 256;

/// Runs a request of one of the ports to its end. The others are served too: one may be leading a
/// group.
fn run_beside(ports: &mut [Port], which: usize, operation: Operation) {
    ports[which].submit(1, operation);
    ports[which].kick();
    let mut all: Vec<_> = ports.iter_mut().collect();
    wait_all(&mut all, 1).remove(0).result.unwrap();
}

/// Two disks of one log, and what they were as of each LSN.
pub(crate) struct Bench {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) options: StoreOptions,
    pub(crate) random: Random,
    /// As of the newest LSN: that of a record, or of a restore in place.
    pub(crate) newest: u64,
    pub(crate) states: BTreeMap<u64, [Vec<u8>; 2]>,
}

impl Bench {
    pub(crate) fn new(retain: Retention) -> Self {
        Self::with(StoreOptions {
            segment_size: 64 << 10,
            max_segments: 64,
            retain: Some(retain),
            ..StoreOptions::default()
        })
    }

    pub(crate) fn with(options: StoreOptions) -> Self {
        let bench = Self {
            dir: tempfile::tempdir().unwrap(),
            options,
            random: Random(7),
            newest: 0,
            states: [(0, [(); 2].map(|()| vec![0; (SECTORS * 512) as usize]))].into(),
        };
        for disk in 0..2 {
            let (log, options) = (bench.log(), &bench.options);
            create_disk(&bench.disk(disk), SECTORS * 512, &log, options).unwrap();
        }
        bench
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.dir.path().join("log")
    }

    pub(crate) fn disk(&self, number: usize) -> PathBuf {
        self.dir.path().join(NAMES[number])
    }

    pub(crate) fn open(&self) -> Store {
        let disks = [0, 1].map(|disk| DiskOptions::new(self.disk(disk)));
        let options = StoreOptions {
            retain: None,
            ..self.options
        };
        Store::open(&self.log(), &disks, &options).unwrap()
    }

    /// Makes random records of either disk, all durable at the end.
    pub(crate) fn change(&mut self, store: &Store, count: usize) {
        let mut ports: Vec<_> = store
            .disks()
            .iter()
            .map(|disk| disk.open_port().unwrap())
            .collect();
        for _ in 0..count {
            let mut state = self.states[&self.newest].clone();
            let disk = self.random.below(2) as usize;
            let operation = modify(&mut self.random, &mut state[disk]);
            run_beside(&mut ports, disk, operation);
            self.newest += 1;
            self.states.insert(self.newest, state);
        }
        (0..2).for_each(|disk| run_beside(&mut ports, disk, Operation::Flush));
    }

    /// Opens the log, makes records, and closes it.
    pub(crate) fn work(&mut self, count: usize) {
        let store = self.open();
        self.change(&store, count);
        store.close().unwrap();
    }

    /// Works, and is killed.
    pub(crate) fn work_killed(&mut self, count: usize) {
        let store = self.open();
        self.change(&store, count);
        let _dir = self.take_copy();
        drop(store);
    }

    /// The log and the images as a kill would leave them now take the places of these, which are
    /// returned.
    pub(crate) fn take_copy(&mut self) -> tempfile::TempDir {
        let copy = tempfile::tempdir().unwrap();
        let images = NAMES.map(|name| (self.dir.path().join(name), copy.path().join(name)));
        copy_killed(&self.log(), &copy.path().join("log"), &images);
        std::mem::replace(&mut self.dir, copy)
    }

    pub(crate) fn rewind(&mut self, disk: usize, at: Point) -> Result<RewindReport> {
        let done = rewind_disk(&self.disk(disk), &self.log(), at)?;
        self.note_restore(disk, &done);
        Ok(done)
    }

    /// Notes what a disk is after a restore.
    pub(crate) fn note_restore(&mut self, disk: usize, done: &RewindReport) {
        assert_eq!(done.from_lsn, self.newest);
        if let Some(lsn) = done.lsn {
            assert_eq!(lsn, self.newest + 1);
            let mut state = self.states[&self.newest].clone();
            state[disk] = self.states[&done.to_lsn][disk].clone();
            self.newest = lsn;
            self.states.insert(lsn, state);
        }
    }

    pub(crate) fn back(&mut self, disk: usize, lsn: u64) -> RewindReport {
        let done = self.rewind(disk, Point::Lsn(lsn)).unwrap();
        assert_eq!(done.to_lsn, lsn);
        done
    }

    pub(crate) fn restored(&self, disk: usize, at: Point) -> Result<Vec<u8>> {
        let new = self.dir.path().join("new");
        restored(&self.disk(disk), &self.log(), at, &new)
    }

    pub(crate) fn exported(&self, disk: usize) -> Vec<u8> {
        let new = self.dir.path().join("new");
        export_disk(
            &self.disk(disk),
            &self.log(),
            &new,
            false,
            None,
            &mut |_, _| {},
        )
        .unwrap();
        let bytes = std::fs::read(&new).unwrap();
        std::fs::remove_file(&new).unwrap();
        bytes
    }

    pub(crate) fn horizon(&self) -> u64 {
        let report = inspect(&self.disk(0), &self.log()).unwrap().log.unwrap();
        assert_eq!(report.history.horizon.lsn, report.checkpoint_lsn);
        report.checkpoint_lsn
    }

    /// Every state since the horizon comes back, none before it, and the disks are as they should
    /// be now.
    pub(crate) fn check(&self) {
        self.check_some(1);
    }

    pub(crate) fn check_some(&self, step: usize) {
        let horizon = self.horizon();
        let now = &self.states[&self.newest];
        for disk in 0..2 {
            assert!(self.exported(disk) == now[disk], "disk {disk} now");
            for (&lsn, state) in self.states.range(horizon..).step_by(step) {
                let told = format!("disk {disk} as of LSN {lsn}, the horizon is {horizon}");
                let bytes = self.restored(disk, Point::Lsn(lsn));
                assert!(bytes.unwrap() == state[disk], "{told}");
            }
            if let Some((&lsn, _)) = self.states.range(..horizon).next_back() {
                let error = self.restored(disk, Point::Lsn(lsn)).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
            }
        }
        let store = self.open();
        for (disk, state) in store.disks().iter().zip(now) {
            let bytes = read(&mut disk.open_port().unwrap(), 0, SECTORS as u32);
            assert!(bytes[..] == state[..]);
        }
        store.close().unwrap();
    }
}
