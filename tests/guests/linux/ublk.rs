//! The kernel's own block layer on `walvisor serve ublk`: what it is told of disks, and kills of
//! the daemon while an oracle writes, which must not notice any. The kernel is Debian's 6.12, in
//! emulation: user-mode Linux and Debian 12's own have no ublk. Newer ones can resize its devices.

use std::time::Duration;

use walvisor_guest_images::{GuestJob, JobOutcome, NewerKernel};
use walvisor_tests::{GuestCase, guest_job, job_lines};

pub const KILLS: GuestCase = GuestCase {
    name: "ublk",
    kernel: Some(NewerKernel::V6_12),
    emulated: true,
    job: kills_job,
    check: no_kill_of_the_daemon_is_seen_by_those_who_use_its_device,
};

pub const RESIZE: GuestCase = GuestCase {
    name: "ublk-resize",
    kernel: Some(NewerKernel::Newest),
    emulated: true,
    job: resize_job,
    check: a_device_grows_while_it_is_used,
};

/// The lines that the job prints, in order.
const SAID: &str = include_str!("ublk.txt");

/// How often the daemon is killed.
fn kills() -> u64 {
    let kills = std::env::var("WALVISOR_UBLK_KILLS");
    kills.map_or(4, |kills| kills.parse().expect("a number of kills"))
}

fn kills_job() -> Option<GuestJob> {
    let kills = kills();
    let script = format!(
        "KILLS={kills} EACH=100\n{}",
        include_str!("../../scripts/ublk-job.sh")
    );
    let oracle = std::fs::read(env!("CARGO_BIN_EXE_block-oracle")).unwrap();
    let mut job = guest_job(&script, &[("block-oracle", oracle)]);
    job.limit = Duration::from_secs(120 + 20 * kills);
    Some(job)
}

fn no_kill_of_the_daemon_is_seen_by_those_who_use_its_device(outcome: &JobOutcome) {
    let kills = kills();
    assert_eq!(outcome.status, 0);
    assert_eq!(job_lines(outcome), SAID.lines().collect::<Vec<_>>());
    let flushes = outcome.console.lines().find_map(|line| {
        let count = line.strip_prefix("flushes ")?;
        count.trim().parse::<u64>().ok()
    });
    let flushes = flushes.expect("the oracle counts");
    println!("{kills} kills, {flushes} FLUSHes answered, nothing lost");
    assert!(flushes >= 100 * (kills + 1), "{flushes}");
}

fn resize_job() -> Option<GuestJob> {
    let script = include_str!("../../scripts/ublk-resize-job.sh");
    let mut job = guest_job::<&str>(script, &[]);
    job.limit = Duration::from_secs(180);
    Some(job)
}

fn a_device_grows_while_it_is_used(outcome: &JobOutcome) {
    assert_eq!(outcome.status, 0);
    assert_eq!(
        job_lines(outcome),
        [
            "served: 8388608 bytes",
            "resized while open: 16777216 bytes",
            "after a kill: 16777216 bytes",
            "read back",
            "daemon: status 0",
        ]
    );
}
