//! READ CAPACITY: the size of the unit (SBC-4, 5.18 and 5.19).

use super::plan::{CommandPlan, ScsiRequest};
use super::sense::Sense;
use super::unit::PHYSICAL_BLOCK;

/// READ CAPACITY (10).
pub(super) fn read_capacity_10(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    let unit = request.unit;
    Ok(CommandPlan::Answer {
        bytes: capacity_10(unit.blocks(), unit.block_size()).to_vec(),
        allocation: usize::MAX,
    })
}

/// READ CAPACITY (16).
pub(super) fn read_capacity_16(request: &ScsiRequest<'_>) -> Result<CommandPlan, Sense> {
    let unit = request.unit;
    Ok(CommandPlan::Answer {
        bytes: capacity_16(unit.blocks(), unit.block_size(), unit.is_thin()).to_vec(),
        allocation: request.length(10, 4),
    })
}

/// READ CAPACITY (10) parameter data for `blocks` blocks, at least one. If the address of the last
/// block does not fit, it is FFFFFFFFh, and the initiator has to use READ CAPACITY (16).
fn capacity_10(blocks: u64, block_size: u32) -> [u8; 8] {
    let last = u32::try_from(last_block(blocks)).unwrap_or(u32::MAX);
    let mut data = [0; 8];
    data[..4].copy_from_slice(&last.to_be_bytes());
    data[4..].copy_from_slice(&block_size.to_be_bytes());
    data
}

/// READ CAPACITY (16) parameter data for `blocks` blocks, at least one. Any 64-bit number works (64
/// ZiB with blocks of 4096 bytes), because the size in bytes is never computed. `thin`: discarded
/// blocks are unmapped, and read as zeroes.
fn capacity_16(blocks: u64, block_size: u32, thin: bool) -> [u8; 32] {
    let mut data = [0; 32];
    data[..8].copy_from_slice(&last_block(blocks).to_be_bytes());
    data[8..12].copy_from_slice(&block_size.to_be_bytes());
    // LOGICAL BLOCKS PER PHYSICAL BLOCK EXPONENT
    data[13] = (PHYSICAL_BLOCK / block_size).ilog2() as u8;
    // LBPME, LBPRZ; the lowest aligned block is 0.
    data[14] = if thin { 0xc0 } else { 0 };
    data
}

fn last_block(blocks: u64) -> u64 {
    blocks.saturating_sub(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_largest_disks_do_not_overflow() {
        for (blocks, short, long) in [
            (1, 0, 0),
            (0xffff_ffff, 0xffff_fffe, 0xffff_fffe),
            // The address of the last block equals the "too large" marker, and is right.
            (1 << 32, u32::MAX, 0xffff_ffff),
            ((1 << 32) + 1, u32::MAX, 1 << 32),
            // The largest disk of a backend, which counts sectors of 512 bytes, in blocks of 4096.
            (u64::MAX / 8, u32::MAX, u64::MAX / 8 - 1),
            (u64::MAX, u32::MAX, u64::MAX - 1),
        ] {
            for block_size in [512_u32, 4096] {
                let data = capacity_10(blocks, block_size);
                assert_eq!(data[..4], u32::to_be_bytes(short), "{blocks} blocks");
                assert_eq!(data[4..], block_size.to_be_bytes());
                let data = capacity_16(blocks, block_size, true);
                assert_eq!(data[..8], u64::to_be_bytes(long), "{blocks} blocks");
                assert_eq!(data[8..12], block_size.to_be_bytes());
                assert_eq!(512 << data[13], 4096 / (block_size / 512));
                assert_eq!((data[12], &data[14..16]), (0, &[0xc0, 0][..]));
                assert_eq!(capacity_16(blocks, block_size, false)[14], 0);
            }
        }
    }
}
