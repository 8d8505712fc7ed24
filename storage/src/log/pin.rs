//! Pins freeze the base images of a log in use, for looks at its disks.

use crate::format::Control;
use crate::log::state::{Log, RoomNeed};
use crate::medium::file::Segment;
use crate::mutant::{Mutant, planted};
use crate::sync::Arc;

/// Whom a log is pinned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PinUser {
    /// A look, until its user ends it.
    Look,
    /// An export, which gives way when the log needs room.
    Export,
    /// A restore in place, which replaces the index: an unfinished full checkpoint, which has a
    /// layer of it, is finished first.
    Rewind,
}

/// A pin, as the keeper knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PinnedBase {
    /// The LSN of the base images when they were pinned.
    pub lsn: u64,
    pub user: PinUser,
}

/// A look of an export.
pub(crate) trait ExportLook: Send + Sync {
    /// Closes it if the export should have done so a while ago.
    fn close_if_overdue(&self, need: RoomNeed);
}

/// While this exists, the log's base images do not change, and all records after an LSN stay in the
/// log.
pub(crate) struct Pin {
    log: Arc<Log>,
    base: PinnedBase,
}

impl Pin {
    /// Pins the base images. Only the keeper, which writes to them, may do that, and not while it
    /// copies.
    pub(crate) fn new(log: &Arc<Log>, user: PinUser) -> Self {
        let mut state = log.lock();
        let lsn = state.pipeline.applied();
        let base = PinnedBase { lsn, user };
        if !planted(Mutant::LookUnpinned) {
            state.keeper.pins.push(base);
        }
        drop(state);
        let log = log.clone();
        Self { log, base }
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut state = self.log.lock();
        let pins = &mut state.keeper.pins;
        if let Some(place) = pins.iter().position(|base| *base == self.base) {
            pins.swap_remove(place);
        }
        self.log.call_keeper(&mut state);
    }
}

/// The part of a log that a look reads: all records up to an LSN, all of them durable.
pub(crate) struct PinnedLog {
    /// The segments with records that are not in the base images, oldest first, each with its last
    /// LSN so far. Declared before the pin, so that they are released before the keeper looks for
    /// free segments.
    pub segments: Vec<(Arc<Segment>, u64)>,
    /// The newest record.
    pub newest: u64,
    /// The control file: what the base images have, and which snapshots exist.
    pub control: Control,
    pub pin: Pin,
}
