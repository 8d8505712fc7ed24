//! The disks that the kernel's target has from this process, and what changes them from outside.

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
use crate::lio::{Backstore, Change, Events, LioDisk, TargetError, TargetExport, Wanted};

/// The disks that are served. Copies share them.
#[derive(Clone, Default)]
pub(super) struct TargetDisks(Arc<Mutex<Vec<TargetDisk>>>);

/// A disk of the kernel's target that this process serves.
pub(super) struct TargetDisk {
    lio: LioDisk,
    /// Its durable writes outlive the process.
    kept: bool,
    in_use: DiskInUse,
    /// Carries out what an administrator changes in configfs.
    device: Arc<dyn DeviceControl>,
}

impl TargetDisks {
    fn lock(&self) -> MutexGuard<'_, Vec<TargetDisk>> {
        // No panic leaves the list half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves a disk, which is in the target already. Returns its handle, and where initiators find it.
    pub(super) fn serve(
        &self,
        spec: &DiskSpec,
        wanted: &Wanted,
        disk: &OpenDisk,
        mut lio: LioDisk,
    ) -> Result<(DiskInUse, String), String> {
        let backend = Arc::clone(&disk.backend);
        let mut device = Device::new(backend, &wanted.name, &wanted.serial, wanted.block_size)
            .map_err(|error| format!("disk '{}': {error}", disk.name))?;
        let store = lio.store().clone();
        let kept = outlives(spec);
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
            name: wanted.name.clone(),
            transport: DiskCommand::Tcmu.name(),
            backend: Arc::clone(&disk.backend),
            metrics: device.metrics(),
            throttle: device.throttle(),
            device: Arc::new(Sized {
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

    /// Stops serving a disk. `false`: there is none of this name.
    ///
    /// # Errors
    /// An export that others have made: the disk is served as before.
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
                "disk '{name}' is not served any more, but something of it stays in the target: {error}; 'walvisor serve \
                 tcmu --remove {name}' removes it"
            );
        }
        Ok(true)
    }

    /// Takes down all disks. Returns the back stores that stay for the next process, and may be taken over by it once the
    /// logs are closed.
    ///
    /// # Errors
    /// The first step that the kernel refused; the other disks are taken down all the same.
    pub(super) fn dismantle(&self) -> Result<Vec<Backstore>, TargetError> {
        let disks = std::mem::take(&mut *self.lock());
        let down = disks.into_iter().map(TargetDisk::dismantle);
        let down: Vec<_> = down.collect();
        let stay: Result<Vec<_>, _> = down.into_iter().collect();
        Ok(stay?.into_iter().flatten().collect())
    }

    /// Carries out the changes that an administrator makes in configfs, until `stop` is signalled.
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

    fn change(&self, change: Change) {
        let DiskInUse { name, backend, .. } = &self.in_use;
        match change {
            Change::Size(bytes) if bytes == backend.sectors() * SECTOR_SIZE => {}
            Change::Size(bytes) => match grow(&**backend, bytes) {
                Ok(()) => self.device.capacity_changed(),
                Err(error) => tracing::warn!(
                    "disk '{name}' stays as it is, whatever configfs says now: a dev_size of {bytes}: {error}"
                ),
            },
            Change::WriteCache(on) => {
                if self.device.set_write_cache(on) != on {
                    tracing::warn!(
                        "disk '{name}' keeps its cache mode, whatever configfs says now: initiators that know it as it is \
                         would not flush; one of them can ask for writeback (MODE SELECT)"
                    );
                }
            }
            Change::Config(config) => tracing::warn!(
                "disk '{name}' stays what it is: its dev_config was set to '{config}', and it is served from the image \
                 that it was started with"
            ),
        }
    }

    /// Takes the disk down. Returns its back store, if that stays in the target and the next process may take it over.
    fn dismantle(self) -> Result<Option<Backstore>, TargetError> {
        // The kernel waits for the answers to its last commands, which a pause would hold up.
        self.in_use.device.resume();
        let stays = self.lio.dismantle()?;
        Ok(stays.filter(|_| self.kept))
    }
}

/// Whether the durable writes of a disk outlive the process.
fn outlives(spec: &DiskSpec) -> bool {
    spec.backend != BackendKind::Ram && spec.cache != DiskCache::Unsafe
}

/// The address where initiators find a disk, for people.
fn place(lio: &LioDisk) -> String {
    match lio.exports().first() {
        Some(export) => match export.disk() {
            Some(disk) => format!("{disk} ({})", export.place()),
            None => export.place(),
        },
        None => lio.store().directory().display().to_string(),
    }
}

/// A disk's device that also reports size changes to the kernel.
struct Sized {
    store: Backstore,
    backend: Arc<dyn Backend>,
    device: Arc<dyn DeviceControl>,
}

impl DeviceControl for Sized {
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
