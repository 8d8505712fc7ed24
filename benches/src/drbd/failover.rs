//! Failover under load: the primary is killed, and the other machine takes over. It must have every
//! commit whose FLUSH was acknowledged.

use std::path::Path;
use std::time::Instant;

use serde_json::json;
use walvisor::commands::CommandError;

use super::pair::MachinePair;
use crate::bench::Turn;

/// Clients of the load.
const CLIENTS: usize = 16;
/// Acknowledged commits before the network gets its delay, and from then to the first kill.
const COMMITS: u64 = 200;

/// Kills the primary under load, at a different moment in each `round`. DRBD replicates with
/// `protocol`, and the network delays what the primary sends.
///
/// # Errors
/// If a machine fails, or the log cannot be recovered.
pub fn fail_over(
    protocol: &str,
    delay_ms: u64,
    round: u64,
    dir: &Path,
) -> Result<Turn, CommandError> {
    let mut pair = MachinePair::start(dir, protocol)?;
    pair.begin()?;
    let mut acknowledged = Commits([0; CLIENTS]);
    let mut said = pair.first.run(&format!("load {CLIENTS}"))?;
    while acknowledged.sum() < COMMITS {
        said.push(pair.first.next_line()?);
        for line in said.drain(..) {
            acknowledged.read("acknowledged", &line)?;
        }
    }
    for line in pair.first.run(&format!("delay {delay_ms}"))? {
        acknowledged.read("acknowledged", &line)?;
    }
    let end = acknowledged.sum() + COMMITS + 61 * round;
    while acknowledged.sum() < end {
        let line = pair.first.next_line()?;
        acknowledged.read("acknowledged", &line)?;
    }
    let killed = Instant::now();
    for line in pair.first.kill() {
        // The last line may be incomplete.
        let _ = acknowledged.read("acknowledged", &line);
    }
    pair.second.run("take_over")?;
    let mut found = Commits([0; CLIENTS]);
    for line in pair.second.run(&format!("found {CLIENTS}"))? {
        found.read("found", &line)?;
    }
    let taken_over = killed.elapsed();
    let both = acknowledged.0.iter().zip(found.0);
    let present: u64 = both
        .map(|(acknowledged, found)| found.min(*acknowledged))
        .sum();
    Ok(Turn(json!({
        "acknowledged": acknowledged.sum(),
        "present": present,
        "lost": acknowledged.sum() - present,
        "taken_over_s": taken_over.as_secs_f64(),
    })))
}

/// The last commit of each client.
struct Commits([u64; CLIENTS]);

impl Commits {
    /// Reads a line `WORD CLIENT NUMBER`; any other line is skipped.
    fn read(&mut self, word: &str, line: &str) -> Result<(), CommandError> {
        let mut words = line.split(' ');
        match words.next() {
            Some("failed:") => Err(CommandError::Failed(format!("the load: {line}"))),
            Some(first) if first == word => {
                let mut number = || words.next()?.parse::<u64>().ok();
                let found = number().zip(number()).and_then(|(client, number)| {
                    let last = self.0.get_mut(client as usize)?;
                    *last = number;
                    Some(())
                });
                found.ok_or_else(|| CommandError::Failed(format!("no commit: {line}")))
            }
            _ => Ok(()),
        }
    }

    fn sum(&self) -> u64 {
        self.0.iter().sum()
    }
}
