//! A disk in the kernel's target from its first directory to its last, whatever happens between.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use walvisor_devices::tcmu::{Device, Mapping, Ring, Worker};

use super::backstore::{Backstore, Wanted};
use super::export::Export;
use super::refusal::Refusal;
use super::target::{Doing, Result, Target, TargetError};
use super::uio::Uio;
use crate::disk_spec::Fabric;

/// A disk that stands in the target. Dropping it takes it down, unless initiators still wait for it: one that was there
/// before and is not served again stays as it is, blocked.
pub struct Standing {
    store: Backstore,
    /// Its LUNs: one of its own, or those that it had.
    exports: Vec<Export>,
    device: Option<OwnedFd>,
    memory: Option<Arc<Mapping>>,
    worker: Option<Worker>,
    /// It has a LUN that was there before this process, and nobody serves it yet.
    inherited: bool,
    /// It is gone, or is to stay.
    released: bool,
    /// It was to go, and stays.
    stays: bool,
}

impl Standing {
    /// Raises a disk that nobody serves yet. One that a killed process has left standing is taken over, if every write
    /// that had completed was durable: its initiators wait from here on, what they have asked for included, and lose
    /// nothing. If not, what they had not flushed is gone, which they would not know: they get a new disk.
    ///
    /// # Errors
    /// If the kernel refuses, or the name is taken. Nothing half-built stays.
    pub fn raise(target: &Target, wanted: &Wanted, fabric: Fabric, wwn: &str) -> Result<Self> {
        let (mut store, mut stood) = Backstore::raise(target, wanted)?;
        if stood && !store.is_durable() && !Export::of(&store).is_empty() {
            Self::clear(&store).map_err(|error| {
                TargetError::Taken(format!(
                    "{error} (it was left by a process that had writes in its memory: what was not flushed is gone, and \
                     initiators must not go on without knowing; with cache=writethrough they can)"
                ))
            })?;
            tracing::warn!(
                "disk '{}' was left by a process that had writes in its memory: what was not flushed is gone, so its \
                 initiators get a new disk (with cache=writethrough they keep theirs)",
                wanted.name
            );
            (store, stood) = Backstore::raise(target, wanted)?;
        }
        let exports = if stood {
            Export::of(&store)
        } else {
            Vec::new()
        };
        let mut standing = Self {
            inherited: !exports.is_empty(),
            // Served by another process, perhaps: not ours to take down.
            released: stood,
            exports,
            store,
            device: None,
            memory: None,
            worker: None,
            stays: false,
        };
        let Uio { device, memory } = Uio::open(&standing.store)?;
        (standing.device, standing.memory) = (Some(device), Some(memory));
        standing.released = false;
        if stood {
            standing.store.block(true)?;
            standing.store.reset_ring(true)?;
        }
        if !standing.inherited {
            let export = Export::prepare(target, fabric, wwn)?;
            standing.exports.extend(export);
        }
        Ok(standing)
    }

    /// Serves it, and lets initiators see it.
    ///
    /// # Errors
    /// If the ring makes no sense, or the kernel refuses.
    pub fn serve(&mut self, device: &Device, bytes: u64) -> Result<()> {
        let (Some(memory), Some(uio)) = (self.memory.take(), self.device.take()) else {
            return Ok(());
        };
        self.store.set_size(bytes)?;
        let ring = Ring::open(memory)?;
        let worker = Worker::start(device, ring, uio);
        self.worker = Some(worker.doing("serve", self.store.directory())?);
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

    /// Who sees it.
    pub fn exports(&self) -> &[Export] {
        &self.exports
    }

    /// Takes it down: LUNs while commands are still answered, then the back store. If others export it, it stays, and
    /// their initiators wait for the next start; then it is returned.
    ///
    /// # Errors
    /// The first step that the kernel refuses; further ones are tried all the same.
    pub fn dismantle(mut self) -> Result<Option<Backstore>> {
        self.take_down()?;
        Ok(self.stays.then(|| self.store.clone()))
    }

    fn take_down(&mut self) -> Result<()> {
        if std::mem::replace(&mut self.released, true) {
            return Ok(());
        }
        let others = Export::of(&self.store);
        let others = others.iter().find(|export| !export.is_simple());
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
                "disk '{name}' stays{by}: initiators wait until it is served again, or removed ('walvisor serve tcmu \
                 --remove {name}')"
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

    /// Removes a back store that no process serves, with its LUNs; commands that still come are refused.
    ///
    /// # Errors
    /// If it is served, exported by a fabric that somebody else has set up, or the kernel refuses.
    pub fn clear(store: &Backstore) -> Result<()> {
        let name = &store.name;
        let exports = Export::of(store);
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
            let refusal = Refusal::start(uio)?.doing("serve", store.directory())?;
            store.block(false)?;
            let unlinked = exports.iter().try_for_each(Export::unlink);
            drop(refusal);
            unlinked?;
        }
        exports.iter().try_for_each(Export::remove)?;
        store.remove()
    }
}

impl Drop for Standing {
    fn drop(&mut self) {
        if let Err(error) = self.take_down() {
            tracing::error!("{error}");
        }
    }
}
