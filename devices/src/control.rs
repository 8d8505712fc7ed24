//! What whoever runs a device may do with it while its driver or its clients use it.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use crate::backend::Backend;

/// A device in use, as its owner sees it. May be called from any thread.
pub trait DeviceControl: Send + Sync {
    /// The backend may have another capacity now: tells whoever uses the device, as far as its transport can.
    fn capacity_changed(&self);

    /// Wants writeback (`true`) or writethrough. Returns what is in force now.
    ///
    /// Writethrough is in force at once. Writeback is in force at once only if every user of the device knows that a
    /// completed write may be lost: a driver that was told otherwise would never flush. For such a driver the device
    /// stays as it is until the driver asks for writeback itself, or is reset.
    fn set_write_cache(&self, on: bool) -> bool;

    /// Takes no more requests, and returns when all that were taken are answered.
    ///
    /// # Errors
    /// If whoever uses the device does not let that happen. It goes on then.
    fn pause(&self) -> io::Result<()>;

    /// Takes requests again, those first that have come meanwhile.
    fn resume(&self);
}

/// The same for a transport that is shared by the vCPUs under a lock.
pub trait ControlTransport: Send {
    /// See [`DeviceControl::capacity_changed`].
    fn capacity_changed(&mut self);
    /// See [`DeviceControl::set_write_cache`].
    fn set_write_cache(&mut self, on: bool) -> bool;
    /// See [`DeviceControl::pause`].
    fn pause(&mut self);
    /// See [`DeviceControl::resume`].
    fn resume(&mut self);
}

/// Of a transport that is gone nothing happens.
impl<T: ControlTransport> DeviceControl for Weak<Mutex<T>> {
    fn capacity_changed(&self) {
        with(self, T::capacity_changed);
    }

    fn set_write_cache(&self, on: bool) -> bool {
        with(self, |transport| transport.set_write_cache(on)).unwrap_or(on)
    }

    fn pause(&self) -> io::Result<()> {
        with(self, T::pause);
        Ok(())
    }

    fn resume(&self) {
        with(self, T::resume);
    }
}

fn with<T, R>(transport: &Weak<Mutex<T>>, f: impl FnOnce(&mut T) -> R) -> Option<R> {
    let transport = transport.upgrade()?;
    // A vCPU that panicked in it has ended the run already.
    let mut transport = transport.lock().unwrap_or_else(PoisonError::into_inner);
    Some(f(&mut transport))
}

/// The cache mode of a device, which its owner and its driver both have a say in.
///
/// What the driver sees in `writeback` is what it has chosen, or the owner's mode at the time of its choice. The owner can
/// make writes stable that the driver takes for volatile, never the reverse.
pub(crate) struct CacheSwitch {
    backend: Arc<dyn Backend>,
    state: Mutex<CacheState>,
}

#[derive(Clone, Copy)]
struct CacheState {
    /// The mode of a driver that has no word in it, and of one that starts.
    default: bool,
    /// What the driver believes.
    driver: bool,
    /// The owner insists on writethrough.
    forced: bool,
}

impl CacheSwitch {
    /// The backend's mode is the owner's.
    pub(crate) fn new(backend: Arc<dyn Backend>) -> Self {
        let on = backend.write_cache();
        let state = Mutex::new(CacheState {
            default: on,
            driver: on,
            forced: false,
        });
        Self { backend, state }
    }

    fn lock(&self) -> MutexGuard<'_, CacheState> {
        // Three flags are right between any two steps.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What the driver is to read.
    pub(crate) fn driver_sees(&self) -> bool {
        match self.backend.capabilities().write_cache_toggle {
            true => self.lock().driver,
            false => self.backend.write_cache(),
        }
    }

    /// The driver has chosen, or a new one gets the default.
    pub(crate) fn set_for_driver(&self, on: Option<bool>) {
        self.change(|state| state.driver = on.unwrap_or(state.default));
    }

    /// A driver begins that cannot flush, or can.
    pub(crate) fn negotiated(&self, can_flush: bool) {
        self.change(|state| state.driver = state.default && can_flush);
    }

    /// The owner has chosen. Returns what is in force.
    pub(crate) fn set_for_owner(&self, on: bool) -> bool {
        self.change(|state| (state.default, state.forced) = (on, !on));
        self.backend.write_cache()
    }

    fn change(&self, change: impl FnOnce(&mut CacheState)) {
        let mut state = self.lock();
        change(&mut state);
        let on = state.driver && !state.forced;
        if self.backend.capabilities().write_cache_toggle && self.backend.write_cache() != on {
            self.backend.set_write_cache(on);
        }
    }
}

/// A thread that has to check again whether its requests may go on.
pub(crate) trait Wake: Send + Sync {
    /// Makes the thread check.
    fn wake(&self);
}

/// A way that requests of many threads take to a disk, and that can be closed: who closes it waits until nobody is on it.
#[derive(Default)]
pub(crate) struct Gate {
    closed: AtomicBool,
    inside: AtomicUsize,
    /// Those who have to look again when it opens or closes.
    watchers: Mutex<Vec<Weak<dyn Wake>>>,
    empty: Condvar,
}

impl Gate {
    /// Lets a request in; `false`: it is closed. Every request that was let in has to [`leave`](Self::leave).
    pub(crate) fn enter(&self) -> bool {
        // Counted first: either this sees that the gate is closed, or who closes it sees this.
        self.inside.fetch_add(1, Ordering::SeqCst);
        let open = !self.is_closed();
        if !open {
            self.leave();
        }
        open
    }

    /// A request that was let in has ended.
    pub(crate) fn leave(&self) {
        if self.inside.fetch_sub(1, Ordering::SeqCst) == 1 && self.is_closed() {
            drop(self.lock());
            self.empty.notify_all();
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Tells `watcher` of every change.
    pub(crate) fn watch(&self, watcher: Weak<dyn Wake>) {
        let mut watchers = self.lock();
        watchers.retain(|watcher| watcher.strong_count() > 0);
        watchers.push(watcher);
    }

    /// Closes it, and returns when all are out.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.wake();
        let mut watchers = self.lock();
        while self.inside.load(Ordering::SeqCst) > 0 {
            watchers = self
                .empty
                .wait(watchers)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Opens it.
    pub(crate) fn open(&self) {
        self.closed.store(false, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        let watchers: Vec<_> = self.lock().iter().filter_map(Weak::upgrade).collect();
        watchers.iter().for_each(|watcher| watcher.wake());
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<dyn Wake>>> {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request inside of a gate; dropping it is the way out.
pub(crate) struct Pass<'a>(&'a Gate);

impl<'a> Pass<'a> {
    /// As [`Gate::enter`].
    pub(crate) fn take(gate: &'a Gate) -> Option<Self> {
        gate.enter().then_some(Self(gate))
    }

    /// Stays inside: somebody else calls [`Gate::leave`].
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Pass<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}
