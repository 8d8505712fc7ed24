//! A disk in the kernel's target, from making its first directory to removing its last.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use walvisor_devices::tcmu::{CommandRing, Device, Mapping, Worker};

use super::backstore::{Backstore, BackstoreSpec};
use super::export::TargetExport;
use super::refusal::Refusal;
use super::target::{LioTarget, Result, StepContext, TargetError};
use super::uio::Uio;
use crate::disk_spec::Fabric;

/// A disk in the kernel's target. Dropping it takes it down, unless initiators of an earlier
/// process still wait for it: if it was not served again, it stays blocked.
pub struct LioDisk {
    store: Backstore,
    /// Its LUNs: the one that this process made, or those that it found.
    exports: Vec<TargetExport>,
    device: Option<OwnedFd>,
    memory: Option<Arc<Mapping>>,
    worker: Option<Worker>,
    /// It has a LUN that was there before this process, and this process does not serve it yet.
    inherited: bool,
    /// It was taken down, or must stay: dropping it does nothing.
    released: bool,
    /// The back store was left in the target, because initiators or other fabrics still use it.
    stays: bool,
}

impl LioDisk {
    /// Makes a disk that is not served yet. A disk that a killed process left behind is taken over
    /// if all its completed writes were durable: its initiators wait from here on, keep their
    /// outstanding commands, and lose nothing. Otherwise unflushed writes may be lost without the
    /// initiators' knowledge, so they get a new disk.
    ///
    /// # Errors
    /// If the kernel refuses, or the name is taken. Nothing half-built stays.
    pub fn raise(
        target: &LioTarget,
        wanted: &BackstoreSpec,
        fabric: Fabric,
        wwn: &str,
    ) -> Result<Self> {
        let (mut store, mut stood) = Backstore::raise(target, wanted)?;
        if stood && !store.is_durable() && !TargetExport::of(&store).is_empty() {
            Self::clear(&store).map_err(|error| {
                TargetError::Taken(format!(
                    "{error} (the last process died with unflushed writes, so initiators must see a \
                     new disk; with cache=writethrough they keep theirs)"
                ))
            })?;
            tracing::warn!(
                "disk '{}': the last process died with unflushed writes, so initiators see a new \
                 disk (with cache=writethrough they keep theirs)",
                wanted.name
            );
            (store, stood) = Backstore::raise(target, wanted)?;
        }
        let exports = if stood {
            TargetExport::of(&store)
        } else {
            Vec::new()
        };
        let mut disk = Self {
            inherited: !exports.is_empty(),
            // Another process may serve it, so this one must not take it down.
            released: stood,
            exports,
            store,
            device: None,
            memory: None,
            worker: None,
            stays: false,
        };
        let Uio { device, memory } = Uio::open(&disk.store)?;
        (disk.device, disk.memory) = (Some(device), Some(memory));
        disk.released = false;
        if stood {
            disk.store.block(true)?;
            disk.store.reset_ring(true)?;
        }
        if !disk.inherited {
            let export = TargetExport::prepare(target, fabric, wwn)?;
            disk.exports.extend(export);
        }
        Ok(disk)
    }

    /// Starts to serve the disk, and lets initiators see it.
    ///
    /// # Errors
    /// If the ring is invalid, or the kernel refuses.
    pub fn serve(&mut self, device: &Device, bytes: u64) -> Result<()> {
        let (Some(memory), Some(uio)) = (self.memory.take(), self.device.take()) else {
            return Ok(());
        };
        self.store.set_size(bytes)?;
        let ring = CommandRing::open(memory)?;
        let worker = Worker::start(device, ring, uio);
        self.worker = Some(worker.during("serve", self.store.directory())?);
        self.store.block(false)?;
        if self.inherited {
            self.inherited = false;
            return Ok(());
        }
        let mut exports = self.exports.iter();
        exports.try_for_each(|export| export.link(&self.store))
    }

    /// The back store.
    pub fn store(&self) -> &Backstore {
        &self.store
    }

    /// The LUNs through which initiators see it.
    pub fn exports(&self) -> &[TargetExport] {
        &self.exports
    }

    /// Takes the disk down: first its LUNs, while commands are still answered, then the back store.
    /// If another fabric exports the back store, it stays and is returned, and its initiators wait
    /// for the next start.
    ///
    /// # Errors
    /// The first step that the kernel refused. The later steps are tried all the same.
    pub fn dismantle(mut self) -> Result<Option<Backstore>> {
        self.take_down()?;
        Ok(self.stays.then(|| self.store.clone()))
    }

    /// An export that this process did not make.
    pub fn other_export(&self) -> Option<TargetExport> {
        let mut exports = TargetExport::of(&self.store).into_iter();
        exports.find(|export| !export.is_simple() || !self.exports.contains(export))
    }

    fn take_down(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.released, true) {
            return Ok(());
        }
        let others = self.other_export();
        if self.inherited || others.is_some() {
            self.stays = true;
            let blocked = self.store.block(true);
            self.worker = None;
            let name = &self.store.name;
            let by = match others {
                Some(export) => format!(", exported by {}", export.place()),
                None => String::new(),
            };
            tracing::warn!(
                "disk '{name}' stays{by}: initiators wait until it is served again, or removed \
                 ('walvisor serve tcmu --remove {name}')"
            );
            return blocked;
        }
        let mut outcome = Ok(());
        let mut keep = |done: Result<()>| {
            if outcome.is_ok() {
                outcome = done;
            }
        };
        for export in &self.exports {
            keep(export.unlink());
            keep(export.remove());
        }
        self.worker = None;
        self.memory = None;
        self.device = None;
        keep(self.store.remove());
        outcome
    }

    /// Removes a back store that no process serves, with its LUNs. Commands that still arrive are
    /// refused.
    ///
    /// # Errors
    /// If a process serves it, a fabric that walvisor does not set up exports it, or the kernel
    /// refuses.
    pub fn clear(store: &Backstore) -> Result<()> {
        let name = &store.name;
        let exports = TargetExport::of(store);
        if let Some(other) = exports.iter().find(|export| !export.is_simple()) {
            return Err(TargetError::Taken(format!(
                "disk '{name}' is exported by {}: remove that LUN first",
                other.place()
            )));
        }
        if store.enabled() {
            let uio = Uio::open(store).map_err(|error| match error {
                TargetError::Taken(why) => TargetError::Taken(format!("{why}: stop that first")),
                error => error,
            })?;
            store.block(true)?;
            store.reset_ring(false)?;
            let refusal = Refusal::start(uio)?.during("serve", store.directory())?;
            store.block(false)?;
            let unlinked = exports.iter().try_for_each(TargetExport::unlink);
            drop(refusal);
            unlinked?;
        }
        exports.iter().try_for_each(TargetExport::remove)?;
        store.remove()
    }
}

impl Drop for LioDisk {
    fn drop(&mut self) {
        if let Err(error) = self.take_down() {
            tracing::error!("{error}");
        }
    }
}
