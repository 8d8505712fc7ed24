//! A CRC-32C for each block of a record's payload, and which bytes of a segment each of them covers.
//!
//! The log is read in parts: a later write may have replaced half of an earlier one. So a payload has a checksum for
//! each [`BLOCK`] of it, and a reader of a part reads and verifies the whole blocks that hold this part. A segment
//! keeps the checksums of its payloads in memory, 8 bytes a block.

use std::ops::Range;

use smallvec::SmallVec;

use crate::format::BLOCK;
use crate::mutant::{Mutant, planted};
use crate::{SECTOR_SIZE, SharedBuffer};

/// The checksums of a payload, in order. The last block may be shorter than [`BLOCK`].
pub(crate) type Checksums = SmallVec<[u32; 4]>;

/// The bytes of a record, and their checksums.
#[derive(Clone, Debug)]
pub(crate) struct Payload {
    pub bytes: SharedBuffer,
    pub checksums: Checksums,
}

/// The checksums of the blocks of `payload`.
pub(crate) fn of(payload: &[u8]) -> Checksums {
    payload.chunks(BLOCK).map(crc32c::crc32c).collect()
}

/// The CRC-32C of a whole payload of `len` bytes, computed from those of its blocks.
pub(crate) fn whole(checksums: &[u32], len: u64) -> u32 {
    let lengths = (0..len).step_by(BLOCK);
    let lengths = lengths.map(|at| (len - at).min(BLOCK as u64) as usize);
    let blocks = checksums.iter().zip(lengths);
    blocks.fold(0, |crc, (&next, len)| {
        crc32c::crc32c_combine(crc, next, len)
    })
}

/// One block of a payload in a segment.
#[derive(Clone, Copy, Debug)]
struct Block {
    /// The block's first sector in the segment, shifted by [`LENGTH_BITS`], plus its number of sectors less one. A
    /// segment has at most 2^21 sectors.
    place: u32,
    crc: u32,
}

const LENGTH_BITS: u32 = 3;
const _: () = assert!(BLOCK as u64 / SECTOR_SIZE == 1 << LENGTH_BITS);

impl Block {
    fn start(self) -> u64 {
        u64::from(self.place >> LENGTH_BITS) * SECTOR_SIZE
    }

    fn len(self) -> u64 {
        (u64::from(self.place & ((1 << LENGTH_BITS) - 1)) + 1) * SECTOR_SIZE
    }

    fn end(self) -> u64 {
        self.start() + self.len()
    }
}

/// The blocks of a segment that hold payload, in their order.
#[derive(Debug, Default)]
pub(crate) struct Table {
    blocks: Vec<Block>,
}

impl Table {
    /// Empties the table, because the segment is taken into use again.
    pub(crate) fn clear(&mut self) {
        self.blocks.clear();
    }

    /// Adds a payload of `len` bytes at byte `offset` of the segment, behind all payloads added before.
    pub(crate) fn add(&mut self, offset: u64, len: u64, checksums: &[u32]) {
        debug_assert!(self.blocks.last().is_none_or(|last| last.end() <= offset));
        debug_assert_eq!(checksums.len() as u64, len.div_ceil(BLOCK as u64));
        for (at, &crc) in (0..len).step_by(BLOCK).zip(checksums) {
            let sectors = (len - at).min(BLOCK as u64) / SECTOR_SIZE;
            let first = (offset + at) / SECTOR_SIZE;
            let place = (first as u32) << LENGTH_BITS | (sectors as u32 - 1);
            self.blocks.push(Block { place, crc });
        }
    }

    /// The byte range of the whole blocks that hold `len` bytes at `offset`. Bytes outside any payload are in the
    /// range too, which then fails to be [verified](Self::verify).
    pub(crate) fn cover(&self, offset: u64, len: u64) -> Range<u64> {
        let first = self.blocks.partition_point(|block| block.end() <= offset);
        let behind = self
            .blocks
            .partition_point(|block| block.start() < offset + len);
        let start = self.blocks.get(first).map_or(offset, |block| block.start());
        let last = behind.checked_sub(1).map(|last| self.blocks[last].end());
        start.min(offset)..last.unwrap_or(0).max(offset + len)
    }

    /// Checks that `bytes`, which were read at `offset`, are whole blocks, each with the checksum of what was
    /// written.
    ///
    /// # Errors
    /// The offset of the first block that does not match.
    pub(crate) fn verify(&self, offset: u64, bytes: &[u8]) -> Result<(), u64> {
        if planted(Mutant::ReadSkipsChecksum) {
            return Ok(());
        }
        let end = offset + bytes.len() as u64;
        let first = self.blocks.partition_point(|block| block.start() < offset);
        let mut at = offset;
        for block in &self.blocks[first..] {
            if at == end {
                break;
            }
            let from = (block.start() - offset) as usize;
            let part = bytes.get(from..from + block.len() as usize);
            if block.start() != at || part.map(crc32c::crc32c) != Some(block.crc) {
                return Err(at);
            }
            at = block.end();
        }
        if at == end { Ok(()) } else { Err(at) }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The bytes of a segment with these payloads (sectors of gap before it, sectors of payload), its table, and the
    /// place and length of each payload.
    fn segment(payloads: &[(u64, u64)]) -> (Vec<u8>, Table, Vec<(u64, u64)>) {
        let (mut bytes, mut table, mut places) = (Vec::new(), Table::default(), Vec::new());
        for (number, (gap, sectors)) in payloads.iter().enumerate() {
            bytes.resize(bytes.len() + (gap * SECTOR_SIZE) as usize, 0xee);
            let offset = bytes.len() as u64;
            let payload: Vec<u8> = (0..sectors * SECTOR_SIZE)
                .map(|at| (at / 7) as u8 ^ number as u8)
                .collect();
            table.add(offset, payload.len() as u64, &of(&payload));
            bytes.extend(&payload);
            places.push((offset, payload.len() as u64));
        }
        (bytes, table, places)
    }

    proptest! {
        /// Any part of any payload is verified by the blocks around it, at most seven sectors more on each side; a
        /// changed bit in these blocks is noticed, and one elsewhere is not.
        #[test]
        fn a_part_is_verified_by_the_blocks_around_it(
            payloads in prop::collection::vec((0_u64..3, 1_u64..40), 1..12),
            which in any::<prop::sample::Index>(),
            from in any::<prop::sample::Index>(),
            until in any::<prop::sample::Index>(),
            flipped in any::<prop::sample::Index>(),
        ) {
            let (mut bytes, table, places) = segment(&payloads);
            let (offset, len) = *which.get(&places);
            let sectors = (len / SECTOR_SIZE) as usize;
            let first = from.index(sectors);
            let count = 1 + until.index(sectors - first);
            let (wanted, wanted_len) = (offset + first as u64 * SECTOR_SIZE, count as u64 * SECTOR_SIZE);
            let Range { start, end } = table.cover(wanted, wanted_len);
            prop_assert!(start <= wanted && wanted - start < BLOCK as u64);
            prop_assert!(end >= wanted + wanted_len && end - wanted - wanted_len < BLOCK as u64);
            prop_assert!(start >= offset && end <= offset + len);
            let range = start as usize..end as usize;
            prop_assert_eq!(table.verify(start, &bytes[range.clone()]), Ok(()));
            let at = flipped.index(bytes.len());
            bytes[at] ^= 1;
            let found = table.verify(start, &bytes[range.clone()]);
            prop_assert_eq!(found.is_err(), range.contains(&at));
            if let Err(block) = found {
                prop_assert!((block..block + BLOCK as u64).contains(&(at as u64)));
            }
        }

        /// The checksum of a whole payload can be computed from those of its blocks.
        #[test]
        fn the_whole_has_the_checksum_of_its_bytes(sectors in 1_usize..40) {
            let bytes: Vec<u8> = (0..sectors * 512).map(|at| (at / 3) as u8).collect();
            prop_assert_eq!(whole(&of(&bytes), bytes.len() as u64), crc32c::crc32c(&bytes));
        }
    }

    #[test]
    fn what_is_no_payload_is_never_right() {
        let (bytes, table, _) = segment(&[(2, 9), (3, 1)]);
        for (from, until) in [(0, 512), (0, 1024), (1024, 6144), (5632, 6656)] {
            let Range { start, end } = table.cover(from, until - from);
            let range = start as usize..(end as usize).min(bytes.len());
            assert!(
                table.verify(start, &bytes[range]).is_err(),
                "{from}..{until}"
            );
        }
    }
}
