//! The demonstration: the embedded guest, then a Debian guest that runs fio on a write-ahead-logged disk over either
//! transport, and a table of what came out.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::path::Path;
use std::process::Command;

use serde_json::Value;
use walvisor::probe;

use crate::cache::Cache;
use crate::error::{Error, FileContext, Result};
use crate::job::{Job, Outcome};
use crate::machine::Machine;
use crate::metrics::Metrics;
use crate::reporter::Reporter;

const JOB: &str = include_str!("../scripts/demo-job.sh");
const GUEST: &str = include_str!("../scripts/demo-guest.sh");
const TRANSPORTS: [&str; 2] = ["mmio", "pci"];

/// Runs the demonstration with the binary `walvisor`. The fio results, metrics, checks and the console stay in `output`.
///
/// # Errors
/// A part of it fails: nothing is hidden by a later part that works.
pub fn demo(cache: &Cache, walvisor: &Path, output: &Path) -> Result<()> {
    fs::create_dir_all(output).at("create", output)?;
    let mut script = String::new();
    let embedded_here = match probe::open() {
        Ok(_) => {
            println!("walvisor demo: the embedded guest");
            embedded(walvisor)?;
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

    println!("\nA Debian guest runs fio on two write-ahead-logged disks");
    let (machine, reason) = Machine::choose();
    println!("{reason}");
    let console = output.join("console.log");
    let reporter = Reporter::quiet(Some(File::create(&console).at("create", &console)?));
    // Emulated, a guest does some hundred writes a second; on the processor, some ten thousand.
    let size = match machine {
        Machine::Direct => "16M",
        Machine::Nested => "2M",
    };
    let job = Job::new(script, walvisor).file("guest.sh", format!("SIZE={size}\n{GUEST}"));
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
    println!("hung boots that were tried again: {}", outcome.hung_boots);
    println!("fio's JSON, metrics and console: {}", output.display());
    Ok(())
}

fn embedded(walvisor: &Path) -> Result<()> {
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
fn summary(outcome: &Outcome) -> Result<String> {
    let mut table = format!(
        "\n{:<11} {:<8} {:>7} {:>9} {:>13} {:>13}\n",
        "transport", "fio job", "iodepth", "IOPS", "p99 write", "p99 fsync"
    );
    for transport in TRANSPORTS {
        for job in ["fsync", "verify"] {
            for depth in ["1", "32"] {
                let name = format!("{transport}-{job}-{depth}.json");
                let report = json(&outcome.result(&name)?, &name)?;
                let job_report = &report["jobs"][0];
                let error = &job_report["error"];
                if error != 0 {
                    return Err(Error::Unusable(format!(
                        "{name}: fio reports error {error}"
                    )));
                }
                let _ = writeln!(
                    table,
                    "virtio-{transport:<4} {job:<8} {depth:>7} {:>9.0} {:>13} {:>13}",
                    job_report["write"]["iops"].as_f64().unwrap_or_default(),
                    milliseconds(&job_report["write"]["clat_ns"]),
                    milliseconds(&job_report["sync"]["lat_ns"]),
                );
            }
        }
    }
    table.push_str(&disk_table(outcome)?);
    Ok(table)
}

/// What the devices and their logs counted, and whether the disks are clean.
fn disk_table(outcome: &Outcome) -> Result<String> {
    const COUNTERS: [(&str, &str); 6] = [
        ("requests", "walvisor_block_requests_total"),
        ("doorbells", "walvisor_block_doorbells_total"),
        ("interrupts", "walvisor_block_interrupts_total"),
        ("flushes", "walvisor_block_flushes_total"),
        ("syncs", "walvisor_log_syncs_total"),
        ("groups", "walvisor_log_groups_total"),
    ];
    let metrics = Metrics::parse(&outcome.result("metrics.prom")?);
    let mut table = format!("\n{:<11}", "disk");
    for (title, _) in COUNTERS {
        let _ = write!(table, " {title:>10}");
    }
    table.push_str("  flushes/group  disk check\n");
    for transport in TRANSPORTS {
        let of = |metric: &str| {
            metrics.sum(metric, "transport", transport).ok_or_else(|| {
                Error::Unusable(format!("the metrics hold no {metric} of {transport}"))
            })
        };
        let _ = write!(table, "virtio-{transport:<4}");
        for (_, metric) in COUNTERS {
            let _ = write!(table, " {:>10.0}", of(metric)?);
        }
        let groups = of("walvisor_log_groups_total")?;
        let grouped = of("walvisor_log_flushes_grouped_total")? / groups.max(1.0);
        let name = format!("check-{transport}.json");
        let check = json(&outcome.result(&name)?, &name)?;
        let verdict = if check["clean"] == true {
            "clean"
        } else {
            "damaged"
        };
        let _ = writeln!(table, "  {grouped:>13.2}  {verdict}");
    }
    Ok(table)
}

fn json(text: &str, name: &str) -> Result<Value> {
    // fio may print notes before its JSON.
    let start = text.find('{').unwrap_or(0);
    serde_json::from_str(&text[start..])
        .map_err(|error| Error::Unusable(format!("{name} is no JSON: {error}")))
}

/// The 99th percentile of one of fio's latencies, or a dash if nothing was measured.
fn milliseconds(latency: &Value) -> String {
    match latency["percentile"]["99.000000"].as_f64() {
        Some(nanoseconds) => format!("{:.2} ms", nanoseconds / 1e6),
        None => "-".to_owned(),
    }
}
