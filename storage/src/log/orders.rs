//! Orders to the keeper, whose callers wait for the result: checkpoint now, grow a disk, add or
//! remove one, make a snapshot, look at a disk in use, or restore it in place.
//!
//! ```text
//!   Disk::checkpoint ───┐                          ┌─▶ keeper: checkpoint until the LSN is in the base images
//!   Disk::export ───────┤                          ├─▶ keeper: a snapshot that nobody sees, and a look at it
//!   Disk::grow ─────────┼─▶ Log::order ─▶ orders ──┼─▶ keeper: control file, base image, control file
//!   Store::add_disk ────┤                          ├─▶ keeper: control file, the image's mark, control file
//!   Store::remove_disk ─┘                          └─▶ keeper: copy of the disk's records, control file, mark
//!           ▲                                                  │
//!           └───────────────────── answer ─────────────────────┘
//! ```
//! The keeper does all of it because it alone writes the control file and the base images.

use std::path::PathBuf;
use std::time::Instant;

use crate::catalog::control::ControlFile;
use crate::catalog::options::DiskOptions;
use crate::catalog::retention::Retention;
use crate::catalog::snapshot::{SavedFiles, Snapshot, SnapshotName};
use crate::error::{Error, Result};
use crate::index::ExtentMap;
use crate::log::disk_state::DiskState;
use crate::log::holds::{HeldLog, HoldOwner, Holds, YieldingHold};
use crate::sync::{self, Arc, Weak, mpsc};
use crate::{Condition, Trouble};

/// Registers a disk in the log's control file. Gets the log's open disks, and the LSN of their
/// present state.
pub(crate) type DiskAdoption =
    Box<dyn FnOnce(&mut ControlFile, &[Arc<DiskState>], u64) -> Result<Arc<DiskState>> + Send>;

/// What the keeper needs to restore a disk in place.
pub(crate) struct RewindRequest {
    /// The disk is to become what it was as of this LSN.
    pub to: u64,
    /// The disk's newest record when this request was made.
    pub newest: u64,
    /// The extents in the log as of `to`.
    pub extents: ExtentMap,
}

/// A task for the keeper.
pub(crate) enum KeeperTask {
    /// Bring the base images up to this LSN.
    Checkpoint(u64),
    /// Copy a disk's spill file back to its image.
    CopyBack(Arc<DiskState>),
    /// Grow a disk to this many bytes; never shrinks it.
    Grow(Arc<DiskState>, u64),
    /// Add a disk, at this path with links resolved.
    Add(
        DiskOptions,
        PathBuf,
        DiskAdoption,
        mpsc::Sender<Arc<DiskState>>,
    ),
    /// Bring a disk's base image up to date, or with `true` its spill file, and forget the disk.
    Remove(Arc<DiskState>, bool),
    /// Name the present state of the log's disks.
    Snapshot(SnapshotName, Option<u32>),
    /// Keep a point while it is exported. The caller holds it.
    KeepPoint(Snapshot),
    /// Delete the snapshot of this name.
    DeleteSnapshot(SnapshotName),
    /// Set the retention.
    SetRetention(Retention),
    /// Send the ids of the log's disks, open or not, and the paths of their images.
    Members(mpsc::Sender<Vec<(u32, PathBuf)>>),
    /// Hold what a look at a disk reads.
    Look(Arc<DiskState>, HoldOwner, mpsc::Sender<HeldLog>),
    /// Restore a disk in place, and send the LSN of the rewind.
    Rewind(Arc<DiskState>, RewindRequest, mpsc::Sender<u64>),
}

impl KeeperTask {
    /// Whether it changes files that another process may be reading.
    pub(crate) fn changes_files(&self) -> bool {
        matches!(
            self,
            Self::Checkpoint(_)
                | Self::CopyBack(_)
                | Self::Grow(..)
                | Self::Remove(..)
                | Self::DeleteSnapshot(_)
                | Self::Rewind(..)
        )
    }

    /// Whether it takes no longer than a sync, so that it can be done in the middle of a
    /// checkpoint.
    pub(crate) fn is_quick(&self) -> bool {
        matches!(
            self,
            Self::Snapshot(..)
                | Self::KeepPoint(_)
                | Self::DeleteSnapshot(_)
                | Self::SetRetention(_)
                | Self::Members(_)
        )
    }
}

/// A task, and the channel to the caller waiting for it.
pub(crate) struct KeeperOrder {
    pub task: KeeperTask,
    pub answer: mpsc::Sender<Result<()>>,
}

/// Requests to the keeper thread, and its results.
#[derive(Default)]
pub(crate) struct KeeperState {
    pub stop: bool,
    /// After this time, closing copies nothing more to the base images.
    pub copy_until: Option<Instant>,
    /// The same for the simulation: how many more steps a copy may take.
    #[cfg(test)]
    pub copy_steps: Option<u64>,
    pub checkpoint: bool,
    /// The retention.
    pub retain: Retention,
    /// The log's snapshots, oldest first, with those that keep points for exports.
    pub snapshots: Vec<Snapshot>,
    /// The saved files of snapshots that the base images have moved past.
    pub saved: SavedFiles,
    /// Bytes of all saved files.
    pub saved_bytes: u64,
    /// Who needs records to stay in the log.
    pub holds: Holds,
    /// The looks of exports and the holds of readers, some of which have ended.
    pub yielding_holds: Vec<Weak<dyn YieldingHold>>,
    /// A checkpoint is waiting for the pending records up to this LSN, which may use the ring's
    /// last segment.
    pub draining: Option<u64>,
    /// The last attempt to make room, by a checkpoint or by a new segment file, failed.
    pub failed: bool,
    /// After an attempt that failed for lack of space, requests that need room wait, and `failed`
    /// is not set.
    pub pauses: bool,
    /// Why the log can't be emptied or can't grow; [`Condition::Ok`] if it can.
    pub trouble: Condition,
    /// Orders whose callers wait for the keeper.
    pub orders: Vec<KeeperOrder>,
    /// The keeper thread has ended.
    pub gone: bool,
}

impl KeeperState {
    /// Adds a hold that gives way, for as long as its owner has it.
    pub(crate) fn add_yielding(&mut self, hold: &Arc<dyn YieldingHold>) {
        self.yielding_holds.retain(|hold| hold.strong_count() > 0);
        self.yielding_holds.push(Arc::downgrade(hold));
    }

    /// The holds that give way. To end one locks the log.
    pub(crate) fn yielding(&self) -> Vec<Arc<dyn YieldingHold>> {
        let holds = self.yielding_holds.iter().filter_map(Weak::upgrade);
        holds.collect()
    }

    /// The snapshots that users have made, oldest first.
    pub(crate) fn listed_snapshots(&self) -> Vec<Snapshot> {
        let made = |snapshot: &&Snapshot| !snapshot.name.is_of_export();
        self.snapshots.iter().filter(made).copied().collect()
    }

    /// Whether requests that need room fail after this attempt to make some.
    pub(crate) fn refuses_after(&self, done: &Result<()>) -> bool {
        let waits = |error: &Error| self.pauses && error.is_no_space() || self.holds.all_end_soon();
        done.as_ref().is_err_and(|error| !waits(error))
    }

    /// Whether requests that need room wait for space.
    pub(crate) fn pauses_for_space(&self) -> bool {
        self.pauses && self.trouble.name() == Condition::NO_SPACE
    }

    /// Notes why an attempt to empty or grow the log has failed. The trouble dates from the first
    /// failure of this kind.
    pub(crate) fn note(&mut self, error: &Error) {
        let mut trouble = Trouble::now(error, false);
        let now = if error.is_no_space() {
            Condition::NoSpace
        } else {
            Condition::CopyFailing
        };
        if let Some(known) = self.trouble.trouble()
            && self.trouble.name() == now(trouble.clone()).name()
        {
            trouble.since = known.since;
        }
        self.trouble = now(trouble);
    }

    /// Whether the time limit for copying at close has run out.
    pub(crate) fn is_over(&mut self) -> bool {
        #[cfg(test)]
        if let Some(steps) = &mut self.copy_steps {
            let left = steps.checked_sub(1);
            *steps = left.unwrap_or(0);
            return left.is_none();
        }
        self.copy_until.is_some_and(|until| sync::now() >= until)
    }
}
