//! `walvisor-bench notify`: the cost of a notification and of a flush, on each path to a disk.
//!
//! ```text
//!   embedded guest ─▶ virtio-mmio, virtio-pci ─ eventfds or exits ─┐
//!   virtio driver  ─▶ vhost-user daemon ───────────────────────────┼─▶ RAM disk, write-ahead-logged disk
//!   NBD client     ─▶ NBD daemon ──────────────────────────────────┘
//! ```
//! and, with --load linux, fio in Linux kernels (linux/): the same paths, TCMU, and TCMU inside a
//! guest. Each path runs the same closed loops, in turns.

mod doors;

use std::time::Duration;

use clap::Args;
use serde_json::json;
use walvisor::commands::CommandError;
use walvisor_vmm::probe::{self, Ring0};

use crate::bench::{Bench, Matrix, measure_together, settings, sides};
use crate::bench_dirs::BenchDirs;
use crate::linux::{self, Kernels, Scripts};
use crate::output::Output;
use crate::session::Session;
use doors::{BACKENDS, Doors, is_of_guest};

const MATRICES: &str = include_str!("../../matrices/notify.toml");
const LOADS: [&str; 2] = ["embedded", "linux"];
const SCRIPTS: Scripts = Scripts {
    user_mode: include_str!("../../scripts/notify-user-mode.sh"),
    machine: include_str!("../../scripts/notify-machine.sh"),
    guest: include_str!("../../scripts/notify-guest.sh"),
    newer: include_str!("../../scripts/notify-newer.sh"),
};

/// Arguments of `walvisor-bench notify`.
#[derive(Debug, Args)]
pub struct NotifyArguments {
    /// The load generators, separated by commas. Embedded: a guest in this program, and its
    /// clients, wherever KVM opens. Linux: fio in Linux kernels, with TCMU: user-mode Linux, and a
    /// machine with KVM, emulated where this one runs no Linux; and with ublk, always emulated
    #[arg(long, value_delimiter = ',', value_name = "LOAD,LOAD..", default_value = LOADS[0], value_parser = LOADS)]
    load: Vec<String>,
    /// Only these paths of the embedded load, separated by commas. Exits: doorbells exit, and
    /// interrupts are ioctls
    #[arg(long, value_delimiter = ',', value_name = "PATH,PATH..", value_parser = sides(MATRICES))]
    only: Vec<String>,
    /// Only these backends, separated by commas: memory, which shows the notification alone, or an
    /// image and a log
    #[arg(long, value_delimiter = ',', value_name = "BACKEND,BACKEND..", value_parser = BACKENDS)]
    backends: Vec<String>,
    #[command(flatten)]
    kernels: Kernels,
    #[command(flatten)]
    output: Output,
}

/// Runs `walvisor-bench notify`.
///
/// # Errors
/// If a measurement fails, a file can't be written, or a path has another cache mode than the
/// others.
pub fn run(arguments: &NotifyArguments) -> Result<(), CommandError> {
    let (output, has) = (&arguments.output, |load| {
        arguments.load.iter().any(|known| known == load)
    });
    let mut sections: Vec<String> = Vec::new();
    sections.extend(has("embedded").then(|| "embedded".to_owned()));
    if has("linux") {
        sections.extend(arguments.kernels.chosen(output.quick));
    }
    let mut bench = Bench::new(MATRICES, output, &sections, &settings(json!({})));
    let is_wanted = |matrix: &Matrix| {
        let backend = matrix
            .sides()
            .next()
            .map_or("", |side| side.text("backend"));
        arguments.backends.is_empty() || arguments.backends.iter().any(|known| known == backend)
    };
    bench.matrices.retain(is_wanted);
    let embedded = bench
        .matrices
        .partition_point(|matrix| matrix.spec.name == "embedded");
    for matrix in &mut bench.matrices[..embedded] {
        matrix.keep_sides(&arguments.only);
    }
    prepare(&mut bench.matrices[..embedded])?;
    let session = bench.start()?;
    let (embedded, kernels) = bench.matrices.split_at_mut(embedded);
    let mut run = measure(embedded, output, &session);
    for kernel in kernels.chunk_by_mut(|one, other| one.spec.name == other.spec.name) {
        run = run.and_then(|()| linux::measure(kernel, &SCRIPTS, &output.dir, &session));
    }
    bench.finish(session, run)
}

/// Leaves out the paths of a virtual machine if there is no KVM, and marks those whose times mean
/// nothing.
fn prepare(matrices: &mut [Matrix]) -> Result<(), CommandError> {
    let ring0 = probe::ring0();
    let note = match &ring0 {
        Ok(Ring0::Native) => None,
        Ok(Ring0::Interpreted) => Some(
            "This KVM interprets ring 0, where a guest takes its interrupts: the times of the \
             embedded guest are grey (in brackets), its counts are those of any KVM."
                .to_owned(),
        ),
        Err(error) => Some(format!("virtio-mmio and virtio-pci: skipped: {error}")),
    };
    for matrix in &mut *matrices {
        for row in &mut matrix.rows {
            row.sides
                .retain(|side| ring0.is_ok() || !is_of_guest(&side.side));
        }
        matrix.rows.retain(|row| !row.sides.is_empty());
        for side in matrix.sides_mut() {
            let interpreted = is_of_guest(&side.side) && note.is_some();
            side.emulated = interpreted || is_emulated();
        }
    }
    if let (Some(first), Some(note)) = (matrices.first_mut(), note) {
        if first.rows.is_empty() {
            return Err(CommandError::Failed(note));
        }
        first.notes.push(note);
    }
    Ok(())
}

fn measure(
    matrices: &mut [Matrix],
    output: &Output,
    session: &Session,
) -> Result<(), CommandError> {
    if matrices.is_empty() {
        return Ok(());
    }
    let place = BenchDirs::new(&output.dir)?;
    let turn = Duration::from_millis(matrices[0].rows[0].sides[0].number("turn_ms"));
    let mut doors = Doors::open(&place, matrices, turn)?;
    measure_together(matrices, session, |side| doors.measure(side, session))
}

/// Whether QEMU emulates this machine, which makes its times meaningless too.
fn is_emulated() -> bool {
    let hypervisor = std::arch::x86_64::__cpuid(0x4000_0000);
    [hypervisor.ebx, hypervisor.ecx, hypervisor.edx]
        == ["TCGT", "CGTC", "GTCG"]
            .map(|part| u32::from_le_bytes(part.as_bytes().try_into().expect("four letters")))
}
