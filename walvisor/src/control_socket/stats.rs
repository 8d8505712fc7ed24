//! Statistics: as JSON with stable keys, and as Prometheus text.

use std::sync::atomic::Ordering;

use serde_json::{Map, Value, json};
use walvisor_devices::backend::{Backend, Condition, MemoryBudget, SECTOR_SIZE};
use walvisor_storage::{StallCause, StallCounts, SyncPartner};
use walvisor_vmm::vm::exits::ExitReason;

use super::controlled::{ControlledProcess, DiskLease, Power};
use crate::archiving::PushState;
use crate::disk::{cache_in_force, log_counters, log_name, logged};
use walvisor_devices::block::{Latencies, LatencyCounts, OperationKind};
use walvisor_devices::throttle::Throttle;

use crate::machine_memory::resident;
use crate::metrics::{DiskMetrics, RunMetrics, render, render_served};
use crate::point::{history_json, unix_us};

/// All statistics, as JSON.
pub(super) fn json(controlled: &ControlledProcess) -> Value {
    let state = if controlled.is_paused() {
        "paused"
    } else {
        "running"
    };
    let disks = controlled.disks();
    let budget = MemoryBudget::of_process();
    let mut all = json!({
        "version": env!("CARGO_PKG_VERSION"),
        "kind": controlled.kind.name(),
        "pid": std::process::id(),
        "state": state,
        "uptime_us": controlled.started.elapsed().as_micros() as u64,
        "memory": {
            "resident_bytes": resident(),
            "used_bytes": budget.used(),
            "limit_bytes": budget.limit(),
        },
        "logs": logs(&disks, &controlled.pushes.states()),
        "disks": disks.iter().map(|one| disk(one, &disks, controlled)).collect::<Vec<_>>(),
    });
    if let Power::Guest { exits, .. } = &controlled.power {
        let of = |reason: ExitReason| exits.iter().map(move |counters| counters.get(reason));
        let by_reason: Map<String, Value> = ExitReason::ALL
            .into_iter()
            .map(|reason| {
                (
                    reason.name().to_owned(),
                    of(reason).collect::<Vec<_>>().into(),
                )
            })
            .collect();
        all["vcpus"] = exits.len().into();
        // An array with one element per vCPU.
        all["exits"] = by_reason.into();
    }
    all
}

fn disk(disk: &DiskLease, all: &[DiskLease], controlled: &ControlledProcess) -> Value {
    let counts = disk.metrics.counts();
    json!({
        "name": disk.name,
        "transport": disk.transport,
        "size_bytes": disk.backend.sectors() * SECTOR_SIZE,
        "read_only": disk.backend.capabilities().read_only,
        "cache": cache_in_force(&*disk.backend),
        "paused": controlled.is_paused() || disk.paused.load(Ordering::SeqCst),
        "condition": condition(&disk.backend.condition()),
        "requests": counts.requests,
        "reads": counts.reads,
        "writes": counts.writes,
        "flushes": counts.flushes,
        "discards": counts.discards,
        "write_zeroes": counts.write_zeroes,
        "read_bytes": counts.bytes_read,
        "written_bytes": counts.bytes_written,
        "errors": counts.errors,
        "doorbells": counts.doorbells,
        "interrupts": counts.interrupts,
        "secure_erases": counts.secure_erases,
        "poll_ns": counts.poll_ns,
        "latency": latency(&disk.metrics.latencies),
        "sync_sharing": sharing(disk, all),
        "limits": limits(&disk.throttle),
        "log": log(&*disk.backend),
    })
}

/// How the FLUSHes of a disk share syncs with those of other disks, if it has a log.
fn sharing(disk: &DiskLease, all: &[DiskLease]) -> Option<Value> {
    let shared = logged(&*disk.backend)?.sync_sharing();
    let log = log_name(&*disk.backend);
    let name = |id: u32| {
        let has_id = |other: &&DiskLease| {
            let number = logged(&*other.backend).map(walvisor_storage::Disk::id);
            number == Some(id) && log_name(&*other.backend) == log
        };
        // A disk that was removed has no name any more.
        let found = all.iter().find(has_id);
        found.map_or_else(|| format!("disk {id}"), |other| other.name.clone())
    };
    let partners = shared.partners.iter();
    let partner =
        |partner: &SyncPartner| json!({ "disk": name(partner.disk_id), "groups": partner.groups });
    Some(json!({
        "flushes": shared.flushes,
        "syncs": shared.syncs,
        "groups": shared.groups,
        "with": partners.map(partner).collect::<Vec<_>>(),
    }))
}

/// The condition of a disk. A stall comes with its cause. Trouble comes with its beginning, its error, and whether writes fail.
fn condition(condition: &Condition) -> Value {
    let mut object = json!({ "name": condition.name() });
    if let Condition::Stalled(cause) = condition {
        object["cause"] = cause.name().into();
    }
    if let Some(trouble) = condition.trouble() {
        object["since_unix_us"] = unix_us(trouble.since).into();
        object["error"] = trouble.error.as_str().into();
        object["refuses_writes"] = trouble.refuses_writes.into();
        object["pauses_writes"] = trouble.pauses_writes.into();
    }
    object
}

/// The logs, each once, with the names of its disks.
fn logs(disks: &[DiskLease], pushes: &[PushState]) -> Vec<Value> {
    let mut logs: Vec<Value> = Vec::new();
    for disk in disks {
        let Some(mut log) = log(&*disk.backend) else {
            continue;
        };
        let known = logs.iter_mut().find(|known| known["path"] == log["path"]);
        match known.and_then(|known| known["disks"].as_array_mut()) {
            Some(names) => names.push(disk.name.as_str().into()),
            None => {
                log["disks"] = json!([disk.name]);
                let push = pushes.iter().find(|push| log["path"] == push.log);
                log["archive"] = push.map(archive).into();
                logs.push(log);
            }
        }
    }
    logs
}

/// The archive of a log.
fn archive(push: &PushState) -> Value {
    let progress = &push.progress;
    json!({
        "url": push.url,
        "running": push.running,
        "lsn": progress.lsn,
        "cid": progress.cid,
        "unix_us": progress.unix_us,
        "lag_us": push.lag.as_micros() as u64,
        "lag_bytes": push.lag_bytes,
        "writes_wait": push.holds_back,
        "caught_up": progress.caught_up_us > 0,
        "restorable": progress.restorable,
        "waiting_requests": push.waiting,
        "sent_bytes": progress.sent_bytes,
        "requests": progress.requests,
        "error": progress.error,
    })
}

/// The latency of requests by operation, over all queues. A percentile is the upper bound of its
/// class, a power of two; null means more than 8.4 s.
fn latency(latencies: &Latencies) -> Value {
    let mut by_operation = Map::new();
    for kind in OperationKind::ALL {
        let mut all = LatencyCounts::default();
        for queue in 0..latencies.queues() {
            all.add(&latencies.get(queue, kind));
        }
        let count = all.count();
        if count > 0 {
            let one = json!({
                "count": count,
                "mean_us": all.sum_ns / 1000 / count,
                "p50_us": all.all_but_one_in_us(2),
                "p99_us": all.all_but_one_in_us(100),
                "p999_us": all.all_but_one_in_us(1000),
                "classes": all.classes,
            });
            by_operation.insert(kind.name().to_owned(), one);
        }
    }
    by_operation.into()
}

/// The limits of a disk. 0 means no limit.
pub(super) fn limits(throttle: &Throttle) -> Value {
    let limits = throttle.limits();
    json!({
        "ops_per_second": limits.ops_per_second,
        "ops_burst": limits.ops_burst,
        "bytes_per_second": limits.bytes_per_second,
        "bytes_burst": limits.bytes_burst,
        "weight": throttle.weight(),
    })
}

/// Counts by cause.
fn causes(counts: StallCounts) -> Value {
    let causes = StallCause::ALL.map(|cause| (cause.name().to_owned(), counts.get(cause).into()));
    Value::Object(causes.into_iter().collect())
}

/// The log of a disk, if it has one.
fn log(backend: &dyn Backend) -> Option<Value> {
    let (path, log) = (log_name(backend)?, log_counters(backend)?);
    Some(json!({
        "path": path,
        "flushes": log.flushes,
        "flushes_grouped": log.flushes_grouped,
        "groups": log.groups,
        "group_sizes": log.group_sizes,
        "stalled": causes(log.stalled),
        "refused": causes(log.refused),
        "syncs": log.syncs,
        "log_bytes": log.log_bytes,
        "checkpoints": log.checkpoints,
        "base_bytes": log.base_bytes,
        "base_writes": log.base_writes,
        "index_bytes": log.index_bytes,
        "history": logged(backend).map(|disk| history_json(&disk.history())),
    }))
}

/// All statistics as Prometheus text, as `--metrics` writes it at the end.
pub(super) fn prometheus(controlled: &ControlledProcess) -> String {
    let disks = controlled.disks();
    let disks: Vec<_> = disks
        .iter()
        .map(|disk| DiskMetrics::from(&**disk))
        .collect();
    let pushes = controlled.pushes.states();
    match &controlled.power {
        Power::Guest {
            exits,
            networks,
            first_run,
            ..
        } => render(&RunMetrics {
            started: controlled.started,
            first_run: first_run.get().copied(),
            exits,
            disks,
            pushes: &pushes,
            networks,
            memory: None,
        }),
        Power::Daemon { .. } => render_served(&disks, &pushes),
    }
}
