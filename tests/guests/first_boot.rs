//! Debian's kernel boots under `walvisor run`, fio writes to a file system on a write-ahead log, and
//! what it was told is durable is in the image.

use serde_json::Value;
use walvisor_guest_images::Metrics;
use walvisor_tests::{guest_job, job_lines, run_job};

/// fio's writes. After each it waits for a FLUSH.
const WRITES: u64 = 64;

#[test]
fn fio_in_a_debian_guest_writes_to_a_log() {
    let files = [("guest.sh", include_str!("../scripts/first-boot-guest.sh"))];
    let mut job = guest_job(include_str!("../scripts/first-boot-job.sh"), &files);
    job.script = format!("WRITES={WRITES}\n{}", job.script);
    let Some(outcome) = run_job(&job) else {
        return;
    };
    assert_eq!(
        job_lines(&outcome),
        [
            "guest: status 0",
            "check: status 0",
            "e2fsck: status 0",
            "the image has what the guest wrote",
        ]
    );
    assert_eq!(outcome.status, 0);

    let fio: Value = serde_json::from_str(&outcome.result("fio.json").unwrap()).expect("JSON");
    let of_fio = |pointer: &str| fio["jobs"][0].pointer(pointer).and_then(Value::as_u64);
    assert_eq!(of_fio("/error"), Some(0), "{fio}");
    assert_eq!(of_fio("/write/total_ios"), Some(WRITES), "{fio}");
    let metrics = Metrics::parse(&outcome.result("guest.prom").unwrap());
    let count = |name: &str| metrics.sum(name, "transport", "pci").unwrap_or_default();
    assert!(count("walvisor_block_writes_total") >= WRITES as f64);
    let flushes = count("walvisor_block_flushes_total");
    assert!(flushes >= WRITES as f64, "{flushes}");
    assert_eq!(count("walvisor_block_errors_total"), 0.0);
    // One guest and one writer: no FLUSH has another to share its sync with.
    let syncs = metrics
        .value("walvisor_log_syncs_total")
        .unwrap_or_default();
    assert!(syncs >= WRITES as f64, "{syncs} of {flushes}");
}
