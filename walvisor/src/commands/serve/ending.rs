//! The end of a daemon takes a bounded time, even if a medium never answers.
//!
//! ```text
//!   signal ─▶ requests in flight are answered: ANSWER_TIME ─▶ logs are closed: close-seconds and ANSWER_TIME ─▶ end
//!                    └───────────── out of time, or another signal ──────────────┴─▶ error, status 1
//! ```
//! Nothing is lost then that was stable: the next start finds the logs as after a kill.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use walvisor_devices::event_loop::{EventSet, MessageSender};
use walvisor_devices::listen::{Stop, Threads, Waiter, WakeReason};
use walvisor_vmm::vm::TerminationSignals;

use crate::repeats;

/// How long requests in flight may take, and each log besides what it copies.
const ANSWER_TIME: Duration = Duration::from_secs(20);
/// A service manager may send a signal twice at once, to the process and to its group.
const ONE_SIGNAL: Duration = Duration::from_secs(1);

/// Watches the end of a daemon. Dropping this ends the watch.
pub(super) struct Ending {
    more_time: MessageSender<WakeReason, Duration>,
    _thread: Threads,
    /// Closed after the thread that waits for it has ended.
    stop: Stop,
}

impl Ending {
    /// Begins the watch. `silent` says what the end waits for.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub(super) fn watch(
        signals: TerminationSignals,
        silent: impl Fn() -> Vec<String> + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Stop::new()?;
        let mut waiter = Waiter::idle(&stop)?;
        waiter.watch(&signals)?;
        let more_time = waiter.sender();
        let mut thread = Threads::new("the daemon");
        thread.start(
            thread::Builder::new().name("ending".into()),
            move || match wait(signals, waiter) {
                Ok(None) => {}
                Ok(Some(why)) => end_now(why, &silent()),
                Err(error) => tracing::warn!("the daemon may take long to end: {error}"),
            },
        )?;
        Ok(Self {
            more_time,
            _thread: thread,
            stop,
        })
    }

    /// All requests are answered: the logs are closed next, which copies for `close_time` at most.
    pub(super) fn close_logs(&self, close_time: Duration) {
        self.more_time.send(close_time + ANSWER_TIME);
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.stop.tell();
    }
}

/// Waits until the daemon has ended (`None`), or says why it has to end at once.
fn wait(
    mut signals: TerminationSignals,
    mut waiter: Waiter<Duration>,
) -> io::Result<Option<&'static str>> {
    let began = Instant::now();
    let mut until = began + ANSWER_TIME;
    loop {
        match waiter.wait(&signals, EventSet::IN, Some(until))? {
            WakeReason::Stopped => return Ok(None),
            WakeReason::TimedOut => return Ok(Some("the time to end is over")),
            WakeReason::Message => {
                let times = std::iter::from_fn(|| waiter.message());
                until = times.fold(until, |_, time| Instant::now() + time);
            }
            WakeReason::Ready => {
                let signal = signals.take()?;
                if signal != libc::SIGHUP && began.elapsed() > ONE_SIGNAL {
                    return Ok(Some("another signal has come"));
                }
            }
        }
    }
}

fn end_now(why: &str, silent: &[String]) -> ! {
    let silent = silent.join(", ");
    tracing::error!(
        "{silent}, and {why}: the daemon ends as after a kill; what was stable is not lost, and the \
         next start goes on from the log"
    );
    repeats::flush(true);
    std::process::exit(1);
}
