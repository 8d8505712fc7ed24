//! SIGTERM and its like: the processes that this one has started end first, then it ends itself.

use std::fs;
use std::io;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use walvisor_vmm::vm::TerminationSignals;

use crate::error::{Error, Result};

/// The signal that asked this process to end; 0 if none did.
static ASKED: AtomicI32 = AtomicI32::new(0);

/// The process that its starter ends, after those that use it; 0 if there is none.
static LAST: AtomicI32 = AtomicI32::new(0);

/// How long the children may take: a `walvisor` powers its guest off, and closes its disks.
const PATIENCE: Duration = Duration::from_secs(60);
/// How long this process may take once it has no children, to remove its directories.
const OWN_TIME: Duration = Duration::from_secs(2);

/// From now on a signal that asks this process to end goes to all processes below it too, and ends this one once they have
/// ended. To be called while the process has one thread.
///
/// # Errors
/// The system refuses a descriptor or a thread.
pub fn children_first() -> io::Result<()> {
    let mut signals = TerminationSignals::block()?;
    let named = thread::Builder::new().name("signals".to_owned());
    named.spawn(move || {
        let signal = signals.take().unwrap_or(Signal::TERM.as_raw());
        ASKED.store(signal, Ordering::Relaxed);
        let began = Instant::now();
        let mut told = Vec::new();
        loop {
            let left = below(std::process::id());
            let last = Pid::from_raw(LAST.load(Ordering::Relaxed));
            let now = |process: &&Pid| !told.contains(*process) && Some(**process) != last;
            for &process in left.iter().filter(now) {
                // It may have ended meanwhile.
                let _ = kill_process(process, Signal::TERM);
            }
            if left.is_empty() || began.elapsed() > PATIENCE {
                break;
            }
            told = left;
            thread::sleep(Duration::from_millis(50));
        }
        thread::sleep(OWN_TIME);
        std::process::exit(128 + signal);
    })?;
    Ok(())
}

/// Leaves the end of `process` to its caller: a QEMU whose disk's daemon ends before it waits for that daemon.
pub(crate) fn leave(process: Pid) {
    LAST.store(process.as_raw_nonzero().get(), Ordering::Relaxed);
}

/// Fails if a signal has asked this process to end: it then starts nothing more.
///
/// # Errors
/// As said.
pub(crate) fn check() -> Result<()> {
    match ASKED.load(Ordering::Relaxed) {
        0 => Ok(()),
        signal => Err(Error::Stopped { signal }),
    }
}

/// The processes below `process`, except those that have ended and are not waited for yet.
fn below(process: u32) -> Vec<Pid> {
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
            found.extend(below(child));
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
    fn all_processes_below_are_found() {
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
        let found = below(std::process::id());
        assert!(
            found.contains(&shell_id) && found.contains(&sleep),
            "{found:?}"
        );
        for process in [sleep, shell_id] {
            kill_process(process, Signal::KILL).unwrap();
        }
        shell.wait().unwrap();
        assert!(!below(std::process::id()).contains(&shell_id));
    }
}
