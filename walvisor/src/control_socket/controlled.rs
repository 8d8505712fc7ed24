//! What a control socket controls: disks in use, and the VM or daemon that uses them.

use std::ops::Deref;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Instant;

use walvisor_devices::throttle::{self, Throttle};
use walvisor_vmm::control::RunControl;
use walvisor_vmm::disk::{DiskInUse, NetworkInUse};
use walvisor_vmm::vm::Vm;
use walvisor_vmm::vm::exits::ExitCounters;

use super::exports::Exports;
use super::looks::Looks;
use super::stats;
use crate::archiving::Pushes;
use crate::disk_spec::DiskCommand;
use crate::disks::RemovedDisk;

/// What can end the process on request.
pub enum Power {
    /// A VM.
    Guest {
        /// Ends and pauses its run.
        control: Arc<RunControl>,
        /// Its exits, by vCPU.
        exits: Vec<Arc<ExitCounters>>,
        /// Its network devices.
        networks: Vec<NetworkInUse>,
        /// The moment just before the first KVM_RUN.
        first_run: Arc<OnceLock<Instant>>,
    },
    /// A daemon.
    Daemon {
        /// Asks it to end.
        end: Box<dyn Fn() + Send + Sync>,
        /// Adds and removes disks; `None`: the disks are fixed.
        hotplug: Option<Box<dyn DiskHotplug>>,
    },
}

/// Adds and removes disks of a running daemon. Can be called from any thread; calls are carried out
/// one at a time.
pub trait DiskHotplug: Send + Sync {
    /// Opens the disk of a SPEC, with the defaults of the daemon's configuration file, and serves
    /// it.
    ///
    /// # Errors
    /// One line. Nothing has changed then.
    fn add(&self, spec: &str) -> Result<AddedDisk, String>;

    /// Answers a disk's outstanding requests, ends its connections, and closes it. The caller must
    /// have dropped its [`DiskInUse`] of it.
    ///
    /// # Errors
    /// If the disk cannot be closed.
    fn remove(&self, name: &str, keep_records: bool) -> Result<RemovedDisk, RemovalError>;

    /// The daemon's configuration file, if there is one, and the disks that it has to describe.
    /// `saved`: those that a client has written there.
    fn config(&self, saved: &[String]) -> Option<SavedPool>;
}

/// What a daemon's configuration file has to say for the next start to serve what is served now.
pub struct SavedPool {
    /// The file. An absolute path.
    pub file: PathBuf,
    /// The disks: all but those of the command line.
    pub disks: Vec<SavedDisk>,
    /// Logs of disks that are served, and images of disks that were removed from each and of which
    /// it keeps records.
    pub left: Vec<(PathBuf, PathBuf)>,
}

/// A disk that a daemon's configuration file has to describe.
pub struct SavedDisk {
    /// Its name.
    pub name: String,
    /// Its SPEC.
    pub spec: String,
    /// The directory of its log, with links resolved.
    pub log: Option<PathBuf>,
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
    /// The disk, if it is served again.
    pub disk: Option<DiskInUse>,
}

/// A disk that a request uses. [`take_off`](ControlledProcess::take_off) waits until it is dropped.
#[derive(Clone)]
pub(super) struct DiskLease {
    disk: DiskInUse,
    /// This disk is paused, whether or not all are. Changed with `changing` locked, read without
    /// it.
    pub(super) paused: Arc<AtomicBool>,
    /// Dropped after the disk, which tells the receiver when nobody has the disk any more.
    _held: Sender<()>,
}

impl Deref for DiskLease {
    type Target = DiskInUse;

    fn deref(&self) -> &DiskInUse {
        &self.disk
    }
}

/// An entry of the list of disks.
struct ListedDisk {
    listed: DiskLease,
    released: Receiver<()>,
}

impl From<DiskInUse> for ListedDisk {
    fn from(disk: DiskInUse) -> Self {
        let (_held, released) = channel();
        let listed = DiskLease {
            disk,
            paused: Arc::default(),
            _held,
        };
        Self { listed, released }
    }
}

/// The disks, and the VM or daemon, that requests read and change.
pub struct ControlledProcess {
    pub(super) kind: DiskCommand,
    pub(super) started: Instant,
    disks: Mutex<Vec<ListedDisk>>,
    pub(super) power: Power,
    pub(super) looks: Looks,
    pub(super) exports: Exports,
    pub(super) pushes: Arc<Pushes>,
    /// Locked by a client's thread while it changes anything, which may take long.
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
            disks: Mutex::new(disks.into_iter().map(ListedDisk::from).collect()),
            power,
            looks: Looks::default(),
            exports: Exports::default(),
            pushes: Arc::default(),
            changing: Mutex::default(),
            paused: AtomicBool::new(false),
            ending: AtomicBool::new(false),
        }
    }

    /// Adds what archives its logs.
    #[must_use]
    pub fn with_pushes(self, pushes: Arc<Pushes>) -> Self {
        Self { pushes, ..self }
    }

    /// A VM that is about to run.
    pub fn vm(vm: &Vm, started: Instant) -> Self {
        let power = Power::Guest {
            control: vm.control(),
            exits: vm.exits().to_vec(),
            networks: vm.networks().to_vec(),
            first_run: vm.first_run(),
        };
        let disks = vm.disks().to_vec();
        Self::new(DiskCommand::Run, started, disks, power)
    }

    /// Lifts all limits for good, because the process is ending: neither a limit, even one that a
    /// client sets now, nor a lack of space may delay that.
    pub(crate) fn lift_limits(&self) {
        self.ending.store(true, Ordering::SeqCst);
        self.disks().iter().for_each(|disk| self.apply_end(disk));
    }

    /// Whether the process is ending.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.load(Ordering::SeqCst)
    }

    /// The names of the disks, and their limits, which know whether requests are in flight.
    pub(crate) fn throttles(&self) -> Vec<(String, Arc<Throttle>)> {
        let disks = self.disks().into_iter();
        let disks = disks.map(|disk| (disk.name.clone(), Arc::clone(&disk.throttle)));
        disks.collect()
    }

    /// If the process is ending, lifts what may delay a disk's requests. Call it after each change
    /// of a limit: either this thread sees that the process is ending, or the thread that ends it
    /// sees the change.
    pub(super) fn apply_end(&self, disk: &DiskInUse) {
        if self.is_ending() {
            disk.throttle.set(throttle::Limits::default());
            disk.backend.end_pauses();
        }
    }

    /// The current disks, oldest first.
    pub(super) fn disks(&self) -> Vec<DiskLease> {
        let disks = self.entries();
        disks.iter().map(|entry| entry.listed.clone()).collect()
    }

    fn entries(&self) -> MutexGuard<'_, Vec<ListedDisk>> {
        // No panic leaves the list half changed.
        self.disks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a disk to the list.
    pub(super) fn list(&self, disk: DiskInUse) {
        self.entries().push(disk.into());
    }

    /// Takes the disk of this name off the list, and waits until no request of another client uses
    /// it. `false`: no disk has this name, or several have.
    pub(super) fn take_off(&self, name: &str) -> bool {
        let mut disks = self.entries();
        let named = |entry: &ListedDisk| entry.listed.name == name;
        let [place] = (0..disks.len())
            .filter(|place| named(&disks[*place]))
            .collect::<Vec<_>>()[..]
        else {
            return false;
        };
        let ListedDisk { listed, released } = disks.remove(place);
        drop((disks, listed));
        // Nobody sends anything: the wait ends when the last lease, and with it the sender, is
        // dropped.
        let _ = released.recv();
        true
    }

    /// All statistics as Prometheus text.
    pub(crate) fn metrics_text(&self) -> String {
        stats::prometheus(self)
    }

    /// The remaining disks, when nothing controls them any more.
    pub(crate) fn into_disks(self) -> Vec<DiskInUse> {
        let disks = self.disks.into_inner();
        let disks = disks.unwrap_or_else(PoisonError::into_inner).into_iter();
        disks.map(|entry| entry.listed.disk).collect()
    }

    pub(super) fn change(&self) -> MutexGuard<'_, ()> {
        // The mutex holds no data, so a poisoned lock is usable.
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the vCPUs and disks are paused: from the end of a pause to the beginning of the next
    /// resume.
    pub(super) fn is_paused(&self) -> bool {
        self.paused.load(Ordering::SeqCst)
    }
}
