//! Waiting for what another thread or process does.

use std::time::{Duration, Instant};

/// The time after which a test has hung: no wait takes so long, even on the slowest machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Waits until `condition` returns `true`.
#[track_caller]
pub fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < PATIENCE, "waited in vain for {what}");
        pause(began);
    }
}

/// Yields to runnable threads at first, and sleeps later.
pub(crate) fn pause(waiting_since: Instant) {
    match waiting_since.elapsed() {
        waited if waited < Duration::from_micros(200) => std::thread::yield_now(),
        waited if waited < Duration::from_millis(20) => {
            std::thread::sleep(Duration::from_micros(100));
        }
        _ => std::thread::sleep(Duration::from_millis(2)),
    }
}
