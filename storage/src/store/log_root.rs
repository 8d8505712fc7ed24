//! The root of a log as of one moment, for its archive: what the control file says.

use std::path::{Path, PathBuf};

use zerocopy::FromZeros;
use zerocopy::little_endian::{U16, U32, U64};

use crate::Buffer;
use crate::catalog::control::{
    ControlFile, existing_log, has_log, read_unlocked_control, real_path,
};
use crate::catalog::options::SEGMENTS;
use crate::catalog::snapshot::Snapshot;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{CONTROL_SLOT, Control, DecodeResult, SAMPLES, Sample};
use crate::log::commit::Commit;
use crate::medium::fetch_map::FetchMap;
use crate::medium::file::{DataFile, Segment};
use crate::medium::filesystem::{self, OWNER, OpenMode, files};
use crate::medium::holes::DataRanges;
use crate::medium::lock::Access;
use crate::medium::mark::{ImageMark, hex};
use crate::store::rewind::rewind_unready;
use crate::view::point::Point;

/// Fewest segments that a restored log may have beside those it comes with.
const SPARE_SEGMENTS: u64 = 8;

/// What a log's control file says, as of one moment.
#[derive(Clone, Debug)]
pub struct LogRoot {
    pub(crate) control: Control,
    home: PathBuf,
}

/// The base image of a disk of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RootImage {
    /// The disk's number in the log.
    pub disk_id: u32,
    /// Where the image was when it was last open.
    pub path: PathBuf,
    /// Size of the disk in bytes.
    pub bytes: u64,
    /// Whether it lacks bytes that are in a spill file beside the log, because it was failing.
    pub spilled: bool,
}

impl LogRoot {
    /// Reads the root of the log in `log_dir`, whether or not it is in use. Takes no lock.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is no log, or it can't be read.
    pub fn read(log_dir: &Path) -> Result<Self> {
        if !has_log(log_dir) {
            return Err(Error::new(
                ErrorKind::NotFound,
                format!(
                    "{}: this is not a log (it has no control file); name a log directory, such as \
                     disk.img.wal",
                    log_dir.display()
                ),
            ));
        }
        let ControlFile { control, home, .. } = read_unlocked_control(log_dir)?;
        Ok(Self { control, home })
    }

    /// The root as bytes, in the format of a slot of the control file.
    pub fn encode(&self) -> Vec<u8> {
        self.control.encode().to_vec()
    }

    /// The root as bytes, as [`encode`](Self::encode) has it, but without the number of the write:
    /// equal if the control file says the same.
    pub fn contents(&self) -> Vec<u8> {
        let mut control = self.control.clone();
        control.header.generation = U64::new(0);
        control.encode().to_vec()
    }

    /// A root from its bytes.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] if they are not those of a root.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let decoded = (bytes.len() == CONTROL_SLOT).then(|| Control::decode(bytes));
        match decoded {
            Some(DecodeResult::Valid(control)) => Ok(Self {
                control,
                home: PathBuf::from("/"),
            }),
            Some(DecodeResult::Version(version)) => Err(Error::new(
                ErrorKind::UnsupportedVersion,
                format!("the log has format version {version}; use the program that wrote it"),
            )),
            _ => Err(Error::new(
                ErrorKind::Damaged,
                "the log's root is damaged: its checksum is wrong",
            )),
        }
    }

    /// The log's UUID, as 32 hex digits.
    pub fn log(&self) -> String {
        hex(&self.control.header.log)
    }

    /// Bytes of a segment file.
    pub fn segment_size(&self) -> u64 {
        self.control.header.segment_size.get()
    }

    /// The base images have all records up to this LSN.
    pub fn checkpoint_lsn(&self) -> u64 {
        self.control.header.checkpoint_lsn.get()
    }

    /// The newest record that the base images have. Of its group and time only the group is known.
    pub fn checkpoint(&self) -> Commit {
        Commit {
            lsn: self.checkpoint_lsn(),
            cid: self.control.header.next_cid.get().saturating_sub(1),
            unix_us: 0,
        }
    }

    /// Segments with a lower sequence are not needed any more.
    pub fn first_sequence(&self) -> u64 {
        self.control.header.first_sequence.get()
    }

    /// The base images may have records up to this LSN.
    pub fn horizon_lsn(&self) -> u64 {
        self.control.horizon()
    }

    /// The log was durable up to here, perhaps further.
    pub fn durable_lsn(&self) -> u64 {
        self.control.header.durable_lsn.get()
    }

    /// The named points of the log, oldest first.
    pub fn snapshots(&self) -> Vec<Snapshot> {
        Snapshot::all(&self.control)
    }

    /// The base images of the log's disks.
    pub fn images(&self) -> Vec<RootImage> {
        let disks = self.control.disks.iter();
        let known = disks.filter(|disk| disk.path_len.get() > 0);
        known
            .map(|disk| RootImage {
                disk_id: disk.id.get(),
                path: disk.path(&self.home),
                bytes: disk.size.get(),
                spilled: self.control.is_spilled(disk.id.get()),
            })
            .collect()
    }

    /// Why the log's records can't be put over base images as of `before`, an earlier root: a disk
    /// came, left, shrank, has another image, or its records were discarded. `None`: they can.
    pub fn why_other_images(&self, before: &Self) -> Option<String> {
        for old in &before.control.disks {
            let (id, path) = (old.id.get(), old.path(&before.home));
            let path = path.display();
            let Some(disk) = self.control.disk(id) else {
                return Some(format!("{path} has left the log"));
            };
            if disk.disk != old.disk {
                return Some(format!("{path} is another disk"));
            } else if disk.size < old.size || self.control.cuts(id) != before.control.cuts(id) {
                return Some(format!("{path} was cut to a smaller size"));
            } else if disk.void_lsn != old.void_lsn {
                return Some(format!("records of {path} were discarded"));
            } else if self.control.since(id) != before.control.since(id) {
                return Some(format!("{path} has another image"));
            }
        }
        let ids: Vec<_> = before.control.disks.iter().map(|disk| disk.id).collect();
        let new = self
            .control
            .disks
            .iter()
            .find(|disk| !ids.contains(&disk.id));
        new.map(|new| format!("{} has come to the log", new.path(&self.home).display()))
    }
}

/// Reads a base image that may be in use.
pub struct ImageReader {
    file: Box<dyn DataFile>,
    path: PathBuf,
    bytes: u64,
}

impl ImageReader {
    /// Opens an image for reading, without a lock.
    ///
    /// # Errors
    /// If it can't be opened, or has fewer bytes than its disk.
    pub fn open(image: &RootImage) -> Result<Self> {
        let path = image.path.clone();
        FetchMap::refuse(&path)?;
        let file = files().open(&path, OpenMode::ReadDirect);
        let file = file.map_err(|error| Error::io("open the base image", &path, error))?;
        let len = file.len();
        let len = len.map_err(|error| Error::io("read its length", &path, error))?;
        if len < image.bytes {
            let message = format!(
                "{}: {len} bytes, fewer than the {} of its disk; put the disk's image back",
                path.display(),
                image.bytes
            );
            return Err(Error::new(ErrorKind::Damaged, message));
        }
        Ok(Self {
            file,
            path,
            bytes: image.bytes,
        })
    }

    /// The bytes from `offset` on, at most `len`, a multiple of 4096; `None` if they are a hole.
    /// The image may change meanwhile.
    ///
    /// # Errors
    /// If it can't be read.
    pub fn read(&self, offset: u64, len: u64) -> Result<Option<Buffer>> {
        let end = offset.saturating_add(len).min(self.bytes);
        let mut data = DataRanges::new(self.file.host(), &self.path, offset..end, u64::MAX);
        if data.next().transpose()?.is_none() {
            return Ok(None);
        }
        let mut bytes = Buffer::for_overwrite((end - offset) as usize);
        let read = self.file.read_exact_at(&mut bytes, offset);
        read.map_err(|error| Error::io("read the base image", &self.path, error))?;
        Ok(Some(bytes))
    }
}

/// What to make a log of: base images that were copied while the log went on, and the records
/// since.
#[derive(Debug)]
pub struct LogParts<'a> {
    /// The log's root when the copy of the images began.
    pub begun: &'a LogRoot,
    /// Its newest root.
    pub newest: &'a LogRoot,
    /// When the copy ended, the images had no record after this LSN.
    pub images_lsn: u64,
    /// The sequence of the first segment.
    pub first_sequence: u64,
    /// The number of segment files, which are in the directory already.
    pub segments: u32,
    /// The last record.
    pub last: Commit,
    /// What the disks are to be as of, if that is before `last`: a batch comes as a whole.
    pub until: u64,
    /// The disks' numbers and the copies of their images.
    pub images: &'a [(u32, PathBuf)],
}

/// The path of segment file number `slot` in `log_dir`.
pub fn segment_path(log_dir: &Path, slot: u32) -> PathBuf {
    Segment::path(log_dir, slot)
}

/// Writes bytes of a segment to segment file number `slot` in `log_dir`. Makes the file, which has
/// zeroes where nothing was written.
///
/// # Errors
/// If it can't be written.
pub fn write_segment(
    log_dir: &Path,
    slot: u32,
    segment_size: u64,
    offset: u64,
    bytes: &[u8],
) -> Result<()> {
    let path = Segment::path(log_dir, slot);
    let write = || {
        if !files().exists(&path)? {
            // One that is too short would be a damaged log.
            let unfinished = path.with_extension("new");
            let file = files().open(&unfinished, OpenMode::Emptied)?;
            file.set_len(segment_size)?;
            file.allocate(segment_size)?;
            file.sync_all()?;
            files().rename(&unfinished, &path)?;
        }
        let file = files().open(&path, OpenMode::Kept { mode: OWNER })?;
        file.write_all_at(bytes, offset)
    };
    write().map_err(|error| Error::io("write the log segment", &path, error))
}

/// A log made of its segments and images, as if its owner had been killed while it copied the log
/// to the images: opening it recovers the disks. Its control file is not written yet.
pub struct AssembledLog {
    log_dir: PathBuf,
    root: LogRoot,
    images: Vec<PathBuf>,
    /// What the disks are to be as of, if that is before the last record.
    until: Option<Point>,
}

impl AssembledLog {
    /// Looks whether a log can be made of these parts, as far as no file tells.
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] if not.
    pub fn check(parts: &LogParts<'_>) -> Result<()> {
        parts.control().map(drop)
    }

    /// Marks the images, makes them as large as their disks, and makes the control file, in memory.
    ///
    /// # Errors
    /// If the images can't be written, or the roots contradict each other.
    pub fn new(log_dir: &Path, parts: &LogParts<'_>) -> Result<Self> {
        Ok(Self {
            log_dir: log_dir.to_owned(),
            root: assembled(log_dir, parts)?,
            images: parts.images.iter().map(|(_, path)| path.clone()).collect(),
            until: (parts.until < parts.last.lsn).then_some(Point::Lsn(parts.until)),
        })
    }

    /// What the control file will say.
    pub fn root(&self) -> &LogRoot {
        &self.root
    }

    /// Syncs all segments, and writes the control file: the log is there when this has ended. Before
    /// its end a log may be there whose disks are newer than wanted; their images must not be ready.
    ///
    /// # Errors
    /// If the files can't be written, or there is a log already.
    pub fn create(self) -> Result<()> {
        for (_, path) in Segment::list(&*files(), &self.log_dir)? {
            sync_segment(&path)?;
        }
        write_control(&self.log_dir, self.root.control)?;
        if let Some(until) = self.until {
            rewind_unready(&self.images, &self.log_dir, until)?;
        }
        Ok(())
    }

    /// Syncs the segments with these numbers, which have changed, and takes the place of the log
    /// that was there. After a kill the log is one or the other.
    ///
    /// # Errors
    /// If the files can't be written.
    pub fn replace(self, lock: &mut LockedLog, changed: &[u32]) -> Result<()> {
        for slot in changed {
            sync_segment(&Segment::path(&self.log_dir, *slot))?;
        }
        if !changed.is_empty() {
            // Some may be new.
            filesystem::sync_dir(&self.log_dir)?;
        }
        lock.0.change_both(|control| *control = self.root.control)
    }
}

/// A log that nobody else may use.
pub struct LockedLog(ControlFile);

impl LockedLog {
    /// Locks the log in `log_dir`.
    ///
    /// # Errors
    /// [`ErrorKind::Locked`] if it is in use; if there is none, or it can't be read.
    pub fn lock(log_dir: &Path) -> Result<Self> {
        existing_log(log_dir, Access::Log).map(Self)
    }

    /// What the control file says.
    pub fn root(&self) -> LogRoot {
        LogRoot {
            control: self.0.control.clone(),
            home: self.0.home.clone(),
        }
    }
}

fn assembled(log_dir: &Path, parts: &LogParts<'_>) -> Result<LogRoot> {
    let mut control = parts.control()?;
    let real = real_path(log_dir)?;
    let home = filesystem::parent(&real).to_owned();
    for entry in &mut control.disks {
        entry.path_len = U16::new(0);
        let copy = parts.images.iter().find(|(id, _)| *id == entry.id.get());
        let Some((_, path)) = copy else { continue };
        let file = files().open(path, OpenMode::Existing);
        let file = file.map_err(|error| Error::io("open the base image", path, error))?;
        let sized = file.set_len(entry.size.get());
        sized.map_err(|error| Error::io("size the disk", path, error))?;
        entry.set_path(&real_path(path)?, &home)?;
        let mark = ImageMark {
            disk: entry.disk,
            generation: entry.generation.get(),
            open: true,
        };
        let failed = |error| Error::io("mark the base image", path, error);
        entry.marked = u8::from(file.write_mark(Some(&mark)).map_err(failed)?);
        file.sync_all().map_err(failed)?;
        entry.set_inode(&file.inode().map_err(failed)?);
        filesystem::sync_dir(filesystem::parent(path))?;
    }
    Ok(LogRoot { control, home })
}

impl LogParts<'_> {
    /// The control file, without the images.
    fn control(&self) -> Result<Control> {
        let mut control = self.newest.control.clone();
        let checkpoint = self.begun.control.header.checkpoint_lsn;
        let end = self.last.lsn;
        control.snapshots.retain(|snapshot| {
            let lsn = snapshot.lsn.get();
            snapshot.is_named() && (self.images_lsn..=end).contains(&lsn)
        });
        for snapshot in &mut control.snapshots {
            snapshot.saved = U32::new(0);
        }
        for image in &mut control.images {
            (image.spilled, image.written) = (U16::new(0), U64::new(0));
        }
        for entry in &mut control.disks {
            entry.samples = [Sample::new_zeroed(); SAMPLES];
            (entry.resizing, entry.marked) = (0, 0);
            entry.generation = entry.generation.max(entry.next_generation);
            entry.next_generation = entry.generation;
        }
        let changed = control.newest_change();
        let header = &mut control.header;
        let most = u64::from(self.segments) + SPARE_SEGMENTS;
        let limit = *SEGMENTS.end();
        if most > u64::from(limit) {
            return Err(Error::new(
                ErrorKind::Damaged,
                format!(
                    "{} segments of log since the images were copied, and a log has at most \
                     {limit}; restore to an earlier point, or to one after the next copy",
                    self.segments
                ),
            ));
        }
        header.max_segments = U32::new(header.max_segments.get().max(most as u32));
        header.first_sequence = U64::new(self.first_sequence);
        header.checkpoint_lsn = checkpoint;
        header.copying_lsn = U64::new(self.images_lsn);
        let newest = end.max(self.images_lsn).max(changed);
        header.next_lsn = U64::new(newest.saturating_add(1));
        header.next_cid = U64::new(self.last.cid.saturating_add(1));
        header.durable_lsn = U64::new(self.last.lsn);
        if !control.fits() || !control.counted() || !control.is_ahead() {
            return Err(Error::new(
                ErrorKind::Damaged,
                "the log's roots in the archive contradict each other",
            ));
        }
        Ok(control)
    }
}

fn sync_segment(path: &Path) -> Result<()> {
    let synced = files().open(path, OpenMode::Existing);
    let synced = synced.and_then(|file| file.sync_all());
    synced.map_err(|error| Error::io("sync the log segment", path, error))
}

fn write_control(log_dir: &Path, mut control: Control) -> Result<()> {
    let path = log_dir.join("control");
    let unfinished = log_dir.join("control.new");
    let mut write = || {
        let file = files().open(&unfinished, OpenMode::Emptied)?;
        for _ in 0..2 {
            let generation = control.header.generation.get() + 1;
            control.header.generation = U64::new(generation);
            let slot = generation % 2 * CONTROL_SLOT as u64;
            file.write_all_at(&control.encode(), slot)?;
        }
        file.sync_all()?;
        files().rename_new(&unfinished, &path)
    };
    write().map_err(|error| Error::io("write the log's control file", &path, error))?;
    filesystem::sync_dir(log_dir)?;
    filesystem::sync_dir(filesystem::parent(log_dir))
}
