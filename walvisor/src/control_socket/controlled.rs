//! The objects that a control socket controls: disks in use, and the vCPUs of a VM.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use walvisor_devices::throttle;
use walvisor_vmm::control::RunControl;
use walvisor_vmm::disk::DiskInUse;
use walvisor_vmm::vm::Vm;
use walvisor_vmm::vm::exits::ExitCounters;

use super::looks::Looks;
use crate::disk_spec::{DiskCommand, DiskSpec};
use crate::disks::RemovedDisk;

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
    /// A daemon.
    Daemon {
        /// Asks it to end.
        end: Box<dyn Fn() + Send + Sync>,
        /// What lets its disks come and go; `None`: they are fixed.
        hotplug: Option<Box<dyn DiskHotplug>>,
    },
}

/// Lets the disks of a daemon come and go. May be called from any thread; of several calls one takes its turn.
pub trait DiskHotplug: Send + Sync {
    /// Opens a disk, and serves it.
    ///
    /// # Errors
    /// One line. Nothing has changed then.
    fn add(&self, spec: &DiskSpec) -> Result<AddedDisk, String>;

    /// Ends the connections of a disk once what was taken has been answered, and closes the disk. The caller has no
    /// [`DiskInUse`] of it any more.
    ///
    /// # Errors
    /// If the disk cannot be closed.
    fn remove(&self, name: &str) -> Result<RemovedDisk, RemovalError>;
}

/// A disk that was added.
pub struct AddedDisk {
    /// The disk.
    pub disk: DiskInUse,
    /// Where clients find it.
    pub place: String,
}

/// Why a disk was not removed.
pub struct RemovalError {
    /// One line.
    pub reason: String,
    /// The disk, which is served again; `None`: nothing serves it.
    pub disk: Option<DiskInUse>,
}

/// A disk that requests can reach.
#[derive(Clone)]
pub(super) struct DiskLease {
    disk: DiskInUse,
    /// Dropped after the disk: the receiver finds out when nobody has the disk any more.
    _held: Sender<()>,
}

impl Deref for DiskLease {
    type Target = DiskInUse;

    fn deref(&self) -> &DiskInUse {
        &self.disk
    }
}

/// An entry of the list of disks.
struct Entry {
    listed: DiskLease,
    released: Receiver<()>,
}

impl From<DiskInUse> for Entry {
    fn from(disk: DiskInUse) -> Self {
        let (_held, released) = channel();
        let listed = DiskLease { disk, _held };
        Self { listed, released }
    }
}

/// The disks and the VM or daemon that requests change. See the module's documentation.
pub struct ControlledProcess {
    pub(super) kind: DiskCommand,
    pub(super) started: Instant,
    disks: Mutex<Vec<Entry>>,
    pub(super) power: Power,
    pub(super) looks: Looks,
    /// Held by a client's thread while it changes anything, which may take long.
    pub(super) changing: Mutex<()>,
    /// The vCPUs and disks are paused. Changed with `changing` locked, read without it.
    pub(super) paused: AtomicBool,
    /// The process is ending.
    pub(super) ending: AtomicBool,
}

impl ControlledProcess {
    /// `started` is when the process began.
    pub fn new(kind: DiskCommand, started: Instant, disks: Vec<DiskInUse>, power: Power) -> Self {
        Self {
            kind,
            started,
            disks: Mutex::new(disks.into_iter().map(Entry::from).collect()),
            power,
            looks: Looks::default(),
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
    /// that a client sets now, and no want of space.
    pub(crate) fn lift_limits(&self) {
        self.ending.store(true, Ordering::SeqCst);
        self.disks().iter().for_each(|disk| self.apply_end(disk));
    }

    /// Lifts what may hold up the end of a disk's requests, if the process is ending. To be called after each change of a
    /// limit: either this thread sees the end, or the thread that ends the process sees the change.
    pub(super) fn apply_end(&self, disk: &DiskInUse) {
        if self.ending.load(Ordering::SeqCst) {
            disk.throttle.set(throttle::Limits::default());
            disk.backend.end_pauses();
        }
    }

    /// The disks now, in the order in which they came.
    pub(super) fn disks(&self) -> Vec<DiskLease> {
        let disks = self.entries();
        disks.iter().map(|entry| entry.listed.clone()).collect()
    }

    fn entries(&self) -> MutexGuard<'_, Vec<Entry>> {
        // No panic leaves the list half changed.
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a disk to the list.
    pub(super) fn list(&self, disk: DiskInUse) {
        self.entries().push(disk.into());
    }

    /// Takes the disk of this name off the list, and returns when no other client's request uses it any more. `false`: there
    /// is none, or there are several.
    pub(super) fn take_off(&self, name: &str) -> bool {
        let mut disks = self.entries();
        let named = |entry: &Entry| entry.listed.name == name;
        let [place] = (0..disks.len())
            .filter(|place| named(&disks[*place]))
            .collect::<Vec<_>>()[..]
        else {
            return false;
        };
        let Entry { listed, released } = disks.remove(place);
        drop((disks, listed));
        // Nobody sends anything: the wait ends when the last sender is gone, and so the disk.
        let _ = released.recv();
        true
    }

    /// The disks at the end, once nothing controls them any more.
    pub(crate) fn into_disks(self) -> Vec<DiskInUse> {
        let disks = self.disks.into_inner();
        let disks = disks.unwrap_or_else(PoisonError::into_inner).into_iter();
        disks.map(|entry| entry.listed.disk).collect()
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
