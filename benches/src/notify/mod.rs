//! `walvisor-bench notify`: the cost of a notification and of a flush, on each path to a disk.
//!
//! ```text
//!   embedded guest ─▶ virtio-mmio, virtio-pci ─ eventfds or exits ─┐
//!   virtio driver  ─▶ vhost-user daemon ───────────────────────────┼─▶ RAM disk, write-ahead-logged disk
//!   NBD client     ─▶ NBD daemon ──────────────────────────────────┘
//! ```
//! and, with --load linux, fio in Linux kernels (linux.rs): the same paths, TCMU, and TCMU inside a guest. Each path
//! runs the same closed loops, in turns.

mod doors;
mod linux;
mod section;

use std::time::Duration;

use clap::{Args, ValueEnum};

use walvisor::commands::CommandError;
use walvisor_vmm::probe::{self, Ring0};

use crate::linux::{Kernels, LinuxPlan};
use crate::load::loops::LoadJob;
use crate::matrix::Matrix;
use crate::output::{Output, chosen};
use crate::place::Place;
use crate::sample::{Point, Sample, check_caches};
use doors::Doors;

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

/// A way to the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Path {
    /// virtio-mmio with ioeventfd and irqfd
    Mmio,
    /// virtio-mmio whose doorbells exit and whose interrupts are ioctls
    MmioExits,
    /// virtio-pci with ioeventfd and irqfd
    Pci,
    /// virtio-pci whose doorbells exit and whose interrupts are ioctls
    PciExits,
    /// vhost-user, driven from this process
    VhostUser,
    /// NBD over a Unix socket, driven from this process
    Nbd,
}

impl Path {
    /// Its name in tables.
    fn name(self) -> &'static str {
        match self {
            Self::Mmio => "virtio-mmio ioeventfd",
            Self::MmioExits => "virtio-mmio exits",
            Self::Pci => "virtio-pci ioeventfd",
            Self::PciExits => "virtio-pci exits",
            Self::VhostUser => "vhost-user",
            Self::Nbd => "nbd",
        }
    }

    /// Whether the embedded guest uses it.
    fn is_of_guest(self) -> bool {
        !matches!(self, Self::VhostUser | Self::Nbd)
    }

    /// The source of its requests.
    fn load(self) -> &'static str {
        match self {
            Self::VhostUser => "vhost-user driver",
            Self::Nbd => "nbd client",
            _ => section::EMBEDDED_GUEST,
        }
    }
}

/// What keeps the data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum BackendKind {
    /// Memory: the notification alone
    Ram,
    /// An image and a write-ahead log
    Wal,
}

impl BackendKind {
    /// Its name in tables and SPECs.
    fn name(self) -> &'static str {
        match self {
            Self::Ram => "ram",
            Self::Wal => "wal",
        }
    }
}

/// What a side does in a turn.
#[derive(Clone, Copy, Debug)]
struct Work {
    path: Path,
    backend: BackendKind,
    /// The job of each loop.
    job: LoadJob,
    /// Number of loops on each queue.
    iodepth: u8,
    /// Number of queues.
    queues: u8,
}

impl Work {
    /// Whether syncs are counted. If so, a checkpoint precedes the job, whose first FLUSH would otherwise also sync the writes
    /// of earlier jobs, in any number of the log's segments.
    fn counts_syncs(&self) -> bool {
        self.backend == BackendKind::Wal && self.job == LoadJob::WriteFsync
    }

    fn point(&self) -> Point {
        Point {
            path: self.path.name().to_owned(),
            load: self.path.load().to_owned(),
            backend: self.backend.name().to_owned(),
            job: self.job.name().to_owned(),
            iodepth: self.iodepth.into(),
            queues: self.queues.into(),
            scheduler: String::new(),
        }
    }
}

/// All measurements on these paths, or those that fit in a minute.
fn plan(quick: bool, paths: &[Path], backends: &[BackendKind]) -> Matrix<Work> {
    let (depths, queues): (&[u8], &[u8]) = if quick {
        (&[1, 32], &[1])
    } else {
        (&[1, 4, 32], &[1, 4])
    };
    let mut matrix = Matrix::default();
    for &backend in backends {
        for job in [LoadJob::Read, LoadJob::Write, LoadJob::WriteFsync] {
            for &queues in queues {
                for &iodepth in depths {
                    let work = |&path: &Path| Work {
                        path,
                        backend,
                        job,
                        iodepth,
                        queues,
                    };
                    let (backend, job) = (backend.name(), job.name());
                    let name = format!("{backend} {job}, iodepth {iodepth}, {queues} queues");
                    matrix.add(name, paths.iter().map(|path| (path.name(), work(path))));
                }
            }
        }
    }
    matrix
}

/// Estimated time to start and stop around each turn.
const OVERHEAD: Duration = Duration::from_millis(60);

/// Runs `walvisor-bench notify`.
///
/// # Errors
/// If a measurement fails, a file can't be written, or a path has another cache mode than the others.
pub fn run(arguments: &NotifyArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let mut paths = chosen(&arguments.only);
    if !arguments.load.contains(&Load::Embedded) {
        paths.clear();
    }
    let backends = chosen(&arguments.backends);
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
            paths.retain(|path| !path.is_of_guest());
            notes.push(format!("virtio-mmio and virtio-pci: skipped: {error}"));
            false
        }
    };
    let rounds = output.rounds(5, 3);
    let turn = Duration::from_millis(if output.quick { 120 } else { 500 });
    let mut matrix = plan(output.quick, &paths, &backends);
    let kernels = if arguments.load.contains(&Load::Linux) {
        linux::plans(output, arguments.kernels.chosen(output.quick), &backends)
    } else {
        Vec::new()
    };
    let linux: Duration = kernels
        .iter()
        .map(|(_, plan)| LinuxPlan::expected(plan))
        .sum();
    let session = output.start(matrix.expected(|_| turn + OVERHEAD) * rounds as u32 + linux)?;
    let mut sections = Vec::new();
    if !paths.is_empty() {
        let place = Place::new(&output.dir)?;
        let mut doors = Doors::open(&place, &paths, &backends, turn)?;
        let mut samples = Vec::new();
        matrix.measure(
            rounds,
            &session,
            |_| turn + OVERHEAD,
            |side| {
                let work = &side.plan;
                let (turn, write_cache) = doors.measure(work, &session)?;
                let sample = Sample {
                    point: work.point(),
                    turn: turn.clone(),
                    write_cache,
                    emulated: is_emulated() || (work.path.is_of_guest() && !guest_seconds),
                };
                check_caches(std::slice::from_ref(&sample))?;
                samples.push(sample);
                Ok(turn)
            },
        )?;
        drop(doors);
        sections = section::sections(&samples, &notes);
    }
    for (key, plan) in &kernels {
        let outcome = plan.measure(&output.dir, &session)?;
        sections.extend(linux::sections(key, plan, outcome));
    }
    let title = "What a notification costs, and what a flush costs, on each path";
    output.write(title, session, sections)
}

/// Whether QEMU emulates this machine, which makes its times meaningless too.
fn is_emulated() -> bool {
    let hypervisor = std::arch::x86_64::__cpuid(0x4000_0000);
    [hypervisor.ebx, hypervisor.ecx, hypervisor.edx]
        == ["TCGT", "CGTC", "GTCG"]
            .map(|part| u32::from_le_bytes(part.as_bytes().try_into().expect("four letters")))
}
