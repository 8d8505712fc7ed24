//! How the owner of a device controls it while its driver or its clients use it.
//!
//! ```
//! use std::sync::{Arc, Mutex};
//! use walvisor_devices::backend::{Backend, ram::RamDisk};
//! use walvisor_devices::block::{BlockConfig, VirtioBlock};
//! use walvisor_devices::control::DeviceControl;
//! use walvisor_devices::transport::MmioTransport;
//! use walvisor_devices::vm_memory::{GuestAddress, GuestMemoryMmap};
//! use walvisor_devices::vmm_sys_util::eventfd::EventFd;
//!
//! let disk = RamDisk::new(2048);
//! let device = VirtioBlock::new(Arc::new(disk.clone()), BlockConfig::default())?;
//! let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 1 << 20)])?;
//! let transport = MmioTransport::new(device, Arc::new(memory), EventFd::new(0)?);
//! // The vCPUs share the transport under this lock, and the owner controls the device through it.
//! let transport = Arc::new(Mutex::new(transport));
//! let control: Box<dyn DeviceControl> = Box::new(Arc::downgrade(&transport));
//! assert!(!control.set_write_cache(false));
//! assert!(!disk.write_cache());
//! control.pause()?;
//! control.resume();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use crate::backend::Backend;

/// A device in use, as its owner sees it. Any thread may call it.
pub trait DeviceControl: Send + Sync {
    /// Takes over the backend's capacity, which may have changed, and notifies the driver or the
    /// clients if the transport can.
    fn capacity_changed(&self);

    /// Why the device can't take over another capacity, and what to do instead; `None`: it can. Its
    /// owner asks before it grows the disk.
    fn resize_obstacle(&self) -> Option<&'static str> {
        None
    }

    /// Asks for writeback (`true`) or writethrough. Returns the mode that is in force now.
    ///
    /// Writethrough takes effect at once. Writeback takes effect at once only if every user of the
    /// device knows that completed writes may be lost: a driver that believes otherwise never
    /// flushes. For such a driver the device keeps its mode until the driver itself asks for
    /// writeback, or is reset.
    fn set_write_cache(&self, on: bool) -> bool;

    /// Stops taking requests, and returns when all requests taken are answered.
    ///
    /// # Errors
    /// If the disk does not answer them in the time for which the device waits, which is 10 seconds
    /// if a thread other than the driver's serves it. The device then keeps running.
    fn pause(&self) -> io::Result<()>;

    /// Takes requests again, starting with those that arrived during the pause.
    fn resume(&self);
}

/// [`DeviceControl`] for a transport that the vCPUs share under a lock.
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

/// The calls do nothing once the transport is gone.
impl<T: ControlTransport> DeviceControl for Weak<Mutex<T>> {
    fn capacity_changed(&self) {
        with_transport(self, T::capacity_changed);
    }

    fn set_write_cache(&self, on: bool) -> bool {
        with_transport(self, |transport| transport.set_write_cache(on)).unwrap_or(on)
    }

    fn pause(&self) -> io::Result<()> {
        with_transport(self, T::pause);
        Ok(())
    }

    fn resume(&self) {
        with_transport(self, T::resume);
    }
}

fn with_transport<T, R>(transport: &Weak<Mutex<T>>, f: impl FnOnce(&mut T) -> R) -> Option<R> {
    let transport = transport.upgrade()?;
    // A vCPU that panicked inside the transport has ended the run already.
    let mut transport = transport.lock().unwrap_or_else(PoisonError::into_inner);
    Some(f(&mut transport))
}

/// The cache mode of a device. Both its owner and its driver have a say.
///
/// In `writeback` the driver reads its own choice, or the owner's mode at the time of that choice.
/// The owner can make writes stable that the driver believes volatile, never the reverse.
pub(crate) struct CacheSwitch {
    backend: Arc<dyn Backend>,
    state: Mutex<CacheState>,
}

#[derive(Clone, Copy)]
struct CacheState {
    /// The mode for a driver that cannot choose, and for one that starts.
    default: bool,
    /// The mode that the driver sees.
    driver: bool,
    /// Whether the owner insists on writethrough.
    forced: bool,
}

impl CacheSwitch {
    /// Starts with the backend's mode as the owner's choice.
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
        // A panic leaves no partial change in the flags.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The value of `writeback` that the driver reads.
    pub(crate) fn driver_mode(&self) -> bool {
        if self.backend.capabilities().write_cache_toggle {
            self.lock().driver
        } else {
            self.backend.write_cache()
        }
    }

    /// Sets the driver's choice, or the default for a new driver.
    pub(crate) fn set_for_driver(&self, on: Option<bool>) {
        self.change(|state| state.driver = on.unwrap_or(state.default));
    }

    /// Sets the mode for a driver that has negotiated its features. `can_flush`: it can send FLUSH.
    pub(crate) fn set_negotiated(&self, can_flush: bool) {
        self.change(|state| state.driver = state.default && can_flush);
    }

    /// Sets the owner's choice. Returns the mode in force.
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

/// A thread that wants to know when a gate opens or closes.
pub(crate) trait GateWatcher: Send + Sync {
    /// Wakes the thread, so that it checks the gate again.
    fn wake(&self);
}

/// How long requests in flight may delay a pause.
pub(crate) const PAUSE_TIME: Duration = Duration::from_secs(10);

/// The error of a pause that they delay for longer.
pub(crate) fn silent_disk() -> io::Error {
    let reason = "the disk does not answer its requests in flight";
    io::Error::new(io::ErrorKind::TimedOut, reason)
}

/// A gate that the requests of any number of threads pass on their way to a disk. Closing it waits
/// until no request is inside.
#[derive(Default)]
pub(crate) struct Gate {
    closed: AtomicBool,
    inside: AtomicUsize,
    /// Threads to wake when the gate opens or closes.
    watchers: Mutex<Vec<Weak<dyn GateWatcher>>>,
    empty: Condvar,
}

impl Gate {
    /// Lets a request in; `false`: the gate is closed. Every request that was let in must
    /// [`leave`](Self::leave).
    pub(crate) fn enter(&self) -> bool {
        // Count first: then either this call sees the closed gate, or `close` sees the count.
        self.inside.fetch_add(1, Ordering::SeqCst);
        let open = !self.is_closed();
        if !open {
            self.leave();
        }
        open
    }

    /// Lets a request out.
    pub(crate) fn leave(&self) {
        if self.inside.fetch_sub(1, Ordering::SeqCst) == 1 && self.is_closed() {
            drop(self.lock());
            self.empty.notify_all();
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// Wakes `watcher` whenever the gate opens or closes.
    pub(crate) fn watch(&self, watcher: Weak<dyn GateWatcher>) {
        let mut watchers = self.lock();
        watchers.retain(|watcher| watcher.strong_count() > 0);
        watchers.push(watcher);
    }

    /// Closes the gate, and returns when no request is inside.
    pub(crate) fn close(&self) {
        self.refuse();
        let wait = self.empty.wait_while(self.lock(), |_| self.is_occupied());
        drop(wait.unwrap_or_else(PoisonError::into_inner));
    }

    /// [Closes](Self::close) the gate for a pause.
    ///
    /// # Errors
    /// If a request is still inside after [`PAUSE_TIME`]. The gate is open then.
    pub(crate) fn pause(&self) -> io::Result<()> {
        self.close_within(PAUSE_TIME)
    }

    fn close_within(&self, time: Duration) -> io::Result<()> {
        self.refuse();
        let occupied = |_: &mut _| self.is_occupied();
        let wait = self.empty.wait_timeout_while(self.lock(), time, occupied);
        let (guard, timeout) = wait.unwrap_or_else(PoisonError::into_inner);
        drop(guard);
        if timeout.timed_out() {
            self.open();
            return Err(silent_disk());
        }
        Ok(())
    }

    /// Lets no more requests in.
    fn refuse(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.wake_watchers();
    }

    fn is_occupied(&self) -> bool {
        self.inside.load(Ordering::SeqCst) > 0
    }

    /// Opens the gate.
    pub(crate) fn open(&self) {
        self.closed.store(false, Ordering::SeqCst);
        self.wake_watchers();
    }

    fn wake_watchers(&self) {
        let watchers: Vec<_> = self.lock().iter().filter_map(Weak::upgrade).collect();
        watchers.iter().for_each(|watcher| watcher.wake());
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Weak<dyn GateWatcher>>> {
        self.watchers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request inside a gate; dropping it leaves the gate.
pub(crate) struct GateGuard<'a>(&'a Gate);

impl<'a> GateGuard<'a> {
    /// As [`Gate::enter`].
    pub(crate) fn enter(gate: &'a Gate) -> Option<Self> {
        gate.enter().then_some(Self(gate))
    }

    /// Keeps the request inside. At its end [`Gate::leave`] has to be called.
    pub(crate) fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for GateGuard<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gate_that_cannot_be_closed_in_time_is_open() {
        let gate = Gate::default();
        assert!(gate.enter());
        assert!(gate.close_within(Duration::ZERO).is_err());
        assert!(gate.enter());
        gate.leave();
        gate.leave();
        gate.close_within(Duration::ZERO).unwrap();
        assert!(!gate.enter());
        gate.open();
        assert!(gate.enter());
    }
}
