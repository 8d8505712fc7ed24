//! How much data a CDB names, for transports that must say when a buffer is too short for it.

use super::LogicalUnit;

/// Bytes that a CDB moves, as its transfer, allocation or parameter list length says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CdbTransfer {
    /// Bytes of the Data-In Buffer.
    pub(crate) data_in: u64,
    /// Bytes of the Data-Out Buffer.
    pub(crate) data_out: u64,
}

/// The data that a CDB names. Unknown commands name none.
pub(crate) fn transfer_of(unit: &LogicalUnit, cdb: &[u8]) -> CdbTransfer {
    let byte = |at: usize| u64::from(cdb.get(at).copied().unwrap_or(0));
    let number = |at: usize, len: usize| (at..at + len).fold(0, |sum, at| sum << 8 | byte(at));
    let block = u64::from(unit.block_size());
    let blocks = |count: u64| count.saturating_mul(block);
    let six = match byte(4) {
        0 => 256,
        count => count,
    };
    let read = |data_in| CdbTransfer {
        data_in,
        data_out: 0,
    };
    let write = |data_out| CdbTransfer {
        data_in: 0,
        data_out,
    };
    // BYTCHK of VERIFY: nothing, all blocks, or one.
    let verify = |count: u64| match byte(1) >> 1 & 3 {
        0 => CdbTransfer::default(),
        1 => write(blocks(count)),
        _ => write(blocks(count.min(1))),
    };
    match byte(0) {
        0x08 => read(blocks(six)),
        0x0a => write(blocks(six)),
        0x28 => read(blocks(number(7, 2))),
        0x2a | 0x2e => write(blocks(number(7, 2))),
        0x2f => verify(number(7, 2)),
        0x88 => read(blocks(number(10, 4))),
        0x8a | 0x8e => write(blocks(number(10, 4))),
        0x8f => verify(number(10, 4)),
        0xa8 => read(blocks(number(6, 4))),
        0xaa | 0xae => write(blocks(number(6, 4))),
        0xaf => verify(number(6, 4)),
        0x89 => write(blocks(2 * byte(13))),
        0x9c => write(blocks(number(12, 2))),
        // NDOB: a WRITE SAME (16) without data.
        0x93 if byte(1) & 1 != 0 => CdbTransfer::default(),
        0x41 | 0x93 => write(block),
        0x42 | 0x55 => write(number(7, 2)),
        0x15 => write(byte(4)),
        0x12 => read(number(3, 2)),
        0x03 | 0x1a => read(byte(4)),
        0x5a => read(number(7, 2)),
        0x25 => read(8),
        0x9e => read(number(10, 4)),
        0xa0 | 0xa3 => read(number(6, 4)),
        _ => CdbTransfer::default(),
    }
}
