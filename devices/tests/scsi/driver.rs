//! An initiator, its data buffers, and the disks that it uses.

use std::cell::RefCell;
use std::fs::File;
use std::sync::Arc;

use tempfile::TempDir;
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::backend::{Backend, BackendQueue, Completion, Extent, Operation};
use walvisor_devices::scsi::{DataBuffer, LogicalUnit, Status, Task, TaskOutcome, TaskStep};
use walvisor_storage::{
    DiskOptions, Image, RawCache, RawDisk, Store, StoreOptions, create_disk, default_log_dir,
};
pub use walvisor_testkit::pattern;
use walvisor_testkit::queue;

/// A data buffer.
#[derive(Default)]
pub struct Data(RefCell<Vec<u8>>);

impl Data {
    pub fn new(bytes: impl Into<Vec<u8>>) -> Self {
        Self(RefCell::new(bytes.into()))
    }

    pub fn room(len: usize) -> Self {
        // Bytes that the server must not change keep this value.
        Self::new(vec![0xee; len])
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.0.borrow().clone()
    }
}

impl DataBuffer for Data {
    fn len(&self) -> usize {
        self.0.borrow().len()
    }

    fn read(&self, offset: usize, into: &mut [u8]) {
        into.copy_from_slice(&self.0.borrow()[offset..offset + into.len()]);
    }

    fn write(&self, offset: usize, from: &[u8]) {
        self.0.borrow_mut()[offset..offset + from.len()].copy_from_slice(from);
    }
}

/// Sense as tests name it: key, ASC, ASCQ.
pub type SenseCode = (u8, u8, u8);

pub const INVALID_OPCODE: SenseCode = (5, 0x20, 0);
pub const INVALID_CDB: SenseCode = (5, 0x24, 0);
pub const INVALID_LIST: SenseCode = (5, 0x26, 0);
pub const LIST_LENGTH: SenseCode = (5, 0x1a, 0);
pub const OUT_OF_RANGE: SenseCode = (5, 0x21, 0);
pub const SAVING: SenseCode = (5, 0x39, 0);
pub const WRITE_PROTECTED: SenseCode = (7, 0x27, 0);
pub const MISCOMPARE: SenseCode = (0xe, 0x1d, 0);
pub const READ_ERROR: SenseCode = (3, 0x11, 0);
pub const WRITE_ERROR: SenseCode = (3, 0x0c, 0);
pub const NOT_READY: SenseCode = (2, 0x04, 2);
pub const CAPACITY_CHANGED: SenseCode = (6, 0x2a, 9);

/// The contents of fixed format sense data.
#[derive(Debug, PartialEq, Eq)]
pub struct FixedSense {
    pub code: SenseCode,
    pub information: Option<u32>,
    /// Byte and bit, of the CDB or of the parameter list.
    pub cdb: Option<(u16, Option<u8>)>,
    pub list: Option<(u16, Option<u8>)>,
}

pub fn fixed(outcome: &TaskOutcome) -> FixedSense {
    assert_eq!(outcome.status, Status::CheckCondition, "{outcome:?}");
    assert_eq!(outcome.data_in, None);
    let sense = outcome.sense.expect("sense data");
    assert_eq!((sense.len(), sense[0] & 0x7f, sense[7]), (18, 0x70, 10));
    let information = u32::from_be_bytes(sense[3..7].try_into().unwrap());
    let specific = sense[15];
    let bit = (specific & 0x08 != 0).then_some(specific & 7);
    let field = (u16::from_be_bytes([sense[16], sense[17]]), bit);
    let valid = specific & 0x80 != 0;
    FixedSense {
        code: (sense[2] & 0xf, sense[12], sense[13]),
        information: (sense[0] & 0x80 != 0).then_some(information),
        cdb: (valid && specific & 0x40 != 0).then_some(field),
        list: (valid && specific & 0x40 == 0).then_some(field),
    }
}

/// A logical unit and a queue to its disk.
pub struct Bench {
    pub unit: LogicalUnit,
    queue: Box<dyn BackendQueue>,
    done: Vec<Completion>,
    /// The storage of the disk, if it is not in memory only.
    _kept: Option<(TempDir, Option<Store>)>,
}

impl Bench {
    pub fn over(backend: Arc<dyn Backend>, block_size: u32) -> Self {
        let queue = backend.open_queue().expect("a queue");
        Self {
            unit: LogicalUnit::new(backend, "test-0001", block_size).expect("a unit"),
            queue,
            done: Vec::new(),
            _kept: None,
        }
    }

    /// A RAM disk of `bytes` bytes.
    pub fn ram(bytes: u64, block_size: u32) -> Self {
        Self::over(Arc::new(RamDisk::new(bytes / 512)), block_size)
    }

    /// A raw image.
    pub fn raw(bytes: u64, block_size: u32) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.img");
        let file = File::create(&path).expect("an image");
        file.set_len(bytes).expect("room");
        let image = Image::open(&path, false).expect("an image");
        let disk = RawDisk::new(image, RawCache::Writeback);
        let mut bench = Self::over(Arc::new(disk), block_size);
        bench._kept = Some((directory, None));
        bench
    }

    /// A disk with a log.
    pub fn wal(bytes: u64, block_size: u32) -> Self {
        Self::of_log(bytes, block_size, |store| {
            Arc::new(store.disks()[0].clone())
        })
    }

    /// What `pick` makes of a log with one disk.
    pub fn of_log(
        bytes: u64,
        block_size: u32,
        pick: impl FnOnce(&Store) -> Arc<dyn Backend>,
    ) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("disk.img");
        let log = default_log_dir(&path);
        let options = StoreOptions {
            segment_size: 1 << 20,
            ..StoreOptions::default()
        };
        create_disk(&path, bytes, &log, &options).expect("a disk");
        let store = Store::open(&log, &[DiskOptions::new(&path)], &options).expect("a store");
        let mut bench = Self::over(pick(&store), block_size);
        bench._kept = Some((directory, Some(store)));
        bench
    }

    /// A bench for each kind of disk.
    pub fn each(bytes: u64, block_size: u32) -> [Self; 3] {
        [
            Self::ram(bytes, block_size),
            Self::raw(bytes, block_size),
            Self::wal(bytes, block_size),
        ]
    }

    /// Carries out one operation.
    pub fn operate(
        &mut self,
        operation: Operation,
    ) -> Result<Option<walvisor_devices::backend::Buffer>, walvisor_devices::backend::Failure> {
        queue::run(&mut *self.queue, operation)
    }

    fn next_completion(&mut self) -> Completion {
        if self.done.is_empty() {
            self.done = queue::wait_all(&mut [&mut *self.queue], 1);
        }
        self.done.remove(0)
    }

    /// Runs a command with `data`.
    pub fn run(&mut self, cdb: &[u8], data: &Data) -> TaskOutcome {
        let mut task = Task::new(&self.unit, cdb, data);
        let mut in_flight = 0;
        loop {
            match task.next(&self.unit, data) {
                TaskStep::Submit(operation) => {
                    self.queue.submit(7, operation);
                    in_flight += 1;
                }
                TaskStep::LookUp {
                    sector,
                    sectors,
                    most,
                } => {
                    let mapped = self.unit.backend().mapped();
                    let all = || Ok(vec![Extent::data(sectors)]);
                    let found = mapped.map_or_else(all, |m| m.extents(sector, sectors, most));
                    task.complete_look_up(&self.unit, data, found);
                }
                TaskStep::InFlight => {
                    assert!(in_flight > 0, "waits for nothing");
                    self.queue.kick();
                    let completion = self.next_completion();
                    assert_eq!(completion.token, 7);
                    in_flight -= 1;
                    task.complete(&self.unit, data, completion.result);
                }
                TaskStep::Blocked => panic!("blocked by nobody"),
                TaskStep::Done => {
                    assert_eq!(in_flight, 0);
                    return task.outcome();
                }
            }
        }
    }

    /// Runs a command without data, which must succeed.
    pub fn good(&mut self, cdb: &[u8]) {
        self.send(cdb, &[]);
    }

    /// Runs a command that sends data, which must succeed.
    pub fn send(&mut self, cdb: &[u8], bytes: &[u8]) {
        let data = Data::new(bytes);
        let outcome = self.run(cdb, &data);
        assert_eq!(outcome.status, Status::Good, "{cdb:02x?}: {outcome:?}");
        assert_eq!((outcome.sense, outcome.data_in), (None, None));
        assert_eq!(data.bytes(), bytes, "it is not the server's to write to");
    }

    /// Runs a command that receives data, with room for `room` bytes, and returns the data.
    pub fn receive(&mut self, cdb: &[u8], room: usize) -> Vec<u8> {
        let data = Data::room(room);
        let outcome = self.run(cdb, &data);
        assert_eq!(outcome.status, Status::Good, "{cdb:02x?}: {outcome:?}");
        let len = outcome.data_in.expect("data in");
        let mut bytes = data.bytes();
        assert!(bytes[len..].iter().all(|&byte| byte == 0xee));
        bytes.truncate(len);
        bytes
    }

    /// Runs a command that sends `bytes` and must fail, and returns its sense.
    pub fn refused(&mut self, cdb: &[u8], bytes: &[u8]) -> FixedSense {
        let outcome = self.run(cdb, &Data::new(bytes));
        fixed(&outcome)
    }

    /// Runs a command that sends `bytes` and must fail with `code`. `field`: the byte and bit that
    /// are wrong, in the parameter list for [`INVALID_LIST`] and else in the CDB.
    #[track_caller]
    pub fn refuses(
        &mut self,
        cdb: &[u8],
        bytes: &[u8],
        code: SenseCode,
        field: Option<(u16, Option<u8>)>,
    ) {
        let found = self.refused(cdb, bytes);
        let fields = match code {
            INVALID_LIST => (None, field),
            _ => (field, None),
        };
        assert_eq!(
            (found.code, (found.cdb, found.list)),
            (code, fields),
            "{cdb:02x?}"
        );
    }

    /// Reads blocks with READ (16).
    pub fn read(&mut self, lba: u64, blocks: u32) -> Vec<u8> {
        let room = blocks as usize * self.unit.block_size() as usize;
        let bytes = self.receive(&cdb16(0x88, 0, lba, blocks), room);
        assert_eq!(bytes.len(), room);
        bytes
    }

    /// Writes blocks with WRITE (16).
    pub fn write(&mut self, lba: u64, bytes: &[u8]) {
        let blocks = bytes.len() as u32 / self.unit.block_size();
        self.send(&cdb16(0x8a, 0, lba, blocks), bytes);
    }
}

/// A CDB of ten bytes: `flags` in byte 1, address and length.
pub fn cdb10(opcode: u8, flags: u8, lba: u32, length: u16) -> [u8; 10] {
    let (lba, length) = (lba.to_be_bytes(), length.to_be_bytes());
    let mut cdb = [0; 10];
    cdb[..2].copy_from_slice(&[opcode, flags]);
    cdb[2..6].copy_from_slice(&lba);
    cdb[7..9].copy_from_slice(&length);
    cdb
}

/// A CDB of twelve bytes.
pub fn cdb12(opcode: u8, flags: u8, lba: u32, length: u32) -> [u8; 12] {
    let mut cdb = [0; 12];
    cdb[..2].copy_from_slice(&[opcode, flags]);
    cdb[2..6].copy_from_slice(&lba.to_be_bytes());
    cdb[6..10].copy_from_slice(&length.to_be_bytes());
    cdb
}

/// A CDB of sixteen bytes.
pub fn cdb16(opcode: u8, flags: u8, lba: u64, length: u32) -> [u8; 16] {
    let mut cdb = [0; 16];
    cdb[..2].copy_from_slice(&[opcode, flags]);
    cdb[2..10].copy_from_slice(&lba.to_be_bytes());
    cdb[10..14].copy_from_slice(&length.to_be_bytes());
    cdb
}

/// COMPARE AND WRITE.
pub fn compare_and_write(flags: u8, lba: u64, blocks: u8) -> [u8; 16] {
    let mut cdb = cdb16(0x89, flags, lba, 0);
    cdb[13] = blocks;
    cdb
}

/// WRITE ATOMIC (16).
pub fn write_atomic(flags: u8, lba: u64, blocks: u16) -> [u8; 16] {
    cdb16(0x9c, flags, lba, blocks.into())
}

/// An UNMAP parameter list.
pub fn unmap_list(ranges: &[(u64, u32)]) -> Vec<u8> {
    let descriptors = 16 * ranges.len() as u16;
    let mut list = Vec::from((descriptors + 6).to_be_bytes());
    list.extend(descriptors.to_be_bytes());
    list.extend([0; 4]);
    for (lba, blocks) in ranges {
        list.extend(lba.to_be_bytes());
        list.extend(blocks.to_be_bytes());
        list.extend([0; 4]);
    }
    list
}
