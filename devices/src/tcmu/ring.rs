//! The command ring: entries are taken in the kernel's order, and answered in any order.
//!
//! ```text
//!            tail: answered up to here            next: taken up to here         head (the kernel's)
//!   ─────────┼── PAD ── COMMAND 7 ── COMMAND 8 ──┼── COMMAND 9 ─────────────────┼─────────
//!            └ command 8 has ended: its response overwrites 7's request in the oldest entry, and names 8
//! ```
//! A request is copied when it is taken, so its entry is then free for a response. The ring
//! remembers which entries lie between tail and next, and never reads their headers again. All
//! input is checked as untrusted, and the first malformed entry stops the ring.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use smallvec::SmallVec;
use vm_memory::{AtomicAccess, ByteValued, Bytes};

use super::layout::{flag, header, mailbox, request, response, task_management};
use super::memory::{CommandData, Mapping};

/// The longest CDB in bytes: a variable-length one (SPC-4, 4.2.3).
const MAX_CDB: usize = 260;

/// Why a ring cannot be used, or can no longer be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RingError {
    /// The mailbox has another version.
    #[error(
        "the kernel's command ring has version {0}, but only version 2 is supported: update \
         walvisor"
    )]
    Version(u16),
    /// The kernel requires answers in order.
    #[error("the kernel requires answers in order: Linux 4.0 or newer is needed")]
    InOrder,
    /// The ring described by the mailbox does not fit in the memory.
    #[error(
        "a command ring of {size} bytes at {offset} does not fit in {memory} bytes of shared memory"
    )]
    Mailbox {
        /// Start of the ring according to the mailbox, in bytes.
        offset: u32,
        /// Length of the ring according to the mailbox, in bytes.
        size: u32,
        /// Bytes of shared memory.
        memory: usize,
    },
    /// A position lies outside the ring or is not a multiple of 8.
    #[error(
        "the command ring's {name} is {value}, which is not a valid position in a ring of {size} \
         bytes"
    )]
    Position {
        /// `head` or `tail`.
        name: &'static str,
        /// The position's value.
        value: u32,
        /// Bytes of the ring.
        size: u32,
    },
    /// An entry is malformed.
    #[error("the entry at {position} of the command ring {problem}")]
    Entry {
        /// The entry's start, in bytes from the start of the ring.
        position: u32,
        /// What is wrong with the entry.
        problem: EntryProblem,
    },
}

/// What is wrong with an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EntryProblem {
    /// Its length is shorter than a header, or longer than the room that is left.
    #[error("has a length of {len}, with {room} bytes left before the head")]
    Length {
        /// The entry's length in bytes.
        len: u32,
        /// Bytes left before the head or the end of the ring.
        room: u32,
    },
    /// It is too short for its contents.
    #[error("is shorter than its contents")]
    Short,
    /// Its CDB does not lie inside the entry.
    #[error("has its CDB outside of the entry, at {0}")]
    Cdb(u64),
    /// An iovec does not lie in the data area, or all iovecs together are longer than the data
    /// area.
    #[error("has data outside of the data area: {len} bytes at {offset}")]
    Data {
        /// Start of the iovec's data, in bytes from the mailbox.
        offset: u64,
        /// Bytes of the iovec's data.
        len: u64,
    },
}

/// The right and the duty to answer a command: pass it to [`CommandRing::complete`].
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
    /// For answering the command.
    pub ticket: Ticket,
    /// The CDB, as long as its operation code says: 6 to 260 bytes.
    pub cdb: SmallVec<[u8; 16]>,
    /// The data that it writes, or room for the data that it reads.
    pub data: CommandData,
    /// For a bidirectional command: room for the data that it reads.
    pub bidi: CommandData,
}

/// An entry of the ring.
#[derive(Debug)]
#[expect(clippy::large_enum_variant, reason = "nearly all are commands")]
pub enum Entry {
    /// A SCSI command, which must be answered.
    Command(Command),
    /// The kernel has aborted these commands, or reset the device. They must still be answered.
    TaskManagement {
        /// The function: 1 ABORT TASK, 2 ABORT TASK SET, 3 CLEAR ACA, 4 CLEAR TASK SET, 5 LOGICAL
        /// UNIT RESET, 6 and 7 target reset, 128 a reset by PERSISTENT RESERVE OUT.
        kind: u8,
        /// Numbers of the commands that it has aborted.
        ids: Vec<u16>,
    },
    /// An entry of this unknown kind. The ring has marked it as unknown for the kernel.
    Unknown(u32),
}

/// How a command has ended.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Response<'a> {
    /// The SCSI status: 0 is GOOD, 2 CHECK CONDITION.
    pub status: u8,
    /// Sense data, at most 96 bytes of it.
    pub sense: &'a [u8],
    /// Bytes that were read, if fewer than there was room for. The kernel takes 0 as "all of them".
    pub read: Option<u32>,
}

/// An entry that was taken, and not yet given back to the kernel.
struct TakenEntry {
    position: u32,
    len: u32,
    /// Whether the entry is a command, so that a response goes into it.
    is_command: bool,
}

/// A command ring, used by one thread.
pub struct CommandRing {
    memory: Arc<Mapping>,
    start: usize,
    size: u32,
    /// Where the data area begins.
    data: usize,
    flags: u16,
    /// The next entry to take.
    next: u32,
    /// The end of the last entry given back. [`publish`](Self::publish) stores it for the kernel.
    tail: u32,
    /// The tail that was published last.
    published: u32,
    /// The entries from `tail` to `next`.
    taken: VecDeque<TakenEntry>,
    /// Commands answered since the last [`publish`](Self::publish).
    answered: usize,
    broken: Option<RingError>,
}

impl CommandRing {
    /// Opens the ring described by the mailbox at the start of `memory`. Entries already in it are
    /// taken first.
    ///
    /// # Errors
    /// If the mailbox is malformed or of an unknown version.
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
            answered: 0,
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
        ring.tail = ring.read_position("tail", mailbox::TAIL)?;
        (ring.next, ring.published) = (ring.tail, ring.tail);
        ring.read_position("head", mailbox::HEAD)?;
        Ok(ring)
    }

    /// Whether a response can say that a command has read less than there was room for.
    pub fn knows_read_length(&self) -> bool {
        self.flags & flag::READ_LENGTH != 0
    }

    /// Takes the next entry, if there is one.
    ///
    /// # Errors
    /// If the entry is malformed. From then on every call fails.
    pub fn take(&mut self) -> Result<Option<Entry>, RingError> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        self.try_take()
            .inspect_err(|error| self.broken = Some(error.clone()))
    }

    fn try_take(&mut self) -> Result<Option<Entry>, RingError> {
        // The load is Acquire: the entries before the head are read after it.
        let head = self.read_position("head", mailbox::HEAD)?;
        while self.next != head {
            let position = self.next;
            let end = if head > position { head } else { self.size };
            let room = end - position;
            let at = self.start + position as usize;
            // Head and position are multiples of 8, so a header fits.
            let word: u32 = self.read(at + header::LEN_OP);
            let (op, len) = (word & header::OP, word & !header::OP);
            let wrong = |problem| RingError::Entry { position, problem };
            if len < header::LEN as u32 || len > room {
                return Err(wrong(EntryProblem::Length { len, room }));
            }
            let entry = match op {
                header::PAD => None,
                header::COMMAND => Some(self.read_command(at, len as usize).map_err(wrong)?),
                header::TASK_MANAGEMENT => {
                    Some(self.read_task_management(at, len as usize).map_err(wrong)?)
                }
                op => {
                    self.write(at + header::OUR_FLAGS, response::UNKNOWN_OP);
                    Some(Entry::Unknown(op))
                }
            };
            self.next = (position + len) % self.size;
            debug_assert!(self.next.is_multiple_of(8), "entries end on 8 bytes");
            self.taken.push_back(TakenEntry {
                position,
                len,
                is_command: matches!(entry, Some(Entry::Command(_))),
            });
            self.skip_others();
            if entry.is_some() {
                return Ok(entry);
            }
        }
        Ok(None)
    }

    /// Answers a command. The kernel sees the answer after [`publish`](Self::publish).
    pub fn complete(&mut self, ticket: Ticket, answer: &Response<'_>) {
        // There is one ticket per unanswered command entry, and `skip_others` leaves a command
        // entry at the front.
        let Some(entry) = self.taken.pop_front() else {
            debug_assert!(false, "command {} is not in flight", ticket.0);
            return;
        };
        let at = self.start + entry.position as usize;
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
        self.advance(&entry);
        self.answered += 1;
        self.skip_others();
    }

    /// Stores the tail for the kernel. Returns how many commands were answered since the last call.
    /// If that is not 0, the caller has to wake the kernel.
    pub fn publish(&mut self) -> usize {
        if self.tail != self.published {
            // The store is Release: a kernel that sees the new tail also sees the responses before
            // it.
            let stored = self
                .memory
                .slice()
                .store(self.tail, mailbox::TAIL, Ordering::Release);
            debug_assert!(stored.is_ok(), "the mailbox lies in the memory");
            self.published = self.tail;
        }
        std::mem::take(&mut self.answered)
    }

    /// Gives back the oldest entries, up to the first command that has no answer yet.
    fn skip_others(&mut self) {
        while let Some(entry) = self.taken.pop_front_if(|entry| !entry.is_command) {
            self.advance(&entry);
        }
    }

    fn advance(&mut self, entry: &TakenEntry) {
        assert_eq!(
            entry.position, self.tail,
            "entries are given back in the ring's order"
        );
        self.tail = (entry.position + entry.len) % self.size;
        debug_assert!(
            self.tail < self.size && self.tail.is_multiple_of(8),
            "a position in the ring"
        );
    }

    /// Copies a request.
    fn read_command(&self, at: usize, len: usize) -> Result<Entry, EntryProblem> {
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
            cdb: self.read_cdb(at, len)?,
            data: self.read_iovecs(first, out)?,
            bidi: self.read_iovecs(behind, bidi)?,
        }))
    }

    fn read_iovecs(&self, first: usize, count: u32) -> Result<CommandData, EntryProblem> {
        let mut data = CommandData::empty(&self.memory);
        for index in 0..count as usize {
            let [offset, len]: [u64; 2] = self.read(first + index * request::IOVEC_LEN);
            data.push(self.data, offset, len)
                .ok_or(EntryProblem::Data { offset, len })?;
        }
        Ok(data)
    }

    /// Copies the CDB, which must lie in the entry of `len` bytes at `at`.
    fn read_cdb(&self, at: usize, len: usize) -> Result<SmallVec<[u8; 16]>, EntryProblem> {
        let address: u64 = self.read(at + request::CDB);
        let outside = EntryProblem::Cdb(address);
        let start = usize::try_from(address).map_err(|_| outside)?;
        let room = (at + len)
            .checked_sub(start)
            .filter(|_| start >= at)
            .ok_or(outside)?;
        let mut bytes = [0; MAX_CDB];
        let most = room.min(MAX_CDB);
        self.read_slice(start, &mut bytes[..most]);
        // The length is taken from the copy, because the kernel could change the original between
        // two reads.
        let cdb = bytes[..most].get(..cdb_len(&bytes)).ok_or(outside)?;
        Ok(SmallVec::from_slice(cdb))
    }

    fn read_task_management(&self, at: usize, len: usize) -> Result<Entry, EntryProblem> {
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

    /// Reads and checks the ring position at offset `at` of the mailbox.
    fn read_position(&self, name: &'static str, at: usize) -> Result<u32, RingError> {
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

    // The methods below access the mailbox, or an entry whose position and length were checked.

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

/// The length of a CDB by its operation code (SPC-4, 4.2.5.1), computed as in the kernel: 10 for
/// vendor-specific groups.
fn cdb_len(bytes: &[u8; MAX_CDB]) -> usize {
    match bytes[0] {
        0x7f => 8 + usize::from(bytes[7]),
        0x00..=0x1f => 6,
        0x80..=0x9f => 16,
        0x60..=0x7e | 0xa0..=0xbf => 12,
        _ => 10,
    }
}
