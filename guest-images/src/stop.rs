//! SIGTERM and the like: the processes that this one has started end first, then this one.

use std::fs;
use std::io;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use walvisor_vmm::vm::TerminationSignals;

use crate::error::{Error, Result};

/// The signal that asked this process to end; 0 if none did.
static SIGNAL: AtomicI32 = AtomicI32::new(0);

/// A process that is not signalled, because its starter ends it after the processes that use it; 0
/// if there is none.
static EXEMPT: AtomicI32 = AtomicI32::new(0);

/// How long the children may take: a `walvisor` powers its guest off, and closes its disks.
const CHILDREN_TIMEOUT: Duration = Duration::from_secs(60);
/// How long this process may take to remove its directories once it has no children.
const CLEANUP_TIME: Duration = Duration::from_secs(2);

/// From now on a signal that asks this process to end is passed on to all its descendants, and ends
/// this process after them. Call it while the process has only one thread.
///
/// # Errors
/// The system refuses a descriptor or a thread.
pub fn end_children_first() -> io::Result<()> {
    let mut signals = TerminationSignals::block()?;
    let named = thread::Builder::new().name("signals".to_owned());
    named.spawn(move || {
        let signal = signals.take().unwrap_or(Signal::TERM.as_raw());
        SIGNAL.store(signal, Ordering::Relaxed);
        let began = Instant::now();
        let mut signalled = Vec::new();
        loop {
            let left = descendants(std::process::id());
            let last = Pid::from_raw(EXEMPT.load(Ordering::Relaxed));
            let now = |process: &&Pid| !signalled.contains(*process) && Some(**process) != last;
            for &process in left.iter().filter(now) {
                // Fails if it has ended.
                let _ = kill_process(process, Signal::TERM);
            }
            if left.is_empty() || began.elapsed() > CHILDREN_TIMEOUT {
                break;
            }
            signalled = left;
            thread::sleep(Duration::from_millis(50));
        }
        thread::sleep(CLEANUP_TIME);
        std::process::exit(128 + signal);
    })?;
    Ok(())
}

/// Leaves it to the caller to end `process`: a disk's daemon must not end before the QEMU that uses
/// it, which would wait for the daemon to come back.
pub(crate) fn exempt(process: Pid) {
    EXEMPT.store(process.as_raw_nonzero().get(), Ordering::Relaxed);
}

/// Fails if a signal has asked this process to end, which then must not start anything more.
///
/// # Errors
/// [`Error::Stopped`] in that case.
pub(crate) fn check() -> Result<()> {
    match SIGNAL.load(Ordering::Relaxed) {
        0 => Ok(()),
        signal => Err(Error::Stopped { signal }),
    }
}

/// The descendants of `process`, except zombies.
fn descendants(process: u32) -> Vec<Pid> {
    let threads = fs::read_dir(format!("/proc/{process}/task"));
    let lists = threads.into_iter().flatten().flatten().map(|thread| {
        let children = fs::read_to_string(thread.path().join("children"));
        children.unwrap_or_default()
    });
    let mut found = Vec::new();
    for list in lists {
        for child in list
            .split_whitespace()
            .filter_map(|id| id.parse::<u32>().ok())
        {
            let state = fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
            let ended = state
                .rsplit(')')
                .next()
                .is_none_or(|rest| rest.starts_with(" Z"));
            found.extend(Pid::from_raw(child.cast_signed()).filter(|_| !ended));
            found.extend(descendants(child));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn all_descendants_are_found() {
        let mut shell = Command::new("sh")
            .args(["-c", "sleep 1000 & echo $!; wait"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = [0; 32];
        let len = shell.stdout.take().unwrap().read(&mut line).unwrap();
        let sleep: i32 = std::str::from_utf8(&line[..len])
            .unwrap()
            .trim()
            .parse()
            .unwrap();
        let (shell_id, sleep) = (Pid::from_child(&shell), Pid::from_raw(sleep).unwrap());
        let found = descendants(std::process::id());
        assert!(
            found.contains(&shell_id) && found.contains(&sleep),
            "{found:?}"
        );
        for process in [sleep, shell_id] {
            kill_process(process, Signal::KILL).unwrap();
        }
        shell.wait().unwrap();
        assert!(!descendants(std::process::id()).contains(&shell_id));
    }
}
