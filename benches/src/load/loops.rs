//! The closed loops of a client in this process: they choose the next request, and time each one.

use std::time::{Duration, Instant};

use super::measured::Measured;
use super::point::{BLOCK, LoadJob};
use walvisor_guest::histogram::Histogram;

/// The next request of a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Read the block at this byte.
    Read(u64),
    /// Write the block at this byte.
    Write(u64),
    /// Make the loop's last write durable.
    Flush,
}

/// Concurrent loops, one per slot, that run until the time is over.
#[derive(Debug)]
pub struct Loops {
    job: LoadJob,
    began: Instant,
    end: Instant,
    random: u64,
    /// Bytes of the disk.
    bytes: u64,
    /// For each slot: when its request began, and whether its FLUSH is in flight.
    slots: Vec<(Instant, bool)>,
    /// Times of the requests in nanoseconds.
    histogram: Histogram,
    last: Instant,
}

/// The result of the loops.
#[derive(Debug, Default)]
pub struct Tally {
    /// Times of the requests in nanoseconds.
    pub histogram: Histogram,
    /// Time from the start of the loops to the end of the last request.
    pub time: Duration,
}

impl Tally {
    /// Requests per second.
    pub fn rate(&self) -> f64 {
        self.histogram.total() as f64 / self.time.as_secs_f64().max(1e-9)
    }

    /// The result, with the fields that a client can know.
    pub fn measured(&self) -> Measured {
        let within = |per_mille| Duration::from_nanos(self.histogram.quantile(per_mille));
        Measured {
            requests: self.histogram.total(),
            time: self.time,
            p50: within(500),
            p99: within(990),
            p999: within(999),
            ..Measured::default()
        }
    }
}

impl Loops {
    /// `slots` loops over a disk of `bytes` bytes, for the time `turn` from now on. Clients with different seeds use
    /// different sequences of blocks.
    pub fn new(job: LoadJob, slots: usize, bytes: u64, turn: Duration, seed: u64) -> Self {
        let now = Instant::now();
        Self {
            job,
            began: now,
            end: now + turn,
            // The generator needs a state other than 0.
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            bytes,
            slots: vec![(now, false); slots],
            histogram: Histogram::default(),
            last: now,
        }
    }

    /// The first request of `slot`.
    pub fn begin(&mut self, slot: usize) -> Next {
        self.start(slot, Instant::now())
    }

    /// Records that the request of `slot` has ended, and returns the next request, if any.
    pub fn ended(&mut self, slot: usize) -> Option<Next> {
        let now = Instant::now();
        let (began, flushing) = self.slots[slot];
        if self.job == LoadJob::WriteFsync && !flushing {
            self.slots[slot].1 = true;
            return Some(Next::Flush);
        }
        let nanoseconds = now.duration_since(began).as_nanos();
        self.histogram
            .record(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
        self.last = now;
        (now < self.end).then(|| self.start(slot, now))
    }

    fn start(&mut self, slot: usize, now: Instant) -> Next {
        self.slots[slot] = (now, false);
        // Xorshift (Marsaglia 2003).
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        let offset = self.random % (self.bytes / BLOCK as u64) * BLOCK as u64;
        match self.job {
            LoadJob::Read => Next::Read(offset),
            LoadJob::Write | LoadJob::WriteFsync => Next::Write(offset),
        }
    }

    /// The result of the loops.
    pub fn tally(self) -> Tally {
        Tally {
            histogram: self.histogram,
            time: self.last - self.began,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::point::DISK_BYTES;
    use super::*;

    #[test]
    fn a_write_is_flushed_before_it_counts() {
        let mut loops = Loops::new(
            LoadJob::WriteFsync,
            2,
            DISK_BYTES,
            Duration::from_secs(60),
            1,
        );
        let Next::Write(first) = loops.begin(0) else {
            panic!("no write")
        };
        assert!(first < DISK_BYTES && first.is_multiple_of(BLOCK as u64));
        assert_eq!(loops.ended(0), Some(Next::Flush));
        assert!(matches!(loops.ended(0), Some(Next::Write(second)) if second != first));
        assert_eq!(loops.tally().histogram.total(), 1);
    }

    #[test]
    fn loops_end_with_their_time() {
        for (job, ended) in [
            (LoadJob::Read, [None, None]),
            (LoadJob::WriteFsync, [Some(Next::Flush), None]),
        ] {
            let mut loops = Loops::new(job, 1, DISK_BYTES, Duration::ZERO, 2);
            let reads = matches!(loops.begin(0), Next::Read(_));
            assert_eq!(reads, job == LoadJob::Read);
            let found: Vec<_> = (0..2).map_while(|_| Some(loops.ended(0))).take(2).collect();
            assert_eq!(found[0], ended[0]);
            assert!(found.contains(&None));
        }
    }
}
