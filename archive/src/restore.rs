//! Bringing a log back from an archive: all its disks, as of any point.
//!
//! The base images are put together from chunks, and the segments from pieces, byte for byte. Then
//! the control file is written as it would be if the log's owner had been killed during a
//! checkpoint; opening the log recovers the disks, as after any other kill.

use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File, TryLockError};
use std::future::Future;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use walvisor_storage::{
    AssembledLog, Commit, LogParts, LogRoot, PieceChecker, Point, Progress, cut_piece,
    write_segment,
};

use crate::epoch::LogCopy;
use crate::error::{Error, ErrorKind, Result};
use crate::expire::{Lease, time_of};
use crate::layout::{self, ObjectId};
use crate::lineage::{Catalog, Lineage, MEND_PART, read_root, try_part, whole_base};
use crate::object::{self, BaseHeader, BaseImage, Moment, PartHeader};
use crate::remote::Archive;

/// The note of a restore that has not ended, in its directory.
const NOTE: &str = "walvisor-restore.json";
/// The directory of the log of several disks, there.
const LOG_NAME: &str = "log";
/// The note of a replica, in its directory.
pub(crate) const REPLICA_NOTE: &str = "walvisor-replica.json";

/// A log that was restored, or could be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoreReport {
    /// The state that the disks have.
    pub commit: Commit,
    /// The log's directory.
    pub log_dir: PathBuf,
    /// The disks.
    pub disks: Vec<RestoredDisk>,
    /// Bytes of log since the base images.
    pub log_bytes: u64,
    /// Chunks that were fetched.
    pub chunks: u64,
}

/// A disk of a log that was restored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoredDisk {
    /// The base image. The newest bytes are in the log.
    pub path: PathBuf,
    /// Size in bytes.
    pub bytes: u64,
}

/// Gets a piece of the log: the sequence of its segment, its byte offset there, its bytes.
pub(crate) type TakePiece<'a> = &'a mut dyn FnMut(u64, u64, &[u8]) -> Result<()>;

/// How to reach a point.
pub(crate) struct Plan<'a> {
    archive: &'a Archive,
    /// Keeps what is needed from expiring.
    pub lease: Option<Lease<'a>>,
    pub line: Lineage,
    pub base: BaseHeader,
    pub root: LogRoot,
    at: Point,
    /// No record up to this LSN is after the point.
    before: u64,
    /// The line and newer ones with their ends, where those are damaged.
    cut: Vec<Lineage>,
}

/// How far a restore is that was ended before its end.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RestoreNote {
    archive: String,
    pub base: Option<ObjectId>,
    /// What the log was restored to, if it is complete and the disks may be in use.
    #[serde(default)]
    pub ready: Option<ReadyLog>,
}

/// A log that is complete although chunks of the images are still to be fetched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ReadyLog {
    /// The point that was asked for.
    pub at: String,
    pub commit: object::Moment,
    pub log_bytes: u64,
}

/// Fetches everything that a restore as of `at` fetches, and checks all of it: each chunk, each
/// part, each record. Writes nothing.
///
/// # Errors
/// As [`restore`](crate::restore()).
pub fn verify(archive: &Archive, at: Point, progress: Progress<'_>) -> Result<RestoreReport> {
    let plan = archive.block_on(Plan::find(archive, at))?;
    let total: u64 = plan.base.images.iter().map(|image| image.bytes).sum();
    let (mut passed, mut chunks) = (0, 0);
    for image in &plan.base.images {
        plan.fetch_image(image, 0, |number, bytes| {
            chunks += u64::from(bytes.is_some());
            passed += plan.base.chunk_len(image, number);
            progress(passed, total);
            Ok(())
        })?;
    }
    let mut sequences = BTreeSet::new();
    let log = plan.read_log(&mut |sequence, _, _| {
        sequences.insert(sequence);
        Ok(())
    })?;
    let assembled = AssembledLog::check(&plan.log_parts(&log, sequences.len(), &[]));
    assembled.map_err(|error| Error::damaged(&layout::base(plan.base.at), error))?;
    let images = image_paths(Path::new(""), &plan.base.images);
    let log_dir = log_dir_of(Path::new(""), &images);
    progress(total, total);
    let damaged = plan.cut.first().and_then(Lineage::end);
    if let Some(damaged) = damaged.filter(|_| at == Point::Newest) {
        let last = log.last;
        let why = format!("it is damaged or missing; all is whole up to {last}; {MEND_PART}");
        return Err(Error::damaged(&layout::part(damaged), why));
    }
    Ok(plan.done(&log, log_dir, &images, chunks))
}

/// Reads the log from the images of a base to a point, part by part, and checks it.
pub(crate) struct LogReader {
    /// The log's root when the copy of the images began.
    pub begun: LogRoot,
    /// Segments with a lower sequence are not needed.
    pub first_sequence: u64,
    checker: PieceChecker,
    /// The log's newest root.
    pub root: LogRoot,
    pub last: Commit,
    /// The point, with a snapshot's LSN instead of its name, and an LSN up to which no record is
    /// after it.
    at: (Point, u64),
    /// Whether the point was reached.
    ended: bool,
    bytes: u64,
}

impl LogReader {
    /// As of `at`; no record up to LSN `before` is after that.
    pub(crate) fn new(base: &BaseHeader, root: &LogRoot, at: Point, before: u64) -> Self {
        Self {
            begun: root.clone(),
            first_sequence: base.first_sequence,
            checker: PieceChecker::new(root),
            root: root.clone(),
            last: root.checkpoint(),
            at: (at, before),
            ended: false,
            bytes: 0,
        }
    }

    /// Takes the next part, and hands its pieces to `each`. Whether another part is needed.
    pub(crate) fn take(
        &mut self,
        header: &PartHeader,
        body: &[u8],
        each: TakePiece<'_>,
    ) -> Result<bool> {
        let name = layout::part(header.at);
        let (root, mut rest) = body.split_at(header.root_len as usize);
        if !root.is_empty() {
            self.take_root(&name, LogRoot::decode(root)?)?;
        }
        for piece in &header.pieces {
            let (bytes, behind) = rest.split_at(piece.len as usize);
            rest = behind;
            if piece.sequence < self.first_sequence {
                continue;
            }
            let checked = self.checker.check(piece.sequence, piece.offset, bytes);
            checked.map_err(|error| Error::damaged(&name, error))?;
            let cut = cut_piece(&self.begun, piece.offset, bytes, self.at);
            let cut = cut.map_err(|error| Error::damaged(&name, error))?;
            let Some((len, last)) = cut else {
                self.ended = true;
                break;
            };
            each(piece.sequence, piece.offset, &bytes[..len])?;
            self.bytes += len as u64;
            self.last = last;
            if len < bytes.len() {
                self.ended = true;
                break;
            }
        }
        Ok(!self.ended)
    }

    /// Ends before a part that is damaged, as this error says, if the point was reached.
    ///
    /// # Errors
    /// If not: with the newest point that can be.
    fn end_before(&self, error: Error) -> Result<bool> {
        let reached = self.ended || matches!(self.at.0, Point::Lsn(lsn) if lsn <= self.last.lsn);
        if reached {
            tracing::warn!("{error}; the log before it leads to the point; {MEND_PART}");
            return Ok(false);
        }
        let last = self.last;
        Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "{error}; the log before it ends with {last}: name that point or an earlier one, \
                 such as --at lsn:{}; {MEND_PART}",
                last.lsn
            ),
        ))
    }

    fn take_root(&mut self, name: &str, root: LogRoot) -> Result<()> {
        if let Some(why) = root.why_other_images(&self.begun) {
            return Err(Error::damaged(
                name,
                format!("it needs other images: {why}"),
            ));
        }
        self.root = root;
        Ok(())
    }
}

impl<'a> Plan<'a> {
    /// Finds the newest base images from which a point can be reached.
    pub(crate) async fn find(archive: &'a Archive, at: Point) -> Result<Self> {
        let catalog = Catalog::read(archive).await?;
        Self::of(archive, &catalog, at).await
    }

    /// As [`find`](Self::find), with what an archive has.
    pub(crate) async fn of(archive: &'a Archive, catalog: &Catalog, at: Point) -> Result<Self> {
        let (mut reachable, mut damaged) = (Vec::new(), BTreeSet::new());
        let mut cut = Vec::new();
        for mut line in catalog.lines() {
            let listed = line.clone();
            let newest = line.cut_damaged_end(archive).await?;
            cut.extend((line != listed).then_some(listed));
            let Some(newest) = newest else { continue };
            let at = resolve(archive, &newest, at).await?;
            let known = at.and_then(|at| newest.before(at));
            let mut oldest = None;
            for &place in catalog.bases.iter().rev() {
                if damaged.contains(&place) {
                    continue;
                }
                let Some((base, root)) = whole_base(archive, place).await? else {
                    damaged.insert(place);
                    continue;
                };
                if !line.leads(&base) {
                    continue;
                }
                let root = LogRoot::decode(&root)?;
                oldest = Some(base.exact);
                let Some(at) = at else { continue };
                let newest = newest.last;
                let (before, beyond) = match at {
                    // Images whose time is not known were there when they were sent.
                    Point::Time(unix_us) => {
                        let time = time_of(base.exact, base.made_us);
                        let known = known.is_some_and(|known| base.exact.lsn <= known);
                        (known || time <= unix_us, false)
                    }
                    _ => {
                        let Moment { lsn, cid, .. } = base.exact;
                        // What is not written yet has no number.
                        let numbered = matches!(at, Point::Lsn(_) | Point::Cid(_));
                        let ended = at.compare(newest.lsn, newest.cid, newest.unix_us).is_lt();
                        (!at.compare(lsn, cid, 0).is_gt(), numbered && ended)
                    }
                };
                if before && !beyond {
                    return Ok(Self {
                        archive,
                        lease: Lease::take(archive, base.at).await?,
                        line,
                        base,
                        root,
                        at,
                        before: known.unwrap_or(0),
                        cut,
                    });
                }
            }
            if let Some(oldest) = oldest {
                reachable.push((oldest, newest.last));
            }
        }
        let spans: Vec<_> = reachable
            .iter()
            .map(|(from, to)| {
                let (from, to): (Commit, Commit) = ((*from).into(), (*to).into());
                format!("from {from} to {to}")
            })
            .collect();
        let broken = !cut.is_empty() || !damaged.is_empty();
        let reach = match &spans[..] {
            [] if broken => {
                "what leads to its points is damaged, as the warnings say; the next 'walvisor archive \
                 push' makes another beginning"
                    .to_owned()
            }
            [] => {
                "its first copy of the images is not complete yet; let 'walvisor archive push' end"
                    .to_owned()
            }
            spans => format!("it reaches {}", spans.join(", and ")),
        };
        Err(Error::new(
            ErrorKind::NotFound,
            format!(
                "{}: nothing in the archive leads to {at}; {reach}",
                archive.shown()
            ),
        ))
    }

    /// Fetches the chunks of an image from number `from` on, and checks them. `each` gets the
    /// number and the bytes of each, in order; `None`: they are zeroes.
    fn fetch_image(
        &self,
        image: &BaseImage,
        from: usize,
        mut each: impl FnMut(usize, Option<Vec<u8>>) -> Result<()>,
    ) -> Result<()> {
        let wanted = image.chunks.iter().enumerate().skip(from);
        let fetch =
            wanted.map(|(number, hash)| fetch_chunk(self.archive, &self.base, image, number, hash));
        let each = |(number, bytes)| each(number, bytes).map(|()| true);
        self.carry_out(self.archive.in_order(fetch, each))
    }

    /// Whether a part is lost that was on the line, or on a newer one.
    pub(crate) fn has_lost(&self, at: ObjectId) -> bool {
        !self.line.has(at) && self.cut.iter().any(|line| line.has(at))
    }

    pub(crate) fn carry_out<T>(&self, requests: impl Future<Output = T>) -> T {
        let leased = Lease::during(self.lease.as_ref(), requests);
        self.archive.block_on(leased)
    }

    /// Reads the log from the base images to the point, checks it, and hands its pieces
    /// to `each`.
    fn read_log(&self, each: TakePiece<'_>) -> Result<LogReader> {
        let mut log = LogReader::new(&self.base, &self.root, self.at, self.before);
        let parts = self.line.from(self.base.first_part);
        let read = parts.map(|at| try_part(self.archive, at));
        let mut take = |part: std::result::Result<(PartHeader, Vec<u8>), Error>| match part {
            Ok((header, body)) => log.take(&header, &body, each),
            Err(damaged) => log.end_before(damaged),
        };
        self.carry_out(self.archive.in_order(read, &mut take))?;
        Ok(log)
    }

    /// Makes the log beside the images, whose chunks may still be absent: its segments, its control
    /// file, and the disks as of the point.
    pub(crate) fn build_log(&self, dir: &Path, images: &[PathBuf]) -> Result<RestoreReport> {
        let log_dir = log_dir_of(dir, images);
        let segment_size = self.root.segment_size();
        clear_log(&log_dir)?;
        LogCopy::begin(&log_dir)?;
        let mut slots: HashMap<u64, u32> = HashMap::new();
        let log = self.read_log(&mut |sequence, offset, bytes| {
            let new = slots.len() as u32;
            let slot = *slots.entry(sequence).or_insert(new);
            Ok(write_segment(&log_dir, slot, segment_size, offset, bytes)?)
        })?;
        let ids = self.base.images.iter().map(|image| image.disk_id);
        let copies: Vec<(u32, PathBuf)> = ids.zip(images.iter().cloned()).collect();
        let parts = self.log_parts(&log, slots.len(), &copies);
        AssembledLog::new(&log_dir, &parts)?.create()?;
        Ok(self.done(&log, log_dir, images, 0))
    }

    /// What to make the log of.
    fn log_parts<'b>(
        &self,
        log: &'b LogReader,
        segments: usize,
        images: &'b [(u32, PathBuf)],
    ) -> LogParts<'b> {
        LogParts {
            begun: &log.begun,
            newest: &log.root,
            images_lsn: self.base.images_lsn,
            first_sequence: self.base.first_sequence,
            segments: segments as u32,
            last: log.last,
            until: match log.at.0 {
                Point::Lsn(lsn) => lsn,
                _ => log.last.lsn,
            },
            images,
        }
    }

    fn done(
        &self,
        log: &LogReader,
        log_dir: PathBuf,
        images: &[PathBuf],
        chunks: u64,
    ) -> RestoreReport {
        let lsn = match log.at.0 {
            Point::Lsn(lsn) => lsn.min(log.last.lsn),
            _ => log.last.lsn,
        };
        RestoreReport {
            commit: Commit { lsn, ..log.last },
            log_dir,
            disks: restored_disks(images, &self.base),
            log_bytes: log.bytes,
            chunks,
        }
    }
}

/// The disks whose images are at these paths.
pub(crate) fn restored_disks(paths: &[PathBuf], base: &BaseHeader) -> Vec<RestoredDisk> {
    let disks = paths.iter().zip(&base.images);
    let disk = |(path, image): (&PathBuf, &BaseImage)| RestoredDisk {
        path: path.clone(),
        bytes: image.bytes,
    };
    disks.map(disk).collect()
}

/// The point with the LSN of a snapshot instead of its name; `None`: the line that ends with this
/// part has no such snapshot.
async fn resolve(archive: &Archive, end: &PartHeader, at: Point) -> Result<Option<Point>> {
    let Point::Snapshot(name) = at else {
        return Ok(Some(at));
    };
    let root = read_root(archive, end.root_at).await?;
    let snapshots = root.snapshots();
    let found = snapshots.iter().find(|snapshot| snapshot.name == name);
    Ok(found.map(|snapshot| Point::Lsn(snapshot.lsn)))
}

pub(crate) async fn fetch_chunk(
    archive: &Archive,
    base: &BaseHeader,
    image: &BaseImage,
    number: usize,
    hash: &Option<String>,
) -> Result<(usize, Option<Vec<u8>>)> {
    let Some(hash) = hash else {
        return Ok((number, None));
    };
    let name = layout::chunk(hash);
    let packed = archive.need(&name).await?;
    let len = base.chunk_len(image, number);
    let bytes = object::unpack(&packed, len as usize);
    let right = bytes.filter(|bytes| bytes.len() as u64 == len && object::hash(bytes) == *hash);
    match right {
        Some(bytes) => Ok((number, Some(bytes))),
        None => Err(Error::damaged(
            &name,
            "its bytes are not those that were sent; remove that object from the store, then push: \
             what the images still have is sent again",
        )),
    }
}

/// The start of a restore in a directory.
pub(crate) struct RestoreStart {
    /// To be written once all images have fetch maps.
    pub note: RestoreNote,
    /// Whether an earlier restore has left maps, which say what it has fetched.
    pub resumes: bool,
}

/// Begins in a directory, or goes on with what an earlier restore has left in it.
pub(crate) fn begin(archive: &Archive, dir: &Path, plan: &Plan) -> Result<RestoreStart> {
    let note = RestoreNote {
        archive: archive.shown().to_owned(),
        base: Some(plan.base.at),
        ready: None,
    };
    match RestoreNote::read(dir) {
        Some(RestoreNote {
            ready: Some(ready), ..
        }) => {
            let (dir, at) = (dir.display(), ready.at);
            return Err(Error::new(
                ErrorKind::InvalidInput,
                format!(
                    "{dir}: its disks may be in use, by a restore to {at}; go on with that one \
                     (--at {at}, from the same archive), or name another directory"
                ),
            ));
        }
        Some(earlier) if earlier == note => {
            return Ok(RestoreStart {
                note,
                resumes: true,
            });
        }
        Some(_) => {}
        None => refuse_occupied(dir)?,
    }
    // The maps that are there are not those of these images, or are not all.
    RestoreNote::default().write(dir)?;
    Ok(RestoreStart {
        note,
        resumes: false,
    })
}

/// Refuses a directory that has anything.
pub(crate) fn refuse_occupied(dir: &Path) -> Result<()> {
    let entries = fs::read_dir(dir);
    let mut entries = entries.map_err(|error| Error::local("read the directory", dir, error))?;
    if entries.next().is_none() {
        return Ok(());
    }
    let dir = dir.display();
    Err(Error::new(
        ErrorKind::InvalidInput,
        format!("{dir}: the directory is not empty; name one that does not exist yet"),
    ))
}

impl RestoreNote {
    /// The note of a restore in a directory.
    pub(crate) fn read(dir: &Path) -> Option<Self> {
        let text = fs::read(dir.join(NOTE)).ok()?;
        serde_json::from_slice(&text).ok()
    }

    /// Whether it is of a restore from this archive.
    pub(crate) fn is_from(&self, archive: &Archive) -> bool {
        self.archive == archive.shown()
    }

    pub(crate) fn write(&self, dir: &Path) -> Result<()> {
        write_note(dir, NOTE, self)
    }

    /// The restore has ended.
    pub(crate) fn remove(dir: &Path) -> Result<()> {
        let note = dir.join(NOTE);
        let removed = fs::remove_file(&note);
        removed.map_err(|error| Error::local("remove", &note, error))
    }
}

/// The name of a note that is not whole yet.
pub(crate) fn unfinished(note: &str) -> String {
    format!("{note}.new")
}

/// Writes a note to a file, as a whole or not at all.
pub(crate) fn write_note(dir: &Path, name: &str, note: &impl Serialize) -> Result<()> {
    let path = dir.join(name);
    let unfinished = dir.join(unfinished(name));
    let write = || {
        let file = File::create(&unfinished)?;
        serde_json::to_writer(&file, note)?;
        file.sync_all()?;
        fs::rename(&unfinished, &path)?;
        File::open(dir)?.sync_all()
    };
    write().map_err(|error| Error::local("write", &path, error))
}

/// Where the images go: the names they had, made different where two are the same.
pub(crate) fn image_paths(dir: &Path, images: &[BaseImage]) -> Vec<PathBuf> {
    let notes = [NOTE, REPLICA_NOTE].map(str::to_owned);
    let mut taken: Vec<_> = notes.iter().map(|note| unfinished(note)).collect();
    taken.extend(notes);
    if images.len() != 1 {
        taken.push(LOG_NAME.to_owned());
    }
    // The image, and what may be beside it.
    let names = |name: &str| ["", ".wal", ".fetch", ".fetch.new"].map(|end| format!("{name}{end}"));
    let paths = images.iter().map(|image| {
        // A name from the store must not lead out of the directory, nor command a terminal.
        let plain = Path::new(&image.name).file_name();
        let plain = plain.map_or("disk".into(), |name| name.to_string_lossy());
        let plain = plain.replace(char::is_control, "_");
        let mut name = plain.clone();
        let mut number = image.disk_id;
        while names(&name).iter().any(|name| taken.contains(name)) {
            name = format!("{number}-{plain}");
            number += 1;
        }
        taken.extend(names(&name));
        dir.join(name)
    });
    paths.collect()
}

/// The log of one disk is where it is looked for; that of several is not one's more than another's.
pub(crate) fn log_dir_of(dir: &Path, images: &[PathBuf]) -> PathBuf {
    match images {
        [only] => walvisor_storage::default_log_dir(only),
        _ => dir.join(LOG_NAME),
    }
}

/// Makes the log's directory, without what an earlier attempt has left.
pub(crate) fn clear_log(log_dir: &Path) -> Result<()> {
    let clear = || match fs::remove_dir_all(log_dir) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => fs::DirBuilder::new().create(log_dir),
    };
    clear().map_err(|error| Error::local("make the log's directory", log_dir, error))
}

/// Keeps other restores out of a directory until it is dropped.
pub(crate) fn lock_directory(dir: &Path) -> Result<File> {
    let made = fs::create_dir_all(dir).and_then(|()| File::open(dir));
    let file = made.map_err(|error| Error::local("make the directory", dir, error))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            let message = format!("{}: another restore fetches to it", dir.display());
            Err(Error::new(ErrorKind::InUse, message))
        }
        Err(TryLockError::Error(error)) => Err(Error::local("lock the directory", dir, error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_get_their_names_and_stay_in_the_directory() {
        let image = |disk_id, name: &str| BaseImage {
            disk_id,
            name: name.into(),
            bytes: 0,
            chunks: Vec::new(),
        };
        let images = [
            image(1, "a.img"),
            image(2, "a.img"),
            image(3, "../../etc/passwd"),
            image(4, ".."),
            image(5, "a.img.wal"),
            image(6, "disk.fetch"),
            image(7, "log"),
            image(8, "walvisor-restore.json.new"),
            image(9, "walvisor-replica.json"),
            image(10, "walvisor-replica.json.new"),
            image(11, "\x1b]0;owned\x07\u{9b}x\n"),
        ];
        let dir = Path::new("/d");
        let paths = image_paths(dir, &images);
        let wanted = [
            "a.img",
            "2-a.img",
            "passwd",
            "disk",
            "5-a.img.wal",
            "6-disk.fetch",
            "7-log",
            "8-walvisor-restore.json.new",
            "9-walvisor-replica.json",
            "10-walvisor-replica.json.new",
            "_]0;owned__x_",
        ];
        assert_eq!(paths, wanted.map(|name| dir.join(name)));
        assert_eq!(log_dir_of(dir, &paths), dir.join("log"));
        assert_eq!(log_dir_of(dir, &paths[..1]), dir.join("a.img.wal"));
    }
}
