//! Two disks of one log that are changed, restored in place and looked at, in use or not.

use std::collections::BTreeMap;
use std::ops::Range;

use walvisor_storage::{
    Allocation, Backend, BackendQueue, Disk, ErrorKind, Look, Operation, Point, Port, Result,
    Retention, RewindReport, Store, StoreOptions, rewind_disk, scratch_file,
};

use crate::support::{Random, TestDisk, check_look, modify, port, read, refused, wait_all};

pub const SECTORS: u64 = 256;
pub const BYTES: usize = SECTORS as usize * 512;

/// Runs a request of one of the ports to its end. The others are served too: one may be leading a
/// group.
fn run_beside(ports: &mut [Port], which: usize, operation: Operation) {
    ports[which].submit(1, operation);
    ports[which].kick();
    let mut all: Vec<_> = ports.iter_mut().collect();
    wait_all(&mut all, 1).remove(0).result.unwrap();
}

/// The sectors that a modification touches, and what it makes of them.
fn touches(operation: &Operation) -> (Range<u64>, Allocation) {
    match *operation {
        Operation::Discard { sector, sectors }
        | Operation::WriteZeroes {
            sector,
            sectors,
            unmap: true,
        } => (sector..sector + u64::from(sectors), Allocation::Hole),
        Operation::WriteZeroes {
            sector, sectors, ..
        } => (sector..sector + u64::from(sectors), Allocation::Zero),
        Operation::Write { sector, ref data } => {
            let sectors = data.len() as u64 / 512;
            (sector..sector + sectors, Allocation::Data)
        }
        Operation::Read { .. } | Operation::Flush => unreachable!("no modification"),
    }
}

/// Two disks of one log, and what they were as of each LSN.
pub struct Bench {
    pub place: TestDisk,
    /// While the log is in use.
    pub store: Option<Store>,
    pub random: Random,
    /// As of the newest LSN: that of a record, or of a restore in place.
    pub newest: u64,
    pub states: BTreeMap<u64, [Vec<u8>; 2]>,
    /// Which sectors of which disk each record touched.
    pub touched: BTreeMap<u64, (usize, Range<u64>, Allocation)>,
}

impl Bench {
    /// Not in use.
    pub fn new(retain: Retention) -> Self {
        Self::with(StoreOptions {
            segment_size: 64 << 10,
            max_segments: 64,
            retain: Some(retain),
            ..StoreOptions::default()
        })
    }

    pub fn with(options: StoreOptions) -> Self {
        let mut place = TestDisk::made(&["a", "b"], BYTES as u64, options);
        // What the log keeps is set once.
        place.options.retain = None;
        Self {
            place,
            store: None,
            random: Random(7),
            newest: 0,
            states: [(0, [(); 2].map(|()| vec![0; BYTES]))].into(),
            touched: BTreeMap::new(),
        }
    }

    pub fn open(&mut self) {
        self.store = Some(self.place.open());
    }

    pub fn close(&mut self) {
        self.store.take().unwrap().close().unwrap();
    }

    /// From now on these are the files that a kill would leave.
    pub fn kill(&mut self) {
        let options = self.place.options;
        self.place = self.place.crash();
        self.place.options = options;
        self.store = None;
    }

    pub fn store(&self) -> &Store {
        self.store.as_ref().expect("in use")
    }

    pub fn disk(&self, disk: usize) -> &Disk {
        &self.store().disks()[disk]
    }

    /// Makes random records of either disk, all durable at the end.
    pub fn change(&mut self, count: usize) {
        let mut ports = [0, 1].map(|disk| port(self.store(), disk));
        for _ in 0..count {
            let mut state = self.states[&self.newest].clone();
            let disk = self.random.below(2) as usize;
            let operation = modify(&mut self.random, &mut state[disk]);
            let (sectors, now) = touches(&operation);
            run_beside(&mut ports, disk, operation);
            self.newest += 1;
            self.states.insert(self.newest, state);
            self.touched.insert(self.newest, (disk, sectors, now));
        }
        (0..2).for_each(|disk| run_beside(&mut ports, disk, Operation::Flush));
    }

    /// Makes records of a log that is not in use before and after.
    pub fn work(&mut self, count: usize) {
        self.open();
        self.change(count);
        self.close();
    }

    pub fn look(&self, disk: usize, at: Point) -> Result<Look> {
        match &self.store {
            Some(store) => store.disks()[disk].look(at, None),
            None => self.place.look(&self.place.disks()[disk], at, None),
        }
    }

    /// A look that can be written.
    pub fn scratch(&self, disk: usize, at: Point) -> Look {
        let scratch = Some(scratch_file().unwrap());
        match &self.store {
            Some(store) => store.disks()[disk].look(at, scratch),
            None => self.place.look(&self.place.disks()[disk], at, scratch),
        }
        .unwrap()
    }

    pub fn check_look(&mut self, look: &dyn Backend, disk: usize, lsn: u64, told: &str) {
        let told = format!("disk {disk}, LSN {lsn}, {told}");
        check_look(&mut self.random, look, &self.states[&lsn][disk], &told);
    }

    /// Restores a disk in place, and notes what it is then.
    pub fn rewind(&mut self, disk: usize, at: Point) -> Result<RewindReport> {
        let done = match &self.store {
            Some(store) => store.disks()[disk].rewind(at)?,
            None => rewind_disk(&self.place.disks()[disk], &self.place.log(), at)?,
        };
        assert_eq!(done.from_lsn, self.newest);
        if let Some(lsn) = done.lsn {
            assert_eq!(lsn, self.newest + 1);
            let mut state = self.states[&self.newest].clone();
            state[disk] = self.states[&done.to_lsn][disk].clone();
            self.newest = lsn;
            self.states.insert(lsn, state);
        }
        Ok(done)
    }

    pub fn back(&mut self, disk: usize, lsn: u64) -> RewindReport {
        let done = self.rewind(disk, Point::Lsn(lsn)).unwrap();
        assert_eq!(done.to_lsn, lsn);
        done
    }

    pub fn horizon(&self) -> u64 {
        match &self.store {
            Some(store) => store.disks()[0].history().horizon.lsn,
            None => self.place.report().history.horizon.lsn,
        }
    }

    pub fn exported(&self, disk: usize) -> Vec<u8> {
        self.place.exported(&self.place.disks()[disk]).unwrap()
    }

    pub fn as_of(&self, disk: usize, at: Point) -> Result<Vec<u8>> {
        self.place.as_of(&self.place.disks()[disk], at)
    }

    pub fn image(&self, disk: usize) -> Vec<u8> {
        std::fs::read(&self.place.disks()[disk]).unwrap()
    }

    pub fn control(&self) -> Vec<u8> {
        std::fs::read(self.place.log().join("control")).unwrap()
    }

    /// The disks are as they should be now; if they are not in use, every state since the horizon
    /// is seen, and some are restored, and none before it is there.
    pub fn check(&mut self) {
        let (horizon, closed) = (self.horizon(), self.store.is_none());
        if closed {
            for disk in 0..2 {
                let now = &self.states[&self.newest][disk];
                assert!(self.exported(disk) == *now, "disk {disk} now");
                for (number, (&lsn, state)) in self.states.range(horizon..).enumerate() {
                    let at = Point::Lsn(lsn);
                    let look = self.look(disk, at).unwrap();
                    let bytes = read(&mut *look.open_queue().unwrap(), 0, SECTORS as u32);
                    assert!(bytes[..] == state[disk], "disk {disk}, LSN {lsn}");
                    drop(look);
                    let restored = number % 23 != 0 || self.as_of(disk, at).unwrap() == state[disk];
                    assert!(restored, "disk {disk}, restored as of LSN {lsn}");
                }
                if let Some((&lsn, _)) = self.states.range(..horizon).next_back() {
                    let gone = self.as_of(disk, Point::Lsn(lsn));
                    assert_eq!(refused(gone, ""), ErrorKind::NotFound);
                }
            }
            self.open();
        }
        for (disk, state) in self.states[&self.newest].iter().enumerate() {
            let bytes = read(&mut port(self.store(), disk), 0, SECTORS as u32);
            assert!(bytes[..] == state[..], "disk {disk} now");
        }
        if closed {
            self.close();
        }
    }
}
