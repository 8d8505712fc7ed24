//! READ, WRITE and SYNCHRONIZE CACHE of every CDB length (SBC-4, 5.13 to 5.17, 5.30, 5.31, 5.39 to 5.42), and the
//! checks that they share with the other commands that name blocks.

use super::job::{Change, Job, Range, ScsiAction, Then};
use super::plan::{CommandPlan, ScsiRequest};
use super::sense::Sense;
use crate::latency::OperationKind;

/// The blocks that a CDB names. They are on the disk and within the limit; there may be none.
pub(super) struct Named {
    pub(super) range: Range,
    /// Offset of their number in the CDB, which sense data about a wrong number points to.
    pub(super) at: u16,
}

/// Takes LOGICAL BLOCK ADDRESS and TRANSFER LENGTH out of a CDB of 6, 10, 12 or 16 bytes.
///
/// # Errors
/// If the blocks are not all on the disk, or more than `most`.
pub(super) fn named(request: &ScsiRequest<'_>, most: u32) -> Result<Named, Sense> {
    let (lba, blocks, at) = match request.cdb_len() {
        6 => {
            let blocks = match request.byte(4) {
                0 => 256,
                blocks => blocks.into(),
            };
            // Byte 1 has three bits that are not part of the address; they are 0.
            (request.number(1, 3), blocks, 4)
        }
        10 => (request.number(2, 4), request.number(7, 2), 7),
        12 => (request.number(2, 4), request.number(6, 4), 6),
        _ => (request.number(2, 8), request.number(10, 4), 10),
    };
    let range = range(request, lba, blocks, most, at)?;
    Ok(Named { range, at })
}

/// `blocks` blocks from `lba` on. `at`: offset of their number in the CDB.
pub(super) fn range(
    request: &ScsiRequest<'_>,
    lba: u64,
    blocks: u64,
    most: u32,
    at: u16,
) -> Result<Range, Sense> {
    match lba.checked_add(blocks) {
        Some(end) if end <= request.unit.blocks() => {}
        _ => return Err(Sense::OUT_OF_RANGE),
    }
    match u32::try_from(blocks) {
        Ok(blocks) if blocks <= most => Ok(Range { lba, blocks }),
        _ => Err(Sense::cdb(at, None)),
    }
}

/// Checks that the Data-Out Buffer has `blocks` blocks, which the CDB announces at byte `at`.
pub(super) fn sent(request: &ScsiRequest<'_>, blocks: u32, at: u16) -> Result<(), Sense> {
    let bytes = u64::from(blocks) * u64::from(request.unit.block_size());
    match request.data.len() as u64 >= bytes {
        true => Ok(()),
        false => Err(Sense::cdb(at, None)),
    }
}

/// Checks that the Data-Out Buffer has exactly `blocks` blocks. With another length the initiator divides the buffer
/// differently from the command.
pub(super) fn sent_exactly(request: &ScsiRequest<'_>, blocks: u32, at: u16) -> Result<(), Sense> {
    sent(request, blocks, at)?;
    let block = request.unit.block_size() as usize;
    match request.data.len() == blocks as usize * block {
        true => Ok(()),
        false => Err(Sense::cdb(at, None)),
    }
}

/// Checks that the unit can be written to.
pub(super) fn writable(request: &ScsiRequest<'_>) -> Result<(), Sense> {
    match request.unit.can().read_only {
        true => Err(Sense::WRITE_PROTECTED),
        false => Ok(()),
    }
}

/// FUA, in the CDBs that have it.
fn forced(request: &ScsiRequest<'_>) -> bool {
    request.cdb_len() > 6 && request.bit(1, 0x08)
}

/// The flush after a change with FUA, which makes the change durable.
pub(super) fn durable(request: &ScsiRequest<'_>) -> Option<ScsiAction> {
    let needed = forced(request) && request.unit.can().flush;
    needed.then_some(ScsiAction::Flush)
}

/// READ (6), (10), (12), (16).
pub(super) fn read(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    let unit = request.unit;
    let mut range = named(request, unit.max_transfer_blocks())?.range;
    // Blocks that do not fit the buffer are not read.
    let fits = request.data.len().div_ceil(unit.block_size() as usize);
    range.blocks = range.blocks.min(u32::try_from(fits).unwrap_or(u32::MAX));
    if range.blocks == 0 {
        let (bytes, allocation) = (Vec::new(), 0);
        return Ok(CommandPlan::Answer { bytes, allocation });
    }
    let read = Some(ScsiAction::Read(Then::Return));
    // A read with FUA comes from the medium: newer data in the cache is flushed first (SBC-4, 4.15.2).
    let script = match forced(request) && unit.write_cache() {
        true => [Some(ScsiAction::Flush), read, None],
        false => [read, None, None],
    };
    Ok(CommandPlan::Run(Job::new(
        OperationKind::Read,
        range,
        script,
    )))
}

/// WRITE (6), (10), (12), (16).
pub(super) fn write(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    writable(request)?;
    let Named { range, at } = named(request, request.unit.max_transfer_blocks())?;
    sent(request, range.blocks, at)?;
    let script = match range.blocks {
        0 => [None; 3],
        _ => [Some(ScsiAction::Write { from: 0 }), durable(request), None],
    };
    let job = Job::new(OperationKind::Write, range, script);
    Ok(CommandPlan::Run(job.changing(Change::Shared)))
}

/// SYNCHRONIZE CACHE (10), (16). It synchronizes everything, whatever range it names: many commands share one sync.
pub(super) fn synchronize(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    // 0 blocks: all blocks from the address on.
    named(request, u32::MAX)?;
    let flush = request.unit.can().flush.then_some(ScsiAction::Flush);
    let script = [flush, None, None];
    Ok(CommandPlan::Run(Job::new(
        OperationKind::Flush,
        Range::default(),
        script,
    )))
}
