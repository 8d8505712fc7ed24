//! The lines that begin with `measure: `, as scripts/load.sh prints them.
//!
//! ```text
//!   machine direct|nested|user-mode                                        where it all runs
//!   job PATH|BACKEND|JOB|DEPTH|QUEUES|BLOCK|DISK|write back|SCHEDULER      a measurement begins
//!   counters monitor|daemon CPU_NS MACHINE_CPU_NS STATS                    before, and after
//!   fio read|write|sync TOTAL IOPS BYTES_PER_S P50 P99 P999                nanoseconds
//!   end                                                                    a measurement ends
//!   failed WHY   missing WHAT|WHY   ask
//! ```

use std::collections::BTreeMap;

use serde_json::{Value, json};

use walvisor::commands::CommandError;

use crate::bench::{Matrix, Turn};
use crate::exits::{add_exits, check_cache};

/// The meaning of a line.
pub enum LinuxEvent {
    /// A job was measured.
    Measured(Box<Sample>),
    /// A path cannot be measured: its name and the reason.
    Missing(String),
    /// The guest waits for the counters of the daemon outside.
    Ask,
}

/// A measurement.
#[derive(Debug)]
pub struct Sample {
    /// `direct`, `nested` or `user-mode`.
    machine: String,
    /// What was measured, in the words of the script.
    job: Job,
    turn: Turn,
}

/// A job: the words of its line that say what it measures.
#[derive(Debug)]
struct Job {
    path: String,
    backend: String,
    job: String,
    iodepth: u64,
    queues: u64,
    scheduler: String,
}

impl Sample {
    /// Adds the turn to the side of the matrices that has measured it.
    ///
    /// # Errors
    /// If no side has these settings.
    pub fn take_turn(self, matrices: &mut [Matrix]) -> Result<(), CommandError> {
        let job = &self.job;
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
        let Some(side) = side else {
            return Err(CommandError::Failed(format!(
                "a guest measured {job:?}, which was not asked for"
            )));
        };
        side.plan
            .insert("load".to_owned(), load(&self.machine).into());
        side.emulated = self.machine == "nested";
        side.turns.push(self.turn);
        Ok(())
    }
}

/// Counters of the process that serves a disk, at one moment.
#[derive(Clone, Debug)]
pub struct DiskCounters {
    /// Processor time of the server's threads, in nanoseconds.
    pub cpu_ns: f64,
    /// Processor time of the whole machine, in nanoseconds.
    pub machine_cpu_ns: f64,
    /// The output of `walvisor ctl ... stats --json`; an empty object if the process has no control socket.
    pub stats: Value,
}

/// Combines lines into events.
#[derive(Default)]
pub struct EventReader {
    /// `direct`, `nested` or `user-mode`.
    machine: String,
    job: Option<RunningJob>,
}

/// A job that is under way.
struct RunningJob {
    job: Job,
    disk: String,
    /// Counters of the monitor or daemon that serves the disk, before and after the job.
    monitor: Vec<DiskCounters>,
    daemon: Vec<DiskCounters>,
    fio: BTreeMap<String, [f64; 6]>,
}

impl EventReader {
    /// Takes a line, without its `measure: `.
    ///
    /// # Errors
    /// If the line has none of these forms, or fio failed.
    pub fn take(&mut self, line: &str) -> Result<Option<LinuxEvent>, CommandError> {
        let strange = || {
            CommandError::Failed(format!(
                "a guest said {line:?}: scripts of another version?"
            ))
        };
        let (kind, rest) = line.split_once(' ').unwrap_or((line, ""));
        match kind {
            "machine" => self.machine = rest.to_owned(),
            "job" => {
                let (job, write_cache) = RunningJob::parse(rest).ok_or_else(strange)?;
                check_cache(&job.job.path, &job.job.backend, write_cache)?;
                self.job = Some(job);
            }
            "counters" => {
                let (place, counters) = parse_counters(rest).ok_or_else(strange)?;
                if let Some(job) = &mut self.job {
                    job.counters_of(place).push(counters);
                }
            }
            "fio" => {
                let (kind, figures) = parse_fio(rest).ok_or_else(strange)?;
                if let Some(job) = &mut self.job {
                    job.fio.insert(kind.to_owned(), figures);
                }
            }
            "end" => {
                let job = self.job.take().ok_or_else(strange)?;
                let machine = self.machine.clone();
                let measured = job.into_measurement(machine).ok_or_else(strange)?;
                return Ok(Some(LinuxEvent::Measured(Box::new(measured))));
            }
            "failed" => return Err(CommandError::Failed(rest.to_owned())),
            "missing" => {
                let (what, why) = rest.split_once('|').ok_or_else(strange)?;
                return Ok(Some(LinuxEvent::Missing(format!("{what}: {why}"))));
            }
            "ask" => return Ok(Some(LinuxEvent::Ask)),
            _ => return Err(strange()),
        }
        Ok(None)
    }

    /// Adds the counters of the daemon outside, which the current job has asked for.
    pub fn add_outside_counters(&mut self, counters: DiskCounters) {
        if let Some(job) = &mut self.job {
            job.monitor.push(counters);
        }
    }
}

impl RunningJob {
    /// The job of a line, and whether its disk's write cache is on.
    fn parse(text: &str) -> Option<(Self, bool)> {
        let words: Vec<_> = text.split('|').collect();
        let &[path, backend, job, depth, queues, _, disk, cache, scheduler] = words.as_slice()
        else {
            return None;
        };
        let write_cache = match cache {
            "write back" => true,
            "write through" => false,
            _ => return None,
        };
        let job = Self {
            job: Job {
                path: path.to_owned(),
                backend: backend.to_owned(),
                job: job.to_owned(),
                iodepth: depth.parse().ok()?,
                queues: queues.parse().ok()?,
                scheduler: scheduler.to_owned(),
            },
            disk: disk.to_owned(),
            monitor: Vec::new(),
            daemon: Vec::new(),
            fio: BTreeMap::new(),
        };
        Some((job, write_cache))
    }

    fn counters_of(&mut self, place: &str) -> &mut Vec<DiskCounters> {
        match place {
            "daemon" => &mut self.daemon,
            _ => &mut self.monitor,
        }
    }

    /// The measurement, or `None` if a part of it is missing.
    fn into_measurement(self, machine: String) -> Option<Sample> {
        // The counters of the monitor if it serves the disk, or else of the daemon that runs next to fio.
        let path = self.job.path.as_str();
        let user_mode = machine == "user-mode";
        let of_monitor = !user_mode || path == "vhost-user" || path == "tcmu-in-guest";
        let served = match (self.monitor.is_empty(), of_monitor) {
            (false, true) => &self.monitor,
            _ => &self.daemon,
        };
        let [before, after] = served.as_slice() else {
            return None;
        };
        let job = self.job.job.trim_end_matches("+fsync");
        let data = self.fio.get(if job.ends_with("read") {
            "read"
        } else {
            "write"
        })?;
        let [requests, iops, bytes, ..] = *data;
        if requests == 0.0 || iops == 0.0 {
            return None;
        }
        // fio reports a sync separately from the write before it, which the sync makes durable.
        let sync = self.fio.get("sync").copied().unwrap_or_default();
        // fio measures the first syncs from when their machine started, so each is capped at the job's duration.
        let longest = requests / iops * 1e9;
        let us = |index: usize| (data[index] + sync[index].min(longest)) / 1000.0;
        let grown = |path: &[&str]| {
            let value = |counters: &DiskCounters| {
                let disk = counters.stats["disks"].as_array()?;
                let disk = disk
                    .iter()
                    .find(|disk| disk["name"] == self.disk.as_str())?;
                path.iter().try_fold(disk, |at, key| at.get(key))?.as_f64()
            };
            Some((value(after)? - value(before)?) / requests)
        };
        let mut exits = BTreeMap::new();
        if let (Some(first), Some(last)) = (
            before.stats["exits"].as_object(),
            after.stats["exits"].as_object(),
        ) {
            let sum = |of: &Value| -> f64 {
                of.as_array()
                    .into_iter()
                    .flatten()
                    .filter_map(Value::as_f64)
                    .sum()
            };
            // Port exits come from the guest's console, through which it asks for counters.
            for (kind, counts) in last.iter().filter(|(kind, _)| !kind.starts_with("port_")) {
                let grown = sum(counts) - first.get(kind).map_or(0.0, sum);
                exits.insert(kind.clone(), grown / requests);
            }
        }
        let cpu = |of: &[DiskCounters]| match of {
            [before, after] => (after.cpu_ns - before.cpu_ns) / 1000.0 / requests,
            _ => 0.0,
        };
        // For TCMU in a guest: the daemon in the guest, and the monitor that serves the disk under it.
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
            "iops": iops,
            "mb_per_s": bytes / 1e6,
            "p50_us": us(3),
            "p99_us": us(4),
            "p999_us": us(5),
            "vmm_cpu_us_per_request": vmm_cpu,
            "host_cpu_us_per_request": host_cpu / requests,
            "syncs_per_request": grown(&["log", "syncs"]),
        });
        if !path.starts_with("nbd") {
            let (doorbells, interrupts) = (grown(&["doorbells"]), grown(&["interrupts"]));
            figures["doorbells_per_request"] = json!(doorbells);
            figures["interrupts_per_request"] = json!(interrupts);
            let wakes = doorbells.zip(interrupts).map(|(told, woken)| told + woken);
            figures["wakes_per_request"] = json!(wakes);
        }
        add_exits(&mut figures, &exits);
        Some(Sample {
            machine,
            job: self.job,
            turn: Turn(figures),
        })
    }
}

/// What tables call the load on a machine.
fn load(machine: &str) -> &'static str {
    match machine {
        "nested" => "fio, nested Linux",
        "user-mode" => "fio, user-mode Linux",
        _ => "fio, Linux",
    }
}

fn parse_counters(text: &str) -> Option<(&str, DiskCounters)> {
    let mut words = text.splitn(4, ' ');
    let place = words.next()?;
    let counters = DiskCounters {
        cpu_ns: words.next()?.parse().ok()?,
        machine_cpu_ns: words.next()?.parse().ok()?,
        stats: serde_json::from_str(words.next()?).ok()?,
    };
    Some((place, counters))
}

fn parse_fio(text: &str) -> Option<(&str, [f64; 6])> {
    let (kind, figures) = text.split_once(' ')?;
    let figures: Vec<f64> = figures
        .split(' ')
        .map_while(|word| word.parse().ok())
        .collect();
    Some((kind, figures.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stats(doorbells: u64, syncs: u64) -> String {
        format!(
            r#"{{"exits":{{"mmio_write":[{doorbells},1]}},"disks":[{{"name":"wal","doorbells":{doorbells},"interrupts":5,"log":{{"syncs":{syncs}}}}}]}}"#
        )
    }

    #[test]
    fn a_measurement_is_assembled_from_its_lines() {
        let mut reader = EventReader::default();
        let (before, after) = (stats(10, 2), stats(30, 12));
        for line in [
            "machine nested".to_owned(),
            "job pci-on|wal|randwrite+fsync|4|2|4k|wal|write back|none".to_owned(),
            format!("counters monitor 1000 5000 {before}"),
            "fio write 40 200.5 821248 1000 2000 3000".to_owned(),
            "fio sync 40 0 0 9000 9000 9000".to_owned(),
            format!("counters monitor 81000 125000 {after}"),
        ] {
            assert!(reader.take(&line).unwrap().is_none(), "{line}");
        }
        let Some(LinuxEvent::Measured(measured)) = reader.take("end").unwrap() else {
            panic!("no measurement");
        };
        let job = &measured.job;
        assert_eq!(
            (job.path.as_str(), job.iodepth, job.queues),
            ("pci-on", 4, 2)
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
            assert_eq!(measured.turn.get(key), Some(value), "{key}");
        }
        assert_eq!(measured.machine, "nested");
    }

    #[test]
    fn unknown_lines_are_refused() {
        let mut reader = EventReader::default();
        for line in [
            "end",
            "job a|b",
            "job mmio-on|ram|randread|1|1|4k|ram|odd|none",
            "job mmio-on|ram|randread|1|1|4k|ram|write through|none",
            "counters monitor x 1 {}",
            "fio read 1 2",
            "missing nothing",
            "else",
        ] {
            assert!(reader.take(line).is_err(), "{line}");
        }
        assert!(matches!(reader.take("ask"), Ok(Some(LinuxEvent::Ask))));
    }
}
