//! What operations cost a medium.
//!
//! A checkpoint chooses between many small operations and few large ones, which move more bytes. Which is faster depends on
//! the medium: some take long for each operation, or count operations, and others do not. And what guests wait for queues
//! behind what the checkpoint has in flight: how long, depends on the medium too. So the medium is asked once, with reads from a
//! segment.

use std::io;
use std::time::{Duration, Instant};

use crate::Buffer;
use crate::medium::file::{Engine, Io, ReadSource, Segment};
use crate::sync::{Arc, Event};

/// What operations cost a medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MediumCost {
    /// How many bytes the medium moves in the time that an operation without bytes takes it, up to 1 MiB.
    pub operation: u64,
    /// How many bytes the medium moves in a second; each operation counts as so many more.
    pub rate: u64,
    /// The most bytes of an operation of a checkpoint. A larger one would take the medium longer for each byte, or as long.
    pub largest: u64,
}

impl MediumCost {
    /// What is assumed of a medium that is not measured.
    pub(crate) const USUAL: Self = Self {
        operation: 64 << 10,
        rate: u64::MAX,
        largest: LARGE,
    };
}

/// The highest price of an operation that is believed.
const MOST: u64 = 1 << 20;

const SMALL: u64 = 4 << 10;
const LARGE: u64 = 256 << 10;
/// The size of operations where they take less than three times as long as large ones, for four times the bytes.
const HUGE: u64 = 1 << 20;
/// Small reads that are in flight together, large ones, which guests' requests wait behind, and how often they are.
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
    // The time of so many reads together, with `shift` bytes between them and earlier ones.
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
    let operation = price([small, large * (READS / LARGE_READS) as u32]);
    Ok(MediumCost {
        operation,
        rate: rate(operation, small),
        largest: largest([large, huge]),
    })
}

/// The rate, from the time of all small reads.
fn rate(operation: u64, small: Duration) -> u64 {
    ((operation + SMALL) as f64 * READS as f64 / small.as_secs_f64()) as u64
}

/// The size of the largest operations, from the times of equally many large and huge reads.
fn largest([large, huge]: [Duration; 2]) -> u64 {
    if huge < large * 3 { HUGE } else { LARGE }
}

/// The price, from the times of equally many small and large reads.
fn price([small, large]: [Duration; 2]) -> u64 {
    let [small, large] = [small, large].map(|time| time.as_secs_f64());
    let byte = (large - small) / (LARGE - SMALL) as f64;
    let operation = small - byte * SMALL as f64;
    // As many operations as can be believed cost nothing else: the quotient is infinite then, or negative.
    match byte * MOST as f64 > operation {
        true => (operation / byte).max(0.0) as u64,
        false => MOST,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_price_follows_from_the_times() {
        let price = |small, large| price([small, large].map(Duration::from_micros));
        // 100 us an operation and 252 us for the bytes that large reads have more.
        assert_eq!(price(100 + 4, 100 + 256), 100 << 10);
        // Operations count, and bytes do not; the other way round; and what can't be.
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
        let largest = |large, huge| largest([large, huge].map(Duration::from_micros));
        // A volume that counts operations, one that counts those of 256 KiB, and one that counts bytes.
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
        let segment = medium.create_segment(1, READS * LARGE, &mut |_| {});
        let segment = Arc::new(segment.unwrap());
        let cost = medium.cost(&segment, READS * LARGE);
        assert!(cost.operation <= MOST && cost.rate > 0);
        assert_eq!(medium.cost(&segment, LARGE), MediumCost::USUAL);
    }
}
