//! Commands that compare or verify blocks: VERIFY (SBC-4, 5.36 to 5.38), WRITE AND VERIFY (5.43 to 5.45) and COMPARE
//! AND WRITE (5.3).

use super::io::{Named, durable, named, range, sent, sent_exactly, writable};
use super::job::{Change, Job, ScsiAction, Then};
use super::plan::{CommandPlan, ScsiRequest};
use super::sense::Sense;
use crate::latency::OperationKind;

/// BYTCHK (SBC-4, table 117): the data with which the blocks are compared.
enum Check {
    /// 00b: none; the blocks must be readable.
    Readable,
    /// 01b: as many blocks as are verified.
    Blocks,
    /// 11b: one block, with which each is compared.
    Block,
}

fn check(request: &ScsiRequest<'_>) -> Result<Check, Sense> {
    match request.byte(1) >> 1 & 3 {
        0 => Ok(Check::Readable),
        1 => Ok(Check::Blocks),
        3 => Ok(Check::Block),
        _ => Err(Sense::cdb(1, Some(2))),
    }
}

/// VERIFY (10), (12), (16).
pub(super) fn verify(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    let check = check(request)?;
    let Named { range, at } = named(request, request.unit.max_transfer_blocks())?;
    let then = match check {
        Check::Readable => Then::Forget,
        Check::Blocks => {
            sent(request, range.blocks, at)?;
            Then::Compare
        }
        Check::Block => {
            sent(request, range.blocks.min(1), at)?;
            Then::CompareEach
        }
    };
    let read = (range.blocks > 0).then_some(ScsiAction::Read(then));
    let script = [read, None, None];
    Ok(CommandPlan::Run(Job::new(
        OperationKind::Read,
        range,
        script,
    )))
}

/// WRITE AND VERIFY (10), (12), (16). The write is made durable first, so that the verified blocks are on the medium.
/// No other command changes them meanwhile, so that they are what this command wrote.
pub(super) fn write_and_verify(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    writable(request)?;
    let then = match check(request)? {
        Check::Readable => Then::Forget,
        Check::Blocks => Then::Compare,
        Check::Block => return Err(Sense::cdb(1, Some(2))),
    };
    let Named { range, at } = named(request, request.unit.max_transfer_blocks())?;
    sent(request, range.blocks, at)?;
    let write = Some(ScsiAction::Write { from: 0 });
    let read = Some(ScsiAction::Read(then));
    let script = match request.unit.can().flush {
        _ if range.blocks == 0 => [None; 3],
        true => [write, Some(ScsiAction::Flush), read],
        false => [write, read, None],
    };
    let job = Job::new(OperationKind::Write, range, script);
    Ok(CommandPlan::Run(job.changing(Change::Alone)))
}

/// COMPARE AND WRITE. The Data-Out Buffer has the blocks to compare, then those to write.
pub(super) fn compare_and_write(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    writable(request)?;
    let (unit, at) = (request.unit, 13);
    let (lba, blocks) = (request.number(2, 8), request.number(13, 1));
    let range = range(request, lba, blocks, unit.max_compare_blocks().into(), at)?;
    sent_exactly(request, 2 * range.blocks, at)?;
    let from = range.blocks as usize * unit.block_size() as usize;
    let script = match range.blocks {
        0 => [None; 3],
        _ => [
            Some(ScsiAction::Read(Then::Compare)),
            Some(ScsiAction::Write { from }),
            durable(request),
        ],
    };
    let job = Job::new(OperationKind::Write, range, script);
    Ok(CommandPlan::Run(job.changing(Change::Alone)))
}
