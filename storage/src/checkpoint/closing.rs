//! Closing a log: everything becomes durable, and as much as its time allows is copied to the base images.

use std::time::{Duration, UNIX_EPOCH};

use crate::SECTOR_SIZE;
use crate::catalog::identity::written;
use crate::checkpoint::keeper::Keeper;
use crate::error::Result;
use crate::index::{ExtentMap, Place};
use crate::mutant::{Mutant, planted};
use crate::sync;

/// The longest tick of a kernel's clock, and more.
const TICK: Duration = Duration::from_millis(20);

impl Keeper {
    /// Makes everything durable and copies it to the base images, as long as that may take. No port may use the log
    /// any more. Returns whether the base images have everything; otherwise the log keeps it.
    ///
    /// # Errors
    /// If the log had failed or the copy fails.
    pub(crate) fn close(&mut self) -> Result<bool> {
        self.reclaim();
        self.refuse_failed()?;
        // Everything goes to the log first, where it is safe even if the checkpoint fails.
        let newest = self.log.lock().pipeline.appended();
        if !planted(Mutant::CutUndrained) && self.drain(newest).is_err() {
            self.refuse_failed()?;
            // The log was full of history that a look or a snapshot needed until now.
            self.fold_for_room()?;
            self.await_readers();
            self.drain(newest)?;
        }
        if planted(Mutant::ClosedEarly) {
            self.disks
                .iter()
                .try_for_each(|disk| disk.mark(false).map(drop))?;
        }
        let keeps = {
            let state = self.log.lock();
            state.keeps_history() && state.pipeline.unapplied() > 0
        };
        let whole = !keeps && self.checkpoint(true, true)?;
        if !whole {
            // The control file notes that the log is durable.
            self.control.write()?;
            self.tell_left(keeps);
        }
        self.outlast_written();
        if !whole && !planted(Mutant::CutMarkedClosed) {
            return Ok(false);
        }
        // The images are marked as closed only after the control file says that the log has no records of them.
        self.disks
            .iter()
            .try_for_each(|disk| disk.mark(false).map(drop))?;
        Ok(whole)
    }

    /// Waits until what another program writes to an image gets another time than what the log wrote, if snapshots depend on that. Times
    /// of files are those of the kernel's last tick.
    fn outlast_written(&self) {
        if self.control.control.snapshots.is_empty() {
            return;
        }
        for disk in &self.disks {
            let written = match written(disk.base.as_ref()) {
                0 => continue,
                nanoseconds => UNIX_EPOCH + Duration::from_nanos(nanoseconds),
            };
            // A clock that was set back is not waited for.
            let passed = written.elapsed().unwrap_or(TICK);
            sync::sleep(TICK.saturating_sub(passed));
        }
    }

    /// Reports what a close leaves in the log. `keeps`: on purpose.
    fn tell_left(&self, keeps: bool) {
        let dir = self.log.dir.display();
        if keeps {
            tracing::info!(
                "log {dir}: closed; it keeps the history of its disks, and their newest bytes"
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
            "log {dir}: closed with {bytes} bytes that the base images do not have yet: the log keeps them, and the next open goes \
             on copying them ('walvisor disk checkpoint' copies all)"
        );
    }
}

/// Bytes of the extents that are to be written to a base image.
fn bytes(layer: &ExtentMap) -> u64 {
    let data = layer
        .iter()
        .filter(|piece| !matches!(piece.place, Some(Place::Zero { .. })));
    data.map(|piece| piece.sectors * SECTOR_SIZE).sum()
}
