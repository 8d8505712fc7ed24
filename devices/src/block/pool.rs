//! The threads that serve the queues of devices, and the owner's handle of a queue.

use std::io;
use std::sync::{Arc, mpsc};

use super::virtqueue::Virtqueue;
use super::worker::{QueueOutcome, QueueWorker, WorkerConfig, give_up};
use crate::memory::DeviceMemory;
use crate::reactor::{DedicatedThread, ReactorPool, SourceHandle};

/// Runs jobs in a thread of its own. What threads inherit, such as a system call filter, queue workers then inherit from
/// that thread and not from a vCPU.
pub trait Starter: Send + Sync {
    /// Runs `job` once and soon. It must not wait for anything that the caller holds, such as a lock. A starter that
    /// cannot run `job` drops it.
    fn run(&self, job: Box<dyn FnOnce() + Send>);
}

/// Threads that serve the queues of any number of devices. The pool starts them as queues start, up to one per two
/// processors, and each ends with its last queue. A queue whose worker is pinned, polls, or blocks on reads of its disk
/// has a thread of its own.
pub struct WorkerPool {
    starter: Option<Arc<dyn Starter>>,
    threads: ReactorPool,
}

impl Default for WorkerPool {
    fn default() -> Self {
        Self {
            starter: None,
            threads: ReactorPool::new("virtio-blk"),
        }
    }
}

impl WorkerPool {
    /// A pool that starts threads and opens queues in `starter`'s thread. A pool made by [`default`](Self::default) does
    /// both in the thread that sets DRIVER_OK or enables the queue.
    pub fn with_starter(starter: Arc<dyn Starter>) -> Self {
        Self {
            starter: Some(starter),
            ..Self::default()
        }
    }

    /// Runs `work`, which opens queues, and waits for its result. It runs in the starter's thread if there is one.
    pub(super) fn run_in_starter<T: Send + 'static>(
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

/// The owner's handle of a running queue. Dropping it drains the queue: requests in flight complete and are answered
/// without an interrupt, and chains in the ring stay there.
pub(crate) struct QueueHandle {
    /// `None`: the driver's rings are broken, and the queue never ran.
    queue: Option<(SourceHandle, Arc<QueueOutcome>)>,
}

impl QueueHandle {
    /// Starts serving the queue. A broken ring is the driver's fault and not an error here: it sets DEVICE_NEEDS_RESET.
    pub(super) fn start<M: DeviceMemory>(
        mut config: WorkerConfig,
        memory: M,
        pool: &Arc<WorkerPool>,
    ) -> io::Result<Self> {
        let queue = Virtqueue::new(
            &config.queue.setup,
            config.max_size,
            config.event_idx,
            &*memory.memory(),
            config.queue.tracker.take(),
        );
        let queue = match queue {
            Ok(queue) => queue,
            Err(error) => {
                give_up(&config.status, config.queue.index, &error);
                return Ok(Self { queue: None });
            }
        };
        // A worker that polls, or whose disk blocks, would delay the other queues of its thread.
        let needs_own_thread =
            config.cpu.is_some() || !config.poll.is_zero() || config.backend.blocks();
        let dedicated = needs_own_thread.then(|| DedicatedThread {
            name: format!("virtio-blk-q{}", config.queue.index),
            cpu: config.cpu,
        });
        let threads = Arc::clone(pool);
        pool.run_in_starter(move || {
            let worker = QueueWorker::open(config, queue, memory)?;
            let outcome = worker.outcome();
            let source = threads.threads.reserve(dedicated)?.serve(Box::new(worker));
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
        // Checked only now, because draining may have met an error. Taking the queue keeps `drop` from draining it again.
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
