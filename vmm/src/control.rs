//! Ends and pauses a guest's run. The first thread to end it records the reason here and wakes the
//! main thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::signal::SIGRTMIN;

use crate::arch::x86_64::crash::Crash;

/// Why the guest no longer runs.
#[derive(Clone, Debug)]
pub enum RunEnd {
    /// The guest powered off (ACPI S5).
    PowerOff,
    /// The guest asked for a reset: ACPI reset register, keyboard controller, or a triple fault of
    /// a guest that had used a device.
    Reset,
    /// This signal was sent to the process.
    Signal(i32),
    /// The user ended it: with the console's quit keys, or through the control socket.
    Quit,
    /// The guest reported that its kernel panicked.
    Panicked,
    /// A vCPU cannot go on.
    Crashed(Box<Crash>),
}

/// Ends and pauses a run. Shared by all that can do so.
pub struct RunControl {
    event: EventFd,
    ended: OnceLock<RunEnd>,
    stopping: AtomicBool,
    /// Somebody outside the guest wants it to end, whether or not the guest was quicker.
    end_wanted: AtomicBool,
    /// Signalled when the guest is asked to power off.
    power_down: EventFd,
    paused: AtomicBool,
    vcpus: Mutex<Vcpus>,
    /// Signalled when a vCPU has parked or left, or may go on.
    changed: Condvar,
}

/// The vCPU threads.
#[derive(Default)]
struct Vcpus {
    /// The threads that run a vCPU. A thread lives at least as long as it is in this list.
    threads: Vec<libc::pthread_t>,
    /// The number of parked threads.
    parked: usize,
}

impl RunControl {
    /// A run that has not ended.
    ///
    /// # Errors
    /// If the system refuses a descriptor.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            event: EventFd::new(EFD_NONBLOCK)?,
            ended: OnceLock::new(),
            stopping: AtomicBool::new(false),
            end_wanted: AtomicBool::new(false),
            power_down: EventFd::new(EFD_NONBLOCK)?,
            paused: AtomicBool::new(false),
            vcpus: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Ends the run. Only the first call has an effect.
    pub fn end(&self, ended: RunEnd) {
        if matches!(ended, RunEnd::Signal(_) | RunEnd::Quit) {
            self.want_end();
        }
        if self.ended.set(ended).is_ok() {
            self.stopping.store(true, Ordering::SeqCst);
            // The write fails only if the counter is full, and then the event is readable already.
            let _ = self.event.write(1);
            // With the lock taken once, no thread is between its check and its sleep.
            drop(self.lock());
            self.changed.notify_all();
        }
    }

    /// Notes that a signal or a user has asked for the end.
    pub(super) fn want_end(&self) {
        self.end_wanted.store(true, Ordering::SeqCst);
    }

    /// Whether a signal or a user has asked for the end. If the guest resets at that moment, it
    /// should not boot again.
    pub fn is_end_wanted(&self) -> bool {
        self.end_wanted.load(Ordering::SeqCst)
    }

    /// Readable once the run has ended.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// Whether the run has ended, so that the vCPUs have to stop.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Why the run ended; `None` while it goes on.
    pub fn end_reason(&self) -> Option<&RunEnd> {
        self.ended.get()
    }

    /// Asks the guest to power off. If it does not, the run is ended.
    pub fn ask_for_power_down(&self) {
        self.want_end();
        // The write fails only if the counter is full, and then the event is readable already.
        let _ = self.power_down.write(1);
    }

    /// Readable after a call of [`ask_for_power_down`](Self::ask_for_power_down).
    pub fn power_down(&self) -> &EventFd {
        &self.power_down
    }

    fn lock(&self) -> MutexGuard<'_, Vcpus> {
        // A panic leaves the list and the count valid, so a poisoned lock is usable.
        self.vcpus.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all vCPUs out of the guest. Returns once they are parked or the run has ended.
    pub fn pause(&self) {
        let mut vcpus = self.lock();
        self.paused.store(true, Ordering::SeqCst);
        for &thread in &vcpus.threads {
            // SAFETY: the thread is in the list, so it lives: it removes itself only under the
            // lock, which is held here. The call fails only for a signal that does not exist.
            let _ = unsafe { libc::pthread_kill(thread, kick_signal()) };
        }
        while vcpus.parked < vcpus.threads.len() && !self.is_stopping() {
            vcpus = wait(&self.changed, vcpus);
        }
    }

    /// Lets the vCPUs go on.
    pub fn resume(&self) {
        let vcpus = self.lock();
        self.paused.store(false, Ordering::SeqCst);
        drop(vcpus);
        self.changed.notify_all();
    }

    /// Whether the vCPUs have to park.
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::SeqCst)
    }

    /// Waits until the pause or the run is over. For a vCPU's thread that has
    /// [registered](Self::enter).
    pub(super) fn park(&self) {
        let mut vcpus = self.lock();
        vcpus.parked += 1;
        self.changed.notify_all();
        while self.is_paused() && !self.is_stopping() {
            vcpus = wait(&self.changed, vcpus);
        }
        vcpus.parked -= 1;
    }

    /// Registers the calling thread as a vCPU thread until the guard is dropped.
    pub(super) fn enter(&self) -> VcpuRegistration<'_> {
        // SAFETY: `pthread_self` is always sound.
        let thread = unsafe { libc::pthread_self() };
        self.lock().threads.push(thread);
        VcpuRegistration(self, thread)
    }
}

fn wait<'a>(changed: &Condvar, guard: MutexGuard<'a, Vcpus>) -> MutexGuard<'a, Vcpus> {
    changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// Keeps a thread registered as one that runs a vCPU. It must stay on that thread.
pub(super) struct VcpuRegistration<'a>(&'a RunControl, libc::pthread_t);

impl Drop for VcpuRegistration<'_> {
    fn drop(&mut self) {
        self.0.lock().threads.retain(|thread| *thread != self.1);
        self.0.changed.notify_all();
    }
}

/// The signal that interrupts KVM_RUN.
pub fn kick_signal() -> i32 {
    SIGRTMIN()
}
