//! The device configuration space of virtio-blk (virtio 1.2, 5.2.4).

use crate::backend::SECTOR_SIZE;

/// Length of the configuration space in bytes, up to and including `secure_erase_sector_alignment`.
pub(crate) const CONFIG_LEN: usize = 72;

/// Offset of `writeback`, the only field that a driver may write.
pub(super) const WRITEBACK: usize = 32;

/// The most sectors that one DISCARD, WRITE_ZEROES or SECURE_ERASE may cover: 2 GiB, so that the
/// work of a request is bounded.
pub(crate) const MAX_ERASE_SECTORS: u32 = 1 << 22;

/// The most data segments of a request, whatever the queue size. Together with [`size_max`] it
/// keeps every request that a driver may make within the backend's limit.
const MAX_SEGMENTS: u32 = 254;

/// A driver must be able to send segments of at least this size: a page.
const PAGE: u32 = 4096;

/// Physical block in bytes: the alignment of the log, and the usual block size of the media under
/// base images.
const PHYSICAL_BLOCK: u32 = 4096;

/// `seg_max`: the queue must also hold the header and the status, and the backend must take a page
/// per segment.
pub(super) fn seg_max(queue_size: u16, max_request: u32) -> u32 {
    u32::from(queue_size)
        .saturating_sub(2)
        .min(max_request / PAGE)
        .clamp(1, MAX_SEGMENTS)
}

/// `size_max`: the largest power of two for which `seg_max` segments stay within `max_request`
/// bytes.
pub(super) fn size_max(queue_size: u16, max_request: u32) -> u32 {
    let share = max_request / seg_max(queue_size, max_request);
    1 << share.max(SECTOR_SIZE as u32).ilog2()
}

/// The fields that differ from device to device.
pub(super) struct ConfigFields {
    pub(super) capacity: u64,
    pub(super) queue_size: u16,
    pub(super) queues: u16,
    pub(super) writeback: bool,
    pub(super) may_unmap: bool,
    pub(super) secure_erase: bool,
    /// Logical block in bytes.
    pub(super) block_size: u32,
    /// The longest request that the backend takes, in bytes.
    pub(super) max_request: u32,
}

/// Encodes the configuration space, little-endian.
pub(super) fn encode(fields: &ConfigFields) -> [u8; CONFIG_LEN] {
    let mut space = [0; CONFIG_LEN];
    let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, &fields.capacity.to_le_bytes());
    let (queue_size, max_request) = (fields.queue_size, fields.max_request);
    put(8, &size_max(queue_size, max_request).to_le_bytes());
    put(12, &seg_max(queue_size, max_request).to_le_bytes());
    // 16: geometry, not offered.
    put(20, &fields.block_size.to_le_bytes()); // blk_size
    let blocks = PHYSICAL_BLOCK / fields.block_size;
    put(24, &[blocks.ilog2() as u8, 0]); // physical_block_exp, alignment_offset
    put(26, &(blocks as u16).to_le_bytes()); // min_io_size in logical blocks
    // 28: opt_io_size, none.
    put(WRITEBACK, &[u8::from(fields.writeback)]);
    put(34, &fields.queues.to_le_bytes());
    put(36, &MAX_ERASE_SECTORS.to_le_bytes()); // max_discard_sectors
    put(40, &1u32.to_le_bytes()); // max_discard_seg
    let alignment = PHYSICAL_BLOCK / SECTOR_SIZE as u32;
    put(44, &alignment.to_le_bytes()); // discard_sector_alignment
    put(48, &MAX_ERASE_SECTORS.to_le_bytes()); // max_write_zeroes_sectors
    put(52, &1u32.to_le_bytes()); // max_write_zeroes_seg
    put(56, &[u8::from(fields.may_unmap)]); // write_zeroes_may_unmap
    if fields.secure_erase {
        put(60, &MAX_ERASE_SECTORS.to_le_bytes()); // max_secure_erase_sectors
        put(64, &1u32.to_le_bytes()); // max_secure_erase_seg
        put(68, &alignment.to_le_bytes()); // secure_erase_sector_alignment
    }
    space
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_within_the_limits_is_never_too_large() {
        for limit in [4096, 64 << 10, 256 << 10, 5_000_000, 16 << 20] {
            for exponent in 2..=10 {
                let size = 1 << exponent;
                let (segments, bytes) = (seg_max(size, limit), size_max(size, limit));
                assert!(segments >= 1 && segments + 2 <= u32::from(size));
                let most = u64::from(segments) * u64::from(bytes);
                assert!(most <= u64::from(limit), "queue size {size}: {most}");
                assert!(most > u64::from(limit) / 3, "queue size {size}: {most}");
                assert!(bytes >= PAGE, "a page fits a segment");
            }
        }
    }
}
