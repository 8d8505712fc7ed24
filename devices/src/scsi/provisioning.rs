//! Logical block provisioning: UNMAP (SBC-4, 5.35), WRITE SAME (5.49, 5.50) and GET LBA STATUS
//! (5.9).

use super::data::DataBuffer;
use super::io::{CdbRange, check_data_out_exactly, check_writable, parse_range};
use super::job::{BlockAccess, BlockRange, CommandWork, ScsiAction};
use super::plan::{CommandPlan, ScsiRequest};
use super::sense::Sense;
use crate::backend::{Allocation, Extent, SECTOR_SIZE};
use crate::block::MAX_ERASE_SECTORS;
use crate::latency::OperationKind;

/// The most bytes of one UNMAP, all descriptors together: as many as a DISCARD of virtio-blk may
/// cover.
const MAX_UNMAP_BYTES: u64 = MAX_ERASE_SECTORS as u64 * SECTOR_SIZE;
/// The most blocks of one UNMAP: the limit that libiscsi's conformance tests accept.
const MAX_UNMAP_BLOCKS: u64 = 1 << 20;
/// The most descriptors of one UNMAP.
pub(super) const MAX_UNMAP_RANGES: usize = 256;
/// The most bytes of one WRITE SAME: about a second of writing, if the block is not zeroes.
pub(super) const MAX_WRITE_SAME_BYTES: u64 = 256 << 20;

/// The most descriptors in one answer to GET LBA STATUS.
const MAX_STATUS: usize = 256;

/// MAXIMUM UNMAP LBA COUNT.
pub(super) fn max_unmap_blocks(block_size: u32) -> u32 {
    (MAX_UNMAP_BYTES / u64::from(block_size)).min(MAX_UNMAP_BLOCKS) as u32
}

const HEADER: usize = 8;
pub(super) const DESCRIPTOR: usize = 16;

/// UNMAP.
pub(super) fn unmap(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    check_writable(request)?;
    let unit = request.unit;
    let len = request.length(7, 2);
    if len == 0 {
        return Ok(CommandPlan::Run(CommandWork::without_actions()));
    }
    if len < HEADER || request.data.len() < len {
        return Err(Sense::LIST_LENGTH);
    }
    // At most 64 KiB.
    let mut list = vec![0; len];
    request.data.read(0, &mut list);
    // UNMAP DATA LENGTH may be 0, for a list without descriptors. If it ends inside the last
    // descriptor, that descriptor is ignored; if the list itself is cut off there, that is an
    // error.
    let data_len = usize::from(u16::from_be_bytes([list[2], list[3]]));
    if data_len > len - HEADER {
        return Err(Sense::LIST_LENGTH);
    }
    let descriptors = list[HEADER..HEADER + data_len].chunks_exact(DESCRIPTOR);
    if descriptors.len() > MAX_UNMAP_RANGES {
        return Err(Sense::list(2, None));
    }
    let most = u64::from(max_unmap_blocks(unit.block_size()));
    let (mut ranges, mut sum) = (Vec::with_capacity(descriptors.len()), 0);
    for (index, descriptor) in descriptors.enumerate() {
        let number = |at: usize, len: usize| {
            let bytes = &descriptor[at..at + len];
            bytes
                .iter()
                .fold(0, |number, byte| number << 8 | u64::from(*byte))
        };
        let (lba, blocks) = (number(0, 8), number(8, 4));
        let end = lba.checked_add(blocks);
        if end.is_none_or(|end| end > unit.blocks()) {
            return Err(Sense::OUT_OF_RANGE);
        }
        sum += blocks;
        if sum > most {
            return Err(Sense::list((HEADER + DESCRIPTOR * index + 8) as u16, None));
        }
        if blocks > 0 {
            let blocks = blocks as u32;
            ranges.push(BlockRange { lba, blocks });
        }
    }
    let action = (!ranges.is_empty()).then_some(ScsiAction::Unmap);
    let actions = [action, None, None];
    let job = CommandWork {
        list: ranges,
        ..CommandWork::new(OperationKind::Discard, BlockRange::default(), actions)
    };
    Ok(CommandPlan::Run(job.with_access(BlockAccess::Shared)))
}

/// WRITE SAME (10), (16).
pub(super) fn write_same(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    check_writable(request)?;
    let unit = request.unit;
    let most = MAX_WRITE_SAME_BYTES / u64::from(unit.block_size());
    let CdbRange { range, count_at } = parse_range(request, most as u32)?;
    if range.blocks == 0 {
        // WSNZ: 0 would mean all blocks up to the last one, which could be any amount of work.
        return Err(Sense::cdb(count_at, None));
    }
    let unmap = request.bit(1, 0x08);
    let no_data = request.bit(1, 0x01);
    if !no_data {
        check_data_out_exactly(request, 1, count_at)?;
    }
    // Zeroes are a record without payload. With UNMAP, blocks of zeroes may be unmapped, because
    // unmapped blocks read as zeroes; other blocks are written (SBC-4, table 139).
    let zero = no_data || is_zero(request.data, unit.block_size() as usize);
    let (kind, action) = if zero && (unit.can().write_zeroes || unmap) {
        (OperationKind::WriteZeroes, ScsiAction::Zero { unmap })
    } else if no_data {
        return Err(Sense::cdb(1, Some(0)));
    } else {
        (OperationKind::Write, ScsiAction::Fill)
    };
    let job = CommandWork::new(kind, range, [Some(action), None, None]);
    Ok(CommandPlan::Run(job.with_access(BlockAccess::Shared)))
}

/// Whether the data buffer begins with `len` zero bytes.
fn is_zero(data: &dyn DataBuffer, len: usize) -> bool {
    let mut block = [0; 4096];
    let block = &mut block[..len];
    data.read(0, block);
    block.iter().all(|&byte| byte == 0)
}

/// GET LBA STATUS (16).
pub(super) fn lba_status(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    let (lba, allocation) = (request.number(2, 8), request.length(10, 4));
    if lba >= request.unit.blocks() {
        return Err(Sense::OUT_OF_RANGE);
    }
    let room = allocation.min(request.data.len()).saturating_sub(HEADER) / DESCRIPTOR;
    let most = room.clamp(1, MAX_STATUS);
    let range = BlockRange { lba, blocks: 0 };
    let action = ScsiAction::LookUp { most, allocation };
    Ok(CommandPlan::Run(CommandWork {
        range,
        actions: [Some(action), None, None],
        ..CommandWork::without_actions()
    }))
}

/// The parameter data of GET LBA STATUS (SBC-4, 5.9.2): one to `most` descriptors from block
/// `start` on, where `extents` begin.
pub(super) fn lba_status_data(
    extents: &[Extent],
    per_block: u64,
    start: u64,
    most: usize,
) -> Vec<u8> {
    let mut bytes = vec![0; HEADER];
    for (status, range) in provisioning_statuses(extents, per_block, start, most) {
        bytes.extend(range.lba.to_be_bytes());
        bytes.extend(range.blocks.to_be_bytes());
        bytes.extend([status, 0, 0, 0]);
    }
    let len = (bytes.len() - 4) as u32;
    bytes[..4].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// Mapped, or not known to be unmapped.
const MAPPED: u8 = 0;
/// Deallocated.
const DEALLOCATED: u8 = 1;

/// One to `most` consecutive ranges with their PROVISIONING STATUS, from block `start` on, where
/// `extents` begin. A block of several sectors is deallocated only if all of them are.
fn provisioning_statuses(
    extents: &[Extent],
    per_block: u64,
    start: u64,
    most: usize,
) -> Vec<(u8, BlockRange)> {
    let mut statuses: Vec<(u8, BlockRange)> = Vec::new();
    let (mut sector, mut reported) = (start * per_block, start);
    let mut report = |status: u8, reported: &mut u64, until: u64| {
        let Some(blocks) = until.checked_sub(*reported).filter(|&blocks| blocks > 0) else {
            return true;
        };
        // Only the start of an overlong range is reported; an initiator that wants the rest asks
        // again.
        let count = u32::try_from(blocks).unwrap_or(u32::MAX);
        let lba = std::mem::replace(reported, until);
        let last = statuses
            .last_mut()
            .filter(|(last, range)| *last == status && range.blocks.checked_add(count).is_some());
        if let Some((_, range)) = last {
            range.blocks += count;
        } else if statuses.len() < most {
            let blocks = count;
            statuses.push((status, BlockRange { lba, blocks }));
        } else {
            return false;
        }
        u64::from(count) == blocks
    };
    for extent in extents {
        let begin = sector;
        sector = sector.saturating_add(extent.sectors);
        let goes_on = match extent.allocation {
            Allocation::Hole => {
                report(
                    MAPPED,
                    &mut reported,
                    begin.div_ceil(per_block).min(sector / per_block),
                ) && report(DEALLOCATED, &mut reported, sector / per_block)
            }
            // The last block may reach into the next extent, which then starts with the block after
            // it.
            _ => report(MAPPED, &mut reported, sector.div_ceil(per_block)),
        };
        if !goes_on {
            break;
        }
    }
    if statuses.is_empty() {
        // The extents cover less than a block.
        let (lba, blocks) = (start, 1);
        statuses.push((MAPPED, BlockRange { lba, blocks }));
    }
    statuses
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(
        extents: &[(u64, Allocation)],
        per_block: u64,
        start: u64,
        most: usize,
    ) -> Vec<(u8, u64, u32)> {
        let extents = extents.iter().map(|&(sectors, allocation)| Extent {
            sectors,
            allocation,
        });
        let extents: Vec<_> = extents.collect();
        let statuses = provisioning_statuses(&extents, per_block, start, most);
        statuses
            .iter()
            .map(|(status, range)| (*status, range.lba, range.blocks))
            .collect()
    }

    #[test]
    fn a_block_is_deallocated_if_all_of_it_is() {
        use Allocation::{Data, Hole, Zero};
        assert_eq!(
            report(&[(3, Data), (2, Zero), (4, Hole), (1, Data)], 1, 7, 9),
            [(0, 7, 5), (1, 12, 4), (0, 16, 1)]
        );
        // Blocks of eight sectors: the hole begins and ends within one.
        assert_eq!(
            report(&[(12, Data), (30, Hole), (6, Data)], 8, 2, 9),
            [(0, 2, 2), (1, 4, 3), (0, 7, 1)]
        );
        // Two holes inside one block, then a hole that covers a whole block.
        assert_eq!(
            report(
                &[(2, Data), (2, Hole), (2, Data), (2, Hole), (9, Hole)],
                8,
                0,
                9
            ),
            [(0, 0, 1), (1, 1, 1)]
        );
        // Two holes in a row: extents need not be merged.
        assert_eq!(report(&[(8, Hole), (8, Hole)], 8, 0, 9), [(1, 0, 2)]);
        assert_eq!(
            report(&[(3, Hole)], 8, 5, 9),
            [(0, 5, 1)],
            "less than a block"
        );
        assert_eq!(report(&[(8, Hole), (8, Data), (8, Hole)], 1, 0, 2).len(), 2);
    }

    #[test]
    fn a_range_too_long_for_its_field_is_reported_in_part() {
        let long = (1 << 33, Allocation::Hole);
        assert_eq!(
            report(&[long, (1, Allocation::Data)], 1, 3, 9),
            [(1, 3, u32::MAX)]
        );
    }
}
