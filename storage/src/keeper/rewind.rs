//! Restoring a disk of an open log in place: by a record that says so.

use crate::error::{Error, ErrorKind, Result};
use crate::format::Rewind;
use crate::keeper::Keeper;
use crate::log::disk_state::DiskState;
use crate::log::orders::RewindRequest;
use crate::log::pipeline::Modification;
use crate::mutant::{Mutant, planted};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;

impl Keeper {
    /// Restores a disk in place; the caller holds the base images. Returns the LSN of the
    /// rewind. New records of the disk wait until it is done.
    ///
    /// # Errors
    /// If the disk was written to since `request` was made, or the log can't be written. The disk
    /// is then as it was.
    pub(crate) fn rewind(&mut self, disk: &Arc<DiskState>, request: RewindRequest) -> Result<u64> {
        self.refuse_failed()?;
        let mut state = self.log.lock();
        let written = disk.last_lsn.load(Ordering::Acquire) != request.newest;
        if written || disk.detached.load(Ordering::Relaxed) {
            let path = disk.path.display();
            let message = format!(
                "{path}: the disk was written to, or left its log, before it could be restored; \
                 try again"
            );
            return Err(Error::new(ErrorKind::Locked, message));
        }
        let change = if planted(Mutant::RewindUnwritten) {
            Modification::void()
        } else {
            Modification::rewind(request.to)
        };
        let at = state.pipeline.append(disk, change);
        disk.last_lsn.store(at, Ordering::Release);
        disk.rewinding.store(true, Ordering::Relaxed);
        drop(state);
        let rewound = self.take_back(disk, request, at);
        let state = self.log.lock();
        disk.rewinding.store(false, Ordering::Relaxed);
        drop(state);
        self.log.wake_ports();
        rewound.map(|()| at)
    }

    /// The rewind's record has the LSN `at`.
    fn take_back(&mut self, disk: &DiskState, request: RewindRequest, at: u64) -> Result<()> {
        let RewindRequest { to, extents, .. } = request;
        let disk_id = disk.id;
        // From now on no copy may stop between the two, not even if the log fails.
        self.control
            .control
            .rewinds
            .push(Rewind { disk_id, to, at });
        if let Err(error) = self.drain(at) {
            // What is not on its way to the medium yet does not get there.
            let voided = self.log.lock().pipeline.void(at);
            if !voided {
                self.log.poison(&std::io::Error::other(error.to_string()));
                return Err(error);
            }
            self.control.control.rewinds.pop();
            if !self.log.lock().ring.is_used_up() {
                return Err(error);
            }
            let dir = self.log.dir.display();
            return Err(Error::full(format!(
                "{dir}: the log has no room to record the restore; make it larger with 'walvisor \
                 log resize', then try again"
            )));
        }
        let rewinds = self.control.control.rewinds_of(disk_id).copied();
        *disk.rewinds.lock().expect("rewinds lock") = rewinds.collect();
        let mut index = disk.index_mut();
        index.active = extents;
        index.count_in(&self.log.counters.index);
        drop(index);
        self.note_saved();
        // Both slots then say that the record was durable, so that damage to it is never taken for
        // a torn write. If this fails, the next write of the control file does it.
        let _ = self.control.change_both(|_| {});
        Ok(())
    }
}
