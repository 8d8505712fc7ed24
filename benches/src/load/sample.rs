//! One measurement: a job on a path, once.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One job on one path in one round. Another program may print it, as a line of JSON.
///
/// A field is absent (`null`) if its value is not available on that path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The way to the disk, such as `virtio-pci ioeventfd` or `nbd`.
    pub path: String,
    /// The source of the requests: `embedded guest`, `vhost-user driver` or `fio`.
    pub load: String,
    /// The backend that keeps the data: `ram`, `raw` or `wal`.
    pub backend: String,
    /// `randread`, `randwrite` or `randwrite+fsync` (a FLUSH after each write), of 4 KiB each.
    pub job: String,
    /// Requests in flight in each queue.
    pub iodepth: u32,
    /// Queues, or connections, or threads: as many closed loops of `iodepth` requests.
    pub queues: u32,
    /// Reads and writes that ended in the measured time, without FLUSHes.
    pub requests: u64,
    /// Reads and writes per second.
    pub iops: f64,
    /// Megabytes (10^6 bytes) read and written per second.
    pub mb_per_s: f64,
    /// Median time of a request in microseconds; for `randwrite+fsync` that of a write and its FLUSH.
    pub p50_us: f64,
    /// 99th percentile of a request's time, in microseconds.
    pub p99_us: f64,
    /// 99.9th percentile of a request's time, in microseconds.
    pub p999_us: f64,
    /// Processor time of the disk's own threads per request, in microseconds, without vCPUs and clients.
    #[serde(default)]
    pub vmm_cpu_us_per_request: Option<f64>,
    /// Processor time of the whole machine per request, including the client, in microseconds.
    #[serde(default)]
    pub host_cpu_us_per_request: Option<f64>,
    /// Exits to user space per request, by kind: `mmio_write`, `port_write`, ... Empty without a virtual machine.
    /// `all` is not a kind: it also counts the exits that KVM handled itself, if KVM provides this number.
    #[serde(default)]
    pub exits_per_request: BTreeMap<String, f64>,
    /// Doorbells rung per request.
    #[serde(default)]
    pub doorbells_per_request: Option<f64>,
    /// Interrupts per request.
    #[serde(default)]
    pub interrupts_per_request: Option<f64>,
    /// Syncs of the medium per request.
    #[serde(default)]
    pub syncs_per_request: Option<f64>,
    /// Whether the disk's write cache was on, according to the path itself.
    #[serde(default)]
    pub write_cache: Option<bool>,
    /// Whether times are meaningful. `false` under emulation, where only counts are.
    pub seconds_mean_something: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unavailable_fields_may_be_left_out() {
        let line = r#"{"path":"tcmu","load":"fio","backend":"ram","job":"randread","iodepth":4,"queues":1,
            "requests":1000,"iops":500.0,"mb_per_s":2.05,"p50_us":90.0,"p99_us":95.0,"p999_us":99.0,
            "exits_per_request":{"mmio_write":0.5},"seconds_mean_something":false}"#;
        let sample: Sample = serde_json::from_str(line).unwrap();
        assert_eq!(sample.exits_per_request["mmio_write"], 0.5);
        assert_eq!((sample.syncs_per_request, sample.write_cache), (None, None));
        let again = serde_json::to_string(&sample).unwrap();
        assert_eq!(serde_json::from_str::<Sample>(&again).unwrap(), sample);
    }
}
