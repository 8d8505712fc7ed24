//! A look: a disk as it was at a point in its history. The disk is not in use, or its owner opens
//! the look.
//!
//! ```text
//!   LookQueue ──write──▶ scratch file (if there is one: else writes fail)
//!      ▲  └─────read──▶ scratch file ─ gaps ─▶ extents of the log up to the point ─ gaps ─▶ base image
//!      │                 └──▶ engine ──▶ verified, put together
//!      └── completions ◀── event descriptor
//! ```
//! A look reads as a live disk does (`log::reads`), but has no log to write to.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::{Path, PathBuf};

use slab::Slab;
use smallvec::SmallVec;

use crate::catalog::control::ControlFile;
use crate::catalog::snapshot::{SavedFiles, Snapshot};
use crate::error::Error;
use crate::format::Control;
use crate::index::allocation::{ExtentLookUp, disk_extents, push};
use crate::index::{ExtentLimit, ExtentMap, Piece};
use crate::log::commit::{Commit, PositionCache, SavedExtentsCache};
use crate::log::disk_state::DiskState;
use crate::log::holds::{HeldLog, OpenHold};
use crate::log::image::DiskImage;
use crate::log::reads::{InFlightReads, PartOrigin, ReadPart, check_read};
use crate::log::ring::LiveSegment;
use crate::log::state::Log;
use crate::medium::engine;
use crate::medium::file::{Chunk, Engine, Io, IoCompletion};
use crate::medium::filesystem::{FileSystem, shared_files};
use crate::recovery::live::read_live;
use crate::recovery::replay::read_live_disk;
use crate::recovery::scan::FoundRecord;
use crate::sync::{Arc, Event};
use crate::view::changed::{ChangesSince, SavedExtents, push_change, saved_since, unknown_point};
use crate::view::point::Point;
use crate::view::saved::read_saved;
use crate::view::scratch::{Scratch, ScratchContent};
use crate::{
    Allocation, Backend, BackendQueue, Buffer, Capabilities, Change, Completion, EngineKind,
    Extent, Failure, MAX_REQUEST_BYTES, Mapped, Operation, PastPoint, SECTOR_SIZE, Tracked,
    check_range,
};

/// Engine ids from here on are writes; those below are reads.
const WRITES: u64 = 1 << 63;

/// A disk as it was at a point in its history. Reads of damaged bytes fail. Writes fail too, or go
/// to a scratch file. A FLUSH succeeds at once, because nothing here outlives the look.
///
/// If the disk is not in use, it and its log are locked as for [`export_disk`](crate::export_disk):
/// other looks may be open at the same time, and nobody can write to the disk. The owner of a disk
/// in use opens looks with [`Disk::look`](crate::Disk::look).
pub struct Look {
    pub(crate) past: Arc<PastDisk>,
}

/// The disk as of the point, for all queues.
pub(crate) struct PastDisk {
    pub path: PathBuf,
    pub sectors: u64,
    pub base: Arc<DiskImage>,
    pub extents: ExtentMap,
    pub scratch: Option<Scratch>,
    /// The log's segments, and their size in bytes.
    pub live: Vec<LiveSegment>,
    pub segment_size: u64,
    pub positions: PositionCache,
    /// The disk's number, and the LSN of the point.
    pub disk_id: u32,
    pub until: u64,
    /// The log's saved files, and what was last read from them.
    pub log_dir: PathBuf,
    pub files: SavedFiles,
    pub saved_since: SavedExtentsCache,
    /// The snapshots before the point.
    pub points: Vec<PastPoint>,
    /// The last field: the log may move on only when nothing else here needs it.
    pub hold: LogHold,
}

/// What keeps the log from changing.
pub(crate) enum LogHold {
    /// The disk is not in use: its log is locked.
    Closed {
        engine: EngineKind,
        /// The memory limit of the look's extents, change maps included.
        limit: ExtentLimit,
        _log: Option<Box<ControlFile>>,
    },
    /// The disk is in use: its log is held.
    Live { log: Arc<Log>, _hold: OpenHold },
}

impl LogHold {
    fn engine(&self, event: &Event) -> io::Result<Box<dyn Engine>> {
        match self {
            Self::Closed { engine, .. } => engine::create(*engine, event),
            Self::Live { log, .. } => log.medium.engine(event),
        }
    }

    /// The file system of the log's other files.
    fn files(&self) -> Arc<dyn FileSystem> {
        match self {
            Self::Closed { .. } => shared_files(),
            Self::Live { log, .. } => log.medium.files(),
        }
    }

    /// The memory limit of extents.
    fn limit(&self) -> ExtentLimit {
        match self {
            Self::Closed { limit, .. } => limit.clone(),
            Self::Live { log, .. } => log.beside_limit(),
        }
    }

    fn blocks(&self) -> bool {
        match self {
            Self::Closed { engine, .. } => *engine == EngineKind::Blocking,
            Self::Live { log, .. } => log.medium.blocks(),
        }
    }
}

/// A piece of the disk.
enum LookPiece {
    /// As it was.
    Past(Piece),
    /// Written or zeroed in the look.
    Changed(Range<u64>, ScratchContent),
}

impl PastDisk {
    /// Calls `each` with the parts of a range, in order.
    fn visit(&self, sectors: Range<u64>, each: &mut impl FnMut(LookPiece)) {
        let past = |sectors: Range<u64>, each: &mut dyn FnMut(LookPiece)| {
            let (first, count) = (sectors.start, sectors.end - sectors.start);
            let piece = &mut |piece| each(LookPiece::Past(piece));
            self.extents.visit(first, count, piece);
        };
        match &self.scratch {
            None => past(sectors, each),
            Some(scratch) => scratch
                .layer()
                .visit(sectors, &mut |part, content| match content {
                    None => past(part, each),
                    Some(content) => each(LookPiece::Changed(part, content)),
                }),
        }
    }

    /// What has changed since a snapshot.
    fn since(&self, lsn: u64) -> crate::Result<ChangesSince> {
        // The base images may have moved past this look's point too.
        let (passed, end) = if self.files.has(self.until, self.disk_id) {
            (true, self.until)
        } else {
            (false, u64::MAX)
        };
        let (medium, disk) = (
            self.hold.files(),
            (self.disk_id, self.sectors * SECTOR_SIZE),
        );
        let lsns = lsn..end;
        let saved = saved_since(
            &*medium,
            &self.log_dir,
            &self.files,
            disk,
            lsns,
            (&self.saved_since, self.hold.limit()),
        )?;
        match saved {
            Some(extents) => {
                let and_log = !passed;
                Ok(ChangesSince::saved(lsn, SavedExtents { extents, and_log }))
            }
            None => ChangesSince::new(lsn, &self.live, self.segment_size, &self.positions),
        }
    }

    /// The parts for a read.
    fn parts(&self, seen: LookPiece) -> SmallVec<[ReadPart; 1]> {
        match (seen, &self.scratch) {
            (LookPiece::Past(piece), _) => ReadPart::of(piece, &self.base),
            (LookPiece::Changed(sectors, content), scratch) => SmallVec::from_buf([ReadPart {
                sector: sectors.start,
                sectors: sectors.end - sectors.start,
                origin: match (content, scratch) {
                    (ScratchContent::Written, Some(scratch)) => PartOrigin::File(scratch.file()),
                    _ => PartOrigin::Zero,
                },
            }]),
        }
    }
}

/// The disk's snapshots for which the changes up to this LSN are known.
pub(crate) fn points(control: &Control, disk_id: u32, last_lsn: u64) -> Vec<PastPoint> {
    let from = control.applied_lsn(disk_id);
    let known = |lsn| {
        let there = from <= lsn || control.has_saved(lsn, disk_id);
        there && control.is_continuous(disk_id, lsn, last_lsn)
    };
    let all = Snapshot::all(control).into_iter();
    all.filter(|snapshot| !snapshot.name.is_of_export())
        .filter(|snapshot| snapshot.has(disk_id) && known(snapshot.lsn))
        .map(PastPoint::from)
        .collect()
}

/// A scratch area in the file, if there is one, for a disk of `bytes` bytes.
pub(crate) fn sized(
    file: Option<File>,
    bytes: u64,
    path: &Path,
    limit: &ExtentLimit,
) -> crate::Result<Option<Scratch>> {
    let scratch = file.map(|file| Scratch::new(file, bytes, limit.clone()));
    let scratch = scratch.transpose();
    scratch.map_err(|error| Error::io("size the scratch file for", path, error))
}

impl HeldLog {
    /// Resolves a point of a disk to its LSN.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind) if the disk can't be brought back to it; or the
    /// log can't be read.
    pub(crate) fn resolve(&self, at: Point, log: &Log, disk_id: u32) -> crate::Result<u64> {
        if at == Point::Newest {
            return Ok(self.newest);
        }
        let (control, threads) = (&self.control, log.medium.threads());
        at.resolve(&log.dir, control, disk_id, |visit| {
            let visit = &mut |found: FoundRecord<'_>| visit(&found.commit());
            read_live(&self.segments, self.newest, control, threads, visit)
        })
    }

    /// The last commit up to an LSN; `horizon` if there is none in the log.
    pub(crate) fn commit_at(&self, lsn: u64, horizon: Commit) -> crate::Result<Commit> {
        let mut last = horizon;
        let ends = self.segments.iter().map(|(_, last_lsn)| *last_lsn);
        let passed = ends.take_while(|end| *end < lsn).count();
        let visit = &mut |found: FoundRecord<'_>| {
            if found.lsn <= lsn {
                last = found.commit();
            }
        };
        // Its segment, and the one before, in case it is a restore in place between them.
        let segments = self.segments.iter().skip(passed.saturating_sub(1)).take(2);
        let segments: Vec<_> = segments.cloned().collect();
        read_live(&segments, self.newest, &self.control, 1, visit)?;
        Ok(last)
    }
}

impl Look {
    /// Opens a disk in use as it was at a point, on its held log.
    pub(crate) fn in_use(
        log: &Arc<Log>,
        disk: &DiskState,
        at: Point,
        held: HeldLog,
        scratch: Option<File>,
    ) -> crate::Result<Self> {
        let until = held.resolve(at, log, disk.id)?;
        Self::at(log, disk, until, held, scratch)
    }

    /// As [`in_use`](Self::in_use), for a point that was resolved.
    pub(crate) fn at(
        log: &Arc<Log>,
        disk: &DiskState,
        until: u64,
        held: HeldLog,
        scratch: Option<File>,
    ) -> crate::Result<Self> {
        let HeldLog {
            segments,
            control,
            hold,
            ..
        } = held;
        let threads = log.medium.threads();
        let entry = control.disk(disk.id);
        let bytes = entry.map_or(disk.sectors() * SECTOR_SIZE, |entry| entry.size.get());
        let (files, saved_files) = (log.medium.files(), control.saved_files());
        let of = (disk.id, bytes);
        let (lsns, limit) = (until..u64::MAX, Some(log.beside_limit()));
        let saved = read_saved(&*files, &log.dir, &saved_files, of, lsns, limit.clone())?;
        let extents = match saved {
            Some(extents) => extents,
            None => {
                let of = (&control, disk.id, &*log.dir);
                read_live_disk(&segments, until, of, threads, limit)?
            }
        };
        let past = PastDisk {
            scratch: sized(scratch, bytes, &disk.path, &log.beside_limit())?,
            path: disk.path.clone(),
            sectors: bytes / SECTOR_SIZE,
            base: disk.base.clone(),
            extents,
            live: log.lock().ring.all_live(),
            segment_size: log.segment_size,
            positions: PositionCache::default(),
            disk_id: disk.id,
            until,
            log_dir: log.dir.clone(),
            files: saved_files,
            saved_since: SavedExtentsCache::default(),
            points: points(&control, disk.id, until),
            hold: LogHold::Live {
                log: log.clone(),
                _hold: hold,
            },
        };
        Ok(Look {
            past: Arc::new(past),
        })
    }
}

impl Backend for Look {
    fn sectors(&self) -> u64 {
        self.past.sectors
    }

    fn capabilities(&self) -> Capabilities {
        let writable = self.past.scratch.is_some();
        Capabilities {
            read_only: !writable,
            flush: true,
            write_cache_toggle: false,
            discard: writable,
            write_zeroes: writable,
            secure_erase: false,
        }
    }

    fn write_cache(&self) -> bool {
        true
    }

    fn set_write_cache(&self, _on: bool) {}

    fn open_queue(&self) -> io::Result<Box<dyn BackendQueue>> {
        let event = Event::new()?;
        Ok(Box::new(LookQueue {
            past: self.past.clone(),
            engine: self.past.hold.engine(&event)?,
            event,
            reads: InFlightReads::default(),
            writes: Slab::new(),
            parts: Vec::new(),
            ended: Vec::new(),
            done: Vec::new(),
        }))
    }

    /// The blocking engine reads in the submitting thread.
    fn blocks(&self) -> bool {
        self.past.hold.blocks()
    }

    fn mapped(&self) -> Option<&dyn Mapped> {
        Some(self)
    }

    fn tracked(&self) -> Option<&dyn Tracked> {
        Some(self)
    }

    fn is_unsafe(&self) -> bool {
        self.past.scratch.is_some()
    }
}

impl Mapped for Look {
    fn extents(&self, sector: u64, sectors: u64, most: usize) -> io::Result<Vec<Extent>> {
        let past = &self.past;
        let mut look_up = ExtentLookUp::new(&*past.base, &past.path, most);
        let append = |sector, sectors, extents: &mut Vec<Extent>| {
            let mut goes_on = Ok(true);
            past.visit(sector..sector + sectors, &mut |seen| match seen {
                _ if !matches!(goes_on, Ok(true)) => {}
                LookPiece::Past(piece) => goes_on = look_up.push_piece(&piece, extents),
                LookPiece::Changed(part, content) => {
                    let allocation = match content {
                        ScratchContent::Written => Allocation::Data,
                        ScratchContent::Zero => Allocation::Hole,
                    };
                    push(extents, part.end - part.start, allocation);
                }
            });
            goes_on
        };
        Ok(disk_extents(sector, sectors, past.sectors, most, append)?)
    }
}

impl Tracked for Look {
    /// The snapshots before the point, by name and LSN.
    fn past_points(&self) -> Vec<PastPoint> {
        self.past.points.clone()
    }

    /// Includes what was written to the scratch file.
    fn changes(
        &self,
        since: u64,
        sector: u64,
        sectors: u64,
        most: usize,
    ) -> io::Result<Vec<Change>> {
        let past = &self.past;
        if past.points.iter().all(|point| point.number != since) {
            return Err(unknown_point(since).into());
        }
        let since = past.since(since)?;
        let append = |sector, sectors, changes: &mut Vec<Change>| {
            past.visit(sector..sector + sectors, &mut |seen| match seen {
                LookPiece::Past(piece) => since.append(&piece, changes),
                LookPiece::Changed(part, _) => push_change(changes, part.end - part.start, true),
            });
            Ok(true)
        };
        Ok(disk_extents(sector, sectors, past.sectors, most, append)?)
    }
}

/// One queue of a look.
struct LookQueue {
    past: Arc<PastDisk>,
    engine: Box<dyn Engine>,
    event: Event,
    reads: InFlightReads,
    /// The writes in flight: their tokens and sectors. The engine id of a write is its key here and
    /// [`WRITES`].
    writes: Slab<(u64, Range<u64>)>,
    /// Completions of requests that needed no I/O.
    done: Vec<Completion>,
    /// Scratch lists for the next read's parts, and for ended operations.
    parts: Vec<ReadPart>,
    ended: Vec<IoCompletion>,
}

/// The outcome of submitting a request: it has ended, with a read's data; or `None`: its completion
/// comes later.
type RequestOutcome = Option<Option<Buffer>>;

impl LookQueue {
    fn read(&mut self, token: u64, sector: u64, sectors: u32) -> Result<RequestOutcome, Failure> {
        let past = &self.past;
        check_read(sector, sectors, past.sectors)?;
        let range = sector..sector + u64::from(sectors);
        past.visit(range, &mut |seen| self.parts.extend(past.parts(seen)));
        let submit = |id, io| self.engine.submit(id, io);
        let parts = self.parts.drain(..);
        let read = self.reads.begin(token, sector, sectors, parts, submit)?;
        Ok(read.map(Some))
    }

    fn write(&mut self, token: u64, sector: u64, data: Buffer) -> Result<RequestOutcome, Failure> {
        let scratch = self.past.scratch.as_ref().ok_or(Failure::ReadOnly)?;
        let len = data.len();
        if !len.is_multiple_of(SECTOR_SIZE as usize) || len > MAX_REQUEST_BYTES {
            return Err(Failure::TooLarge);
        }
        let count = len as u64 / SECTOR_SIZE;
        check_range(sector, count, self.past.sectors)?;
        let sectors = sector..sector + count;
        let reserved = scratch.reserve(&sectors);
        reserved.map_err(|error| write_failed(&self.past.path, &error))?;
        let write = Io::Write {
            base: scratch.file(),
            offset: sector * SECTOR_SIZE,
            chunks: vec![Chunk {
                buffer: data.share(),
                len,
            }],
        };
        let key = self.writes.insert((token, sectors));
        self.engine.submit(WRITES | key as u64, write);
        Ok(None)
    }

    fn zero(&mut self, sector: u64, sectors: u32) -> Result<RequestOutcome, Failure> {
        let scratch = self.past.scratch.as_ref().ok_or(Failure::ReadOnly)?;
        check_range(sector, u64::from(sectors), self.past.sectors)?;
        let zeroed = scratch.zero(sector..sector + u64::from(sectors));
        zeroed.map_err(|error| write_failed(&self.past.path, &error))?;
        Ok(Some(None))
    }

    /// Handles the end of an operation.
    fn end(&mut self, end: IoCompletion) {
        let past = &self.past;
        if end.id & WRITES == 0 {
            return self.done.extend(self.reads.end_part(&past.path, end));
        }
        let key = (end.id & !WRITES) as usize;
        let Some((token, sectors)) = self.writes.try_remove(key) else {
            return;
        };
        let result = match (end.result, &past.scratch) {
            (Ok(_), Some(scratch)) => {
                // Only now do reads find it: a failed write leaves what was there before.
                scratch.layer().set(sectors, ScratchContent::Written);
                Ok(None)
            }
            (Ok(_), None) => Ok(None),
            (Err(error), _) => Err(write_failed(&past.path, &error)),
        };
        self.done.push(Completion { token, result });
    }
}

fn write_failed(path: &Path, error: &io::Error) -> Failure {
    let path = path.display();
    tracing::error!("{path}: a write to the scratch file failed: {error}");
    Failure::Io
}

impl BackendQueue for LookQueue {
    fn submit(&mut self, token: u64, operation: Operation) {
        let begun = match operation {
            Operation::Read { sector, sectors } => self.read(token, sector, sectors),
            Operation::Write { sector, data } => self.write(token, sector, data),
            Operation::Discard { sector, sectors }
            | Operation::WriteZeroes {
                sector, sectors, ..
            } => self.zero(sector, sectors),
            Operation::Flush => Ok(Some(None)),
        };
        if let Some(result) = begun.transpose() {
            self.done.push(Completion { token, result });
        }
    }

    fn kick(&mut self) {
        self.engine.enter();
    }

    fn event(&self) -> BorrowedFd<'_> {
        self.event.fd()
    }

    fn completions(&mut self, done: &mut Vec<Completion>) {
        // Clear the event first, so that no later signal is lost.
        self.event.clear();
        let mut ended = std::mem::take(&mut self.ended);
        self.engine.poll(&mut ended);
        ended.drain(..).for_each(|end| self.end(end));
        self.ended = ended;
        done.append(&mut self.done);
    }
}
