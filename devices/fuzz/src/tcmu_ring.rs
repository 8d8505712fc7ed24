//! Any bytes in the memory of a TCMU ring, while commands come and end. Before the input scribbles,
//! the model of the kernel gets the responses that it expects, in any order and through any number
//! of wraps. After that, the ring accesses nothing outside the memory, allocates nothing by an
//! unchecked length, and at worst stops with an error.
//!
//! An *input* is a byte for the ring's first position, then steps, see `Machine::step`.

// The model of the kernel is that of the tests of `walvisor-devices`, from their sources. They use
// more of it.
#[path = "../../src/tcmu/kernel.rs"]
mod kernel;
#[allow(dead_code)]
#[path = "../../src/tcmu/layout.rs"]
mod layout;
mod memory {
    pub use walvisor_devices::tcmu::Mapping;
}

use std::collections::HashMap;
use std::sync::Arc;

use self::kernel::{BLOCK, Kernel, Request};
use crate::input::Input;
use walvisor_devices::scsi::DataBuffer;
use walvisor_devices::tcmu::{Command, CommandRing, Entry, Mapping, Response};

const MOST_STEPS: usize = 200;
const RING: u32 = 1024;
const BLOCKS: usize = 6;
/// Numbers at edges.
const ODD: [u64; 12] = [
    0,
    1,
    7,
    8,
    127,
    128,
    RING as u64,
    RING as u64 + 128,
    u32::MAX as u64 - 7,
    u32::MAX as u64,
    u64::MAX - 4095,
    u64::MAX,
];

struct Machine {
    kernel: Kernel,
    memory: Arc<Mapping>,
    ring: Option<CommandRing>,
    /// Commands that were taken and not answered yet.
    taken: Vec<Command>,
    /// What the kernel has queued and the test has not taken yet.
    queued: HashMap<u16, Request>,
    /// The expected outcome of each answered command: its status, the value of its data's bytes,
    /// and how many of them there are.
    expected: HashMap<u16, (u8, u8, usize)>,
    /// The input has overwritten mailbox or ring, so results are no longer compared.
    hostile: bool,
}

impl Machine {
    fn new(start: u8) -> Self {
        let mut kernel = Kernel::new(RING, BLOCKS);
        kernel.start_at(u32::from(start) * 8 % RING);
        let memory = kernel.memory();
        let ring = CommandRing::open(Arc::clone(&memory)).expect("a ring");
        Self {
            kernel,
            memory,
            ring: Some(ring),
            taken: Vec::new(),
            queued: HashMap::new(),
            expected: HashMap::new(),
            hostile: false,
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        match input.byte() % 8 {
            0 | 1 => self.queue(input),
            2 => {
                let ids: [u8; 3] = input.bytes();
                let ids = ids.map(u16::from);
                self.kernel.queue_task_management(input.byte(), &ids);
            }
            3 | 4 => {
                self.take();
            }
            5 => self.complete(input),
            6 => self.publish(),
            _ => self.scribble(input),
        }
    }

    fn queue(&mut self, input: &mut Input<'_>) {
        let len = input.of(&[6, 10, 12, 16, 32]);
        let mut cdb = vec![0; len];
        cdb[0] = match len {
            6 => 0x12,
            10 => 0x28,
            12 => 0xa8,
            16 => 0x88,
            _ => 0x7f,
        };
        cdb[7.min(len - 1)] = (len - 8.min(len)) as u8;
        let sizes = [0, 1, 512, BLOCK, BLOCK + 1, 3 * BLOCK];
        let (byte, len) = (input.byte(), input.of(&sizes));
        let out: Vec<u8> = (0..len).map(|at| byte ^ (at / 251) as u8).collect();
        let read = input.of(&sizes);
        let request = Request { cdb, out, read };
        // The kernel may have no room: the command is then dropped.
        if let Some(id) = self.kernel.queue(request.clone()) {
            self.queued.insert(id, request);
        }
    }

    /// Takes an entry; returns whether there was one.
    fn take(&mut self) -> bool {
        let Some(ring) = &mut self.ring else {
            return false;
        };
        match ring.take() {
            Ok(Some(Entry::Command(command))) => {
                let mut first = [0; 1];
                if !command.data.is_empty() {
                    command.data.read(0, &mut first);
                    command.data.read(command.data.len() - 1, &mut first);
                }
                if !self.hostile {
                    let queued = self.queued.remove(&command.ticket.id());
                    check_taken(&command, &queued.expect("was queued"));
                }
                self.taken.push(command);
            }
            Ok(entry) => return entry.is_some(),
            Err(error) => {
                assert!(self.hostile, "{error}");
                assert_eq!(ring.take().expect_err("an end"), error);
                return false;
            }
        }
        true
    }

    fn complete(&mut self, input: &mut Input<'_>) {
        if self.taken.is_empty() {
            return;
        }
        let place = usize::from(input.byte()) % self.taken.len();
        let command = self.taken.remove(place);
        let (status, byte) = (input.of(&[0, 2]), input.byte());
        let buffer = if command.bidi.is_empty() {
            &command.data
        } else {
            &command.bidi
        };
        // All of it, in parts, unless a hostile length would take long; and its end.
        let len = buffer.len();
        let (split, end) = (len.min(usize::from(byte) * 37), len - len.min(BLOCK));
        for part in [0..split, split..len.min(3 * BLOCK), end..len] {
            buffer.write(part.start, &vec![byte; part.len()]);
        }
        let sense = [byte; 18];
        // A read that ends early. 0 means all.
        let read = (byte & 1 == 1).then_some(len / 2);
        let count = read.filter(|read| *read > 0).unwrap_or(len);
        let outcome = (status, byte, if status == 0 { count } else { 0 });
        self.expected.insert(command.ticket.id(), outcome);
        let answer = Response {
            status,
            sense: if status == 2 { &sense } else { &[] },
            read: read.map(|read| read as u32),
        };
        if let Some(ring) = &mut self.ring {
            ring.complete(command.ticket, &answer);
        }
    }

    fn publish(&mut self) {
        let Some(ring) = &mut self.ring else { return };
        if !self.hostile {
            let early = self.kernel.take_ended();
            assert!(early.is_empty(), "not before they are published");
        }
        ring.publish();
        if self.hostile {
            return;
        }
        for ended in self.kernel.take_ended() {
            let expected = self.expected.remove(&ended.id);
            let (status, byte, len) = expected.expect("was answered");
            assert_eq!(ended.status, status);
            if status == 2 {
                assert!(ended.sense.starts_with(&[byte; 18]));
                assert!(ended.sense[18..].iter().all(|byte| *byte == 0));
            }
            // What only writes has no data that comes back.
            assert!(ended.data.is_empty() || ended.data.len() == len);
            assert!(ended.data.iter().all(|found| *found == byte));
        }
    }

    /// Writes a number anywhere in mailbox or ring, or opens the ring anew.
    fn scribble(&mut self, input: &mut Input<'_>) {
        self.hostile = true;
        if input.byte() == 0 {
            self.taken.clear();
            self.ring = CommandRing::open(Arc::clone(&self.memory)).ok();
            return;
        }
        let value = input.pick(&ODD, |byte| byte * 8 + 1);
        let near = self.kernel.head_offset() as u64;
        let at = input.pick(&ODD, |byte| near + byte % 160);
        let at = at.min(self.kernel.data_offset() as u64 - 8) as usize;
        let width = input.of(&[1, 2, 4, 8]);
        self.kernel.put(at, &value.to_ne_bytes()[..width]);
        if input.byte() & 1 == 1 {
            // Publishes the bytes at the head as an entry.
            let len = u32::from(input.byte()) * 8;
            let fits = self.kernel.head_offset() as u32 - 128 + len <= RING;
            if fits {
                self.kernel.finish(len, u32::from(input.byte() & 7));
            }
        }
    }
}

/// Compares a command with the one that the kernel has queued.
fn check_taken(command: &Command, queued: &Request) {
    assert_eq!(command.cdb.as_slice(), queued.cdb);
    let (out, read) = (&queued.out, queued.read);
    if out.is_empty() {
        return assert_eq!((command.data.len(), command.bidi.len()), (read, 0));
    }
    assert_eq!((command.data.len(), command.bidi.len()), (out.len(), read));
    let mut bytes = vec![0; out.len()];
    command.data.read(0, &mut bytes);
    assert_eq!(bytes, *out);
    // A part that begins in one block and ends in another.
    let middle = out.len() / 3..out.len();
    command.data.read(middle.start, &mut bytes[middle.clone()]);
    assert_eq!(bytes[middle.clone()], out[middle]);
}

/// Runs an input.
///
/// # Panics
/// If the device does what it must not.
pub fn run(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mut machine = Machine::new(input.byte());
    for _ in 0..MOST_STEPS {
        if input.is_empty() {
            break;
        }
        machine.step(&mut input);
    }
    if machine.hostile {
        return;
    }
    // All commands must end.
    while machine.take() {}
    while !machine.taken.is_empty() {
        machine.complete(&mut Input::new(&[]));
    }
    machine.publish();
    let left = machine.kernel.in_flight();
    assert!(left == 0 || machine.ring.is_none(), "{left} commands");
}
