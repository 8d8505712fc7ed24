//! A daemon of others, asked to end when dropped; and how one is halted while another is measured.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::CommandError;

/// Nothing takes this long to start.
const PATIENCE: Duration = Duration::from_secs(60);

/// A process that does not run until this is dropped. A disk may have work left when its turn is over, such as a checkpoint:
/// that is to cost the disk itself, and not the one that is measured next.
pub struct Halted(Pid);

impl Halted {
    /// Halts a child of this process.
    pub fn new(child: &Child) -> Self {
        let halted = Self(Pid::from_child(child));
        // Gone is as good as halted.
        let _ = kill_process(halted.0, Signal::STOP);
        halted
    }
}

impl Drop for Halted {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

/// See the module's documentation.
pub struct Peer(Child);

impl Peer {
    /// Halts it until what is returned is dropped.
    pub fn halt(&self) -> Halted {
        Halted::new(&self.0)
    }

    /// Starts it in `directory`, and waits until there is a socket at each of `sockets`.
    ///
    /// # Errors
    /// If it does not start, or ends before it serves.
    pub fn start(
        command: &mut Command,
        sockets: &[String],
        directory: &Path,
    ) -> Result<Self, CommandError> {
        let name = command.get_program().to_string_lossy().into_owned();
        let failed = |why: String| CommandError::Failed(format!("{name}: {why}"));
        let child = command
            .current_dir(directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        let mut peer = Self(child.map_err(|error| failed(error.to_string()))?);
        let began = Instant::now();
        while !sockets.iter().all(|socket| directory.join(socket).exists()) {
            if let Ok(Some(status)) = peer.0.try_wait() {
                return Err(failed(format!("it ended ({status}) before it served")));
            }
            if began.elapsed() > PATIENCE {
                return Err(failed(format!("it does not serve after {PATIENCE:?}")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(peer)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Asked again and again: qemu-nbd does not hear it while it starts.
        for _ in 0..100 {
            // Gone already is as good.
            let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
            std::thread::sleep(Duration::from_millis(50));
            if !matches!(self.0.try_wait(), Ok(None)) {
                return;
            }
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether the system says that it is stopped by a signal (proc(5), `stat`).
    fn stopped(child: &Child) -> bool {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap();
        stat.rsplit(')')
            .next()
            .unwrap()
            .trim_start()
            .starts_with('T')
    }

    #[test]
    fn who_is_halted_does_not_run_until_it_may_again() {
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        let wait_until = |wanted: bool| {
            let began = Instant::now();
            while stopped(&child) != wanted {
                assert!(began.elapsed() < PATIENCE, "stopped: {}", !wanted);
                std::thread::sleep(Duration::from_millis(1));
            }
        };
        let halted = Halted::new(&child);
        wait_until(true);
        drop(halted);
        wait_until(false);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
