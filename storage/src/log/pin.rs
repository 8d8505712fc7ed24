//! Pins freeze the base images of a log in use.

use crate::log::state::Log;
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
