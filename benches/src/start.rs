//! `walvisor-bench start`: the cost of starting a guest with one write-ahead-logged disk on either
//! transport.

use std::path::Path;
use std::process::{Command, Stdio};

use clap::Args;
use rustix::time::{ClockId, clock_gettime};
use serde_json::json;
use walvisor::commands::CommandError;
use walvisor_guest_images::Metrics;
use walvisor_storage::{StoreOptions, create_disk, default_log_dir};

use crate::bench::{Bench, Settings, Side, Turn};
use crate::bench_dirs::{directory, failed};
use crate::output::Output;
use crate::programs::walvisor;
use crate::tiny_guest;

const MATRICES: &str = include_str!("../matrices/start.toml");
const DISK_BYTES: u64 = 64 << 20;

/// Arguments of `walvisor-bench start`.
#[derive(Debug, Args)]
pub struct StartArguments {
    #[command(flatten)]
    output: Output,
}

/// Runs `walvisor-bench start`.
///
/// # Errors
/// If a guest does not start or does not end with status 0, or a file can't be written.
pub fn run(arguments: &StartArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let mut bench = Bench::new(MATRICES, output, &[], &Settings::new());
    let place = directory(&output.dir)?;
    let at = place.path();
    let kernel = at.join("kernel.elf");
    std::fs::write(&kernel, tiny_guest::image()).map_err(failed("write the kernel", &kernel))?;
    let disk = at.join("disk.img");
    let (log, options) = (default_log_dir(&disk), StoreOptions::default());
    create_disk(&disk, DISK_BYTES, &log, &options).map_err(CommandError::failed)?;
    let session = bench.start()?;
    let run = bench.matrices[0].measure(&session, |side| start(side, at));
    bench.finish(session, run)
}

/// Runs the guest once.
fn start(side: &Side, at: &Path) -> Result<Turn, CommandError> {
    let mut command = Command::new(walvisor()?);
    command.args(["run", "--memory", "128M", "--kernel", "kernel.elf"]);
    command.args(["--metrics", "metrics"]).current_dir(at);
    command.stdin(Stdio::null());
    if !side.text("spec").is_empty() {
        command.args(["--disk", side.text("spec")]);
    }
    let spawned = clock_gettime(ClockId::Monotonic);
    let output = command.output().map_err(CommandError::failed)?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(CommandError::Failed(format!(
            "{}: {}",
            output.status,
            errors.trim()
        )));
    }
    let path = at.join("metrics");
    let metrics = std::fs::read_to_string(&path).map_err(failed("read the metrics", &path))?;
    let metrics = Metrics::parse(&metrics);
    let spawned_us = spawned.tv_sec as f64 * 1e6 + spawned.tv_nsec as f64 / 1e3;
    let us = |name: &str| metrics.value(name).map(|seconds| seconds * 1e6);
    let first_us = us("walvisor_first_instruction_monotonic_seconds");
    Ok(Turn(json!({
        "spawn_to_first_instruction_us": first_us.map(|first| first - spawned_us),
        "main_to_first_instruction_us": us("walvisor_start_to_first_instruction_seconds"),
        "vmm_resident_bytes": metrics.value("walvisor_vmm_resident_bytes"),
        "vmm_own_bytes": metrics.value("walvisor_vmm_own_bytes"),
    })))
}
