//! A histogram of durations. The buckets grow wider with the value, like those of HdrHistogram: a
//! few kilobytes hold every value with an error of at most one part in 32.
//!
//! ```text
//!   0 1 2 .. 31 │ 32 33 .. 63 │ 64 66 .. 126 │ 128 132 .. │ ...        first value of each bucket
//!    width 1       width 1       width 2        width 4
//! ```
//!
//! The guest and the VMM both compile this file.

/// Bits of a value that its bucket keeps, below the highest bit that is set.
const KEPT: u32 = 5;
/// Buckets of an octave.
const OCTAVE: usize = 1 << KEPT;
/// Bits of the largest value with a bucket of its own; larger values are counted in the last
/// bucket.
const LARGEST_BITS: usize = 44;
/// Number of buckets. The two octaves of width 1 count as one.
const BUCKETS: usize = (LARGEST_BITS - KEPT as usize + 1) * OCTAVE;

/// Counts of values, in any unit.
#[derive(Debug)]
pub struct Histogram {
    counts: [u32; BUCKETS],
    total: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self {
            counts: [0; BUCKETS],
            total: 0,
        }
    }
}

impl Histogram {
    /// Counts `value`.
    pub fn record(&mut self, value: u64) {
        let count = &mut self.counts[bucket(value)];
        *count = count.saturating_add(1);
        self.total += 1;
    }

    /// Adds the counts of another histogram.
    pub fn add(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count = count.saturating_add(*more);
        }
        self.total += other.total;
    }

    /// Number of values counted.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// The smallest value that at least `per_mille` of 1000 counted values do not exceed; 0 if no
    /// value was counted. The value is the middle of its bucket.
    pub fn quantile(&self, per_mille: u64) -> u64 {
        let wanted = (self.total * per_mille).div_ceil(1000).max(1);
        let mut seen = 0;
        for (bucket, &count) in self.counts.iter().enumerate() {
            seen += u64::from(count);
            if seen >= wanted {
                let (first, width) = (first_of(bucket), first_of(bucket + 1) - first_of(bucket));
                return first + (width - 1) / 2;
            }
        }
        0
    }
}

/// The bucket of a value.
fn bucket(value: u64) -> usize {
    let bits = (u64::BITS - value.leading_zeros()) as usize;
    if bits > LARGEST_BITS {
        return BUCKETS - 1;
    }
    // Number of low bits that the bucket does not keep.
    let dropped = bits.saturating_sub(KEPT as usize + 1);
    dropped * OCTAVE + (value >> dropped) as usize
}

/// The smallest value of a bucket.
fn first_of(bucket: usize) -> u64 {
    let dropped = (bucket / OCTAVE).saturating_sub(1);
    ((bucket - dropped * OCTAVE) as u64) << dropped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_value_falls_into_the_bucket_that_begins_at_or_just_below_it() {
        for bits in 0..LARGEST_BITS as u32 {
            for value in [
                1u64 << bits,
                (1 << bits) + 1,
                (2 << bits) - 1,
                (3 << bits) / 2,
            ] {
                let bucket = bucket(value);
                let (first, next) = (first_of(bucket), first_of(bucket + 1));
                assert!(first <= value && value < next, "{value}: {first}..{next}");
                assert!(
                    (next - first) * 32 <= value.max(32),
                    "{value}: {first}..{next}"
                );
            }
        }
        assert_eq!((bucket(0), first_of(0)), (0, 0));
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
        assert_eq!(bucket((1 << LARGEST_BITS) - 1), BUCKETS - 1);
    }

    #[test]
    fn quantiles_are_those_of_the_values() {
        let mut histogram = Histogram::default();
        assert_eq!(histogram.quantile(500), 0);
        (1..=1000).for_each(|value| histogram.record(value * 100));
        for (per_mille, exact) in [
            (500, 50_000u64),
            (990, 99_000),
            (999, 99_900),
            (1000, 100_000),
        ] {
            let found = histogram.quantile(per_mille);
            assert!(found.abs_diff(exact) * 32 <= exact, "{per_mille}: {found}");
        }
        assert_eq!(histogram.total(), 1000);
        let mut lone = Histogram::default();
        lone.record(7);
        assert_eq!((lone.quantile(1), lone.quantile(999)), (7, 7));
        lone.add(&histogram);
        assert_eq!((lone.total(), lone.quantile(0)), (1001, 7));
    }
}
