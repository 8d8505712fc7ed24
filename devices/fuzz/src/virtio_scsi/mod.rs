//! Any chains on the control, event and request queues of a SCSI target, while its owner pauses
//! units and announces capacities. What can be answered is answered once and changes only the
//! buffers that its driver gave for it, an I_T NEXUS RESET ends all commands also of a paused unit,
//! and a reset makes the target work again after any contents of the rings.
//!
//! ```text
//!   input ──▶ registers, rings ──▶ target over two RAM disks
//!                └─ guest memory ──▶ model.rs: which chains are answered, and where
//! ```
//!
//! What commands do to a disk is the subject of `cdb`.
//!
//! An *input* is a byte of options (1: EVENT_IDX, 2: unit 1 is read-only, 4: writethrough), two
//! bytes that choose the sizes of sense data and CDBs, then steps:
//! `0, type u8, subtype u8, lun u8, id u8, chain` makes a control request available, `1, chain` an
//! event buffer, `2, what u8` is the owner's: it pauses or resumes a unit or announces another
//! capacity; `3 …, lun u8, id u8, attribute u8, opcode u8, byte 1 u8, address u8, blocks u8, chain`
//! is a command, and 0xff, a length, and four times as many bytes go into the rings.
//! A *chain* is `head and number of descriptors u8` and the descriptors
//! `place u8, length u8, flags u8`; or, if the number is 15 or a unit is paused, `data-out u8,
//! data-in u8` of a chain as a driver makes it.

mod model;

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use crate::chain::{Segment, gather};
use crate::guest::{MEMORY, QUEUE_SIZE, SECTOR};
use crate::input::Input;
use crate::machine::{LIVE, Machine, NEEDS_RESET};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::backend::{Backend, Operation};
use walvisor_devices::block::BlockConfig;
use walvisor_devices::virtio_scsi::{ScsiUnit, VirtioScsi};

use self::model::{Answerable, RESPONSE, Sizes};

const SECTORS: usize = 64;
const READ_ONLY: u8 = 0x5a;
/// The control queue, the event queue, and two request queues.
const QUEUES: usize = 4;
const CONTROL: usize = 0;
const EVENTS: usize = 1;
/// The rings of a queue take this much.
const RINGS: u64 = 0x400;
const AVAILABLE: u64 = 0x200;
const USED: u64 = 0x280;
/// Tables for indirect descriptors, after the rings of all queues.
const TABLES: [u64; 2] = [0x1000, 0x1200];
/// What a driver's own chains use: a place for each that may be in flight, and its parts.
const SLOTS: u64 = 0x2000;
const SLOT: u64 = 0x800;
const DATA_OUT: u64 = 0x120;
const ANSWER: u64 = 0x340;
const DATA_IN: u64 = 0x500;
/// Descriptors of such a chain.
const DESCRIPTORS: u16 = 4;
/// Chains of a queue that may be in flight while a unit is paused.
const IN_FLIGHT: u16 = QUEUE_SIZE / DESCRIPTORS;
/// Where the header of any other chain is, and its buffers may be.
const HEADER: u64 = SLOTS + QUEUES as u64 * IN_FLIGHT as u64 * SLOT;
const MOST_STEPS: usize = 32;

const LENGTHS: [u32; 16] = [
    0,
    1,
    4,
    8,
    16,
    20,
    24,
    35,
    51,
    107,
    108,
    512,
    620,
    4096,
    0x8000,
    u32::MAX,
];
const ODD_PLACES: [u64; 6] = [
    MEMORY as u64 - 1,
    MEMORY as u64 - 12,
    MEMORY as u64 - 512,
    MEMORY as u64,
    u64::MAX - 3,
    1 << 63,
];
const OPCODES: [u8; 16] = [
    0x00, 0x03, 0x12, 0x1a, 0x25, 0x28, 0x2a, 0x35, 0x41, 0x42, 0x88, 0x89, 0x8a, 0x9c, 0x9e, 0xa0,
];
const DATA: [u32; 8] = [0, 4, 24, 36, 96, 252, 512, 768];
/// Sizes of sense data and of CDBs; those that are too large change nothing.
const SENSE: [u32; 6] = [96, 0, 18, 252, 8, 253];
const CDB: [u32; 6] = [32, 16, 1, 252, 0, 253];

/// Runs one input.
pub fn run(input: &[u8]) {
    let mut input = Input::new(input);
    let mut driver = Driver::new(&mut input);
    for _ in 0..MOST_STEPS {
        if input.is_empty() {
            break;
        }
        match input.byte() {
            0xff => driver.scribble(&mut input),
            0 => driver.control(&mut input),
            1 => driver.event(&mut input),
            2 => driver.own(input.byte()),
            kind => driver.command(usize::from(2 + (kind & 1)), &mut input),
        }
    }
    driver.finish();
}

/// What the driver waits for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    Used,
    Broken,
}

struct Driver {
    machine: Machine<VirtioScsi>,
    units: [ScsiUnit; 2],
    disks: [RamDisk; 2],
    read_only: bool,
    wanted: Sizes,
    sizes: Sizes,
    /// The available index of each queue, which is also how many chains it got.
    offered: [u16; QUEUES],
    /// Heads of event buffers that the target keeps, and units whose driver is to be told.
    events: VecDeque<u16>,
    resized: BTreeSet<u8>,
    paused: [bool; 2],
    /// Memory before the chains in flight, and what they may change.
    before: Vec<u8>,
    writable: Vec<Segment>,
}

impl Driver {
    fn new(input: &mut Input) -> Self {
        let options = input.byte();
        let read_only = options & 2 != 0;
        let disks = [false, read_only].map(|read_only| {
            if read_only {
                RamDisk::read_only(&[READ_ONLY; SECTORS * SECTOR])
            } else {
                RamDisk::new(SECTORS as u64)
            }
        });
        disks[0].set_write_cache(options & 4 == 0);
        let config = |serial: &str| BlockConfig {
            queues: QUEUES as u16 - 2,
            queue_size: QUEUE_SIZE,
            serial: serial.to_owned(),
            ..BlockConfig::default()
        };
        let [first, second] = disks.each_ref().map(|disk| Arc::new(disk.clone()));
        let mut target = VirtioScsi::new(first, config("0")).expect("a target");
        let second = target.add_unit(second, &config("1")).expect("a unit");
        let units = [target.first_unit(), second];
        let irq = EventFd::new(EFD_NONBLOCK).expect("an eventfd");
        let sizes = Sizes { sense: 96, cdb: 32 };
        let wanted = Sizes {
            sense: input.of(&SENSE),
            cdb: input.of(&CDB),
        };
        let mut driver = Self {
            machine: Machine::new(target, irq, options & 1 != 0),
            units,
            disks,
            read_only,
            wanted,
            sizes,
            offered: [0; QUEUES],
            events: VecDeque::new(),
            resized: BTreeSet::new(),
            paused: [false; 2],
            before: Vec::new(),
            writable: Vec::new(),
        };
        driver.start();
        driver
    }

    /// Takes the target from any state to DRIVER_OK, with empty rings and the wanted sizes.
    fn start(&mut self) {
        self.machine.reset();
        self.machine.write(0, &[0; SLOTS as usize]);
        self.sizes = Sizes { sense: 96, cdb: 32 };
        let Sizes { sense, cdb } = self.wanted;
        self.machine.config = vec![(20, sense), (24, cdb)];
        if sense <= 252 {
            self.sizes.sense = sense;
        }
        if (1..=252).contains(&cdb) {
            self.sizes.cdb = cdb;
        }
        self.offered = [0; QUEUES];
        self.events.clear();
        self.resized.clear();
        let rings = (0..QUEUES as u64).map(|queue| queue * RINGS);
        let rings: Vec<_> = rings
            .map(|rings| [rings, rings + AVAILABLE, rings + USED])
            .collect();
        self.machine.start(&rings);
        self.still();
    }

    /// Nothing is in flight: memory changes no more.
    fn still(&mut self) {
        self.before = self.machine.bytes();
        self.writable.clear();
    }

    fn is_paused(&self) -> bool {
        self.paused.contains(&true)
    }

    fn lun(byte: u8) -> [u8; 8] {
        match byte {
            0..0xe0 => [1, 0, byte & 0x40, byte & 3, 0, 0, 0, 0],
            0xe0..0xf0 => [0xc1, 1, 0, 0, 0, 0, 0, 0],
            _ => [byte, byte >> 1, 0x80, 0, 0, 0, 0, byte & 1],
        }
    }

    fn control(&mut self, input: &mut Input) {
        let (kind, subtype) = (input.byte() & 3, input.byte() & 15);
        let (lun, id) = (Self::lun(input.byte()), input.byte() & 7);
        let mut request = [0; 24];
        request[0] = kind;
        if kind == 0 {
            request[4] = subtype;
            request[8..16].copy_from_slice(&lun);
            request[16] = id;
        } else {
            request[4..12].copy_from_slice(&lun);
        }
        let head = self.lay(CONTROL, &request, 5, input);
        let chain = model::control(&self.before, CONTROL as u64 * RINGS, head);
        let end = self.exchange(CONTROL, head, chain.as_ref());
        if let (End::Used, Some(chain)) = (end, chain) {
            let (used, answer) = self.answer(CONTROL, &chain);
            assert_eq!(used, (head, chain.answer as u32), "used element");
            let response = answer.last().copied().unwrap_or(0);
            assert!([0, 3, 10, 11, 12].contains(&response), "{answer:?}");
            // I_T NEXUS RESET ends all commands, also those of a paused unit.
            if (kind, subtype, response) == (0, 4, 0) && self.is_paused() {
                assert_eq!([2, 3].map(|queue| self.in_flight(queue)), [0, 0]);
            }
            self.settle();
        }
    }

    fn event(&mut self, input: &mut Input) {
        // The target has not read the one that it keeps: the table must stay as it is.
        if !self.events.is_empty() {
            return;
        }
        let head = self.lay(EVENTS, &[], 16, input);
        self.offer(EVENTS, head);
        self.events.push_back(head);
        self.before = self.machine.bytes();
        self.machine.notify(EVENTS as u32);
        self.tell();
    }

    /// The units that have another capacity are told of, as far as there are buffers.
    fn tell(&mut self) {
        let mut used = self.offered[EVENTS].wrapping_sub(self.events.len() as u16);
        let mut memory = std::mem::take(&mut self.before);
        let mut any = Vec::new();
        let mut elements = Vec::new();
        let mut broken = false;
        while let (Some(&unit), Some(&head)) = (self.resized.first(), self.events.front()) {
            let chain = (EVENTS as u64 * RINGS, head);
            let Some((written, fits)) = model::event(&mut memory, &mut any, chain, unit) else {
                broken = true;
                break;
            };
            elements.push((head, written as u32));
            self.events.pop_front();
            if fits {
                self.resized.pop_first();
            }
        }
        self.before = memory;
        if broken {
            self.wait(EVENTS, u16::MAX, End::Broken);
            return self.start();
        }
        used = used.wrapping_add(elements.len() as u16);
        self.wait(EVENTS, used, End::Used);
        for ((head, written), back) in elements.iter().rev().zip(1..) {
            let element = self.element(EVENTS, used.wrapping_sub(back));
            assert_eq!(element, (*head, *written), "used element of an event");
        }
        self.settle();
    }

    fn own(&mut self, what: u8) {
        let unit = usize::from(what & 1);
        let control = &self.units[unit].control;
        match what >> 1 & 3 {
            0 => {
                control.pause().expect("a unit can be paused");
                self.paused[unit] = true;
            }
            1 => {
                control.resume();
                self.paused[unit] = false;
                self.settle();
            }
            2 => {
                control.capacity_changed();
                self.resized.insert(unit as u8);
                self.tell();
            }
            // The driver resets the target whatever the owner holds.
            _ => self.start(),
        }
    }

    fn command(&mut self, queue: usize, input: &mut Input) {
        let (lun, id, attribute) = (Self::lun(input.byte()), input.byte() & 7, input.byte());
        let mut header = [0; 19 + 252];
        header[..8].copy_from_slice(&lun);
        header[8] = id;
        header[16] = if attribute < 0xf0 { 0 } else { attribute & 7 };
        let (opcode, cdb) = (input.of(&OPCODES), &mut header[19..]);
        (cdb[0], cdb[1]) = (opcode, input.byte());
        let (lba, blocks) = match opcode >> 5 {
            0 => (3, 4),
            1 | 2 => (5, 8),
            5 => (5, 9),
            _ => (9, 13),
        };
        (cdb[lba], cdb[blocks]) = (input.byte(), input.byte());
        let len = 19 + self.sizes.cdb as usize;
        let answer = RESPONSE as u32 + self.sizes.sense;
        let head = self.lay(queue, &header[..len], answer, input);
        let chain = model::request(&self.before, queue as u64 * RINGS, head, self.sizes);
        let end = self.exchange(queue, head, chain.as_ref());
        if let (End::Used, Some(chain)) = (end, chain)
            && !self.is_paused()
        {
            self.check_response(queue, head, &chain);
            self.settle();
        }
    }

    /// Lays a chain of `queue` with this header, which needs `answer` bytes for its answer. Returns
    /// its head.
    fn lay(&mut self, queue: usize, header: &[u8], answer: u32, input: &mut Input) -> u16 {
        if self.is_paused() && self.in_flight(queue) == IN_FLIGHT {
            self.resume();
        }
        let table = queue as u64 * RINGS;
        let shape = input.byte();
        let mut head = u16::from(shape >> 4);
        if shape & 15 == 15 || self.is_paused() {
            let slot = self.offered[queue] % IN_FLIGHT;
            head = slot * DESCRIPTORS;
            let place = SLOTS + (queue as u64 * u64::from(IN_FLIGHT) + u64::from(slot)) * SLOT;
            self.machine.write(place, header);
            let (out, data) = (input.of(&DATA).min(512), input.of(&DATA));
            let parts = [
                (place, header.len() as u32, 0),
                (place + DATA_OUT, out, 0),
                (place + ANSWER, answer, 2),
                (place + DATA_IN, data, 2),
            ];
            for (number, (at, len, flags)) in (0..).zip(parts) {
                let next = if number < 3 { 1 } else { 0 };
                let index = head + number;
                self.machine
                    .describe(table, index, at, len, flags | next, index + 1);
            }
        } else {
            self.machine.write(HEADER, header);
            let place = |input: &mut Input| {
                input.pick(&ODD_PLACES, |byte| match byte {
                    0..64 => HEADER,
                    64..128 => HEADER + (byte - 64) * 8,
                    _ => HEADER + 0x200 + (byte - 128) * 0xc0,
                })
            };
            let chain = (head, shape & 15);
            self.machine
                .lay_chain(table, TABLES, chain, input, &LENGTHS, place);
        }
        let now = self.machine.bytes();
        // What is in flight may change its buffers at any time, but nothing else.
        self.compare(&now, true);
        self.before = now;
        head
    }

    /// Makes the chain at `head` available.
    fn offer(&mut self, queue: usize, head: u16) {
        let rings = queue as u64 * RINGS;
        let slot = u64::from(self.offered[queue] % QUEUE_SIZE);
        self.machine
            .write(rings + AVAILABLE + 4 + slot * 2, &head.to_le_bytes());
        self.offered[queue] = self.offered[queue].wrapping_add(1);
        self.machine
            .set_index(rings + AVAILABLE, self.offered[queue]);
    }

    /// Offers a chain, and waits for what the model says of it: not for a command while a unit is
    /// paused.
    fn exchange(&mut self, queue: usize, head: u16, chain: Option<&Answerable>) -> End {
        self.offer(queue, head);
        if let Some(chain) = chain {
            self.writable.extend(&chain.writable);
        }
        self.machine.notify(queue as u32);
        let Some(_) = chain else {
            self.wait(queue, u16::MAX, End::Broken);
            self.start();
            return End::Broken;
        };
        if queue == CONTROL || !self.is_paused() {
            self.wait(queue, self.offered[queue], End::Used);
        }
        End::Used
    }

    fn used(&self, queue: usize) -> u16 {
        self.machine.index(queue as u64 * RINGS + USED)
    }

    fn in_flight(&self, queue: usize) -> u16 {
        self.offered[queue].wrapping_sub(self.used(queue))
    }

    /// Waits until the queue's used index is `used`, or the target needs a reset. libFuzzer's
    /// timeout finds a hang.
    fn wait(&mut self, queue: usize, used: u16, end: End) {
        loop {
            let broken = self.machine.status() != LIVE;
            if broken {
                assert_eq!(self.machine.status(), LIVE | NEEDS_RESET);
                assert!(
                    end == End::Broken,
                    "a chain that can be answered broke {queue}"
                );
                return;
            }
            if end == End::Used && self.used(queue) == used {
                return;
            }
            std::thread::yield_now();
        }
    }

    /// The element before the used index `index`.
    fn element(&self, queue: usize, index: u16) -> (u16, u32) {
        let slot = u64::from(index % QUEUE_SIZE);
        let at = (queue as u64 * RINGS + USED + 4 + slot * 8) as usize;
        let bytes = &self.machine.bytes()[at..at + 8];
        let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        (number(0) as u16, number(4))
    }

    /// The last used element, and the beginning of what the device wrote for it.
    fn answer(&self, queue: usize, chain: &Answerable) -> ((u16, u32), Vec<u8>) {
        let element = self.element(queue, self.used(queue).wrapping_sub(1));
        let bytes = self.machine.bytes();
        let answer = gather(&bytes, &chain.writable, 0, chain.answer);
        (element, answer.expect("its answer is in memory"))
    }

    fn check_response(&mut self, queue: usize, head: u16, chain: &Answerable) {
        let ((used, written), response) = self.answer(queue, chain);
        assert_eq!(used, head, "used head");
        let room = chain
            .writable
            .iter()
            .map(|segment| segment.len)
            .sum::<u64>();
        let written = u64::from(written);
        assert!((chain.answer..=room).contains(&written), "{written}");
        let disjoint = chain.writable.iter().enumerate().all(|(number, one)| {
            let later = &chain.writable[number + 1..];
            later.iter().all(|other| {
                one.address + one.len <= other.address || other.address + other.len <= one.address
            })
        });
        // Data over the response may look like anything.
        if !disjoint {
            return;
        }
        let number = |at: usize| u32::from_le_bytes(response[at..at + 4].try_into().expect("4"));
        let (sense, residual) = (number(0), number(4));
        let (status, outcome) = (response[10], response[11]);
        assert!(sense <= self.sizes.sense);
        assert!(u64::from(residual) <= chain.data_out + room - chain.answer);
        assert!([0, 1, 3, 9].contains(&outcome), "response {outcome}");
        assert!([0, 2].contains(&status), "status {status}");
        assert!(outcome == 0 || (status, sense) == (0, 0));
        assert!(status == 2 || sense == 0);
    }

    /// Checks memory and disks if nothing is in flight.
    fn settle(&mut self) {
        if self.is_paused() {
            return;
        }
        for queue in [CONTROL, 2, 3] {
            self.wait(queue, self.offered[queue], End::Used);
        }
        let now = self.machine.bytes();
        self.compare(&now, false);
        self.still();
        if self.read_only {
            assert!(
                self.contents(1).iter().all(|&byte| byte == READ_ONLY),
                "a read-only disk was changed"
            );
        }
    }

    /// Compares memory, except used rings and what chains in flight may change, with what it was.
    /// `laid`: except descriptors and the driver's own places too.
    fn compare(&mut self, now: &[u8], laid: bool) {
        let mut before = std::mem::take(&mut self.before);
        let mut skip = |start: u64, len: u64| {
            let start = start.min(MEMORY as u64) as usize;
            let end = start + (len as usize).min(MEMORY - start);
            before[start..end].copy_from_slice(&now[start..end]);
        };
        for queue in 0..QUEUES as u64 {
            skip(queue * RINGS + USED, RINGS - USED);
            skip(queue * RINGS + AVAILABLE, USED - AVAILABLE);
        }
        for segment in &self.writable {
            skip(segment.address, segment.len);
        }
        if laid {
            skip(0, HEADER + 0x200);
        }
        if before != now {
            let at = before.iter().zip(now).position(|(a, b)| a != b);
            panic!("guest memory at {at:x?} is not what it should be");
        }
        self.before = before;
    }

    fn resume(&mut self) {
        for (unit, paused) in self.units.iter().zip(&mut self.paused) {
            unit.control.resume();
            *paused = false;
        }
        self.settle();
    }

    /// Writes any bytes into the rings of all queues, their indices included. The device may do
    /// anything with them, except crash or change a read-only disk.
    fn scribble(&mut self, input: &mut Input) {
        let len = usize::from(input.byte()) * 4;
        let mut bytes = vec![0; len];
        bytes.fill_with(|| input.byte());
        for queue in 0..QUEUES {
            self.machine.write(queue as u64 * RINGS, &bytes);
        }
        let doorbells = self.units[0].metrics.counts().doorbells;
        for queue in 0..QUEUES {
            self.machine.notify(queue as u32);
        }
        while self.units[0].metrics.counts().doorbells < doorbells + QUEUES as u64 {
            std::thread::yield_now();
        }
        self.start();
    }

    /// Checks that the target works after a reset: what is written is read.
    fn finish(mut self) {
        self.resume();
        self.wanted = Sizes { sense: 96, cdb: 32 };
        self.start();
        // A unit tells of resets and capacities before it carries out a command.
        for _ in 0..8 {
            self.command(2, &mut Input::new(&[0, 0, 0, 0, 0, 0, 0, 15]));
        }
        // READ (10) of a block.
        self.command(3, &mut Input::new(&[0, 1, 0, 5, 0, 9, 1, 15, 0, 6]));
        let slot = SLOTS + 3 * u64::from(IN_FLIGHT) * SLOT;
        let at = (slot + DATA_IN) as usize;
        let bytes = self.machine.bytes();
        let response = (slot + ANSWER) as usize;
        assert_eq!(
            bytes[response..response + 12],
            [0; 12],
            "a read after all that"
        );
        assert_eq!(
            bytes[at..at + SECTOR],
            self.contents(0)[9 * SECTOR..10 * SECTOR],
            "data of a read after all that"
        );
        self.machine.reset();
    }

    fn contents(&self, unit: usize) -> Vec<u8> {
        let mut queue = self.disks[unit].open_queue().expect("a queue");
        let (sector, sectors) = (0, SECTORS as u32);
        queue.submit(0, Operation::Read { sector, sectors });
        let mut done = Vec::new();
        queue.completions(&mut done);
        let data = done.remove(0).result.expect("a read").expect("data");
        data.to_vec()
    }
}
