//! Requests, and the memory of those in flight (virtio 1.2, 5.2.6).

use crate::contract::Counts;
use crate::error::Error;
use crate::memory::{Arena, Region};
use crate::pattern::BLOCK;
use crate::queue::{Queue, Segment, UsedElement};

/// Sectors of a block.
pub const SECTORS_PER_BLOCK: u64 = BLOCK as u64 / 512;
/// Requests that a queue keeps in flight.
pub const SLOTS: usize = 32;
/// Most data segments of a request.
pub const SEGMENTS: usize = 16;

/// Returns the request with this number, and fills in its data if it is a write.
pub type RequestSource<'a> = dyn FnMut(u32, &mut [u8]) -> Request + 'a;
/// Receives a request that has succeeded, with its data if it was a read.
pub type CompletionHandler<'a> = dyn FnMut(Request, &[u8]) -> Result<(), Error> + 'a;

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// Reads the block with this number.
    Read(u32),
    /// Writes the block with this number.
    Write(u32),
    /// Makes completed writes durable.
    Flush,
    /// Discards this many blocks from the first on.
    Discard(u32, u32),
    /// Writes zeroes to this many blocks from the first on.
    WriteZeroes(u32, u32),
    /// Reads the device's identification, 20 bytes.
    GetId,
}

/// Bytes of an identification.
pub const ID_BYTES: usize = 20;

impl Request {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read(_) => "IN",
            Self::Write(_) => "OUT",
            Self::Flush => "FLUSH",
            Self::Discard(..) => "DISCARD",
            Self::WriteZeroes(..) => "WRITE_ZEROES",
            Self::GetId => "GET_ID",
        }
    }

    /// Its type in the header, 5.2.6.
    fn kind(self) -> u32 {
        match self {
            Self::Read(_) => 0,
            Self::Write(_) => 1,
            Self::Flush => 4,
            Self::GetId => 8,
            Self::Discard(..) => 11,
            Self::WriteZeroes(..) => 13,
        }
    }

    /// The header's sector: 0 for the types that have none (5.2.6).
    fn sector(self) -> u64 {
        match self {
            Self::Read(block) | Self::Write(block) => u64::from(block) * SECTORS_PER_BLOCK,
            _ => 0,
        }
    }
}

/// Memory of one request in flight.
#[derive(Debug)]
struct Slot {
    /// Header at 0, status at 16, the range of a DISCARD or WRITE_ZEROES at 32.
    control: Region,
    data: Region,
    table: Region,
    current: Option<Request>,
}

const STATUS: usize = 16;
const RANGE: usize = 32;
const CONTROL_BYTES: usize = 64;
const RANGE_BYTES: u32 = 16;
const NEVER_WRITTEN: u8 = 0xff;
/// Descriptors of an indirect table: header, data segments, status.
const TABLE_BYTES: usize = (SEGMENTS + 2) * 16;

impl Slot {
    fn new(arena: &mut Arena) -> Result<Self, Error> {
        Ok(Self {
            control: arena.take(CONTROL_BYTES, 16)?,
            data: arena.take(BLOCK, BLOCK)?,
            table: arena.take(TABLE_BYTES, 16)?,
            current: None,
        })
    }
}

/// A queue, and its requests in flight.
#[derive(Debug)]
pub(super) struct RequestQueue {
    pub(super) queue: Queue,
    slots: [Option<Slot>; SLOTS],
}

impl RequestQueue {
    pub(super) fn new(queue: Queue, arena: &mut Arena) -> Result<Self, Error> {
        let mut slots = [const { None }; SLOTS];
        for slot in &mut slots {
            *slot = Some(Slot::new(arena)?);
        }
        Ok(Self { queue, slots })
    }

    /// Fills free slots with the next requests of a burst.
    pub(super) fn submit(
        &mut self,
        total: u32,
        next: &mut u32,
        indirect: bool,
        plan: &mut RequestSource<'_>,
    ) {
        let indirect = indirect && self.queue.features().indirect;
        for index in 0..SLOTS {
            // A request takes at most three descriptors here.
            if *next == total || self.queue.free() < 3 {
                return;
            }
            let Some(slot) = &mut self.slots[index] else {
                continue;
            };
            if slot.current.is_some() {
                continue;
            }
            let request = plan(*next, slot.data.bytes_mut());
            if self.begin(index, request, indirect) {
                *next += 1;
            }
        }
    }

    /// Starts `request` with the block of data of slot `index`. Returns whether there was room.
    pub(super) fn begin(&mut self, index: usize, request: Request, indirect: bool) -> bool {
        let Some(slot) = self.slots.get_mut(index).and_then(Option::as_mut) else {
            return false;
        };
        let (address, length, device_writes) = match request {
            Request::Read(_) => (slot.data.address(), BLOCK as u32, true),
            Request::Write(_) => (slot.data.address(), BLOCK as u32, false),
            Request::GetId => (slot.data.address(), ID_BYTES as u32, true),
            Request::Discard(first, count) | Request::WriteZeroes(first, count) => {
                // One range: sector, number of sectors, flags (5.2.6.2).
                slot.control
                    .write(RANGE, u64::from(first) * SECTORS_PER_BLOCK);
                slot.control
                    .write(RANGE + 8, count * SECTORS_PER_BLOCK as u32);
                slot.control.write(RANGE + 12, 0u32);
                (slot.control.address() + RANGE as u64, RANGE_BYTES, false)
            }
            Request::Flush => (0, 0, false),
        };
        let data = [Segment {
            address,
            length,
            device_writes,
        }];
        let segments = if length == 0 { &data[..0] } else { &data[..] };
        self.start(index, request, segments, indirect)
    }

    /// Adds `request` with its data `segments` to the ring, in slot `index`. Returns whether there
    /// was room.
    pub(super) fn start(
        &mut self,
        index: usize,
        request: Request,
        segments: &[Segment],
        indirect: bool,
    ) -> bool {
        let Some(slot) = self.slots.get_mut(index).and_then(Option::as_mut) else {
            return false;
        };
        slot.control.write(0, request.kind());
        slot.control.write(4, 0u32);
        slot.control.write(8, request.sector());
        slot.control.write(STATUS, NEVER_WRITTEN);
        let control = slot.control.address();
        let mut chain = [Segment {
            address: control,
            length: 16,
            device_writes: false,
        }; SEGMENTS + 2];
        let Some(data) = chain.get_mut(1..=segments.len()) else {
            return false;
        };
        data.copy_from_slice(segments);
        let last = segments.len() + 1;
        chain[last] = Segment {
            address: control + STATUS as u64,
            length: 1,
            device_writes: true,
        };
        let chain = &chain[..=last];
        let added = if indirect {
            self.queue.add_indirect(index as u16, &slot.table, chain)
        } else {
            self.queue.add(index as u16, chain)
        };
        if added {
            slot.current = Some(request);
        }
        added
    }

    /// Checks a used request's status and length; `bytes` is the length of its data if it is a read
    /// or write.
    pub(super) fn finish(
        &mut self,
        used: UsedElement,
        bytes: usize,
        counts: &mut Counts,
        done: &mut CompletionHandler<'_>,
    ) -> Result<(), Error> {
        let unknown = Error::UsedRing {
            id: u32::from(used.token),
        };
        let slot = self
            .slots
            .get_mut(usize::from(used.token))
            .and_then(Option::as_mut);
        let slot = slot.ok_or(unknown)?;
        let request = slot.current.take().ok_or(unknown)?;
        let name = request.name();
        let status = slot.control.read::<u8>(STATUS);
        if status != 0 {
            return Err(Error::Status {
                request: name,
                sector: request.sector(),
                status,
            });
        }
        let (read, moved) = match request {
            Request::Read(_) => (bytes, bytes),
            Request::Write(_) => (0, bytes),
            Request::GetId => (ID_BYTES, 0),
            _ => (0, 0),
        };
        // The data that the device wrote, and the status byte.
        let expected = read as u32 + 1;
        if used.written != expected {
            return Err(Error::Length {
                request: name,
                expected,
                found: used.written,
            });
        }
        counts.requests += 1;
        counts.flushes += u64::from(request == Request::Flush);
        counts.bytes += moved as u64;
        done(request, slot.data.bytes())
    }
}
