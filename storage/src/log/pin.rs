//! Pins keep the base images of a log in use as they are.

use crate::log::state::Log;
use crate::mutant::{Mutant, planted};
use crate::sync::Arc;

/// While this lives, the base images of a log do not change: all records behind an LSN stay in the log.
pub(crate) struct Pin {
    log: Arc<Log>,
    lsn: u64,
}

impl Pin {
    /// Pins the base images as they are. Only the keeper, which writes to them, may do that, while it copies nothing.
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
