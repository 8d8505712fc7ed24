//! Closed loops of clients, timed.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use walvisor::commands::CommandError;

/// The times of closed loops.
#[derive(Debug, Default)]
pub struct Timing {
    elapsed: Duration,
    latencies: Vec<Duration>,
}

impl Timing {
    /// Half of the steps stayed within `p50_us`, 99 % within `p99_us`; `rate` is the key of the
    /// steps per second.
    pub fn figures(&mut self, rate: &str) -> Value {
        let per_s = self.latencies.len() as f64 / self.elapsed.as_secs_f64().max(1e-9);
        let (p50, p99) = (self.percentile_us(0.5), self.percentile_us(0.99));
        json!({ rate: per_s, "p50_us": p50, "p99_us": p99 })
    }

    /// The time in microseconds that a share `part` (0 to 1) of the steps stayed within.
    fn percentile_us(&mut self, part: f64) -> f64 {
        let last = self.latencies.len().saturating_sub(1);
        if self.latencies.is_empty() {
            return 0.0;
        }
        let at = (last as f64 * part).round() as usize;
        let (_, time, _) = self.latencies.select_nth_unstable(at);
        time.as_secs_f64() * 1e6
    }
}

/// Runs a thread per client, which takes steps until all clients together have taken `total`. A
/// step returns its time. A thread without further steps calls `leave`.
///
/// # Errors
/// The first error of a step; the other clients stop then.
pub fn closed_loops<C: Send>(
    clients: &mut [C],
    total: u64,
    step: impl Fn(&mut C) -> Result<Duration, CommandError> + Sync,
    leave: impl Fn(&mut C) + Sync,
) -> Result<Timing, CommandError> {
    let (taken, failed) = (AtomicU64::new(0), AtomicBool::new(false));
    let start = Barrier::new(clients.len());
    let room = 2 * total as usize / clients.len().max(1);
    let run = |client: &mut C| {
        let mut latencies = Vec::with_capacity(room);
        let mut ended = Ok(());
        start.wait();
        // Each thread reads the clock itself: a single reader could start late, and the loops would
        // seem shorter than they were.
        let began = Instant::now();
        while !failed.load(Ordering::Relaxed) && taken.fetch_add(1, Ordering::Relaxed) < total {
            match step(client) {
                Ok(time) => latencies.push(time),
                Err(error) => {
                    failed.store(true, Ordering::Relaxed);
                    ended = Err(error);
                }
            }
        }
        leave(client);
        ended.map(|()| (began, Instant::now(), latencies))
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = clients
            .iter_mut()
            .map(|client| scope.spawn(|| run(client)))
            .collect();
        let joined = threads
            .into_iter()
            .map(|thread| thread.join().expect("a client's thread"));
        let ended = joined.collect::<Result<Vec<_>, _>>()?;
        let first = ended.iter().map(|(began, ..)| *began).min();
        let last = ended.iter().map(|(_, end, _)| *end).max();
        let elapsed = first.zip(last).map(|(first, last)| last - first);
        Ok(Timing {
            elapsed: elapsed.unwrap_or_default(),
            latencies: ended
                .into_iter()
                .flat_map(|(.., latencies)| latencies)
                .collect(),
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_take_exactly_the_steps_asked_for() {
        let mut clients = [0u64; 3];
        let step = |steps: &mut u64| {
            *steps += 1;
            Ok(Duration::from_micros(*steps))
        };
        let timing = closed_loops(&mut clients, 100, step, |_| ()).unwrap();
        let steps = (clients.iter().sum::<u64>(), timing.latencies.len());
        assert_eq!(steps, (100, 100));
    }

    #[test]
    fn an_error_stops_all() {
        let failing = |_: &mut ()| Err(CommandError::Failed("no".to_owned()));
        assert!(closed_loops(&mut [(), ()], 100, failing, |()| ()).is_err());
    }

    #[test]
    fn half_of_the_steps_and_99_of_100_stay_within_their_percentiles() {
        let mut timing = Timing {
            elapsed: Duration::from_secs(1),
            latencies: (0..=100).rev().map(Duration::from_micros).collect(),
        };
        let figures = timing.figures("per_s");
        assert_eq!(
            figures,
            json!({ "per_s": 101.0, "p50_us": 50.0, "p99_us": 99.0 })
        );
        assert_eq!(Timing::default().figures("per_s")["p50_us"], 0.0);
    }
}
