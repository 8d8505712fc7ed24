//! The matrix: what a commit costs, by the link between the machines and by the number of clients.

use std::path::Path;
use std::time::Duration;

use walvisor::commands::CommandError;
use walvisor_storage::CommitWait;

use super::pair::{Machine, MachinePair};
use crate::commit::cell::{CommitCell, curve, plan, select_every};
use crate::commit::latency::{COLUMNS, PlotLine, rates, series};
use crate::report::{Cell, Section};
use crate::session::Session;
use crate::store::commit::{CommitPlan, CommitReport, Switch};

/// The round trip in the published source, and the rate that it reports without grouping, for any number of clients.
const SOURCE: (u32, f64) = (4, 250.0);
/// Time of a cell besides its commits: creating the log and removing it.
const OVERHEAD: Duration = Duration::from_millis(900);
/// Time to boot and connect the machines.
const BOOT: Duration = Duration::from_secs(8);

/// What replicates the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Link {
    /// Nothing: a disk of the first machine.
    None,
    /// DRBD without its other machine.
    Disconnected,
    /// DRBD with a round trip of that many milliseconds; 0 without a delay.
    RoundTrip(u32),
}

impl Link {
    const ALL: [Self; 7] = [
        Self::None,
        Self::Disconnected,
        Self::RoundTrip(0),
        Self::RoundTrip(2),
        Self::RoundTrip(4),
        Self::RoundTrip(10),
        Self::RoundTrip(20),
    ];
    const QUICK: [Self; 2] = [Self::RoundTrip(4), Self::RoundTrip(20)];

    fn name(self) -> String {
        match self {
            Self::None => "no DRBD".to_owned(),
            Self::Disconnected => "disconnected".to_owned(),
            Self::RoundTrip(0) => "RTT < 1 ms".to_owned(),
            Self::RoundTrip(milliseconds) => format!("RTT {milliseconds} ms"),
        }
    }

    /// The delay of the network, there and back, in milliseconds.
    fn delay(self) -> f64 {
        match self {
            Self::None | Self::Disconnected => 0.0,
            Self::RoundTrip(milliseconds) => milliseconds.into(),
        }
    }

    /// The same, if there is a delay.
    fn round_trip(self) -> Option<Duration> {
        match self {
            Self::RoundTrip(milliseconds @ 1..) => Some(Duration::from_millis(milliseconds.into())),
            _ => None,
        }
    }

    /// Estimated time of a sync.
    fn sync(self) -> Duration {
        self.round_trip().unwrap_or_default() + Duration::from_micros(1200)
    }
}

/// A line of the matrix.
struct Row {
    link: Link,
    /// Round trips right before each round.
    pings: Vec<Ping>,
    /// Pairs for each number of clients: group commit off, on.
    cells: Vec<CommitCell>,
}

/// The matrix, measured in rounds, each on new machines.
pub struct Matrix {
    rows: Vec<Row>,
    rounds: usize,
}

impl Matrix {
    /// Plans all of it, or only a part if `quick`.
    pub fn new(quick: bool, rounds: usize) -> Self {
        let (links, clients): (&[Link], &[u16]) = if quick {
            (&Link::QUICK, &[1, 8])
        } else {
            (&Link::ALL, &[1, 2, 4, 8, 16, 32, 64])
        };
        let seconds = if quick { 0.7 } else { 2.5 };
        let cells = |link: Link| {
            let pair = move |&clients: &u16| {
                let each = (seconds / link.sync().as_secs_f64()) as u64;
                let on = CommitPlan {
                    wait: CommitWait::default(),
                    ..plan(clients, (each * u64::from(clients)).min(6000))
                };
                let off = CommitPlan {
                    group: Switch::Off,
                    commits: each.max(2 * u64::from(clients)),
                    ..on
                };
                [off, on].map(CommitCell::new)
            };
            clients.iter().flat_map(pair).collect()
        };
        let row = |&link: &Link| Row {
            link,
            pings: Vec::new(),
            cells: cells(link),
        };
        Self {
            rows: links.iter().map(row).collect(),
            rounds,
        }
    }

    /// Estimated time.
    pub fn expected(&self) -> Duration {
        let cells = self.rows.iter().flat_map(|row| {
            let cells = row.cells.iter();
            cells.map(|cell| OVERHEAD + commits_take(row.link, &cell.plan))
        });
        (BOOT + cells.sum()) * self.rounds as u32
    }

    /// Measures all rounds, unless the user interrupts them.
    ///
    /// # Errors
    /// If a machine fails, or the round trip is shorter than it should be.
    pub fn measure(&mut self, session: &Session, dir: &Path) -> Result<(), CommandError> {
        for round in 1..=self.rounds {
            let started = session.step("two machines boot", BOOT, || {
                let mut pair = MachinePair::start(dir, "C")?;
                pair.begin()?;
                Ok(pair)
            })?;
            let Some(mut pair) = started else {
                return Ok(());
            };
            // After the row without its other machine the disks differ.
            let (last, others): (Vec<_>, Vec<_>) = self
                .rows
                .iter_mut()
                .partition(|row| row.link == Link::Disconnected);
            for row in others.into_iter().chain(last) {
                let what = format!("{}, round {round} of {}", row.link.name(), self.rounds);
                if session.interrupted() {
                    return Ok(());
                }
                row.prepare(&mut pair)?;
                for cell in &mut row.cells {
                    let expected = OVERHEAD + commits_take(row.link, &cell.plan);
                    let what = format!("{what}: {} clients", cell.plan.clients);
                    let report = session.step(&what, expected, || {
                        commit(&mut pair.first, row.link, &cell.plan)
                    })?;
                    cell.rounds.extend(report);
                }
                row.verify(&mut pair)?;
            }
        }
        Ok(())
    }

    /// The results as a section.
    pub fn section(&self) -> Section {
        let mut section = Section::new(
            "drbd",
            "Commits on a disk that DRBD replicates: MySQL 5.6's group commit under DRBD (2012)",
            &[
                "The source: a disk that DRBD copies to a second machine before a write completes (protocol C), and a network with a \
                 delay. Without groups 1/RTT, 250 commits a second at 4 ms, however many clients there were; with group commit \
                 throughput grew with the clients.",
                "Here: two machines in user-mode Linux, DRBD 8.4 with protocol C, half of the round trip S as a netem delay at each end, \
                 disk and log on ext4 on /dev/drbd0. A commit is a 4 KiB write and its FLUSH. Off: 1/S at best. On, with the adaptive \
                 wait: N/S. Each machine has one emulated processor, which limits the rate of many clients.",
                "ping: 20 round trips right before the row is measured. A round trip shorter than S ends the run.",
            ],
            &[
                &[
                    ("link", "link"),
                    ("ping_shortest_ms", "ping: shortest, ms"),
                    ("ping_mean_ms", "mean"),
                ],
                &COLUMNS[..],
                &[
                    ("on_ideal_per_s", "N/S"),
                    ("gain", "on/off"),
                    ("source_off_per_s", "source: off"),
                ],
            ]
            .concat(),
        );
        let lines: Vec<PlotLine> = self
            .rows
            .iter()
            .map(|row| PlotLine {
                name: row.link.name(),
                begin: vec![
                    Cell::text(row.link.name()),
                    row.pings(|ping| ping.shortest),
                    row.pings(|ping| ping.mean),
                ],
                latency: row.link.round_trip(),
                cells: &row.cells,
            })
            .collect();
        for (row, line) in self.rows.iter().zip(&lines) {
            let slow = row
                .pings
                .iter()
                .map(|ping| ping.shortest - row.link.delay() - 1.0);
            if slow.fold(0.0, f64::max) > 0.0 {
                section.notes.push(format!(
                    "{}: no ping was that fast: the machine was busy.",
                    row.link.name()
                ));
            }
            let source = match row.link {
                Link::RoundTrip(milliseconds) if milliseconds == SOURCE.0 => {
                    Cell::Number(SOURCE.1, 0)
                }
                _ => Cell::None,
            };
            let measured = row.cells.chunks_exact(2).map(|pair| {
                let rounds = pair.iter().map(|cell| cell.rounds.len());
                rounds.max() > Some(0)
            });
            for (mut cells, measured) in line.rows(|clients| clients).zip(measured) {
                if measured {
                    cells.push(source.clone());
                    section.table.rows.push(cells);
                }
            }
        }
        let [mut off, mut on] = [0, 1].map(|at| series(&lines, at));
        let link = Link::RoundTrip(SOURCE.0);
        if let Some(row) = self.rows.iter().find(|row| row.link == link) {
            let cells: Vec<&CommitCell> = select_every(&row.cells, 2, 0);
            let name = format!("source at {} ms", SOURCE.0);
            off.push(curve(&name, &cells, |_| SOURCE.1));
            let name = format!("ideal at {} ms: N/S", SOURCE.0);
            on.push(curve(&name, &cells, |clients| clients * SOURCE.1));
        }
        section.plots = vec![
            rates("drbd-on", "Under DRBD: group commit", on),
            rates("drbd-off", "Under DRBD: a sync for each FLUSH", off),
        ];
        section
    }
}

impl Row {
    /// One figure of the pings of each round.
    fn pings(&self, figure: fn(&Ping) -> f64) -> Cell {
        Cell::of(&self.pings.iter().map(figure).collect::<Vec<_>>(), 2)
    }

    /// Sets up the link of this row, and verifies its round trip.
    fn prepare(&mut self, pair: &mut MachinePair) -> Result<(), CommandError> {
        match self.link {
            Link::None => {
                pair.first.run("mkdir plain && format /dev/ubdb plain")?;
            }
            Link::Disconnected => {
                pair.first.run("drbd disconnect r0")?;
            }
            Link::RoundTrip(_) => {
                let asked = self.link.delay();
                pair.delay(asked / 2.0)?;
                let ping = Ping::measure(&mut pair.first)?;
                if ping.shortest < asked {
                    return Err(CommandError::Failed(format!(
                        "{}: a ping took {} ms: the delay is not in force",
                        self.link.name(),
                        ping.shortest
                    )));
                }
                self.pings.push(ping);
            }
        }
        Ok(())
    }

    /// Checks that the link was up during the whole row.
    fn verify(&self, pair: &mut MachinePair) -> Result<(), CommandError> {
        let command = match self.link {
            Link::None => "umount plain",
            Link::Disconnected => "state StandAlone",
            Link::RoundTrip(_) => "state Connected",
        };
        pair.first.run(command).map(drop)
    }
}

/// Round trips to the other machine, in milliseconds.
#[derive(Clone, Copy)]
struct Ping {
    shortest: f64,
    mean: f64,
}

impl Ping {
    fn measure(machine: &mut Machine) -> Result<Self, CommandError> {
        let said = machine.run("round_trip")?;
        let times = said.iter().find_map(|line| {
            let (shortest, mean) = line.strip_prefix("rtt ")?.split_once(' ')?;
            let (shortest, mean) = (shortest.parse().ok()?, mean.parse().ok()?);
            Some(Self { shortest, mean })
        });
        times.ok_or_else(|| CommandError::Failed("ping printed no round trips".to_owned()))
    }
}

/// Estimated time of a cell's commits.
fn commits_take(link: Link, plan: &CommitPlan) -> Duration {
    let served = match plan.group {
        Switch::Off => 1.0,
        // More clients need more processor time.
        Switch::On => f64::from(plan.clients.min(16)),
    };
    link.sync().mul_f64(plan.commits as f64 / served)
}

/// Measures a cell in the machine.
fn commit(
    machine: &mut Machine,
    link: Link,
    plan: &CommitPlan,
) -> Result<CommitReport, CommandError> {
    let (dir, group) = match (link, plan.group) {
        (Link::None, Switch::Off) => ("plain", "off"),
        (Link::None, Switch::On) => ("plain", "on"),
        (_, Switch::Off) => ("disk", "off"),
        (_, Switch::On) => ("disk", "on"),
    };
    let (clients, commits) = (plan.clients, plan.commits);
    let said = machine.run(&format!(
        "commit {dir} --clients {clients} --commits {commits} --group {group}"
    ))?;
    let report = said.iter().find_map(|line| line.strip_prefix("report "));
    serde_json::from_str(report.unwrap_or_default())
        .map_err(|error| CommandError::Failed(format!("the report in the machine: {error}")))
}
