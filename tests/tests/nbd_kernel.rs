//! The kernel's own NBD client on `walvisor serve nbd`: ext4, fio, fsync, discard, a kill of the daemon, and the images.

use walvisor_guest_images::Metrics;
use walvisor_tests::{run_emulated_job, said};

#[test]
fn the_kernels_client_keeps_a_file_system_through_a_kill() {
    let Some(outcome) = run_emulated_job(include_str!("../scripts/nbd-job.sh"), &[]) else {
        return;
    };
    assert_eq!(
        said(&outcome),
        [
            "nbd0 has 393216 sectors, write back, fua 1",
            "nbd1 has 131072 sectors, write back, fua 1",
            "fio: status 0",
            "blkdiscard: status 0",
            "raw disk reads back",
            "killed: status 137",
            "intact 20 of 20",
            "fstrim: status 0",
            "e2fsck: status 0",
            "raw disk still reads back",
            "nbd2 has 18014398509481983 sectors",
            "last sector: write status 0",
            "last sector reads back",
            "daemon of the largest disk: status 0",
            "daemon: status 0",
            "check of files.img: status 0",
            "check of raw.img: status 0",
            "exported files.img is what the client saw",
            "exported raw.img is what the client saw",
        ]
    );
    assert_eq!(outcome.status, 0);
    // Of the second daemon: the client trimmed, and nothing failed.
    let metrics = Metrics::parse(&outcome.result("metrics.prom").expect("the metrics"));
    let of = |name| metrics.sum(name, "transport", "nbd").unwrap_or_default();
    assert!(of("walvisor_block_discards_total") >= 1.0);
    assert_eq!(of("walvisor_block_errors_total"), 0.0);
}
