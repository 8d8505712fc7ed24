//! Copying a disk in use, as of one moment, to a file.
//!
//! ```text
//!   the point is kept ─────────────────────────────────────────────────────▶ and let go
//!   look ── copy ──▶ closed while the log makes room ──▶ look ── copy ──▶ ...
//! ```
//! While a look is open, the log can't be copied to the images. So an export closes its look when
//! the log needs room, and goes on with another look at the same point
//! ([`YieldingLook`]). The point is kept as a snapshot is, but nobody sees it: what the image loses
//! meanwhile is saved beside the log.
//!
//! The file that is copied to may not answer. So another thread writes to it, which has no look.

use std::fs::File;
use std::path::Path;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::catalog::snapshot::{Snapshot, SnapshotName};
use crate::copy::yielding_look::{PartData, YieldingLook};
use crate::disk::handle::Disk;
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::log::admission::RoomNeed;
use crate::log::file_thread::FileThread;
use crate::log::holds::{HeldLog, HoldOwner};
use crate::log::orders::KeeperTask;
use crate::log::state::Log;
use crate::medium::copying::{NamedFile, NamedSource, copy};
use crate::medium::file::size_error;
use crate::sync;
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::view::look::Look;
use crate::view::point::Point;
use crate::{Backend, SECTOR_SIZE, Transfer};

/// The copy is synced whenever this many bytes were copied. If the log fills up meanwhile, writers
/// wait for that.
const SYNC_BYTES: u64 = 16 << 20;
/// How often an export checks whether the log has room again, and how many times. After that it
/// goes on: the log may stay as full as it is.
const ROOM_POLL: Duration = Duration::from_millis(5);
const ROOM_POLLS: u32 = 1000;

/// The exported file in errors: only its descriptor is known.
pub(crate) const TARGET: &str = "the exported file";

/// A point of a disk in use, kept for an export until this is dropped.
struct KeptPoint<'a> {
    disk: &'a Disk,
    name: SnapshotName,
}

impl<'a> KeptPoint<'a> {
    /// Keeps a point, and opens a look there. Also returns the bytes of the disk.
    fn new(disk: &'a Disk, at: Point) -> Result<(Self, YieldingLook, u64)> {
        let (log, opening) = (&disk.log, sync::now());
        let held = disk.hold(HoldOwner::Export)?;
        let point = point_to_keep(disk, at, &held)?;
        log.order(KeeperTask::KeepPoint(point))?;
        let name = point.name;
        let kept = Self { disk, name };
        let look = Look::at(log, &disk.state, point.lsn, held, None)?;
        let bytes = look.sectors() * SECTOR_SIZE;
        let yielding = YieldingLook::new(log);
        yielding.open(look, opening);
        Ok((kept, yielding, bytes))
    }

    /// Once the log has room, opens a closed look at the point. `go_on` fails if the export should
    /// end.
    fn open(&self, look: &YieldingLook, go_on: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        self.await_room(go_on)?;
        let opening = sync::now();
        look.open(self.look()?, opening);
        Ok(())
    }

    /// Opens another look at the point.
    fn look(&self) -> Result<Look> {
        let held = self.disk.hold(HoldOwner::Export)?;
        let (log, state) = (&self.disk.log, &self.disk.state);
        if Snapshot::find(self.name, &held.control).is_err() {
            return Err(ended_early(
                "what it needs could not be saved beside the log; make room there, then export \
                 again",
            ));
        }
        Look::in_use(log, state, Point::Snapshot(self.name), held, None)
    }

    /// Gives the log time to make room. `go_on` fails if the export should end.
    fn await_room(&self, go_on: &mut dyn FnMut() -> Result<()>) -> Result<()> {
        for _ in 0..ROOM_POLLS {
            go_on()?;
            let log = &self.disk.log;
            if log.room_need(&log.lock()) == RoomNeed::None {
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
pub(crate) fn point_to_keep(disk: &Disk, at: Point, held: &HeldLog) -> Result<Snapshot> {
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

/// Refuses to go on with an export if the log is being closed, or can't make room because of its
/// point.
pub(crate) fn refuse_obstruction(log: &Log, point: SnapshotName) -> Result<()> {
    let state = log.lock();
    if state.keeper.stop {
        return Err(ended_early("the log is being closed"));
    }
    let stuck = state.keeper.holds.has_stuck_point(point);
    if stuck && (state.ring.is_full() || log.index_is_full()) {
        return Err(ended_early(
            "a disk of the log was restored in place meanwhile, and the log is full; export it \
             again",
        ));
    }
    Ok(())
}

/// How far an export has come, in bytes.
#[derive(Default)]
struct CopyProgress {
    /// Bytes of the disk that were copied or found to be holes.
    passed: u64,
    copied: u64,
    /// Of these, those whose copy was synced.
    synced: u64,
}

impl CopyProgress {
    /// Everything up to `end` is copied; this part had so many bytes.
    fn pass(&mut self, end: u64, bytes: u64) {
        self.passed = end;
        self.copied += bytes;
    }
}

/// What is done to the target.
pub(crate) enum TargetWork {
    /// Make it so many zero bytes long. It must be an empty regular file.
    Size(u64),
    /// Copy a part of the disk to where it is on the disk.
    Copy(PartData),
    /// Sync, and drop cached pages: a large copy must not fill memory with dirty pages.
    Sync,
}

impl TargetWork {
    fn is_of_image(&self) -> bool {
        matches!(self, Self::Copy(PartData::Image(..)))
    }

    /// Returns how many bytes were copied.
    ///
    /// # Errors
    /// If the image can't be read, or the target can't be written or have this size;
    /// [`ErrorKind::InvalidInput`] if it is not fit.
    pub(crate) fn carry_out(self, target: &File) -> Result<u64> {
        let to = NamedFile {
            file: target,
            path: Path::new(TARGET),
        };
        let failed = |error| Error::io("write", to.path, error);
        match self {
            Self::Size(size) => {
                let metadata = target.metadata();
                let metadata = metadata.map_err(|e| Error::io("read its metadata", to.path, e))?;
                if !metadata.is_file() || metadata.len() > 0 {
                    return Err(invalid(format!("{TARGET}: not an empty regular file")));
                }
                let resized = to.file.set_len(size);
                resized.map_err(|error| size_error(to.path, size, error))?;
                Ok(0)
            }
            Self::Copy(PartData::Image(image, path, range)) => {
                let from = NamedSource {
                    file: image.as_ref(),
                    path: &path,
                };
                copy(from, to, range.clone())?;
                Ok(range.end - range.start)
            }
            Self::Copy(PartData::Bytes(bytes, at)) => {
                to.file.write_all_at(&bytes, at).map_err(failed)?;
                Ok(bytes.len() as u64)
            }
            Self::Sync => to.file.drop_cache().map_err(failed).map(|()| 0),
        }
    }
}

/// The target, which may never answer, and the thread that writes to it.
struct ExportTarget {
    file: Arc<File>,
    thread: FileThread,
}

impl ExportTarget {
    /// Has the thread do something, and waits for it. Calls `waiting` meanwhile, which fails if the
    /// export should end. The thread then ends once the target answers.
    fn carry_out(&self, work: TargetWork, waiting: &mut dyn FnMut() -> Result<()>) -> Result<u64> {
        let file = self.file.clone();
        let answer = self.thread.begin(false, move || work.carry_out(&file));
        answer.wait_unless(ROOM_POLL, waiting)?
    }
}

impl Disk {
    /// Copies the disk, as of one LSN, to `target`, an empty file open for writing, while requests
    /// go on. Everything that completed before the call is in the copy. Holes stay holes.
    /// `progress` gets the number of bytes passed so far and the disk's size, and returns `false`
    /// to end the export.
    ///
    /// What is not copied yet is saved beside the log before a checkpoint overwrites it, as for a
    /// snapshot. So nothing but this thread waits for `target`.
    ///
    /// # Errors
    /// As [`look`](Self::look); if the disk can't be read or `target` can't be written; if
    /// `progress` has ended the export. `target` keeps what was copied so far.
    pub fn export(
        &self,
        target: File,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Transfer> {
        self.export_at(Point::Newest, target, progress)
    }

    /// As [`export`](Self::export), but as of a point in the past.
    ///
    /// # Errors
    /// As [`export`](Self::export) and [`look`](Self::look).
    pub fn export_at(
        &self,
        at: Point,
        target: File,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Transfer> {
        let (point, look, size) = KeptPoint::new(self, at)?;
        let target = ExportTarget {
            file: Arc::new(target),
            thread: FileThread::default(),
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
        let mut due = Some(TargetWork::Size(size));
        loop {
            let (work, end) = if let Some(work) = due.take() {
                (work, None)
            } else {
                match look.next(done.passed..size)? {
                    Some(Some(part)) => (TargetWork::Copy(part.data), Some(part.end)),
                    Some(None) => break,
                    None => {
                        point.open(&look, &mut || go_on(done.passed))?;
                        continue;
                    }
                }
            };
            let (passed, is_of_image) = (done.passed, work.is_of_image());
            let bytes = target.carry_out(work, &mut || {
                look.give_way();
                go_on(passed)
            })?;
            match end {
                None => done.synced = done.copied,
                Some(end) if look.is_open() || !is_of_image => done.pass(end, bytes),
                // The image may have changed since the look was closed.
                Some(_) => {}
            }
            go_on(done.passed)?;
            let syncs = look.give_way() || done.copied - done.synced >= SYNC_BYTES;
            due = end.filter(|_| syncs).map(|_| TargetWork::Sync);
        }
        progress(size, size);
        Ok(Transfer {
            size,
            copied: done.copied,
            shared: false,
        })
    }
}

/// The error of an export that is ended before it is complete.
fn ended_early(why: &str) -> Error {
    Error::new(ErrorKind::Io, format!("{TARGET}: not complete: {why}"))
}
