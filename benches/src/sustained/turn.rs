//! One turn: a side starts its daemons, the clients do their job, and the daemons end.

use std::net::Shutdown;
use std::path::Path;
use std::time::Duration;

use walvisor::commands::CommandError;

use super::job::Job;
use super::medium::{Place, Traffic};
use super::side::Side;
use crate::load::loops::{Loops, Tally};
use crate::load::nbd::NbdClient;
use crate::session::Session;

/// The result of a turn.
#[derive(Debug)]
pub struct Turn {
    /// What the clients saw.
    pub tally: Tally,
    /// The time from SIGTERM until the last daemon has ended.
    pub close: Duration,
    /// What reached the device, from the start of the daemons to their end.
    pub traffic: Traffic,
}

/// The rounds of a job: the turns of each side, in the order of [`Side::ALL`].
pub struct Row {
    pub job: Job,
    /// The sides that take turns.
    pub sides: Vec<Side>,
    pub turns: [Vec<Turn>; Side::ALL.len()],
}

impl Turn {
    /// Requests of each second.
    pub fn seconds(&self) -> Vec<f64> {
        let seconds = self.tally.seconds.iter();
        seconds.map(|second| second.requests as f64).collect()
    }

    /// The longest wait of each second, in milliseconds.
    pub fn waits_ms(&self) -> Vec<f64> {
        let seconds = self.tally.seconds.iter();
        seconds
            .map(|second| second.longest.as_secs_f64() * 1e3)
            .collect()
    }

    /// The median of the requests per second.
    pub fn median(&self) -> f64 {
        median(&sort(self.seconds()))
    }

    /// The median over the slowest tenth of the seconds.
    pub fn worst_tenth(&self) -> f64 {
        let seconds = sort(self.seconds());
        median(&seconds[..seconds.len().div_ceil(10)])
    }

    /// The slowest second as a fraction of the median one.
    pub fn slowest_share(&self) -> f64 {
        let slowest = self.seconds().into_iter().fold(f64::INFINITY, f64::min);
        slowest / self.median().max(1.0)
    }

    /// Requests per second if the time to close counts too, in which the side finishes its work.
    pub fn with_close(&self) -> f64 {
        let time = self.tally.time + self.close;
        self.tally.histogram.total() as f64 / time.as_secs_f64().max(1e-9)
    }

    /// The time that `per_mille` of 1000 requests stayed within, in microseconds.
    pub fn within_us(&self, per_mille: u64) -> f64 {
        self.tally.histogram.quantile(per_mille) as f64 / 1e3
    }

    /// A count of the device per byte that the clients wrote.
    pub fn each_byte(&self, count: u64) -> f64 {
        count as f64 / self.tally.written_bytes.max(1) as f64
    }
}

fn sort(mut values: Vec<f64>) -> Vec<f64> {
    values.sort_by(f64::total_cmp);
    values
}

fn median(sorted: &[f64]) -> f64 {
    sorted.get(sorted.len() / 2).copied().unwrap_or(0.0)
}

/// Runs one turn. The images must exist.
///
/// # Errors
/// If a daemon does not start, a request fails, or a daemon ends with an error.
pub fn measure(
    place: &Place,
    sockets: &Path,
    (side, job): (Side, Job),
    time: Duration,
    session: &Session,
) -> Result<Turn, CommandError> {
    let before = place.traffic()?;
    let served = side.serve(job.disks(), &place.images(), sockets)?;
    let tally = drive(sockets, job, place.disk_bytes(), time, session);
    if session.interrupted() || tally.is_err() {
        served.kill();
        return Err(tally
            .err()
            .unwrap_or_else(|| CommandError::Failed("interrupted".to_owned())));
    }
    let (close, moved) = served.end(session)?;
    let traffic = match (place.traffic()?, before) {
        (Some(after), Some(before)) => after.since(before),
        _ => moved,
    };
    Ok(Turn {
        tally: tally?,
        close,
        traffic,
    })
}

/// Runs the clients, each in a thread of its own. An interrupt ends them at once, even those that wait for a reply.
fn drive(
    sockets: &Path,
    job: Job,
    bytes: u64,
    time: Duration,
    session: &Session,
) -> Result<Tally, CommandError> {
    let failed = |error: std::io::Error| CommandError::Failed(format!("{}: {error}", job.title()));
    let mut clients = Vec::new();
    for disk in 0..job.disks() {
        let socket = sockets.join(format!("disk-{disk}"));
        for _ in 0..job.connections() {
            clients.push(NbdClient::connect(&socket, "disk").map_err(failed)?.0);
        }
    }
    let streams: Result<Vec<_>, _> = clients.iter().map(NbdClient::socket).collect();
    let streams = streams.map_err(failed)?;
    let tallies: Vec<std::io::Result<Tally>> = std::thread::scope(|scope| {
        let threads: Vec<_> = (1..)
            .zip(clients)
            .map(|(seed, client)| {
                scope.spawn(move || {
                    client.drive(Loops::new(job.work(), job.depth(), bytes, time, seed))
                })
            })
            .collect();
        while !threads
            .iter()
            .all(std::thread::ScopedJoinHandle::is_finished)
        {
            std::thread::sleep(Duration::from_millis(20));
            if session.interrupted() {
                for stream in &streams {
                    // Fails if the server has closed it, which is just as good.
                    let _ = stream.shutdown(Shutdown::Both);
                }
            }
        }
        let joined = threads.into_iter().map(|thread| thread.join());
        joined
            .map(|done| done.expect("a client's thread"))
            .collect()
    });
    let mut all = Tally::default();
    for tally in tallies {
        all.add(&tally.map_err(failed)?);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::loops::SecondStats;

    #[test]
    fn the_worst_seconds_are_reported_next_to_the_median() {
        let mut seconds = vec![100; 18];
        seconds.extend([10, 20]);
        let seconds = seconds.into_iter().map(|requests| SecondStats {
            requests,
            ..SecondStats::default()
        });
        let mut tally = Tally {
            seconds: seconds.collect(),
            time: Duration::from_secs(20),
            written_bytes: 4000,
            ..Tally::default()
        };
        (0..1830).for_each(|_| tally.histogram.record(1000));
        let turn = Turn {
            tally,
            close: Duration::from_secs(10),
            traffic: Traffic::default(),
        };
        assert_eq!((turn.median(), turn.worst_tenth()), (100.0, 20.0));
        assert_eq!((turn.slowest_share(), turn.with_close()), (0.1, 61.0));
        assert_eq!(turn.each_byte(6000), 1.5);
    }
}
