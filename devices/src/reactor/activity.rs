//! Whether another disk of the process has had work lately. All threads share this: disks share a
//! medium whatever thread serves them.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The disk that had work last, and the last one before it that is another: their addresses, and
/// when.
static LAST: Mutex<[Option<(usize, Instant)>; 2]> = Mutex::new([None, None]);

/// Notes that `disk` has work at the time `now`. Returns whether another disk had some, at most
/// `lately` ago.
pub(super) fn note(disk: usize, now: Instant, lately: Duration) -> bool {
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    if last[0].is_none_or(|(other, _)| other != disk) {
        last[1] = last[0];
    }
    last[0] = Some((disk, now));
    last[1].is_some_and(|(_, at)| now.saturating_duration_since(at) <= lately)
}
