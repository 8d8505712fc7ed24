//! This process's disks in the kernel's target, and the changes that an administrator makes to them
//! in configfs.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use walvisor_devices::backend::{Backend, SECTOR_SIZE};
use walvisor_devices::control::DeviceControl;
use walvisor_devices::event_loop::EventSet;
use walvisor_devices::listen::{Stop, Waiter, WakeReason};
use walvisor_devices::tcmu::Device;
use walvisor_vmm::disk::{DiskInUse, OpenDisk};

use crate::disk::grow;
use crate::disk_spec::{BackendKind, DiskCache, DiskCommand, DiskSpec};
use crate::lio::{
    Backstore, BackstoreSpec, Events, LioDisk, TargetChange, TargetError, TargetExport,
};

/// The disks that are served. Clones share them.
#[derive(Clone, Default)]
pub(super) struct TargetDisks(Arc<Mutex<Vec<TargetDisk>>>);

/// A disk of the kernel's target that this process serves.
pub(super) struct TargetDisk {
    lio: LioDisk,
    /// Its durable writes outlive the process, so its back store may stay for the next one.
    kept: bool,
    in_use: DiskInUse,
    /// Carries out the administrator's changes.
    device: Arc<dyn DeviceControl>,
}

impl TargetDisks {
    fn lock(&self) -> MutexGuard<'_, Vec<TargetDisk>> {
        // No panic leaves the list half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a disk that is in the target already. Returns its handle, and where initiators find
    /// it.
    pub(super) fn serve(
        &self,
        spec: &DiskSpec,
        backstore: &BackstoreSpec,
        disk: &OpenDisk,
        mut lio: LioDisk,
    ) -> Result<(DiskInUse, String), String> {
        let backend = Arc::clone(&disk.backend);
        let mut device = Device::new(
            backend,
            &backstore.name,
            &backstore.serial,
            backstore.block_size,
        )
        .map_err(|error| format!("disk '{}': {error}", disk.name))?;
        let store = lio.store().clone();
        let kept = outlives_process(spec);
        device.on_write_cache(Box::new(move |on| {
            if let Err(error) = store.set_durable(kept && !on) {
                tracing::warn!("{error}");
            }
        }));
        device.throttle().set(disk.limits);
        let bytes = disk.backend.sectors() * SECTOR_SIZE;
        lio.serve(&device, bytes)
            .map_err(|error| error.to_string())?;
        let in_use = DiskInUse {
            name: backstore.name.clone(),
            transport: DiskCommand::Tcmu.name(),
            backend: Arc::clone(&disk.backend),
            metrics: device.metrics(),
            throttle: device.throttle(),
            device: Arc::new(ResizeReporter {
                store: lio.store().clone(),
                backend: Arc::clone(&disk.backend),
                device: device.control(),
            }),
        };
        let place = place(&lio);
        self.lock().push(TargetDisk {
            lio,
            kept,
            in_use: in_use.clone(),
            device: device.control(),
        });
        Ok((in_use, place))
    }

    /// The export of a disk that is somebody else's.
    pub(super) fn other_export(&self, name: &str) -> Option<TargetExport> {
        let disks = self.lock();
        let found = disks.iter().find(|disk| disk.in_use.name == name)?;
        found.lio.other_export()
    }

    /// Stops serving a disk. `false`: no disk has this name.
    ///
    /// # Errors
    /// An export of the disk that this process did not make. The disk is then served as before.
    pub(super) fn remove(&self, name: &str) -> Result<bool, (TargetExport, DiskInUse)> {
        let mut disks = self.lock();
        let Some(place) = disks.iter().position(|disk| disk.in_use.name == name) else {
            return Ok(false);
        };
        if let Some(other) = disks[place].lio.other_export() {
            return Err((other, disks[place].in_use.clone()));
        }
        let disk = disks.remove(place);
        drop(disks);
        if let Err(error) = disk.dismantle() {
            tracing::error!(
                "disk '{name}' is no longer served, but parts of it stay in the target: {error}; \
                 'walvisor serve tcmu --remove {name}' removes them"
            );
        }
        Ok(true)
    }

    /// Takes down all disks. Returns the back stores that stay: the next process may take them over
    /// once the logs are closed.
    ///
    /// # Errors
    /// The first step that the kernel refused. The other disks are taken down all the same.
    pub(super) fn dismantle(&self) -> Result<Vec<Backstore>, TargetError> {
        let disks = std::mem::take(&mut *self.lock());
        let down = disks.into_iter().map(TargetDisk::dismantle);
        let down: Vec<_> = down.collect();
        let stay: Result<Vec<_>, _> = down.into_iter().collect();
        Ok(stay?.into_iter().flatten().collect())
    }

    /// Carries out the administrator's changes in configfs until `stop` is signalled.
    pub(super) fn listen(&self, events: &Events, stop: &Stop) {
        let listening = || {
            let mut waiter = Waiter::new(events, stop)?;
            while waiter.wait(events, EventSet::IN, None)? == WakeReason::Ready {
                let (device, change) = match events.next() {
                    Ok(Some(event)) => event,
                    Ok(None) => continue,
                    Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                    Err(error) => return Err(error),
                };
                let disks = self.lock();
                if let Some(disk) = disks.iter().find(|disk| disk.is(&device)) {
                    disk.change(change);
                }
            }
            Ok(())
        };
        if let Err(error) = listening() {
            tracing::warn!("changes in configfs are no longer noticed: {error}");
        }
    }
}

impl TargetDisk {
    /// Whether `device` is the name of its UIO device.
    fn is(&self, device: &str) -> bool {
        let Backstore { hba, name, .. } = self.lio.store();
        device.starts_with(&format!("tcm-user/{hba}/{name}/"))
    }

    fn change(&self, change: TargetChange) {
        let DiskInUse { name, backend, .. } = &self.in_use;
        match change {
            TargetChange::Size(bytes) if bytes == backend.sectors() * SECTOR_SIZE => {}
            TargetChange::Size(bytes) => match grow(&**backend, bytes) {
                Ok(()) => self.device.capacity_changed(),
                Err(error) => tracing::warn!(
                    "disk '{name}' keeps its size, although dev_size in configfs is {bytes} now: \
                     {error}"
                ),
            },
            TargetChange::WriteCache(on) => {
                if self.device.set_write_cache(on) != on {
                    tracing::warn!(
                        "disk '{name}' keeps its cache mode, although configfs says otherwise now: \
                         initiators that saw the old mode would not flush; one of them can ask for \
                         writeback (MODE SELECT)"
                    );
                }
            }
            TargetChange::Config(config) => tracing::warn!(
                "disk '{name}' is still served from the image that it was started with, although \
                 its dev_config was set to '{config}'"
            ),
        }
    }

    /// Takes the disk down. Returns its back store if that stays in the target for the next
    /// process.
    fn dismantle(self) -> Result<Option<Backstore>, TargetError> {
        // The kernel waits for the answers to its last commands, and a pause would hold those up.
        self.in_use.device.resume();
        let stays = self.lio.dismantle()?;
        Ok(stays.filter(|_| self.kept))
    }
}

/// Whether the durable writes of a disk outlive the process.
fn outlives_process(spec: &DiskSpec) -> bool {
    spec.backend != BackendKind::Ram && spec.cache != DiskCache::Unsafe
}

/// Where initiators find a disk, to print.
fn place(lio: &LioDisk) -> String {
    match lio.exports().first() {
        Some(export) => match export.disk() {
            Some(disk) => format!("{disk} ({})", export.place()),
            None => export.place(),
        },
        None => lio.store().directory().display().to_string(),
    }
}

/// A disk's device that also tells the kernel when its size changes.
struct ResizeReporter {
    store: Backstore,
    backend: Arc<dyn Backend>,
    device: Arc<dyn DeviceControl>,
}

impl DeviceControl for ResizeReporter {
    fn capacity_changed(&self) {
        self.device.capacity_changed();
        let bytes = self.backend.sectors() * SECTOR_SIZE;
        if let Err(error) = self.store.set_size(bytes) {
            tracing::warn!("{error}");
        }
    }

    fn set_write_cache(&self, on: bool) -> bool {
        self.device.set_write_cache(on)
    }

    fn pause(&self) -> io::Result<()> {
        self.device.pause()
    }

    fn resume(&self) {
        self.device.resume();
    }
}
