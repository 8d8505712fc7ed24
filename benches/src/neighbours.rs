//! `walvisor-bench neighbours`: what a disk's commits cost beside a neighbour that takes all it can
//! get, in one daemon, compared with qemu-storage-daemon.
//!
//! ```text
//!   attackers (testkit::hostile) ─▶ disk 1 ─┐
//!                                           ├ one daemon, new for each turn
//!   victim: write 4 KiB, flush ──▶ disk 0 ──┘     alone, beside, alone, beside, ...
//! ```
//! The victim takes turns between alone and beside within a turn, so that both see the machine in
//! the same state.

use std::fs;
use std::io;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use walvisor::commands::CommandError;
use walvisor_testkit::hostile::{Attack, Attackers, Commits, Target, Victim, nbd, vhost_user};
use walvisor_testkit::vhost_user_client::VhostUserClient;

use crate::daemon::Daemon;
use crate::matrix::{Column, Matrix, Turn};
use crate::output::Output;
use crate::place::Place;
use crate::report::{Cell, Section};

/// Arguments of `walvisor-bench neighbours`.
#[derive(Debug, Args)]
pub struct NeighboursArguments {
    /// Only the attacks with this in their name
    #[arg(long, value_name = "TEXT", default_value = "")]
    attack: String,
    #[command(flatten)]
    output: Output,
}

const OURS: &str = "walvisor";
const THEIRS: &str = "qemu-storage-daemon";
/// What ours may use.
const MEMORY_LIMIT: &str = "256M";
/// What the peer may have at most, with all that it has mapped: with unread replies it would take
/// what the machine has.
const PEER_BYTES: u64 = 4 << 30;
/// How often the victim is measured alone and beside in a turn.
const SLICES: u32 = 3;
const QUEUES: usize = 4;
const DISK_BYTES: u64 = 256 << 20;

/// A side's part in a row.
#[derive(Clone, Copy)]
struct Plan {
    door: &'static str,
    attack: &'static Attack,
    side: &'static str,
}

/// Where the disks of a daemon are.
struct Disks {
    _daemon: Daemon,
    id: u32,
    target: Target,
    victim: Box<dyn Victim>,
}

impl Disks {
    fn start(place: &Place, plan: &Plan) -> Result<Self, CommandError> {
        let socket = |disk: usize| place.sockets().join(format!("{disk}"));
        for disk in 0..2 {
            // Left by a daemon that a neighbour has ended.
            let _ = fs::remove_file(socket(disk));
        }
        let mut daemon = match plan.side {
            OURS => ours(place, plan.door, &socket)?,
            _ => theirs(place, plan.door, &socket)?,
        };
        let (target, victim) = match plan.door {
            "nbd" => {
                let victim = nbd::victim(&socket(0), "0");
                let victim = victim.map(|victim| Box::new(victim) as Box<dyn Victim>);
                // A server of qemu-storage-daemon has one socket.
                let at = if plan.side == OURS { 1 } else { 0 };
                (Target::new(&socket(at), "1"), victim)
            }
            _ => {
                let victim = VhostUserClient::try_connect(&socket(0), 1);
                let victim = victim.map(|victim| Box::new(victim) as Box<dyn Victim>);
                (Target::new(&socket(1), ""), victim)
            }
        };
        Ok(Self {
            id: daemon.process().id(),
            _daemon: daemon,
            target,
            victim: victim.map_err(CommandError::failed)?,
        })
    }

    /// The victim's commits alone and beside the attack. `None`: it has lost its server.
    fn measure(&mut self, attack: &'static Attack, turn: Duration) -> Option<[Vec<Commits>; 2]> {
        let mut commits = [Vec::new(), Vec::new()];
        for _ in 0..SLICES {
            commits[0].push(self.count(turn).ok()?);
            let attackers = Attackers::start(attack, &self.target);
            let beside = self.count(turn);
            let _ = attackers.end();
            commits[1].push(beside.ok()?);
        }
        Some(commits)
    }

    fn count(&mut self, turn: Duration) -> io::Result<Commits> {
        Commits::count(&mut *self.victim, turn / SLICES)
    }

    /// The most MiB of memory that the daemon has had.
    fn peak_mib(&self) -> Option<f64> {
        let status = fs::read_to_string(format!("/proc/{}/status", self.id)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib: f64 = line?.trim().trim_end_matches(" kB").parse().ok()?;
        Some(kib / 1024.0)
    }
}

fn ours(
    place: &Place,
    door: &str,
    socket: &dyn Fn(usize) -> PathBuf,
) -> Result<Daemon, CommandError> {
    let spec = |disk: usize| {
        let socket = socket(disk);
        let serial = if door == "nbd" {
            format!("serial={disk}")
        } else {
            format!("queues={QUEUES}")
        };
        format!(
            "path=ours-{disk}.img,log=log,{serial},socket={}",
            socket.display()
        )
    };
    let specs = [spec(0), spec(1)];
    let options = ["--memory-limit", MEMORY_LIMIT];
    Daemon::start_with(door, &options, &specs, place.images(), place.sockets())
}

fn theirs(
    place: &Place,
    door: &str,
    socket: &dyn Fn(usize) -> PathBuf,
) -> Result<Daemon, CommandError> {
    let mut command = Command::new("prlimit");
    command.arg(format!("--as={PEER_BYTES}")).arg(THEIRS);
    let mut sockets = vec![socket(0)];
    if door == "nbd" {
        let path = format!("addr.type=unix,addr.path={}", socket(0).display());
        command.arg("--nbd-server").arg(path);
    } else {
        sockets.push(socket(1));
    }
    for disk in 0..2 {
        command.arg("--blockdev").arg(format!(
            "driver=file,node-name=disk{disk},filename=peer-{disk}.img,aio=io_uring,cache.direct=on,discard=unmap"
        ));
        let export = if door == "nbd" {
            format!("type=nbd,name={disk}")
        } else {
            let path = socket(disk);
            format!(
                "type=vhost-user-blk,addr.type=unix,addr.path={},num-queues={QUEUES}",
                path.display()
            )
        };
        command.arg("--export").arg(format!(
            "{export},id=export{disk},node-name=disk{disk},writable=on"
        ));
    }
    // It tells of each attacker.
    command.stderr(Stdio::null());
    Daemon::peer(&mut command, place.images(), &sockets)
}

/// Runs `walvisor-bench neighbours`.
///
/// # Errors
/// If a daemon does not start, or a file can't be written.
pub fn run(arguments: &NeighboursArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let turn = Duration::from_secs(if output.quick { 1 } else { 3 });
    let missing = Command::new(THEIRS).arg("--version").output().is_err();
    let mut sides = vec![OURS];
    sides.extend((!missing).then_some(THEIRS));
    let mut matrix = Matrix::default();
    let attacks = vhost_user::ATTACKS
        .iter()
        .map(|attack| ("vhost-user", attack));
    let attacks = attacks.chain(nbd::ATTACKS.iter().map(|attack| ("nbd", attack)));
    for (door, attack) in attacks.filter(|(_, attack)| attack.name.contains(&arguments.attack)) {
        let plan = |side: &&'static str| (*side, Plan { door, attack, side });
        matrix.add(format!("{door}: {}", attack.name), sides.iter().map(plan));
    }
    let rounds = output.rounds(if output.quick { 1 } else { 3 });
    let expected = |_: &Plan| turn * 2 + Duration::from_secs(1);
    let session = output.start(matrix.expected(expected) * rounds as u32)?;
    let place = Place::new(&output.dir)?;
    for disk in 0..2 {
        let (raw, image) = (format!("peer-{disk}.img"), format!("ours-{disk}.img"));
        place.make_disk(&raw, DISK_BYTES, (&image, "log"))?;
    }
    matrix.measure(rounds, &session, expected, |side| {
        let mut disks = Disks::start(&place, &side.plan)?;
        let commits = disks.measure(side.plan.attack, turn);
        Ok(Turn(figures(commits, disks.peak_mib())))
    })?;
    let mut section = section(&matrix);
    if missing {
        let note =
            format!("Not measured: {THEIRS} is missing: install the package qemu-system-common");
        section.notes.push(note);
    }
    if rounds > 1 {
        let note = format!("Median of {rounds} rounds (lowest to highest), all rows in turns.");
        section.notes.push(note);
    }
    let title = "A disk beside neighbours that take all they can get";
    output.write(title, session, vec![section])
}

/// A victim that has lost its server has none but the memory, if the server is still there.
fn figures(commits: Option<[Vec<Commits>; 2]>, peak_mib: Option<f64>) -> Value {
    let Some([alone, beside]) = commits else {
        return json!({ "lost": 1, "peak_mib": peak_mib });
    };
    let mean = |commits: &[Commits]| {
        commits.iter().map(|commits| commits.per_s).sum::<f64>() / commits.len() as f64
    };
    let longest = beside.iter().map(|commits| commits.longest).max();
    json!({
        "alone_per_s": mean(&alone),
        "beside_per_s": mean(&beside),
        "kept": mean(&beside) / mean(&alone),
        "longest_ms": longest.unwrap_or_default().as_secs_f64() * 1e3,
        "peak_mib": peak_mib,
    })
}

fn section(matrix: &Matrix<Plan>) -> Section {
    let limit = format!(
        "walvisor has --memory-limit {MEMORY_LIMIT}, {THEIRS} an address space of {} GiB. Each turn has a daemon of its own, and the victim commits alone and beside \
         the attack by turns. Attackers run on this machine too, and take processor time from both.",
        PEER_BYTES >> 30
    );
    matrix.long(
        "neighbours",
        "Commits of a disk beside an attack on another disk of its daemon",
        &[
            "A commit is a write of 4 KiB and, once that has ended, a FLUSH. Kept: the part of its commits that a disk still makes \
             beside the attack. An empty row: the daemon has died, or has not answered for 20 seconds.",
            &limit,
        ],
        &[
            Column::plan("door", "door", |plan: &Plan| Cell::text(plan.door)),
            Column::plan("attack", "attack", |plan: &Plan| Cell::text(plan.attack.name)),
            Column::plan("server", "server", |plan: &Plan| Cell::text(plan.side)),
            Column::figure("alone_per_s", "alone/s", 0),
            Column::figure("beside_per_s", "beside/s", 0),
            Column::figure("kept", "kept", 2),
            Column::figure("longest_ms", "longest, ms", 0),
            Column::figure("peak_mib", "MiB", 0),
        ],
    )
}
