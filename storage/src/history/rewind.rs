//! Restoring a disk in place while it is in use.
//!
//! ```text
//!   records ... │ mark of the disk │ records of other disks ... │ newer records of the disk
//!                 └─ its LSN becomes that of the rewind, once it is durable
//! ```
//! The rewind of a disk that is not in use takes an LSN that no record has. In a log in use, LSNs
//! have no gaps, so a mark takes the LSN: a record that changes no disk.

use crate::catalog::mark_text::MarkText;
use crate::error::{Error, ErrorKind, Result};
use crate::history::keeper::Keeper;
use crate::log::disk_state::DiskState;
use crate::log::orders::RewindRequest;
use crate::log::pipeline::{MarkCommit, Modification};
use crate::mutant::{Mutant, planted};
use crate::sync::Arc;
use crate::sync::atomic::Ordering;

/// How the text of a rewind's mark begins. The LSN that it goes back to follows.
const MARK_OF_REWIND: &str = "restored in place as of LSN ";

/// Whether a mark may be a rewind's. Somebody may have given a mark such a text.
pub(crate) fn is_mark_of_rewind(text: &MarkText) -> bool {
    text.as_str().starts_with(MARK_OF_REWIND)
}

impl Keeper {
    /// Restores a disk in place; the caller holds the base images. Returns the LSN of the
    /// rewind. New records of the disk wait until it is done.
    ///
    /// # Errors
    /// If the disk was written to since `request` was made, or the log can't be written. The disk
    /// is then as it was.
    pub(crate) fn rewind(&mut self, disk: &Arc<DiskState>, request: RewindRequest) -> Result<u64> {
        self.refuse_failed()?;
        let mut next = self.control.control.clone();
        let room = next.rewind(disk.id, request.to, request.newest, 0);
        room.map_err(|error| error.of_file(&self.log.dir))?;
        let text = format!("{MARK_OF_REWIND}{}", request.to);
        let (text, marked): (MarkText, _) = (text.parse()?, MarkCommit::default());
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
        let mark = Modification::mark(&text, marked.clone());
        let at = state.pipeline.append(disk, mark);
        disk.last_lsn.store(at, Ordering::Release);
        disk.rewinding.store(true, Ordering::Relaxed);
        drop(state);
        let rewound = self.rewind_at(disk, request, at, &marked);
        let state = self.log.lock();
        disk.rewinding.store(false, Ordering::Relaxed);
        drop(state);
        self.log.wake_ports();
        rewound.map(|()| at)
    }

    /// The rewind has the LSN `at`, which is that of the mark.
    fn rewind_at(
        &mut self,
        disk: &DiskState,
        RewindRequest { to, extents, .. }: RewindRequest,
        at: u64,
        marked: &MarkCommit,
    ) -> Result<()> {
        self.drain(at)?;
        let unix_us = marked.get().map_or(0, |commit| commit.unix_us);
        // The disk must not go on before it is certain whether the medium has it.
        self.change_certainly(|control| {
            if planted(Mutant::RewindUnwritten) {
                return;
            }
            // The room was checked before.
            let _ = control.rewind(disk.id, to, at - 1, unix_us);
        })?;
        // In the other slot too: if the newer one rots, the other must not bring back what was
        // undone. If this fails, the next write of the control file does it.
        let _ = self.control.write();
        let rewinds = self.control.control.rewinds_of(disk.id).copied();
        *disk.rewinds.lock().expect("rewinds lock") = rewinds.collect();
        let mut index = disk.index_mut();
        index.active = extents;
        index.count_in(&self.log.counters.index);
        drop(index);
        self.note_saved();
        Ok(())
    }
}
