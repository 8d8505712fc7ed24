//! The kernel's own SCSI target and disk driver on `walvisor serve tcmu`: from missing modules to
//! the largest disk, with sg3-utils, ext4, fio, kills of the daemon under load and resizes. At the
//! end, configfs and the images are checked. That kernel is user-mode Linux. The target for guests,
//! vhost-scsi, is only in Debian's kernel.

use std::path::Path;
use std::time::Duration;

use walvisor_guest_images::NewerKernel;
use walvisor_tests::{
    compile, have_all, job_lines, run_emulated_job, run_in_user_mode, run_newer_job, sum_counter,
};

/// The lines that the guest prints, in order.
const SAID: &str = include_str!("tcmu_kernel.txt");
/// The same of the guest whose disks come and go.
const CHANGING: &str = include_str!("tcmu_changing.txt");

/// Runs a script in user-mode Linux, and checks the lines that it prints. `None`: it cannot run
/// here.
fn run_and_expect(dir: &Path, script: &str, lines: &str) -> Option<()> {
    let needs = [
        ("linux.uml", "user-mode-linux"),
        ("modprobe", "kmod"),
        ("sg_inq", "sg3-utils"),
        ("fio", "fio"),
        ("mkfs.ext4", "e2fsprogs"),
    ];
    if !have_all(&needs) {
        return None;
    }
    let functions = include_str!("../scripts/tcmu-functions.sh");
    let told = run_in_user_mode(dir, &[], &format!("{functions}{script}"));
    assert_eq!(told, lines.lines().collect::<Vec<_>>());
    Some(())
}

#[test]
fn disks_come_and_go_in_the_kernels_target() {
    let dir = tempfile::tempdir().unwrap();
    let _ = run_and_expect(
        dir.path(),
        include_str!("../scripts/tcmu-changing.sh"),
        CHANGING,
    );
}

#[test]
fn the_kernels_target_has_its_disks_from_walvisor() {
    let dir = tempfile::tempdir().unwrap();
    let script = include_str!("../scripts/tcmu-guest.sh");
    if run_and_expect(dir.path(), script, SAID).is_none() {
        return;
    }
    let place = dir.path().join("files");

    // UIO wakes per command: about one for commands that run alone, less for commands that run
    // together.
    let sum = |name, counter| sum_counter(&place, name, counter);
    let per_command = |name| {
        let commands = sum(name, "walvisor_tcmu_commands_total");
        let wakes = sum(name, "walvisor_tcmu_uio_wakes_total");
        assert!(commands > 1600.0, "{name}: {commands}");
        wakes / commands
    };
    let (alone, together) = (per_command("depth-1"), per_command("depth-32"));
    println!("UIO wakes a command: {alone:.3} at iodepth 1, {together:.3} at iodepth 32");
    assert!(alone > 0.9 && alone <= 1.0, "{alone}");
    assert!(together < 0.5, "{together}");
    // Each sync is for a SYNCHRONIZE CACHE, and one sync serves those of several disks.
    let flushes = sum("together", "walvisor_block_flushes_total");
    let syncs = sum("together", "walvisor_log_syncs_total");
    println!("{syncs} syncs for {flushes} SYNCHRONIZE CACHE of four disks on one log");
    assert!(flushes > 200.0 && syncs < flushes, "{syncs} of {flushes}");
    assert_eq!(sum("depth-32", "walvisor_block_errors_total"), 0.0);
}

#[test]
fn a_disk_for_guests_is_at_vhost() {
    let Some(outcome) = run_emulated_job::<&str>(include_str!("../scripts/tcmu-vhost-job.sh"), &[])
    else {
        return;
    };
    assert_eq!(
        job_lines(&outcome),
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

#[test]
fn the_kernels_disk_writes_atomically() {
    let dir = tempfile::tempdir().unwrap();
    let atomic = std::fs::read(compile(dir.path(), "atomic")).unwrap();
    let script = include_str!("../scripts/tcmu-atomic-job.sh");
    let limit = Duration::from_secs(180);
    let files = [("atomic", atomic)];
    let Some(outcome) = run_newer_job(NewerKernel::V6_12, script, &files, limit) else {
        return;
    };
    assert_eq!(outcome.status, 0);
    assert_eq!(job_lines(&outcome), ["daemon: status 0", "check: status 0"]);
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
