//! READ and WRITE (SBC-4, 5.13 to 5.16 and 5.39 to 5.42).

use super::command::{Plan, Request};
use super::sense::Sense;
use super::task::{Action, Change, Job, Range, Then};
use super::unit::LogicalUnit;
use crate::block::OperationKind;

const DPO_FUA_BYTE: usize = 1;
const FUA: u8 = 0x08;

/// READ (10).
pub(super) fn read_10(request: &Request<'_>) -> Result<Plan, Sense> {
    read(request, request.number(2, 4), request.number(7, 2), 7)
}

/// WRITE (10).
pub(super) fn write_10(request: &Request<'_>) -> Result<Plan, Sense> {
    write(request, request.number(2, 4), request.number(7, 2), 7)
}

/// `blocks` blocks from `lba` on, which lie on the disk and are no more than `most`. `at`: where the CDB has their number.
pub(super) fn range(
    unit: &LogicalUnit,
    lba: u64,
    blocks: u64,
    most: u32,
    at: u16,
) -> Result<Range, Sense> {
    match lba.checked_add(blocks) {
        Some(end) if end <= unit.blocks() => {}
        _ => return Err(Sense::OUT_OF_RANGE),
    }
    match u32::try_from(blocks) {
        Ok(blocks) if blocks <= most => Ok(Range { lba, blocks }),
        _ => Err(Sense::cdb(at, None)),
    }
}

fn read(request: &Request<'_>, lba: u64, blocks: u64, at: u16) -> Result<Plan, Sense> {
    let unit = request.unit;
    let mut range = range(unit, lba, blocks, unit.max_transfer_blocks(), at)?;
    // What does not fit need not be read.
    let fits = request.data.len().div_ceil(unit.block_size() as usize);
    range.blocks = range.blocks.min(u32::try_from(fits).unwrap_or(u32::MAX));
    if range.blocks == 0 {
        return Ok(Plan::Run(Job::nothing()));
    }
    let read = Some(Action::Read(Then::Return));
    // With FUA it comes from the medium: what is newer goes there first (SBC-4, 4.15.2).
    let script = match request.bit(DPO_FUA_BYTE, FUA) && unit.write_cache() {
        true => [Some(Action::Flush), read, None],
        false => [read, None, None],
    };
    Ok(Plan::Run(Job::new(OperationKind::Read, range, script)))
}

/// Whether the unit can be written to.
pub(super) fn writable(request: &Request<'_>) -> Result<(), Sense> {
    match request.unit.can().read_only {
        true => Err(Sense::WRITE_PROTECTED),
        false => Ok(()),
    }
}

/// Whether the Data-Out Buffer has what the CDB announces at byte `at`.
pub(super) fn sent(request: &Request<'_>, blocks: u64, at: u16) -> Result<(), Sense> {
    let bytes = blocks * u64::from(request.unit.block_size());
    match request.data.len() as u64 >= bytes {
        true => Ok(()),
        false => Err(Sense::cdb(at, None)),
    }
}

fn write(request: &Request<'_>, lba: u64, blocks: u64, at: u16) -> Result<Plan, Sense> {
    writable(request)?;
    let unit = request.unit;
    let range = range(unit, lba, blocks, unit.max_transfer_blocks(), at)?;
    sent(request, blocks, at)?;
    if range.blocks == 0 {
        return Ok(Plan::Run(Job::nothing()));
    }
    let durable = durable(request);
    let script = [Some(Action::Write { from: 0 }), durable, None];
    let job = Job::new(OperationKind::Write, range, script);
    Ok(Plan::Run(job.changing(Change::Shared)))
}

/// What follows a change with FUA: the step that makes it durable.
pub(super) fn durable(request: &Request<'_>) -> Option<Action> {
    let needed = request.bit(DPO_FUA_BYTE, FUA) && request.unit.can().flush;
    needed.then_some(Action::Flush)
}
