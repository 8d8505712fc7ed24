//! Commands that compare or verify blocks: VERIFY (SBC-4, 5.36 to 5.38), WRITE AND VERIFY (5.43 to
//! 5.45) and COMPARE AND WRITE (5.3).

use super::io::{
    CdbRange, check_data_out, check_data_out_exactly, check_range, check_writable, fua_flush,
    parse_range,
};
use super::job::{AfterRead, BlockAccess, CommandWork, ScsiAction};
use super::plan::{CommandPlan, ScsiRequest};
use super::sense::Sense;
use crate::latency::OperationKind;

/// BYTCHK (SBC-4, table 117): what the blocks are compared with.
enum ByteCheck {
    /// 00b: nothing; the blocks only have to be readable.
    Readable,
    /// 01b: as many blocks of data as are verified.
    Blocks,
    /// 11b: one block of data, which each block must equal.
    Block,
}

fn byte_check(request: &ScsiRequest<'_>) -> Result<ByteCheck, Sense> {
    match request.byte(1) >> 1 & 3 {
        0 => Ok(ByteCheck::Readable),
        1 => Ok(ByteCheck::Blocks),
        3 => Ok(ByteCheck::Block),
        _ => Err(Sense::cdb(1, Some(2))),
    }
}

/// VERIFY (10), (12), (16).
pub(super) fn verify(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    let check = byte_check(request)?;
    let CdbRange { range, count_at } = parse_range(request, request.unit.max_transfer_blocks())?;
    let after = match check {
        ByteCheck::Readable => AfterRead::Forget,
        ByteCheck::Blocks => {
            check_data_out(request, range.blocks, count_at)?;
            AfterRead::Compare
        }
        ByteCheck::Block => {
            check_data_out(request, range.blocks.min(1), count_at)?;
            AfterRead::CompareEach
        }
    };
    let read = (range.blocks > 0).then_some(ScsiAction::Read(after));
    let actions = [read, None, None];
    Ok(CommandPlan::Run(CommandWork::new(
        OperationKind::Read,
        range,
        actions,
    )))
}

/// WRITE AND VERIFY (10), (12), (16). The write is made durable before the blocks are read back, so
/// that they come from the medium. No other command may change them in between.
pub(super) fn write_and_verify(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    check_writable(request)?;
    let after = match byte_check(request)? {
        ByteCheck::Readable => AfterRead::Forget,
        ByteCheck::Blocks => AfterRead::Compare,
        ByteCheck::Block => return Err(Sense::cdb(1, Some(2))),
    };
    let CdbRange { range, count_at } = parse_range(request, request.unit.max_transfer_blocks())?;
    check_data_out(request, range.blocks, count_at)?;
    let write = Some(ScsiAction::Write { from: 0 });
    let read = Some(ScsiAction::Read(after));
    let actions = if range.blocks == 0 {
        [None; 3]
    } else if request.unit.can().flush {
        [write, Some(ScsiAction::Flush), read]
    } else {
        [write, read, None]
    };
    let job = CommandWork::new(OperationKind::Write, range, actions);
    Ok(CommandPlan::Run(job.with_access(BlockAccess::Exclusive)))
}

/// COMPARE AND WRITE. The Data-Out Buffer has the blocks to compare with, then the blocks to write.
pub(super) fn compare_and_write(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    check_writable(request)?;
    let (unit, at) = (request.unit, 13);
    let (lba, blocks) = (request.number(2, 8), request.number(13, 1));
    let range = check_range(request, lba, blocks, unit.max_compare_blocks().into(), at)?;
    check_data_out_exactly(request, 2 * range.blocks, at)?;
    let from = range.blocks as usize * unit.block_size() as usize;
    let actions = match range.blocks {
        0 => [None; 3],
        _ => [
            Some(ScsiAction::Read(AfterRead::Compare)),
            Some(ScsiAction::Write { from }),
            fua_flush(request),
        ],
    };
    let job = CommandWork::new(OperationKind::Write, range, actions);
    Ok(CommandPlan::Run(job.with_access(BlockAccess::Exclusive)))
}
