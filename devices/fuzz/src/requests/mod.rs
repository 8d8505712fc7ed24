//! Any requests in any descriptor chains, over a real queue. The device changes its disk and guest
//! memory exactly as a model does, and a reset makes it work again after any contents of the rings.
//!
//! ```text
//!   input ──▶ registers, rings ──▶ device over a RAM disk     the results
//!                └─ guest memory ──▶ model.rs ──────────────▶ must be equal
//! ```
//!
//! An *input* is a byte of options (1: EVENT_IDX, 2: a read-only disk, 4: writethrough), then
//! steps. A step is a request
//! `kind u8, sector u8, sectors u8, flags u8, head and number of descriptors u8` and its
//! descriptors `place u8, length u8, flags u8`, or 0xff, a length, and three times as many bytes
//! for the table and the available ring.

mod model;

use std::sync::{Arc, LazyLock};

use crate::guest::{MEMORY, QUEUE_SIZE, SECTOR};
use crate::input::Input;
use crate::machine::{LIVE, Machine, NEEDS_RESET};
use vmm_sys_util::eventfd::EventFd;
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::backend::{Backend, Operation};
use walvisor_devices::block::{BlockConfig, BlockMetrics, VirtioBlock};

use self::model::{Model, SERIAL, Verdict};

const SECTORS: u64 = 64;
/// The first page holds the rings and two tables for indirect descriptors. Requests lie after it.
const RINGS: usize = 0x1000;
const TABLE: u64 = 0x100;
const AVAILABLE: u64 = 0x300;
const USED: u64 = 0x400;
const INDIRECT_TABLES: [u64; 2] = [0x800, 0xa00];
/// Address of a request's header; an erase segment follows the header.
const HEADER: u64 = RINGS as u64;
const MOST_STEPS: usize = 24;

const KINDS: [u32; 8] = [0, 1, 4, 8, 11, 13, 14, 10];
const LENGTHS: [u32; 16] = [
    0,
    1,
    8,
    15,
    16,
    17,
    32,
    511,
    512,
    513,
    1024,
    1536,
    4096,
    0x8000,
    0x10_0000,
    u32::MAX,
];
const ODD_SECTORS: [u64; 6] = [
    SECTORS - 1,
    SECTORS,
    1 << 55,
    (1 << 55) - 1,
    u64::MAX,
    u64::MAX - 1,
];
const ODD_PLACES: [u64; 6] = [
    MEMORY as u64 - 1,
    MEMORY as u64 - 8,
    MEMORY as u64 - 512,
    MEMORY as u64,
    u64::MAX - 3,
    1 << 63,
];

/// Runs one input.
pub fn run(input: &[u8]) {
    let mut input = Input::new(input);
    let options = input.byte();
    let mut driver = Driver::new(options);
    for _ in 0..MOST_STEPS {
        if input.is_empty() {
            break;
        }
        match input.byte() {
            0xff => driver.scribble(&mut input),
            kind => driver.request(kind, &mut input),
        }
    }
    driver.finish();
}

struct Driver {
    machine: Machine<VirtioBlock>,
    irq: EventFd,
    disk: RamDisk,
    metrics: Arc<BlockMetrics>,
    /// The available index. Between requests the used index equals it.
    index: u16,
    model: Model,
}

impl Driver {
    fn new(options: u8) -> Self {
        let contents = MIXED[..SECTORS as usize * SECTOR].to_vec();
        let read_only = options & 2 != 0;
        let disk = if read_only {
            RamDisk::read_only(&contents)
        } else {
            RamDisk::new(SECTORS)
        };
        disk.set_write_cache(options & 4 == 0);
        let config = BlockConfig {
            queue_size: QUEUE_SIZE,
            serial: String::from_utf8_lossy(SERIAL).into_owned(),
            ..BlockConfig::default()
        };
        let device = VirtioBlock::new(Arc::new(disk.clone()), config).expect("a device");
        let metrics = device.metrics();
        let irq = EventFd::new(0).expect("an eventfd");
        let line = irq.try_clone().expect("an eventfd");
        let machine = Machine::new(device, line, options & 1 != 0);
        machine.write(RINGS as u64, &MIXED[RINGS..]);
        let model = Model {
            disk: if read_only {
                contents
            } else {
                vec![0; SECTORS as usize * SECTOR]
            },
            read_only,
            memory: Vec::new(),
            any: Vec::new(),
        };
        let mut driver = Self {
            machine,
            irq,
            disk,
            metrics,
            index: 0,
            model,
        };
        driver.start();
        driver
    }

    /// Takes the device from reset to DRIVER_OK, with empty rings.
    fn start(&mut self) {
        self.machine.reset();
        self.machine.write(0, &[0; RINGS]);
        self.index = 0;
        self.machine.start(&[[TABLE, AVAILABLE, USED]]);
        self.model.memory = self.machine.bytes();
    }

    fn request(&mut self, kind: u8, input: &mut Input) {
        let kind = KINDS.get(usize::from(kind)).copied().unwrap_or(kind.into());
        let sector = input.pick(&ODD_SECTORS, |byte| byte % 72);
        let (sectors, flags) = (input.byte(), input.byte());
        let mut header = [0; 32];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..16].copy_from_slice(&sector.to_le_bytes());
        header[16..24].copy_from_slice(&sector.to_le_bytes());
        header[24..28].copy_from_slice(&u32::from(sectors).to_le_bytes());
        header[28..].copy_from_slice(&u32::from(flags).to_le_bytes());
        self.machine.write(HEADER, &header);
        let shape = input.byte();
        let head = u16::from(shape >> 4);
        let place = |input: &mut Input| {
            input.pick(&ODD_PLACES, |byte| match byte {
                0..128 => HEADER + byte * 16,
                _ => 0x2000 + (byte - 128) * 0x180,
            })
        };
        let chain = (head, shape & 15);
        self.machine
            .lay_chain(TABLE, INDIRECT_TABLES, chain, input, &LENGTHS, place);
        self.machine.write(
            AVAILABLE + 4 + u64::from(self.index % QUEUE_SIZE) * 2,
            &head.to_le_bytes(),
        );
        // With EVENT_IDX, this asks for an interrupt for this chain.
        let used_event = AVAILABLE + 4 + u64::from(QUEUE_SIZE) * 2;
        self.machine.write(used_event, &self.index.to_le_bytes());
        self.model.memory = self.machine.bytes();
        self.execute(head);
    }

    /// Has the device and the model carry out the chain at `head`, and compares.
    fn execute(&mut self, head: u16) {
        let before = self.index;
        self.index = self.index.wrapping_add(1);
        let verdict = self.model.execute(TABLE, head);
        self.publish(self.index);
        // The device interrupts for an answer, and for DEVICE_NEEDS_RESET. libFuzzer's timeout
        // finds a hang.
        while self.machine.index(USED) == before && self.machine.status() & NEEDS_RESET == 0 {
            // libFuzzer's alarm may interrupt the read.
            let _ = self.irq.read();
        }
        let status = self.machine.status();
        let answered = match verdict {
            Verdict::Broken => {
                assert_eq!(self.machine.index(USED), before, "a broken chain was used");
                assert_eq!(status, LIVE | NEEDS_RESET, "a broken chain");
                false
            }
            Verdict::Answered { written } => {
                assert_eq!(status, LIVE, "a chain that can be answered");
                assert_eq!(self.machine.index(USED), self.index, "used index");
                let slot = USED as usize + 4 + usize::from(before % QUEUE_SIZE) * 8;
                let element = &self.machine.bytes()[slot..slot + 8];
                let mut expected = [0; 8];
                expected[..2].copy_from_slice(&head.to_le_bytes());
                expected[4..].copy_from_slice(&written.to_le_bytes());
                assert_eq!(element, expected, "used element");
                true
            }
        };
        self.compare();
        if !answered {
            self.start();
        }
    }

    /// Compares guest memory, except the used ring, and the disk with the model.
    fn compare(&mut self) {
        let mut bytes = self.machine.bytes();
        for (start, len) in std::mem::take(&mut self.model.any) {
            let range = start..start + len;
            self.model.memory[range.clone()].copy_from_slice(&bytes[range]);
        }
        let used = USED as usize..USED as usize + 6 + usize::from(QUEUE_SIZE) * 8;
        bytes[used.clone()].copy_from_slice(&self.model.memory[used]);
        assert_same("guest memory", &bytes, &self.model.memory);
        assert_same("the disk", &self.contents(), &self.model.disk);
    }

    /// Writes any bytes into the rings, their indices included. The device may do anything with
    /// them, except crash or change the disk's size.
    fn scribble(&mut self, input: &mut Input) {
        let len = usize::from(input.byte()) * 3;
        let mut bytes = vec![0; len];
        bytes.fill_with(|| input.byte());
        self.machine.write(TABLE, &bytes);
        let doorbells = self.metrics.counts().doorbells;
        self.machine.notify(0);
        while self.metrics.counts().doorbells == doorbells {
            std::thread::yield_now();
        }
        self.start();
        self.model.disk = self.contents();
    }

    /// Checks that the device works after a reset.
    fn finish(mut self) {
        self.start();
        let mut input = Input::new(&[0, 9, 0, 0, 3, 0, 4, 0, 160, 8, 1, 200, 1, 1]);
        let kind = input.byte();
        self.request(kind, &mut input);
        let data = 0x2000 + (160 - 128) * 0x180;
        let sector = 9 * SECTOR;
        assert_eq!(
            self.machine.bytes()[data..data + SECTOR],
            self.model.disk[sector..sector + SECTOR],
            "a read after all that"
        );
        self.machine.reset();
    }

    fn publish(&mut self, index: u16) {
        self.machine.set_index(AVAILABLE, index);
        let at = AVAILABLE as usize + 2;
        self.model.memory[at..at + 2].copy_from_slice(&index.to_le_bytes());
        self.machine.notify(0);
    }

    fn contents(&self) -> Vec<u8> {
        let mut queue = self.disk.open_queue().expect("a queue");
        let (sector, sectors) = (0, SECTORS as u32);
        queue.submit(0, Operation::Read { sector, sectors });
        let mut done = Vec::new();
        queue.completions(&mut done);
        let data = done.remove(0).result.expect("a read").expect("data");
        data.to_vec()
    }
}

fn assert_same(what: &str, is: &[u8], should: &[u8]) {
    // Comparing the slices as a whole first is fast.
    if is != should
        && let Some((at, (is, should))) =
            (0..).zip(is.iter().zip(should)).find(|(_, (a, b))| a != b)
    {
        panic!("{what} at {at:#x} is {is:#x}, should be {should:#x}");
    }
}

/// Bytes that differ from place to place.
static MIXED: LazyLock<Vec<u8>> = LazyLock::new(|| {
    (0..MEMORY)
        .map(|at| (at.wrapping_mul(0x9e37_79b9) >> 13) as u8)
        .collect()
});
