//! The embedded guest as a load generator: one disk, one transport, closed loops for a given time.

use std::collections::BTreeMap;
use std::time::Duration;

use walvisor_vmm::probe;
use walvisor_vmm::seccomp::Seccomp;
use walvisor_vmm::vm::DiskConfig;
use walvisor_vmm::vm::exits::ExitReason;

use super::error::DemoError;
use super::guest::run_guest;
use crate::disk_spec::TransportKind;
use walvisor_guest::contract::{Counts, Load, Task};

/// The result of a load: the guest's own counts, and the VMM's counts during it.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadReport {
    /// The counts of the guest's driver.
    pub counts: Counts,
    /// Median latency. A write and the FLUSH after it count as one request.
    pub p50: Duration,
    /// 99th percentile of the latency.
    pub p99: Duration,
    /// 99.9th percentile of the latency.
    pub p999: Duration,
    /// Whether the device's write cache was on, as the guest read it.
    pub write_cache: bool,
    /// Duration of the load.
    pub time: Duration,
    /// Processor time of the process without its vCPU.
    pub cpu: Duration,
    /// Processor time of the whole machine, in clock ticks of 10 ms, where it can be read.
    pub host_cpu: Option<Duration>,
    /// Exits to user space by [the name of their reason](ExitReason::name), without those of the
    /// console. [`ALL_EXITS`] also counts the exits that KVM handled itself, where KVM reports
    /// them.
    pub exits: BTreeMap<&'static str, u64>,
    /// Requests that the device took.
    pub device_requests: u64,
    /// Syncs of the disk's log.
    pub syncs: u64,
}

/// Key of the sum of all exits of a vCPU, whether KVM or user space handled them.
pub const ALL_EXITS: &str = "all";

/// Ticks of the time stamp counter in `time`, for [`Load::ticks`].
///
/// # Errors
/// If there is no usable KVM.
pub fn ticks(time: Duration) -> Result<u64, DemoError> {
    let kvm = probe::open()?;
    let rate = kvm
        .create_vm()
        .and_then(|vm| vm.create_vcpu(0)?.get_tsc_khz());
    // An old KVM does not report the rate. Assume 2 GHz: the load then takes about as long, and its
    // time is measured anyway.
    let khz = u128::from(rate.unwrap_or(2_000_000));
    Ok(u64::try_from(time.as_micros() * khz / 1000).unwrap_or(u64::MAX))
}

/// Runs `load` in a VM with one vCPU, on one disk. The disk's transport overrides [`Load::pci`].
/// Other messages of the guest are dropped.
///
/// After a signal that asks the process to end, the error is [`DemoError::Stopped`].
///
/// # Errors
/// If there is no usable KVM, the guest cannot run to its end, or the device fails a request.
pub fn run_load(mut disk: DiskConfig, load: Load) -> Result<LoadReport, DemoError> {
    let pci = disk.transport == TransportKind::Pci;
    let transport = if pci { "pci" } else { "mmio" };
    // The guest's name for the transport, by which the recorder finds the disk.
    transport.clone_into(&mut disk.disk.name);
    let task = Task::Load(Load { pci, ..load });
    let transcript = run_guest([disk], task, Seccomp::Off, |_| ())?;
    let failed = transcript
        .jobs
        .iter()
        .find_map(|job| job.outcome.as_ref().err());
    if let Some(reason) = failed {
        return Err(DemoError::Ended(format!("failed: {reason}")));
    }
    let Some((loaded, measured)) = transcript.load else {
        let last = transcript.last_line;
        return Err(DemoError::Ended(format!(
            "did no load; its last line: {last}"
        )));
    };
    // The counter's rate follows from the measured time, so no reported rate is needed.
    let tick = measured.time.as_secs_f64() / loaded.ticks.max(1) as f64;
    let time = |ticks: u64| Duration::from_secs_f64(ticks as f64 * tick);
    let exits = ExitReason::ALL.iter().zip(measured.exits);
    Ok(LoadReport {
        counts: loaded.counts,
        p50: time(loaded.p50),
        p99: time(loaded.p99),
        p999: time(loaded.p999),
        write_cache: loaded.write_cache,
        time: measured.time,
        cpu: measured.cpu,
        host_cpu: measured.host_cpu,
        exits: exits
            .map(|(reason, count)| (reason.name(), count))
            .filter(|(_, count)| *count > 0)
            .chain(measured.kvm_exits.map(|count| (ALL_EXITS, count)))
            .collect(),
        device_requests: measured.requests,
        syncs: measured.syncs,
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use walvisor_devices::backend::ram::RamDisk;
    use walvisor_devices::block::BlockConfig;

    use super::*;
    use crate::disk_spec::Notifications;
    use walvisor_guest::contract::LoadKind;
    use walvisor_vmm::disk::OpenDisk;

    const REQUESTS: u64 = 500;

    fn load(
        transport: TransportKind,
        notifications: Notifications,
        load: Load,
    ) -> Option<LoadReport> {
        if let Err(error) = probe::open() {
            println!("skipped: {error}");
            return None;
        }
        let disk = DiskConfig {
            disk: OpenDisk {
                device: BlockConfig {
                    queues: 4,
                    queue_size: 64,
                    ..BlockConfig::default()
                },
                ..OpenDisk::new("any", Arc::new(RamDisk::new(16 << 11)))
            },
            transport,
            notifications,
        };
        Some(run_load(disk, load).expect("the guest ends"))
    }

    fn job(kind: LoadKind, iodepth: u8, queues: u8) -> Load {
        Load {
            pci: false,
            kind,
            iodepth,
            queues,
            ticks: u64::MAX,
            requests: REQUESTS,
        }
    }

    #[test]
    fn a_load_does_and_counts_what_was_asked_for() {
        for (transport, kind, depth, queues) in [
            (TransportKind::Mmio, LoadKind::RandRead, 1, 1),
            (TransportKind::Pci, LoadKind::RandWrite, 32, 4),
            (TransportKind::Mmio, LoadKind::RandWriteFlush, 4, 2),
            (TransportKind::Pci, LoadKind::RandWriteFlush, 32, 1),
        ] {
            let Some(report) = load(transport, Notifications::Eventfds, job(kind, depth, queues))
            else {
                return;
            };
            let flushes = if kind == LoadKind::RandWriteFlush {
                REQUESTS
            } else {
                0
            };
            assert_eq!(report.counts.requests, REQUESTS + flushes, "{report:?}");
            assert_eq!(report.device_requests, REQUESTS + flushes, "{report:?}");
            assert_eq!(report.counts.flushes, flushes, "{report:?}");
            assert_eq!(report.counts.bytes, REQUESTS * 4096, "{report:?}");
            assert!(report.write_cache && report.syncs == 0, "{report:?}");
            assert!(
                report.counts.doorbells > 0 && report.counts.interrupts > 0,
                "{report:?}"
            );
            assert!(
                report.p50 <= report.p99 && report.p99 <= report.p999,
                "{report:?}"
            );
            assert!(
                !report.p999.is_zero() && report.p999 <= report.time * 33 / 32,
                "{report:?}"
            );
        }
    }

    #[test]
    fn kvms_statistics_count_ioeventfd_doorbells() {
        let job = job(LoadKind::RandRead, 1, 1);
        let Some(report) = load(TransportKind::Pci, Notifications::Eventfds, job) else {
            return;
        };
        match report.exits.get(ALL_EXITS) {
            Some(&all) => assert!(all >= report.counts.doorbells, "{report:?}"),
            None => println!("skipped: this kernel has no statistics of vCPUs"),
        }
    }

    #[test]
    fn a_load_ends_with_its_time() {
        let time = Duration::from_millis(200);
        let Ok(ticks) = ticks(time) else {
            println!("skipped: no KVM");
            return;
        };
        let endless = Load {
            ticks,
            requests: u64::MAX,
            ..job(LoadKind::RandRead, 4, 1)
        };
        let report = load(TransportKind::Pci, Notifications::Eventfds, endless).unwrap();
        assert!(report.counts.requests > 0, "{report:?}");
    }

    #[test]
    fn doorbells_exit_only_without_eventfds() {
        for transport in [TransportKind::Mmio, TransportKind::Pci] {
            let exits = |notifications| {
                let report = load(transport, notifications, job(LoadKind::RandRead, 1, 1))?;
                let writes = report.exits.get("mmio_write").copied().unwrap_or(0);
                Some((writes, report.counts))
            };
            let (Some((with, counts)), Some((without, bare))) =
                (exits(Notifications::Eventfds), exits(Notifications::Exits))
            else {
                return;
            };
            // virtio-mmio needs a register access to acknowledge each interrupt; virtio-pci needs
            // none.
            match transport {
                TransportKind::Pci => assert_eq!(with, 0),
                TransportKind::Mmio => assert!(with <= counts.interrupts, "{with} {counts:?}"),
            }
            assert!(
                without >= bare.doorbells && bare.doorbells > 0,
                "{without} {bare:?}"
            );
            assert!(bare.interrupts > 0, "{bare:?}");
        }
    }
}
