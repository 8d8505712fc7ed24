//! READ, WRITE and SYNCHRONIZE CACHE of every CDB length (SBC-4, 5.13 to 5.17, 5.30, 5.31, 5.39 to
//! 5.42), and the checks that they share with the other commands that name blocks.

use super::job::{AfterRead, BlockAccess, BlockRange, CommandWork, ScsiAction};
use super::plan::{CommandPlan, ScsiRequest};
use super::sense::Sense;
use crate::latency::OperationKind;

/// The blocks that a CDB names, possibly none. They lie on the disk, and are no more than the
/// command's limit.
pub(super) struct CdbRange {
    pub(super) range: BlockRange,
    /// Offset of the number of blocks in the CDB, for sense data that points to it.
    pub(super) count_at: u16,
}

/// Reads and checks LOGICAL BLOCK ADDRESS and TRANSFER LENGTH of a CDB of 6, 10, 12 or 16 bytes.
///
/// # Errors
/// If the blocks are not all on the disk, or more than `most`.
pub(super) fn parse_range(request: &ScsiRequest<'_>, most: u32) -> Result<CdbRange, Sense> {
    let (lba, blocks, at) = match request.cdb_len() {
        6 => {
            let blocks = match request.byte(4) {
                0 => 256,
                blocks => blocks.into(),
            };
            // The three bits of byte 1 that are not part of the address are 0.
            (request.number(1, 3), blocks, 4)
        }
        10 => (request.number(2, 4), request.number(7, 2), 7),
        12 => (request.number(2, 4), request.number(6, 4), 6),
        _ => (request.number(2, 8), request.number(10, 4), 10),
    };
    let range = check_range(request, lba, blocks, most, at)?;
    Ok(CdbRange {
        range,
        count_at: at,
    })
}

/// Checks a range of blocks. `at`: offset of the number of blocks in the CDB.
pub(super) fn check_range(
    request: &ScsiRequest<'_>,
    lba: u64,
    blocks: u64,
    most: u32,
    at: u16,
) -> Result<BlockRange, Sense> {
    match lba.checked_add(blocks) {
        Some(end) if end <= request.unit.blocks() => {}
        _ => return Err(Sense::OUT_OF_RANGE),
    }
    match u32::try_from(blocks) {
        Ok(blocks) if blocks <= most => Ok(BlockRange { lba, blocks }),
        _ => Err(Sense::cdb(at, None)),
    }
}

/// Checks that the Data-Out Buffer has at least `blocks` blocks, as many as byte `at` of the CDB
/// says.
pub(super) fn check_data_out(request: &ScsiRequest<'_>, blocks: u32, at: u16) -> Result<(), Sense> {
    let bytes = u64::from(blocks) * u64::from(request.unit.block_size());
    if (request.data.len() as u64) < bytes {
        return Err(Sense::cdb(at, None));
    }
    Ok(())
}

/// Checks that the Data-Out Buffer has exactly `blocks` blocks. Any other length means that the
/// initiator divides the buffer differently.
pub(super) fn check_data_out_exactly(
    request: &ScsiRequest<'_>,
    blocks: u32,
    at: u16,
) -> Result<(), Sense> {
    check_data_out(request, blocks, at)?;
    let block = request.unit.block_size() as usize;
    if request.data.len() != blocks as usize * block {
        return Err(Sense::cdb(at, None));
    }
    Ok(())
}

/// Checks that the unit can be written to.
pub(super) fn check_writable(request: &ScsiRequest<'_>) -> Result<(), Sense> {
    if request.unit.can().read_only {
        return Err(Sense::WRITE_PROTECTED);
    }
    Ok(())
}

/// Whether FUA is set. CDBs of 6 bytes have no such bit.
fn has_fua(request: &ScsiRequest<'_>) -> bool {
    request.cdb_len() > 6 && request.bit(1, 0x08)
}

/// The flush that makes a change with FUA durable, if it needs one.
pub(super) fn fua_flush(request: &ScsiRequest<'_>) -> Option<ScsiAction> {
    let needed = has_fua(request) && request.unit.can().flush;
    needed.then_some(ScsiAction::Flush)
}

/// READ (6), (10), (12), (16).
pub(super) fn read(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    let unit = request.unit;
    let mut range = parse_range(request, unit.max_transfer_blocks())?.range;
    // Blocks that do not fit in the buffer are not read.
    let fits = request.data.len().div_ceil(unit.block_size() as usize);
    range.blocks = range.blocks.min(u32::try_from(fits).unwrap_or(u32::MAX));
    if range.blocks == 0 {
        let (bytes, allocation) = (Vec::new(), 0);
        return Ok(CommandPlan::Answer { bytes, allocation });
    }
    let read = Some(ScsiAction::Read(AfterRead::Return));
    // A read with FUA comes from the medium, so newer data in the cache is flushed first (SBC-4,
    // 4.15.2).
    let actions = if has_fua(request) && unit.write_cache() {
        [Some(ScsiAction::Flush), read, None]
    } else {
        [read, None, None]
    };
    Ok(CommandPlan::Run(CommandWork::new(
        OperationKind::Read,
        range,
        actions,
    )))
}

/// WRITE (6), (10), (12), (16).
pub(super) fn write(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    check_writable(request)?;
    let blocks = parse_range(request, request.unit.max_transfer_blocks())?;
    plan_write(request, blocks, BlockAccess::Shared)
}

/// WRITE ATOMIC (16) (SBC-4, 4.29). The backend keeps it whole over a crash, and no overlapping
/// command runs beside it. The table lets ATOMIC BOUNDARY be 0 only.
pub(super) fn write_atomic(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    check_writable(request)?;
    let (lba, blocks, count_at) = (request.number(2, 8), request.number(12, 2), 12);
    let most = request.unit.max_atomic_blocks();
    let range = check_range(request, lba, blocks, most, count_at)?;
    plan_write(
        request,
        CdbRange { range, count_at },
        BlockAccess::Exclusive,
    )
}

fn plan_write(
    request: &ScsiRequest<'_>,
    CdbRange { range, count_at }: CdbRange,
    access: BlockAccess,
) -> Result<CommandPlan, Sense> {
    check_data_out(request, range.blocks, count_at)?;
    let actions = match range.blocks {
        0 => [None; 3],
        _ => [
            Some(ScsiAction::Write { from: 0 }),
            fua_flush(request),
            None,
        ],
    };
    let job = CommandWork::new(OperationKind::Write, range, actions);
    Ok(CommandPlan::Run(job.with_access(access)))
}

/// SYNCHRONIZE CACHE (10), (16). It flushes everything, whatever range it names, so that many
/// commands can share a sync.
pub(super) fn synchronize(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    // A length of 0 means all blocks from the address on.
    parse_range(request, u32::MAX)?;
    let flush = request.unit.can().flush.then_some(ScsiAction::Flush);
    let actions = [flush, None, None];
    Ok(CommandPlan::Run(CommandWork::new(
        OperationKind::Flush,
        BlockRange::default(),
        actions,
    )))
}
