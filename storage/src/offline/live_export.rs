//! Copying a disk in use, as of one moment, to a file.
//!
//! ```text
//!   the point is kept ─────────────────────────────────────────────────────▶ and let go
//!   look ── copy ──▶ closed while the log makes room ──▶ look ── copy ──▶ ...
//! ```
//! While a look is open, the log can't be copied to the images. So an export closes its look when
//! the log needs room, and goes on with another look at the same point. The point is kept
//! as a snapshot is, but nobody sees it: what the image loses meanwhile is saved beside the log.
//!
//! The file that is copied to may not answer. So another thread writes to it, which has no look.

use std::collections::VecDeque;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use crate::catalog::snapshot::{Snapshot, SnapshotName};
use crate::disk::handle::Disk;
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::history::look::Look;
use crate::history::point::Point;
use crate::log::file_thread::FileThread;
use crate::log::image::Image;
use crate::log::orders::KeeperTask;
use crate::log::pin::{PinUser, PinnedLog};
use crate::log::state::Log;
use crate::medium::copying::{COPY_BYTES, KERNEL_COPY_BYTES, NamedFile, NamedSource, copy};
use crate::medium::file::{ReadFile, size_error};
use crate::medium::segment::LogRead;
use crate::offline::view::DataPlace;
use crate::sync;
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::{Backend, Buffer, SECTOR_SIZE, Transfer};

/// Bytes of the disk whose parts are listed at a time.
const LISTED_BYTES: u64 = 64 << 20;
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

/// The exported file in errors: only its descriptor is known.
pub(crate) const TARGET: &str = "the exported file";

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
        if Snapshot::find(self.name, &held.control).is_err() {
            return Err(ended_early(
                "what it needs could not be saved beside the log; make room there, then export again",
            ));
        }
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
    let waited_for = state.ring.is_full() || log.index_is_full();
    waited_for || !early && (state.is_pressed() || log.index_is_heavy())
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
    if held && (state.ring.is_full() || log.index_is_full()) {
        return Err(ended_early(
            "a disk of the log was restored in place meanwhile, and the log is full; export it again",
        ));
    }
    Ok(())
}

/// How far an export has come, in bytes.
#[derive(Default)]
pub(crate) struct CopyProgress {
    /// Bytes of the disk that were copied or found to be holes.
    pub passed: u64,
    copied: u64,
    /// Of these, those whose copy was synced.
    synced: u64,
    /// The next parts with data, up to `listed`.
    parts: VecDeque<(Range<u64>, DataPlace)>,
    listed: u64,
}

/// A part of the disk to copy.
pub(crate) struct CopyPart {
    /// Where it ends.
    pub end: u64,
    pub work: TargetWork,
}

impl CopyProgress {
    /// The next part, as a look shows it; `None` if there is none before `size`.
    ///
    /// # Errors
    /// If the look can't be read.
    pub(crate) fn next(&mut self, look: &Look, size: u64) -> Result<Option<CopyPart>> {
        let layers = look.layers();
        loop {
            let Some((range, data)) = self.parts.pop_front() else {
                let from = self.passed.max(self.listed);
                if from >= size {
                    self.passed = size;
                    return Ok(None);
                }
                self.listed = from.saturating_add(LISTED_BYTES).min(size);
                let parts = layers.data(from..self.listed, KERNEL_COPY_BYTES);
                self.parts = parts.collect::<Result<_>>()?;
                continue;
            };
            let (start, mut end) = (range.start, range.end);
            let work = match data {
                DataPlace::Zero => continue,
                DataPlace::Base => {
                    let (image, path) = (look.past.base.clone(), look.past.path.clone());
                    TargetWork::Image(image, path, range)
                }
                DataPlace::Log { segment, offset } => {
                    if end - start > COPY_BYTES {
                        end = start + COPY_BYTES;
                        let rest = DataPlace::Log {
                            segment: segment.clone(),
                            offset: offset + COPY_BYTES,
                        };
                        self.parts.push_front((end..range.end, rest));
                    }
                    let read = LogRead::new(segment, offset, (end - start) as usize);
                    TargetWork::Bytes(read.read()?, start)
                }
            };
            return Ok(Some(CopyPart { end, work }));
        }
    }

    /// Lists the parts again: the look at them is closed.
    pub(crate) fn close_look(&mut self) {
        self.parts.clear();
        self.listed = 0;
    }

    /// Everything up to `end` is copied; this part had so many bytes.
    pub(crate) fn pass(&mut self, end: u64, bytes: u64) {
        self.passed = end;
        self.copied += bytes;
    }
}

/// What is done to the target.
pub(crate) enum TargetWork {
    /// Make it so many zero bytes long. It must be an empty regular file.
    Size(u64),
    /// Copy a range of the image at this path.
    Image(Arc<Image>, PathBuf, Range<u64>),
    /// Write these bytes at an offset.
    Bytes(Buffer, u64),
    /// Sync, and drop cached pages: a large copy must not fill memory with dirty pages.
    Sync,
}

impl TargetWork {
    fn is_of_image(&self) -> bool {
        matches!(self, Self::Image(..))
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
            Self::Image(image, path, range) => {
                let from = NamedSource {
                    file: image.as_ref(),
                    path: &path,
                };
                copy(from, to, range.clone())?;
                Ok(range.end - range.start)
            }
            Self::Bytes(bytes, at) => {
                to.file.write_all_at(&bytes, at).map_err(failed)?;
                Ok(bytes.len() as u64)
            }
            Self::Sync => to.file.drop_cache().map_err(failed).map(|()| 0),
        }
    }
}

/// The target, which may never answer, and the thread that writes to it.
struct Target {
    file: Arc<File>,
    thread: FileThread,
}

impl Target {
    /// Has the thread do something, and waits for it. Calls `waiting` meanwhile, which fails if the
    /// export should end. The thread then ends once the target answers.
    fn carry_out(&self, work: TargetWork, waiting: &mut dyn FnMut() -> Result<()>) -> Result<u64> {
        let file = self.file.clone();
        let answer = self.thread.begin(false, move || work.carry_out(&file));
        answer.wait_unless(ROOM_POLL, waiting)?
    }
}

/// A disk in use as of one point, for reads. It holds the log back no more than an
/// [export](Disk::export) does: its look is closed while the log needs room.
pub struct PointReader<'a> {
    point: KeptPoint<'a>,
    look: Option<Look>,
    /// Until when the look stays open unless writers wait for it.
    until: Instant,
    bytes: u64,
    /// Reads the image, which may not answer.
    thread: FileThread,
}

impl PointReader<'_> {
    /// Bytes of the disk.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Closes its look if the log needs room. Call it whenever some milliseconds pass without a
    /// read.
    ///
    /// # Errors
    /// The log is being closed, or can't make room because of the point: no read succeeds any more.
    pub fn give_way(&mut self) -> Result<()> {
        let log = &self.point.disk.log;
        if self.look.is_some() && should_give_way(log, sync::now() < self.until) {
            self.look = None;
        }
        refuse_obstruction(log, self.point.name)
    }

    /// Fills `bytes` with what the disk had from byte `at` on: whole sectors of it. While the image
    /// does not answer, `go_on` is called, which returns `false` to give up.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind) for a range that is not of whole sectors, or
    /// not on the disk; or it can't be read, or was given up, or as [`give_way`](Self::give_way).
    pub fn read(
        &mut self,
        bytes: &mut [u8],
        at: u64,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        let len = bytes.len() as u64;
        let end = at.checked_add(len).filter(|end| *end <= self.bytes);
        let Some(end) = end.filter(|_| (at | len).is_multiple_of(SECTOR_SIZE)) else {
            return Err(invalid(format!(
                "{}: {len} bytes at {at} are not whole sectors of its {} bytes",
                self.point.disk.path().display(),
                self.bytes
            )));
        };
        while !self.fill(bytes, at..end, go_on)? {}
        Ok(())
    }

    /// Reads a range. `false`: the look was closed meanwhile, and the image may have changed.
    fn fill(
        &mut self,
        bytes: &mut [u8],
        range: Range<u64>,
        go_on: &mut dyn FnMut() -> bool,
    ) -> Result<bool> {
        self.give_way()?;
        let look = match self.look.take() {
            Some(look) => look,
            None => {
                let (log, name) = (&self.point.disk.log, self.point.name);
                self.point
                    .await_room(&mut || refuse_obstruction(log, name))?;
                let opening = sync::now();
                let look = self.point.look()?;
                self.until = copies_until(opening);
                look
            }
        };
        let (image, path) = (look.past.base.clone(), look.past.path.clone());
        let parts = look.layers().data(range.clone(), KERNEL_COPY_BYTES);
        let parts: Vec<_> = parts.collect::<Result<_>>()?;
        self.look = Some(look);
        bytes.fill(0);
        for (part, data) in parts {
            let len = (part.end - part.start) as usize;
            let read = match data {
                DataPlace::Zero => continue,
                DataPlace::Log { segment, offset } => LogRead::new(segment, offset, len).read()?,
                DataPlace::Base => {
                    if self.thread.is_busy() {
                        return Err(ended_early("an earlier read of the image has not ended"));
                    }
                    let (image, from) = (image.clone(), part.start);
                    let answer = self.thread.begin(false, move || {
                        let mut read = Buffer::for_overwrite(len);
                        image.read_exact_at(&mut read, from).map(|()| read)
                    });
                    let read = answer.wait_unless(ROOM_POLL, || {
                        self.give_way()?;
                        if go_on() {
                            return Ok(());
                        }
                        Err(ended_early("it was given up"))
                    })?;
                    read.map_err(|error| Error::io("read the base image", &path, error))?
                }
            };
            if self.look.is_none() {
                return Ok(false);
            }
            let place = (part.start - range.start) as usize;
            bytes[place..place + len].copy_from_slice(&read);
        }
        Ok(true)
    }
}

impl Disk {
    /// Opens the disk, as of one point, for reads that take long. What the disk loses meanwhile is
    /// saved beside the log, as for a snapshot, until the reader is dropped.
    ///
    /// # Errors
    /// As [`look`](Self::look).
    pub fn reader_at(&self, at: Point) -> Result<PointReader<'_>> {
        let opening = sync::now();
        let (point, look) = KeptPoint::new(self, at)?;
        Ok(PointReader {
            bytes: look.sectors() * SECTOR_SIZE,
            until: copies_until(opening),
            look: Some(look),
            thread: FileThread::default(),
            point,
        })
    }

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
        let opening = sync::now();
        let (point, look) = KeptPoint::new(self, at)?;
        let size = look.sectors() * SECTOR_SIZE;
        let target = Target {
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
        let mut until = copies_until(opening);
        let mut look = Some(look);
        let mut due = Some(TargetWork::Size(size));
        loop {
            let (work, end) = match (due.take(), &look) {
                (Some(work), _) => (work, None),
                (None, Some(look)) => match done.next(look, size)? {
                    Some(part) => (part.work, Some(part.end)),
                    None => break,
                },
                (None, None) => {
                    point.await_room(&mut || go_on(done.passed))?;
                    let opening = sync::now();
                    look = Some(point.look()?);
                    until = copies_until(opening);
                    continue;
                }
            };
            let (passed, is_of_image) = (done.passed, work.is_of_image());
            let bytes = target.carry_out(work, &mut || {
                if should_give_way(&self.log, sync::now() < until) {
                    look = None;
                }
                go_on(passed)
            })?;
            match end {
                None => done.synced = done.copied,
                Some(end) if look.is_some() || !is_of_image => done.pass(end, bytes),
                // The image may have changed since the look was closed.
                Some(_) => {}
            }
            go_on(done.passed)?;
            let gives_way = look.is_none() || should_give_way(&self.log, sync::now() < until);
            if gives_way {
                look = None;
                done.close_look();
            }
            let syncs = gives_way || done.copied - done.synced >= SYNC_BYTES;
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

/// Until when an export copies, whose look began to open at `opening` and is open now.
fn copies_until(opening: Instant) -> Instant {
    let now = sync::now();
    now + COPY_SHARE * now.duration_since(opening)
}

/// The error of an export that is ended before it is complete.
fn ended_early(why: &str) -> Error {
    Error::new(ErrorKind::Io, format!("{TARGET}: not complete: {why}"))
}
