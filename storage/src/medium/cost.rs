//! What operations cost a medium.
//!
//! A checkpoint chooses between many small operations and few large ones that move more bytes.
//! Which is faster depends on the medium: some are slow per operation, or meter operations; others
//! are not. Guests' requests also queue behind whatever the checkpoint has in flight, and for how
//! long depends on the medium too. So the medium is measured once, with reads from a segment.

use std::io;
use std::time::{Duration, Instant};

use crate::Buffer;
use crate::medium::file::{Engine, Io, ReadSource, Segment};
use crate::sync::{Arc, Event};

/// What operations cost a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MediumCost {
    /// Fixed cost of an operation, expressed as the bytes that the medium moves in that time; at
    /// most 1 MiB.
    pub operation: u64,
    /// Throughput: cost per second, in bytes, where each operation costs `operation` on top of its
    /// bytes.
    pub rate: u64,
    /// Most bytes in one operation of a checkpoint. A larger one would be no faster per byte.
    pub largest: u64,
}

impl MediumCost {
    /// Assumed for a medium that was not measured.
    pub(crate) const USUAL: Self = Self {
        operation: 64 << 10,
        rate: u64::MAX,
        largest: LARGE,
    };
}

/// The highest fixed cost that is believed.
const MOST: u64 = 1 << 20;

const SMALL: u64 = 4 << 10;
const LARGE: u64 = 256 << 10;
/// The size used instead of `LARGE` if it takes less than three times as long, for four times the
/// bytes.
const HUGE: u64 = 1 << 20;
/// How many small reads are in flight together, how many large ones (guests' requests wait behind
/// those), and how often.
const READS: u64 = 32;
const LARGE_READS: u64 = 4;
const ROUNDS: u64 = 3;

/// Measures the medium. `segment` has `size` bytes.
pub(super) fn measure(
    segment: &Arc<Segment>,
    size: u64,
    mut engine: Box<dyn Engine>,
    event: &Event,
) -> io::Result<MediumCost> {
    if size < READS * LARGE {
        return Ok(MediumCost::USUAL);
    }
    // The time for `count` reads together, `shift` bytes away from earlier ones.
    let mut time = |count: u64, bytes: u64, shift: u64| {
        let began = Instant::now();
        for read in 0..count {
            let place = size / READS / LARGE * LARGE * read + shift;
            let io = Io::Read {
                source: ReadSource::File(segment.file.clone()),
                offset: place.min(size - bytes),
                buffer: Buffer::for_overwrite(bytes as usize),
            };
            engine.submit(read, io);
        }
        engine.enter();
        let mut done = Vec::new();
        while done.len() < count as usize {
            event.clear();
            let before = done.len();
            engine.poll(&mut done);
            if done.len() == before {
                event.sleep_until(None);
            }
        }
        done.into_iter().try_for_each(|end| end.result.map(drop))?;
        Ok::<_, io::Error>(began.elapsed())
    };
    let [mut small, mut large, mut huge] = [Duration::MAX; 3];
    for round in 0..ROUNDS {
        small = small.min(time(READS, SMALL, round * 3 * SMALL)?);
        large = large.min(time(LARGE_READS, LARGE, round * 3 * SMALL)?);
        huge = huge.min(time(LARGE_READS, HUGE, round * 3 * SMALL)?);
    }
    let operation = operation_cost([small, large * (READS / LARGE_READS) as u32]);
    Ok(MediumCost {
        operation,
        rate: rate(operation, small),
        largest: largest_operation([large, huge]),
    })
}

/// The throughput, from the time of all small reads.
fn rate(operation: u64, small: Duration) -> u64 {
    ((operation + SMALL) as f64 * READS as f64 / small.as_secs_f64()) as u64
}

/// The size of the largest operations, from the times of the same number of large and of huge
/// reads.
fn largest_operation([large, huge]: [Duration; 2]) -> u64 {
    if huge < large * 3 { HUGE } else { LARGE }
}

/// The fixed cost of an operation, from the times of the same number of small and of large reads.
fn operation_cost([small, large]: [Duration; 2]) -> u64 {
    let [small, large] = [small, large].map(|time| time.as_secs_f64());
    let byte = (large - small) / (LARGE - SMALL) as f64;
    let operation = small - byte * SMALL as f64;
    // If bytes seem to cost nothing, the quotient is infinite or negative: use the maximum.
    if byte * MOST as f64 > operation {
        (operation / byte).max(0.0) as u64
    } else {
        MOST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_price_follows_from_the_times() {
        let price = |small, large| operation_cost([small, large].map(Duration::from_micros));
        // 100 us per operation, and 252 us for the additional bytes of large reads.
        assert_eq!(price(100 + 4, 100 + 256), 100 << 10);
        // Only operations cost; only bytes cost; and an impossible measurement.
        assert_eq!(price(1000, 1000), MOST);
        assert_eq!(price(1000, 900), MOST);
        assert_eq!(price(4, 256), 0);
        assert_eq!(price(0, 256), 0);
    }

    #[test]
    fn the_rate_follows_from_the_times() {
        // 32 operations of 1 MiB and 4 KiB each, in a second.
        let second = Duration::from_secs(1);
        assert_eq!(rate(MOST, second), 32 * (MOST + SMALL));
        assert_eq!(rate(0, second / 2), 64 * SMALL);
        assert_eq!(rate(0, Duration::ZERO), u64::MAX);
    }

    #[test]
    fn operations_are_huge_where_that_takes_little_longer() {
        let largest = |large, huge| largest_operation([large, huge].map(Duration::from_micros));
        // A volume that meters operations, one that meters those of 256 KiB, and one that meters
        // bytes.
        assert_eq!(largest(1000, 1100), HUGE);
        assert_eq!(largest(1000, 2500), HUGE);
        assert_eq!(largest(1000, 4000), LARGE);
        assert_eq!(largest(256, 1024), LARGE);
        assert_eq!(largest(0, 0), LARGE);
    }

    #[test]
    fn a_file_is_measured() {
        let dir = tempfile::tempdir().unwrap();
        let medium = crate::medium::directory::directory(
            dir.path(),
            crate::medium::engine::EngineKind::Blocking,
        );
        use crate::medium::directory::Medium;
        use crate::medium::segment::take_short_steps;
        let segment = medium.create_segment(1, READS * LARGE, &mut take_short_steps);
        let segment = Arc::new(segment.unwrap());
        let cost = medium.cost(&segment, READS * LARGE);
        assert!(cost.operation <= MOST && cost.rate > 0);
        assert_eq!(medium.cost(&segment, LARGE), MediumCost::USUAL);
    }
}
