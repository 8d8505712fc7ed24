//! The wall clock is set, forward, back and through a leap second, while the disk of a guest of
//! `walvisor run` commits.

use walvisor_guest_images::{GuestJob, JobOutcome};
use walvisor_tests::{
    CLOCK_FUNCTIONS, GuestCase, base64, compile, guest_job, job_lines, nothing_spun,
};

pub const CASE: GuestCase = GuestCase {
    name: "clock",
    kernel: None,
    // It must not set the clock of this machine.
    emulated: true,
    job,
    check: a_guest_commits_as_fast_however_the_wall_clock_is_set,
};

fn job() -> Option<GuestJob> {
    let dir = tempfile::tempdir().unwrap();
    // The machine gets its files as text.
    let leap = base64(&compile(dir.path(), "leap"));
    let files = [
        ("guest.sh", include_str!("../../scripts/clock-guest.sh")),
        ("leap.base64", &leap),
    ];
    let script = format!(
        "{CLOCK_FUNCTIONS}\n{}",
        include_str!("../../scripts/clock-job.sh")
    );
    Some(guest_job(&script, &files))
}

fn a_guest_commits_as_fast_however_the_wall_clock_is_set(outcome: &JobOutcome) {
    let (ticks, lines): (Vec<_>, Vec<_>) = job_lines(outcome)
        .into_iter()
        .partition(|line| line.starts_with("run quiet "));
    assert_eq!(
        lines,
        [
            "run: the clock was set and had a leap second",
            "run: status 0"
        ]
    );
    assert_eq!(outcome.status, 0);
    nothing_spun(ticks[0]);
}
