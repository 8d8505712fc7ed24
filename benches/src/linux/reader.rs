//! The lines that begin with `measure: `, as scripts/load.sh prints them; `{}` are JSON.
//!
//! ```text
//!   machine direct|nested|user-mode       where it all runs
//!   job {}                                a measurement begins
//!   counters monitor|daemon {}            before, and after
//!   fio read|write|sync {}                what fio says of these requests
//!   end                                   a measurement ends
//!   failed WHY   missing WHAT|WHY   ask
//! ```

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};
use walvisor::commands::CommandError;

use crate::bench::{Matrix, Turn};
use crate::exits::{add_exits, check_cache};

/// What a job measures.
#[derive(Debug, Deserialize)]
struct JobReport {
    /// The side of the matrix.
    path: String,
    backend: String,
    job: String,
    iodepth: u64,
    queues: u64,
    /// The I/O scheduler in force.
    scheduler: String,
    /// The disk's name in the process that serves it.
    disk: String,
    /// What the kernel says of its write cache.
    cache: String,
}

/// Counters of the process that serves a disk, at one moment.
#[derive(Clone, Debug, Deserialize)]
pub struct DiskCounters {
    /// Processor time of the server's threads, in nanoseconds.
    pub cpu_ns: f64,
    /// Processor time of the whole machine, in nanoseconds.
    pub machine_cpu_ns: f64,
    /// The output of `walvisor ctl ... stats --json`; an empty object if the process has no control
    /// socket.
    pub stats: Value,
}

/// What fio says of some requests. Half, 99 % and 99.9 % of them stayed within these nanoseconds.
#[derive(Clone, Copy, Debug, Default, Deserialize)]
struct Requests {
    requests: f64,
    iops: f64,
    bytes_per_s: f64,
    p50: f64,
    p99: f64,
    p999: f64,
}

/// Combines lines into turns.
#[derive(Default)]
pub struct EventReader {
    /// `direct`, `nested` or `user-mode`.
    machine: String,
    job: Option<RunningJob>,
}

/// A job that is under way.
struct RunningJob {
    job: JobReport,
    /// Counters of the monitor or daemon that serves the disk, before and after the job.
    monitor: Vec<DiskCounters>,
    daemon: Vec<DiskCounters>,
    fio: BTreeMap<String, Requests>,
}

impl EventReader {
    /// Takes a line, without its `measure: `. What was measured goes to the side of its job, and
    /// why something is missing to the notes. Returns whether the guest waits for the counters of
    /// the daemon outside.
    ///
    /// # Errors
    /// If the line has none of these forms, no side has this job, its write cache is off, or fio
    /// failed.
    pub fn take(&mut self, line: &str, matrices: &mut [Matrix]) -> Result<bool, CommandError> {
        let strange = || {
            CommandError::Failed(format!(
                "a guest said {line:?}: scripts of another version?"
            ))
        };
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        let (of, data) = rest.split_once(' ').unwrap_or((rest, ""));
        match kind {
            "machine" => self.machine = rest.to_owned(),
            "job" => {
                let job: JobReport = serde_json::from_str(rest).map_err(|_| strange())?;
                check_cache(&job.path, &job.backend, job.cache == "write back")?;
                self.job = Some(RunningJob {
                    job,
                    monitor: Vec::new(),
                    daemon: Vec::new(),
                    fio: BTreeMap::new(),
                });
            }
            "counters" => {
                let counters = serde_json::from_str(data).map_err(|_| strange())?;
                match (&mut self.job, of) {
                    (Some(job), "daemon") => job.daemon.push(counters),
                    (Some(job), _) => job.monitor.push(counters),
                    (None, _) => {}
                }
            }
            "fio" => {
                let requests = serde_json::from_str(data).map_err(|_| strange())?;
                if let Some(job) = &mut self.job {
                    job.fio.insert(of.to_owned(), requests);
                }
            }
            "end" => {
                let job = self.job.take().ok_or_else(strange)?;
                let figures = job.figures(&self.machine).ok_or_else(strange)?;
                self.push(&job.job, figures, matrices)?;
            }
            "failed" => return Err(CommandError::Failed(rest.to_owned())),
            "missing" => {
                let (what, why) = rest.split_once('|').ok_or_else(strange)?;
                matrices[0].notes.push(format!("Missing: {what}: {why}."));
            }
            "ask" => return Ok(true),
            _ => return Err(strange()),
        }
        Ok(false)
    }

    /// Adds the counters of the daemon outside, which the current job has asked for.
    pub fn add_outside_counters(&mut self, counters: DiskCounters) {
        if let Some(job) = &mut self.job {
            job.monitor.push(counters);
        }
    }

    /// Adds the turn to the side that has this job.
    fn push(
        &self,
        job: &JobReport,
        figures: Value,
        matrices: &mut [Matrix],
    ) -> Result<(), CommandError> {
        let mut sides = matrices.iter_mut().flat_map(Matrix::sides_mut);
        let side = sides.find(|side| {
            let scheduler = side.text("scheduler");
            side.side == job.path
                && side.text("backend") == job.backend
                && side.text("job") == job.job
                && side.number("iodepth") == job.iodepth
                && side.number("queues") == job.queues
                && (scheduler.is_empty() || scheduler == job.scheduler)
        });
        let side = side.ok_or_else(|| {
            CommandError::Failed(format!("a guest measured {job:?}, which was not asked for"))
        })?;
        let load = match self.machine.as_str() {
            "nested" => "fio, nested Linux",
            "user-mode" => "fio, user-mode Linux",
            _ => "fio, Linux",
        };
        side.plan.insert("load".to_owned(), load.into());
        side.emulated = self.machine == "nested";
        side.turns.push(Turn(figures));
        Ok(())
    }
}

impl RunningJob {
    /// The figures of the job, or `None` if a part of them is missing.
    fn figures(&self, machine: &str) -> Option<Value> {
        // The counters of the monitor if it serves the disk, or else of the daemon that runs next
        // to fio.
        let path = self.job.path.as_str();
        let of_monitor = machine != "user-mode" || path == "vhost-user" || path == "tcmu-in-guest";
        let served = match (self.monitor.is_empty(), of_monitor) {
            (false, true) => &self.monitor,
            _ => &self.daemon,
        };
        let [before, after] = served.as_slice() else {
            return None;
        };
        let kind = self.job.job.trim_end_matches("+fsync");
        let kind = if kind.ends_with("read") {
            "read"
        } else {
            "write"
        };
        let data = self.fio.get(kind)?;
        let requests = data.requests;
        if requests == 0.0 || data.iops == 0.0 {
            return None;
        }
        // fio reports a sync separately from the write before it, which the sync makes durable.
        let sync = self.fio.get("sync").copied().unwrap_or_default();
        // fio measures the first syncs from when their machine started, so each is capped at the
        // job's duration.
        let longest = requests / data.iops * 1e9;
        let us = |data: f64, sync: f64| (data + sync.min(longest)) / 1000.0;
        let grown = |path: &str| {
            let value = |counters: &DiskCounters| {
                let disks = counters.stats["disks"].as_array()?;
                let disk = disks
                    .iter()
                    .find(|disk| disk["name"] == self.job.disk.as_str())?;
                disk.pointer(path)?.as_f64()
            };
            Some((value(after)? - value(before)?) / requests)
        };
        let cpu = |of: &[DiskCounters]| match of {
            [before, after] => (after.cpu_ns - before.cpu_ns) / 1000.0 / requests,
            _ => 0.0,
        };
        // For TCMU in a guest: the daemon in the guest, and the monitor that serves the disk under
        // it.
        let vmm_cpu = if path == "tcmu-in-guest" {
            cpu(&self.monitor) + cpu(&self.daemon)
        } else {
            cpu(served)
        };
        let whole = if self.monitor.is_empty() {
            served
        } else {
            &self.monitor
        };
        let host_cpu = (whole.last()?.machine_cpu_ns - whole.first()?.machine_cpu_ns) / 1000.0;
        let mut figures = json!({
            "requests": requests as u64,
            "iops": data.iops,
            "mb_per_s": data.bytes_per_s / 1e6,
            "p50_us": us(data.p50, sync.p50),
            "p99_us": us(data.p99, sync.p99),
            "p999_us": us(data.p999, sync.p999),
            "vmm_cpu_us_per_request": vmm_cpu,
            "host_cpu_us_per_request": host_cpu / requests,
            "syncs_per_request": grown("/log/syncs"),
        });
        if !path.starts_with("nbd") {
            let (doorbells, interrupts) = (grown("/doorbells"), grown("/interrupts"));
            figures["doorbells_per_request"] = json!(doorbells);
            figures["interrupts_per_request"] = json!(interrupts);
            let wakes = doorbells.zip(interrupts).map(|(told, woken)| told + woken);
            figures["wakes_per_request"] = json!(wakes);
        }
        add_exits(&mut figures, &exits(before, after, requests));
        Some(figures)
    }
}

/// The exits of a request, by kind, of all vCPUs. Those of ports come from the guest's console,
/// through which it asks for counters.
fn exits(before: &DiskCounters, after: &DiskCounters, requests: f64) -> BTreeMap<String, f64> {
    let sum = |counters: &DiskCounters, kind: &str| -> f64 {
        let each = counters.stats["exits"][kind]
            .as_array()
            .into_iter()
            .flatten();
        each.filter_map(Value::as_f64).sum()
    };
    let kinds = after.stats["exits"]
        .as_object()
        .into_iter()
        .flat_map(|kinds| kinds.keys());
    let kinds = kinds.filter(|kind| !kind.starts_with("port_"));
    let grown = |kind: &String| (sum(after, kind) - sum(before, kind)) / requests;
    kinds.map(|kind| (kind.clone(), grown(kind))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::Settings;

    const MATRICES: &str = include_str!("../../matrices/notify.toml");
    const JOB: &str = r#"job {"path":"pci-on","backend":"wal","job":"randwrite+fsync","iodepth":4,"queues":4,"scheduler":"none","disk":"wal","cache":"write back"}"#;

    fn counters(cpu_ns: u64, doorbells: u64, syncs: u64) -> String {
        let stats = json!({
            "exits": { "mmio_write": [doorbells, 1] },
            "disks": [{ "name": "wal", "doorbells": doorbells, "interrupts": 5, "log": { "syncs": syncs } }],
        });
        let counters = json!({ "cpu_ns": cpu_ns, "machine_cpu_ns": 5000, "stats": stats });
        format!("counters monitor {counters}")
    }

    #[test]
    fn a_turn_is_assembled_from_its_lines() {
        let mut matrices = crate::bench::matrices_of(MATRICES, &Settings::new());
        let mut reader = EventReader::default();
        for line in [
            "machine nested",
            JOB,
            &counters(1000, 10, 2),
            r#"fio write {"requests":40,"iops":200.5,"bytes_per_s":821248,"p50":1000,"p99":2000,"p999":3000}"#,
            r#"fio sync {"requests":40,"iops":0,"bytes_per_s":0,"p50":9000,"p99":9000,"p999":9000}"#,
            &counters(81_000, 30, 12),
            "end",
        ] {
            assert!(!reader.take(line, &mut matrices).unwrap(), "{line}");
        }
        let mut measured = matrices
            .iter()
            .flat_map(Matrix::sides)
            .filter(|side| !side.turns.is_empty());
        let side = measured.next().expect("a turn");
        assert_eq!(
            (side.name.as_str(), side.text("load")),
            ("virtio-pci ioeventfd", "fio, nested Linux")
        );
        for (key, value) in [
            ("requests", 40.0),
            ("p50_us", 10.0),
            ("p99_us", 11.0),
            ("doorbells_per_request", 0.5),
            ("interrupts_per_request", 0.0),
            ("syncs_per_request", 0.25),
            ("mmio_write_exits_per_request", 0.5),
            ("vmm_cpu_us_per_request", 2.0),
        ] {
            assert_eq!(side.turns[0].get(key), Some(value), "{key}");
        }
        assert!(side.emulated && measured.next().is_none());
    }

    #[test]
    fn unknown_lines_are_refused() {
        let mut matrices = crate::bench::matrices_of(MATRICES, &Settings::new());
        let mut reader = EventReader::default();
        let through = JOB.replace("write back", "write through");
        for line in [
            "end",
            "job {}",
            &through,
            "counters monitor {}",
            "fio read {}",
            "missing nothing",
            "else",
        ] {
            assert!(reader.take(line, &mut matrices).is_err(), "{line}");
        }
        assert!(reader.take("ask", &mut matrices).unwrap());
    }
}
