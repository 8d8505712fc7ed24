//! The metrics of a run or a server, in the Prometheus text format.

use std::fmt::Write as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use walvisor_devices::backend::{Condition, LogCounters, MemoryBudget, Trouble};
use walvisor_devices::block::{BlockCounts, BlockMetrics, LatencyCounts, OperationKind};
use walvisor_devices::net::NetCounts;
use walvisor_storage::{LogHistory, Snapshot, StallCause, StallCounts};
use walvisor_vmm::disk::{DiskInUse, NetworkInUse};
use walvisor_vmm::vm::exits::{ExitCounters, ExitReason};
use walvisor_vmm::vm::memory_use::MemoryUse;

use crate::archiving::PushState;
use crate::disk::{cache_in_force, log_counters, log_name, logged};
use crate::machine_memory::resident;
use crate::point::unix_us;

/// The metrics of a run.
pub struct RunMetrics<'a> {
    /// When the process began.
    pub started: Instant,
    /// The moment just before the first KVM_RUN.
    pub first_run: Option<Instant>,
    /// Exits of each vCPU.
    pub exits: &'a [Arc<ExitCounters>],
    /// The disks.
    pub disks: Vec<DiskMetrics>,
    /// The pushes of their logs.
    pub pushes: &'a [PushState],
    /// The network devices.
    pub networks: &'a [NetworkInUse],
    /// Resident memory when the guest ended.
    pub memory: Option<MemoryUse>,
}

/// Text under construction.
#[derive(Default)]
struct Text(String);

impl Text {
    /// Starts a metric.
    fn metric(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// Adds a sample; `labels` is empty or `{...}`.
    fn sample(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.0, "{name}{labels} {value}");
    }

    /// Adds a histogram: the upper end of each class, `None` for the last, and the number of values
    /// in it.
    fn histogram(
        &mut self,
        name: &str,
        labels: &str,
        classes: impl Iterator<Item = (Option<f64>, u64)>,
        sum: f64,
    ) {
        let mut count = 0;
        for (end, requests) in classes {
            count += requests;
            let end = end.map_or_else(|| "+Inf".to_owned(), |end| end.to_string());
            let _ = writeln!(self.0, "{name}_bucket{{{labels},le=\"{end}\"}} {count}");
        }
        let _ = writeln!(
            self.0,
            "{name}_sum{{{labels}}} {sum}\n{name}_count{{{labels}}} {count}"
        );
    }

    /// Adds a metric with one sample.
    fn gauge(&mut self, name: &str, help: &str, value: impl std::fmt::Display) {
        self.metric(name, "gauge", help);
        self.sample(name, "", value);
    }
}

/// `value` escaped for use between quotes (Prometheus exposition format).
fn escape(value: &str) -> String {
    value
        .replace('\\', "\\\\")
        .replace('"', "\\\"")
        .replace('\n', "\\n")
}

/// CLOCK_MONOTONIC at `moment`, which must be in the past.
fn monotonic(moment: Instant) -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let now = Duration::new(now.tv_sec as u64, now.tv_nsec as u32);
    now.saturating_sub(moment.elapsed())
}

/// The metrics of a run as text.
pub fn render(run: &RunMetrics<'_>) -> String {
    let mut text = Text::default();
    if let Some(first) = run.first_run {
        text.gauge(
            "walvisor_start_to_first_instruction_seconds",
            "From the start of main to just before the first KVM_RUN.",
            first.saturating_duration_since(run.started).as_secs_f64(),
        );
        text.gauge(
            "walvisor_first_instruction_monotonic_seconds",
            "CLOCK_MONOTONIC just before the first KVM_RUN.",
            monotonic(first).as_secs_f64(),
        );
    }
    if let Some(memory) = run.memory {
        text.gauge(
            "walvisor_vmm_resident_bytes",
            "Resident memory of the process without guest memory, when the guest ended.",
            memory.resident.saturating_sub(memory.guest),
        );
        text.gauge(
            "walvisor_vmm_own_bytes",
            "The part of that which the process has written itself; the rest is program and \
             library pages, which processes share.",
            memory.own,
        );
        text.gauge(
            "walvisor_guest_resident_bytes",
            "Resident guest memory, when the guest ended.",
            memory.guest,
        );
    }
    exits(&mut text, run.exits);
    disks(&mut text, &run.disks);
    archives(&mut text, run.pushes);
    networks(&mut text, run.networks);
    text.0
}

/// Adds the exits to user space.
fn exits(text: &mut Text, exits: &[Arc<ExitCounters>]) {
    let name = "walvisor_exits_total";
    text.metric(name, "counter", "Exits to user space by vCPU and reason.");
    for (vcpu, counters) in exits.iter().enumerate() {
        for reason in ExitReason::ALL {
            let labels = format!("{{vcpu=\"{vcpu}\",reason=\"{}\"}}", reason.name());
            text.sample(name, &labels, counters.get(reason));
        }
    }
}

/// Adds the counters of the network devices.
fn networks(text: &mut Text, networks: &[NetworkInUse]) {
    if networks.is_empty() {
        return;
    }
    let counts: Vec<_> = networks.iter().map(|one| one.metrics.counts()).collect();
    type Getter = fn(&NetCounts) -> u64;
    let counters: [(&str, &str, Getter); 8] = [
        ("received_frames", "Frames that the guest got.", |counts| {
            counts.frames_received
        }),
        ("received_bytes", "Bytes of these frames.", |counts| {
            counts.bytes_received
        }),
        (
            "receive_drops",
            "Frames that came too long, or for a buffer of the guest that was too small.",
            |counts| counts.receive_drops,
        ),
        ("sent_frames", "Frames that the guest has sent.", |counts| {
            counts.frames_sent
        }),
        ("sent_bytes", "Bytes of these frames.", |counts| {
            counts.bytes_sent
        }),
        (
            "send_drops",
            "Frames of the guest that were malformed, or sent while the link was down.",
            |counts| counts.send_drops,
        ),
        ("doorbells", "Doorbells of the queues.", |counts| {
            counts.doorbells
        }),
        ("interrupts", "Interrupts that the guest got.", |counts| {
            counts.interrupts
        }),
    ];
    for (name, help, get) in counters {
        let name = format!("walvisor_net_{name}_total");
        text.metric(&name, "counter", help);
        for (index, (network, counts)) in networks.iter().zip(&counts).enumerate() {
            let labels = format!("{{net=\"{index}\",transport=\"{}\"}}", network.transport);
            text.sample(&name, &labels, get(counts));
        }
    }
}

/// The metrics of a disk.
pub struct DiskMetrics {
    /// Its name.
    pub disk: String,
    /// Its transport or protocol: `mmio`, `pci`, `nbd`, `vhost-user`, `tcmu`,
    /// `ublk`.
    pub transport: &'static str,
    /// Counts of its requests.
    pub counts: BlockCounts,
    /// Latencies of its requests.
    pub block: Arc<BlockMetrics>,
    /// The cache mode in force.
    pub cache: &'static str,
    /// Its condition.
    pub condition: Condition,
    /// The name and the counters of its log, if it has one.
    pub log: Option<(String, LogCounters)>,
    /// The history that its log keeps.
    pub history: Option<LogHistory>,
}

impl From<&DiskInUse> for DiskMetrics {
    fn from(disk: &DiskInUse) -> Self {
        Self {
            disk: disk.name.clone(),
            transport: disk.transport,
            counts: disk.metrics.counts(),
            block: Arc::clone(&disk.metrics),
            cache: cache_in_force(&*disk.backend),
            condition: disk.backend.condition(),
            log: log_name(&*disk.backend).zip(log_counters(&*disk.backend)),
            history: logged(&*disk.backend).map(walvisor_storage::Disk::history),
        }
    }
}

impl DiskMetrics {
    fn labels(&self) -> String {
        format!("{{{}}}", self.own_labels())
    }

    /// The labels without braces.
    fn own_labels(&self) -> String {
        let (disk, transport) = (escape(&self.disk), self.transport);
        format!("disk=\"{disk}\",transport=\"{transport}\"")
    }
}

/// The metrics of disks that were served to other programs, as text.
pub fn render_served(disks: &[DiskMetrics], pushes: &[PushState]) -> String {
    let mut text = Text::default();
    memory(&mut text);
    self::disks(&mut text, disks);
    archives(&mut text, pushes);
    text.0
}

/// Adds the archives of the logs.
fn archives(text: &mut Text, pushes: &[PushState]) {
    if pushes.is_empty() {
        return;
    }
    type Getter = fn(&PushState) -> Option<f64>;
    let metrics: [(&str, &str, &str, Getter); 9] = [
        (
            "up",
            "gauge",
            "1 while the log's push runs, 0 once it has ended.",
            |push| Some(f64::from(u8::from(push.running))),
        ),
        (
            "lag_seconds",
            "gauge",
            "The archive has everything that was durable this long ago; since the push began, if \
             it has never caught up.",
            |push| Some(push.lag.as_secs_f64()),
        ),
        (
            "lag_bytes",
            "gauge",
            "Bytes of log, headers included, that the archive lacks.",
            |push| push.lag_bytes.map(|bytes| bytes as f64),
        ),
        (
            "writes_wait",
            "gauge",
            "1 while writes wait because the archive lacks archive-limit=SIZE, else 0.",
            |push| push.holds_back.map(|waits| f64::from(u8::from(waits))),
        ),
        (
            "lsn",
            "gauge",
            "The newest record in the archive.",
            |push| Some(push.progress.lsn as f64),
        ),
        (
            "restorable",
            "gauge",
            "1 if the archive has a complete copy of the images, else 0.",
            |push| Some(f64::from(u8::from(push.progress.restorable))),
        ),
        (
            "sent_bytes_total",
            "counter",
            "Bytes sent to the store, compressed.",
            |push| Some(push.progress.sent_bytes as f64),
        ),
        (
            "requests_total",
            "counter",
            "Requests to the store.",
            |push| Some(push.progress.requests as f64),
        ),
        (
            "waiting_requests",
            "gauge",
            "Requests that wait for the archive, with archive-sync=on.",
            |push| push.waiting.map(|waiting| waiting as f64),
        ),
    ];
    for (name, kind, help, get) in metrics {
        let name = format!("walvisor_archive_{name}");
        text.metric(&name, kind, help);
        for push in pushes {
            let labels = format!("{{log=\"{}\"}}", escape(&push.log));
            if let Some(value) = get(push) {
                text.sample(&name, &labels, value);
            }
        }
    }
}

/// Adds the memory that the process has lent and set aside, and its limit.
fn memory(text: &mut Text) {
    if let Some(resident) = resident() {
        let name = "walvisor_memory_resident_bytes";
        text.metric(
            name,
            "gauge",
            "The process's memory that is in the machine's.",
        );
        text.sample(name, "", resident);
    }
    let budget = MemoryBudget::of_process();
    let name = "walvisor_memory_used_bytes";
    let help = "Memory that is set aside for the process, logs and clients, or that requests and \
                unread replies hold.";
    text.metric(name, "gauge", help);
    text.sample(name, "", budget.used());
    if let Some(limit) = budget.limit() {
        let name = "walvisor_memory_limit_bytes";
        text.metric(name, "gauge", "The memory limit of the process.");
        text.sample(name, "", limit);
    }
}

/// Adds all metrics of the disks and of their logs.
fn disks(text: &mut Text, disks: &[DiskMetrics]) {
    conditions(text, disks);
    block(text, disks);
    latency(text, disks);
    let logs = logs(disks);
    log(text, &logs);
    group_sizes(text, &logs);
    stalls(text, &logs);
    history(text, &logs);
}

/// Adds the conditions of the disks: their cache modes, their logs, and their trouble.
fn conditions(text: &mut Text, disks: &[DiskMetrics]) {
    let name = "walvisor_disk_info";
    text.metric(
        name,
        "gauge",
        "The cache mode in force, and the disk's log.",
    );
    for disk in disks {
        let (labels, cache) = (disk.own_labels(), disk.cache);
        let log = disk.log.as_ref().map_or("", |(log, _)| log);
        let labels = format!("{{{labels},cache=\"{cache}\",log=\"{}\"}}", escape(log));
        text.sample(name, &labels, 1);
    }
    let name = "walvisor_disk_condition";
    text.metric(name, "gauge", "1 for the disk's current condition, else 0.");
    for disk in disks {
        for one in Condition::NAMES {
            let labels = format!("{{{},condition=\"{one}\"}}", disk.own_labels());
            text.sample(name, &labels, u8::from(one == disk.condition.name()));
        }
    }
    let troubles = disks
        .iter()
        .filter_map(|disk| Some((disk.labels(), disk.condition.trouble()?)));
    let troubles: Vec<_> = troubles.collect();
    let name = "walvisor_disk_trouble_since_seconds";
    text.metric(
        name,
        "gauge",
        "When the disk's trouble began, in seconds since 1970; absent without trouble.",
    );
    for (labels, trouble) in &troubles {
        text.sample(name, labels, unix_us(trouble.since) / 1_000_000);
    }
    type Getter = fn(&Trouble) -> bool;
    let answers: [(&str, &str, Getter); 2] = [
        ("refuses", "fail", |trouble| trouble.refuses_writes),
        ("pauses", "wait", |trouble| trouble.pauses_writes),
    ];
    for (does, writes, get) in answers {
        let name = format!("walvisor_disk_{does}_writes");
        let help = format!(
            "1 if writes {writes} because of the disk's trouble, else 0; absent without trouble."
        );
        text.metric(&name, "gauge", &help);
        for (labels, trouble) in &troubles {
            text.sample(&name, labels, u8::from(get(trouble)));
        }
    }
}

/// A log: its labels, its counters, and the history that it keeps.
type LogMetrics<'a> = (String, LogCounters, Option<&'a LogHistory>);

/// The logs of the disks, each once.
fn logs(disks: &[DiskMetrics]) -> Vec<LogMetrics<'_>> {
    let mut logs: Vec<LogMetrics<'_>> = Vec::new();
    for disk in disks {
        let Some((name, counters)) = &disk.log else {
            continue;
        };
        let labels = format!("log=\"{}\"", escape(name));
        if logs.iter().all(|(known, ..)| *known != labels) {
            logs.push((labels, *counters, disk.history.as_ref()));
        }
    }
    logs
}

/// Adds the history that the logs keep.
fn history(text: &mut Text, logs: &[LogMetrics<'_>]) {
    type Getter = fn(&LogHistory) -> u64;
    let gauges: [(&str, &str, Getter); 8] = [
        (
            "horizon_lsn",
            "The base images hold all records up to this LSN: the oldest state that can be \
             restored.",
            |history| history.horizon.lsn,
        ),
        (
            "horizon_seconds",
            "The time of the oldest state that can be restored, in seconds since 1970; 0 if the \
             log has had no record.",
            |history| history.horizon.unix_us / 1_000_000,
        ),
        ("kept_bytes", "Bytes of the segments in use.", |history| {
            history.kept_bytes
        }),
        (
            "pinned_bytes",
            "Bytes of the segments that snapshots and looks at the past keep from being recycled.",
            |history| history.pinned_bytes,
        ),
        (
            "room_bytes",
            "Bytes of all segments that the log may have.",
            |history| history.room_bytes,
        ),
        (
            "saved_bytes",
            "Bytes of the saved files, which hold what snapshots need and the base images no \
             longer have.",
            |history| history.saved_bytes,
        ),
        (
            "index_bytes",
            "Memory of the indexes of all disks, in bytes.",
            |history| history.index_bytes,
        ),
        ("snapshots", "Snapshots of the log.", |history| {
            history.snapshots.len() as u64
        }),
    ];
    let logs: Vec<_> = logs
        .iter()
        .filter_map(|(labels, _, history)| Some((labels, (*history)?)))
        .collect();
    for (name, help, get) in gauges {
        let name = format!("walvisor_log_{name}");
        text.metric(&name, "gauge", help);
        for (labels, history) in &logs {
            text.sample(&name, &format!("{{{labels}}}"), get(history));
        }
    }
    let name = "walvisor_log_oldest_snapshot_seconds";
    text.metric(
        name,
        "gauge",
        "When the oldest snapshot was made, in seconds since 1970; absent without snapshots.",
    );
    for (labels, history) in &logs {
        if let Some(Snapshot {
            name: of, unix_us, ..
        }) = history.snapshots.first()
        {
            let labels = format!("{{{labels},snapshot=\"{of}\"}}");
            text.sample(name, &labels, unix_us / 1_000_000);
        }
    }
    let name = "walvisor_log_retain_info";
    text.metric(name, "gauge", "How much history the log is set to keep.");
    for (labels, history) in &logs {
        let retain = history.retain;
        text.sample(name, &format!("{{{labels},retain=\"{retain}\"}}"), 1);
    }
}

/// Adds the front-ends' counters.
fn block(text: &mut Text, disks: &[DiskMetrics]) {
    type Getter = fn(&BlockCounts) -> u64;
    let all: [(&str, &str, Getter); 9] = [
        (
            "requests",
            "Requests taken from the rings, or from connections.",
            |counts| counts.requests,
        ),
        ("reads", "Reads.", |counts| counts.reads),
        ("writes", "Writes.", |counts| counts.writes),
        ("flushes", "FLUSH requests.", |counts| counts.flushes),
        ("discards", "DISCARD requests.", |counts| counts.discards),
        ("write_zeroes", "WRITE_ZEROES requests.", |counts| {
            counts.write_zeroes
        }),
        ("read_bytes", "Bytes that were read.", |counts| {
            counts.bytes_read
        }),
        ("written_bytes", "Bytes that were written.", |counts| {
            counts.bytes_written
        }),
        ("errors", "Requests that failed.", |counts| counts.errors),
    ];
    let virtio: [(&str, &str, Getter); 3] = [
        (
            "doorbells",
            "Doorbells seen by the queue workers.",
            |counts| counts.doorbells,
        ),
        ("interrupts", "Interrupts sent to the driver.", |counts| {
            counts.interrupts
        }),
        ("secure_erases", "SECURE_ERASE requests.", |counts| {
            counts.secure_erases
        }),
    ];
    let tcmu: [(&str, &str, Getter); 3] = [
        ("commands", "SCSI commands taken from the ring.", |counts| {
            counts.requests
        }),
        (
            "uio_wakes",
            "Writes to the UIO device; each completes a batch of commands.",
            |counts| counts.interrupts,
        ),
        (
            "uio_events",
            "Reads of the UIO device; each is a wake-up for new commands.",
            |counts| counts.doorbells,
        ),
    ];
    let ublk: [(&str, &str, Getter); 2] = [
        (
            "answer_calls",
            "System calls that pass answers to the kernel; each completes a batch of requests.",
            |counts| counts.interrupts,
        ),
        (
            "ring_wakes",
            "Wake-ups of a queue's thread by the kernel, for new requests.",
            |counts| counts.doorbells,
        ),
    ];
    let is_tcmu = |disk: &&DiskMetrics| disk.transport == "tcmu";
    let is_ublk = |disk: &&DiskMetrics| disk.transport == "ublk";
    let is_virtio = |disk: &&DiskMetrics| !matches!(disk.transport, "nbd" | "tcmu" | "ublk");
    let tcmu_disks: Vec<_> = disks.iter().filter(is_tcmu).collect();
    let virtio_disks: Vec<_> = disks.iter().filter(is_virtio).collect();
    let groups: [(&str, Vec<&DiskMetrics>, &[_]); 4] = [
        ("block", disks.iter().collect(), &all),
        ("block", virtio_disks.clone(), &virtio),
        ("tcmu", tcmu_disks, &tcmu),
        ("ublk", disks.iter().filter(is_ublk).collect(), &ublk),
    ];
    for (prefix, disks, metrics) in groups {
        for (name, help, get) in metrics.iter().filter(|_| !disks.is_empty()) {
            let name = format!("walvisor_{prefix}_{name}_total");
            text.metric(&name, "counter", help);
            for disk in &disks {
                text.sample(&name, &disk.labels(), get(&disk.counts));
            }
        }
    }
    if !virtio_disks.is_empty() {
        let name = "walvisor_block_poll_seconds_total";
        let help = "Processor time spent on polling rings before sleeping (poll-usec).";
        text.metric(name, "counter", help);
        for disk in virtio_disks {
            text.sample(name, &disk.labels(), disk.counts.poll_ns as f64 / 1e9);
        }
    }
}

/// Adds the latencies of requests: a histogram for each operation and queue that had any.
fn latency(text: &mut Text, disks: &[DiskMetrics]) {
    let name = "walvisor_block_latency_seconds";
    let help = "Time from the receipt of a request to its end, by operation and queue.";
    text.metric(name, "histogram", help);
    for disk in disks {
        let latencies = &disk.block.latencies;
        for queue in 0..latencies.queues() {
            for kind in OperationKind::ALL {
                let counts = latencies.get(queue, kind);
                if counts.count() == 0 {
                    continue;
                }
                let labels = format!(
                    "{},queue=\"{queue}\",operation=\"{}\"",
                    disk.own_labels(),
                    kind.name()
                );
                let end = |class| Some(LatencyCounts::upper_us(class)? as f64 / 1e6);
                let classes = (0..counts.classes.len()).map(end).zip(counts.classes);
                text.histogram(name, &labels, classes, counts.sum_ns as f64 / 1e9);
            }
        }
    }
}

/// Adds the number of FLUSHes per commit group.
fn group_sizes(text: &mut Text, logs: &[LogMetrics<'_>]) {
    let name = "walvisor_log_group_size";
    let help = "FLUSH requests, and writes in writethrough mode, that a commit group served.";
    text.metric(name, "histogram", help);
    for (labels, log, _) in logs {
        let last = log.group_sizes.len() - 1;
        let ends = (0..=last).map(|class| (class < last).then(|| f64::from(1 << class)));
        let sum = log.flushes_grouped as f64;
        text.histogram(name, labels, ends.zip(log.group_sizes), sum);
    }
}

/// Adds the writes that waited before they were in the log, or failed, by cause.
fn stalls(text: &mut Text, logs: &[LogMetrics<'_>]) {
    type Getter = fn(&LogCounters) -> StallCounts;
    let kinds: [(&str, &str, Getter); 2] = [
        ("stalled", "waited before they were in the log", |log| {
            log.stalled
        }),
        (
            "refused",
            "failed because the log did not take them",
            |log| log.refused,
        ),
    ];
    for (kind, did, get) in kinds {
        let name = format!("walvisor_log_{kind}_writes_total");
        text.metric(&name, "counter", &format!("Writes that {did}, by cause."));
        for (labels, counters, _) in logs {
            for cause in StallCause::ALL {
                let labels = format!("{{{labels},cause=\"{}\"}}", cause.name());
                text.sample(&name, &labels, get(counters).get(cause));
            }
        }
    }
}

/// Adds the logs' counters.
fn log(text: &mut Text, logs: &[LogMetrics<'_>]) {
    let mut metric = |name: &str, help: &str, value: fn(&LogCounters) -> u64| {
        let name = format!("walvisor_log_{name}_total");
        text.metric(&name, "counter", help);
        for (labels, counters, _) in logs {
            text.sample(&name, &format!("{{{labels}}}"), value(counters));
        }
    };
    metric("flushes", "FLUSH requests that reached the log.", |log| {
        log.flushes
    });
    metric(
        "flushes_grouped",
        "FLUSH requests that waited for a commit group.",
        |log| log.flushes_grouped,
    );
    metric("groups", "Commit groups made durable.", |log| log.groups);
    metric("syncs", "Device syncs of the log.", |log| log.syncs);
    metric("written_bytes", "Bytes written to the log.", |log| {
        log.log_bytes
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archiving::PushProgress;

    #[test]
    fn each_sample_is_a_name_with_labels_and_a_number() {
        let exits = [Arc::new(ExitCounters::default())];
        exits[0].count(ExitReason::MmioWrite);
        let started = Instant::now();
        let text = render(&RunMetrics {
            started,
            first_run: Some(started + Duration::from_micros(1500)),
            exits: &exits,
            disks: Vec::new(),
            pushes: &[PushState {
                log: "a\nb.wal".to_owned(),
                url: "file:///a".to_owned(),
                running: true,
                progress: PushProgress::default(),
                lag: Duration::from_millis(1500),
                lag_bytes: Some(4096),
                holds_back: Some(true),
                waiting: Some(3),
            }],
            networks: &[NetworkInUse {
                transport: "pci",
                metrics: Arc::default(),
            }],
            memory: Some(MemoryUse {
                resident: 7,
                guest: 4,
                own: 2,
            }),
        });
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let (name, value) = line.rsplit_once(' ').unwrap();
            assert!(
                name.starts_with("walvisor_") && value.parse::<f64>().is_ok(),
                "{line}"
            );
        }
        for line in [
            "walvisor_start_to_first_instruction_seconds 0.0015",
            "walvisor_vmm_resident_bytes 3",
            "walvisor_vmm_own_bytes 2",
            "walvisor_exits_total{vcpu=\"0\",reason=\"mmio_write\"} 1",
            "walvisor_net_received_frames_total{net=\"0\",transport=\"pci\"} 0",
        ] {
            assert!(
                text.lines().any(|have| have == line),
                "{line} is missing:\n{text}"
            );
        }
    }

    #[test]
    fn label_values_are_escaped() {
        assert_eq!(escape("a\"b\\c\nd"), "a\\\"b\\\\c\\nd");
    }
}
