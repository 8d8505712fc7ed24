//! The device configuration space of virtio-blk (virtio 1.2, 5.2.4).

use crate::backend::{MAX_REQUEST_BYTES, SECTOR_SIZE};

/// Length of the configuration space in bytes: up to and with `write_zeroes_may_unmap` and its padding.
pub(crate) const CONFIG_LEN: usize = 60;

/// Offset of `writeback`, the only field that a driver may write.
pub(super) const WRITEBACK: usize = 32;

/// Most sectors one DISCARD or WRITE_ZEROES may cover: 2 GiB, so that no single request is unbounded work.
pub(super) const MAX_ERASE_SECTORS: u32 = 1 << 22;

/// Most data segments a request may have, whatever the queue size. With [`size_max`] this keeps every
/// request that a driver may make within [`MAX_REQUEST_BYTES`].
const MAX_SEGMENTS: u32 = 254;

/// Physical block of 4096 bytes as a power of two of logical blocks: what the log aligns to.
const PHYSICAL_BLOCK_EXP: u8 = 3;

/// `seg_max`: a queue must also hold the header and the status.
pub(super) fn seg_max(queue_size: u16) -> u32 {
    u32::from(queue_size)
        .saturating_sub(2)
        .clamp(1, MAX_SEGMENTS)
}

/// `size_max`: the largest power of two for which `seg_max` segments stay within [`MAX_REQUEST_BYTES`].
pub(super) fn size_max(queue_size: u16) -> u32 {
    let fair = MAX_REQUEST_BYTES as u32 / seg_max(queue_size);
    1 << fair.ilog2()
}

/// The values of the fields that differ from device to device.
pub(super) struct Fields {
    pub(super) capacity: u64,
    pub(super) queue_size: u16,
    pub(super) queues: u16,
    pub(super) writeback: bool,
    pub(super) may_unmap: bool,
}

/// The configuration space, little-endian.
pub(super) fn layout(fields: &Fields) -> [u8; CONFIG_LEN] {
    let mut space = [0; CONFIG_LEN];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &fields.capacity.to_le_bytes());
    put(8, &size_max(fields.queue_size).to_le_bytes());
    put(12, &seg_max(fields.queue_size).to_le_bytes());
    // 16: geometry, not offered.
    put(20, &(SECTOR_SIZE as u32).to_le_bytes()); // blk_size
    put(24, &[PHYSICAL_BLOCK_EXP, 0]); // physical_block_exp, alignment_offset
    put(26, &(1u16 << PHYSICAL_BLOCK_EXP).to_le_bytes()); // min_io_size in logical blocks
    // 28: opt_io_size, none.
    put(WRITEBACK, &[u8::from(fields.writeback)]);
    put(34, &fields.queues.to_le_bytes());
    put(36, &MAX_ERASE_SECTORS.to_le_bytes()); // max_discard_sectors
    put(40, &1u32.to_le_bytes()); // max_discard_seg
    put(44, &(1u32 << PHYSICAL_BLOCK_EXP).to_le_bytes()); // discard_sector_alignment
    put(48, &MAX_ERASE_SECTORS.to_le_bytes()); // max_write_zeroes_sectors
    put(52, &1u32.to_le_bytes()); // max_write_zeroes_seg
    put(56, &[u8::from(fields.may_unmap)]); // write_zeroes_may_unmap
    space
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_within_the_limits_is_never_too_large() {
        for exponent in 2..=10 {
            let size = 1 << exponent;
            assert!(seg_max(size) + 2 <= u32::from(size));
            let most = u64::from(seg_max(size)) * u64::from(size_max(size));
            assert!(
                most <= MAX_REQUEST_BYTES as u64,
                "queue size {size}: {most}"
            );
            assert!(most > MAX_REQUEST_BYTES as u64 / 2);
            assert!(size_max(size) >= 4096, "5.2.5: a page fits a segment");
        }
    }
}
