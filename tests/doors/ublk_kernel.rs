//! The kernel's own block layer on `walvisor serve ublk`: what it is told of disks, and kills of
//! the daemon while an oracle writes, which must not notice any. The kernel is Debian's 6.12, in
//! emulation: user-mode Linux and Debian 12's own have no ublk.

use std::time::Duration;

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
    let Some(outcome) = run_newer_job(&script, &[("block-oracle", oracle)], limit) else {
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
