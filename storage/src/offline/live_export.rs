//! Copying a disk in use, as of one moment, to a file.
//!
//! ```text
//!   the point is kept ─────────────────────────────────────────────────────▶ and let go
//!   look ── copy ──▶ closed while the log is folded ──▶ look ── copy ──▶ ...
//! ```
//! While a look is open, the log can't be folded. So an export of a log with history closes its
//! look when the log needs room, and goes on with another look at the same point. The point is kept
//! as a snapshot is, but nobody sees it: what the image loses meanwhile is saved beside the log.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::catalog::snapshot::{Snapshot, SnapshotName};
use crate::disk::handle::Disk;
use crate::error::{Error, Result};
use crate::history::look::Look;
use crate::history::point::Point;
use crate::log::export::{TARGET, ended_early, sized};
use crate::log::orders::KeeperTask;
use crate::log::pin::{PinUser, PinnedLog};
use crate::log::state::Log;
use crate::medium::copying::{KERNEL_COPY_BYTES, NamedFile, copy};
use crate::offline::view::{DataPlace, Layers};
use crate::sync;
use crate::sync::atomic::Ordering;
use crate::{Backend, SECTOR_SIZE, Transfer};

/// The copy is synced whenever this many bytes were copied. If the log fills up meanwhile, writers
/// wait for that.
const SYNC_BYTES: u64 = 16 << 20;
/// An export copies for at least this many times as long as it took to open its look, unless
/// writers wait for it.
const COPY_SHARE: u32 = 4;
/// How often an export checks whether the log has room again, and how many times. After that it
/// goes on: the log may stay as full as it is.
const ROOM_POLL: Duration = Duration::from_millis(5);
const ROOM_POLLS: u32 = 1000;

/// A point of a disk in use, kept for an export until this is dropped.
struct KeptPoint<'a> {
    disk: &'a Disk,
    name: SnapshotName,
}

impl<'a> KeptPoint<'a> {
    /// Keeps a point, and opens a look there.
    fn new(disk: &'a Disk, at: Point) -> Result<(Self, Look)> {
        let log = &disk.log;
        let held = disk.hold(PinUser::Export)?;
        let point = point_to_keep(disk, at, &held)?;
        log.order(KeeperTask::KeepPoint(point))?;
        let name = point.name;
        let kept = Self { disk, name };
        let look = Look::at(log, &disk.state, point.lsn, held, None)?;
        Ok((kept, look))
    }

    /// Opens another look at the point.
    fn look(&self) -> Result<Look> {
        let held = self.disk.hold(PinUser::Export)?;
        let (log, state) = (&self.disk.log, &self.disk.state);
        Look::pinned(log, state, Point::Snapshot(self.name), held, None)
    }

    /// Gives the log time to make room. `go_on` fails if the export should end.
    fn await_room(&self, go_on: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        for _ in 0..ROOM_POLLS {
            go_on()?;
            if !should_give_way(&self.disk.log, false) {
                break;
            }
            sync::sleep(ROOM_POLL);
        }
        Ok(())
    }
}

impl Drop for KeptPoint<'_> {
    fn drop(&mut self) {
        // A log that is being closed lets go of it by itself.
        let _ = self.disk.delete_snapshot(self.name);
    }
}

/// The snapshot that keeps a point of a disk for an export.
pub(crate) fn point_to_keep(disk: &Disk, at: Point, held: &PinnedLog) -> Result<Snapshot> {
    static EXPORTS: AtomicU64 = AtomicU64::new(0);
    let (log, disk_id) = (&disk.log, disk.state.id);
    let until = held.resolve(at, log, disk_id)?;
    let commit = held.commit_at(until, log.lock().horizon)?;
    Ok(Snapshot {
        name: SnapshotName::of_export(EXPORTS.fetch_add(1, Ordering::Relaxed)),
        lsn: until,
        cid: commit.cid,
        unix_us: commit.unix_us,
        disk_id: Some(disk_id),
        saved_bytes: 0,
    })
}

/// Whether an export should close its look: writers wait for that; or, unless it is `early`, the
/// log is pressed for room.
pub(crate) fn should_give_way(log: &Log, early: bool) -> bool {
    let state = log.lock();
    state.ring.is_full() || !early && (state.is_pressed() || log.index_is_heavy())
}

/// Refuses to go on with an export if the log is being closed, or can't make room because of its
/// point.
pub(crate) fn refuse_obstruction(log: &Log, point: SnapshotName) -> Result<()> {
    let state = log.lock();
    if state.keeper.stop {
        return Err(ended_early("the log is being closed"));
    }
    let mut inside_rewinds = state.keeper.inside_rewinds.iter();
    let held = inside_rewinds.any(|snapshot| snapshot.name == point);
    if held && state.ring.is_full() {
        return Err(ended_early(
            "a disk of the log was restored in place meanwhile, and the log is full; export it again",
        ));
    }
    Ok(())
}

/// How far an export has come, in bytes.
#[derive(Clone, Copy, Default)]
pub(crate) struct CopyProgress {
    /// Bytes of the disk that were copied or found to be holes.
    pub passed: u64,
    copied: u64,
    /// Of these, those whose copy was synced.
    synced: u64,
}

impl CopyProgress {
    /// Syncs the copy, and drops its cached pages: a large copy must not fill memory with dirty
    /// pages.
    pub(crate) fn sync(&mut self, to: NamedFile<'_>) -> Result<()> {
        self.synced = self.copied;
        let synced = to.file.drop_cache();
        synced.map_err(|error| Error::io("write", to.path, error))
    }
}

impl Disk {
    /// Copies the disk, as of one LSN, to `target`, an empty file open for writing, while requests
    /// go on. Everything that completed before the call is in the copy. Holes stay holes.
    /// `progress` gets the number of bytes passed so far and the disk's size, and returns `false`
    /// to end the export.
    ///
    /// If the log keeps history, what is not copied yet is saved beside the log before a checkpoint
    /// overwrites it, as for a snapshot. Otherwise the log is first copied to the base images, as
    /// by [`checkpoint`](Self::checkpoint), and until the export ends, each checkpoint first copies
    /// to `target` what it is about to overwrite.
    ///
    /// # Errors
    /// As [`checkpoint`](Self::checkpoint), or [`look`](Self::look); if the disk can't be read or
    /// `target` can't be written; if `progress` has ended the export. `target` keeps what was
    /// copied so far.
    pub fn export(
        &self,
        target: File,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Transfer> {
        let keeps_history = self.log.lock().keeps_history();
        if keeps_history {
            self.export_at(Point::Newest, target, progress)
        } else {
            self.export_base(target, progress)
        }
    }

    /// As [`export`](Self::export) with a log that keeps history, but as of a point in the past.
    ///
    /// # Errors
    /// As [`export`](Self::export) and [`look`](Self::look).
    pub fn export_at(
        &self,
        at: Point,
        target: File,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Transfer> {
        let mut opening = sync::now();
        let (point, mut look) = KeptPoint::new(self, at)?;
        let size = look.sectors() * SECTOR_SIZE;
        let to = NamedFile {
            file: &sized(target, size)?,
            path: Path::new(TARGET),
        };
        let mut go_on = |passed: u64| {
            refuse_obstruction(&self.log, point.name)?;
            if progress(passed, size) {
                Ok(())
            } else {
                Err(ended_early("it was given up"))
            }
        };
        let mut done = CopyProgress::default();
        loop {
            let copying = sync::now();
            let until = copying + COPY_SHARE * copying.duration_since(opening);
            copy_while(look.layers(), to, size, &mut done, &mut |passed| {
                go_on(passed)?;
                Ok(!should_give_way(&self.log, sync::now() < until))
            })?;
            if done.passed == size {
                break;
            }
            drop(look);
            done.sync(to)?;
            point.await_room(&mut || go_on(done.passed))?;
            opening = sync::now();
            look = point.look()?;
        }
        progress(size, size);
        Ok(Transfer {
            size,
            copied: done.copied,
            shared: false,
        })
    }
}

/// Copies a disk from `done.passed` on. After each part, `go_on` gets how far that is, and returns
/// whether to go on.
pub(crate) fn copy_while(
    layers: Layers<'_>,
    to: NamedFile<'_>,
    size: u64,
    done: &mut CopyProgress,
    go_on: &mut dyn FnMut(u64) -> Result<bool>,
) -> Result<()> {
    for part in layers.data(done.passed..size, KERNEL_COPY_BYTES) {
        let (range, data) = part?;
        let end = range.end;
        done.copied += copy_part(layers, to, range, &data)?;
        done.passed = end;
        if !go_on(end)? {
            return Ok(());
        }
        if done.copied - done.synced >= SYNC_BYTES {
            done.sync(to)?;
        }
    }
    done.passed = size;
    Ok(())
}

/// Copies a part of a disk to a file of zeroes. Returns how many bytes.
fn copy_part(
    layers: Layers<'_>,
    to: NamedFile<'_>,
    range: Range<u64>,
    data: &DataPlace,
) -> Result<u64> {
    let bytes = range.end - range.start;
    match data {
        DataPlace::Base => copy(layers.base, to, range)?,
        DataPlace::Zero => return Ok(0),
        DataPlace::Log { .. } => layers.read(range, data, &mut |at, bytes: &[u8]| {
            let written = to.file.write_all_at(bytes, at);
            written.map_err(|error| Error::io("write", to.path, error))?;
            Ok(true)
        })?,
    }
    Ok(bytes)
}
