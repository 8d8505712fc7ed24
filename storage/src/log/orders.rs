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
use crate::log::pin::{ExportLook, PinUser, PinnedBase, PinnedLog};
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
    /// Keep a point while it is exported. The caller has pinned it.
    KeepPoint(Snapshot),
    /// Delete the snapshot of this name.
    DeleteSnapshot(SnapshotName),
    /// Set the retention.
    SetRetention(Retention),
    /// Send the ids of the log's disks, open or not, and the paths of their images.
    Members(mpsc::Sender<Vec<(u32, PathBuf)>>),
    /// Pin what a look at a disk reads.
    Look(Arc<DiskState>, PinUser, mpsc::Sender<PinnedLog>),
    /// Restore a disk in place, and send the LSN of the rewind.
    Rewind(Arc<DiskState>, RewindRequest, mpsc::Sender<u64>),
}

impl KeeperTask {
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
    /// Those of them that need the log for as long as they exist, because the base images can't
    /// stop at their LSN.
    pub inside_rewinds: Vec<Snapshot>,
    /// The saved files of snapshots that the base images have moved past.
    pub saved: SavedFiles,
    /// Bytes of all saved files.
    pub saved_bytes: u64,
    /// The LSN of the base images' state.
    pub reached: u64,
    /// Who has pinned the base images.
    pub pins: Vec<PinnedBase>,
    /// Everything after this LSN stays in the log for its replica.
    pub replica_needs: Option<u64>,
    /// The looks of exports, some of which have ended.
    pub export_looks: Vec<Weak<dyn ExportLook>>,
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
    /// The snapshots that users have made, oldest first.
    pub(crate) fn listed_snapshots(&self) -> Vec<Snapshot> {
        let made = |snapshot: &&Snapshot| !snapshot.name.is_of_export();
        self.snapshots.iter().filter(made).copied().collect()
    }

    /// A snapshot or look needs everything after this LSN, which stays in the log while there is
    /// room. `None`: no such snapshot or look. (Snapshots that the base images have moved past have
    /// saved files instead.)
    pub(crate) fn pinned(&self) -> Option<u64> {
        let snapshots = self.snapshots.iter().map(|snapshot| snapshot.lsn);
        let ahead = snapshots.filter(|lsn| *lsn >= self.reached);
        ahead.chain(self.pins.iter().map(|pin| pin.lsn)).min()
    }

    /// Everything after this LSN must stay in the log: a look needs it, a snapshot at which the
    /// base images can't stop, or the log's replica. `None`: nobody does.
    pub(crate) fn held(&self) -> Option<u64> {
        self.held_here().into_iter().chain(self.replica_needs).min()
    }

    /// As [`held`](Self::held), without the replica.
    pub(crate) fn held_here(&self) -> Option<u64> {
        let inside_rewinds = self.inside_rewinds.iter().map(|snapshot| snapshot.lsn);
        inside_rewinds
            .chain(self.pins.iter().map(|pin| pin.lsn))
            .min()
    }

    /// Everything after this LSN stays for the replica, which lacks some of it, and nobody here
    /// needs more. `newest`: the log's newest record.
    pub(crate) fn held_for_replica(&self, newest: u64) -> Option<u64> {
        let here = self.held_here();
        let first = |lsn: &u64| *lsn < newest && here.is_none_or(|here| *lsn < here);
        self.replica_needs.filter(first)
    }

    /// As [`held_here`](Self::held_here), without exports, which give way when the log needs room,
    /// and restores in place, which end soon.
    pub(crate) fn held_firmly(&self) -> Option<u64> {
        let snapshots = self.inside_rewinds.iter();
        let snapshots = snapshots.filter(|snapshot| !snapshot.name.is_of_export());
        let pins = self.pins.iter().filter(|pin| pin.user == PinUser::Look);
        let lsns = snapshots.map(|snapshot| snapshot.lsn);
        lsns.chain(pins.map(|pin| pin.lsn)).min()
    }

    /// Whether only exports and restores in place keep the log from making room, the replica aside.
    pub(crate) fn is_held_briefly(&self) -> bool {
        self.held_here().is_some() && self.held_firmly().is_none()
    }

    /// Whether an export keeps the log from making room.
    pub(crate) fn has_export(&self) -> bool {
        self.pins.iter().any(|pin| pin.user == PinUser::Export)
    }

    /// Whether requests that need room fail after this attempt to make some.
    pub(crate) fn refuses_after(&self, done: &Result<()>) -> bool {
        let waits = |error: &Error| self.pauses && error.is_no_space() || self.is_held_briefly();
        done.as_ref().is_err_and(|error| !waits(error))
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::error::ErrorKind;
    use crate::inspect;
    use crate::offline::resize::tests::{MIB, copy_image, end, fill, open};
    use crate::{
        Backend, BackendQueue, Operation, Port, SECTOR_SIZE, StoreOptions, create_disk,
        default_log_dir,
    };

    fn page(port: &mut Port, sector: u64) -> Vec<u8> {
        end(port, Operation::Read { sector, sectors: 8 })
            .unwrap()
            .to_vec()
    }

    fn create(dir: &Path) -> std::path::PathBuf {
        let disk = dir.join("disk.img");
        let options = StoreOptions {
            segment_size: MIB,
            ..StoreOptions::default()
        };
        create_disk(&disk, MIB, &default_log_dir(&disk), &options).unwrap();
        disk
    }

    /// A copy of what a crash at this moment leaves, as another disk.
    fn crashed(disk: &Path, to: &Path) -> std::path::PathBuf {
        let (log, copy) = (default_log_dir(disk), to.join("disk.img"));
        std::fs::create_dir_all(default_log_dir(&copy)).unwrap();
        for entry in std::fs::read_dir(&log).unwrap() {
            let entry = entry.unwrap();
            // A segment file that is still being made may be renamed at the same time.
            if !entry.file_name().to_str().unwrap().ends_with(".new") {
                let to = default_log_dir(&copy).join(entry.file_name());
                std::fs::copy(entry.path(), to).unwrap();
            }
        }
        copy_image(disk, &copy);
        copy
    }

    #[test]
    fn a_disk_grows_in_use_and_what_is_new_survives_a_crash() {
        let dir = tempfile::tempdir().unwrap();
        let disk = create(dir.path());
        let store = open(&disk);
        let live = &store.disks()[0];
        let mut port = live.open_port().unwrap();
        fill(&mut port, 0, 1);
        let beyond = MIB / SECTOR_SIZE;
        port.submit(
            7,
            Operation::Read {
                sector: beyond,
                sectors: 8,
            },
        );
        let mut done = Vec::new();
        port.completions(&mut done);
        assert!(done.pop().unwrap().result.is_err(), "behind the end");
        let resized = live.grow(4 * MIB).unwrap();
        assert_eq!((resized.old_size, resized.size), (MIB, 4 * MIB));
        assert_eq!(live.sectors() * SECTOR_SIZE, 4 * MIB);
        assert_eq!(page(&mut port, beyond), [0; 4096]);
        fill(&mut port, 4 * MIB / SECTOR_SIZE - 8, 2);
        end(&mut port, Operation::Flush);
        for (size, part) in [(2 * MIB, "cannot shrink"), (4 * MIB + 1, "multiple of 512")] {
            let error = live.grow(size).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
            assert!(error.to_string().contains(part), "{error}");
        }
        live.grow(4 * MIB).unwrap();

        let copy = crashed(&disk, &dir.path().join("copy"));
        let recovered = open(&copy);
        assert_eq!(recovered.disks()[0].sectors() * SECTOR_SIZE, 4 * MIB);
        let mut port_of_copy = recovered.disks()[0].open_port().unwrap();
        assert_eq!(page(&mut port_of_copy, 0), [1; 4096]);
        assert_eq!(
            page(&mut port_of_copy, 4 * MIB / SECTOR_SIZE - 8),
            [2; 4096]
        );
        drop(port_of_copy);
        recovered.close().unwrap();

        drop(port);
        store.close().unwrap();
        assert_eq!(disk.metadata().unwrap().len(), 4 * MIB);
        assert_eq!(
            inspect(&disk, &default_log_dir(&disk)).unwrap().size,
            4 * MIB
        );
    }

    #[test]
    fn a_checkpoint_in_use_brings_the_base_image_up_to_date() {
        let dir = tempfile::tempdir().unwrap();
        let disk = create(dir.path());
        let store = open(&disk);
        let live = &store.disks()[0];
        let mut port = live.open_port().unwrap();
        for round in 1..=3 {
            fill(&mut port, 8, round);
            let lsn = live.checkpoint().unwrap();
            assert_eq!(lsn, u64::from(round));
            let image = std::fs::read(&disk).unwrap();
            assert_eq!(image[4096..8192], [round; 4096]);
            // Without new records there is nothing to wait for.
            assert_eq!(live.checkpoint().unwrap(), lsn);
        }
        let live = live.clone();
        drop(port);
        store.close().unwrap();
        let error = live.checkpoint().unwrap_err().to_string();
        assert!(error.contains("being closed"), "{error}");
        assert!(live.grow(2 * MIB).is_err());
    }
}
