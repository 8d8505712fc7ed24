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
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use walvisor::commands::CommandError;
use walvisor_storage::StoreOptions;
use walvisor_testkit::hostile::{
    Attack, AttackTarget, Attackers, Commits, Victim, nbd, vhost_user,
};
use walvisor_testkit::vhost_user_client::VhostUserClient;

use crate::bench::{Bench, Side, Turn, settings};
use crate::bench_dirs::{BenchDirs, LOGGED, make_disks};
use crate::daemon::Daemon;
use crate::output::Output;
use crate::programs::{missing, not_measured};
use crate::serve::serve;

const MATRICES: &str = include_str!("../matrices/neighbours.toml");

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
/// How often the victim is measured alone and beside in a turn.
const SLICES: u32 = 3;
const DISK_BYTES: u64 = 256 << 20;

/// All attacks, each with its door.
fn attacks() -> impl Iterator<Item = (&'static str, &'static Attack)> {
    let over = |door| move |attack| (door, attack);
    let attacks = vhost_user::ATTACKS.iter().map(over("vhost-user"));
    attacks.chain(nbd::ATTACKS.iter().map(over("nbd")))
}

/// Runs `walvisor-bench neighbours`.
///
/// # Errors
/// If a daemon does not start, or a file can't be written.
pub fn run(arguments: &NeighboursArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let wanted = attacks().filter(|(_, attack)| attack.name.contains(&arguments.attack));
    let (doors, names): (Vec<_>, Vec<_>) = wanted.map(|(door, attack)| (door, attack.name)).unzip();
    let given = settings(json!({ "door": doors, "attack": names }));
    let mut bench = Bench::new(MATRICES, output, &[], &given);
    let matrix = &mut bench.matrices[0];
    if let Some(need) = missing(&[(THEIRS, "qemu-system-common")]) {
        matrix.keep_sides(&[OURS.to_owned()]);
        matrix.notes.push(not_measured(need));
    }
    let session = bench.start()?;
    let place = BenchDirs::new(&output.dir)?;
    make_disks(
        place.images(),
        2,
        DISK_BYTES,
        LOGGED,
        &StoreOptions::default(),
    )?;
    let run = bench.matrices[0].measure(&session, |side| {
        let mut disks = Disks::start(&place, side)?;
        let named = |(door, attack): &(&str, &Attack)| {
            (*door, attack.name) == (side.text("door"), side.text("attack"))
        };
        let (_, attack) = attacks().find(named).expect("one of them");
        let turn = Duration::from_secs(side.number("turn_s"));
        Ok(Turn(figures(disks.measure(attack, turn), disks.peak_mib())))
    });
    bench.finish(session, run)
}

/// Two disks of a daemon.
struct Disks {
    daemon: Daemon,
    target: AttackTarget,
    victim: Box<dyn Victim>,
}

impl Disks {
    fn start(place: &BenchDirs, side: &Side) -> Result<Self, CommandError> {
        let sockets = [0, 1].map(|disk| place.sockets().join(format!("{disk}")));
        let (door, is_ours) = (side.text("door"), side.side == OURS);
        let daemons = serve(side, door, place.images(), place.sockets(), &sockets)?;
        let (target, victim) = if door == "nbd" {
            let victim = nbd::victim(&sockets[0], "0");
            let victim = victim.map(|victim| Box::new(victim) as Box<dyn Victim>);
            // A server of qemu-storage-daemon has one socket.
            (
                AttackTarget::new(&sockets[usize::from(is_ours)], "1"),
                victim,
            )
        } else {
            let victim = VhostUserClient::try_connect(&sockets[0], 1);
            let victim = victim.map(|victim| Box::new(victim) as Box<dyn Victim>);
            (AttackTarget::new(&sockets[1], ""), victim)
        };
        Ok(Self {
            daemon: daemons.into_iter().next().expect("one for both disks"),
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
    fn peak_mib(&mut self) -> Option<f64> {
        let id = self.daemon.process().id();
        let status = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib: f64 = line?.trim().trim_end_matches(" kB").parse().ok()?;
        Some(kib / 1024.0)
    }
}

/// A victim that has lost its server has none but the memory, if the server is still there.
fn figures(commits: Option<[Vec<Commits>; 2]>, peak_mib: Option<f64>) -> Value {
    let Some([alone, beside]) = commits else {
        return json!({ "peak_mib": peak_mib });
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
