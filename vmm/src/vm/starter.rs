//! The thread that starts the disks' queue workers, under the system call filter that they inherit.

use std::io;
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};

use walvisor_devices::block::Starter;

use crate::seccomp::{Seccomp, ThreadKind, restrict_thread};

type Job = Box<dyn FnOnce() + Send>;

/// Sends jobs to the starter thread. Jobs sent before the thread runs are kept for it.
pub(super) struct Starters {
    jobs: Mutex<mpsc::Sender<Job>>,
}

impl Starters {
    /// A sender, and the jobs with which its thread is started.
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
        // If the thread is gone, the job is dropped, and its caller notices that.
        let _ = jobs.send(job);
    }
}

/// The jobs that the starter thread runs.
pub(super) struct Jobs(mpsc::Receiver<Job>);

impl Jobs {
    /// Starts the thread, restricted as `seccomp` says. The thread ends when its sender is dropped.
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
