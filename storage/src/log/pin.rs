//! Pins freeze the base images of a log in use, for looks at its disks.

use crate::format::Control;
use crate::log::state::Log;
use crate::medium::file::Segment;
use crate::mutant::{Mutant, planted};
use crate::sync::Arc;

/// While this exists, the log's base images do not change, and all records after an LSN stay in the log.
pub(crate) struct Pin {
    log: Arc<Log>,
    lsn: u64,
}

impl Pin {
    /// Pins the base images. Only the keeper, which writes to them, may do that, and not while it copies.
    pub(crate) fn new(log: &Arc<Log>) -> Self {
        let mut state = log.lock();
        let lsn = state.pipeline.applied();
        if !planted(Mutant::LookUnpinned) {
            state.keeper.looks.push(lsn);
        }
        drop(state);
        let log = log.clone();
        Self { log, lsn }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut state = self.log.lock();
        let looks = &mut state.keeper.looks;
        if let Some(place) = looks.iter().position(|&lsn| lsn == self.lsn) {
            looks.swap_remove(place);
        }
        // Segments may have become free, or a stuck log may have room.
        state.keeper.checkpoint |= state.needs_room();
        self.log.keeper_wanted.notify_one();
    }
}

/// The part of a log that a look reads: all records up to an LSN, all of them durable.
pub(crate) struct PinnedLog {
    /// The segments with records that are not in the base images, oldest first, each with its last LSN so far. Declared
    /// before the pin, so that they are released before the keeper looks for free segments.
    pub segments: Vec<(Arc<Segment>, u64)>,
    /// The newest record.
    pub newest: u64,
    /// The control file: what the base images have, and which snapshots exist.
    pub control: Control,
    pub pin: Pin,
}
