//! A running comparison: its progress, its remaining time, and Ctrl-C, which ends it with the
//! results so far.

use std::io::{self, IsTerminal};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use vmm_sys_util::signal::register_signal_handler;

use walvisor::commands::CommandError;

/// Set by the first SIGINT or SIGTERM.
static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn interrupt(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {
    if INTERRUPTED.swap(true, Ordering::Relaxed) {
        // A second signal ends the process at once, and leaves its temporary directories behind.
        // SAFETY: _exit may be called in a signal handler (signal-safety(7)).
        unsafe { libc::_exit(130) };
    }
}

/// A running comparison.
pub struct Session {
    bar: ProgressBar,
    started: Instant,
}

impl Session {
    /// Starts a session that should take `expected` in all. From now on the first Ctrl-C only asks
    /// it to end.
    ///
    /// # Errors
    /// If the system refuses the signal handler.
    pub fn start(expected: Duration) -> Result<Self, CommandError> {
        for signal in [libc::SIGINT, libc::SIGTERM] {
            register_signal_handler(signal, interrupt)
                .map_err(|error| CommandError::failed(io::Error::from(error)))?;
        }
        let bar = if io::stderr().is_terminal() {
            ProgressBar::new(expected.as_millis() as u64)
        } else {
            ProgressBar::hidden()
        };
        let style = ProgressStyle::with_template("{wide_bar} {eta} left (Ctrl-C ends it) {msg}");
        bar.set_style(style.expect("a template that indicatif knows"));
        bar.enable_steady_tick(Duration::from_millis(500));
        Ok(Self {
            bar,
            started: Instant::now(),
        })
    }

    /// Whether the session should end with the results so far.
    pub fn interrupted(&self) -> bool {
        INTERRUPTED.load(Ordering::Relaxed)
    }

    /// Runs a part of the work, which should take `expected`. Returns `None` if the session has to
    /// end, or if a signal came during the work: then its result or error is ignored.
    ///
    /// # Errors
    /// The errors of the work.
    pub fn step<T>(
        &self,
        what: &str,
        expected: Duration,
        work: impl FnOnce() -> Result<T, CommandError>,
    ) -> Result<Option<T>, CommandError> {
        if self.interrupted() {
            return Ok(None);
        }
        self.bar.set_message(what.to_owned());
        let done = work();
        self.bar.inc(expected.as_millis() as u64);
        if self.interrupted() {
            return Ok(None);
        }
        done.map(Some)
    }

    /// Time since the start of the session.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
