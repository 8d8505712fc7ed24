//! A CRC-32C for each block of a payload, and which bytes of a segment each one covers.
//!
//! Payloads are often read in part, because a later write has replaced the rest. So a payload has a
//! checksum for each [`BLOCK`], and a reader reads and verifies the whole blocks around the part it
//! needs. A segment keeps its payloads' checksums in memory: 4 bytes a block, plus 8 for each
//! contiguous run of blocks, usually a batch.

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

/// The CRC-32C of a whole payload of `len` bytes, computed from its blocks' CRCs.
pub(crate) fn combine(checksums: &[u32], len: u64) -> u32 {
    let lengths = (0..len).step_by(BLOCK);
    let lengths = lengths.map(|at| (len - at).min(BLOCK as u64) as usize);
    let blocks = checksums.iter().zip(lengths);
    blocks.fold(0, |crc, (&next, len)| {
        crc32c::crc32c_combine(crc, next, len)
    })
}

/// A contiguous run of payload blocks in a segment. All but the last are whole.
///
/// One word: the first sector in the segment, the number of sectors, and the index of the first
/// block's checksum. A segment has at most 2^21 sectors.
#[derive(Clone, Copy, Debug)]
struct ChecksumRun(u64);

/// Bits of each number in a run.
const BITS: u32 = 21;

impl ChecksumRun {
    fn new(start: u64, len: u64, checksum: usize) -> Self {
        let (first, sectors) = (start / SECTOR_SIZE, len / SECTOR_SIZE);
        debug_assert!(first.max(sectors).max(checksum as u64) < 1 << BITS);
        Self((first << BITS | sectors) << BITS | checksum as u64)
    }

    fn number(self, position: u32) -> u64 {
        self.0 >> (position * BITS) & ((1 << BITS) - 1)
    }

    fn checksum(self) -> usize {
        self.number(0) as usize
    }

    fn len(self) -> u64 {
        self.number(1) * SECTOR_SIZE
    }

    fn start(self) -> u64 {
        self.number(2) * SECTOR_SIZE
    }

    fn end(self) -> u64 {
        self.start() + self.len()
    }
}

/// The checksums of the payloads that a segment holds.
#[derive(Debug, Default)]
pub(crate) struct ChecksumTable {
    runs: Vec<ChecksumRun>,
    checksums: Vec<u32>,
}

impl ChecksumTable {
    /// Empties the table, because the segment is being reused.
    pub(crate) fn clear(&mut self) {
        self.runs.clear();
        self.checksums.clear();
    }

    /// Adds a payload of `len` bytes at byte `offset` of the segment, after all payloads added
    /// before.
    pub(crate) fn add(&mut self, offset: u64, len: u64, checksums: &[u32]) {
        debug_assert!(self.runs.last().is_none_or(|last| last.end() <= offset));
        debug_assert_eq!(checksums.len() as u64, len.div_ceil(BLOCK as u64));
        if len == 0 {
            return;
        }
        let goes_on =
            |run: &&mut ChecksumRun| run.end() == offset && run.len().is_multiple_of(BLOCK as u64);
        match self.runs.last_mut().filter(goes_on) {
            Some(run) => *run = ChecksumRun::new(run.start(), run.len() + len, run.checksum()),
            None => {
                grow(&mut self.runs, 1);
                self.runs
                    .push(ChecksumRun::new(offset, len, self.checksums.len()));
            }
        }
        grow(&mut self.checksums, checksums.len());
        self.checksums.extend_from_slice(checksums);
    }

    /// Bytes of memory that it takes.
    pub(crate) fn bytes(&self) -> u64 {
        let runs = self.runs.capacity() * size_of::<ChecksumRun>();
        (runs + self.checksums.capacity() * size_of::<u32>()) as u64
    }

    /// The runs that end after `offset`.
    fn runs_from(&self, offset: u64) -> &[ChecksumRun] {
        let passed = self.runs.partition_point(|run| run.end() <= offset);
        &self.runs[passed..]
    }

    /// The run that holds the byte at `offset`.
    fn run_of(&self, offset: u64) -> Option<&ChecksumRun> {
        let run = self.runs_from(offset).first();
        run.filter(|run| run.start() <= offset)
    }

    /// The byte range of the whole blocks that contain `len` bytes at `offset`. If some bytes are
    /// in no payload, the range includes them, and [`verify`](Self::verify) fails.
    pub(crate) fn cover(&self, offset: u64, len: u64) -> Range<u64> {
        let end = offset + len;
        let block = BLOCK as u64;
        let start = self
            .run_of(offset)
            .map_or(offset, |run| offset - (offset - run.start()) % block);
        let end = self.run_of(end - 1).map_or(end, |run| {
            run.end()
                .min(run.start() + (end - run.start()).next_multiple_of(block))
        });
        start..end
    }

    /// Checks that `bytes`, read at `offset`, are whole blocks with the right checksums.
    ///
    /// # Errors
    /// The offset of the first block that does not match.
    pub(crate) fn verify(&self, offset: u64, bytes: &[u8]) -> Result<(), u64> {
        if planted(Mutant::ReadSkipsChecksum) {
            return Ok(());
        }
        let (mut at, mut left) = (offset, bytes);
        for run in self.runs_from(offset) {
            if left.is_empty() {
                break;
            }
            let skipped = at.checked_sub(run.start()).ok_or(at)?;
            if !skipped.is_multiple_of(BLOCK as u64) {
                return Err(at);
            }
            let len = left.len().min((run.end() - at) as usize);
            let (of_run, rest) = left.split_at(len);
            let checksums = &self.checksums[run.checksum() + (skipped / BLOCK as u64) as usize..];
            for (block, &checksum) in of_run.chunks(BLOCK).zip(checksums) {
                if crc32c::crc32c(block) != checksum {
                    return Err(at);
                }
                at += block.len() as u64;
            }
            left = rest;
        }
        if left.is_empty() { Ok(()) } else { Err(at) }
    }
}

/// Makes room for `more` items and little beyond: the table of a full segment stays in memory for a
/// long time.
fn grow<T>(items: &mut Vec<T>, more: usize) {
    if items.len() + more > items.capacity() {
        items.reserve_exact(more.max(items.len() / 8));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The bytes of a segment with these payloads (sectors of gap, sectors of payload), its table,
    /// and the place and length of each payload.
    fn segment(payloads: &[(u64, u64)]) -> (Vec<u8>, ChecksumTable, Vec<(u64, u64)>) {
        let (mut bytes, mut table, mut places) = (Vec::new(), ChecksumTable::default(), Vec::new());
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
        /// Any part of any payload is verified by the blocks around it, at most seven sectors more
        /// on each side; a changed bit in these blocks is noticed, and one elsewhere is not.
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
            prop_assert_eq!(combine(&of(&bytes), bytes.len() as u64), crc32c::crc32c(&bytes));
        }
    }

    #[test]
    fn bytes_outside_payloads_never_verify() {
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
