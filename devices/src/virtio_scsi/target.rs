//! What the queues of a target share: its units, and what they tell each other.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::request::{PendingCommand, Response};
use crate::control::{DeviceControl, GateWatcher};
use crate::scsi::SharedUnit;

/// Wakes a worker.
pub(super) struct Wakeup(pub(super) EventFd);

impl GateWatcher for Wakeup {
    fn wake(&self) {
        // Fails only if the counter is full, and then the worker is woken anyway.
        let _ = self.0.write(1);
    }
}

/// A task management function that ends commands, or asks for them, on its way through the request
/// queues.
pub(super) struct TaskFunction {
    /// The unit; `None`: all of them.
    pub(super) unit: Option<usize>,
    /// The driver's name for the command; `None`: all of them.
    pub(super) id: Option<u64>,
    /// What it ends them with; `None`: it only asks whether there are any.
    pub(super) ends_with: Option<Response>,
    pub(super) found: AtomicBool,
    /// How many request queues have not finished it.
    queues: AtomicUsize,
}

impl TaskFunction {
    pub(super) fn new(unit: Option<usize>, id: Option<u64>, ends_with: Option<Response>) -> Self {
        Self {
            unit,
            id,
            ends_with,
            found: AtomicBool::new(false),
            queues: AtomicUsize::new(0),
        }
    }

    pub(super) fn is_for(&self, command: &PendingCommand) -> bool {
        let unit = self.unit.is_none() || self.unit == command.unit;
        unit && self.id.is_none_or(|id| id == command.id)
    }

    /// Whether every request queue has finished it, so that all its commands are answered.
    pub(super) fn is_done(&self) -> bool {
        self.queues.load(Ordering::SeqCst) == 0
    }
}

/// A request queue that runs, and the functions that it has not seen.
type RunningQueue = (u16, Vec<Arc<TaskFunction>>);

/// A target, as a queue sees it.
pub(super) struct ScsiTarget {
    pub(super) units: Vec<SharedUnit>,
    pub(super) links: Arc<QueueLinks>,
}

/// What the queues of a target, and the owners of its units, tell each other.
#[derive(Default)]
pub(super) struct QueueLinks {
    queues: Mutex<Vec<RunningQueue>>,
    workers: Mutex<Vec<Weak<Wakeup>>>,
    /// Units whose capacity has changed, and the driver does not know.
    resized: Mutex<BTreeSet<usize>>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // No panic leaves a list half changed.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl QueueLinks {
    /// What wakes a new worker.
    ///
    /// # Errors
    /// If the system refuses an event descriptor.
    pub(super) fn wakeup(&self) -> std::io::Result<Arc<Wakeup>> {
        let wakeup = Arc::new(Wakeup(EventFd::new(EFD_NONBLOCK)?));
        let mut workers = lock(&self.workers);
        workers.retain(|worker| worker.strong_count() > 0);
        workers.push(Arc::downgrade(&wakeup));
        Ok(wakeup)
    }

    fn wake_all(&self) {
        let workers: Vec<_> = lock(&self.workers)
            .iter()
            .filter_map(Weak::upgrade)
            .collect();
        workers.iter().for_each(|worker| worker.wake());
    }

    /// A request queue starts to run.
    pub(super) fn add_queue(&self, index: u16) {
        lock(&self.queues).push((index, Vec::new()));
    }

    /// A request queue runs no more, so it has finished what it has not seen.
    pub(super) fn remove_queue(&self, index: u16) {
        let unseen = self.take_functions(index);
        lock(&self.queues).retain(|(other, _)| *other != index);
        unseen.iter().for_each(|function| self.finish(function));
    }

    /// Sends a function through all request queues.
    pub(super) fn send(&self, function: &Arc<TaskFunction>) {
        let mut queues = lock(&self.queues);
        function.queues.store(queues.len(), Ordering::SeqCst);
        for (_, unseen) in queues.iter_mut() {
            unseen.push(Arc::clone(function));
        }
        drop(queues);
        self.wake_all();
    }

    /// The functions that request queue `index` has not seen.
    pub(super) fn take_functions(&self, index: u16) -> Vec<Arc<TaskFunction>> {
        let mut queues = lock(&self.queues);
        let own = queues.iter_mut().find(|(other, _)| *other == index);
        own.map(|(_, unseen)| std::mem::take(unseen))
            .unwrap_or_default()
    }

    /// A request queue has answered all commands of a function.
    pub(super) fn finish(&self, function: &TaskFunction) {
        if function.queues.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.wake_all();
        }
    }

    /// A unit whose driver has to learn of its new capacity.
    pub(super) fn next_resized(&self) -> Option<usize> {
        lock(&self.resized).pop_first()
    }

    pub(super) fn has_resized(&self) -> bool {
        !lock(&self.resized).is_empty()
    }

    pub(super) fn forget_resized(&self) {
        lock(&self.resized).clear();
    }
}

impl ScsiTarget {
    /// Resets these units.
    pub(super) fn reset(&self, unit: Option<usize>) {
        let units = self.units.iter().enumerate();
        let meant = units.filter(|(index, _)| unit.is_none_or(|unit| unit == *index));
        meant.for_each(|(_, shared)| shared.unit.reset());
    }
}

/// The owner's control of a unit.
pub(super) struct UnitControl {
    pub(super) shared: SharedUnit,
    pub(super) links: Arc<QueueLinks>,
    pub(super) number: usize,
}

impl DeviceControl for UnitControl {
    /// The next command gets a unit attention condition, and the driver an event if it knows those.
    fn capacity_changed(&self) {
        self.shared.capacity_changed();
        lock(&self.links.resized).insert(self.number);
        self.links.wake_all();
    }

    fn set_write_cache(&self, on: bool) -> bool {
        self.shared.set_write_cache(on)
    }

    fn pause(&self) -> std::io::Result<()> {
        self.shared.pause()
    }

    fn resume(&self) {
        self.shared.resume();
    }
}
