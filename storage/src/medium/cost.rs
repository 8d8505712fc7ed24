//! The price of an operation, as bytes.
//!
//! A checkpoint chooses between many small operations and few large ones, which move more bytes. Which is faster depends on
//! the medium: some take long for each operation, or count operations, and others do not. So the medium is asked once, with
//! reads of both kinds from a segment.

use std::io;
use std::time::{Duration, Instant};

use crate::Buffer;
use crate::medium::engine::{Engine, Io, Source};
use crate::medium::segment::Segment;
use crate::sync::{Arc, Event};

/// What is assumed of a medium that is not measured: an operation takes as long as moving so many bytes.
pub(crate) const USUAL: u64 = 64 << 10;
/// The most that is believed.
const MOST: u64 = 1 << 20;

const SMALL: u64 = 4 << 10;
const LARGE: u64 = 256 << 10;
/// Reads of each kind that are in flight together, and how often they are.
const READS: u64 = 32;
const ROUNDS: u64 = 3;

/// How many bytes the medium moves in the time that an operation without bytes takes it, up to 1 MiB. `segment` has `size` bytes.
pub(super) fn measure(
    segment: &Arc<Segment>,
    size: u64,
    mut engine: Box<dyn Engine>,
    event: &Event,
) -> io::Result<u64> {
    if size < READS * LARGE {
        return Ok(USUAL);
    }
    let mut fastest = [Duration::MAX; 2];
    for round in 0..ROUNDS {
        for (bytes, fastest) in [SMALL, LARGE].into_iter().zip(&mut fastest) {
            let began = Instant::now();
            for read in 0..READS {
                let place = size / READS / LARGE * LARGE * read + round * 3 * SMALL;
                let io = Io::Read {
                    source: Source::Segment(segment.clone()),
                    offset: place.min(size - bytes),
                    buffer: Buffer::for_overwrite(bytes as usize),
                };
                engine.submit(read, io);
            }
            engine.enter();
            let mut done = Vec::new();
            while done.len() < READS as usize {
                event.clear();
                let before = done.len();
                engine.poll(&mut done);
                if done.len() == before {
                    event.sleep_until(None);
                }
            }
            done.into_iter().try_for_each(|end| end.result.map(drop))?;
            *fastest = began.elapsed().min(*fastest);
        }
    }
    Ok(price(fastest))
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
    fn a_file_is_measured() {
        let dir = tempfile::tempdir().unwrap();
        let medium = crate::medium::directory::directory(
            dir.path(),
            crate::medium::engine::EngineKind::Blocking,
        );
        use crate::medium::directory::Medium;
        let segment = medium.create_segment(1, READS * LARGE, &mut |_| {});
        let segment = Arc::new(segment.unwrap());
        assert!(medium.operation_bytes(&segment, READS * LARGE) <= MOST);
        assert_eq!(medium.operation_bytes(&segment, LARGE), USUAL);
    }
}
