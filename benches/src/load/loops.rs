//! The closed loops of a client in this process: they choose each request, and time it.

use std::time::{Duration, Instant};

use serde::Deserialize;
use serde_json::{Value, json};
use walvisor_guest::contract::LoadKind;
use walvisor_guest::histogram::Histogram;
use walvisor_testkit::Random;

use crate::blocks::BLOCK;

/// The job of a closed loop, on random 4 KiB blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub enum LoadJob {
    /// Reads.
    #[serde(rename = "randread")]
    Read,
    /// Writes.
    #[serde(rename = "randwrite")]
    Write,
    /// A write, then a FLUSH.
    #[serde(rename = "randwrite+fsync")]
    WriteFsync,
}

impl LoadJob {
    /// The job as a load of the embedded guest.
    pub fn kind(self) -> LoadKind {
        match self {
            Self::Read => LoadKind::RandRead,
            Self::Write => LoadKind::RandWrite,
            Self::WriteFsync => LoadKind::RandWriteFlush,
        }
    }
}

/// The requests of a loop, at random offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct Work {
    /// Bytes of each read and write.
    pub block: usize,
    /// Percentage of reads; the other requests are writes.
    pub reads_per_cent: u64,
    /// Whether a FLUSH follows each write, and is timed with it.
    pub flush: bool,
    /// Whether 80 % of the requests go to every fifth block, like the hot pages of a database.
    /// Otherwise all blocks are equally likely.
    pub hot: bool,
}

impl From<LoadJob> for Work {
    fn from(job: LoadJob) -> Self {
        Self {
            block: BLOCK,
            reads_per_cent: if job == LoadJob::Read { 100 } else { 0 },
            flush: job == LoadJob::WriteFsync,
            hot: false,
        }
    }
}

/// The next request of a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextRequest {
    /// Read the block at this byte.
    Read(u64),
    /// Write the block at this byte.
    Write(u64),
    /// Make the loop's last write durable.
    Flush,
}

/// Concurrent loops, one per slot, that run until the turn is over.
#[derive(Debug)]
pub struct Loops {
    work: Work,
    began: Instant,
    end: Instant,
    random: Random,
    /// Bytes of the disk.
    bytes: u64,
    slots: Vec<Slot>,
    tally: Tally,
}

/// What a loop is waiting for.
#[derive(Clone, Copy, Debug)]
struct Slot {
    began: Instant,
    writes: bool,
    /// Whether the FLUSH of its write is in flight.
    flushing: bool,
}

/// Statistics of the requests that completed in one second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SecondStats {
    /// Number of requests.
    pub requests: u64,
    /// The longest time of a request.
    pub longest: Duration,
}

impl SecondStats {
    /// Adds requests that ended in the same second.
    fn add(&mut self, requests: u64, longest: Duration) {
        self.requests += requests;
        self.longest = self.longest.max(longest);
    }
}

/// The result of the loops.
#[derive(Debug, Default)]
pub struct Tally {
    /// Times of the requests in nanoseconds.
    pub histogram: Histogram,
    /// Time from the start of the loops to the end of the last request.
    pub time: Duration,
    /// The longest time of a request.
    pub longest: Duration,
    /// The seconds of the turn.
    pub seconds: Vec<SecondStats>,
    /// Bytes of the writes that ended.
    pub written_bytes: u64,
}

impl Tally {
    /// Adds the result of loops that ran at the same time.
    pub fn add(&mut self, other: &Self) {
        self.histogram.add(&other.histogram);
        self.time = self.time.max(other.time);
        self.longest = self.longest.max(other.longest);
        let seconds = self.seconds.len().max(other.seconds.len());
        self.seconds.resize(seconds, SecondStats::default());
        for (second, more) in self.seconds.iter_mut().zip(&other.seconds) {
            second.add(more.requests, more.longest);
        }
        self.written_bytes += other.written_bytes;
    }

    /// Requests per second.
    pub fn rate(&self) -> f64 {
        self.histogram.total() as f64 / self.time.as_secs_f64().max(1e-9)
    }

    /// The figures of the result.
    pub fn figures(&self) -> Value {
        let within =
            [500, 990, 999].map(|part| Duration::from_nanos(self.histogram.quantile(part)));
        figures(self.histogram.total(), self.time, within)
    }
}

/// The figures of `requests` of 4 KiB in `time`, half of which, 99 % and 99.9 % of which stayed
/// `within` these times.
pub fn figures(requests: u64, time: Duration, within: [Duration; 3]) -> Value {
    let iops = requests as f64 / time.as_secs_f64().max(1e-9);
    let [p50, p99, p999] = within.map(|time| time.as_secs_f64() * 1e6);
    json!({
        "requests": requests,
        "iops": iops,
        "mb_per_s": iops * BLOCK as f64 / 1e6,
        "p50_us": p50,
        "p99_us": p99,
        "p999_us": p999,
    })
}

impl Loops {
    /// `slots` loops over a disk of `bytes` bytes, for the time `turn` from now on. Clients with
    /// different seeds use different sequences of blocks.
    pub fn new(work: impl Into<Work>, slots: usize, bytes: u64, turn: Duration, seed: u64) -> Self {
        let now = Instant::now();
        let slot = Slot {
            began: now,
            writes: false,
            flushing: false,
        };
        Self {
            work: work.into(),
            began: now,
            end: now + turn,
            random: Random(seed),
            bytes,
            slots: vec![slot; slots],
            tally: Tally {
                seconds: vec![SecondStats::default(); turn.as_secs() as usize],
                ..Tally::default()
            },
        }
    }

    /// Number of loops.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Bytes of each read and write.
    pub fn block(&self) -> usize {
        self.work.block
    }

    /// The first request of `slot`.
    pub fn begin(&mut self, slot: usize) -> NextRequest {
        self.start(slot, Instant::now())
    }

    /// Records that the request of `slot` has completed, and returns the next one, if any.
    pub fn complete(&mut self, slot: usize) -> Option<NextRequest> {
        let now = Instant::now();
        let Slot {
            began,
            writes,
            flushing,
        } = self.slots[slot];
        if self.work.flush && writes && !flushing {
            self.slots[slot].flushing = true;
            return Some(NextRequest::Flush);
        }
        let took = now.duration_since(began);
        let tally = &mut self.tally;
        tally
            .histogram
            .record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        tally.time = now - self.began;
        tally.longest = tally.longest.max(took);
        if let Some(second) = tally.seconds.get_mut(tally.time.as_secs() as usize) {
            second.add(1, took);
        }
        if writes {
            tally.written_bytes += self.work.block as u64;
        }
        (now < self.end).then(|| self.start(slot, now))
    }

    fn start(&mut self, slot: usize, now: Instant) -> NextRequest {
        let writes = self.random.below(100) >= self.work.reads_per_cent;
        self.slots[slot] = Slot {
            began: now,
            writes,
            flushing: false,
        };
        let blocks = self.bytes / self.work.block as u64;
        let block = if self.work.hot && self.random.below(5) != 0 {
            self.random.below(blocks / 5) * 5
        } else {
            self.random.below(blocks)
        };
        let offset = block * self.work.block as u64;
        if writes {
            NextRequest::Write(offset)
        } else {
            NextRequest::Read(offset)
        }
    }

    /// The result of the loops.
    pub fn tally(self) -> Tally {
        self.tally
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK_BYTES: u64 = 64 << 20;

    #[test]
    fn a_write_is_flushed_before_it_counts() {
        let mut loops = Loops::new(
            LoadJob::WriteFsync,
            2,
            DISK_BYTES,
            Duration::from_secs(60),
            1,
        );
        let NextRequest::Write(first) = loops.begin(0) else {
            panic!("no write")
        };
        assert!(first < DISK_BYTES && first.is_multiple_of(BLOCK as u64));
        assert_eq!(loops.complete(0), Some(NextRequest::Flush));
        assert!(matches!(loops.complete(0), Some(NextRequest::Write(second)) if second != first));
        assert_eq!(loops.tally().histogram.total(), 1);
    }

    #[test]
    fn loops_end_with_their_time() {
        for (job, ended) in [
            (LoadJob::Read, [None, None]),
            (LoadJob::WriteFsync, [Some(NextRequest::Flush), None]),
        ] {
            let mut loops = Loops::new(job, 1, DISK_BYTES, Duration::ZERO, 2);
            let reads = matches!(loops.begin(0), NextRequest::Read(_));
            assert_eq!(reads, job == LoadJob::Read);
            let found: Vec<_> = (0..2)
                .map_while(|_| Some(loops.complete(0)))
                .take(2)
                .collect();
            assert_eq!(found[0], ended[0]);
            assert!(found.contains(&None));
        }
    }

    #[test]
    fn a_tally_has_every_second_and_the_bytes_written() {
        let mut loops = Loops::new(LoadJob::Write, 1, DISK_BYTES, Duration::from_secs(2), 3);
        for _ in 0..5 {
            loops.begin(0);
            loops.complete(0);
        }
        let mut tally = loops.tally();
        let second = |requests, longest| SecondStats {
            requests,
            longest: Duration::from_secs(longest),
        };
        let other = Tally {
            seconds: vec![second(1, 7), second(2, 0), second(3, 0)],
            longest: Duration::from_secs(7),
            ..Tally::default()
        };
        tally.add(&other);
        let requests = tally.seconds.iter().map(|second| second.requests);
        assert_eq!(requests.sum::<u64>(), 5 + 6);
        assert_eq!((tally.seconds.len(), tally.longest), (3, other.longest));
        let waits: Vec<_> = tally.seconds.iter().map(|second| second.longest).collect();
        assert_eq!(waits, [other.longest, Duration::ZERO, Duration::ZERO]);
        assert_eq!(tally.written_bytes, 5 * BLOCK as u64);
    }

    #[test]
    fn hot_blocks_get_four_requests_of_five_and_reads_are_seven_of_ten() {
        let work = Work {
            block: 16 << 10,
            reads_per_cent: 70,
            flush: false,
            hot: true,
        };
        let mut loops = Loops::new(work, 1, DISK_BYTES, Duration::from_secs(60), 4);
        let (mut reads, mut hot) = (0, 0);
        for _ in 0..10_000 {
            let (offset, read) = match loops.begin(0) {
                NextRequest::Read(offset) => (offset, true),
                NextRequest::Write(offset) => (offset, false),
                NextRequest::Flush => panic!("no FLUSH was wanted"),
            };
            assert!(offset.is_multiple_of(16 << 10) && offset < DISK_BYTES);
            reads += u32::from(read);
            hot += u32::from((offset >> 14).is_multiple_of(5));
        }
        // A fifth of the requests that go anywhere reach a hot block too.
        assert!((6_700..7_300).contains(&reads), "{reads}");
        assert!((8_100..8_700).contains(&hot), "{hot}");
    }
}
