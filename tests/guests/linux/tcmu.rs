//! `walvisor serve tcmu` under what only Debian's kernels have: the target for guests, vhost-scsi,
//! and atomic writes.

use std::fs;
use std::time::Duration;

use walvisor_guest_images::{GuestJob, JobOutcome, NewerKernel};
use walvisor_tests::{GuestCase, compile, guest_job, job_lines};

pub const VHOST: GuestCase = GuestCase {
    name: "tcmu-vhost",
    kernel: None,
    emulated: true,
    job: vhost_job,
    check: a_disk_for_guests_is_at_vhost,
};

pub const ATOMIC: GuestCase = GuestCase {
    name: "tcmu-atomic",
    kernel: Some(NewerKernel::V6_12),
    emulated: true,
    job: atomic_job,
    check: the_kernels_disk_writes_atomically,
};

fn vhost_job() -> Option<GuestJob> {
    let script = include_str!("../../scripts/tcmu-vhost-job.sh");
    Some(guest_job::<&str>(script, &[]))
}

fn a_disk_for_guests_is_at_vhost(outcome: &JobOutcome) {
    assert_eq!(
        job_lines(outcome),
        [
            "status 1: walvisor: the kernel module vhost_scsi is not loaded: as root run ...",
            "serving guest: 1 MiB at vhost naa.5001405000000042",
            "added at vhost naa.5001405000000043",
            r#"{"disk":"later","image":"complete","log":"disks/later.img.wal"}"#,
            "added at vhost naa.5001405000000043",
            "status 1: walvisor: /sys/kernel/config/target/loopback did not exist when this \
             process gave up its rights: run 'modprobe tcm_loop && mkdir \
             /sys/kernel/config/target/loopback', and restart it",
            "daemon: status 0",
            "left: 0",
        ]
    );
    assert_eq!(outcome.status, 0);
}

fn atomic_job() -> Option<GuestJob> {
    let dir = tempfile::tempdir().unwrap();
    let atomic = fs::read(compile(dir.path(), "atomic")).unwrap();
    let script = include_str!("../../scripts/tcmu-atomic-job.sh");
    let mut job = guest_job(script, &[("atomic", atomic)]);
    job.limit = Duration::from_secs(180);
    Some(job)
}

fn the_kernels_disk_writes_atomically(outcome: &JobOutcome) {
    assert_eq!(outcome.status, 0);
    assert_eq!(job_lines(outcome), ["daemon: status 0", "check: status 0"]);
    let written = outcome.console.lines();
    let written: Vec<_> = written.filter(|line| line.starts_with("guest: ")).collect();
    assert_eq!(
        written,
        [
            "guest: statx 524288",
            "guest: RWF_ATOMIC 4096: read back",
            "guest: RWF_ATOMIC 65536: read back",
            "guest: RWF_ATOMIC 524288: read back",
            "guest: RWF_ATOMIC 1048576: Invalid argument",
        ]
    );
}
