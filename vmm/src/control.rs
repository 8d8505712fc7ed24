//! How a guest's run ends, and how it rests: whoever sees the end first says so here, and the thread that waits wakes up.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use vmm_sys_util::signal::SIGRTMIN;

use crate::arch::x86_64::crash::Crash;

/// Why the guest no longer runs.
#[derive(Clone, Debug)]
pub enum Ended {
    /// The guest powered off (ACPI S5).
    PowerOff,
    /// The guest asked for a reset: ACPI reset register, keyboard controller, or a triple fault once it ran.
    Reset,
    /// This signal came from outside.
    Signal(i32),
    /// The user asked for it: the console's quit keys, or the control socket.
    Quit,
    /// The guest's kernel panicked, and said so.
    Panicked,
    /// The guest cannot run on.
    Crashed(Box<Crash>),
}

/// The end of a run and its pauses, shared by everything that can cause them.
pub struct Control {
    event: EventFd,
    ended: OnceLock<Ended>,
    stopping: AtomicBool,
    /// Somebody wants the guest to power off.
    power_down: EventFd,
    paused: AtomicBool,
    vcpus: Mutex<Vcpus>,
    /// A vCPU has parked or left, or may go on.
    changed: Condvar,
}

/// The vCPU threads.
#[derive(Default)]
struct Vcpus {
    /// Those that run: in each case the thread lives as long as it stands here.
    threads: Vec<libc::pthread_t>,
    /// How many of them rest.
    parked: usize,
}

impl Control {
    /// A run that has not ended.
    ///
    /// # Errors
    /// If the system refuses a descriptor.
    pub fn new() -> std::io::Result<Self> {
        Ok(Self {
            event: EventFd::new(EFD_NONBLOCK)?,
            ended: OnceLock::new(),
            stopping: AtomicBool::new(false),
            power_down: EventFd::new(EFD_NONBLOCK)?,
            paused: AtomicBool::new(false),
            vcpus: Mutex::default(),
            changed: Condvar::new(),
        })
    }

    /// Ends the run. Only the first call counts.
    pub fn end(&self, ended: Ended) {
        if self.ended.set(ended).is_ok() {
            self.stopping.store(true, Ordering::SeqCst);
            // It fails only if the counter is full, and then the event is there already.
            let _ = self.event.write(1);
            // Under the lock: nobody is between looking and sleeping.
            drop(self.lock());
            self.changed.notify_all();
        }
    }

    /// Readable once the run has ended.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// Whether the vCPUs have to stop.
    pub fn stopping(&self) -> bool {
        self.stopping.load(Ordering::SeqCst)
    }

    /// Why the run ended, once it has.
    pub fn ended(&self) -> Option<&Ended> {
        self.ended.get()
    }

    /// Asks for an orderly end: the guest is to power off, and is stopped if it does not.
    pub fn ask_for_power_down(&self) {
        // As above.
        let _ = self.power_down.write(1);
    }

    /// Readable when [`ask_for_power_down`](Self::ask_for_power_down) was called.
    pub fn power_down(&self) -> &EventFd {
        &self.power_down
    }

    fn lock(&self) -> MutexGuard<'_, Vcpus> {
        // A list and a number are right between any two steps.
        self.vcpus.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes every vCPU out of the guest, and returns when all rest or the run ends.
    pub fn pause(&self) {
        let mut vcpus = self.lock();
        self.paused.store(true, Ordering::SeqCst);
        for &thread in &vcpus.threads {
            // SAFETY: the thread stands in the list, so it lives: it takes itself off under the lock that is held here.
            // It fails only for a signal that does not exist.
            let _ = unsafe { libc::pthread_kill(thread, kick_signal()) };
        }
        while vcpus.parked < vcpus.threads.len() && !self.stopping() {
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

    /// Whether the vCPUs are to rest.
    pub fn paused(&self) -> bool {
        self.paused.load(Ordering::SeqCst)
    }

    /// Rests until the pause or the run is over. Called by a vCPU's thread that has [entered](Self::enter).
    pub(super) fn park(&self) {
        let mut vcpus = self.lock();
        vcpus.parked += 1;
        self.changed.notify_all();
        while self.paused() && !self.stopping() {
            vcpus = wait(&self.changed, vcpus);
        }
        vcpus.parked -= 1;
    }

    /// The calling thread runs a vCPU until the guard is dropped.
    pub(super) fn enter(&self) -> Running<'_> {
        // SAFETY: always sound.
        let thread = unsafe { libc::pthread_self() };
        self.lock().threads.push(thread);
        Running(self, thread)
    }
}

fn wait<'a>(changed: &Condvar, guard: MutexGuard<'a, Vcpus>) -> MutexGuard<'a, Vcpus> {
    changed.wait(guard).unwrap_or_else(PoisonError::into_inner)
}

/// A thread that runs a vCPU. Stays on that thread.
pub(super) struct Running<'a>(&'a Control, libc::pthread_t);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.lock().threads.retain(|thread| *thread != self.1);
        self.0.changed.notify_all();
    }
}

/// The signal that interrupts KVM_RUN.
pub fn kick_signal() -> i32 {
    SIGRTMIN()
}
