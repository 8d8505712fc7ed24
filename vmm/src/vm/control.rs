//! How a guest's run ends: whoever sees the end first says so here, and the thread that waits wakes up.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

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
    /// The user typed the console's quit keys.
    Quit,
    /// The guest cannot run on.
    Crashed(Box<Crash>),
}

/// The end of a run, shared by everything that can cause it.
pub struct Control {
    event: EventFd,
    ended: OnceLock<Ended>,
    stopping: AtomicBool,
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
        })
    }

    /// Ends the run. Only the first call counts.
    pub fn end(&self, ended: Ended) {
        if self.ended.set(ended).is_ok() {
            self.stopping.store(true, Ordering::SeqCst);
            // It fails only if the counter is full, and then the event is there already.
            let _ = self.event.write(1);
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
}
