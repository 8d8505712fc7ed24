//! A peer's daemon. Dropping it sends SIGTERM to the daemon.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use walvisor::commands::CommandError;
use walvisor_guest_images::leash;

use crate::daemon::HaltGuard;

/// No daemon takes this long to start.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A running daemon of a peer.
pub struct Peer(Child);

impl Peer {
    /// Stops the daemon until the returned value is dropped.
    pub fn halt(&self) -> HaltGuard {
        HaltGuard::new(&self.0)
    }

    /// The daemon's process.
    pub fn process(&mut self) -> &mut Child {
        &mut self.0
    }

    /// Starts the daemon in `directory`, and waits until there is a socket at each of `sockets`.
    ///
    /// # Errors
    /// If the daemon does not start, or ends before it serves.
    pub fn start(
        command: &mut Command,
        sockets: &[String],
        directory: &Path,
    ) -> Result<Self, CommandError> {
        let name = command.get_program().to_string_lossy().into_owned();
        let failed = |why: String| CommandError::Failed(format!("{name}: {why}"));
        let child = leash(command)
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
            if began.elapsed() > START_TIMEOUT {
                return Err(failed(format!("it does not serve after {START_TIMEOUT:?}")));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(peer)
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Repeats the signal, because qemu-nbd ignores it while starting.
        for _ in 0..100 {
            // Stops once the daemon has ended.
            if !matches!(self.0.try_wait(), Ok(None)) {
                return;
            }
            let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
