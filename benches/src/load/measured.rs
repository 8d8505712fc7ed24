//! Converts counts and times to a [`Sample`].

use std::collections::BTreeMap;
use std::time::Duration;

use super::point::{BLOCK, Point};
use super::sample::Sample;

/// The result of one turn.
#[derive(Clone, Debug, Default)]
pub struct Measurement {
    /// Reads and writes that ended.
    pub requests: u64,
    /// Duration of the turn.
    pub time: Duration,
    /// Median time of a request.
    pub p50: Duration,
    /// 99th percentile of a request's time.
    pub p99: Duration,
    /// 99.9th percentile of a request's time.
    pub p999: Duration,
    /// Processor time of the disk's own threads.
    pub cpu: Option<Duration>,
    /// Processor time of the whole machine.
    pub host_cpu: Option<Duration>,
    /// Exits of a virtual machine, by kind.
    pub exits: BTreeMap<&'static str, u64>,
    /// Doorbells rung.
    pub doorbells: Option<u64>,
    /// Interrupts received.
    pub interrupts: Option<u64>,
    /// Syncs of the log; 0 without a log.
    pub syncs: u64,
    /// Whether the write cache was on, according to the path.
    pub write_cache: bool,
}

impl Measurement {
    /// The result as a sample of `path` under `load`.
    pub fn sample(&self, path: &str, load: &str, point: &Point, real_seconds: bool) -> Sample {
        let requests = self.requests.max(1) as f64;
        let each = |count: u64| count as f64 / requests;
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        let iops = self.requests as f64 / self.time.as_secs_f64().max(1e-9);
        Sample {
            path: path.to_owned(),
            load: load.to_owned(),
            backend: point.backend.name().to_owned(),
            job: point.job.name().to_owned(),
            iodepth: point.iodepth.into(),
            queues: point.queues.into(),
            requests: self.requests,
            iops,
            mb_per_s: iops * BLOCK as f64 / 1e6,
            p50_us: us(self.p50),
            p99_us: us(self.p99),
            p999_us: us(self.p999),
            vmm_cpu_us_per_request: self.cpu.map(|cpu| us(cpu) / requests),
            host_cpu_us_per_request: self.host_cpu.map(|cpu| us(cpu) / requests),
            exits_per_request: self
                .exits
                .iter()
                .map(|(&kind, &count)| (kind.to_owned(), each(count)))
                .collect(),
            doorbells_per_request: self.doorbells.map(each),
            interrupts_per_request: self.interrupts.map(each),
            syncs_per_request: Some(each(self.syncs)),
            write_cache: Some(self.write_cache),
            seconds_mean_something: real_seconds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::point::{BackendKind, LoadJob};

    #[test]
    fn figures_are_of_a_request() {
        let measured = Measurement {
            requests: 1000,
            time: Duration::from_millis(500),
            p50: Duration::from_nanos(1500),
            cpu: Some(Duration::from_millis(2)),
            exits: BTreeMap::from([("mmio_write", 2000)]),
            doorbells: Some(500),
            syncs: 250,
            write_cache: true,
            ..Measurement::default()
        };
        let point = Point {
            backend: BackendKind::Wal,
            job: LoadJob::WriteFsync,
            iodepth: 4,
            queues: 1,
        };
        let sample = measured.sample("nbd", "nbd client", &point, true);
        assert_eq!((sample.iops, sample.mb_per_s), (2000.0, 8.192));
        assert_eq!(
            (sample.p50_us, sample.vmm_cpu_us_per_request),
            (1.5, Some(2.0))
        );
        assert_eq!(sample.exits_per_request["mmio_write"], 2.0);
        assert_eq!(sample.doorbells_per_request, Some(0.5));
        assert_eq!(sample.interrupts_per_request, None);
        assert_eq!(sample.syncs_per_request, Some(0.25));
    }
}
