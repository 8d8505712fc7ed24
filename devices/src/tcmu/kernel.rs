//! A model of the kernel's side of the ring: what target_core_user does, and when it considers the
//! ring broken.
//!
//! For tests, and for a fuzz target that includes this file. Like the kernel, it keeps its state in
//! private memory, and reads from the shared memory only what it has to.
#![allow(dead_code, reason = "the fuzz target uses more of it")]

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::Bytes;

use super::layout::{flag, header, mailbox, request, response, task_management};
use super::memory::Mapping;

/// Length of a block in the data area: a page.
pub const BLOCK: usize = 4096;

/// A flag of the mailbox: the kernel reports aborts and resets, if configured to
/// (`tmr_notification`).
const TASK_MANAGEMENT: u16 = 1 << 2;
/// A flag of the mailbox: a response may keep its data blocks for later. Not used: data is copied
/// before the backend gets it.
const KEEP_BUFFER: u16 = 1 << 3;

/// A command as an initiator sends it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Request {
    /// Its CDB.
    pub cdb: Vec<u8>,
    /// The data that it writes.
    pub out: Vec<u8>,
    /// How many bytes it reads. If there is `out` as well, the command is bidirectional.
    pub read: usize,
}

/// The result of a command, as the initiator gets it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EndedCommand {
    /// The command's number.
    pub id: u16,
    /// The SCSI status.
    pub status: u8,
    /// Sense data, if the status is CHECK CONDITION.
    pub sense: Vec<u8>,
    /// The data that was read.
    pub data: Vec<u8>,
}

struct QueuedCommand {
    request: Request,
    blocks: Vec<usize>,
}

/// The model of the kernel.
pub struct Kernel {
    memory: Arc<Mapping>,
    size: u32,
    head: u32,
    cleaned: u32,
    next_id: u16,
    in_flight: HashMap<u16, QueuedCommand>,
    used: Vec<bool>,
}

impl Kernel {
    /// Creates a mailbox, a ring of `ring_size` bytes (a multiple of 64) and a data area of
    /// `blocks` blocks.
    ///
    /// # Panics
    /// If there is not enough memory.
    pub fn new(ring_size: u32, blocks: usize) -> Self {
        let data = mailbox::LEN + ring_size as usize;
        let memory = Mapping::anonymous(data + blocks * BLOCK).expect("memory");
        let kernel = Self {
            memory: Arc::new(memory),
            size: ring_size,
            head: 0,
            cleaned: 0,
            next_id: 1,
            in_flight: HashMap::new(),
            used: vec![false; blocks],
        };
        let flags = flag::OUT_OF_ORDER | flag::READ_LENGTH | TASK_MANAGEMENT | KEEP_BUFFER;
        kernel.put(mailbox::VERSION, &mailbox::KNOWN_VERSION.to_ne_bytes());
        kernel.put(mailbox::FLAGS, &flags.to_ne_bytes());
        kernel.put(mailbox::RING_OFFSET, &(mailbox::LEN as u32).to_ne_bytes());
        kernel.put(mailbox::RING_SIZE, &ring_size.to_ne_bytes());
        kernel
    }

    /// The shared memory.
    pub fn memory(&self) -> Arc<Mapping> {
        Arc::clone(&self.memory)
    }

    /// Empties the ring, with head and tail at `position`.
    pub fn start_at(&mut self, position: u32) {
        (self.head, self.cleaned) = (position, position);
        self.publish();
        self.put(mailbox::TAIL, &position.to_ne_bytes());
    }

    /// Offset of the next entry, in bytes from the start of the memory.
    pub fn head_offset(&self) -> usize {
        mailbox::LEN + self.head as usize
    }

    /// Offset of the data area, in bytes from the start of the memory.
    pub fn data_offset(&self) -> usize {
        mailbox::LEN + self.size as usize
    }

    /// The number of commands that have not ended.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Writes bytes anywhere in the shared memory.
    ///
    /// # Panics
    /// If `at` or a byte is outside the memory.
    pub fn put(&self, at: usize, bytes: &[u8]) {
        self.memory.slice().write_slice(bytes, at).expect("inside");
    }

    fn get<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory
            .slice()
            .read_slice(&mut bytes, at)
            .expect("inside");
        bytes
    }

    /// Queues a command, and returns its number. `None`: there is no room for it now.
    pub fn queue(&mut self, request: Request) -> Option<u16> {
        let (out, read) = (
            request.out.len().div_ceil(BLOCK),
            request.read.div_ceil(BLOCK),
        );
        let free = self.used.iter().enumerate().filter(|(_, used)| !**used);
        let blocks: Vec<_> = free.map(|(block, _)| block).take(out + read).collect();
        let bidi = !request.out.is_empty() && request.read > 0;
        let base = (request::FIRST_IOVEC + blocks.len() * request::IOVEC_LEN).max(response::LEN);
        let len = base + request.cdb.len().next_multiple_of(8);
        if blocks.len() < out + read || !self.has_room(len) {
            return None;
        }
        self.pad(len);
        let at = self.head_offset();
        self.put(at, &vec![0; len]);
        let id = self.next_id;
        self.next_id = self.next_id.checked_add(1).unwrap_or(1);
        self.put(at + header::ID, &id.to_ne_bytes());
        let counts = if bidi { [out, read] } else { [out + read, 0] };
        for (place, count) in [request::IOVECS, request::BIDI_IOVECS].iter().zip(counts) {
            self.put(at + place, &(count as u32).to_ne_bytes());
        }
        let cdb = at + base;
        self.put(at + request::CDB, &(cdb as u64).to_ne_bytes());
        self.put(cdb, &request.cdb);
        for (index, block) in blocks.iter().enumerate() {
            self.used[*block] = true;
            let place = self.data_offset() + block * BLOCK;
            let (all, done) = if index < out {
                (request.out.len(), index * BLOCK)
            } else {
                (request.read, (index - out) * BLOCK)
            };
            let piece = (all - done).min(BLOCK);
            if index < out {
                self.put(place, &request.out[done..done + piece]);
            }
            let iovec = at + request::FIRST_IOVEC + index * request::IOVEC_LEN;
            self.put(iovec, &(place as u64).to_ne_bytes());
            self.put(iovec + 8, &(piece as u64).to_ne_bytes());
        }
        self.finish(len as u32, header::COMMAND);
        self.in_flight.insert(id, QueuedCommand { request, blocks });
        Some(id)
    }

    /// Queues the report of a task management function. `false`: there is no room for it now.
    pub fn queue_task_management(&mut self, kind: u8, ids: &[u16]) -> bool {
        let len = (task_management::FIRST_ID + size_of_val(ids)).next_multiple_of(8);
        if !self.has_room(len) {
            return false;
        }
        self.pad(len);
        let at = self.head_offset();
        self.put(at, &vec![0; len]);
        self.put(at + task_management::KIND, &[kind]);
        let count = ids.len() as u32;
        self.put(at + task_management::COUNT, &count.to_ne_bytes());
        for (index, id) in ids.iter().enumerate() {
            self.put(
                at + task_management::FIRST_ID + 2 * index,
                &id.to_ne_bytes(),
            );
        }
        self.finish(len as u32, header::TASK_MANAGEMENT);
        true
    }

    /// Publishes the next entry, whose bytes must be in place.
    pub fn finish(&mut self, len: u32, op: u32) {
        self.put(
            self.head_offset() + header::LEN_OP,
            &(len | op).to_ne_bytes(),
        );
        self.head = (self.head + len) % self.size;
        self.publish();
    }

    fn publish(&self) {
        let memory = self.memory.slice();
        memory
            .store(self.head, mailbox::HEAD, Ordering::Release)
            .expect("inside");
    }

    fn has_room(&self, len: usize) -> bool {
        let end = (self.size - self.head) as usize;
        let needed = if end >= len { len } else { len + end };
        let used = (self.head + self.size - self.cleaned) % self.size;
        (self.size - used - 1) as usize >= needed
    }

    fn pad(&mut self, len: usize) {
        let end = self.size - self.head;
        if (end as usize) < len {
            self.put(self.head_offset(), &[0; header::LEN]);
            self.finish(end, header::PAD);
        }
    }

    /// Takes the responses, as the kernel does when it is woken.
    ///
    /// # Panics
    /// Where the kernel would consider the ring broken.
    pub fn take_ended(&mut self) -> Vec<EndedCommand> {
        let tail: u32 = self
            .memory
            .slice()
            .load(mailbox::TAIL, Ordering::Acquire)
            .expect("inside");
        let mut ended = Vec::new();
        while self.cleaned != tail {
            let at = mailbox::LEN + self.cleaned as usize;
            let word = u32::from_ne_bytes(self.get(at + header::LEN_OP));
            let (op, len) = (word & header::OP, word & !header::OP);
            assert!(len > 0, "an entry of no length at {}", self.cleaned);
            self.cleaned = (self.cleaned + len) % self.size;
            match op {
                header::PAD | header::TASK_MANAGEMENT => {}
                header::COMMAND => ended.push(self.end(at)),
                op => {
                    let [flags] = self.get(at + header::OUR_FLAGS);
                    assert_eq!(flags & response::UNKNOWN_OP, 1, "an entry of kind {op}");
                }
            }
        }
        ended
    }

    fn end(&mut self, at: usize) -> EndedCommand {
        let id = u16::from_ne_bytes(self.get(at + header::ID));
        let Some(QueuedCommand { request, blocks }) = self.in_flight.remove(&id) else {
            panic!("command {id} not found, the ring is broken");
        };
        let [flags] = self.get(at + header::OUR_FLAGS);
        let [status] = self.get(at + response::STATUS);
        let reported = u32::from_ne_bytes(self.get(at + response::READ_LEN)) as usize;
        let read = if flags & response::READ_LENGTH != 0 && reported > 0 {
            reported.min(request.read)
        } else {
            request.read
        };
        let sense = match status {
            2 => self
                .get::<{ response::SENSE_LEN }>(at + response::SENSE)
                .to_vec(),
            _ => Vec::new(),
        };
        let mut data = vec![0; if status == 0 { read } else { 0 }];
        let first = request.out.len().div_ceil(BLOCK);
        for (part, block) in data.chunks_mut(BLOCK).zip(&blocks[first..]) {
            let place = self.data_offset() + block * BLOCK;
            self.memory.slice().read_slice(part, place).expect("inside");
        }
        blocks.iter().for_each(|block| self.used[*block] = false);
        EndedCommand {
            id,
            status,
            sense,
            data,
        }
    }
}
