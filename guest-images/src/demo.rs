//! The demonstration: the embedded guest, then Debian guests that run fio on two write-ahead-logged
//! disks. The disks share one log, and each uses a different virtio transport. A table shows the
//! results.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use walvisor_vmm::probe;

use crate::cache::Cache;
use crate::error::{Error, FileContext, Result};
use crate::job::{GuestJob, JobOutcome};
use crate::machine::Machine;
use crate::metrics::Metrics;
use crate::reporter::Reporter;

const JOB: &str = include_str!("../scripts/demo-job.sh");
const GUEST: &str = include_str!("../scripts/demo-guest.sh");
const TOGETHER: &str = include_str!("../scripts/demo-guest-together.sh");
const TRANSPORTS: [&str; 2] = ["mmio", "pci"];
/// Writers on each disk when fio writes to both disks at once.
const WRITERS: u32 = 4;

/// Runs the demonstration with the binary `walvisor`. fio's results, the metrics, the checks and
/// the console are kept in `output`.
///
/// # Errors
/// Any part of the demonstration fails.
pub fn demo(cache: &Cache, walvisor: &Path, output: &Path) -> Result<()> {
    fs::create_dir_all(output).at("create", output)?;
    let mut script = String::new();
    let embedded_here = match probe::open() {
        Ok(_) => {
            println!("walvisor demo: the embedded guest");
            run_embedded(walvisor)?;
            true
        }
        Err(error) => {
            println!("The embedded guest runs nested as well: {error}");
            script.push_str(
                "progress 'walvisor demo'; walvisor demo >\"$RESULTS/embedded.txt\" || exit\n",
            );
            false
        }
    };
    script.push_str(JOB);

    println!("\nA Debian guest runs fio on two write-ahead-logged disks that share one log");
    let (machine, reason) = Machine::choose();
    println!("{reason}");
    let console = output.join("console.log");
    let reporter = Reporter::quiet(Some(File::create(&console).at("create", &console)?));
    // An emulated guest does hundreds of writes per second, a guest on the real processor tens of
    // thousands.
    let (size, writer_size) = match machine {
        Machine::Direct => ("16M", "4M"),
        Machine::Nested => ("2M", "512K"),
    };
    let together = format!("SIZE={writer_size} WRITERS={WRITERS}\n{TOGETHER}");
    let job = GuestJob::new(script, walvisor)
        .file("guest.sh", format!("SIZE={size}\n{GUEST}"))
        .file("guest-together.sh", together);
    let outcome = job.run_on(machine, cache, &reporter)?;
    outcome.keep_results(output)?;
    drop(reporter);
    if outcome.status != 0 {
        return Err(Error::Unusable(format!(
            "the guest's job failed with status {}: its console is in {}",
            outcome.status,
            console.display()
        )));
    }
    if !embedded_here {
        println!(
            "\nwalvisor demo: the embedded guest\n{}",
            outcome.result("embedded.txt")?
        );
    }
    print!("{}", summary(&outcome)?);
    println!(
        "attempts given up because a guest hung or crashed: {}",
        outcome.hung_boots
    );
    println!("fio's JSON, metrics and console: {}", output.display());
    Ok(())
}

fn run_embedded(walvisor: &Path) -> Result<()> {
    let mut command = Command::new(walvisor);
    command.arg("demo");
    let status = command.status().at("start", walvisor)?;
    if status.success() {
        Ok(())
    } else {
        Err(Error::Unusable(format!(
            "walvisor demo failed ({status}): see above"
        )))
    }
}

/// The table at the end.
fn summary(outcome: &JobOutcome) -> Result<String> {
    let metrics = |name: &str| Ok(Metrics::parse(&outcome.result(name)?));
    let (alone, together) = (metrics("demo.prom")?, metrics("together.prom")?);
    let tables = [
        fio_table(outcome)?,
        disk_table(outcome, &[&alone, &together])?,
        log_table(&alone, &together)?,
    ];
    Ok(format!("\n{}", tables.join("\n")))
}

/// fio's results: first one disk at a time, then both disks at once.
fn fio_table(outcome: &JobOutcome) -> Result<String> {
    let mut table = format!(
        "{:<11} {:<8} {:>7} {:>7} {:>9} {:>13} {:>13}\n",
        "transport", "fio job", "writers", "iodepth", "IOPS", "p99 write", "p99 fsync"
    );
    let mut row = |transport: &str, job: &str, writers: u32, depth: &str, name: &str| {
        let report = json(&outcome.result(name)?, name)?;
        let job_report = &report["jobs"][0];
        let error = &job_report["error"];
        if error != 0 {
            return Err(Error::Unusable(format!(
                "{name}: fio reports error {error}"
            )));
        }
        let _ = writeln!(
            table,
            "virtio-{transport:<4} {job:<8} {writers:>7} {depth:>7} {:>9.0} {:>13} {:>13}",
            job_report["write"]["iops"].as_f64().unwrap_or_default(),
            milliseconds(&job_report["write"]["clat_ns"]),
            milliseconds(&job_report["sync"]["lat_ns"]),
        );
        Ok(())
    };
    for transport in TRANSPORTS {
        for job in ["fsync", "verify"] {
            for depth in ["1", "32"] {
                let name = format!("{transport}-{job}-{depth}.json");
                row(transport, job, 1, depth, &name)?;
            }
        }
    }
    for transport in TRANSPORTS {
        let name = format!("{transport}-together.json");
        row(transport, "together", WRITERS, "1", &name)?;
    }
    table.push_str("together: fsync after each write, on both disks at once\n");
    Ok(table)
}

/// The counters of the devices, summed over all `runs`, and whether the disks are clean.
fn disk_table(outcome: &JobOutcome, runs: &[&Metrics]) -> Result<String> {
    const COUNTERS: [&str; 4] = ["requests", "doorbells", "interrupts", "flushes"];
    let mut table = format!("{:<11}", "disk");
    for title in COUNTERS {
        let _ = write!(table, " {title:>10}");
    }
    table.push_str("  disk check\n");
    for transport in TRANSPORTS {
        let _ = write!(table, "virtio-{transport:<4}");
        for title in COUNTERS {
            let metric = format!("walvisor_block_{title}_total");
            let mut sum = 0.0;
            for metrics in runs {
                sum += counter(metrics, &metric, transport)?;
            }
            let _ = write!(table, " {sum:>10.0}");
        }
        let name = format!("check-{transport}.json");
        let check = json(&outcome.result(&name)?, &name)?;
        let verdict = if check["clean"] == true {
            "clean"
        } else {
            "damaged"
        };
        let _ = writeln!(table, "  {verdict}");
    }
    Ok(table)
}

/// The counters of the shared log: with fio on one disk at a time (`alone`), on both (`together`),
/// and their sums.
fn log_table(alone: &Metrics, together: &Metrics) -> Result<String> {
    const COUNTERS: [&str; 4] = ["flushes", "flushes_grouped", "syncs", "groups"];
    let mut table = format!("{:<19}", "shared log");
    for title in COUNTERS {
        let _ = write!(table, " {:>15}", title.replace('_', " "));
    }
    table.push_str("  flushes/group\n");
    let runs: [(&str, &[&Metrics]); 3] = [
        ("one disk at a time", &[alone]),
        ("both at once", &[together]),
        ("whole run", &[alone, together]),
    ];
    for (name, runs) in runs {
        let mut counts = [0.0; COUNTERS.len()];
        for (count, title) in counts.iter_mut().zip(COUNTERS) {
            let metric = format!("walvisor_log_{title}_total");
            for metrics in runs {
                *count += metrics
                    .value(&metric)
                    .ok_or_else(|| Error::Unusable(format!("the metrics lack {metric}")))?;
            }
        }
        let _ = write!(table, "{name:<19}");
        for count in counts {
            let _ = write!(table, " {count:>15.0}");
        }
        let [_, grouped, _, groups] = counts;
        let _ = writeln!(table, "  {:>13.2}", grouped / groups.max(1.0));
    }
    Ok(table)
}

/// One counter of the disk on `transport`.
fn counter(metrics: &Metrics, metric: &str, transport: &str) -> Result<f64> {
    metrics
        .sum(metric, "transport", transport)
        .ok_or_else(|| Error::Unusable(format!("the metrics lack {metric} of {transport}")))
}

fn json(text: &str, name: &str) -> Result<Value> {
    // fio may print notes before its JSON.
    let start = text.find('{').unwrap_or(0);
    serde_json::from_str(&text[start..])
        .map_err(|error| Error::Unusable(format!("{name} is not JSON: {error}")))
}

/// The 99th percentile of one of fio's latencies, or a dash if nothing was measured.
fn milliseconds(latency: &Value) -> String {
    match latency["percentile"]["99.000000"].as_f64() {
        Some(nanoseconds) => format!("{:.2} ms", nanoseconds / 1e6),
        None => "-".to_owned(),
    }
}
