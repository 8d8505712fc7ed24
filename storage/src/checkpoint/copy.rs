//! Copying frozen index layers to the base images: the part of a checkpoint that moves bytes.
//!
//! ```text
//!   frozen layers ──▶ runs and stripes ──▶ reads ──▶ one write a run ──▶ base images ──▶ sync
//!   (by sector)       (`runs.rs`)          (of the log; many runs in flight, see `pace.rs`)
//! ```
//! A layer's extents are disjoint, and so are runs. Many are in flight and end in any order, as
//! MariaDB's replicas apply the transactions of one commit group in parallel. The order of the
//! records is already settled: a layer has only the newest extent of each sector.
//!
//! If many small parts of a segment are needed, they are read through the page cache, see
//! [`Readahead`].

use std::collections::{HashMap, VecDeque};
use std::io;
use std::iter::Peekable;
use std::ops::Range;
use std::time::{Duration, Instant};

use crate::checkpoint::pace::{CopyPace, IN_FLIGHT_RUNS};
use crate::checkpoint::readahead::Readahead;
use crate::checkpoint::runs::{Run, Stripes};
use crate::error::{Error, ErrorKind, Result};
use crate::index::{ExtentMap, Location, Piece};
use crate::log::disk_state::DiskState;
use crate::log::state::Log;
use crate::medium::cost::MediumCost;
use crate::medium::file::{Chunk, Engine, Io, IoCompletion, MAX_CHUNKS, ReadFile, ReadSource};
use crate::medium::holes::DataRanges;
use crate::medium::segment::LogRead;
use crate::mutant::{Mutant, planted};
use crate::sync::atomic::Ordering;
use crate::sync::{self, Arc, Event};
use crate::{BUFFER_ALIGN, Buffer, SECTOR_SIZE};

/// Most bytes of buffers in flight, unless one run needs more.
const IN_FLIGHT_BYTES: usize = 8 << 20;
/// Longest pause between two calls of `urgent_work`.
const TEND: Duration = Duration::from_millis(20);
/// How often a copy ahead of schedule checks whether it still is.
pub(crate) const SHORT: Duration = Duration::from_millis(1);

/// Mean time of a write above which an image is too slow, if writers wait for the copy and the
/// log's own syncs take less than a tenth of it.
const SLOW_WRITE: Duration = Duration::from_millis(100);
const SLOW_AGAINST_SYNC: u32 = 10;
/// An image that is silent for this long counts as failing, whether or not anybody waits for it.
pub(crate) const LONGEST_SILENCE: Duration = Duration::from_secs(5);
/// Longest wait for one sync of an image, or one search for holes, on a log with several disks.
const OPERATION_LIMIT: Duration = Duration::from_secs(2);
/// After a longer time between two looks at operations, nothing is known of how long they took.
const AWAY: Duration = Duration::from_millis(50);
/// Most writes in flight to an image that is slow, or has not answered one of this copy yet.
const FIRST_WRITES: usize = 4;

/// A run in flight.
struct InFlightRun<'a> {
    disk: &'a Arc<DiskState>,
    sector: u64,
    bytes: usize,
    /// Bytes of its buffers.
    memory: usize,
    /// Its cost to the medium.
    cost: u64,
    /// The run's pieces, and for each, in order, the state of its read.
    pieces: Vec<Piece>,
    chunks: Vec<RunPart>,
    /// Whether the base image fills gaps between the pieces.
    stripe: bool,
    /// The base image's bytes under a stripe, once read.
    fill: Option<Buffer>,
    /// Reads in flight. The run is written when none is left.
    reads: usize,
    /// A part can't be read, so the run is not written.
    damaged: bool,
    /// When its write began.
    writing: Option<Instant>,
    /// When the read of `fill` began, while it is under way.
    filling: Option<Instant>,
}

impl InFlightRun<'_> {
    /// When the operation on the image began that is under way.
    fn asked(&self) -> Option<Instant> {
        self.writing.or(self.filling)
    }
}

/// A part of a run.
enum RunPart {
    Reading(LogRead),
    Read(Chunk),
}

impl RunPart {
    /// Takes the buffer that was read, if its checksums are right.
    fn verified(&mut self, buffer: Buffer) -> Result<()> {
        if let Self::Reading(read) = self {
            *self = Self::Read(chunk(read.verified(buffer)?));
        }
        Ok(())
    }

    fn read(self) -> Option<Chunk> {
        match self {
            Self::Read(chunk) => Some(chunk),
            Self::Reading(_) => None,
        }
    }
}

/// A disk's extents that could not be copied because they are damaged in the log, and the first
/// error.
pub(crate) struct DamagedExtents {
    pub disk: Arc<DiskState>,
    pub layer: ExtentMap,
    pub error: Error,
}

impl DamagedExtents {
    /// The error to report for them.
    pub(crate) fn to_error(&self) -> Error {
        let (path, error) = (self.disk.path.display(), &self.error);
        Error::new(
            error.kind(),
            format!(
                "{path}: {error}; damaged blocks stay in the log until they are overwritten, and \
                 reading them fails; other data is unaffected; once the disk is closed, 'walvisor \
                 disk check {path}' lists sectors and LSNs"
            ),
        )
    }
}

/// A disk whose image could not be written, or is too slow, with the first error.
pub(crate) struct FailedImage {
    pub disk: Arc<DiskState>,
    pub error: Error,
}

/// The images that fail during copies.
pub(crate) struct ImageFailures {
    /// Whether an image counts that is much slower than the log while writers wait, or that does
    /// not answer.
    pub slow_counts: bool,
    /// Those that failed, in order.
    pub found: Vec<FailedImage>,
    /// I/O on images that copies gave up waiting for.
    pub unanswered: Vec<UnansweredIo>,
}

/// I/O on images that copies gave up waiting for. It may still change the images.
pub(crate) struct UnansweredIo {
    engine: Box<dyn Engine>,
    /// What the engine signals.
    _event: Event,
    /// Abandoned runs: number to disk, and operations in flight.
    runs: HashMap<u64, (u32, usize)>,
}

impl UnansweredIo {
    /// Looks for operations that have ended. Returns whether all have.
    pub(crate) fn have_ended(&mut self) -> bool {
        let mut ended = Vec::new();
        self.engine.poll(&mut ended);
        for end in ended {
            end_unanswered(&mut self.runs, end.id / MAX_CHUNKS as u64);
        }
        self.runs.is_empty()
    }

    /// Whether a disk's image has not answered all.
    pub(crate) fn has(&self, disk_id: u32) -> bool {
        self.runs.values().any(|(id, _)| *id == disk_id)
    }

    /// Leaks what is in flight, since the kernel may still use its memory.
    pub(crate) fn abandon(self) {
        std::mem::forget(self.engine);
    }
}

/// Records that an operation of an abandoned run ended; `false` if the run was not abandoned.
fn end_unanswered(runs: &mut HashMap<u64, (u32, usize)>, run: u64) -> bool {
    let Some((_, left)) = runs.get_mut(&run) else {
        return false;
    };
    *left -= 1;
    if *left == 0 {
        runs.remove(&run);
    }
    true
}

/// The writes to one image that have ended.
#[derive(Default)]
struct WriteTimes {
    count: u32,
    total: Duration,
}

/// The state of one copy: runs to come and in flight, and results so far.
struct Copier<'a, R: Iterator<Item = (&'a Arc<DiskState>, Run)>> {
    log: &'a Log,
    pace: CopyPace,
    medium: MediumCost,
    runs: Peekable<R>,
    known: KnownData,
    /// Runs from stripes that had to be split.
    again: VecDeque<(&'a Arc<DiskState>, Run)>,
    /// The cost of everything started so far.
    done: u64,
    /// An engine of the copy's own, for as long as it runs.
    engine: Box<dyn Engine>,
    /// Signalled when an operation of the engine ends.
    event: Event,
    /// By number; operation ids are `number * MAX_CHUNKS + part`.
    flights: HashMap<u64, InFlightRun<'a>>,
    /// Runs of failed images that nobody waits for: the disk, and how many operations are in
    /// flight.
    unanswered: HashMap<u64, (u32, usize)>,
    next: u64,
    memory: usize,
    /// The cost of the runs in flight.
    cost: u64,
    failed: Option<Error>,
    /// The time limit has run out.
    cut: bool,
    /// The damaged extents, by disk.
    damaged: Vec<DamagedExtents>,
    failures: &'a mut ImageFailures,
    /// By disk number.
    times: HashMap<u32, WriteTimes>,
    /// When it last looked for operations that have ended.
    looked: Instant,
    /// It had not looked for so long that times of operations mean nothing.
    away: bool,
}

/// A disk and its frozen index layer, which is not empty.
pub(crate) type FrozenLayer = (Arc<DiskState>, Arc<ExtentMap>);

/// How a copy ended.
pub(crate) enum CopyOutcome {
    /// Everything is copied and durable, except damaged extents, which stay in the log, and except
    /// what is of disks whose images failed: of that, any part may be copied, and nothing is known
    /// to be durable.
    Complete(Vec<DamagedExtents>),
    /// The time limit ran out. Parts of the layers may be copied, nothing is in flight, and the
    /// images are neither marked nor synced. The damaged extents are those found so far.
    TimeUp(Vec<DamagedExtents>),
}

/// Copies frozen layers to their base images, or spill files, then marks and syncs those. Adds the
/// images that could not be written to `failures`, and goes on with the others. `urgent_work` is
/// called regularly, with a function that it may call to let the copy make progress. `over` is
/// called before each run; once it returns `true`, nothing more is copied.
///
/// # Errors
/// If the log can't be read, or a spill file not be written. Parts of the layers may then be
/// copied, and nothing is in flight.
pub(crate) fn copy<'a>(
    log: &'a Log,
    layers: &'a [FrozenLayer],
    mut pace: CopyPace,
    medium: MediumCost,
    failures: &'a mut ImageFailures,
    mut urgent_work: impl FnMut(&mut dyn FnMut()),
    mut over: impl FnMut() -> bool,
) -> Result<CopyOutcome> {
    if layers.is_empty() {
        return Ok(CopyOutcome::Complete(Vec::new()));
    }
    let opened = Event::new().and_then(|event| Ok((log.medium.engine(&event)?, event)));
    let (engine, event) =
        opened.map_err(|error| Error::io("start a checkpoint of the log", &log.dir, error))?;
    let pieces = layers.iter().flat_map(|(_, layer)| layer.iter());
    let readahead = Readahead::of(log, pieces);
    pace.plan(readahead.bytes() + cost(layers, medium));
    let mut cut = false;
    readahead.read(medium.largest, |read| {
        loop {
            urgent_work(&mut || {});
            cut = over();
            match pace.max_runs(log, read) {
                _ if cut => return None,
                0 => sync::sleep(SHORT),
                runs => return Some(runs < IN_FLIGHT_RUNS),
            }
        }
    });
    let mut copier = Copier {
        log,
        done: readahead.bytes(),
        pace,
        medium,
        runs: runs(layers, medium).peekable(),
        known: KnownData::default(),
        again: VecDeque::new(),
        engine,
        event,
        flights: HashMap::new(),
        unanswered: HashMap::new(),
        next: 0,
        memory: 0,
        cost: 0,
        failed: None,
        cut,
        damaged: Vec::new(),
        failures,
        times: HashMap::new(),
        looked: sync::now(),
        away: false,
    };
    while !copier.has_ended() {
        if planted(Mutant::BaseSyncTooEarly) && copier.failed.is_none() {
            let _ = copier.sync_images(layers);
        }
        urgent_work(&mut || {
            copier.advance(&mut over);
        });
        if !copier.advance(&mut over) {
            copier.sleep();
        }
    }
    let ended = match copier.failed.take() {
        Some(error) => Err(error),
        None if copier.cut => Ok(()),
        None if planted(Mutant::SkipBaseSync) || planted(Mutant::BaseSyncTooEarly) => Ok(()),
        None => copier.sync_images(layers),
    };
    let (cut, damaged) = (copier.cut, std::mem::take(&mut copier.damaged));
    copier.leave_unanswered();
    ended.map(|()| {
        if cut {
            CopyOutcome::TimeUp(damaged)
        } else {
            CopyOutcome::Complete(damaged)
        }
    })
}

/// What the copy of these layers writes.
fn runs(
    layers: &[FrozenLayer],
    medium: MediumCost,
) -> impl Iterator<Item = (&Arc<DiskState>, Run)> {
    layers.iter().flat_map(move |(disk, layer)| {
        let mut medium = medium;
        if disk.base.is_spilled() {
            // No stripes: what fills their gaps may be in the image.
            medium.operation = 0;
        }
        Stripes::new(layer.iter(), medium).map(move |run| (disk, run))
    })
}

/// What that costs the medium.
pub(crate) fn cost(layers: &[FrozenLayer], medium: MediumCost) -> u64 {
    runs(layers, medium)
        .map(|(_, run)| run.cost(medium.operation))
        .sum()
}

fn chunk(buffer: Buffer) -> Chunk {
    Chunk {
        len: buffer.len(),
        buffer: buffer.share(),
    }
}

impl<'a, R: Iterator<Item = (&'a Arc<DiskState>, Run)>> Copier<'a, R> {
    /// Whether a disk's image has failed, so that nothing more is written to it.
    fn has_failed(&self, disk: &DiskState) -> bool {
        let mut failed = self.failures.found.iter();
        failed.any(|failed| failed.disk.id == disk.id)
    }

    /// Notes the first error of an image; of a spill file, it ends the copy.
    fn fail(&mut self, disk: &Arc<DiskState>, error: Error) {
        if disk.base.is_spilled() {
            self.failed.get_or_insert(error);
        } else if !self.has_failed(disk) {
            let disk = disk.clone();
            self.failures.found.push(FailedImage { disk, error });
        }
    }

    /// Marks and syncs the images that have not failed, and commits spill files.
    ///
    /// # Errors
    /// If a spill file can't be committed.
    fn sync_images(&mut self, layers: &[FrozenLayer]) -> Result<()> {
        for (disk, _) in layers {
            if let Some(spill) = disk.base.spill() {
                // The map's name must not lead into a directory that took the log's place.
                self.log.medium.check_place()?;
                spill.commit(&*self.log.medium.files())?;
                self.log.medium.check_place()?;
            } else if !self.has_failed(disk) {
                // The mark gets the image's new generation, and the sync makes it durable together
                // with the data.
                let marking = disk.clone();
                let marked = disk.base.within(self.limit(), move || marking.mark(true));
                let marked = marked
                    .unwrap_or_else(|late| Err(Error::io("sync the base image", &disk.path, late)));
                if let Err(error) = marked {
                    self.fail(disk, error);
                }
            }
        }
        Ok(())
    }

    /// How long to wait for a single operation on an image. `None`: as long as it takes.
    fn limit(&self) -> Option<Duration> {
        self.failures.slow_counts.then_some(OPERATION_LIMIT)
    }

    /// Keeps the engine alive for abandoned operations.
    fn leave_unanswered(self) {
        if !self.unanswered.is_empty() {
            self.failures.unanswered.push(UnansweredIo {
                engine: self.engine,
                _event: self.event,
                runs: self.unanswered,
            });
        }
    }

    /// Fails the images that have become too slow, and gives up what failed images take too long
    /// for.
    fn give_up_unanswered(&mut self) {
        let mut asked: Vec<_> = self.flights.values().map(|flight| flight.disk).collect();
        asked.sort_by_key(|disk| disk.id);
        asked.dedup_by_key(|disk| disk.id);
        for disk in asked {
            if !self.has_failed(disk)
                && let Some(error) = self.too_slow(disk)
            {
                self.fail(disk, error);
            }
        }
        let now = sync::now();
        let is_late = |flight: &InFlightRun<'_>| {
            let asked = flight.asked();
            self.has_failed(flight.disk) && asked.is_some_and(|asked| now - asked >= SLOW_WRITE)
        };
        let late = self.flights.iter().filter(|(_, flight)| is_late(flight));
        let late: Vec<u64> = late.map(|(number, _)| *number).collect();
        for number in late {
            let flight = self.flights.remove(&number).expect("a run in flight");
            self.memory -= flight.memory;
            self.cost -= flight.cost;
            let left = flight.reads + usize::from(flight.writing.is_some());
            self.unanswered.insert(number, (flight.disk.id, left));
        }
    }

    /// How long writes to a disk's image take: the mean, or as long as the oldest has been in
    /// flight. Zero if slowness does not count, or none has been waited for.
    fn write_time(&self, disk: &DiskState) -> Duration {
        if !self.failures.slow_counts {
            return Duration::ZERO;
        }
        let times = self.times.get(&disk.id);
        let mean = times.map_or(Duration::ZERO, |times| times.total / times.count);
        let writes = self.flights.values();
        let writes = writes.filter(|flight| flight.disk.id == disk.id);
        let oldest = writes.filter_map(InFlightRun::asked).min();
        oldest.map_or(mean, |oldest| mean.max(sync::now() - oldest))
    }

    /// Why a disk's image is too slow, if it is: writers wait for this copy, and the log's own
    /// medium is much faster.
    fn too_slow(&self, disk: &DiskState) -> Option<Error> {
        let time = self.write_time(disk);
        if time < SLOW_WRITE || self.away || disk.base.is_spilled() {
            return None;
        }
        let state = self.log.lock();
        let waited_for =
            state.ring.holds_back() || state.ring.is_starved() || time >= LONGEST_SILENCE;
        let log_is_slow = time < state.commit_delay.sync_time() * SLOW_AGAINST_SYNC;
        (waited_for && !log_is_slow).then(|| {
            let (path, ms) = (disk.path.display(), time.as_millis());
            let message =
                format!("{path}: its image takes {ms} ms a write, and other disks wait for it");
            Error::new(ErrorKind::Io, message)
        })
    }

    /// Whether a run of this disk may start: not many while its image is slow, or has not answered
    /// yet.
    fn may_start(&self, disk: &DiskState) -> bool {
        let is_known = self.times.contains_key(&disk.id) || disk.base.is_spilled();
        let writes = self.flights.values();
        is_known && self.write_time(disk) < SLOW_WRITE
            || writes.filter(|flight| flight.disk.id == disk.id).count() < FIRST_WRITES
    }

    /// Whether nothing is in flight and nothing more will be.
    fn has_ended(&mut self) -> bool {
        let last = self.again.is_empty() && self.runs.peek().is_none();
        self.flights.is_empty() && (last || self.cut || self.failed.is_some())
    }

    /// Starts as many runs as the pace allows, and handles operations that have ended. Returns
    /// whether there was anything to do. Does not wait.
    fn advance(&mut self, over: &mut impl FnMut() -> bool) -> bool {
        let most = self.pace.max_runs(self.log, self.done);
        self.away = sync::now() - self.looked > AWAY;
        let mut begun = self.end_operations();
        if self.failures.slow_counts {
            self.give_up_unanswered();
        }
        // A write may wait for a chunk for longer than there is time.
        if !self.flights.is_empty() && over() && self.engine.abandon() {
            self.cut = true;
        }
        while self.failed.is_none()
            && !self.cut
            && self.flights.len() < most
            && self.memory < IN_FLIGHT_BYTES
            && self.cost < self.pace.queue()
        {
            let next = self.again.front().or_else(|| self.runs.peek());
            if let Some(disk) = next.map(|(disk, _)| *disk)
                && !self.has_failed(disk)
            {
                if let Some(error) = self.too_slow(disk) {
                    self.fail(disk, error);
                } else if !self.may_start(disk) {
                    break;
                }
            }
            let again = self.again.pop_front();
            // The work of a run from a split stripe was counted with the stripe.
            let counted = again.is_some();
            let Some((disk, run)) = again.or_else(|| self.runs.next()) else {
                break;
            };
            self.cut = over();
            if !self.cut {
                let cost = run.cost(self.medium.operation);
                self.done += if counted { 0 } else { cost };
                if !self.has_failed(disk) {
                    self.start(disk, run, cost);
                }
                begun = true;
            }
        }
        self.engine.enter();
        begun |= self.end_operations();
        self.looked = sync::now();
        begun
    }

    /// Handles operations that have ended. Returns whether there were any.
    fn end_operations(&mut self) -> bool {
        self.event.clear();
        let mut ended = Vec::new();
        self.engine.poll(&mut ended);
        let any = !ended.is_empty();
        ended.into_iter().for_each(|end| self.end(end));
        any
    }

    /// Sleeps until an operation may have ended, or the pace may allow another.
    fn sleep(&self) {
        if self.flights.is_empty() {
            sync::sleep(SHORT)
        } else {
            self.event.sleep_until(Some(sync::now() + TEND))
        }
    }

    /// Starts a run of this cost.
    fn start(&mut self, disk: &'a Arc<DiskState>, run: Run, cost: u64) {
        let (stripe, span) = (run.has_gaps(), (run.sectors() * SECTOR_SIZE) as usize);
        assert!(
            run.sector() + run.sectors() <= disk.sectors(),
            "a run is inside its disk"
        );
        let (sector, parts) = match run {
            Run::Data { sector, parts } => (sector, parts),
            Run::Zero {
                sector,
                sectors,
                unmap,
            } => {
                self.count_write();
                let range = sector * SECTOR_SIZE..(sector + sectors) * SECTOR_SIZE;
                self.known = KnownData::default();
                let target = disk.base.target();
                let zero = move || target.zero_range(range.start, range.end - range.start, unmap);
                let limit = self.limit().filter(|_| !disk.base.is_spilled());
                match disk.base.within(limit, zero).flatten() {
                    Ok(()) => disk.base.note_written(sector..sector + sectors),
                    Err(error) => self.fail(disk, image_error("zero", disk, sector, error)),
                }
                return;
            }
        };
        let range = sector * SECTOR_SIZE..sector * SECTOR_SIZE + span as u64;
        if stripe {
            match self.known.has_hole(disk, range, self.limit()) {
                Ok(false) => {}
                Ok(true) => return self.split(disk, parts, span),
                Err(error) => {
                    return self.fail(disk, image_error("find holes of", disk, sector, error));
                }
            }
        }
        let number = self.next;
        self.next += 1;
        let mut flight = InFlightRun {
            disk,
            sector,
            bytes: span,
            memory: 0,
            cost,
            chunks: Vec::with_capacity(parts.len()),
            stripe,
            fill: None,
            reads: 0,
            damaged: false,
            writing: None,
            filling: None,
            pieces: Vec::new(),
        };
        let id = |part: usize| number * MAX_CHUNKS as u64 + part as u64;
        for (part, piece) in parts.iter().enumerate() {
            let len = (piece.sectors * SECTOR_SIZE) as usize;
            flight.memory += len.next_multiple_of(BUFFER_ALIGN);
            flight.chunks.push(match &piece.place {
                Some(Location::Log { segment, offset }) => {
                    flight.reads += 1;
                    let read = LogRead::new(segment.clone(), *offset, len);
                    let io = Io::Read {
                        source: ReadSource::Segment(segment.clone()),
                        offset: read.offset(),
                        buffer: Buffer::for_overwrite(read.bytes()),
                    };
                    self.engine.submit(id(part), io);
                    RunPart::Reading(read)
                }
                Some(Location::Memory { payload, offset }) => {
                    RunPart::Read(chunk(Buffer::from(&payload[*offset..*offset + len])))
                }
                Some(Location::Zero { .. }) | None => {
                    unreachable!("a run of data has data, and a layer's extents have places")
                }
            });
        }
        if stripe && planted(Mutant::StripeUnread) {
            flight.fill = Some(Buffer::zeroed(span));
        } else if stripe {
            flight.reads += 1;
            flight.filling = Some(sync::now());
            flight.memory += span.next_multiple_of(BUFFER_ALIGN);
            let io = Io::Read {
                source: ReadSource::File(disk.base.file().clone()),
                offset: sector * SECTOR_SIZE,
                buffer: Buffer::for_overwrite(span),
            };
            self.engine.submit(id(parts.len()), io);
        }
        flight.pieces = parts;
        self.memory += flight.memory;
        self.cost += flight.cost;
        if flight.reads == 0 {
            self.write(number, &mut flight);
        }
        self.flights.insert(number, flight);
    }

    /// Writes a run, all of which is now in memory, to the base image.
    fn write(&mut self, number: u64, flight: &mut InFlightRun<'_>) {
        self.count_write();
        flight.writing = Some(sync::now());
        let parts = flight.chunks.len();
        let mut chunks: Vec<_> = flight.chunks.drain(..).filter_map(RunPart::read).collect();
        assert!(
            flight.reads == 0 && !flight.damaged && chunks.len() == parts,
            "a run is written once all of it is there"
        );
        if let Some(mut stripe) = flight.fill.take() {
            for (piece, part) in flight.pieces.iter().zip(chunks) {
                let at = ((piece.sector - flight.sector) * SECTOR_SIZE) as usize;
                stripe[at..at + part.len].copy_from_slice(&part.buffer[..part.len]);
            }
            chunks = vec![chunk(stripe)];
        }
        let write = Io::Write {
            base: flight.disk.base.target(),
            offset: flight.sector * SECTOR_SIZE,
            chunks,
        };
        self.engine.submit(number * MAX_CHUNKS as u64, write);
    }

    fn count_write(&self) {
        let counters = &self.log.counters;
        counters.base_writes.fetch_add(1, Ordering::Relaxed);
    }

    /// Queues a stripe of `bytes` bytes again: as stripes of the usual size if it was longer, else
    /// as separate runs.
    fn split(&mut self, disk: &'a Arc<DiskState>, parts: Vec<Piece>, bytes: usize) {
        let usual = MediumCost::USUAL.largest;
        let medium = MediumCost {
            // If operations cost nothing, no stripe is cheaper than its runs.
            operation: if bytes as u64 > usual {
                self.medium.operation
            } else {
                0
            },
            largest: usual,
            ..self.medium
        };
        let runs = Stripes::new(parts.into_iter(), medium);
        self.again.extend(runs.map(|run| (disk, run)));
    }

    /// Records damage in a disk's part of the log.
    fn note_damage(&mut self, disk: &Arc<DiskState>, error: Error) {
        if self
            .damaged
            .iter()
            .all(|extents| extents.disk.id != disk.id)
        {
            self.damaged.push(DamagedExtents {
                disk: disk.clone(),
                layer: ExtentMap::default(),
                error,
            });
        }
    }

    /// Leaves a damaged run in the log; of a stripe, only the damaged parts.
    fn leave(&mut self, flight: &mut InFlightRun<'a>) {
        if flight.stripe {
            let parts = std::mem::take(&mut flight.pieces);
            return self.split(flight.disk, parts, flight.bytes);
        }
        let disk = flight.disk.id;
        let extents = self
            .damaged
            .iter_mut()
            .find(|extents| extents.disk.id == disk);
        let extents = extents.expect("damage is noted before");
        for piece in flight.pieces.drain(..) {
            let place = piece.place.expect("a layer's extents have places");
            extents.layer.insert(piece.sector, piece.sectors, 0, place);
        }
    }

    fn end(&mut self, end: IoCompletion) {
        let number = end.id / MAX_CHUNKS as u64;
        if end_unanswered(&mut self.unanswered, number) {
            return;
        }
        let part = (end.id % MAX_CHUNKS as u64) as usize;
        let mut flight = self.flights.remove(&number).expect("a run in flight");
        let was_written = flight.writing.is_some();
        if let Some(begun) = flight.writing.filter(|_| !self.away) {
            let times = self.times.entry(flight.disk.id).or_default();
            times.count += 1;
            times.total += sync::now().duration_since(begun);
        }
        match end.result {
            Ok(_) if was_written => {
                let counters = &self.log.counters;
                let bytes = flight.bytes as u64;
                counters.base_bytes.fetch_add(bytes, Ordering::Relaxed);
                let sectors = flight.sector..flight.sector + bytes / SECTOR_SIZE;
                flight.disk.base.note_written(sectors);
            }
            Ok(buffer) if part == flight.pieces.len() => {
                (flight.fill, flight.filling) = (buffer, None);
            }
            // The gaps of the stripe can't be read, and its parts don't need them.
            Err(_) if !was_written && part == flight.pieces.len() => {
                (flight.damaged, flight.filling) = (true, None);
            }
            Ok(buffer) => {
                let buffer = buffer.expect("a read gives bytes");
                if let Err(error) = flight.chunks[part].verified(buffer) {
                    flight.damaged = true;
                    self.note_damage(flight.disk, error);
                }
            }
            Err(error) if was_written => {
                let error = image_error("write", flight.disk, flight.sector, error);
                self.fail(flight.disk, error);
            }
            Err(error) => {
                let dir = &self.log.dir;
                self.failed
                    .get_or_insert_with(|| Error::io("read the log", dir, error));
            }
        }
        if !was_written {
            flight.reads -= 1;
            // After an error, no further run is written.
            let failed = self.failed.is_some() || self.has_failed(flight.disk);
            if flight.reads == 0 && !failed {
                if flight.damaged {
                    self.leave(&mut flight);
                } else {
                    self.write(number, &mut flight);
                }
            }
        }
        if flight.reads > 0 || (flight.writing.is_some() && !was_written) {
            drop(self.flights.insert(number, flight))
        } else {
            self.memory -= flight.memory;
            self.cost -= flight.cost;
        }
    }
}

/// The error for a part of an image, or of its spill file, that can't be written.
fn image_error(what: &str, disk: &DiskState, sector: u64, error: std::io::Error) -> Error {
    if let Some(spill) = disk.base.spill() {
        return Error::io("write the spill file", &spill.paths().data, error);
    }
    let doing = format!("{what} the base image at sector {sector}");
    Error::io(&doing, &disk.path, error)
}

/// The last range of a base image found to have no holes. A copy asks for each stripe, and some
/// file systems search block by block, or extent by extent, up to the next hole.
#[derive(Default)]
struct KnownData {
    disk_id: u32,
    bytes: Range<u64>,
}

impl KnownData {
    /// Whether the base image has a hole in this range of bytes, which a stripe would fill.
    ///
    /// # Errors
    /// If the image does not answer within `limit`.
    fn has_hole(
        &mut self,
        disk: &DiskState,
        range: Range<u64>,
        limit: Option<Duration>,
    ) -> io::Result<bool> {
        let known = |data: &Range<u64>| data.start <= range.start && range.end <= data.end;
        if self.disk_id != disk.id || !known(&self.bytes) {
            let (image, path) = (disk.base.clone(), disk.path.clone());
            let rest = range.start..u64::MAX;
            let find = move || DataRanges::new(image.host(), &path, rest, u64::MAX).next();
            let Some(Ok(bytes)) = disk.base.within(limit, find)? else {
                return Ok(true);
            };
            (self.disk_id, self.bytes) = (disk.id, bytes);
        }
        Ok(!known(&self.bytes))
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;
    use crate::{DiskOptions, Store, StoreOptions, create_disk};

    /// A stripe of 1 MiB with a hole in one quarter: the other quarters stay stripes, and in the
    /// hole only the written blocks are allocated.
    #[test]
    fn a_stripe_with_a_hole_is_split_where_the_hole_is() {
        const MIB: usize = 1 << 20;
        let dir = tempfile::tempdir().unwrap();
        let (path, log) = (dir.path().join("disk.img"), dir.path().join("log"));
        let options = StoreOptions::default();
        create_disk(&path, 2 * MIB as u64, &log, &options).unwrap();
        let image = std::fs::File::options().write(true).open(&path).unwrap();
        let mut expected = vec![1; 2 * MIB];
        expected[MIB / 4..MIB / 2].fill(0);
        image.write_all_at(&expected[..MIB / 4], 0).unwrap();
        let rest = MIB / 2;
        image.write_all_at(&expected[rest..], rest as u64).unwrap();
        drop(image);
        let store = Store::open(&log, &[DiskOptions::new(&path)], &options).unwrap();
        let disk = &store.disks()[0].state;
        let payload = Buffer::from(&[7; 2 * MIB][..]).share();
        let mut layer = ExtentMap::default();
        for at in (0..2 * MIB).step_by(16 << 10) {
            let payload = payload.clone();
            let place = Location::Memory {
                payload,
                offset: at,
            };
            layer.insert(at as u64 / SECTOR_SIZE, 8, 0, place);
            expected[at..at + 4096].fill(7);
        }
        let log = &store.disks()[0].log;
        let pace = CopyPace::new(log, &mut log.lock(), true);
        let medium = MediumCost {
            operation: MIB as u64,
            largest: MIB as u64,
            ..MediumCost::USUAL
        };
        let layers = [(disk.clone(), Arc::new(layer))];
        let mut failures = ImageFailures {
            slow_counts: false,
            found: Vec::new(),
            unanswered: Vec::new(),
        };
        let copied = copy(log, &layers, pace, medium, &mut failures, |_| {}, || false);
        let copied = copied.unwrap();
        assert!(matches!(copied, CopyOutcome::Complete(damaged) if damaged.is_empty()));
        // One of 1 MiB, three of 256 KiB, and sixteen blocks.
        let writes = log.counters.base_writes.load(Ordering::Relaxed);
        assert_eq!(writes, 1 + 3 + 16);
        assert!(std::fs::read(&path).unwrap() == expected);
        store.close().unwrap();
    }

    /// A search may take milliseconds in a large image, so there must not be one per stripe.
    #[test]
    fn a_copy_searches_a_range_without_holes_once() {
        const LEN: u64 = 1 << 20;
        let dir = tempfile::tempdir().unwrap();
        let (path, log) = (dir.path().join("disk.img"), dir.path().join("log"));
        let options = StoreOptions::default();
        create_disk(&path, LEN, &log, &options).unwrap();
        std::fs::write(&path, vec![1; LEN as usize]).unwrap();
        let store = Store::open(&log, &[DiskOptions::new(&path)], &options).unwrap();
        let disk = &store.disks()[0].state;
        let mut known = KnownData::default();
        assert!(!known.has_hole(disk, 0..LEN / 4, None).unwrap());
        // Only the copy itself makes holes, so it need not see this one.
        let image = disk.base.file();
        image.zero_range(LEN / 2, LEN / 4, true).unwrap();
        assert!(!known.has_hole(disk, LEN / 2..LEN, None).unwrap());
        let mut unknown = KnownData::default();
        assert!(unknown.has_hole(disk, LEN / 2..LEN, None).unwrap());
        store.close().unwrap();
    }
}
