//! Any CDBs with any data, several commands at the same time. Each command ends with a status that
//! the standards define, changes only what it may, and needs no more memory than the disk has.
//!
//! ```text
//!   input ──▶ Task::new, next, ended ──▶ server over a RAM disk
//!                └─ after each command: status, sense, data buffer, and the disk if nothing may have changed it
//! ```
//!
//! An *input* is a byte of options (1: blocks of 4096 bytes, 2: a read-only disk, 4: writethrough,
//! 8: a disk with atomic writes of up to 16 KiB), then steps: `0, length u8, CDB, data` starts any
//! CDB; `1, command u8, byte 1 u8, address u8, blocks u8, data` starts a command that the server
//! reports, with bits that the server reports for it; `2, task u8` ends one operation of a task;
//! `3, task u8` aborts a task; `4` announces a changed capacity. *Data* is `length u8, kind u8`
//! and, if the kind says so, bytes.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;

use crate::input::Input;
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::backend::{
    Backend, BackendQueue, Buffer, Capabilities, Completion, Extent, Operation,
};
use walvisor_devices::scsi::{DataBuffer, LogicalUnit, Status, Task, TaskOutcome, TaskStep};

/// 32 KiB: no command may need more memory than this.
const SECTORS: u64 = 64;
const MOST_STEPS: usize = 64;
/// Most commands at the same time.
const MOST_TASKS: usize = 4;

/// Lengths of data buffers in bytes.
const LENGTHS: [usize; 16] = [
    0, 1, 4, 8, 18, 24, 36, 96, 255, 511, 512, 1024, 4096, 8192, 12_288, 65_535,
];
/// Addresses and numbers of blocks at edges.
const ODD: [u64; 8] = [63, 64, 65, 0xffff, 1 << 32, 1 << 52, 1 << 61, u64::MAX];

/// Runs one input.
pub fn run(input: &[u8]) {
    let mut input = Input::new(input);
    let mut initiator = Initiator::new(input.byte());
    for _ in 0..MOST_STEPS {
        if input.is_empty() {
            break;
        }
        initiator.step(&mut input);
    }
    while !initiator.tasks.is_empty() {
        initiator.end(0);
    }
}

fn bytes(input: &mut Input<'_>, len: usize) -> Vec<u8> {
    (0..len).map(|_| input.byte()).collect()
}

fn number(input: &mut Input<'_>) -> u64 {
    input.pick(&ODD, |byte| byte)
}

fn data(input: &mut Input<'_>) -> Data {
    let len = input.of(&LENGTHS);
    let data = match input.byte() {
        0 => vec![0; len],
        kind @ 1..16 => vec![kind; len],
        // A parameter list, as for UNMAP and MODE SELECT, or blocks that differ.
        kind => {
            let mut bytes = bytes(input, usize::from(kind).min(len));
            bytes.resize(len, kind);
            bytes
        }
    };
    Data(RefCell::new(data))
}

/// A RAM disk that promises atomic writes, as a disk with a log does.
struct AtomicDisk {
    disk: RamDisk,
    /// The longest one in bytes, 0 for none.
    atomic: usize,
}

impl Backend for AtomicDisk {
    fn sectors(&self) -> u64 {
        self.disk.sectors()
    }

    fn capabilities(&self) -> Capabilities {
        self.disk.capabilities()
    }

    fn write_cache(&self) -> bool {
        self.disk.write_cache()
    }

    fn set_write_cache(&self, on: bool) {
        self.disk.set_write_cache(on);
    }

    fn open_queue(&self) -> io::Result<Box<dyn BackendQueue>> {
        self.disk.open_queue()
    }

    fn max_atomic_bytes(&self) -> usize {
        self.atomic
    }
}

struct Data(RefCell<Vec<u8>>);

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

/// A command in flight.
struct RunningCommand {
    task: Task,
    data: Data,
    /// The data buffer's contents before the command.
    before: Vec<u8>,
    held: Vec<Operation>,
    aborted: bool,
}

struct Initiator {
    unit: LogicalUnit,
    queue: Box<dyn BackendQueue>,
    read_only: bool,
    tasks: Vec<RunningCommand>,
    /// The commands that the server reports, as CDB usage data.
    usages: Vec<Vec<u8>>,
    /// The disk's contents when the last command in flight had ended; empty while they are unknown.
    still: Vec<u8>,
}

impl Initiator {
    fn new(options: u8) -> Self {
        let read_only = options & 2 != 0;
        let disk = if read_only {
            RamDisk::read_only(&[0x5a; SECTORS as usize * 512])
        } else {
            RamDisk::new(SECTORS)
        };
        disk.set_write_cache(options & 4 == 0);
        let queue = disk.open_queue().expect("a queue");
        let atomic = if options & 8 != 0 { 16 << 10 } else { 0 };
        let disk = AtomicDisk { disk, atomic };
        let block_size = if options & 1 != 0 { 4096 } else { 512 };
        let unit = LogicalUnit::new(Arc::new(disk), "fuzz", block_size).expect("a unit");
        let mut initiator = Self {
            unit,
            queue,
            read_only,
            tasks: Vec::new(),
            usages: Vec::new(),
            still: Vec::new(),
        };
        initiator.still = initiator.contents();
        initiator.learn();
        initiator
    }

    /// REPORT SUPPORTED OPERATION CODES: the list of all commands, then the usage data of each.
    fn learn(&mut self) {
        let report = |options: u8, opcode: u8, action: u8| {
            let cdb = [0xa3, 0x0c, options, opcode, 0, action, 0, 0, 16, 0, 0, 0];
            let data = Data(RefCell::new(vec![0; 4096]));
            let mut task = Task::new(&self.unit, &cdb, &data);
            assert!(matches!(task.next(&self.unit, &data), TaskStep::Done));
            let len = task.outcome().data_in.expect("data in");
            data.0.into_inner()[4..len].to_vec()
        };
        let all = report(0, 0, 0);
        let usages = all.chunks(8).map(|entry| report(3, entry[0], entry[3]));
        let usages: Vec<_> = usages.collect();
        self.usages = usages;
        assert!(self.usages.len() > 30);
        let atomic = self.usages.iter().any(|usage| usage[0] == 0x9c);
        assert_eq!(atomic, self.unit.backend().max_atomic_bytes() > 0);
    }

    fn operate(&mut self, operation: Operation) -> Completion {
        let mut done = Vec::new();
        self.queue.submit(0, operation);
        self.queue.kick();
        self.queue.completions(&mut done);
        done.pop().expect("a RAM disk ends everything at once")
    }

    fn contents(&mut self) -> Vec<u8> {
        let read = Operation::Read {
            sector: 0,
            sectors: SECTORS as u32,
        };
        let data: Option<Buffer> = self.operate(read).result.expect("a read");
        data.expect("data").to_vec()
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.byte() & 7 {
            0 => {
                let len = usize::from(input.byte() & 31);
                let cdb = bytes(input, len);
                self.start(&cdb, data(input));
            }
            2 => self.end(input.byte().into()),
            3 => {
                let at = usize::from(input.byte());
                if at < self.tasks.len() {
                    self.tasks[at].aborted = true;
                    self.tasks[at].task.abort();
                    self.go(at);
                }
            }
            4 => self.unit.capacity_changed(),
            _ => {
                let usage = usize::from(input.byte()) % self.usages.len();
                let mut cdb = self.usages[usage].clone();
                let action = cdb[0] == 0x9e || cdb[0] == 0xa3;
                if !action {
                    cdb[1] &= input.byte();
                }
                let (address, blocks) = (number(input).to_be_bytes(), number(input).to_be_bytes());
                let (lba, length) = match cdb.len() {
                    6 => (2..4, 4..5),
                    10 => (2..6, 7..9),
                    12 => (2..6, 6..10),
                    // WRITE ATOMIC, behind its boundary.
                    _ if cdb[0] == 0x9c => (2..10, 12..14),
                    _ => (2..10, 10..14),
                };
                for (range, number) in [(lba, address), (length, blocks)] {
                    let number = &number[8 - range.len()..];
                    cdb[range]
                        .iter_mut()
                        .zip(number)
                        .for_each(|(byte, new)| *byte &= new);
                }
                self.start(&cdb, data(input));
            }
        }
    }

    fn start(&mut self, cdb: &[u8], data: Data) {
        if self.tasks.len() == MOST_TASKS {
            self.end(0);
        }
        let before = data.0.borrow().clone();
        let task = Task::new(&self.unit, cdb, &data);
        assert!(task.bytes(&self.unit) <= SECTORS as usize * 512);
        self.tasks.push(RunningCommand {
            task,
            data,
            before,
            held: Vec::new(),
            aborted: false,
        });
        self.go(self.tasks.len() - 1);
    }

    /// Ends an operation of the task `at`, or of the first task with one if that task has none.
    fn end(&mut self, at: usize) {
        let holds = |task: &RunningCommand| !task.held.is_empty();
        let at = match self.tasks.get(at) {
            Some(task) if holds(task) => Some(at),
            _ => self.tasks.iter().position(holds),
        };
        let Some(at) = at else {
            assert!(self.tasks.is_empty(), "commands that wait for each other");
            return;
        };
        let operation = self.tasks[at].held.remove(0);
        let result = self.operate(operation).result;
        let running = &mut self.tasks[at];
        running.task.complete(&self.unit, &running.data, result);
        self.go(at);
    }

    /// Runs a task as far as it goes; if it ends, also retries the tasks that waited for it.
    fn go(&mut self, at: usize) {
        let running = &mut self.tasks[at];
        loop {
            match running.task.next(&self.unit, &running.data) {
                TaskStep::Submit(operation) => running.held.push(operation),
                TaskStep::LookUp { sectors, .. } => {
                    let found = Ok(vec![Extent::data(sectors)]);
                    let (unit, data) = (&self.unit, &running.data);
                    running.task.complete_look_up(unit, data, found);
                }
                TaskStep::InFlight => {
                    assert!(!running.held.is_empty());
                    return;
                }
                TaskStep::Blocked => {
                    assert!(running.held.is_empty());
                    return;
                }
                TaskStep::Done => break,
            }
        }
        let running = self.tasks.remove(at);
        assert!(running.held.is_empty());
        self.check(running);
        self.retry();
    }

    /// Retries the tasks that wait for other tasks.
    fn retry(&mut self) {
        let mut at = 0;
        while let Some(task) = self.tasks.get(at) {
            let count = self.tasks.len();
            if task.held.is_empty() {
                self.go(at);
                if self.tasks.len() < count {
                    // The task has ended, and `go` has retried the tasks after it.
                    return;
                }
            }
            at += 1;
        }
    }

    fn check(&mut self, running: RunningCommand) {
        let TaskOutcome {
            status,
            sense,
            data_in,
        } = running.task.outcome();
        let after = running.data.0.into_inner();
        // Bytes of the buffer that are not valid Data-In must be unchanged.
        let valid = data_in.unwrap_or(0);
        assert_eq!(after[valid..], running.before[valid..]);
        let mut refused = false;
        match (status, sense) {
            (Status::Good, None) => {}
            (Status::TaskAborted, None) => assert!(running.aborted && data_in.is_none()),
            (Status::CheckCondition, Some(sense)) => {
                assert_eq!(data_in, None);
                let key = match sense[0] & 0x7f {
                    0x70 => {
                        assert!(sense.len() == 18 && sense[7] == 10);
                        sense[2]
                    }
                    0x72 => {
                        assert_eq!(sense.len(), 8 + usize::from(sense[7]));
                        sense[1]
                    }
                    other => panic!("response code {other:02x}"),
                };
                // NOT READY, ILLEGAL REQUEST, UNIT ATTENTION, DATA PROTECT, MISCOMPARE: a RAM disk
                // has no others.
                assert!([2, 5, 6, 7, 0xe].contains(&key), "{sense:?}");
                refused = key != 0xe;
            }
            other => panic!("{other:?}"),
        }
        if !self.tasks.is_empty() {
            // Other commands in flight may have changed the disk.
            self.still.clear();
            return;
        }
        let contents = self.contents();
        if (refused || self.read_only) && !self.still.is_empty() {
            assert!(contents == self.still, "a refused command changed the disk");
        }
        self.still = contents;
    }
}
