//! What is typed for a nested guest. It goes to the console of the machine around the guest, which
//! knows what Ctrl-A x means. That machine may hang, so the key is seen here too.
//!
//! ```text
//!   terminal ──▶ this thread ──▶ QEMU ──▶ walvisor run: Ctrl-A x ends the guest
//!                     └─ Ctrl-A x, and QEMU goes on: it is killed
//! ```

use std::io;
use std::os::fd::AsFd;
use std::process::ChildStdin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_setfl};
use rustix::io::{Errno, read, write};
use rustix::stdio::stdin;
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcsetattr};

/// Ctrl-A.
const ESCAPE: u8 = 1;
/// How long the machine may take to end once it is asked to.
const GRACE: Duration = Duration::from_secs(10);
/// How often the thread looks whether it should end.
const PERIOD: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};
/// Bytes that wait for a machine that reads none. Beyond that no more are read.
const MOST_PENDING: usize = 1 << 20;

/// The keyboard of a machine. Dropping it gives the terminal back as it was.
pub(crate) struct Keyboard {
    terminal: Option<Termios>,
    shared: Arc<SharedState>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct SharedState {
    ended: AtomicBool,
    /// How often Ctrl-A x was typed.
    asked: AtomicU64,
}

impl Keyboard {
    /// Passes on what this process gets at stdin. Every key of a terminal counts, Ctrl-C too.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn connect(to: ChildStdin) -> io::Result<Self> {
        fcntl_setfl(&to, OFlags::NONBLOCK)?;
        let terminal = tcgetattr(stdin()).ok();
        if let Some(mode) = &terminal {
            let mut raw = mode.clone();
            raw.make_raw();
            raw.output_modes = mode.output_modes;
            raw.local_modes -= LocalModes::ISIG;
            tcsetattr(stdin(), OptionalActions::Now, &raw)?;
        }
        let mut keyboard = Self {
            terminal,
            shared: Arc::default(),
            thread: None,
        };
        let shared = Arc::clone(&keyboard.shared);
        let named = thread::Builder::new().name("keyboard".to_owned());
        keyboard.thread = Some(named.spawn(move || {
            // QEMU is gone, or the system refuses to read: then nobody types.
            let _ = pass_on(to, &shared);
        })?);
        Ok(keyboard)
    }

    /// Whether the machine does not end although Ctrl-A x was typed: some time ago, or twice.
    pub(crate) fn gives_up(&self, since: &mut Option<Instant>) -> bool {
        match self.shared.asked.load(Ordering::Relaxed) {
            0 => false,
            1 => since.get_or_insert_with(Instant::now).elapsed() > GRACE,
            _ => true,
        }
    }
}

impl Drop for Keyboard {
    fn drop(&mut self) {
        self.shared.ended.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            // It does not panic.
            let _ = thread.join();
        }
        if let Some(mode) = &self.terminal {
            // There is nobody left to report a failure to.
            let _ = tcsetattr(stdin(), OptionalActions::Now, mode);
        }
    }
}

fn pass_on(to: ChildStdin, shared: &SharedState) -> io::Result<()> {
    let (mut pending, mut escaped, mut open) = (Vec::new(), false, true);
    let mut bytes = [0; 4096];
    // Once nothing follows, the machine sees the end of its input too.
    while !shared.ended.load(Ordering::Relaxed) && (open || !pending.is_empty()) {
        let reads = open && pending.len() < MOST_PENDING;
        let (input, output) = (stdin(), to.as_fd());
        let wanted = if pending.is_empty() {
            PollFlags::empty()
        } else {
            PollFlags::OUT
        };
        let mut both = [
            PollFd::new(&output, wanted),
            PollFd::new(&input, PollFlags::IN),
        ];
        // The end of a file that is not read would be told again and again.
        let polled = if reads { &mut both[..] } else { &mut both[..1] };
        match poll(polled, Some(&PERIOD)) {
            Err(Errno::INTR) => continue,
            ready => ready?,
        };
        let [output, input] = both.map(|polled| polled.revents());
        if output.intersects(PollFlags::ERR | PollFlags::HUP) {
            return Ok(());
        }
        if reads && !input.is_empty() {
            let count = match read(stdin(), &mut bytes) {
                Err(Errno::INTR | Errno::AGAIN) => continue,
                count => count?,
            };
            open = count > 0;
            let typed = asks(&bytes[..count], &mut escaped);
            shared.asked.fetch_add(typed, Ordering::Relaxed);
            pending.extend_from_slice(&bytes[..count]);
        }
        if output.contains(PollFlags::OUT) {
            match write(&to, &pending) {
                Err(Errno::INTR | Errno::AGAIN) => {}
                count => drop(pending.drain(..count?)),
            }
        }
    }
    Ok(())
}

/// How often Ctrl-A x was typed. `escaped`: whether the last key was Ctrl-A. Two of them are one
/// that goes to the guest.
fn asks(bytes: &[u8], escaped: &mut bool) -> u64 {
    let mut asks = 0;
    for &byte in bytes {
        let after = std::mem::take(escaped);
        asks += u64::from(after && byte == b'x');
        *escaped = !after && byte == ESCAPE;
    }
    asks
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_key_is_seen_across_reads_and_an_escaped_one_is_not() {
        let mut escaped = false;
        assert_eq!(asks(b"x\x01", &mut escaped), 0);
        assert_eq!(asks(b"xx\x01x", &mut escaped), 2);
        assert_eq!(asks(b"\x01\x01x\x01hx", &mut escaped), 0);
        assert_eq!(asks(b"\x01\x01\x01x", &mut escaped), 1);
    }
}
