//! The cost of starting a guest with one write-ahead-logged disk on either transport: the time from spawning
//! `walvisor run` to the first guest instruction, and the VMM's own memory (resident memory less guest memory, and
//! the part of it that is not program text).
//!
//! `cargo bench -p walvisor-benches --bench start`; with `-- --json`, the same as JSON.

use std::error::Error;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use rustix::time::{ClockId, clock_gettime};
use walvisor_benches::report::{Cell, Section};
use walvisor_benches::tiny_guest;
use walvisor_guest_images::{Metrics, walvisor_binary};

const RUNS: usize = 20;

fn main() -> ExitCode {
    match measure_all() {
        Ok(section) if std::env::args().any(|argument| argument == "--json") => {
            println!(
                "{}",
                serde_json::to_string_pretty(&section).unwrap_or_default()
            );
            ExitCode::SUCCESS
        }
        Ok(section) => {
            println!("{}\n\n{}", section.title, section.table);
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("start: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure_all() -> Result<Section, Box<dyn Error>> {
    let walvisor = walvisor_binary("release")?;
    let directory = tempfile::tempdir()?;
    let kernel = directory.path().join("kernel.elf");
    std::fs::write(&kernel, tiny_guest::image())?;
    let disk = directory.path().join("disk.img");
    let created = Command::new(&walvisor)
        .args(["disk", "create"])
        .arg(&disk)
        .args(["--size", "64M"])
        .output()?;
    if !created.status.success() {
        return Err(String::from_utf8_lossy(&created.stderr).into());
    }
    let mut section = Section::new(
        "start",
        &format!("Starting a guest: median of {RUNS} runs (lowest to highest)"),
        &[],
        &[
            ("disk", "disk"),
            (
                "spawn_to_first_instruction_us",
                "spawn to first instruction, us",
            ),
            (
                "main_to_first_instruction_us",
                "main to first instruction, us",
            ),
            ("vmm_resident_bytes", "VMM's resident bytes"),
            ("vmm_own_bytes", "its own bytes"),
        ],
    );
    for transport in ["none", "mmio", "pci"] {
        let mut samples: [Vec<f64>; 4] = Default::default();
        for _ in 0..RUNS {
            let sample = start_once(&walvisor, &kernel, &disk, transport, directory.path())?;
            for (samples, figure) in samples.iter_mut().zip(sample) {
                samples.push(figure);
            }
        }
        let figures = samples.iter().map(|samples| Cell::of(samples, 0));
        let row = std::iter::once(Cell::text(transport)).chain(figures);
        section.table.rows.push(row.collect());
    }
    Ok(section)
}

/// Runs the guest once, and returns the figures of the columns. Fails if the guest does not start, or does not end with
/// status 0.
fn start_once(
    walvisor: &Path,
    kernel: &Path,
    disk: &Path,
    transport: &str,
    directory: &Path,
) -> Result<[f64; 4], Box<dyn Error>> {
    let metrics_file = directory.join("metrics");
    let mut command = Command::new(walvisor);
    command.args(["run", "--memory", "128M", "--kernel"]);
    command.arg(kernel).arg("--metrics").arg(&metrics_file);
    command.stdin(Stdio::null());
    if transport != "none" {
        let spec = format!("path={},transport={transport}", disk.display());
        command.arg("--disk").arg(spec);
    }
    let spawned = clock_gettime(ClockId::Monotonic);
    let output = command.output()?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        return Err(format!("{}: {errors}", output.status).into());
    }
    let metrics = Metrics::parse(&std::fs::read_to_string(&metrics_file)?);
    let value = |name: &str| {
        metrics
            .value(name)
            .ok_or(format!("no {name} in the metrics"))
    };
    let spawned_us = spawned.tv_sec as f64 * 1e6 + spawned.tv_nsec as f64 / 1e3;
    Ok([
        value("walvisor_first_instruction_monotonic_us")? - spawned_us,
        value("walvisor_start_to_first_instruction_us")?,
        value("walvisor_vmm_resident_bytes")?,
        value("walvisor_vmm_own_bytes")?,
    ])
}
