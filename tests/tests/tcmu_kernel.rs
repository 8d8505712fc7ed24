//! The kernel's own SCSI target and disk driver on `walvisor serve tcmu`: from missing modules to the largest disk,
//! with sg3-utils, ext4, fio, kills of the daemon under load and resizes. At the end, configfs and the images are
//! checked.

use walvisor_guest_images::{Metrics, Outcome};
use walvisor_tests::{run_emulated_job, said};

/// The lines that the job prints, in order.
const SAID: &str = include_str!("tcmu_kernel.txt");

/// The sum of a counter over all disks that the daemon `name` served.
fn sum(outcome: &Outcome, name: &str, counter: &str) -> f64 {
    let text = outcome.result(&format!("{name}.prom")).expect("metrics");
    let metrics = Metrics::parse(&text);
    metrics
        .sum(counter, "transport", "tcmu")
        .unwrap_or_default()
}

#[test]
fn the_kernels_target_has_its_disks_from_walvisor() {
    let Some(outcome) = run_emulated_job(include_str!("../scripts/tcmu-job.sh"), &[]) else {
        return;
    };
    assert_eq!(said(&outcome), SAID.lines().collect::<Vec<_>>());
    assert_eq!(outcome.status, 0);

    // UIO wakes per command: about one for commands that run alone, less for commands that run together.
    let per_command = |name| {
        let commands = sum(&outcome, name, "walvisor_tcmu_commands_total");
        let wakes = sum(&outcome, name, "walvisor_tcmu_uio_wakes_total");
        assert!(commands > 1600.0, "{name}: {commands}");
        wakes / commands
    };
    let (alone, together) = (per_command("depth-1"), per_command("depth-32"));
    println!("UIO wakes a command: {alone:.3} at iodepth 1, {together:.3} at iodepth 32");
    assert!(alone > 0.9 && alone <= 1.0, "{alone}");
    assert!(together < 0.5, "{together}");
    // Each sync is for a SYNCHRONIZE CACHE, and one sync serves those of several disks.
    let flushes = sum(&outcome, "together", "walvisor_block_flushes_total");
    // Each of the four disks reports the counters of the shared log.
    let syncs = sum(&outcome, "together", "walvisor_log_syncs_total") / 4.0;
    println!("{syncs} syncs for {flushes} SYNCHRONIZE CACHE of four disks on one log");
    assert!(flushes > 200.0 && syncs < flushes, "{syncs} of {flushes}");
    assert_eq!(
        sum(&outcome, "depth-32", "walvisor_block_errors_total"),
        0.0
    );
}
