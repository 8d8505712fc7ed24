//! `walvisor-bench peers`: the disk compared with those of other programs. All use the same client and file system, and
//! take turns.
//!
//! ```text
//!   virtio driver in this process ─▶ serve vhost-user  │ qemu-storage-daemon         daemons.rs
//!   fio's nbd engine              ─▶ serve nbd         │ qemu-nbd                    daemons.rs
//!   fio in one emulated guest     ─▶ serve vhost-user  │ QEMU's own virtio-blk       guests.rs
//!   fio in user-mode Linux        ─▶ serve tcmu        │ tcmu-runner                 guests.rs
//! ```
//! The peers open their images like a careful host (`cache.direct`, io_uring, FLUSH = fdatasync), and once like a careless
//! one (`cache=writeback`). If a peer is not installed, a note names its package, and the others are measured.

mod daemons;
mod guests;

use std::process::Command;
use std::time::Duration;

use clap::{Args, ValueEnum};
use walvisor::commands::CommandError;

use crate::load::loops::LoadJob;
use crate::matrix::{Matrix, Row, Side};
use crate::output::{Output, chosen};
use crate::place::Place;
use crate::report::plot::{Plot, PlotKind};
use crate::report::{Cell, Preference, Section, Spread};
use crate::session::Session;

/// Arguments of `walvisor-bench peers`.
#[derive(Debug, Args)]
pub struct PeersArguments {
    /// Only these doors, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', value_name = "DOOR,DOOR..")]
    only: Vec<PeerDoor>,
    /// Only the jobs with this in their name
    #[arg(long, value_name = "TEXT", default_value = "")]
    job: String,
    #[command(flatten)]
    output: Output,
}

/// How a disk is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum PeerDoor {
    /// Compared with qemu-storage-daemon
    VhostUser,
    /// Compared with qemu-nbd
    Nbd,
    /// As a disk of an emulated machine, compared with QEMU's own disks with cache=none and cache=writeback
    Qemu,
    /// Compared with tcmu-runner, in user-mode Linux
    Tcmu,
}

impl PeerDoor {
    /// Its name on the command line and in tables.
    fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// Its jobs.
    fn jobs(self) -> &'static [PeerJob] {
        match self {
            Self::VhostUser => &daemons::VHOST_USER,
            Self::Nbd => &daemons::NBD,
            Self::Qemu => &guests::QEMU,
            Self::Tcmu => &guests::TCMU,
        }
    }

    /// The names of its sides: `walvisor`, then the peers.
    fn sides(self) -> &'static [&'static str] {
        match self {
            Self::VhostUser => &[OURS, "qemu-storage-daemon"],
            Self::Nbd => &[OURS, "qemu-nbd", FROM_MEMORY],
            Self::Qemu => &[OURS, "QEMU, cache=none", "QEMU, cache=writeback"],
            Self::Tcmu => &[OURS, "tcmu-runner, qcow in memory"],
        }
    }

    /// Programs that it needs, with their packages.
    fn needs(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::VhostUser => &[("qemu-storage-daemon", "qemu-system-common")],
            Self::Nbd => &[("qemu-nbd", "qemu-utils"), ("fio", "fio")],
            Self::Qemu => &[("qemu-system-x86_64", "qemu-system-x86")],
            Self::Tcmu => &[
                ("linux.uml", "user-mode-linux"),
                ("tcmu-runner", "tcmu-runner"),
                ("dbus-daemon", "dbus"),
                ("qemu-img", "qemu-utils"),
                ("fio", "fio"),
                ("modprobe", "kmod"),
            ],
        }
    }

    /// Time of a turn besides the measured time, and to start the guest and the unmeasured work before.
    fn overhead(self, quick: bool) -> (Duration, Duration) {
        let sides = self.sides().len() as u32;
        let warm_up = if quick { 0 } else { sides };
        match self {
            Self::VhostUser => (Duration::from_millis(100), daemons::WARM_UP * warm_up),
            Self::Nbd => (Duration::from_millis(400), daemons::WARM_UP * warm_up),
            Self::Qemu => (Duration::from_millis(700), Duration::from_secs(8)),
            Self::Tcmu => (Duration::from_millis(700), Duration::from_secs(6)),
        }
    }
}

const OURS: &str = "walvisor";
/// `walvisor` with `answer=memory`. The difference to the default is what it costs to keep answered writes when the daemon
/// dies.
const FROM_MEMORY: &str = "walvisor, answer=memory";
/// The figure of a turn: requests or commits a second.
const RATE: &str = "per_s";

/// A job, of 4 KiB requests at random offsets.
#[derive(Clone, Copy, Debug)]
struct PeerJob {
    name: &'static str,
    work: LoadJob,
    disks: usize,
    /// Number of queues or connections.
    queues: usize,
    /// Requests in flight in each queue.
    depth: usize,
    /// The ratio to its peer that `walvisor` should reach at least.
    goal: Option<f64>,
}

/// A job on one disk with one queue.
const fn job(name: &'static str, work: LoadJob, depth: usize, goal: Option<f64>) -> PeerJob {
    PeerJob {
        name,
        work,
        disks: 1,
        queues: 1,
        depth,
        goal,
    }
}

/// The jobs of a door, their rounds and the length of a turn.
struct Schedule {
    door: PeerDoor,
    jobs: Vec<PeerJob>,
    rounds: usize,
    turn: Duration,
    quick: bool,
}

impl Schedule {
    /// The jobs and sides, without turns yet.
    fn matrix(&self) -> Matrix<PeerJob> {
        let mut matrix = Matrix::default();
        for job in &self.jobs {
            let name = format!("{}: {}", self.door.name(), job.name);
            let sides = self.door.sides().iter();
            matrix.add(name, sides.map(|&side| (side, *job)));
        }
        for side in matrix.rows.iter_mut().flat_map(|row| &mut row.sides) {
            side.emulated = self.door == PeerDoor::Qemu;
        }
        matrix
    }

    /// Time of a turn with all that belongs to it.
    fn turn(&self) -> Duration {
        self.turn + self.door.overhead(self.quick).0
    }

    fn expected(&self) -> Duration {
        let turns = self.jobs.len() * self.rounds * self.door.sides().len();
        self.door.overhead(self.quick).1 + self.turn() * turns as u32
    }

    fn measure(
        &self,
        place: &Place,
        session: &Session,
        matrix: &mut Matrix<PeerJob>,
    ) -> Result<(), CommandError> {
        match self.door {
            PeerDoor::VhostUser => daemons::vhost_user(place, self, session, matrix),
            PeerDoor::Nbd => daemons::nbd(place, self, session, matrix),
            PeerDoor::Qemu => guests::qemu(place, self, session, matrix),
            PeerDoor::Tcmu => guests::tcmu(place, self, session, matrix),
        }
    }
}

/// Runs `walvisor-bench peers`.
///
/// # Errors
/// If the measurement of an installed peer fails.
pub fn run(arguments: &PeersArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let quick = output.quick;
    let turn = Duration::from_secs(if quick { 1 } else { 2 });
    let schedule = |door: PeerDoor| {
        let mut jobs = door.jobs().to_vec();
        if quick && matches!(door, PeerDoor::Qemu | PeerDoor::Tcmu) {
            jobs.truncate(2);
        }
        jobs.retain(|job| job.name.contains(&arguments.job));
        Schedule {
            door,
            jobs,
            rounds: output.rounds(if output.quick { 1 } else { 5 }),
            turn,
            quick,
        }
    };
    let doors = chosen(&arguments.only).into_iter();
    let schedules: Vec<Schedule> = doors.map(schedule).collect();
    let session = output.start(schedules.iter().map(Schedule::expected).sum())?;
    let place = Place::new(&output.dir)?;
    let (mut rows, mut notes, mut failed) = (Vec::new(), Vec::new(), None);
    for schedule in schedules {
        let mut needs = schedule.door.needs().iter();
        let missing =
            needs.find(|(program, _)| Command::new(program).arg("--version").output().is_err());
        if let Some((program, package)) = missing {
            notes.push(format!(
                "Not measured: {program} is missing: install the package {package}"
            ));
            continue;
        }
        let mut matrix = schedule.matrix();
        let measured = schedule.measure(&place, &session, &mut matrix);
        let door = schedule.door;
        if matrix.is_measured() {
            rows.extend(matrix.rows.into_iter().map(|row| (door, row)));
        }
        match measured {
            Ok(()) => {}
            // Ctrl-C also ends the other programs on the terminal.
            Err(_) if session.interrupted() => break,
            Err(error) => {
                notes.push(format!("Not measured: {error}"));
                failed = failed.or(Some(error));
            }
        }
    }
    let rounds = format!(
        "4 KiB, random; requests or commits a second: median of {} turns of {} s each (lowest to highest).",
        output.rounds(if output.quick { 1 } else { 5 }),
        turn.as_secs()
    );
    let section = section(&rounds, &rows, &notes);
    output.write("The disk beside its peers", session, vec![section])?;
    failed.map_or(Ok(()), Err)
}

fn section(rounds: &str, rows: &[(PeerDoor, Row<PeerJob>)], missing: &[String]) -> Section {
    let measured = |door| rows.iter().any(|row| row.0 == door);
    let mut notes = vec![
        rounds,
        "Over vhost-user and NBD each is halted while the other is measured, and begins a job with nothing left to be copied.",
        "A commit is a write and, once that has ended, a FLUSH. Peers open their image with cache.direct and io_uring, and FLUSH is \
         an fdatasync; cache=writeback goes through the host's page cache, FLUSH likewise.",
    ];
    if measured(PeerDoor::Nbd) {
        notes.push(
            "Over NBD a write is answered once a kill of the daemon cannot lose it, as qemu-nbd's are in the host's cache; \
             with answer=memory it may be lost up to the next FLUSH.",
        );
    }
    if measured(PeerDoor::Qemu) {
        notes.push(
            "The guest of door qemu runs in full emulation: it is the guest's processor that is slow, and its figures are in brackets.",
        );
    }
    notes.extend(missing.iter().map(String::as_str));
    let mut section = Section::new(
        "peers",
        "The disk beside its peers",
        &notes,
        &[
            ("door", "door"),
            ("job", "job"),
            ("walvisor_per_s", "walvisor"),
            ("peer", "peer"),
            ("peer_per_s", "peer's"),
            ("ratio", "ratio"),
            ("goal", "goal"),
        ],
    );
    let mut bars = Vec::new();
    for (door, row) in rows {
        let (ours, peers) = row.sides.split_at(1);
        let (door, ours) = (door.name(), &ours[0]);
        let rate = |side: &Side<PeerJob>| Cell::of(&side.of(RATE), 0);
        let grey = |cell: Cell| if ours.emulated { cell.grey() } else { cell };
        for peer in peers {
            let job = &peer.plan;
            section.table.rows.push(vec![
                Cell::text(&door),
                Cell::text(job.name),
                grey(rate(ours)),
                Cell::text(&peer.name),
                grey(rate(peer)),
                grey(row.ratio(ours, &peer.name, RATE, Preference::More)),
                // A goal is relative to a peer, so another mode of `walvisor` itself has none.
                job.goal
                    .filter(|_| peer.name != FROM_MEMORY)
                    .map_or(Cell::None, |goal| Cell::Number(goal, 1)),
            ]);
            let ratio = ours.median(RATE).zip(peer.median(RATE));
            let ratio = ratio.and_then(|(ours, theirs)| Spread::of(&[ours / theirs]));
            let label = format!("{door}: {} ({})", job.name, peer.name);
            bars.push((label, vec![ratio]));
        }
    }
    section.with_plots(vec![Plot {
        name: "peers".to_owned(),
        title: "walvisor beside its peers".to_owned(),
        caption: "A green bar: walvisor does more than the peer. An orange one: it does less."
            .to_owned(),
        kind: PlotKind::Bars {
            unit: "times what the peer does; the line is at 1, as much".to_owned(),
            groups: vec!["ratio".to_owned()],
            even: Some(1.0),
            rows: bars,
        },
    }])
}
