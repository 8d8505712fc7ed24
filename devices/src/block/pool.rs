//! Starts threads, assigns queues to them, and holds the owner's handle of a queue.

use std::io;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;

use rustix::thread::{CpuSet, sched_setaffinity};
use walvisor_block::request_short_slices;

use super::queue_slot::{PooledQueue, QueueControl, QueueSlot, ThreadInbox, WorkerConfig};
use super::virtqueue::Virtqueue;
use super::worker::{PoolThread, QueueWorker, give_up};
use crate::event_loop::EventLoop;
use crate::memory::DeviceMemory;

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
    /// The most shared threads.
    max_shared: usize,
    shared: Mutex<Vec<Arc<ThreadInbox>>>,
}

/// The most threads that serve requests: one per two processors. The other processors are left to the clients.
pub(crate) fn max_threads() -> usize {
    thread::available_parallelism().map_or(1, |cpus| cpus.get().div_ceil(2))
}

impl Default for WorkerPool {
    fn default() -> Self {
        Self {
            starter: None,
            max_shared: max_threads(),
            shared: Mutex::default(),
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

    /// Opens a queue and serves it, in a thread of its own if `dedicated` is given, until the handle stops it.
    pub(super) fn serve(
        self: &Arc<Self>,
        dedicated: Option<DedicatedThread>,
        open: impl FnOnce() -> io::Result<Box<dyn PooledQueue>> + Send + 'static,
    ) -> io::Result<QueueHandle> {
        let pool = Arc::clone(self);
        self.run_in_starter(move || open().and_then(|queue| pool.assign(dedicated, queue)))
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

    /// Assigns a queue to a thread.
    fn assign(
        &self,
        dedicated: Option<DedicatedThread>,
        queue: Box<dyn PooledQueue>,
    ) -> io::Result<QueueHandle> {
        let mut slot = QueueSlot::new(queue);
        let control = Arc::clone(&slot.control);
        let handle = |inbox| QueueHandle {
            queue: Some((control, inbox)),
        };
        if let Some(thread) = dedicated {
            return start(slot, &thread.name, thread.cpu).map(handle);
        }
        // A panic leaves no partial change in the list.
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.retain(|inbox| !inbox.is_closed());
        let least = shared.iter().min_by_key(|inbox| inbox.load());
        if let Some(inbox) = least.filter(|_| shared.len() >= self.max_shared) {
            slot = match inbox.add_queue(slot) {
                None => return Ok(handle(Arc::clone(inbox))),
                // The thread has just ended.
                Some(slot) => slot,
            };
        }
        let inbox = start(slot, "virtio-blk", None)?;
        shared.push(Arc::clone(&inbox));
        Ok(handle(inbox))
    }
}

/// Starts a thread with its first queue.
fn start(slot: QueueSlot, name: &str, cpu: Option<u16>) -> io::Result<Arc<ThreadInbox>> {
    let events = EventLoop::new()?;
    let inbox = Arc::new(ThreadInbox::new(events.sender()));
    // Add the queue before the thread starts, because a thread without a queue ends.
    drop(inbox.add_queue(slot));
    let own = Arc::clone(&inbox);
    thread::Builder::new().name(name.into()).spawn(move || {
        request_short_slices();
        if let Some(cpu) = cpu {
            pin(cpu);
        }
        PoolThread::new(events, own).serve();
    })?;
    Ok(inbox)
}

/// Pins the calling thread to a processor. If the system refuses, the worker runs unpinned.
fn pin(cpu: u16) {
    let mut set = CpuSet::new();
    set.set(cpu.into());
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::warn!(%error, "a virtio-blk worker cannot run on CPU {cpu} alone");
    }
}

/// A thread that serves one queue only.
pub(super) struct DedicatedThread {
    pub(super) name: String,
    /// The processor to run on.
    pub(super) cpu: Option<u16>,
}

/// The owner's handle of a running queue. Dropping it drains the queue: requests in flight complete and are answered
/// without an interrupt, and chains in the ring stay there.
pub(crate) struct QueueHandle {
    /// The queue, and the inbox of its thread. `None`: the driver's rings are broken, and the queue never ran.
    queue: Option<(Arc<QueueControl>, Arc<ThreadInbox>)>,
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
        pool.serve(dedicated, move || {
            Ok(Box::new(QueueWorker::open(config, queue, memory)?))
        })
    }

    /// Starts draining the queue without waiting, so that several queues can drain at once.
    pub(crate) fn request_stop(&self) {
        if let Some((queue, inbox)) = &self.queue {
            inbox.stop(queue);
        }
    }

    /// Whether the queue is drained. Then dropping the handle does not wait.
    pub(crate) fn is_drained(&self) -> bool {
        self.queue.as_ref().is_none_or(|(queue, _)| queue.is_gone())
    }

    /// Drains the queue. Chains already taken are completed, unless the queue breaks.
    pub(crate) fn stop(mut self) -> DrainResult {
        let next_avail = self.drain();
        // Checked only now, because draining may have met an error. Taking the queue keeps `drop` from draining it again.
        let queue = self.queue.take();
        let broken = queue.is_none_or(|(queue, _)| queue.is_broken());
        DrainResult { next_avail, broken }
    }

    fn drain(&self) -> Option<u16> {
        self.request_stop();
        let (queue, _) = self.queue.as_ref()?;
        Some(queue.wait_until_gone())
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

#[cfg(test)]
mod tests;
