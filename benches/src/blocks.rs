//! Blocks that carry their writer and the number of the write, and the order in which they are
//! written.

use walvisor::commands::CommandError;
use walvisor_storage::Buffer;

/// Bytes of a commit's write and of a random read.
pub const BLOCK: usize = 4096;

/// A block of `len` bytes, filled with stamps of its writer and the number of the write.
pub fn stamped_block(len: usize, writer: u64, number: u64) -> Buffer {
    let mut block = Buffer::zeroed(len);
    stamp(&mut block, writer, number);
    block
}

/// Stamps a block.
pub fn stamp(block: &mut [u8], writer: u64, number: u64) {
    let mark = mark(writer, number);
    block
        .chunks_exact_mut(mark.len())
        .for_each(|chunk| chunk.copy_from_slice(&mark));
}

/// Whether a block has the content that [`stamp`] writes.
pub fn is_stamped(block: &[u8], writer: u64, number: u64) -> bool {
    let mark = mark(writer, number);
    block.chunks_exact(mark.len()).all(|chunk| chunk == mark)
}

fn mark(writer: u64, number: u64) -> [u8; 16] {
    let mut mark = [0; 16];
    mark[..8].copy_from_slice(&writer.to_le_bytes());
    mark[8..].copy_from_slice(&number.to_le_bytes());
    mark
}

/// The error for a block whose content is not what was written.
pub fn damage_error(what: &str, block: u64) -> CommandError {
    CommandError::Failed(format!(
        "{what}: block {block} does not read back as written: the medium or the store is at fault"
    ))
}

/// The block that record number `record` of `blocks` writes. Each block comes once, in a scattered
/// order.
pub fn scattered(record: u64, blocks: u64) -> u64 {
    // A prime larger than any number of blocks here, so that no two records write the same block.
    const STEP: u64 = 2_654_435_761;
    (record * STEP) % blocks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_fill_every_block_once() {
        for blocks in [256, 257, 1000, 4096] {
            let mut seen: Vec<u64> = (0..blocks)
                .map(|record| scattered(record, blocks))
                .collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..blocks));
        }
    }
}
