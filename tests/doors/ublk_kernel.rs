//! The kernel's own block layer on `walvisor serve ublk`: what it is told of disks, and kills of
//! the daemon while an oracle writes, which must not notice any. The kernel is Debian's 6.12, in
//! emulation: user-mode Linux and Debian 12's own have no ublk. Newer ones can resize its devices.

use std::time::Duration;

use walvisor_guest_images::NewerKernel;
use walvisor_tests::{job_lines, run_newer_job};

/// The lines that the job prints, in order.
const SAID: &str = include_str!("ublk_kernel.txt");

#[test]
fn no_kill_of_the_daemon_is_seen_by_those_who_use_its_device() {
    let kills = std::env::var("WALVISOR_UBLK_KILLS");
    let kills: u64 = kills.map_or(4, |kills| kills.parse().expect("a number of kills"));
    let script = format!(
        "KILLS={kills} EACH=100\n{}",
        include_str!("../scripts/ublk-job.sh")
    );
    let oracle = std::fs::read(env!("CARGO_BIN_EXE_block-oracle")).unwrap();
    let limit = Duration::from_secs(120 + 20 * kills);
    let Some(outcome) = run_newer_job(
        NewerKernel::V6_12,
        &script,
        &[("block-oracle", oracle)],
        limit,
    ) else {
        return;
    };
    assert_eq!(outcome.status, 0);
    assert_eq!(job_lines(&outcome), SAID.lines().collect::<Vec<_>>());
    let flushes = outcome.console.lines().find_map(|line| {
        let count = line.strip_prefix("flushes ")?;
        count.trim().parse::<u64>().ok()
    });
    let flushes = flushes.expect("the oracle counts");
    println!("{kills} kills, {flushes} FLUSHes answered, nothing lost");
    assert!(flushes >= 100 * (kills + 1), "{flushes}");
}

#[test]
fn a_device_grows_while_it_is_used() {
    let script = include_str!("../scripts/ublk-resize-job.sh");
    let limit = Duration::from_secs(180);
    let Some(outcome) = run_newer_job::<&str>(NewerKernel::Newest, script, &[], limit) else {
        return;
    };
    assert_eq!(outcome.status, 0);
    assert_eq!(
        job_lines(&outcome),
        [
            "served: 8388608 bytes",
            "resized while open: 16777216 bytes",
            "after a kill: 16777216 bytes",
            "read back",
            "daemon: status 0",
        ]
    );
}
