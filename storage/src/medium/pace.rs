//! An artificially slow medium, for benchmarks only: slow like a small cloud volume, with a limit
//! on operations per second and a latency for each, or with one write per record, like a store
//! without group commit.

use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use crate::medium::file::{AppendResult, AppendStats, Appender, Io, SyncScope};
use crate::sync::{self, Mutex};

/// Most bytes of one operation: clouds count a longer write as several.
const OPERATION_BYTES: usize = 256 << 10;
/// How long unused operations are kept, so that a thread that oversleeps a little loses none.
const KEPT: Duration = Duration::from_millis(10);

/// The delays of an artificially slow medium; threads that use the medium share them. For
/// benchmarks: a log has its own, see
/// [`StoreOptions::operations_per_second`](crate::StoreOptions::operations_per_second); a baseline
/// that is measured beside it charges the same.
#[derive(Debug)]
pub struct Pace {
    /// Time between two operations; zero without a limit.
    interval: Duration,
    latency: Duration,
    /// When the next operation may begin.
    next: Mutex<Instant>,
}

impl Pace {
    /// A medium of `operations_per_second` (`None`: no limit), each with `latency` added.
    pub fn new(operations_per_second: Option<NonZeroU32>, latency: Duration) -> Self {
        let interval =
            operations_per_second.map_or(Duration::ZERO, |n| Duration::from_secs(1) / n.get());
        Self {
            interval,
            latency,
            next: Mutex::new(sync::now()),
        }
    }

    /// Waits, before a write of `bytes` bytes (zero for none) and then `syncs` syncs, for as long
    /// as the slow medium would take beyond the real one. A write is an operation for each 256 KiB
    /// begun, a sync is one. The latency counts once for a write, however long, and once for each
    /// sync.
    ///
    /// # Panics
    /// If another thread panicked in here.
    pub fn charge(&self, bytes: usize, syncs: u32) {
        let calls = u32::from(bytes > 0) + syncs;
        if calls == 0 || (self.interval.is_zero() && self.latency.is_zero()) {
            return;
        }
        let now = sync::now();
        let operations = bytes.div_ceil(OPERATION_BYTES) as u32 + syncs;
        let mut next = self.next.lock().expect("pace");
        let begin = take(&mut next, now, self.interval, operations);
        drop(next);
        sync::sleep(begin.saturating_duration_since(now) + self.latency * calls);
    }
}

/// A medium without added delays.
impl Default for Pace {
    fn default() -> Self {
        Self::new(None, Duration::ZERO)
    }
}

/// Appends with added delays.
pub(crate) struct SlowAppender {
    /// The real appender.
    pub medium: Box<dyn Appender>,
    /// The delays of each write and each sync.
    pub pace: Pace,
    /// Time added to each sync.
    pub sync_latency: Duration,
    /// Each payload gets a write of its own.
    pub write_per_record: bool,
}

impl Appender for SlowAppender {
    fn append(&self, io: Io) -> AppendResult {
        match io {
            Io::Append {
                segment,
                offset,
                chunks,
                payloads,
                sync,
            } if self.write_per_record && payloads.len() > 1 => {
                let (mut from, mut at) = (0, offset);
                for payload in payloads.clone() {
                    // The last write also takes the chunks that follow the payloads.
                    let to = if payload + 1 == payloads.end {
                        chunks.len()
                    } else {
                        payload + 1
                    };
                    let part = chunks[from..to].to_vec();
                    let bytes: usize = part.iter().map(|chunk| chunk.len).sum();
                    let written = self.one(Io::Append {
                        segment: segment.clone(),
                        offset: at,
                        chunks: part,
                        payloads: 0..0,
                        sync: SyncScope::None,
                    });
                    if written.result.is_err() {
                        return written;
                    }
                    (from, at) = (to, at + bytes as u64);
                }
                // A durable last write does not cover the other writes, so sync the segment.
                let sync = match sync {
                    SyncScope::Write => SyncScope::Segments(vec![segment.clone()]),
                    other => other,
                };
                let synced = self.one(Io::Append {
                    segment,
                    offset,
                    chunks: Vec::new(),
                    payloads: 0..0,
                    sync,
                });
                AppendResult {
                    result: synced.result.map(|_| AppendStats {
                        writes: payloads.len() as u64,
                        cached: false,
                    }),
                    ..synced
                }
            }
            io => self.one(io),
        }
    }
}

impl SlowAppender {
    /// Carries out an operation with at most one write.
    fn one(&self, io: Io) -> AppendResult {
        let syncs = match &io {
            Io::Append { sync, .. } => sync.count(),
            _ => 0,
        };
        let written = io.written().map(|(_, _, chunks)| chunks.iter());
        let bytes = written.map_or(0, |chunks| chunks.map(|chunk| chunk.len).sum());
        self.pace.charge(bytes, syncs);
        let appended = self.medium.append(io);
        if !self.sync_latency.is_zero() && syncs > 0 {
            sync::sleep(self.sync_latency * syncs);
        }
        appended
    }
}

/// Takes this many operations, at least one, and returns when the last of them may begin.
fn take(next: &mut Instant, now: Instant, interval: Duration, operations: u32) -> Instant {
    let oldest = now.checked_sub(KEPT).unwrap_or(now);
    let begin = (*next).max(oldest) + interval * (operations - 1);
    *next = begin + interval;
    begin
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;

    #[test]
    fn operations_begin_one_interval_apart_and_what_is_unused_is_kept_for_a_while() {
        let interval = Duration::from_millis(5);
        let start = Instant::now() + Duration::from_secs(1);
        let mut next = start;
        let after = |at: Instant| (at - start).as_millis();
        // The first one starts at once, the others at the medium's rate, however fast they come.
        assert_eq!(after(take(&mut next, start, interval, 1)), 0);
        assert_eq!(after(take(&mut next, start, interval, 1)), 5);
        assert_eq!(after(take(&mut next, start, interval, 3)), 20);
        // After a long idle time, two operations are kept, not all.
        let rested = start + Duration::from_secs(60);
        let begins = [0; 4].map(|_| take(&mut next, rested, interval, 1));
        assert!(begins[1] < rested && begins[2] == rested && begins[3] == rested + interval);
        // Without a limit, no operation starts late.
        let mut next = start;
        assert!((0..1000).all(|_| take(&mut next, start, Duration::ZERO, 9) <= start));
    }

    #[test]
    fn a_write_and_each_sync_wait_for_their_latency() {
        let latency = Duration::from_millis(4);
        let pace = Pace::new(None, latency);
        for (bytes, syncs, calls) in [(1, 0, 1), (0, 1, 1), (1 << 20, 1, 2), (0, 0, 0)] {
            let began = Instant::now();
            pace.charge(bytes, syncs);
            assert!(began.elapsed() >= latency * calls);
        }
    }
}
