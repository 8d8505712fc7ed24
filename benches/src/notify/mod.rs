//! `walvisor-bench notify`: the cost of a notification and of a flush, on each path to a disk.
//!
//! ```text
//!   embedded guest ─▶ virtio-mmio, virtio-pci ─ eventfds or exits ─┐
//!   virtio driver  ─▶ vhost-user daemon ───────────────────────────┼─▶ RAM disk, write-ahead-logged disk
//!   NBD client     ─▶ NBD daemon ──────────────────────────────────┘
//! ```
//! and, with --load linux, fio in Linux kernels (linux.rs): the same paths, TCMU, and TCMU inside a guest. Each path
//! runs the same closed loops, in turns. A turn gives a [`Sample`], and all turns of a job the rows of a table.

mod guest;
mod linux;
mod nbd;
mod place;
mod section;
mod vhost_user;

use std::time::Duration;

use clap::{Args, ValueEnum};

use walvisor::commands::CommandError;
use walvisor_vmm::probe::{self, Ring0};

use crate::linux::Kernels;
use crate::load::measured::Measurement;
use crate::load::point::{BackendKind, LoadPlan, Path, Point};
use crate::load::sample::Sample;
use crate::output::Output;
use guest::{EMBEDDED_GUEST, GuestDoor};
use nbd::NbdDoor;
use place::Directories;
use vhost_user::VhostUserDoor;

/// Arguments of `walvisor-bench notify`.
#[derive(Debug, Args)]
pub struct NotifyArguments {
    /// The load generators, separated by commas
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "LOAD,LOAD..",
        default_value = "embedded"
    )]
    load: Vec<Load>,
    /// Only these paths of the embedded load, separated by commas
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PATH,PATH..")]
    only: Vec<Path>,
    /// Only these backends, separated by commas
    #[arg(
        long,
        value_enum,
        value_delimiter = ',',
        value_name = "BACKEND,BACKEND.."
    )]
    backends: Vec<BackendKind>,
    #[command(flatten)]
    kernels: Kernels,
    #[command(flatten)]
    output: Output,
}

/// What makes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Load {
    /// The embedded guest, and clients of this program: wherever KVM opens
    Embedded,
    /// fio in Linux kernels, with TCMU: user-mode Linux, and a machine with KVM, emulated where this one runs no Linux
    Linux,
}

/// Estimated time to start and stop around each turn.
const OVERHEAD: Duration = Duration::from_millis(60);

/// Runs `walvisor-bench notify`.
///
/// # Errors
/// If a measurement fails, a file can't be written, or a path has another cache mode than the others.
pub fn run(arguments: &NotifyArguments) -> Result<(), CommandError> {
    let chosen = |path: &&Path| arguments.only.is_empty() || arguments.only.contains(path);
    let mut paths: Vec<Path> = Path::ALL.iter().filter(chosen).copied().collect();
    let chosen = |backend: &&BackendKind| {
        arguments.backends.is_empty() || arguments.backends.contains(backend)
    };
    if !arguments.load.contains(&Load::Embedded) {
        paths.clear();
    }
    let backends: Vec<BackendKind> = BackendKind::value_variants()
        .iter()
        .filter(chosen)
        .copied()
        .collect();
    let mut notes = Vec::new();
    let guest_seconds = match probe::ring0() {
        _ if paths.is_empty() => false,
        Ok(Ring0::Native) => true,
        Ok(Ring0::Interpreted) => {
            notes.push(
                "This KVM interprets ring 0, where a guest takes its interrupts: the times of the embedded guest are grey (in \
                 brackets), its counts are those of any KVM."
                    .to_owned(),
            );
            false
        }
        Err(error) => {
            paths.retain(|path| matches!(path, Path::VhostUser | Path::Nbd));
            notes.push(format!("virtio-mmio and virtio-pci: skipped: {error}"));
            false
        }
    };
    let rounds = arguments.output.rounds(5, 3);
    let plan = LoadPlan::new(arguments.output.quick, rounds, &backends);
    let turns = plan.points.len() * paths.len() * plan.rounds;
    let linux = arguments.load.contains(&Load::Linux).then(|| {
        let kinds = arguments.kernels.chosen(arguments.output.quick);
        linux::LinuxLoad::new(&arguments.output, kinds, &backends)
    });
    let expected = linux
        .as_ref()
        .map_or(Duration::ZERO, linux::LinuxLoad::expected);
    let session = arguments
        .output
        .start((plan.turn + OVERHEAD) * turns as u32 + expected)?;
    let place = Directories::new(&arguments.output.dir)?;
    let mut doors = PathServers::open(&paths, &backends, &plan, &place)?;
    let mut samples = Vec::new();
    'rounds: for round in 0..plan.rounds {
        for point in &plan.points {
            // The order rotates, so that no path is always first.
            let mut order = paths.clone();
            let first = round % order.len().max(1);
            order.rotate_left(first);
            for path in order {
                let what = format!(
                    "{}: {point}, round {} of {}",
                    path.name(),
                    round + 1,
                    plan.rounds
                );
                let turn = || doors.measure(path, point, plan.turn);
                let Some(measured) = session.step(&what, plan.turn + OVERHEAD, turn)? else {
                    break 'rounds;
                };
                let load = load(path);
                let real = !is_emulated() && (guest_seconds || load != EMBEDDED_GUEST);
                let sample = measured.sample(path.name(), load, point, real);
                check_cache(&sample)?;
                samples.push(sample);
            }
        }
    }
    drop(doors);
    drop(place);
    let mut sections = if paths.is_empty() {
        Vec::new()
    } else {
        section::sections(&samples, &notes)
    };
    if let Some(linux) = linux {
        sections.extend(linux.sections(&arguments.output.dir, &session)?);
    }
    let title = "What a notification costs, and what a flush costs, on each path";
    arguments.output.write(title, session, sections)
}

/// Refuses a sample whose write cache is off, because paths with different cache modes cannot be compared. A path that
/// cannot report its mode is assumed to have the requested one.
fn check_cache(sample: &Sample) -> Result<(), CommandError> {
    match sample.write_cache {
        Some(false) => Err(CommandError::Failed(format!(
            "{} on the {} disk: its write cache is off and that of the others is on: they cannot be compared",
            sample.path, sample.backend
        ))),
        Some(true) | None => Ok(()),
    }
}

/// Whether QEMU emulates this machine, which makes its times meaningless too.
fn is_emulated() -> bool {
    let hypervisor = std::arch::x86_64::__cpuid(0x4000_0000);
    [hypervisor.ebx, hypervisor.ecx, hypervisor.edx]
        == ["TCGT", "CGTC", "GTCG"]
            .map(|part| u32::from_le_bytes(part.as_bytes().try_into().expect("four letters")))
}

/// The source of the requests on a path.
fn load(path: Path) -> &'static str {
    match path {
        Path::VhostUser => "vhost-user driver",
        Path::Nbd => "nbd client",
        _ => EMBEDDED_GUEST,
    }
}

/// The measured paths, by the kind of their server.
struct PathServers {
    guest: Option<GuestDoor>,
    vhost_user: Option<VhostUserDoor>,
    nbd: Option<NbdDoor>,
}

impl PathServers {
    fn open(
        paths: &[Path],
        backends: &[BackendKind],
        plan: &LoadPlan,
        place: &Directories,
    ) -> Result<Self, CommandError> {
        let vm = |path: &Path| !matches!(path, Path::VhostUser | Path::Nbd);
        let guest = paths
            .iter()
            .any(vm)
            .then(|| GuestDoor::open(place, backends, plan.turn));
        let vhost_user = paths
            .contains(&Path::VhostUser)
            .then(|| VhostUserDoor::open(place, backends));
        let nbd = paths
            .contains(&Path::Nbd)
            .then(|| NbdDoor::open(place, backends));
        Ok(Self {
            guest: guest.transpose()?,
            vhost_user: vhost_user.transpose()?,
            nbd: nbd.transpose()?,
        })
    }

    fn measure(
        &mut self,
        path: Path,
        point: &Point,
        turn: Duration,
    ) -> Result<Measurement, CommandError> {
        let closed = || CommandError::Failed(format!("{} is not open", path.name()));
        match path {
            Path::VhostUser => {
                let door = self.vhost_user.as_mut().ok_or_else(closed)?;
                door.measure(point, turn)
            }
            Path::Nbd => {
                let door = self.nbd.as_mut().ok_or_else(closed)?;
                door.measure(point, turn)
            }
            _ => {
                let door = self.guest.as_mut().ok_or_else(closed)?;
                door.measure(path, point)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::point::LoadJob;

    #[test]
    fn paths_with_different_cache_modes_are_not_compared() {
        let point = Point {
            backend: BackendKind::Wal,
            job: LoadJob::Write,
            iodepth: 1,
            queues: 1,
        };
        let mut sample = Measurement::default().sample("nbd", "nbd client", &point, true);
        let error = check_cache(&sample).unwrap_err().to_string();
        assert!(
            error.starts_with("nbd on the wal disk: its write cache is off"),
            "{error}"
        );
        for told in [Some(true), None] {
            sample.write_cache = told;
            check_cache(&sample).unwrap();
        }
    }
}
