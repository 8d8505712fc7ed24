//! One measurement: a job on a path, once.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// One job on one path in one round, whoever measured it: also a program that prints it as a line of JSON.
///
/// Where a field is absent (`null`), it cannot be read on that path.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// The way to the disk, such as `virtio-pci ioeventfd` or `nbd`.
    pub path: String,
    /// What made the requests: `embedded guest`, `vhost-user driver` or `fio`.
    pub load: String,
    /// What keeps the data: `ram`, `raw` or `wal`.
    pub backend: String,
    /// `randread`, `randwrite` or `randwrite+fsync` (a FLUSH after each write), of 4 KiB each.
    pub job: String,
    /// Requests in flight of each queue.
    pub iodepth: u32,
    /// Queues, or connections, or threads: as many closed loops of `iodepth` requests.
    pub queues: u32,
    /// Reads and writes that ended in the time measured; a FLUSH is none.
    pub requests: u64,
    /// Reads and writes in a second.
    pub iops: f64,
    /// Megabytes (10^6 bytes) read and written in a second.
    pub mb_per_s: f64,
    /// Half of the requests took no longer than this, in microseconds; of `randwrite+fsync` a write and its FLUSH.
    pub p50_us: f64,
    /// 99 of 100 took no longer.
    pub p99_us: f64,
    /// 999 of 1000 took no longer.
    pub p999_us: f64,
    /// Processor time of the disk's own threads for each request, in microseconds: no vCPU and no client among them.
    #[serde(default)]
    pub vmm_cpu_us_per_request: Option<f64>,
    /// Processor time of the whole machine for each request, the client among it, in microseconds.
    #[serde(default)]
    pub host_cpu_us_per_request: Option<f64>,
    /// Exits to user space for each request, by kind: `mmio_write`, `port_write`, ... Empty without a virtual machine. `all`
    /// is no kind: it counts those that KVM dealt with itself too, where it tells.
    #[serde(default)]
    pub exits_per_request: BTreeMap<String, f64>,
    /// Doorbells rung for each request.
    #[serde(default)]
    pub doorbells_per_request: Option<f64>,
    /// Interrupts for each request.
    #[serde(default)]
    pub interrupts_per_request: Option<f64>,
    /// Syncs of the medium for each request.
    #[serde(default)]
    pub syncs_per_request: Option<f64>,
    /// Whether the disk's write cache was on, as read through the path itself.
    #[serde(default)]
    pub write_cache: Option<bool>,
    /// Whether a second here is one of hardware: `false` under emulation, where only counts mean something.
    pub seconds_mean_something: bool,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_cannot_be_read_may_be_left_out() {
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
