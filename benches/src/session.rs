//! A comparison under way: how far it is, how long it will still take, and Ctrl-C, which ends it with what was measured.

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
        // Whoever asks twice has waited long enough. What is in temporary directories stays.
        // SAFETY: _exit may be called in a signal handler (signal-safety(7)).
        unsafe { libc::_exit(130) };
    }
}

/// A comparison under way.
pub struct Session {
    bar: ProgressBar,
    started: Instant,
}

impl Session {
    /// One that is expected to take `expected` in all. From now on the first Ctrl-C only asks for its end.
    ///
    /// # Errors
    /// If the system refuses the signal handler.
    pub fn start(expected: Duration) -> Result<Self, CommandError> {
        for signal in [libc::SIGINT, libc::SIGTERM] {
            register_signal_handler(signal, interrupt)
                .map_err(|error| CommandError::failed(io::Error::from(error)))?;
        }
        let bar = match io::stderr().is_terminal() {
            true => ProgressBar::new(expected.as_millis() as u64),
            false => ProgressBar::hidden(),
        };
        let style = ProgressStyle::with_template("{wide_bar} {eta} left (Ctrl-C ends it) {msg}");
        bar.set_style(style.expect("a template that indicatif knows"));
        bar.enable_steady_tick(Duration::from_millis(500));
        Ok(Self {
            bar,
            started: Instant::now(),
        })
    }

    /// Whether it is to end with what it has.
    pub fn interrupted(&self) -> bool {
        INTERRUPTED.load(Ordering::Relaxed)
    }

    /// Does a part of the work, which is expected to take `expected`. `None` if it is to end, or a signal came while it
    /// worked: then what it did counts for nothing, and neither does its error.
    ///
    /// # Errors
    /// Those of the work.
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
        match self.interrupted() {
            true => Ok(None),
            false => done.map(Some),
        }
    }

    /// How long it has taken so far.
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}
