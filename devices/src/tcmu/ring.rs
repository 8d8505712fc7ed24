//! The command ring: what the kernel has put in is taken out in its order, and answered in any.
//!
//! ```text
//!            tail: answered up to here            next: taken up to here         head (the kernel's)
//!   ─────────┼── PAD ── COMMAND 7 ── COMMAND 8 ──┼── COMMAND 9 ─────────────────┼─────────
//!            └ command 8 has ended: its response goes into the oldest entry, where 7's request was, and names 8
//! ```
//! Requests are copied when they are taken, so their entries are free for responses from then on. Which entries lie between
//! tail and next is remembered here and never read again. What the kernel says is checked as if anybody could say it; the
//! first entry that makes no sense is the end of the ring.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;
use vm_memory::{AtomicAccess, ByteValued, Bytes};

use super::layout::{flag, header, mailbox, request, response, task_management};
use super::memory::{CommandData, Mapping};

/// Longest CDB in bytes: one of variable length (SPC-4, 4.2.3).
const MAX_CDB: usize = 260;

/// Why a ring cannot be used, or no longer.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The mailbox is of another version.
    #[error(
        "the kernel's command ring is of version {0}, and version 2 is what is known: update walvisor"
    )]
    Version(u16),
    /// The kernel wants answers in order.
    #[error("the kernel takes no answers out of order: it needs Linux 4.0 or newer")]
    InOrder,
    /// The mailbox describes no ring that fits.
    #[error(
        "a command ring of {size} bytes at {offset} does not fit the {memory} bytes of shared memory"
    )]
    Mailbox {
        /// Where it is said to begin.
        offset: u32,
        /// How long it is said to be.
        size: u32,
        /// How much memory there is.
        memory: usize,
    },
    /// A position outside of the ring.
    #[error("the command ring's {name} is {value}, which is no place in a ring of {size} bytes")]
    Position {
        /// `head` or `tail`.
        name: &'static str,
        /// What it is.
        value: u32,
        /// Bytes of the ring.
        size: u32,
    },
    /// An entry that makes no sense.
    #[error("the entry at {position} of the command ring {problem}")]
    Entry {
        /// Where it is, in bytes from the start of the ring.
        position: u32,
        /// What is wrong with it.
        problem: EntryProblem,
    },
}

/// What is wrong with an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryProblem {
    /// Its length is no length that it can have there.
    #[error("has a length of {len}, with {room} bytes left before the head")]
    Length {
        /// Its length.
        len: u32,
        /// What there is.
        room: u32,
    },
    /// It is too short for what it is said to hold.
    #[error("is shorter than what it holds")]
    Short,
    /// Its CDB does not lie in it.
    #[error("has its CDB elsewhere, at {0}")]
    Cdb(u64),
    /// An iovec does not lie in the data area, or all together are longer than that.
    #[error("has data outside of the data area: {len} bytes at {offset}")]
    Data {
        /// Where.
        offset: u64,
        /// How much.
        len: u64,
    },
}

/// A command in flight. It is to be given back to [`Ring::complete`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the initiator waits for an answer"]
pub struct Ticket(u16);

impl Ticket {
    /// The command's number.
    pub fn id(&self) -> u16 {
        self.0
    }
}

/// A SCSI command.
#[derive(Debug)]
pub struct Command {
    /// What answers it.
    pub ticket: Ticket,
    /// The CDB, as long as its operation code says: 6 to 260 bytes.
    pub cdb: SmallVec<[u8; 16]>,
    /// What it writes, or room for what it reads.
    pub data: CommandData,
    /// Of a bidirectional command, room for what it reads.
    pub bidi: CommandData,
}

/// What is in the ring.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all are commands")]
pub enum Entry {
    /// A SCSI command, which wants an answer.
    Command(Command),
    /// The kernel has aborted these commands, or reset the device. They are to be answered all the same.
    TaskManagement {
        /// Which function: 1 ABORT TASK, 2 ABORT TASK SET, 3 CLEAR ACA, 4 CLEAR TASK SET, 5 LOGICAL UNIT RESET, 6 and 7
        /// target reset, 128 a reset by PERSISTENT RESERVE OUT.
        kind: u8,
        /// Numbers of the commands that it has hit.
        ids: Vec<u16>,
    },
    /// Something of a kind not known, by its number. The kernel is told so.
    Unknown(u32),
}

/// How a command has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Response<'a> {
    /// The SCSI status: 0 is GOOD, 2 CHECK CONDITION.
    pub status: u8,
    /// Sense data, at most 96 bytes of it.
    pub sense: &'a [u8],
    /// Bytes that were read, where that is less than there was room for. None at all cannot be said.
    pub read: Option<u32>,
}

/// An entry that was taken and not yet given back.
struct Slot {
    position: u32,
    len: u32,
    /// A command's: a response goes into it.
    answers: bool,
}

/// A command ring. Owned by one thread.
pub struct Ring {
    memory: Arc<Mapping>,
    start: usize,
    size: u32,
    /// Where the data area begins.
    data: usize,
    flags: u16,
    /// The entry to be taken next.
    next: u32,
    /// Behind the last entry that is done with; what the kernel is to be told.
    tail: u32,
    /// The tail that it was told.
    published: u32,
    /// From `tail` to `next`.
    taken: VecDeque<Slot>,
    /// Commands that ended since the kernel was last told.
    ended: usize,
    broken: Option<RingError>,
}

impl Ring {
    /// Opens the ring that the mailbox at the start of `memory` describes. What is in it already is taken first.
    ///
    /// # Errors
    /// If the mailbox makes no sense, or is of a version that is not known.
    pub fn open(memory: Arc<Mapping>) -> Result<Self, RingError> {
        let len = memory.len();
        if len < mailbox::LEN {
            return Err(RingError::Mailbox {
                offset: 0,
                size: 0,
                memory: len,
            });
        }
        let mut ring = Self {
            memory,
            start: 0,
            size: 0,
            data: 0,
            flags: 0,
            next: 0,
            tail: 0,
            published: 0,
            taken: VecDeque::new(),
            ended: 0,
            broken: None,
        };
        let version: u16 = ring.read(mailbox::VERSION);
        if version != mailbox::KNOWN_VERSION {
            return Err(RingError::Version(version));
        }
        ring.flags = ring.read(mailbox::FLAGS);
        if ring.flags & flag::OUT_OF_ORDER == 0 {
            return Err(RingError::InOrder);
        }
        let offset: u32 = ring.read(mailbox::RING_OFFSET);
        ring.size = ring.read(mailbox::RING_SIZE);
        ring.start = offset as usize;
        let end = u64::from(offset) + u64::from(ring.size);
        let aligned = offset.is_multiple_of(8) && ring.size.is_multiple_of(8);
        if !aligned || ring.start < mailbox::LEN || ring.size == 0 || end > len as u64 {
            return Err(RingError::Mailbox {
                offset,
                size: ring.size,
                memory: len,
            });
        }
        ring.data = end as usize;
        ring.tail = ring.place("tail", mailbox::TAIL)?;
        (ring.next, ring.published) = (ring.tail, ring.tail);
        ring.place("head", mailbox::HEAD)?;
        Ok(ring)
    }

    /// Whether a command can be told to have read less than there was room for.
    pub fn knows_read_length(&self) -> bool {
        self.flags & flag::READ_LENGTH != 0
    }

    /// Takes the next entry, if there is one.
    ///
    /// # Errors
    /// If it makes no sense. Nothing more is taken then: this and every further call fails.
    pub fn take(&mut self) -> Result<Option<Entry>, RingError> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        self.try_take()
            .inspect_err(|error| self.broken = Some(error.clone()))
    }

    fn try_take(&mut self) -> Result<Option<Entry>, RingError> {
        // Acquire: the entries before the head are read after it.
        let head = self.place("head", mailbox::HEAD)?;
        while self.next != head {
            let position = self.next;
            let end = if head > position { head } else { self.size };
            let room = end - position;
            let at = self.start + position as usize;
            // Head and position are multiples of 8, so there is a header's room.
            let word: u32 = self.read(at + header::LEN_OP);
            let (op, len) = (word & header::OP, word & !header::OP);
            let wrong = |problem| RingError::Entry { position, problem };
            if len < header::LEN as u32 || len > room {
                return Err(wrong(EntryProblem::Length { len, room }));
            }
            let entry = match op {
                header::PAD => None,
                header::COMMAND => Some(self.command(at, len as usize).map_err(wrong)?),
                header::TASK_MANAGEMENT => {
                    Some(self.task_management(at, len as usize).map_err(wrong)?)
                }
                op => {
                    self.write(at + header::OUR_FLAGS, response::UNKNOWN_OP);
                    Some(Entry::Unknown(op))
                }
            };
            self.next = (position + len) % self.size;
            self.taken.push_back(Slot {
                position,
                len,
                answers: matches!(entry, Some(Entry::Command(_))),
            });
            self.skip();
            if entry.is_some() {
                return Ok(entry);
            }
        }
        Ok(None)
    }

    /// Answers a command. The kernel learns of it with [`publish`](Self::publish).
    pub fn complete(&mut self, ticket: Ticket, answer: &Response<'_>) {
        // There are as many tickets as entries that wait, and the oldest is one of them.
        let Some(slot) = self.taken.pop_front() else {
            debug_assert!(false, "command {} is not in flight", ticket.0);
            return;
        };
        let at = self.start + slot.position as usize;
        let read = answer.read.filter(|_| self.knows_read_length());
        let flags = if read.is_some() {
            response::READ_LENGTH
        } else {
            0
        };
        self.write(at + header::ID, ticket.0);
        self.write(at + header::OUR_FLAGS, flags);
        let mut fixed = [0; response::SENSE - response::STATUS];
        fixed[0] = answer.status;
        fixed[response::READ_LEN - response::STATUS..]
            .copy_from_slice(&read.unwrap_or(0).to_ne_bytes());
        self.write_slice(at + response::STATUS, &fixed);
        if !answer.sense.is_empty() {
            let mut sense = [0; response::SENSE_LEN];
            let len = answer.sense.len().min(response::SENSE_LEN);
            sense[..len].copy_from_slice(&answer.sense[..len]);
            self.write_slice(at + response::SENSE, &sense);
        }
        self.advance(&slot);
        self.ended += 1;
        self.skip();
    }

    /// Lets the kernel see what is done with. Returns how many commands that ended since the last call: unless there is
    /// none, the kernel is to be woken.
    pub fn publish(&mut self) -> usize {
        if self.tail != self.published {
            // Release: the kernel reads the responses after it.
            let stored = self
                .memory
                .slice()
                .store(self.tail, mailbox::TAIL, Ordering::Release);
            debug_assert!(stored.is_ok(), "the mailbox lies in the memory");
            self.published = self.tail;
        }
        std::mem::take(&mut self.ended)
    }

    /// Gives back what stands first in line and wants no answer.
    fn skip(&mut self) {
        while let Some(slot) = self.taken.pop_front_if(|slot| !slot.answers) {
            self.advance(&slot);
        }
    }

    fn advance(&mut self, slot: &Slot) {
        self.tail = (slot.position + slot.len) % self.size;
    }

    /// Copies a request.
    fn command(&self, at: usize, len: usize) -> Result<Entry, EntryProblem> {
        if len < response::LEN {
            return Err(EntryProblem::Short);
        }
        let (out, bidi): (u32, u32) = (
            self.read(at + request::IOVECS),
            self.read(at + request::BIDI_IOVECS),
        );
        let room = ((len - request::FIRST_IOVEC) / request::IOVEC_LEN) as u64;
        if u64::from(out) + u64::from(bidi) > room {
            return Err(EntryProblem::Short);
        }
        let first = at + request::FIRST_IOVEC;
        let behind = first + out as usize * request::IOVEC_LEN;
        let ticket = Ticket(self.read(at + header::ID));
        Ok(Entry::Command(Command {
            ticket,
            cdb: self.cdb(at, len)?,
            data: self.iovecs(first, out)?,
            bidi: self.iovecs(behind, bidi)?,
        }))
    }

    fn iovecs(&self, first: usize, count: u32) -> Result<CommandData, EntryProblem> {
        let mut data = CommandData::empty(&self.memory);
        for index in 0..count as usize {
            let [offset, len]: [u64; 2] = self.read(first + index * request::IOVEC_LEN);
            data.push(self.data, offset, len)
                .ok_or(EntryProblem::Data { offset, len })?;
        }
        Ok(data)
    }

    /// Copies the CDB, which lies in the `len` bytes of the entry at `at`.
    fn cdb(&self, at: usize, len: usize) -> Result<SmallVec<[u8; 16]>, EntryProblem> {
        let place: u64 = self.read(at + request::CDB);
        let elsewhere = EntryProblem::Cdb(place);
        let start = usize::try_from(place).map_err(|_| elsewhere)?;
        let room = (at + len)
            .checked_sub(start)
            .filter(|_| start >= at)
            .ok_or(elsewhere)?;
        let mut bytes = [0; MAX_CDB];
        let most = room.min(MAX_CDB);
        self.read_slice(start, &mut bytes[..most]);
        // Of what was copied, so that nothing is looked at twice.
        let cdb = bytes[..most].get(..cdb_len(&bytes)).ok_or(elsewhere)?;
        Ok(SmallVec::from_slice(cdb))
    }

    fn task_management(&self, at: usize, len: usize) -> Result<Entry, EntryProblem> {
        let room = len
            .checked_sub(task_management::FIRST_ID)
            .ok_or(EntryProblem::Short)?;
        let count: u32 = self.read(at + task_management::COUNT);
        if count as usize > room / size_of::<u16>() {
            return Err(EntryProblem::Short);
        }
        let id = |index| self.read(at + task_management::FIRST_ID + index * size_of::<u16>());
        Ok(Entry::TaskManagement {
            kind: self.read(at + task_management::KIND),
            ids: (0..count as usize).map(id).collect(),
        })
    }

    /// A position in the ring that the kernel may change.
    fn place(&self, name: &'static str, at: usize) -> Result<u32, RingError> {
        let value: u32 = self.load(at);
        if value < self.size && value.is_multiple_of(8) {
            return Ok(value);
        }
        Err(RingError::Position {
            name,
            value,
            size: self.size,
        })
    }

    fn load<T: AtomicAccess + Default>(&self, at: usize) -> T {
        let loaded = self.memory.slice().load(at, Ordering::Acquire);
        debug_assert!(loaded.is_ok(), "the mailbox lies in the memory");
        loaded.unwrap_or_default()
    }

    // Below: inside of the mailbox, or of an entry whose place and length were checked.

    fn read<T: ByteValued + Default>(&self, at: usize) -> T {
        let read = self.memory.slice().read_obj(at);
        debug_assert!(read.is_ok(), "{at} lies in the memory");
        read.unwrap_or_default()
    }

    fn write<T: ByteValued>(&self, at: usize, value: T) {
        let written = self.memory.slice().write_obj(value, at);
        debug_assert!(written.is_ok(), "{at} lies in the memory");
    }

    fn read_slice(&self, at: usize, into: &mut [u8]) {
        let read = self.memory.slice().read_slice(into, at);
        debug_assert!(read.is_ok(), "{at} lies in the memory");
    }

    fn write_slice(&self, at: usize, from: &[u8]) {
        let written = self.memory.slice().write_slice(from, at);
        debug_assert!(written.is_ok(), "{at} lies in the memory");
    }
}

/// How long a CDB is, by its operation code (SPC-4, 4.2.5.1), as the kernel counts: vendors' groups have 10 bytes.
fn cdb_len(bytes: &[u8; MAX_CDB]) -> usize {
    match bytes[0] {
        0x7f => 8 + usize::from(bytes[7]),
        0x00..=0x1f => 6,
        0x80..=0x9f => 16,
        0x60..=0x7e | 0xa0..=0xbf => 12,
        _ => 10,
    }
}
