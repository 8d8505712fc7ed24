//! `walvisor compare peers`: the disk beside those of others, each with the same client on the same file system, taking turns.
//!
//! ```text
//!   virtio driver in this process ─▶ serve vhost-user  │ qemu-storage-daemon         vhost_user.rs
//!   fio's nbd engine              ─▶ serve nbd         │ qemu-nbd                    nbd.rs
//!   fio in one emulated guest     ─▶ serve vhost-user  │ QEMU's own virtio-blk       emulated.rs
//!   fio in user-mode Linux        ─▶ serve tcmu        │ tcmu-runner                 target.rs
//! ```
//! The peers open their images as a careful host does (`cache.direct`, io_uring, FLUSH = fdatasync), and once as a careless one
//! (`cache=writeback`). A peer that is not here is told with the package that has it; the others go on.

mod emulated;
mod nbd;
mod peer;
mod target;
mod vhost_user;

pub use peer::Halted;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::{Args, ValueEnum};
use peer::Peer;
use tempfile::TempDir;

use super::notify::daemon::Daemon;
use super::notify::point::Job as Work;
use super::plot::{Kind, Plot};
use super::report::{Cell, Section, Spread};
use super::session::Session;
use super::{CommandError, Output};

/// Arguments of `walvisor compare peers`.
#[derive(Debug, Args)]
pub struct PeersArguments {
    /// Only these doors, with commas between
    #[arg(long, value_enum, value_delimiter = ',', value_name = "DOOR,DOOR..")]
    only: Vec<Door>,
    /// Only the jobs with this in their name
    #[arg(long, value_name = "TEXT", default_value = "")]
    job: String,
    #[command(flatten)]
    output: Output,
}

/// How a disk is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Door {
    /// Beside qemu-storage-daemon
    VhostUser,
    /// Beside qemu-nbd
    Nbd,
    /// As the disk of an emulated machine, beside QEMU's own with cache=none and cache=writeback
    Qemu,
    /// Beside tcmu-runner, in user-mode Linux
    Tcmu,
}

/// Disks of each side over vhost-user, and bytes of each.
const DISKS: usize = 4;
const DISK_BYTES: u64 = 256 << 20;

/// A job, of 4 KiB requests at random places.
#[derive(Debug)]
struct Job {
    name: &'static str,
    work: Work,
    disks: usize,
    /// Queues, or connections.
    queues: usize,
    /// Requests in flight of each queue.
    depth: usize,
    /// What `walvisor` should at least reach of its peer.
    goal: f64,
}

/// How long one measures.
#[derive(Clone, Copy, Debug)]
struct Pace {
    rounds: usize,
    turn: Duration,
    quick: bool,
}

/// Where images are: of DISKS disks twice, raw for the peers and on one log for `walvisor`.
struct Place {
    directory: TempDir,
    walvisor: PathBuf,
}

impl Place {
    fn new(parent: &Path) -> Result<Self, CommandError> {
        let made = tempfile::Builder::new()
            .prefix("walvisor-compare-")
            .tempdir_in(parent);
        let directory = made.map_err(|error| {
            let place = parent.display();
            CommandError::Failed(format!(
                "{place}: can't work there ({error}): name a directory that can be written with --dir"
            ))
        })?;
        let walvisor = std::env::current_exe().map_err(CommandError::failed)?;
        let place = Self {
            directory,
            walvisor,
        };
        Ok(place)
    }

    fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Makes the images of the first `disks` disks, unless they are there. All their blocks hold data: a hole would be read
    /// faster.
    fn make_images(&self, disks: usize) -> Result<(), CommandError> {
        let words = (0..DISK_BYTES / 8).map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let bytes: Vec<u8> = words.flat_map(u64::to_le_bytes).collect();
        for disk in 0..disks {
            let raw = self.path().join(format!("peer-{disk}.img"));
            if raw.exists() {
                continue;
            }
            let written =
                std::fs::write(&raw, &bytes).and_then(|()| std::fs::File::open(&raw)?.sync_all());
            written.map_err(super::failed("write the image", &raw))?;
            self.import(disk, &format!("ours-{disk}.img"), "log")?;
        }
        Ok(())
    }

    /// Makes a disk with the bytes of the peers' image of that number.
    fn import(&self, raw: usize, disk: &str, log: &str) -> Result<(), CommandError> {
        let mut import = Command::new(&self.walvisor);
        import
            .args([
                "disk",
                "import",
                disk,
                &format!("peer-{raw}.img"),
                "--log",
                log,
            ])
            .current_dir(self.path());
        let output = import.output().map_err(CommandError::failed)?;
        match output.status.success() {
            true => Ok(()),
            false => {
                let error = String::from_utf8_lossy(&output.stderr);
                Err(CommandError::Failed(error.trim().to_owned()))
            }
        }
    }
}

/// What a job came to: requests, or commits, a second of each round.
#[derive(Debug)]
struct Row {
    door: Door,
    job: String,
    goal: Option<f64>,
    ours: Vec<f64>,
    /// Each peer by its name.
    peers: BTreeMap<String, Vec<f64>>,
    /// Measured under emulation of a whole machine.
    emulated: bool,
}

impl Row {
    fn new(door: Door, job: &str, goal: Option<f64>) -> Self {
        Self {
            door,
            job: job.to_owned(),
            goal,
            ours: Vec::new(),
            peers: BTreeMap::new(),
            emulated: door == Door::Qemu,
        }
    }

    /// A round of `walvisor`, or of the peer of that name.
    fn add(&mut self, peer: Option<&str>, rate: f64) {
        match peer {
            None => self.ours.push(rate),
            Some(peer) => self.peers.entry(peer.to_owned()).or_default().push(rate),
        }
    }
}

/// Carries out `walvisor compare peers`.
///
/// # Errors
/// If one that is here fails.
pub fn run(arguments: &PeersArguments) -> Result<(), CommandError> {
    let Output { quick, dir, .. } = &arguments.output;
    let rounds = arguments.output.rounds(5, 1);
    let pace = match quick {
        true => Pace {
            rounds,
            turn: Duration::from_secs(1),
            quick: true,
        },
        false => Pace {
            rounds,
            turn: Duration::from_secs(2),
            quick: false,
        },
    };
    let doors: Vec<Door> = Door::value_variants()
        .iter()
        .filter(|door| arguments.only.is_empty() || arguments.only.contains(door))
        .copied()
        .collect();
    let wanted = |jobs: &'static [Job]| -> Vec<&'static Job> {
        let jobs = jobs.iter();
        jobs.filter(|job| job.name.contains(&arguments.job))
            .collect()
    };
    let time = doors.iter().map(|door| match door {
        Door::VhostUser => expected(&wanted(&vhost_user::JOBS), 2, pace, vhost_user::BEFORE),
        Door::Nbd => expected(&wanted(&nbd::JOBS), nbd::SIDES, pace, nbd::BEFORE),
        Door::Qemu => emulated::expected(pace),
        Door::Tcmu => target::expected(pace),
    });
    let session = arguments.output.start(time.sum())?;
    let place = Place::new(dir)?;
    let (mut rows, mut missing, mut failed) = (Vec::new(), Vec::new(), None);
    for door in doors {
        let measured = match door {
            Door::VhostUser => {
                vhost_user::measure(&place, &wanted(&vhost_user::JOBS), pace, &session)
            }
            Door::Nbd => nbd::measure(&place, &wanted(&nbd::JOBS), pace, &session),
            Door::Qemu => emulated::measure(&place, pace, &session),
            Door::Tcmu => target::measure(pace, &session),
        };
        match measured {
            Ok(measured) => rows.extend(measured),
            Err(Failure::Missing(what)) => missing.push(what),
            // Ctrl-C ends the programs of a terminal all at once.
            Err(Failure::Failed(_)) if session.interrupted() => break,
            Err(Failure::Failed(error)) => {
                missing.push(format!("Not measured: {error}"));
                failed = failed.or(Some(error));
            }
        }
    }
    let title = "The disk beside its peers";
    arguments
        .output
        .give(title, session, vec![section(&rows, &missing, pace)])?;
    failed.map_or(Ok(()), Err)
}

/// Why a door was not measured.
enum Failure {
    /// A program is not here; which, and the package that has it.
    Missing(String),
    Failed(CommandError),
}

impl From<CommandError> for Failure {
    fn from(error: CommandError) -> Self {
        Self::Failed(error)
    }
}

/// What both sides do, and nobody measures, before their first turn: a log is as it stays once all of its segment files have
/// been made, as the blocks of the peers' images have been.
const WARM_UP: (Work, Duration) = (Work::Write, Duration::from_secs(5));

/// How long the turns of `jobs` of so many sides take, each `before` longer than the pace says.
fn expected(jobs: &[&Job], sides: usize, pace: Pace, before: Duration) -> Duration {
    let warm_up = if pace.quick { 0 } else { sides as u32 };
    WARM_UP.1 * warm_up + (pace.turn + before) * (sides * pace.rounds * jobs.len()) as u32
}

/// What takes turns with `walvisor`: a peer, or `walvisor` with another setting.
trait Side {
    /// Halts it until what is returned is dropped.
    fn halt(&self) -> Halted;

    /// Nothing is left to be copied when a job begins.
    fn settle(&self) -> Result<(), CommandError> {
        Ok(())
    }
}

impl Side for Peer {
    fn halt(&self) -> Halted {
        Self::halt(self)
    }
}

impl Side for Daemon {
    fn halt(&self) -> Halted {
        Self::halt(self)
    }

    fn settle(&self) -> Result<(), CommandError> {
        self.checkpoint()
    }
}

/// `walvisor`, which is first, and others take turns at each of `jobs`, all others halted while one is measured. `rate` measures
/// the one of that number for a time. A turn takes `before` longer than the pace says.
fn take_turns(
    (door, jobs): (Door, &[&'static Job]),
    pace: Pace,
    before: Duration,
    session: &Session,
    sides: &[(&str, &dyn Side)],
    rate: impl Fn(usize, &Job, Duration) -> Result<f64, CommandError>,
) -> Result<Vec<Row>, CommandError> {
    let value = door.to_possible_value();
    let title = value.as_ref().map_or("", |door| door.get_name());
    let measured = |what: String, side: usize, job: &Job, turn: Duration| {
        let others = sides.iter().enumerate();
        let others = others.filter(|(other, _)| *other != side);
        let _halted: Vec<Halted> = others.map(|(_, (_, other))| other.halt()).collect();
        session.step(&what, turn + before, || rate(side, job, turn))
    };
    if let (Some(job), false) = (jobs.first(), pace.quick) {
        let (work, turn) = WARM_UP;
        let (disks, queues, depth) = (job.disks, 1, 32);
        let job = Job {
            work,
            disks,
            queues,
            depth,
            ..**job
        };
        for side in 0..sides.len() {
            measured(format!("{title}: warming up"), side, &job, turn)?;
        }
    }
    let mut rows = Vec::new();
    for job in jobs {
        let mut row = Row::new(door, job.name, Some(job.goal));
        sides.iter().try_for_each(|(_, side)| side.settle())?;
        for round in 0..pace.rounds {
            for turn in 0..sides.len() {
                // None is always the first.
                let side = (round + turn) % sides.len();
                let (round, rounds) = (round + 1, pace.rounds);
                let what = format!("{title}: {}, round {round} of {rounds}", job.name);
                if let Some(rate) = measured(what, side, job, pace.turn)? {
                    row.add((side > 0).then_some(sides[side].0), rate);
                }
            }
        }
        rows.push(row);
    }
    Ok(rows)
}

/// Asks for a program.
fn need(program: &str, package: &str) -> Result<(), Failure> {
    match Command::new(program).arg("--version").output() {
        Ok(_) => Ok(()),
        Err(_) => Err(Failure::Missing(format!(
            "Not measured: {program} is missing: install the package {package}"
        ))),
    }
}

fn section(rows: &[Row], missing: &[String], pace: Pace) -> Section {
    let rounds = format!(
        "4 KiB, random; requests or commits a second: median of {} turns of {} s each (lowest to highest).",
        pace.rounds,
        pace.turn.as_secs()
    );
    let mut notes = vec![
        rounds.as_str(),
        "Over vhost-user and NBD each is halted while the other is measured, and begins a job with nothing left to be copied.",
        "A commit is a write and, once that has ended, a FLUSH. Peers open their image with cache.direct and io_uring, and FLUSH is \
         an fdatasync; cache=writeback goes through the host's page cache, FLUSH likewise.",
    ];
    if rows
        .iter()
        .any(|row| row.peers.contains_key(nbd::FROM_MEMORY))
    {
        notes.push(
            "Over NBD a write is answered once a kill of the daemon cannot lose it, as qemu-nbd's are in the host's cache; \
             with answer=memory it may be lost up to the next FLUSH.",
        );
    }
    if rows.iter().any(|row| row.emulated) {
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
    for row in rows {
        let door = row.door.to_possible_value();
        let door = door.as_ref().map_or("", |door| door.get_name());
        let grey = |cell: Cell| if row.emulated { cell.grey() } else { cell };
        let ours = Spread::of(&row.ours);
        for (peer, rates) in &row.peers {
            let ratio = ours.zip(Spread::of(rates));
            let ratio = ratio.map(|(ours, theirs)| ours.median / theirs.median);
            section.table.rows.push(vec![
                Cell::text(door),
                Cell::text(&row.job),
                grey(Cell::of(&row.ours, 0)),
                Cell::text(peer),
                grey(Cell::of(rates, 0)),
                ratio.map_or(Cell::None, |ratio| grey(Cell::Number(ratio, 2))),
                // Beside itself it has none.
                row.goal
                    .filter(|_| peer != nbd::FROM_MEMORY)
                    .map_or(Cell::None, |goal| Cell::Number(goal, 1)),
            ]);
            let label = format!("{door}: {} ({peer})", row.job);
            bars.push((label, vec![ratio.and_then(|ratio| Spread::of(&[ratio]))]));
        }
    }
    section.plots = vec![Plot {
        name: "peers".to_owned(),
        title: "walvisor beside its peers".to_owned(),
        kind: Kind::Bars {
            unit: "times what the peer does; 1 is as much".to_owned(),
            groups: vec!["ratio".to_owned()],
            rows: bars,
        },
    }];
    section
}
