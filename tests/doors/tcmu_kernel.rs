//! The kernel's own SCSI target and disk driver on `walvisor serve tcmu`: from missing modules to
//! the largest disk, with sg3-utils, ext4, fio, kills of the daemon under load and resizes. At the
//! end, configfs and the images are checked. That kernel is user-mode Linux. What only Debian's
//! kernels have is in `guests/linux/tcmu.rs`.

use std::path::Path;

use walvisor_tests::{have_all, run_in_user_mode, sum_counter};

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
