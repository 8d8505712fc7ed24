//! What all structures on the medium share: their checksum, and the limits of their numbers.

use zerocopy::little_endian::U64;

/// Alignment of the start of every structure: one page, a multiple of any sector size in use.
pub(crate) const BLOCK: usize = 4096;
/// The format version that this code reads and writes.
pub(crate) const VERSION: u32 = 7;
/// LSNs, commit IDs, sequences and generations stay below this limit. Counting never reaches it,
/// and adding one never overflows.
pub(crate) const NUMBER_LIMIT: u64 = 1 << 60;

/// 128 random bits that name a log or a disk.
pub(crate) type Uuid = [u8; 16];

/// CRC-32C of `bytes` with the four bytes at `at` taken as zero. Every structure here is sealed
/// this way.
pub(crate) fn crc_without(bytes: &[u8], at: usize) -> u32 {
    let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes[..at]), &[0; 4]);
    crc32c::crc32c_append(crc, &bytes[at + 4..])
}

/// Offset of the `crc` field: the same in all sealed structures (magic, version, crc).
pub(crate) const CRC_AT: usize = 12;

pub(crate) fn seal(bytes: &mut [u8]) -> u32 {
    seal_at(bytes, CRC_AT)
}

/// Puts the CRC of `bytes` into the four bytes at `at`, and returns it.
pub(crate) fn seal_at(bytes: &mut [u8], at: usize) -> u32 {
    let crc = crc_without(bytes, at);
    bytes[at..at + 4].copy_from_slice(&crc.to_le_bytes());
    crc
}

/// Whether all numbers are below the limit, so that they can be genuine.
pub(crate) fn counted(numbers: &[U64]) -> bool {
    numbers.iter().all(|number| number.get() < NUMBER_LIMIT)
}

/// The result of decoding a block as a structure.
#[derive(Debug)]
pub(crate) enum DecodeResult<T> {
    /// Magic, version and CRC are right.
    Valid(T),
    /// Right magic, different version.
    Version(u32),
    /// Anything else: zeroes, stale bytes, a torn write, rot.
    Invalid,
}
