//! Copying frozen index layers to the base images: the part of a checkpoint that moves bytes.
//!
//! ```text
//!   frozen layers ──▶ runs ──▶ reads of the log ──▶ one write a run ──▶ base images ──▶ sync
//!   (by sector)       (adjacent extents)   (many runs in flight)
//! ```
//! A layer's extents are disjoint, and so are runs. They are in flight together and end in any order, as MariaDB's
//! replicas apply the transactions of one commit group in parallel. The order of the records is already settled in
//! the layer, which has only the newest extent of each sector.
//!
//! If many small parts of a segment are wanted, they are read through the page cache, see [`Ahead`].
//!
//! A checkpoint without `hurry` takes its time, because it shares the medium with syncs that clients wait for. Its
//! progress is compared with the share of the log's room that was used since it began. No run is in flight while
//! the log grows and the copy is ahead; few are while the log does not grow; many are if the log would otherwise be
//! full before the copy ends.

use std::cell::Cell;
use std::collections::HashMap;
use std::iter::Peekable;
use std::time::{Duration, Instant};

use crate::checkpoint::ahead::Ahead;
use crate::error::{Error, Result};
use crate::index::{ExtentMap, Piece, Place};
use crate::log::disk_state::DiskState;
use crate::log::state::{Log, UNAPPLIED_LIMIT};
use crate::medium::engine::{Chunk, Done, Engine, Io, MAX_CHUNKS};
use crate::medium::segment::LogRead;
use crate::mutant::{Mutant, planted};
use crate::sync::atomic::Ordering;
use crate::sync::{self, Arc, Event};
use crate::{BUFFER_ALIGN, Buffer, SECTOR_SIZE};

/// Longest write to a base image, in sectors.
const RUN_SECTORS: u64 = (256 << 10) / SECTOR_SIZE;
/// Most bytes of buffers in flight, unless one run needs more.
const IN_FLIGHT_BYTES: usize = 8 << 20;
/// Most runs in flight, and how many while the copy disturbs no writer.
const IN_FLIGHT_RUNS: usize = 64;
const UNHURRIED_RUNS: usize = 2;
/// Longest pause between two calls of `tend`.
const TEND: Duration = Duration::from_millis(20);
/// After this long without growth of the log, background work disturbs no writer.
const QUIET: Duration = Duration::from_millis(50);
/// How often a copy that is ahead of schedule checks whether it still is.
const SHORT: Duration = Duration::from_millis(1);
/// A copy that is this share of its work behind schedule has most runs in flight; with less, proportionally fewer.
const WORST_LAG: f64 = 0.125;
/// The share of the room that may be used before everything is copied.
const USABLE_SHARE: f64 = 0.7;

/// Adjacent extents that become one operation on the base image.
enum Run {
    Data {
        sector: u64,
        parts: Vec<Piece>,
    },
    Zero {
        sector: u64,
        sectors: u64,
        unmap: bool,
    },
}

/// The runs of a layer's pieces; the pieces come in the order of their sectors.
struct Runs<I: Iterator<Item = Piece>> {
    pieces: Peekable<I>,
    /// The rest of a piece that was longer than a run.
    rest: Option<Piece>,
}

impl<I: Iterator<Item = Piece>> Runs<I> {
    fn new(pieces: I) -> Self {
        Self {
            pieces: pieces.peekable(),
            rest: None,
        }
    }

    /// The next piece if it begins at `sector`, cut to `most` sectors.
    fn next_at(&mut self, sector: u64, most: u64, fits: impl Fn(&Piece) -> bool) -> Option<Piece> {
        let wanted = |piece: &Piece| piece.sector == sector && fits(piece);
        let piece = match self.rest.take_if(|rest| wanted(rest)) {
            Some(rest) => rest,
            None if self.rest.is_some() => return None,
            None => self.pieces.next_if(wanted)?,
        };
        if piece.sectors <= most {
            return Some(piece);
        }
        self.rest = Some(Piece {
            sector: piece.sector + most,
            sectors: piece.sectors - most,
            place: piece.place.as_ref().map(|place| place.skip(most)),
        });
        Some(Piece {
            sectors: most,
            ..piece
        })
    }
}

fn is_zero(piece: &Piece) -> Option<bool> {
    match piece.place {
        Some(Place::Zero { unmap }) => Some(unmap),
        _ => None,
    }
}

/// Bytes that a piece counts in the work of a copy. Zeroing counts little, since it is one call for any length.
fn work(piece: &Piece) -> u64 {
    match is_zero(piece) {
        Some(_) => SECTOR_SIZE,
        None => piece.sectors * SECTOR_SIZE,
    }
}

impl<I: Iterator<Item = Piece>> Iterator for Runs<I> {
    type Item = Run;

    fn next(&mut self) -> Option<Run> {
        let first = self.rest.as_ref().or(self.pieces.peek())?;
        let (sector, zero) = (first.sector, is_zero(first));
        if let Some(unmap) = zero {
            let mut end = sector;
            while let Some(piece) = self.next_at(end, u64::MAX, |piece| is_zero(piece) == zero) {
                end += piece.sectors;
            }
            return Some(Run::Zero {
                sector,
                sectors: end - sector,
                unmap,
            });
        }
        let mut parts: Vec<Piece> = Vec::new();
        let (mut end, limit) = (sector, sector + RUN_SECTORS);
        while end < limit
            && parts.len() < MAX_CHUNKS
            && let Some(piece) = self.next_at(end, limit - end, |piece| is_zero(piece).is_none())
        {
            end += piece.sectors;
            match parts.last_mut() {
                Some(last) if follows(last, &piece) => last.sectors += piece.sectors,
                _ => parts.push(piece),
            }
        }
        Some(Run::Data { sector, parts })
    }
}

/// Whether `next` directly follows `last` in the log too, so that one read gets both.
fn follows(last: &Piece, next: &Piece) -> bool {
    match (&last.place, &next.place) {
        (
            Some(Place::Log { segment, offset }),
            Some(Place::Log {
                segment: next_segment,
                offset: next_offset,
            }),
        ) => {
            Arc::ptr_eq(segment, next_segment)
                && offset + last.sectors * SECTOR_SIZE == *next_offset
        }
        _ => false,
    }
}

/// A run in flight.
struct Flight<'a> {
    disk: &'a Arc<DiskState>,
    sector: u64,
    bytes: usize,
    /// Bytes of memory that its buffers take.
    memory: usize,
    /// The pieces of the run, and for each the state of its read, in order.
    pieces: Vec<Piece>,
    chunks: Vec<Part>,
    /// Reads under way; when none is left, the run is written.
    reads: usize,
    /// Whether a read failed its checksum: the run is not written.
    damaged: bool,
    writing: bool,
}

/// A part of a run.
enum Part {
    Reading(LogRead),
    Read(Chunk),
}

impl Part {
    /// Takes the buffer that was read, if its checksums match those that were logged.
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

/// The extents of a disk that could not be copied because the medium has damaged them, and the first error.
pub(crate) struct Rest {
    pub disk: Arc<DiskState>,
    pub layer: ExtentMap,
    pub error: Error,
}

impl Rest {
    /// The error that reports them.
    pub(crate) fn told(&self) -> Error {
        let (path, error) = (self.disk.path.display(), &self.error);
        Error::new(
            error.kind(),
            format!(
                "{path}: {error}; reads of it fail, nothing else is affected, and the log keeps it until it is \
                 overwritten; once the disk is closed, 'walvisor disk check {path}' names sectors and LSNs"
            ),
        )
    }
}

/// The runs in flight, and the results of those that ended.
struct Copier<'a> {
    log: &'a Log,
    ahead: Ahead,
    /// An engine of its own, held as long as the copy runs: the keeper's other one may lead commit groups.
    engine: Box<dyn Engine>,
    /// By number; operation ids are `number * MAX_CHUNKS + part`.
    flights: HashMap<u64, Flight<'a>>,
    next: u64,
    memory: usize,
    failed: Option<Error>,
    /// The damaged extents, by disk.
    rests: Vec<Rest>,
}

/// Detects whether a log is being written to: background work would then delay the writers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Growth {
    /// The log's end at the last check.
    end: u64,
    /// When the log was last seen to have grown.
    grown: Option<Instant>,
}

impl Growth {
    /// Growth of a log that ends at `end`.
    pub(crate) fn new(end: u64) -> Self {
        Self { end, grown: None }
    }

    /// Whether the log has grown lately, given that it now ends at `end`.
    pub(crate) fn is_under_way(&mut self, end: u64) -> bool {
        let now = sync::now();
        if end > self.end {
            self.grown = Some(now);
        }
        self.end = end;
        self.grown
            .is_some_and(|grown| now.duration_since(grown) < QUIET)
    }
}

/// The pace of a copy: it is to end before the log is full.
struct CopyPace {
    growth: Cell<Growth>,
    hurry: bool,
    /// Bytes of log when the copy began, and how many more there was room for.
    bytes: (u64, u64),
    /// Records when it began, and how many more there was room for.
    records: (u64, u64),
    /// Bytes to be read ahead and to be copied.
    work: u64,
}

impl CopyPace {
    fn new(log: &Log, hurry: bool, work: u64) -> Self {
        let state = log.lock();
        let (pipeline, end) = (&state.pipeline, state.ring.end());
        Self {
            growth: Cell::new(Growth::new(end)),
            hurry,
            bytes: (end, state.ring.unused_bytes()),
            records: (
                pipeline.appended(),
                UNAPPLIED_LIMIT.saturating_sub(pipeline.unapplied()),
            ),
            work,
        }
    }

    /// How many runs may be in flight when `done` bytes of the work are done.
    fn runs(&self, log: &Log, done: u64) -> usize {
        let state = &*log.lock();
        let hurry = self.hurry || state.is_pressing() || log.held_back.load(Ordering::Relaxed);
        let used = |now: u64, (began, room): (u64, u64)| {
            now.saturating_sub(began) as f64 / (room.max(1) as f64 * USABLE_SHARE)
        };
        let end = state.ring.end();
        let used = used(end, self.bytes).max(used(state.pipeline.appended(), self.records));
        let behind = match hurry {
            true => 1.0,
            false => used - done as f64 / self.work as f64,
        };
        let mut growth = self.growth.get();
        let disturbing = behind <= 0.0 && growth.is_under_way(end);
        self.growth.set(growth);
        if disturbing {
            return 0;
        }
        let more = (IN_FLIGHT_RUNS - UNHURRIED_RUNS) as f64;
        UNHURRIED_RUNS + ((behind / WORST_LAG).clamp(0.0, 1.0) * more) as usize
    }
}

/// How a copy ended.
pub(crate) enum Copied {
    /// Everything is copied and durable, except the extents that the medium has damaged: they stay in the log only.
    Whole(Vec<Rest>),
    /// The time was over. Part of the layers may be copied, nothing is in flight any more, and the images are
    /// neither marked nor synced. The damaged extents are those found so far.
    Cut(Vec<Rest>),
}

/// Copies the disks' frozen layers to their base images, then marks and syncs the images. `hurry`: a caller waits
/// for the copy. `tend` is called repeatedly, `over` before each run: once it returns `true`, no more is copied.
///
/// # Errors
/// If anything but the checksum of an extent fails. Part of the layers may be copied then, and nothing is in flight
/// any more.
pub(crate) fn copy(
    log: &Log,
    disks: &[Arc<DiskState>],
    hurry: bool,
    mut tend: impl FnMut(),
    mut over: impl FnMut() -> bool,
) -> Result<Copied> {
    let layers: Vec<(&Arc<DiskState>, Arc<ExtentMap>)> = disks
        .iter()
        .filter_map(|disk| Some((disk, disk.index().frozen.clone()?)))
        .filter(|(_, layer)| !layer.is_empty())
        .collect();
    if layers.is_empty() {
        return Ok(Copied::Whole(Vec::new()));
    }
    let done = Cell::new(0);
    let runs = layers.iter().flat_map(|(disk, layer)| {
        let disk: &Arc<DiskState> = disk;
        let pieces = layer
            .iter()
            .inspect(|piece| done.set(done.get() + work(piece)));
        Runs::new(pieces).map(move |run| (disk, run))
    });
    let mut runs = runs.peekable();
    let opened = Event::new().and_then(|event| Ok((log.medium.engine(&event)?, event)));
    let (engine, event) =
        opened.map_err(|error| Error::io("start a checkpoint of the log", &log.dir, error))?;
    let pieces = || layers.iter().flat_map(|(_, layer)| layer.iter());
    let copied: u64 = pieces().map(|piece| work(&piece)).sum();
    let ahead = Ahead::of(log, pieces());
    let pace = CopyPace::new(log, hurry, ahead.bytes() + copied);
    let mut cut = false;
    ahead.read(|read| {
        loop {
            tend();
            cut = over();
            match pace.runs(log, read) {
                _ if cut => return None,
                0 => sync::sleep(SHORT),
                runs => return Some(runs < IN_FLIGHT_RUNS),
            }
        }
    });
    done.set(ahead.bytes());
    let mut copier = Copier {
        log,
        ahead,
        engine,
        flights: HashMap::new(),
        next: 0,
        memory: 0,
        failed: None,
        rests: Vec::new(),
    };
    let mut ended = Vec::new();
    loop {
        tend();
        let most = pace.runs(log, done.get());
        while copier.failed.is_none() && !cut && copier.has_room(most) {
            let Some((disk, run)) = runs.next() else {
                break;
            };
            cut = over();
            if !cut {
                copier.start(disk, run);
            }
        }
        if copier.flights.is_empty() {
            if copier.failed.is_some() || cut || runs.peek().is_none() {
                break;
            }
            sync::sleep(SHORT);
            continue;
        }
        if planted(Mutant::BaseSyncTooEarly) && copier.failed.is_none() {
            let _ = sync_bases(&layers);
        }
        copier.engine.enter();
        event.clear();
        copier.engine.poll(&mut ended);
        if ended.is_empty() {
            event.sleep_until(Some(sync::now() + TEND));
        }
        for end in ended.drain(..) {
            copier.end(end);
        }
    }
    match copier.failed {
        Some(error) => return Err(error),
        None if cut => return Ok(Copied::Cut(copier.rests)),
        None if planted(Mutant::SkipBaseSync) || planted(Mutant::BaseSyncTooEarly) => {}
        None => sync_bases(&layers)?,
    }
    Ok(Copied::Whole(copier.rests))
}

fn sync_bases(layers: &[(&Arc<DiskState>, Arc<ExtentMap>)]) -> Result<()> {
    layers.iter().try_for_each(|(disk, _)| {
        // The mark gets the image's new generation; the sync makes it durable together with the bytes.
        disk.mark(true).map(drop)
    })
}

fn chunk(buffer: Buffer) -> Chunk {
    Chunk {
        len: buffer.len(),
        buffer: buffer.share(),
    }
}

impl<'a> Copier<'a> {
    /// Whether another run may begin, with at most `most` in flight.
    fn has_room(&self, most: usize) -> bool {
        self.flights.len() < most && self.memory < IN_FLIGHT_BYTES
    }

    fn start(&mut self, disk: &'a Arc<DiskState>, run: Run) {
        let counters = &self.log.counters;
        counters.base_writes.fetch_add(1, Ordering::Relaxed);
        let (sector, parts) = match run {
            Run::Data { sector, parts } => (sector, parts),
            Run::Zero {
                sector,
                sectors,
                unmap,
            } => {
                let (offset, len) = (sector * SECTOR_SIZE, sectors * SECTOR_SIZE);
                let zeroed = disk.base.zero_range(offset, len, unmap);
                self.failed = zeroed
                    .map_err(|error| Error::io("zero a part of the base image", &disk.path, error))
                    .err();
                return;
            }
        };
        let number = self.next;
        self.next += 1;
        let mut flight = Flight {
            disk,
            sector,
            bytes: 0,
            memory: 0,
            chunks: Vec::with_capacity(parts.len()),
            reads: 0,
            damaged: false,
            writing: false,
            pieces: Vec::new(),
        };
        for (part, piece) in parts.iter().enumerate() {
            let len = (piece.sectors * SECTOR_SIZE) as usize;
            flight.bytes += len;
            flight.memory += len.next_multiple_of(BUFFER_ALIGN);
            flight.chunks.push(match &piece.place {
                Some(Place::Log { segment, offset }) => {
                    flight.reads += 1;
                    let read = LogRead::new(segment.clone(), *offset, len);
                    let io = Io::Read {
                        source: self.ahead.source(segment.clone()),
                        offset: read.offset(),
                        buffer: Buffer::for_overwrite(read.bytes()),
                    };
                    let id = number * MAX_CHUNKS as u64 + part as u64;
                    self.engine.submit(id, io);
                    Part::Reading(read)
                }
                Some(Place::Memory { payload, offset }) => {
                    Part::Read(chunk(Buffer::from(&payload[*offset..*offset + len])))
                }
                Some(Place::Zero { .. }) | None => {
                    unreachable!("a run of data has data, and a layer's extents have places")
                }
            });
        }
        flight.pieces = parts;
        self.memory += flight.memory;
        if flight.reads == 0 {
            self.write(number, &mut flight);
        }
        self.flights.insert(number, flight);
    }

    /// Writes the run to the base image: all of it is in memory.
    fn write(&mut self, number: u64, flight: &mut Flight<'_>) {
        flight.writing = true;
        let write = Io::Write {
            base: flight.disk.base.clone(),
            offset: flight.sector * SECTOR_SIZE,
            chunks: flight.chunks.drain(..).filter_map(Part::read).collect(),
        };
        self.engine.submit(number * MAX_CHUNKS as u64, write);
    }

    /// Notes that a part of a disk's log is damaged.
    fn note_damage(&mut self, disk: &Arc<DiskState>, error: Error) {
        if self.rests.iter().all(|rest| rest.disk.id != disk.id) {
            self.rests.push(Rest {
                disk: disk.clone(),
                layer: ExtentMap::default(),
                error,
            });
        }
    }

    /// Leaves a damaged run in the log.
    fn leave(&mut self, flight: &mut Flight<'_>) {
        let disk = flight.disk.id;
        let rest = self.rests.iter_mut().find(|rest| rest.disk.id == disk);
        let rest = rest.expect("damage is noted before");
        for piece in flight.pieces.drain(..) {
            let place = piece.place.expect("a layer's extents have places");
            rest.layer.insert(piece.sector, piece.sectors, 0, place);
        }
    }

    fn end(&mut self, end: Done) {
        let number = end.id / MAX_CHUNKS as u64;
        let part = (end.id % MAX_CHUNKS as u64) as usize;
        let mut flight = self.flights.remove(&number).expect("a run in flight");
        let was_written = flight.writing;
        match end.result {
            Ok(_) if was_written => {
                let counters = &self.log.counters;
                let bytes = flight.bytes as u64;
                counters.base_bytes.fetch_add(bytes, Ordering::Relaxed);
            }
            Ok(buffer) => {
                let buffer = buffer.expect("a read gives bytes");
                if let Err(error) = flight.chunks[part].verified(buffer) {
                    flight.damaged = true;
                    self.note_damage(flight.disk, error);
                }
            }
            Err(error) => {
                self.failed.get_or_insert_with(|| match was_written {
                    true => Error::io("write the base image", &flight.disk.path, error),
                    false => Error::io("read the log", &self.log.dir, error),
                });
            }
        }
        if !was_written {
            flight.reads -= 1;
            // After an error no more run is begun.
            match flight.reads == 0 && self.failed.is_none() {
                true if flight.damaged => self.leave(&mut flight),
                true => self.write(number, &mut flight),
                false => {}
            }
        }
        match flight.reads > 0 || (flight.writing && !was_written) {
            true => drop(self.flights.insert(number, flight)),
            false => self.memory -= flight.memory,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Otherwise a copy with one long discard would seem ahead of schedule, and wait until the log is full.
    #[test]
    fn a_long_discard_is_little_work() {
        let piece = |sectors, place| Piece {
            sector: 0,
            sectors,
            place: Some(place),
        };
        let payload = Buffer::zeroed(4096).share();
        assert_eq!(work(&piece(8, Place::Memory { payload, offset: 0 })), 4096);
        assert_eq!(work(&piece(1 << 40, Place::Zero { unmap: true })), 512);
    }

    proptest! {
        /// For any extents, the runs cover all of them in order; no run is too long, and no two could be joined.
        #[test]
        fn runs_are_the_extents_joined_and_cut(
            extents in prop::collection::vec((0u64..3, 1..2 * RUN_SECTORS, 0u8..4), 1..40),
        ) {
            let payload = Buffer::zeroed(512).share();
            let (mut at, mut pieces, mut wanted) = (0, Vec::new(), Vec::new());
            for (gap, sectors, kind) in extents {
                at += gap;
                let place = match kind {
                    // The test never reads the bytes; the offset identifies them.
                    0 | 1 => Place::Memory { payload: payload.clone(), offset: at as usize * 512 },
                    _ => Place::Zero { unmap: kind == 2 },
                };
                let zero = match place { Place::Zero { unmap } => Some(unmap), _ => None };
                wanted.extend((at..at + sectors).map(|sector| (sector, zero)));
                pieces.push(Piece { sector: at, sectors, place: Some(place) });
                at += sectors;
            }
            let mut found = Vec::new();
            let mut last = None;
            for run in Runs::new(pieces.into_iter()) {
                match run {
                    Run::Zero { sector, sectors, unmap } => {
                        prop_assert_ne!(last, Some((sector, Some(unmap))));
                        found.extend((sector..sector + sectors).map(|sector| (sector, Some(unmap))));
                        last = Some((sector + sectors, Some(unmap)));
                    }
                    Run::Data { sector, parts } => {
                        prop_assert!(!parts.is_empty() && parts.len() <= MAX_CHUNKS);
                        let mut end = sector;
                        for part in parts {
                            let Some(Place::Memory { offset, .. }) = part.place else { panic!("{part:?}") };
                            prop_assert_eq!((part.sector, offset as u64), (end, end * 512));
                            end += part.sectors;
                        }
                        prop_assert!(end - sector <= RUN_SECTORS);
                        found.extend((sector..end).map(|sector| (sector, None)));
                        last = Some((end, None));
                    }
                }
            }
            prop_assert_eq!(found, wanted);
        }
    }
}
