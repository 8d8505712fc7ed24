//! Blocks, and numbers for reports.

/// Bytes of a commit's write and of a random read.
pub const BLOCK: usize = 4096;

/// The block that record number `record` of `blocks` writes. Each block comes once, in a scattered order.
pub fn scattered(record: u64, blocks: u64) -> u64 {
    // A prime larger than any number of blocks here, so that no two records write the same block.
    const STEP: u64 = 2_654_435_761;
    (record * STEP) % blocks
}

/// A number with one decimal.
pub fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// A number with three decimals.
pub fn thousandths(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
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
