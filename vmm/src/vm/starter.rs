//! The thread that starts the disks' queue workers: under the system call filter that they are to have.

use std::io;
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};

use walvisor_devices::block::Starter;

use crate::seccomp::{Seccomp, ThreadKind, restrict_thread};

type Job = Box<dyn FnOnce() + Send>;

/// Where jobs go. Those that come before the thread are kept for it.
pub(super) struct Starters {
    jobs: Mutex<mpsc::Sender<Job>>,
}

impl Starters {
    /// A starter, and what its thread is to be started with.
    pub(super) fn new() -> (Self, Jobs) {
        let (sender, jobs) = mpsc::channel();
        let starters = Self {
            jobs: Mutex::new(sender),
        };
        (starters, Jobs(jobs))
    }
}

impl Starter for Starters {
    fn run(&self, job: Job) {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        // Without the thread the job is dropped, and its caller learns of that.
        let _ = jobs.send(job);
    }
}

/// The jobs.
pub(super) struct Jobs(mpsc::Receiver<Job>);

impl Jobs {
    /// Starts the thread, restricted as `seccomp` says. It ends when its starter is gone.
    ///
    /// # Errors
    /// If the system refuses the thread or the filter.
    pub(super) fn start(self, seccomp: Seccomp) -> io::Result<JoinHandle<()>> {
        let (told, tells) = mpsc::channel();
        let thread = thread::Builder::new()
            .name("disk-starter".into())
            .spawn(move || {
                let restricted = restrict_thread(seccomp, ThreadKind::DiskWorker);
                let goes_on = restricted.is_ok();
                let _ = told.send(restricted);
                if goes_on {
                    self.0.iter().for_each(|job| job());
                }
            })?;
        let restricted = tells.recv().map_err(io::Error::other)?;
        restricted.map(|()| thread).map_err(io::Error::other)
    }
}
