//! Following a log from outside, whether or not it is in use: for its archive.
//!
//! ```text
//!   segment 7: batch batch batch │ segment 8: batch batch   (the owner appends)
//!                          └ place ─────▶ pieces ─────▶
//! ```
//! Nothing is locked and nothing is written, so the log's owner notices nothing. Each batch proves
//! itself: its header has the log, the segment's salt and the checksum of the batch before, and its
//! payloads have checksums. So a segment that is recycled while it is read is noticed, and batches
//! that are missing are too.
//!
//! A follower only passes batches on that are on the medium. Then every recovery of the log finds
//! them, and never another record with one of their LSNs.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use zerocopy::little_endian::{U32, U64};

use crate::Buffer;
use crate::catalog::control::unknown_version;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{BLOCK, DecodeResult, SegmentHeader, Uuid};
use crate::log::commit::Commit;
use crate::medium::file::{DataFile, Segment};
use crate::medium::filesystem::{OpenMode, files};
use crate::recovery::batch::Batch;
use crate::recovery::contents::{BatchChain, read_header};
use crate::recovery::window::Window;
use crate::store::log_root::LogRoot;
use crate::sync::Arc;
use crate::view::point::Point;

/// Bytes read at a time. A piece of the log that is read each second is short.
const READ_BYTES: usize = 256 << 10;
/// How often a segment that should have more batches is read again before it counts as damaged. A
/// write may be under way.
const MOST_RETRIES: u32 = 10;
/// A header is read once in so many times even if its file seems not to have changed.
const LISTS_OF_ALL: u32 = 30;
/// A file that was last written to so long ago has another time after its next write.
const SETTLED: Duration = Duration::from_secs(1);

/// A place in a log: behind a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogPlace {
    /// The segment's position in the log.
    pub sequence: u64,
    /// The segment's salt: a random number of this use of the segment.
    pub salt: u64,
    /// Byte offset in the segment where the batch ends.
    pub offset: u64,
    /// The checksum of the batch's header.
    pub crc: u32,
    /// LSN of the batch's last record.
    pub lsn: u64,
}

/// Consecutive batches of one segment, byte for byte.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogPiece {
    /// The segment's position in the log.
    pub sequence: u64,
    /// Byte offset in the segment. 0: the segment's header comes first.
    pub offset: u64,
    /// The bytes.
    pub bytes: Vec<u8>,
    /// The first record.
    pub first: Commit,
    /// The last record.
    pub last: Commit,
    /// The last record of each batch.
    pub batches: Vec<Commit>,
    /// Where the piece ends.
    pub end: LogPlace,
}

/// What a follower has found.
#[derive(Debug)]
pub enum FollowStep {
    /// The next batches.
    Piece(LogPiece),
    /// Nothing new.
    CaughtUp,
    /// The log goes on, but the next batch can't be read yet: it is being written, or damaged.
    Waits,
    /// The log does not go on at the follower's place, for this reason: what followed it was
    /// recycled, or the log has another past.
    Lost(String),
}

/// Follows a log from outside.
pub struct LogFollower {
    dir: PathBuf,
    log: Uuid,
    segment_size: u64,
    place: FollowerPlace,
    /// The segment at the place.
    open: Option<OpenSegment>,
    /// Whether the log is known to have the batch before the place. Another log of the same history
    /// may have other records with the same numbers.
    verified: bool,
    retries: u32,
    /// Headers that were read, by path.
    headers: HashMap<PathBuf, KnownHeader>,
    /// How often the segments were listed.
    listed: u32,
}

/// Where a follower goes on.
enum FollowerPlace {
    /// In the first segment that the log needs. Its base images have everything up to this LSN.
    Start { first_sequence: u64, lsn: u64 },
    /// Behind a batch.
    After(LogPlace),
}

struct OpenSegment {
    segment: Segment,
    chain: BatchChain,
    /// All records up to here are on the medium.
    durable_lsn: u64,
}

/// A segment file with a valid header.
struct FoundSegment {
    path: PathBuf,
    header: SegmentHeader,
}

impl LogFollower {
    /// Follows the log in `log_dir` from its beginning, as `root` says.
    pub fn new(log_dir: &Path, root: &LogRoot) -> Self {
        let header = &root.control.header;
        Self::at(
            log_dir,
            root,
            FollowerPlace::Start {
                first_sequence: header.first_sequence.get(),
                lsn: header.checkpoint_lsn.get(),
            },
        )
    }

    /// Follows the log in `log_dir` from a place on.
    pub fn resume(log_dir: &Path, root: &LogRoot, place: LogPlace) -> Self {
        Self::at(log_dir, root, FollowerPlace::After(place))
    }

    fn at(log_dir: &Path, root: &LogRoot, place: FollowerPlace) -> Self {
        Self {
            dir: log_dir.to_path_buf(),
            log: root.control.header.log,
            segment_size: root.segment_size(),
            open: None,
            verified: matches!(place, FollowerPlace::Start { .. }),
            place,
            retries: 0,
            headers: HashMap::new(),
            listed: 0,
        }
    }

    /// The sequence of the segment that it reads, or would read.
    pub fn sequence(&self) -> u64 {
        match (&self.open, &self.place) {
            (Some(open), _) => open.chain.sequence.get(),
            (None, FollowerPlace::After(place)) => place.sequence,
            (None, FollowerPlace::Start { first_sequence, .. }) => *first_sequence,
        }
    }

    /// The next batches: about `most` bytes, at least one batch.
    ///
    /// # Errors
    /// If the log can't be read; [`ErrorKind::Damaged`] if a batch that must be there is not.
    pub fn step(&mut self, most: usize) -> Result<FollowStep> {
        loop {
            if let Some(open) = &mut self.open
                && let Some(piece) = open.piece(&self.log, most)?
            {
                self.place = FollowerPlace::After(piece.end);
                self.retries = 0;
                return Ok(FollowStep::Piece(piece));
            }
            match self.advance()? {
                Advance::Moved => {}
                Advance::Nothing => return Ok(FollowStep::CaughtUp),
                Advance::Waits => return Ok(FollowStep::Waits),
                Advance::Lost(why) => {
                    let why = format!("{}: {why}", self.dir.display());
                    return Ok(FollowStep::Lost(why));
                }
            }
        }
    }

    /// Goes on to the segment that has the place, or to the next one.
    fn advance(&mut self) -> Result<Advance> {
        let mut found = self.segments()?;
        found.sort_by_key(|found| found.header.sequence.get());
        let place = match self.place {
            FollowerPlace::Start {
                first_sequence,
                lsn,
            } => {
                let mut needed = found.iter();
                let first = needed.find(|found| found.header.sequence.get() >= first_sequence);
                let Some(first) = first else {
                    return Ok(Advance::Nothing);
                };
                let header = &first.header;
                if header.previous_sequence.get() >= first_sequence
                    || header.previous_lsn.get() > lsn
                {
                    return Ok(Advance::Lost(format!(
                        "the segment after sequence {first_sequence} was recycled"
                    )));
                }
                return self.open(first, BatchChain::new(header, self.segment_size));
            }
            FollowerPlace::After(place) => place,
        };
        let is_here = |found: &&FoundSegment| {
            let header = &found.header;
            header.sequence.get() == place.sequence && header.salt.get() == place.salt
        };
        let here = found.iter().find(is_here);
        if !self.verified {
            self.verified = match here {
                Some(here) => self.has_batch(here, place)?,
                None => false,
            };
            if !self.verified {
                let lsn = place.lsn;
                return Ok(Advance::Lost(format!(
                    "record {lsn}, which was read earlier, is no longer in the log"
                )));
            }
        }
        let mut later = found.iter().filter(|found| {
            let header = &found.header;
            // A log that needs no segment goes on without a previous one.
            header.previous_sequence.get() == place.sequence
                || header.previous_sequence.get() == 0 && header.sequence.get() > place.sequence
        });
        let next = later.next();
        match (here, next.map(|next| next.header.previous_lsn.get())) {
            (_, Some(lsn)) if lsn < place.lsn => Ok(Advance::Lost(format!(
                "its records after LSN {lsn} differ from those read before (up to LSN {}): it was \
                 restored from a copy",
                place.lsn
            ))),
            (_, Some(lsn)) if lsn == place.lsn => {
                let next = next.expect("found above");
                self.open(next, BatchChain::new(&next.header, self.segment_size))
            }
            (Some(here), _) if self.open.is_none() => {
                let chain = BatchChain {
                    sequence: U64::new(place.sequence),
                    salt: U64::new(place.salt),
                    offset: place.offset,
                    previous_crc: U32::new(place.crc),
                    previous_lsn: place.lsn,
                    room: self.segment_size,
                };
                self.open(here, chain)
            }
            (Some(_), None) => Ok(Advance::Nothing),
            (Some(here), Some(lsn)) => {
                // Batches that were appended since this segment was read.
                self.retries += 1;
                if self.retries <= MOST_RETRIES {
                    return Ok(Advance::Waits);
                } else if next.is_some_and(|next| next.header.previous_sequence.get() == 0) {
                    return Ok(Advance::Lost(format!(
                        "the records after LSN {} were recycled",
                        place.lsn
                    )));
                }
                Err(Error::new(
                    ErrorKind::Damaged,
                    format!(
                        "{}: damaged at byte {}: the records from LSN {} to {lsn} can't be read; \
                         'walvisor disk check' tells more",
                        here.path.display(),
                        place.offset,
                        place.lsn + 1,
                    ),
                ))
            }
            (None, None) if LogRoot::read(&self.dir)?.first_sequence() > place.sequence => {
                // Nothing was written since the files were removed.
                Ok(Advance::Nothing)
            }
            (None, _) => Ok(Advance::Lost(format!(
                "the records after LSN {} were recycled",
                place.lsn
            ))),
        }
    }

    /// Whether a segment has the batch that ends at this place.
    fn has_batch(&self, found: &FoundSegment, place: LogPlace) -> Result<bool> {
        let file = files().open(&found.path, OpenMode::ReadDirect);
        let file = file.map_err(|e| Error::io("open the log segment", &found.path, e))?;
        let segment = Arc::new(Segment::new(found.path.clone(), file));
        let mut window = Window::new(&segment, BLOCK as u64, self.segment_size);
        let mut chain = BatchChain::new(&found.header, self.segment_size);
        while chain.offset < place.offset {
            match Batch::at(&mut window, &self.log, chain.offset)? {
                Some(batch) if chain.follows(&batch) => chain.advance(&batch),
                _ => return Ok(false),
            }
        }
        let at = (chain.offset, chain.previous_crc.get(), chain.previous_lsn);
        Ok(at == (place.offset, place.crc, place.lsn))
    }

    /// The segment files with valid headers of this log. Reads only those that were written to
    /// since the last time, so that following a log that gets nothing costs the medium nothing.
    fn segments(&mut self) -> Result<Vec<FoundSegment>> {
        self.listed += 1;
        if self.listed.is_multiple_of(LISTS_OF_ALL) {
            // A file system may not tell the time of each write.
            self.headers.clear();
        }
        let mut found = Vec::new();
        for (_, path) in Segment::list(&*files(), &self.dir)? {
            let header = match self.header(&path) {
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                header => header?,
            };
            match header {
                Some(header) if header.log == self.log => found.push(FoundSegment { path, header }),
                _ => {}
            }
        }
        Ok(found)
    }

    /// The header of a segment; `None`: it is not valid, perhaps because it is being written.
    fn header(&mut self, path: &Path) -> Result<Option<SegmentHeader>> {
        let failed = |error| Error::io("open the log segment", path, error);
        let inode = files().open(path, OpenMode::Read).map_err(failed)?.inode();
        let written = inode.map_err(failed)?.written;
        if let Some(known) = self
            .headers
            .get(path)
            .filter(|known| known.written == written)
        {
            return Ok(known.header);
        }
        let file = files().open(path, OpenMode::ReadDirect).map_err(failed)?;
        let header = segment_header(file.as_ref(), path)?;
        // Writes that follow each other closely may have the same time.
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.map_or(0, |now| now.as_nanos() as u64);
        if written != 0 && now.saturating_sub(written) > SETTLED.as_nanos() as u64 {
            let known = KnownHeader { written, header };
            self.headers.insert(path.to_owned(), known);
        }
        Ok(header)
    }

    fn open(&mut self, found: &FoundSegment, chain: BatchChain) -> Result<Advance> {
        let at = |chain: &BatchChain| (chain.salt, chain.offset);
        if self
            .open
            .as_ref()
            .is_some_and(|open| at(&open.chain) == at(&chain))
        {
            // It was read already; its first batch is on its way.
            return Ok(Advance::Nothing);
        }
        let file = files().open(&found.path, OpenMode::ReadDirect);
        let file = match file {
            // It was removed meanwhile.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(Advance::Nothing);
            }
            file => file.map_err(|e| Error::io("open the log segment", &found.path, e))?,
        };
        self.open = Some(OpenSegment {
            segment: Segment::new(found.path.clone(), file),
            chain,
            durable_lsn: 0,
        });
        Ok(Advance::Moved)
    }
}

/// The header of a segment file, as it was read.
struct KnownHeader {
    /// When the file was last written to, by its file system.
    written: u64,
    header: Option<SegmentHeader>,
}

enum Advance {
    Moved,
    Nothing,
    Waits,
    Lost(String),
}

impl OpenSegment {
    /// The batches at the chain's place, if there are any: as many as `most` bytes have, at least
    /// one.
    fn piece(&mut self, log: &Uuid, most: usize) -> Result<Option<LogPiece>> {
        let mut chain = self.chain.clone();
        let begins = chain.offset == BLOCK as u64;
        let mut reader = PieceReader::new(log, if begins { 0 } else { chain.offset });
        while reader.bytes.len() < most {
            let from = reader.offset + reader.bytes.len() as u64;
            let mut len = READ_BYTES;
            let taken = loop {
                let bytes = self.read(from, len, chain.room)?;
                if from == 0 && !is_header_of(&chain, &bytes) {
                    break false;
                }
                match reader.take(&bytes, &mut chain, &self.segment.path)? {
                    TakeOutcome::Needs(needed) if needed > bytes.len() as u64 => {
                        len = needed as usize;
                    }
                    TakeOutcome::Needs(_) | TakeOutcome::None => break false,
                    TakeOutcome::Some => break true,
                }
            };
            if !taken {
                break;
            }
        }
        let durable_lsn = self.durable_lsn.max(reader.durable_lsn);
        let Some(piece) = reader.end(&chain) else {
            return Ok(None);
        };
        if piece.last.lsn > durable_lsn {
            let synced = self.segment.file.sync_data();
            synced.map_err(|error| Error::io("sync the log segment", &self.segment.path, error))?;
        }
        // Batches with this salt may be left over in a segment that was recycled meanwhile, but
        // they were the log's.
        (self.chain, self.durable_lsn) = (chain, durable_lsn.max(piece.last.lsn));
        Ok(Some(piece))
    }

    /// Up to `len` bytes at `offset`, less at the segment's end.
    fn read(&self, offset: u64, len: usize, segment_size: u64) -> Result<Buffer> {
        let len = segment_size.saturating_sub(offset).min(len as u64) as usize;
        let mut bytes = Buffer::for_overwrite(len.next_multiple_of(BLOCK));
        let read = self.segment.file.read_exact_at(&mut bytes, offset);
        read.map_err(|error| Error::io("read the log segment", &self.segment.path, error))?;
        Ok(bytes)
    }
}

/// Whether a segment still begins with the header with which its chain does.
fn is_header_of(chain: &BatchChain, bytes: &[u8]) -> bool {
    match SegmentHeader::decode(bytes) {
        DecodeResult::Valid(header) => {
            (header.salt, header.crc) == (chain.salt, chain.previous_crc)
        }
        _ => false,
    }
}

/// The header of a segment; `None`: it is not valid, perhaps because it is being written.
fn segment_header(file: &dyn DataFile, path: &Path) -> Result<Option<SegmentHeader>> {
    match read_header(file, path)? {
        DecodeResult::Valid(header) => Ok(Some(header)),
        DecodeResult::Version(version) => Err(unknown_version(path, version)),
        DecodeResult::Invalid => Ok(None),
    }
}

/// Puts batches together to a piece.
struct PieceReader<'a> {
    log: &'a Uuid,
    offset: u64,
    bytes: Vec<u8>,
    first: Option<Commit>,
    last: Commit,
    batches: Vec<Commit>,
    /// The highest durable LSN of the batches.
    durable_lsn: u64,
}

/// What came of some bytes.
enum TakeOutcome {
    /// At least one batch.
    Some,
    /// There is no batch.
    None,
    /// The first batch has so many bytes.
    Needs(u64),
}

impl<'a> PieceReader<'a> {
    fn new(log: &'a Uuid, offset: u64) -> Self {
        Self {
            log,
            offset,
            bytes: Vec::new(),
            first: None,
            last: Commit::default(),
            batches: Vec::new(),
            durable_lsn: 0,
        }
    }

    /// Takes the whole batches that `bytes`, which come next, begin with.
    fn take(&mut self, bytes: &[u8], chain: &mut BatchChain, path: &Path) -> Result<TakeOutcome> {
        let from = self.offset + self.bytes.len() as u64;
        let before = (chain.offset - from) as usize;
        let mut end = before;
        while let Some(rest) = bytes.get(end..).filter(|rest| !rest.is_empty()) {
            let needs = |len: u64| {
                if end == before {
                    Ok(TakeOutcome::Needs(before as u64 + len))
                } else {
                    Ok(TakeOutcome::Some)
                }
            };
            let Some((batch, _)) = Batch::parse(rest, self.log, chain.offset) else {
                let header = crate::format::BatchHeader::peek(rest).map(|(_, len)| len);
                match header.filter(|len| *len > rest.len()) {
                    Some(len) => match needs(len as u64)? {
                        TakeOutcome::Some => break,
                        needs => return Ok(needs),
                    },
                    None => break,
                }
            };
            if !batch.header.is_known() {
                return Err(unknown_version(path, batch.header.version.get()));
            }
            if !chain.follows(&batch) {
                break;
            }
            let len = batch.end() - batch.offset;
            let Some(whole) = rest.get(..len as usize) else {
                match needs(len)? {
                    TakeOutcome::Some => break,
                    needs => return Ok(needs),
                }
            };
            // A write that is under way, or damage: a later batch will tell.
            if !is_whole(&batch, whole) {
                break;
            }
            self.note(&batch);
            chain.advance(&batch);
            end += len as usize;
        }
        if end == before {
            return Ok(TakeOutcome::None);
        }
        self.bytes.extend_from_slice(&bytes[..end]);
        Ok(TakeOutcome::Some)
    }

    fn note(&mut self, batch: &Batch) {
        let header = &batch.header;
        let at = |lsn| Commit {
            lsn,
            cid: header.cid.get(),
            unix_us: header.unix_us.get(),
        };
        self.first.get_or_insert(at(header.first_lsn.get()));
        self.last = at(batch.last_lsn());
        self.batches.push(self.last);
        self.durable_lsn = self.durable_lsn.max(header.durable_lsn.get());
    }

    fn end(self, chain: &BatchChain) -> Option<LogPiece> {
        Some(LogPiece {
            sequence: chain.sequence.get(),
            offset: self.offset,
            bytes: self.bytes,
            first: self.first?,
            last: self.last,
            batches: self.batches,
            end: LogPlace {
                sequence: chain.sequence.get(),
                salt: chain.salt.get(),
                offset: chain.offset,
                crc: chain.previous_crc.get(),
                lsn: chain.previous_lsn,
            },
        })
    }
}

/// The beginning of a piece, up to the batch with a point: its length in bytes, and the last
/// record. `bytes`: the piece at byte `offset` of a segment of the log with this root. `None`: all
/// of it comes after the point, which must not be a snapshot. `known`: no record up to this LSN comes
/// after the point, whatever its time: a time is that of the last record up to it, and the log's
/// clock may have been ahead before.
///
/// # Errors
/// [`ErrorKind::Damaged`] if the piece is not one.
pub fn cut_piece(
    root: &LogRoot,
    offset: u64,
    bytes: &[u8],
    (at, known): (Point, u64),
) -> Result<Option<(usize, Commit)>> {
    let log = &root.control.header.log;
    let mut end = if offset == 0 { BLOCK } else { 0 };
    let mut last = None;
    while end < bytes.len() {
        let Some((batch, _)) = Batch::parse(&bytes[end..], log, offset + end as u64) else {
            return Err(Error::new(
                ErrorKind::Damaged,
                format!("a piece of the log is damaged at byte {end}"),
            ));
        };
        let header = &batch.header;
        let (cid, unix_us) = (header.cid.get(), header.unix_us.get());
        let first_lsn = header.first_lsn.get();
        if first_lsn > known && at.compare(first_lsn, cid, unix_us).is_gt() {
            break;
        }
        end += (batch.end() - batch.offset) as usize;
        last = Some(Commit {
            lsn: batch.last_lsn(),
            cid,
            unix_us,
        });
    }
    Ok(last.map(|last| (end.min(bytes.len()), last)))
}

/// Whether all payloads of a batch match their checksums. `bytes`: the batch.
fn is_whole(batch: &Batch, bytes: &[u8]) -> bool {
    let mut checksums = batch.checksums.iter();
    batch.records().all(|(_, descriptor, offset, _)| {
        let at = (offset - batch.offset) as usize;
        let payload = &bytes[at..at + descriptor.payload_len() as usize];
        let mut blocks = payload.chunks(BLOCK);
        blocks.all(|block| checksums.next() == Some(&crc32c::crc32c(block)))
    })
}

/// Checks that pieces are what a follower has read: whole batches that follow each other.
#[derive(Default)]
pub struct PieceChecker {
    chain: Option<BatchChain>,
    log: Uuid,
}

impl PieceChecker {
    /// Checks pieces of the log with this root.
    pub fn new(root: &LogRoot) -> Self {
        Self {
            chain: None,
            log: root.control.header.log,
        }
    }

    /// Checks the next piece, `bytes` at byte `offset` of the segment with this sequence. Returns
    /// the last record. The first piece begins a segment.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`], with what is wrong.
    pub fn check(&mut self, sequence: u64, offset: u64, bytes: &[u8]) -> Result<Commit> {
        let damaged = |why: &str| {
            let place = format!("the piece at byte {offset} of segment {sequence}");
            Error::new(ErrorKind::Damaged, format!("{place}: damaged: {why}"))
        };
        let chain = match (&mut self.chain, offset) {
            (known, 0) => {
                let DecodeResult::Valid(header) = SegmentHeader::decode(bytes) else {
                    return Err(damaged("the segment's header is not valid"));
                };
                let previous = known.as_ref();
                let follows = previous.is_none_or(|last| {
                    let before = header.previous_sequence.get();
                    header.previous_lsn.get() == last.previous_lsn
                        && [0, last.sequence.get()].contains(&before)
                });
                if header.log != self.log || header.sequence.get() != sequence || !follows {
                    return Err(damaged("the segment does not follow the one before"));
                }
                known.insert(BatchChain::new(&header, u64::MAX))
            }
            (Some(chain), _) if (chain.sequence.get(), chain.offset) == (sequence, offset) => chain,
            _ => return Err(damaged("it does not follow the piece before")),
        };
        let mut reader = PieceReader::new(&self.log, offset);
        reader.take(bytes, chain, Path::new("the archive"))?;
        if reader.bytes.len() != bytes.len() {
            return Err(damaged("not all of its batches are whole"));
        }
        Ok(reader.last)
    }
}
