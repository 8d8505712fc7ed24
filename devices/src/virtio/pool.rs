//! The threads that serve the queues of devices, and the owner's handle of a queue.

use std::io;
use std::sync::{Arc, mpsc};

use super::driver_port::QueueOutcome;
use crate::reactor::{DedicatedThread, ReactorPool, Source, SourceHandle};

/// Runs jobs in a thread of its own. What threads inherit, such as a system call filter, queue
/// workers then inherit from that thread and not from a vCPU.
pub trait Starter: Send + Sync {
    /// Runs `job` once and soon. It must not wait for anything that the caller holds, such as a
    /// lock. A starter that cannot run `job` drops it.
    fn run(&self, job: Box<dyn FnOnce() + Send>);
}

/// Threads that serve the queues of any number of devices. The pool starts them as queues start, up
/// to one per two processors, and each ends with its last queue. A queue whose worker is pinned,
/// polls, or blocks on reads of its disk has a thread of its own. Network devices have a thread
/// beside those of the disks.
pub struct WorkerPool {
    starter: Option<Arc<dyn Starter>>,
    disks: ReactorPool,
    networks: ReactorPool,
}

/// What a queue belongs to, which decides on its thread.
pub(crate) enum QueueKind {
    /// A disk. `Some`: the queue's worker would hold others up.
    Disk(Option<DedicatedThread>),
    Network,
}

impl Default for WorkerPool {
    fn default() -> Self {
        Self {
            starter: None,
            disks: ReactorPool::new("virtio-blk"),
            networks: ReactorPool::with_threads("virtio-net", 1),
        }
    }
}

impl WorkerPool {
    /// A pool that starts threads and opens queues in `starter`'s thread. A pool made by
    /// [`default`](Self::default) does both in the thread that sets DRIVER_OK or enables the queue.
    pub fn with_starter(starter: Arc<dyn Starter>) -> Self {
        Self {
            starter: Some(starter),
            ..Self::default()
        }
    }

    /// Runs `work`, which opens queues, and waits for its result. It runs in the starter's thread
    /// if there is one.
    pub(crate) fn run_in_starter<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let Some(starter) = &self.starter else {
            return work();
        };
        let (done, waiting) = mpsc::channel();
        starter.run(Box::new(move || drop(done.send(work()))));
        let gone = || io::Error::other("the thread that starts queue workers is gone");
        waiting.recv().unwrap_or_else(|_| Err(gone()))
    }
}

/// The owner's handle of a running queue. Dropping it drains the queue: requests in flight complete
/// and are answered without an interrupt, and chains in the ring stay there.
pub struct QueueHandle {
    /// `None`: the driver's rings are broken, and the queue never ran.
    queue: Option<(SourceHandle, Arc<QueueOutcome>)>,
}

impl QueueHandle {
    /// A queue whose rings are broken.
    pub(crate) fn broken() -> Self {
        Self { queue: None }
    }

    /// Starts serving a queue with the worker that `open` makes.
    ///
    /// # Errors
    /// If `open` fails, or the system refuses a thread.
    pub(crate) fn start<S: Source + 'static>(
        pool: &Arc<WorkerPool>,
        kind: QueueKind,
        open: impl FnOnce() -> io::Result<(S, Arc<QueueOutcome>)> + Send + 'static,
    ) -> io::Result<Self> {
        let threads = Arc::clone(pool);
        pool.run_in_starter(move || {
            let (worker, outcome) = open()?;
            let reservation = match kind {
                QueueKind::Disk(dedicated) => threads.disks.reserve(dedicated),
                QueueKind::Network => threads.networks.reserve(None),
            };
            let source = reservation?.serve(Box::new(worker));
            let queue = Some((source, outcome));
            Ok(Self { queue })
        })
    }

    /// Starts draining the queue without waiting, so that several queues can drain at once.
    pub(crate) fn request_stop(&self) {
        if let Some((source, _)) = &self.queue {
            source.request_stop();
        }
    }

    /// Whether the queue is drained. Then dropping the handle does not wait.
    pub(crate) fn is_drained(&self) -> bool {
        self.queue
            .as_ref()
            .is_none_or(|(source, _)| source.is_gone())
    }

    /// Drains the queue. Chains already taken are completed, unless the queue breaks.
    pub(crate) fn stop(mut self) -> DrainResult {
        let next_avail = self.drain();
        // Checked only now, because draining may have met an error. Taking the queue keeps `drop`
        // from draining it again.
        let queue = self.queue.take();
        let broken = queue.is_none_or(|(_, outcome)| outcome.is_broken());
        DrainResult { next_avail, broken }
    }

    fn drain(&self) -> Option<u16> {
        self.request_stop();
        let (source, outcome) = self.queue.as_ref()?;
        source.wait_until_gone();
        Some(outcome.chains_taken())
    }
}

/// How a queue was drained.
pub(crate) struct DrainResult {
    /// The index of the first chain that was not taken; `None` if the queue never ran.
    pub(crate) next_avail: Option<u16>,
    /// Whether the queue met an error. Then only a reset lets it run again.
    pub(crate) broken: bool,
}

impl Drop for QueueHandle {
    fn drop(&mut self) {
        self.drain();
    }
}
