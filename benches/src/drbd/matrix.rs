//! The matrix: what a commit costs, by the link between the machines and by the number of clients.

use std::path::Path;
use std::time::Duration;

use walvisor::commands::CommandError;
use walvisor_storage::CommitWait;

use super::pair::{Machine, MachinePair};
use crate::commit::experiments::{OFF, ON, curve, off_on_columns, plan, rates};
use crate::matrix::{self, Matrix, Turn};
use crate::report::{Cell, Section};
use crate::session::Session;
use crate::store::commit::{CommitPlan, Switch};

/// The round trip in the published source, and the rate that it reports without grouping, for any number of clients.
const SOURCE: (u32, f64) = (4, 250.0);
type Column<'a> = matrix::Column<'a, Work>;

/// Time of a turn besides its commits: creating the log and removing it.
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

/// What a side does in a turn.
type Work = (Link, CommitPlan);

/// The links that are measured, and with each the numbers of clients, in rounds on new machines.
pub struct LinkMatrix {
    links: Vec<LinkRows>,
    rounds: usize,
}

/// What is measured with a link.
struct LinkRows {
    link: Link,
    /// Round trips right before each round.
    pings: Vec<Ping>,
    /// A row for each number of clients.
    matrix: Matrix<Work>,
}

impl LinkMatrix {
    /// Plans all of it, or only a part if `quick`.
    pub fn new(quick: bool, rounds: usize) -> Self {
        let (links, clients): (&[Link], &[u16]) = if quick {
            (&Link::QUICK, &[1, 8])
        } else {
            (&Link::ALL, &[1, 2, 4, 8, 16, 32, 64])
        };
        let seconds = if quick { 0.7 } else { 2.5 };
        let rows = |&link: &Link| {
            let mut matrix = Matrix::default();
            for &clients in clients {
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
                let name = format!("{}, {clients} clients", link.name());
                matrix.add(name, [(OFF, (link, off)), (ON, (link, on))]);
            }
            LinkRows {
                link,
                pings: Vec::new(),
                matrix,
            }
        };
        Self {
            links: links.iter().map(rows).collect(),
            rounds,
        }
    }

    /// Estimated time.
    pub fn expected(&self) -> Duration {
        let links = self.links.iter();
        let once: Duration = links.map(|rows| rows.matrix.expected(expected)).sum();
        (BOOT + once) * self.rounds as u32
    }

    /// Measures all rounds, unless the user interrupts them.
    ///
    /// # Errors
    /// If a machine fails, or the round trip is shorter than it should be.
    pub fn measure(&mut self, session: &Session, dir: &Path) -> Result<(), CommandError> {
        for round in 0..self.rounds {
            let started = session.step("two machines boot", BOOT, || {
                let mut pair = MachinePair::start(dir, "C")?;
                pair.begin()?;
                Ok(pair)
            })?;
            let Some(mut pair) = started else {
                return Ok(());
            };
            // After the rows without its other machine the disks differ.
            let (last, others): (Vec<_>, Vec<_>) = self
                .links
                .iter_mut()
                .partition(|rows| rows.link == Link::Disconnected);
            for rows in others.into_iter().chain(last) {
                if session.interrupted() {
                    return Ok(());
                }
                rows.prepare(&mut pair)?;
                for row in &mut rows.matrix.rows {
                    let turn = |side: &matrix::Side<Work>| commit(&mut pair.first, &side.plan);
                    if !row.measure((round, self.rounds), session, expected, turn)? {
                        return Ok(());
                    }
                }
                rows.verify(&mut pair)?;
            }
        }
        Ok(())
    }

    /// The results as a section.
    pub fn section(&self) -> Section {
        let pings = |key, title, figure: fn(&Ping) -> f64| {
            Column::plan(key, title, move |(link, _)| {
                let mut rows = self.links.iter();
                let rows = rows.find(|rows| rows.link == *link);
                let pings = rows.map_or(&[][..], |rows| &rows.pings);
                Cell::of(&pings.iter().map(figure).collect::<Vec<_>>(), 2)
            })
        };
        let mut columns = vec![
            Column::plan("link", "link", |(link, _)| Cell::text(link.name())),
            pings("ping_shortest_ms", "ping: shortest, ms", |ping| {
                ping.shortest
            }),
            pings("ping_mean_ms", "mean", |ping| ping.mean),
        ];
        let parts = |(link, plan): &Work| (plan.clients, link.round_trip());
        columns.extend(off_on_columns(parts, |clients| clients, "N/S"));
        columns.push(Column::plan(
            "source_off_per_s",
            "source: off",
            |(link, _)| {
                if *link == Link::RoundTrip(SOURCE.0) {
                    Cell::Number(SOURCE.1, 0)
                } else {
                    Cell::None
                }
            },
        ));
        let mut all = Matrix::default();
        for rows in &self.links {
            for row in &rows.matrix.rows {
                if row.sides.iter().any(|side| !side.turns.is_empty()) {
                    all.rows.push(row.clone());
                }
            }
        }
        let mut section = all.wide(
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
            &columns,
        );
        for rows in &self.links {
            let shortest = rows.pings.iter().map(|ping| ping.shortest);
            if shortest.fold(0.0, f64::max) > rows.link.delay() + 1.0 {
                section.notes.push(format!(
                    "{}: no ping was that fast: the machine was busy.",
                    rows.link.name()
                ));
            }
        }
        let lines = |side| {
            let clients = |work: &Work| work.1.clients.into();
            all.lines_by(side, |work| work.0.name(), clients, "commits_per_s")
        };
        let [mut off, mut on] = [OFF, ON].map(lines);
        let source = Link::RoundTrip(SOURCE.0).name();
        if let Some(line) = on.iter().find(|line| line.name == source) {
            let name = format!("source at {} ms", SOURCE.0);
            off.push(curve(&name, &line.points, |_| SOURCE.1));
            let name = format!("ideal at {} ms: N/S", SOURCE.0);
            let ideal = curve(&name, &line.points, |clients| clients * SOURCE.1);
            on.push(ideal);
        }
        section.with_plots(vec![
            rates("drbd-on", "Under DRBD: group commit", on),
            rates("drbd-off", "Under DRBD: a sync for each FLUSH", off),
        ])
    }
}

impl LinkRows {
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

/// Estimated time of a turn.
fn expected((link, plan): &Work) -> Duration {
    let served = match plan.group {
        Switch::Off => 1.0,
        // More clients need more processor time.
        Switch::On => f64::from(plan.clients.min(16)),
    };
    OVERHEAD + link.sync().mul_f64(plan.commits as f64 / served)
}

/// Measures a side in the machine.
fn commit(machine: &mut Machine, (link, plan): &Work) -> Result<Turn, CommandError> {
    let dir = match link {
        Link::None => "plain",
        _ => "disk",
    };
    let group = match plan.group {
        Switch::Off => "off",
        Switch::On => "on",
    };
    let (clients, commits) = (plan.clients, plan.commits);
    let said = machine.run(&format!(
        "commit {dir} --clients {clients} --commits {commits} --group {group}"
    ))?;
    let report = said.iter().find_map(|line| line.strip_prefix("report "));
    serde_json::from_str(report.unwrap_or_default())
        .map(Turn)
        .map_err(|error| CommandError::Failed(format!("the report in the machine: {error}")))
}
