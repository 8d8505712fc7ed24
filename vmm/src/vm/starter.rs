//! The thread that starts the disks' queue workers, under the system call filter that they inherit.

use std::io;
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};

use walvisor_devices::block::Starter;

use crate::seccomp::{Seccomp, ThreadKind, restrict_thread};

type StarterTask = Box<dyn FnOnce() + Send>;

/// Sends jobs to the starter thread. Those sent before the thread runs wait for it.
pub(super) struct StarterHandle {
    jobs: Mutex<mpsc::Sender<StarterTask>>,
}

impl StarterHandle {
    /// A handle, and the queue of jobs to start the thread with.
    pub(super) fn new() -> (Self, StarterJobs) {
        let (sender, jobs) = mpsc::channel();
        let handle = Self {
            jobs: Mutex::new(sender),
        };
        (handle, StarterJobs(jobs))
    }
}

impl Starter for StarterHandle {
    fn run(&self, job: StarterTask) {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        // If the thread is gone, the job is dropped, and its caller notices that.
        let _ = jobs.send(job);
    }
}

/// The jobs that the starter thread runs.
pub(super) struct StarterJobs(mpsc::Receiver<StarterTask>);

impl StarterJobs {
    /// Starts the thread, restricted as `seccomp` says. The thread ends when its sender is dropped.
    ///
    /// # Errors
    /// If the system refuses the thread or the filter.
    pub(super) fn start(self, seccomp: Seccomp) -> io::Result<JoinHandle<()>> {
        let (sender, receiver) = mpsc::channel();
        let thread = thread::Builder::new()
            .name("disk-starter".into())
            .spawn(move || {
                let restricted = restrict_thread(seccomp, ThreadKind::DiskWorker);
                let is_restricted = restricted.is_ok();
                let _ = sender.send(restricted);
                if is_restricted {
                    self.0.iter().for_each(|job| job());
                }
            })?;
        let restricted = receiver.recv().map_err(io::Error::other)?;
        restricted.map(|()| thread).map_err(io::Error::other)
    }
}
