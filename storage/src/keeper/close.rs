//! Closing the log: everything is made durable and copied to the base images.
//!
//! A close with a time limit may cut the copy short. That leaves what a kill would leave, except
//! that the whole log is durable: nothing is recycled, the images stay marked as open, and the next
//! open continues the copy.

use std::time::{Duration, UNIX_EPOCH};

use crate::SECTOR_SIZE;
use crate::catalog::identity::written;
use crate::catalog::snapshot::Snapshot;
use crate::error::Result;
use crate::index::{ExtentMap, Location};
use crate::keeper::Keeper;
use crate::mutant::{Mutant, planted};
use crate::sync::{self};

/// More than the longest tick of a kernel's clock.
const TICK: Duration = Duration::from_millis(20);

impl Keeper {
    /// Makes everything durable and copies it to the base images, within the time limit. No port
    /// may use the log any more. Returns whether the base images have everything; otherwise the log
    /// keeps it.
    ///
    /// # Errors
    /// If the log had failed or the copy fails.
    pub(crate) fn close(&mut self) -> Result<bool> {
        self.end_readings();
        self.reclaim();
        self.refuse_failed()?;
        // If this fails, the records are safe all the same.
        let ended = self.end_exports();
        // Into the log first, where it is safe even if the checkpoint fails.
        let newest = self.log.lock().pipeline.appended();
        if !planted(Mutant::CutUndrained) && self.drain(newest).is_err() {
            self.refuse_failed()?;
            // The log was full: of what an earlier checkpoint has not copied, or of history that a
            // look or snapshot needed until now.
            if self.frozen_at.is_some() {
                self.await_readers();
                self.checkpoint_once(false, true)?;
            }
            self.fold_for_room()?;
            self.await_readers();
            self.drain(newest)?;
        }
        ended?;
        if planted(Mutant::ClosedEarly) {
            self.disks
                .iter()
                .try_for_each(|disk| disk.mark(false).map(drop))?;
        }
        let keeps = {
            let state = self.log.lock();
            state.keeps_history() && state.pipeline.unapplied() > 0
        };
        let copied = if keeps {
            Ok(false)
        } else {
            self.checkpoint(true, true)
        };
        let spilled = !self.end_spills();
        let whole = match copied {
            // What was copied back may have made room.
            Err(_) if !spilled => self.checkpoint(true, true)?,
            copied => copied?,
        };
        if !whole {
            // Records in the control file that the log is durable.
            self.control.write()?;
            self.report_remainder(keeps);
        }
        self.await_new_mtime();
        if !whole && !planted(Mutant::CutMarkedClosed) {
            return Ok(false);
        }
        // Only after the control file says that the log has no records for them.
        let mut complete = self.disks.iter().filter(|disk| !disk.base.is_spilled());
        complete.try_for_each(|disk| disk.mark(false).map(drop))?;
        Ok(whole && !spilled)
    }

    /// Removes the points that are kept for exports, which then fail. Returns whether there were
    /// any.
    pub(super) fn end_exports(&mut self) -> Result<bool> {
        let mut snapshots = self.control.control.snapshots.iter();
        let exported = snapshots.any(Snapshot::is_of_export);
        if exported {
            self.change_history(Snapshot::remove_exports)?;
        }
        Ok(exported)
    }

    /// If there are snapshots, waits until a write by another program would get a later mtime than
    /// the log's last write. File times have the resolution of the kernel's tick.
    fn await_new_mtime(&self) {
        if self.control.control.snapshots.is_empty() {
            return;
        }
        for disk in &self.disks {
            let written = match written(disk.base.file().as_ref()) {
                0 => continue,
                nanoseconds => UNIX_EPOCH + Duration::from_nanos(nanoseconds),
            };
            // Don't wait for a clock that was set back.
            let passed = written.elapsed().unwrap_or(TICK);
            sync::sleep(TICK.saturating_sub(passed));
        }
    }

    /// Logs what closing left in the log. `keeps`: on purpose.
    fn report_remainder(&self, keeps: bool) {
        let dir = self.log.dir.display();
        if keeps {
            tracing::info!(
                "log {dir}: closed; it keeps its disks' history, and so their newest bytes"
            );
            return;
        }
        let left = self.disks.iter().map(|disk| {
            let index = disk.index();
            let older = index
                .frozen
                .as_ref()
                .map(|frozen| frozen.without(&index.active));
            bytes(&index.active) + older.as_ref().map_or(0, bytes)
        });
        let bytes: u64 = left.sum();
        tracing::warn!(
            "log {dir}: closed with {bytes} bytes that are not in the base images yet; they stay \
             in the log, and the next open goes on copying them ('walvisor disk checkpoint' copies \
             everything)"
        );
    }
}

/// Bytes of data in a layer, zeroes excluded.
fn bytes(layer: &ExtentMap) -> u64 {
    let data = layer
        .iter()
        .filter(|piece| !matches!(piece.place, Some(Location::Zero { .. })));
    data.map(|piece| piece.sectors * SECTOR_SIZE).sum()
}
