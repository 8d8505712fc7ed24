//! Starts threads, places queues at them, and is the owner's side of a queue.

use std::io;
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;

use rustix::thread::{CpuSet, sched_setaffinity};
use walvisor_block::request_short_slices;

use super::seat::{Inbox, QueueControl, Seat, Served, WorkerPlan};
use super::virtqueue::Virtqueue;
use super::worker::{QueueWorker, Thread, give_up};
use crate::event_loop::EventLoop;
use crate::memory::DeviceMemory;

/// Runs jobs in a thread of its own. Queue workers then inherit what threads inherit, such as a system call filter,
/// from that thread and not from a vCPU.
pub trait Starter: Send + Sync {
    /// Runs `job` once, soon, without waiting for anything that the caller holds. A starter that cannot run `job`
    /// drops it.
    fn run(&self, job: Box<dyn FnOnce() + Send>);
}

/// Threads that serve the queues of any number of devices. The pool starts them as queues start, up to one for two
/// processors, and each ends with its last queue. A queue whose worker is pinned, polls, or blocks on reads of its disk
/// has a thread of its own.
pub struct WorkerPool {
    starter: Option<Arc<dyn Starter>>,
    /// The most shared threads.
    most: usize,
    shared: Mutex<Vec<Arc<Inbox>>>,
}

/// The most threads that serve side by side: one for two processors. The other half is left to the clients.
pub(crate) fn most_threads() -> usize {
    thread::available_parallelism().map_or(1, |cpus| cpus.get().div_ceil(2))
}

impl Default for WorkerPool {
    fn default() -> Self {
        Self {
            starter: None,
            most: most_threads(),
            shared: Mutex::default(),
        }
    }
}

impl WorkerPool {
    /// A pool whose threads are started, and whose queues are opened, by `starter`. In a pool made by
    /// [`default`](Self::default) the thread that sets DRIVER_OK or enables the queue does both.
    pub fn with_starter(starter: Arc<dyn Starter>) -> Self {
        Self {
            starter: Some(starter),
            ..Self::default()
        }
    }

    /// Serves the queue that `open` opens until it is told to stop. `alone`: in a thread of its own.
    pub(super) fn serve(
        self: &Arc<Self>,
        alone: Option<Alone>,
        open: impl FnOnce() -> io::Result<Box<dyn Served>> + Send + 'static,
    ) -> io::Result<Worker> {
        let pool = Arc::clone(self);
        self.opened_by_starter(move || open().and_then(|served| pool.place(alone, served)))
    }

    /// Runs `work`, which opens queues, in the starter's thread if there is a starter, and waits for it.
    pub(super) fn opened_by_starter<T: Send + 'static>(
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

    /// Gives a queue to a thread.
    fn place(&self, alone: Option<Alone>, served: Box<dyn Served>) -> io::Result<Worker> {
        let mut seat = Seat::new(served);
        let control = Arc::clone(&seat.control);
        let placed = |inbox| Worker {
            queue: Some((control, inbox)),
        };
        if let Some(alone) = alone {
            return start(seat, &alone.name, alone.cpu).map(placed);
        }
        // A panic leaves no partial change in the list.
        let mut shared = self.shared.lock().unwrap_or_else(PoisonError::into_inner);
        shared.retain(|inbox| !inbox.closed());
        let least = shared.iter().min_by_key(|inbox| inbox.load());
        if let Some(inbox) = least.filter(|_| shared.len() >= self.most) {
            seat = match inbox.put(seat) {
                None => return Ok(placed(Arc::clone(inbox))),
                // The thread has ended just now.
                Some(seat) => seat,
            };
        }
        let inbox = start(seat, "virtio-blk", None)?;
        shared.push(Arc::clone(&inbox));
        Ok(placed(inbox))
    }
}

/// Starts a thread with its first queue.
fn start(seat: Seat, name: &str, cpu: Option<u16>) -> io::Result<Arc<Inbox>> {
    let events = EventLoop::new()?;
    let inbox = Arc::new(Inbox::new(events.remote()));
    // Before the thread begins, because a thread without a queue ends.
    drop(inbox.put(seat));
    let own = Arc::clone(&inbox);
    thread::Builder::new().name(name.into()).spawn(move || {
        request_short_slices();
        if let Some(cpu) = cpu {
            pin(cpu);
        }
        Thread::new(events, own).serve();
    })?;
    Ok(inbox)
}

/// Keeps the calling thread on one processor. If the system refuses, the worker goes on unpinned.
fn pin(cpu: u16) {
    let mut set = CpuSet::new();
    set.set(cpu.into());
    if let Err(error) = sched_setaffinity(None, &set) {
        tracing::warn!(%error, "a virtio-blk worker cannot run on CPU {cpu} alone");
    }
}

/// The properties of a thread that serves only one queue.
pub(super) struct Alone {
    pub(super) name: String,
    /// The processor to run on.
    pub(super) cpu: Option<u16>,
}

/// The running worker of one queue. Dropping it drains the queue: requests in flight end and are answered
/// without an interrupt, chains still in the ring stay there.
pub(crate) struct Worker {
    /// The queue, and the inbox of its thread. `None`: the driver's rings are broken, and it never ran.
    queue: Option<(Arc<QueueControl>, Arc<Inbox>)>,
}

impl Worker {
    /// Starts serving the queue. A broken ring is the driver's fault and no error here: it sets DEVICE_NEEDS_RESET.
    pub(super) fn start<M: DeviceMemory>(
        mut plan: WorkerPlan,
        memory: M,
        pool: &Arc<WorkerPool>,
    ) -> io::Result<Self> {
        let queue = Virtqueue::new(
            &plan.queue.setup,
            plan.max_size,
            plan.event_idx,
            &*memory.memory(),
            plan.queue.tracker.take(),
        );
        let queue = match queue {
            Ok(queue) => queue,
            Err(error) => {
                give_up(&plan.status, plan.queue.index, &error);
                return Ok(Self { queue: None });
            }
        };
        // A worker that polls, or whose disk blocks, would delay other queues of its thread.
        let own = plan.cpu.is_some() || !plan.poll.is_zero() || plan.backend.blocks();
        let alone = own.then(|| Alone {
            name: format!("virtio-blk-q{}", plan.queue.index),
            cpu: plan.cpu,
        });
        pool.serve(alone, move || {
            Ok(Box::new(QueueWorker::open(plan, queue, memory)?))
        })
    }

    /// Asks the worker to stop without waiting for it, so that several can drain at once.
    pub(crate) fn request_stop(&self) {
        if let Some((queue, inbox)) = &self.queue {
            inbox.stop(queue);
        }
    }

    /// Whether the queue is drained: then dropping the worker does not wait.
    pub(crate) fn finished(&self) -> bool {
        self.queue.as_ref().is_none_or(|(queue, _)| queue.is_over())
    }

    /// Drains the queue. Chains that the worker has taken are completed, unless the queue breaks.
    pub(crate) fn stop(mut self) -> Drained {
        let next = self.drain();
        // Only now: the worker may have met an error while it drained. The queue is taken, so dropping the worker does not
        // drain it again.
        let queue = self.queue.take();
        let broken = queue.is_none_or(|(queue, _)| queue.broken());
        Drained { next, broken }
    }

    fn drain(&self) -> Option<u16> {
        self.request_stop();
        let (queue, _) = self.queue.as_ref()?;
        Some(queue.wait_until_over())
    }
}

/// A queue that was served and is drained.
pub(crate) struct Drained {
    /// The index of the first chain that was not taken; `None` if the worker never ran.
    pub(crate) next: Option<u16>,
    /// The queue has met an error: only a reset lets it go on.
    pub(crate) broken: bool,
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.drain();
    }
}

#[cfg(test)]
mod tests;
