//! The cost of starting a guest with one write-ahead-logged disk on either transport: the time from spawning
//! `walvisor run` to the first guest instruction, and the VMM's own memory (resident memory less guest memory, and
//! the part of it that is not program text).
//!
//! `cargo bench -p walvisor-benches --bench start`; with `-- --json`, the same as JSON.

use std::error::Error;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};

use rustix::time::{ClockId, clock_gettime};
use serde_json::{Value, json};
use walvisor_benches::report::Spread;
use walvisor_benches::tiny_guest;
use walvisor_guest_images::{Metrics, walvisor_binary};

const RUNS: usize = 20;

fn main() -> ExitCode {
    match measure_all() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("start: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure_all() -> Result<(), Box<dyn Error>> {
    let as_json = std::env::args().any(|argument| argument == "--json");
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

    let mut report = Vec::new();
    for transport in ["none", "mmio", "pci"] {
        let mut samples = Vec::new();
        for _ in 0..RUNS {
            samples.push(start_once(
                &walvisor,
                &kernel,
                &disk,
                transport,
                directory.path(),
            )?);
        }
        report.push((transport, samples));
    }
    if as_json {
        println!("{}", serde_json::to_string_pretty(&to_json(&report))?);
    } else {
        print_table(&report);
    }
    Ok(())
}

struct Sample {
    spawn_to_first_instruction_us: f64,
    main_to_first_instruction_us: f64,
    vmm_resident_bytes: f64,
    vmm_own_bytes: f64,
}

/// Runs the guest once. Fails if the guest does not start, or does not end with status 0.
fn start_once(
    walvisor: &Path,
    kernel: &Path,
    disk: &Path,
    transport: &str,
    directory: &Path,
) -> Result<Sample, Box<dyn Error>> {
    let metrics_file = directory.join("metrics");
    let mut command = Command::new(walvisor);
    command
        .args(["run", "--memory", "128M", "--kernel"])
        .arg(kernel);
    command
        .arg("--metrics")
        .arg(&metrics_file)
        .stdin(Stdio::null());
    if transport != "none" {
        command
            .arg("--disk")
            .arg(format!("path={},transport={transport}", disk.display()));
    }
    let spawned = clock_gettime(ClockId::Monotonic);
    let output = command.output()?;
    if !output.status.success() {
        return Err(format!(
            "{}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        )
        .into());
    }
    let metrics = Metrics::parse(&std::fs::read_to_string(&metrics_file)?);
    let value = |name: &str| {
        metrics
            .value(name)
            .ok_or(format!("no {name} in the metrics"))
    };
    let spawned_us = spawned.tv_sec as f64 * 1e6 + spawned.tv_nsec as f64 / 1e3;
    Ok(Sample {
        spawn_to_first_instruction_us: value("walvisor_first_instruction_monotonic_us")?
            - spawned_us,
        main_to_first_instruction_us: value("walvisor_start_to_first_instruction_us")?,
        vmm_resident_bytes: value("walvisor_vmm_resident_bytes")?,
        vmm_own_bytes: value("walvisor_vmm_own_bytes")?,
    })
}

type Field = fn(&Sample) -> f64;

const FIELDS: [(&str, Field); 4] = [
    ("spawn_to_first_instruction_us", |sample| {
        sample.spawn_to_first_instruction_us
    }),
    ("main_to_first_instruction_us", |sample| {
        sample.main_to_first_instruction_us
    }),
    ("vmm_resident_bytes", |sample| sample.vmm_resident_bytes),
    ("vmm_own_bytes", |sample| sample.vmm_own_bytes),
];

fn spread(samples: &[Sample], field: Field) -> Option<Spread> {
    Spread::of(&samples.iter().map(field).collect::<Vec<_>>())
}

fn print_table(report: &[(&str, Vec<Sample>)]) {
    println!(
        "{:<9} {:<31} {:>10} {:>10} {:>10}",
        "disk",
        format!("of {RUNS} runs"),
        "min",
        "median",
        "max"
    );
    for (transport, samples) in report {
        for (name, field) in FIELDS {
            if let Some(Spread { median, low, high }) = spread(samples, field) {
                println!("{transport:<9} {name:<31} {low:>10.0} {median:>10.0} {high:>10.0}");
            }
        }
    }
}

fn to_json(report: &[(&str, Vec<Sample>)]) -> Value {
    let of_one = |samples: &Vec<Sample>| {
        FIELDS
            .iter()
            .filter_map(|(name, field)| {
                let Spread { median, low, high } = spread(samples, *field)?;
                Some((
                    (*name).to_owned(),
                    json!({ "min": low, "median": median, "max": high }),
                ))
            })
            .collect::<serde_json::Map<_, _>>()
    };
    let disks: serde_json::Map<_, _> = report
        .iter()
        .map(|(transport, samples)| ((*transport).to_owned(), Value::Object(of_one(samples))))
        .collect();
    json!({ "runs": RUNS, "disk": disks })
}
