//! A virtio-blk request: from a descriptor chain to an [`Operation`], and back to a status byte.
//!
//! ```text
//!  device-readable bytes:  type u32 │ reserved u32 │ sector u64 │ data out …      (virtio 1.2, 5.2.6)
//!  device-writable bytes:  data in … │ status u8
//! ```
//!
//! Descriptor boundaries have no meaning (2.7.4.2): both halves are byte streams.

use std::cmp::Ordering;
use std::sync::atomic::AtomicU64;

use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_DISCARD, VIRTIO_BLK_F_SECURE_ERASE, VIRTIO_BLK_F_WRITE_ZEROES, VIRTIO_BLK_S_IOERR,
    VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_SECURE_ERASE,
    VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use vm_memory::{Address, Bytes, GuestAddress, GuestMemory, Permissions};

use super::config::MAX_ERASE_SECTORS;
use crate::backend::{Buffer, Operation, OutOfMemory, SECTOR_SIZE, check_range};
use crate::latency::add;
use crate::metrics::BlockMetrics;
use crate::virtio::{
    Chain, Features, GuestRange, MemoryFault, QueueError, ReadableBytes, UsedElement, split_chain,
    write_to_driver,
};

/// Length of the request header in bytes.
const HEADER_LEN: usize = 16;
/// Length of a discard or write zeroes segment in bytes.
const ERASE_SEGMENT_LEN: usize = 16;
/// Length of the string that GET_ID returns, in bytes.
pub(super) const ID_LEN: usize = 20;

/// The status byte of an answer (5.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BlockStatus {
    /// VIRTIO_BLK_S_OK.
    Ok,
    /// VIRTIO_BLK_S_IOERR.
    IoError,
    /// VIRTIO_BLK_S_UNSUPP.
    Unsupported,
}

impl BlockStatus {
    fn byte(self) -> u8 {
        (match self {
            Self::Ok => VIRTIO_BLK_S_OK,
            Self::IoError => VIRTIO_BLK_S_IOERR,
            Self::Unsupported => VIRTIO_BLK_S_UNSUPP,
        }) as u8
    }
}

/// What a request is checked against.
pub(super) struct BlockRules<'a> {
    /// Features the driver has negotiated.
    pub(super) features: Features,
    /// Whether the disk refuses writes.
    pub(super) read_only: bool,
    /// Whether the backend can flush.
    pub(super) flush: bool,
    /// Whether a change must be stable when it is answered.
    pub(super) flush_after_write: bool,
    /// Longest IN or OUT in bytes that the backend takes.
    pub(super) max_request: usize,
    /// Capacity in sectors.
    pub(super) capacity: u64,
    /// The string that GET_ID returns, padded with zero bytes.
    pub(super) id: &'a [u8; ID_LEN],
    /// The most descriptors a chain may have.
    pub(super) max_descriptors: usize,
    /// Where requests are counted.
    pub(super) metrics: &'a BlockMetrics,
}

/// What to do with a request.
pub(super) enum BlockAction {
    /// Hand it to the backend.
    Submit(Operation),
    /// Answer at once, without the backend.
    Answer(BlockStatus),
    /// Answer with the identity string.
    AnswerId,
}

/// Direction of a request's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    /// No payload.
    None,
    /// IN: to the driver.
    ToDriver,
    /// OUT: from the driver.
    FromDriver,
}

/// A chain that must be answered. Dropping it unanswered panics in debug builds.
#[derive(Debug)]
pub(super) struct PendingChain {
    head: u16,
    status: GuestAddress,
    /// Device-writable bytes before the status byte that were not written yet.
    data: Vec<GuestRange>,
    data_len: u32,
    /// How many were.
    written: u32,
    pub(super) direction: Direction,
    /// Payload bytes, which is also the host memory that the request takes.
    pub(super) bytes: u32,
    /// Whether a FLUSH has to follow before the answer.
    pub(super) flush_after: bool,
    answered: bool,
}

impl PendingChain {
    /// Writes the next `bytes` of the answer into guest memory, as far as it has room for them.
    ///
    /// # Errors
    /// If they would go outside guest memory.
    pub(super) fn write<G: GuestMemory>(
        &mut self,
        memory: &G,
        bytes: &[u8],
    ) -> Result<(), MemoryFault> {
        let written = write_to_driver(memory, &self.data, bytes)?;
        self.written += written;
        let mut skipped = written;
        self.data.retain_mut(|range| {
            let len = skipped.min(range.len);
            skipped -= len;
            range.len -= len;
            // No range that wraps was written to.
            range.address = GuestAddress(range.address.0.wrapping_add(len.into()));
            range.len > 0
        });
        Ok(())
    }

    /// Writes the status into guest memory.
    pub(super) fn answer<G: GuestMemory>(
        mut self,
        memory: &G,
        status: BlockStatus,
    ) -> Result<UsedElement, QueueError> {
        self.answered = true;
        memory.write_obj(status.byte(), self.status)?;
        // 2.7.8.2: never claim bytes that were not written. The status byte comes last, so it
        // counts only if everything before it was written.
        let written = match (status, self.written) {
            (BlockStatus::Ok, written) if written == self.data_len => written + 1,
            (BlockStatus::Ok, written) => written,
            (_, _) if self.data_len == 0 => 1,
            (_, _) => 0,
        };
        Ok(UsedElement {
            head: self.head,
            written,
        })
    }

    /// Drops the request without an answer, because the queue is broken or gone.
    pub(super) fn abandon(mut self) {
        self.answered = true;
    }
}

impl Drop for PendingChain {
    fn drop(&mut self) {
        debug_assert!(
            self.answered || std::thread::panicking(),
            "the request of descriptor chain {} was dropped without an answer",
            self.head
        );
    }
}

/// Parses a chain. An error means that the chain cannot even be answered.
pub(super) fn parse<G: GuestMemory>(
    memory: &G,
    chain: Chain<'_, G>,
    rules: &BlockRules,
) -> Result<(PendingChain, BlockAction), QueueError> {
    let head = chain.head();
    let (mut readable, mut data) = split_chain(chain, rules.max_descriptors)
        .map_err(|reason| QueueError::Chain { head, reason })?;
    let status =
        take_status(memory, &mut data).map_err(|reason| QueueError::Chain { head, reason })?;
    let data_len = data.iter().map(|segment| segment.len).sum();
    let mut pending = PendingChain {
        head,
        status,
        data,
        data_len,
        written: 0,
        direction: Direction::None,
        bytes: 0,
        flush_after: false,
        answered: false,
    };
    let action = match read_header(memory, &mut readable) {
        Ok((kind, sector)) => decide(memory, kind, sector, readable, &mut pending, rules),
        Err(status) => BlockAction::Answer(status),
    };
    Ok((pending, action))
}

/// Removes the last device-writable byte, the status byte, and returns its address. Descriptor
/// boundaries do not matter.
fn take_status<G: GuestMemory>(
    memory: &G,
    writable: &mut Vec<GuestRange>,
) -> Result<GuestAddress, &'static str> {
    let last = writable
        .last_mut()
        .ok_or("it has no room for a status byte")?;
    last.len -= 1;
    let status = last.address.checked_add(u64::from(last.len));
    if last.len == 0 {
        writable.pop();
    }
    status
        .filter(|&address| memory.check_range(address, 1, Permissions::Write))
        .ok_or("its status byte lies outside guest memory")
}

fn read_header<G: GuestMemory>(
    memory: &G,
    readable: &mut ReadableBytes,
) -> Result<(u32, u64), BlockStatus> {
    let mut header = [0; HEADER_LEN];
    readable
        .take(memory, &mut header)
        .map_err(|MemoryFault| BlockStatus::IoError)?;
    Ok((le32(&header, 0), le64(&header, 8)))
}

/// Works out what the request asks for, and whether that is allowed.
fn decide<G: GuestMemory>(
    memory: &G,
    kind: u32,
    sector: u64,
    mut readable: ReadableBytes,
    pending: &mut PendingChain,
    rules: &BlockRules,
) -> BlockAction {
    let metrics = rules.metrics;
    let count = |counter: &AtomicU64| add(counter, 1);
    let operation = match kind {
        VIRTIO_BLK_T_IN => {
            count(&metrics.reads);
            pending.direction = Direction::ToDriver;
            pending.bytes = pending.data_len;
            check_data_range(sector, pending.data_len.into(), rules)
                .map(|sectors| Operation::Read { sector, sectors })
        }
        VIRTIO_BLK_T_OUT => {
            count(&metrics.writes);
            parse_write(memory, sector, &mut readable, pending, rules)
        }
        VIRTIO_BLK_T_FLUSH => {
            count(&metrics.flushes);
            // A read-only disk has nothing volatile.
            if rules.read_only {
                return BlockAction::Answer(BlockStatus::Ok);
            }
            if rules.flush {
                Ok(Operation::Flush)
            } else {
                Err(BlockStatus::Unsupported)
            }
        }
        VIRTIO_BLK_T_GET_ID => {
            count(&metrics.get_ids);
            return BlockAction::AnswerId;
        }
        VIRTIO_BLK_T_DISCARD => {
            count(&metrics.discards);
            pending.flush_after = rules.flush_after_write;
            parse_erase(memory, readable, rules, VIRTIO_BLK_F_DISCARD)
                .map(|(sector, sectors, _)| Operation::Discard { sector, sectors })
        }
        VIRTIO_BLK_T_WRITE_ZEROES => {
            count(&metrics.write_zeroes);
            pending.flush_after = rules.flush_after_write;
            parse_erase(memory, readable, rules, VIRTIO_BLK_F_WRITE_ZEROES).map(
                |(sector, sectors, unmap)| Operation::WriteZeroes {
                    sector,
                    sectors,
                    unmap,
                },
            )
        }
        VIRTIO_BLK_T_SECURE_ERASE => {
            count(&metrics.secure_erases);
            // An erase is complete only when no power loss can bring the data back.
            pending.flush_after = true;
            parse_erase(memory, readable, rules, VIRTIO_BLK_F_SECURE_ERASE).map(
                |(sector, sectors, _)| Operation::WriteZeroes {
                    sector,
                    sectors,
                    unmap: false,
                },
            )
        }
        // GET_LIFETIME too: the feature is never offered.
        _ => Err(BlockStatus::Unsupported),
    };
    match operation {
        Ok(operation) => BlockAction::Submit(operation),
        Err(status) => BlockAction::Answer(status),
    }
}

/// OUT: copies the payload out of guest memory, once, so that the guest cannot change it
/// afterwards.
fn parse_write<G: GuestMemory>(
    memory: &G,
    sector: u64,
    readable: &mut ReadableBytes,
    pending: &mut PendingChain,
    rules: &BlockRules,
) -> Result<Operation, BlockStatus> {
    // 5.2.6.2: if RO is offered, a write gets IOERR and writes no data.
    if rules.read_only {
        return Err(BlockStatus::IoError);
    }
    let len = readable.len();
    let sectors = check_data_range(sector, len, rules)?;
    // `take` fills the whole buffer or fails.
    let bytes = sectors as usize * SECTOR_SIZE as usize;
    let mut data = Buffer::try_for_overwrite(bytes).map_err(|OutOfMemory| BlockStatus::IoError)?;
    readable
        .take(memory, &mut data)
        .map_err(|MemoryFault| BlockStatus::IoError)?;
    pending.direction = Direction::FromDriver;
    pending.bytes = data.len() as u32;
    pending.flush_after = rules.flush_after_write;
    Ok(Operation::Write { sector, data })
}

/// Checks the range of an IN or OUT request, and returns its length in sectors.
fn check_data_range(sector: u64, bytes: u64, rules: &BlockRules) -> Result<u32, BlockStatus> {
    if bytes > rules.max_request as u64 || !bytes.is_multiple_of(SECTOR_SIZE) {
        return Err(BlockStatus::IoError);
    }
    // The cast is lossless: at most 16 MiB, MAX_REQUEST_BYTES.
    let sectors = (bytes / SECTOR_SIZE) as u32;
    check_range(sector, sectors.into(), rules.capacity).map_err(|_| BlockStatus::IoError)?;
    Ok(sectors)
}

/// DISCARD, WRITE_ZEROES and SECURE_ERASE: one segment
/// `{ sector u64, num_sectors u32, flags u32 }`.
fn parse_erase<G: GuestMemory>(
    memory: &G,
    mut readable: ReadableBytes,
    rules: &BlockRules,
    feature: u32,
) -> Result<(u64, u32, bool), BlockStatus> {
    if !rules.features.has(feature) {
        return Err(BlockStatus::Unsupported);
    }
    // max_discard_seg, max_write_zeroes_seg and max_secure_erase_seg are 1. QEMU answers more
    // segments with UNSUPP, and its driver tests expect that.
    match readable.len().cmp(&(ERASE_SEGMENT_LEN as u64)) {
        Ordering::Less => return Err(BlockStatus::IoError),
        Ordering::Equal => {}
        Ordering::Greater => return Err(BlockStatus::Unsupported),
    }
    let mut segment = [0; ERASE_SEGMENT_LEN];
    readable
        .take(memory, &mut segment)
        .map_err(|MemoryFault| BlockStatus::IoError)?;
    let (sector, sectors, flags) = (le64(&segment, 0), le32(&segment, 8), le32(&segment, 12));
    // 5.2.6.2: UNSUPP for an unknown flag, and for unmap in a discard.
    let known = if feature == VIRTIO_BLK_F_WRITE_ZEROES {
        VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP
    } else {
        0
    };
    if flags & !known != 0 {
        return Err(BlockStatus::Unsupported);
    }
    if sectors > MAX_ERASE_SECTORS {
        return Err(BlockStatus::IoError);
    }
    check_range(sector, sectors.into(), rules.capacity).map_err(|_| BlockStatus::IoError)?;
    Ok((
        sector,
        sectors,
        flags & VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP != 0,
    ))
}

fn le32<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    let mut value = [0; 4];
    value.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(value)
}

fn le64<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    let mut value = [0; 8];
    value.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pending() -> PendingChain {
        PendingChain {
            head: 3,
            status: GuestAddress(0),
            data: Vec::new(),
            data_len: 0,
            written: 0,
            direction: Direction::None,
            bytes: 0,
            flush_after: false,
            answered: false,
        }
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "descriptor chain 3 was dropped without an answer")]
    fn dropping_an_unanswered_request_is_a_bug() {
        drop(pending());
    }

    #[test]
    fn a_request_can_be_abandoned_on_purpose() {
        pending().abandon();
    }
}
