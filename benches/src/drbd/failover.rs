//! Failover under load: the primary is killed, and the other machine takes over. It must have every commit whose FLUSH was
//! acknowledged.

use std::path::Path;
use std::time::{Duration, Instant};

use walvisor::commands::CommandError;

use super::pair::MachinePair;
use crate::report::{Cell, Section};
use crate::session::Session;

/// Clients of the load.
const CLIENTS: usize = 16;
/// Estimated time of a failover, including booting the machines.
const EXPECTED: Duration = Duration::from_secs(15);
/// Acknowledged commits before the network gets its delay, and from then to the first kill.
const COMMITS: u64 = 200;

/// How DRBD replicates.
#[derive(Clone, Copy, Debug)]
struct Protocol {
    name: &'static str,
    title: &'static str,
    /// The delay of the frames that the primary sends, in milliseconds.
    delay: u32,
}

/// A write completes when both disks have it.
const SYNCHRONOUS: Protocol = Protocol {
    name: "C",
    title: "C",
    delay: 2,
};
/// The control. A write completes when the primary's disk has it, and the frames of the last second are lost with the
/// primary.
const ASYNCHRONOUS: Protocol = Protocol {
    name: "A",
    title: "A (control)",
    delay: 1000,
};

/// The result of a failover.
#[derive(Default)]
struct Failover {
    /// Number of commits that were acknowledged before the kill.
    acknowledged: u64,
    /// How many of these the other machine has.
    present: u64,
    /// Time from the kill until the disk was open on the other machine.
    taken_over: Duration,
}

/// Failovers with each protocol.
pub struct Failovers {
    rows: Vec<(Protocol, usize, Vec<Failover>)>,
}

impl Failovers {
    /// Plans `rounds` failovers and a control.
    pub fn new(rounds: usize) -> Self {
        let rows = [(SYNCHRONOUS, rounds), (ASYNCHRONOUS, 1)];
        Self {
            rows: rows
                .map(|(protocol, rounds)| (protocol, rounds, Vec::new()))
                .into(),
        }
    }

    /// Estimated time.
    pub fn expected(&self) -> Duration {
        let rounds = self.rows.iter().map(|(_, rounds, _)| *rounds as u32);
        EXPECTED * rounds.sum::<u32>()
    }

    /// Makes all failovers, unless the user interrupts them.
    ///
    /// # Errors
    /// If a machine fails, or the log cannot be recovered.
    pub fn measure(&mut self, session: &Session, dir: &Path) -> Result<(), CommandError> {
        for (protocol, rounds, done) in &mut self.rows {
            for round in 0..*rounds {
                let what = format!("failover {}, protocol {}", round + 1, protocol.name);
                // Each kill comes at a different moment.
                let commits = COMMITS + 61 * round as u64;
                let one = session.step(&what, EXPECTED, || fail_over(*protocol, commits, dir))?;
                done.extend(one);
            }
        }
        Ok(())
    }

    /// The number of acknowledged commits that a failover lost with protocol C.
    pub fn lost_commits(&self) -> u64 {
        self.rows[0].2.iter().map(Failover::lost_commits).sum()
    }

    /// The results as a section.
    pub fn section(&self) -> Section {
        let mut section = Section::new(
            "drbd-failover",
            "The primary is killed under load, and the other machine takes over",
            &[
                "16 clients commit on the primary. Each prints the commit's number once its FLUSH is acknowledged. SIGKILL ends the whole \
                 machine; the other becomes the primary, mounts ext4 and opens the disk, which recovers the log. Of each client it must \
                 have exactly the first commits, to the last acknowledged one at least.",
                "The control shows that a lost commit is noticed: with protocol A the primary does not wait for the other machine, and \
                 the network delays by a second what it sends.",
            ],
            &[
                ("protocol", "protocol"),
                ("delay_ms", "delay, ms"),
                ("clients", "clients"),
                ("kills", "kills"),
                ("acknowledged", "acknowledged"),
                ("present", "present"),
                ("lost", "lost"),
                ("taken_over_s", "taken over, s"),
            ],
        );
        for (protocol, _, done) in self.rows.iter().filter(|row| !row.2.is_empty()) {
            let sum = |figure: fn(&Failover) -> u64| Cell::count(done.iter().map(figure).sum());
            let times: Vec<f64> = done
                .iter()
                .map(|one| one.taken_over.as_secs_f64())
                .collect();
            section.table.rows.push(vec![
                Cell::text(protocol.title),
                Cell::count(protocol.delay.into()),
                Cell::count(CLIENTS as u64),
                Cell::count(done.len() as u64),
                sum(|one| one.acknowledged),
                sum(|one| one.present),
                sum(Failover::lost_commits),
                Cell::of(&times, 1),
            ]);
        }
        section
    }
}

impl Failover {
    fn lost_commits(&self) -> u64 {
        self.acknowledged - self.present
    }
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

/// Kills the primary once `commits` more commits were acknowledged after the network got its delay.
fn fail_over(protocol: Protocol, commits: u64, dir: &Path) -> Result<Failover, CommandError> {
    let mut pair = MachinePair::start(dir, protocol.name)?;
    pair.begin()?;
    let mut acknowledged = Commits([0; CLIENTS]);
    let mut said = pair.first.run(&format!("load {CLIENTS}"))?;
    while acknowledged.sum() < COMMITS {
        said.push(pair.first.console.next_line()?);
        for line in said.drain(..) {
            acknowledged.read("acknowledged", &line)?;
        }
    }
    for line in pair.first.run(&format!("delay {}", protocol.delay))? {
        acknowledged.read("acknowledged", &line)?;
    }
    let end = acknowledged.sum() + commits;
    while acknowledged.sum() < end {
        let line = pair.first.console.next_line()?;
        acknowledged.read("acknowledged", &line)?;
    }
    let killed = Instant::now();
    for line in pair.first.console.kill() {
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
    Ok(Failover {
        acknowledged: acknowledged.sum(),
        present: both
            .map(|(acknowledged, found)| found.min(*acknowledged))
            .sum(),
        taken_over,
    })
}
