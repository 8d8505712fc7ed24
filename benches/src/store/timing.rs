//! Closed loops of clients, timed.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use walvisor::commands::CommandError;

/// The times of some rounds of closed loops.
#[derive(Debug, Default)]
pub struct Timing {
    elapsed: Duration,
    latencies: Vec<Duration>,
}

impl Timing {
    /// Adds another round.
    pub fn add(&mut self, mut round: Self) {
        self.elapsed += round.elapsed;
        self.latencies.append(&mut round.latencies);
    }

    /// Steps per second; 0 if there are none.
    pub fn rate(&self) -> f64 {
        if self.latencies.is_empty() {
            return 0.0;
        }
        self.latencies.len() as f64 / self.elapsed.as_secs_f64()
    }

    /// The time in microseconds that a share `part` (0 to 1) of the steps stayed within.
    pub fn percentile_us(&mut self, part: f64) -> f64 {
        let last = self.latencies.len().saturating_sub(1);
        if self.latencies.is_empty() {
            return 0.0;
        }
        let at = (last as f64 * part).round() as usize;
        let (_, time, _) = self.latencies.select_nth_unstable(at);
        time.as_secs_f64() * 1e6
    }
}

/// Runs a thread per client, which takes steps until all clients together have taken `total`. A step returns its time. A
/// thread without further steps calls `leave`.
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
    std::thread::scope(|scope| {
        let threads: Vec<_> = clients
            .iter_mut()
            .map(|client| {
                scope.spawn(|| {
                    let mut latencies = Vec::with_capacity(room);
                    let mut ended = Ok(());
                    start.wait();
                    // Each thread reads the clock itself: a single reader could start late, and the loops would seem
                    // shorter than they were.
                    let began = Instant::now();
                    while !failed.load(Ordering::Relaxed)
                        && taken.fetch_add(1, Ordering::Relaxed) < total
                    {
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
                })
            })
            .collect();
        let ended = threads
            .into_iter()
            .map(|thread| thread.join().expect("a client's thread"))
            .collect::<Result<Vec<_>, _>>()?;
        let first = ended.iter().map(|(began, ..)| *began).min();
        let last = ended.iter().map(|(_, end, _)| *end).max();
        let mut timing = Timing {
            elapsed: first
                .zip(last)
                .map_or(Duration::ZERO, |(first, last)| last - first),
            latencies: Vec::with_capacity(total as usize),
        };
        for (_, _, mut latencies) in ended {
            timing.latencies.append(&mut latencies);
        }
        Ok(timing)
    })
}

/// Splits `total` over `rounds` as evenly as whole numbers allow.
pub fn shares(total: u64, rounds: u64) -> impl Iterator<Item = u64> {
    (0..rounds).map(move |round| total * (round + 1) / rounds - total * round / rounds)
}

#[cfg(test)]
mod tests {
    use walvisor::commands::CommandError;

    use super::*;

    #[test]
    fn clients_take_exactly_the_steps_asked_for() {
        let mut clients = [0u64; 3];
        let mut timing = closed_loops(
            &mut clients,
            100,
            |steps| {
                *steps += 1;
                Ok(Duration::from_micros(*steps))
            },
            |_| (),
        )
        .unwrap();
        assert_eq!(
            (clients.iter().sum::<u64>(), timing.latencies.len()),
            (100, 100)
        );
        assert!(timing.percentile_us(1.0) >= timing.percentile_us(0.5) && timing.rate() > 0.0);
    }

    #[test]
    fn an_error_stops_all() {
        let failing = |_: &mut ()| Err(CommandError::Failed("no".to_owned()));
        assert!(closed_loops(&mut [(), ()], 100, failing, |()| ()).is_err());
    }

    #[test]
    fn percentiles_and_shares() {
        let mut timing = Timing {
            elapsed: Duration::from_secs(1),
            latencies: (0..=100).rev().map(Duration::from_micros).collect(),
        };
        assert_eq!(
            (timing.percentile_us(0.5), timing.percentile_us(0.99)),
            (50.0, 99.0)
        );
        assert_eq!(Timing::default().percentile_us(0.5), 0.0);
        assert_eq!(shares(10, 4).collect::<Vec<_>>(), [2, 3, 2, 3]);
    }
}
