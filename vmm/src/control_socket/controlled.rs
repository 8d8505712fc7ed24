//! The objects that a control socket controls: disks in use, and the vCPUs of a VM.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use walvisor_devices::throttle;

use crate::control::RunControl;
use crate::disk::DiskInUse;
use crate::disk_spec::DiskCommand;
use crate::vm::Vm;
use crate::vm::exits::ExitCounters;

/// The part of the process that ends it on request.
pub enum Power {
    /// A VM.
    Guest {
        /// The end and the pauses of its run.
        control: Arc<RunControl>,
        /// Its exits, by vCPU.
        exits: Vec<Arc<ExitCounters>>,
        /// The moment just before the first KVM_RUN.
        first_run: Arc<OnceLock<Instant>>,
    },
    /// A daemon; the function asks it to end.
    Daemon(Box<dyn Fn() + Send + Sync>),
}

/// The disks and the VM or daemon that requests change. See the module's documentation.
pub struct Controlled {
    pub(super) kind: DiskCommand,
    pub(super) started: Instant,
    pub(super) disks: Vec<DiskInUse>,
    pub(super) power: Power,
    /// Held by a client's thread while it changes anything, which may take long.
    pub(super) changing: Mutex<()>,
    /// The vCPUs and disks are paused. Changed with `changing` locked, read without it.
    pub(super) paused: AtomicBool,
    /// The process is ending.
    pub(super) ending: AtomicBool,
}

impl Controlled {
    /// `started` is when the process began.
    pub fn new(kind: DiskCommand, started: Instant, disks: Vec<DiskInUse>, power: Power) -> Self {
        Self {
            kind,
            started,
            disks,
            power,
            changing: Mutex::default(),
            paused: AtomicBool::new(false),
            ending: AtomicBool::new(false),
        }
    }

    /// A VM that is about to run.
    pub fn vm(vm: &Vm, started: Instant) -> Self {
        let power = Power::Guest {
            control: vm.control(),
            exits: vm.exits().to_vec(),
            first_run: vm.first_run(),
        };
        let disks = vm.disks().to_vec();
        Self::new(DiskCommand::Run, started, disks, power)
    }

    /// Lifts all limits for good, because the process is ending: no limit may hold up the end, not even one
    /// that a client sets now.
    pub(crate) fn lift_limits(&self) {
        self.ending.store(true, Ordering::SeqCst);
        for disk in &self.disks {
            disk.throttle.set(throttle::Limits::default());
        }
    }

    pub(super) fn change(&self) -> MutexGuard<'_, ()> {
        // The mutex holds no data, so a poisoned lock is usable.
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the vCPUs and disks are paused: from the end of a pause to the beginning of the next resume.
    pub(super) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::SeqCst)
    }
}
