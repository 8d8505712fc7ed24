//! What every listener does when a client comes.

use std::fmt::Display;
use std::io::{self, ErrorKind};
use std::thread;
use std::time::Duration;

/// How long a listener rests when the system has no descriptors left.
const REST: Duration = Duration::from_millis(100);

/// The client that a listener at `place` has accepted; `None`: there is none after all. If the system refuses one, that is
/// told, and the listener rests for 0.1 s: it stays readable, and would be asked again at once.
pub fn accepted<T>(outcome: io::Result<T>, place: impl Display) -> Option<T> {
    outcome
        .inspect_err(|error| {
            use ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
            if !matches!(error.kind(), ConnectionAborted | Interrupted | WouldBlock) {
                tracing::warn!("{place}: a client could not be accepted: {error}");
                thread::sleep(REST);
            }
        })
        .ok()
}
