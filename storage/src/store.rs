//! Creating, opening, checking and closing: a log directory and the disks on it.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, RwLock};
use std::thread::JoinHandle;

use zerocopy::FromZeros;
use zerocopy::little_endian::{U16, U32, U64};

use crate::disk::{CacheMode, Disk, DiskState};
use crate::engine::{self, EngineKind};
use crate::error::{Error, ErrorKind, Result};
use crate::file;
use crate::format::{
    BLOCK, CONTROL_MAGIC, CONTROL_SLOT, Control, ControlHeader, Decoded, DiskEntry, Kind,
    MAX_DISKS, Uuid, VERSION,
};
use crate::index::{Index, Place};
use crate::keeper::{ControlFile, Keeper};
use crate::log::{Counters, KeeperState, Live, Log, LogCounters, State};
use crate::recovery::{self, Scan};
use crate::segment::Segment;
use crate::{MAX_REQUEST_BYTES, SECTOR_SIZE};

/// How a log is made and run.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// Bytes of a segment file of a new log: a multiple of 4096, 1 MiB to 1 GiB. Default 64 MiB. Requests longer
    /// than a quarter of it are refused.
    pub segment_size: u64,
    /// Most segment files of a new log: 4 to 65536. Default 16.
    pub max_segments: u32,
    /// Which engine moves the bytes.
    pub engine: EngineKind,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            segment_size: 64 << 20,
            max_segments: 16,
            engine: EngineKind::Auto,
        }
    }
}

/// A disk to be opened.
#[derive(Clone, Debug)]
pub struct DiskOptions {
    /// The base image.
    pub path: PathBuf,
    /// Refuse writes.
    pub read_only: bool,
    /// What FLUSH and a completed WRITE mean.
    pub cache: CacheMode,
}

impl DiskOptions {
    /// A writable writeback disk.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            read_only: false,
            cache: CacheMode::Writeback,
        }
    }
}

/// What a log holds, as [`check`] found it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogReport {
    /// Segment files.
    pub segments: u64,
    /// Valid batches in segments still needed.
    pub batches: u64,
    /// Records not in the base images yet, and their payload bytes.
    pub records: u64,
    /// Payload bytes of those records.
    pub payload_bytes: u64,
    /// All records up to here are in the base images.
    pub checkpoint_lsn: u64,
    /// The newest record.
    pub last_lsn: u64,
    /// A write that was never acknowledged lies torn behind the end: normal after a crash, and ignored.
    pub torn_tail: bool,
    /// Where each disk's base image was when last open, and its size in bytes.
    pub disks: Vec<(PathBuf, u64)>,
}

/// An open log with its disks. Dropping it closes it; [`close`](Self::close) tells whether that worked.
pub struct Store {
    log: Arc<Log>,
    disks: Vec<Disk>,
    keeper: Option<JoinHandle<Result<()>>>,
}

/// The log directory of a disk that names none: `disk.img` has `disk.img.wal`.
pub fn default_log_dir(disk: &Path) -> PathBuf {
    let mut name = disk.as_os_str().to_owned();
    name.push(".wal");
    name.into()
}

/// Creates a sparse base image of `size` bytes and registers it in the log in `log_dir`, which is made if it
/// is not there. `options` count for a new log only.
///
/// # Errors
/// If the size is no positive multiple of 512, the file exists, or the log is open elsewhere. Nothing is
/// left behind.
pub fn create_disk(path: &Path, size: u64, log_dir: &Path, options: &StoreOptions) -> Result<()> {
    if size == 0 || !size.is_multiple_of(SECTOR_SIZE) || size > i64::MAX as u64 {
        return Err(invalid(format!(
            "{}: a disk of {size} bytes can't be made: give a positive multiple of 512",
            path.display()
        )));
    }
    check_options(options)?;
    let create = OpenOptions::new().write(true).create_new(true).open(path);
    let file = create.map_err(|error| Error::io("create the disk", path, error))?;
    let fill = || {
        file.set_len(size)
            .and_then(|()| file.sync_all())
            .map_err(|e| Error::io("size the disk", path, e))?;
        let new_log = !has_control(log_dir);
        let mut control = if new_log {
            create_log(log_dir, options)?
        } else {
            open_control(log_dir)?
        };
        register(&mut control, path, size)?;
        control.write()?;
        if new_log {
            Segment::create(log_dir, 0, control.control.header.segment_size.get())?;
        }
        Ok(())
    };
    fill().inspect_err(|_| {
        // Best effort: the error that is being reported matters more.
        let _ = std::fs::remove_file(path);
    })
}

/// Reads the whole log in `log_dir` and verifies every checksum, changing nothing.
///
/// # Errors
/// [`ErrorKind::Damaged`] if acknowledged records are missing; [`ErrorKind::Locked`] if it is open elsewhere.
pub fn check(log_dir: &Path) -> Result<LogReport> {
    let control = open_control(log_dir)?.control;
    let sizes: HashMap<u32, u64> = control
        .disks
        .iter()
        .map(|d| (d.id.get(), d.size.get()))
        .collect();
    let mut stray = None;
    let scan = recovery::scan(log_dir, &control, &mut |lsn, descriptor, _, _| {
        let end = descriptor
            .sector
            .get()
            .checked_add(u64::from(descriptor.sectors.get()));
        let size = sizes.get(&descriptor.disk_id.get()).copied().unwrap_or(0) / SECTOR_SIZE;
        if end.is_none_or(|end| end > size) {
            stray.get_or_insert(lsn);
        }
    })?;
    refuse_stray(stray, log_dir)?;
    Ok(LogReport {
        segments: (scan.live.len() + scan.free.len() + scan.void.len()) as u64,
        batches: scan.batches,
        records: scan.records,
        payload_bytes: scan.payload_bytes,
        checkpoint_lsn: control.header.checkpoint_lsn.get(),
        last_lsn: scan.last_lsn,
        torn_tail: scan.torn_tail,
        disks: control
            .disks
            .iter()
            .map(|entry| (entry_path(entry), entry.size.get()))
            .collect(),
    })
}

impl Store {
    /// Opens the log in `log_dir` with these disks, recovering what a crash left. A log that is not there is
    /// made, for base images that belong to no log.
    ///
    /// # Errors
    /// See [`ErrorKind`]. Unless it is [`ErrorKind::Io`], nothing was changed on the medium.
    pub fn open(log_dir: &Path, disks: &[DiskOptions], options: &StoreOptions) -> Result<Self> {
        check_options(options)?;
        let engine = engine::probe(options.engine)
            .map_err(|e| Error::io("use io_uring for the log", log_dir, e))?;
        let opened = disks
            .iter()
            .map(OpenBase::open)
            .collect::<Result<Vec<_>>>()?;
        let mut control = match has_control(log_dir) {
            true => open_control(log_dir)?,
            false => {
                opened
                    .iter()
                    .try_for_each(|base| base.refuse_mark(log_dir))?;
                let mut control = create_log(log_dir, options)?;
                opened
                    .iter()
                    .try_for_each(|base| register(&mut control, &base.options.path, base.size))?;
                control.write()?;
                control
            }
        };
        let mut states = Vec::new();
        for base in opened {
            states.push(Arc::new(base.attach(&mut control, log_dir)?));
        }
        let attached = states.len();
        let scan = recover(log_dir, &mut control, &mut states)?;
        let log = Arc::new(new_log(log_dir, &control, engine, scan)?);
        for state in &states {
            let marked = file::write_mark(&state.base, Some(&state.uuid));
            marked.map_err(|error| Error::io("mark", &state.path, error))?;
        }
        let disks = states[..attached]
            .iter()
            .map(|state| Disk {
                log: log.clone(),
                state: state.clone(),
            })
            .collect();
        let keeper = Keeper::new(log.clone(), states, control)?;
        let keeper = std::thread::Builder::new()
            .name("log-keeper".into())
            .spawn(move || keeper.run());
        let keeper =
            Some(keeper.map_err(|error| Error::io("start the log's thread", log_dir, error))?);
        Ok(Self { log, disks, keeper })
    }

    /// The disks, in the order they were asked for.
    pub fn disks(&self) -> &[Disk] {
        &self.disks
    }

    /// What the log has done since it was opened.
    pub fn log_counters(&self) -> LogCounters {
        self.log.counters()
    }

    /// Makes everything durable, copies the log to the base images, and closes. The base images are plain raw
    /// images then. Every [`Port`](crate::Port) should be gone before.
    ///
    /// # Errors
    /// If the log had failed, or the copy fails: nothing acknowledged is lost, the next open recovers it.
    pub fn close(mut self) -> Result<()> {
        self.stop()
    }

    fn stop(&mut self) -> Result<()> {
        let Some(keeper) = self.keeper.take() else {
            return Ok(());
        };
        self.log.lock().keeper.stop = true;
        self.log.keeper_wanted.notify_all();
        keeper.join().unwrap_or_else(|_| {
            Err(Error::new(
                ErrorKind::Io,
                format!("{}: the log's thread panicked", self.log.dir.display()),
            ))
        })
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            tracing::error!("{error}");
        }
    }
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidInput, message)
}

fn check_options(options: &StoreOptions) -> Result<()> {
    let size = options.segment_size;
    if !(1 << 20..=1 << 30).contains(&size) || !size.is_multiple_of(BLOCK as u64) {
        return Err(invalid(format!(
            "a segment of {size} bytes can't be: give 1 MiB to 1 GiB, a multiple of 4096"
        )));
    }
    if !(4..=65536).contains(&options.max_segments) {
        return Err(invalid(format!(
            "{} segments can't be: give 4 to 65536",
            options.max_segments
        )));
    }
    Ok(())
}

/// A base image that is open and locked, not yet known to the log.
struct OpenBase {
    options: DiskOptions,
    file: File,
    size: u64,
    mark: Option<Uuid>,
}

impl OpenBase {
    fn open(options: &DiskOptions) -> Result<Self> {
        let path = &options.path;
        let metadata =
            std::fs::metadata(path).map_err(|error| Error::io("open the disk", path, error))?;
        if !metadata.is_file() {
            return Err(invalid(format!(
                "{}: not a regular file; a disk is a raw image file",
                path.display()
            )));
        }
        let size = metadata.len();
        if size == 0 || !size.is_multiple_of(SECTOR_SIZE) {
            return Err(invalid(format!(
                "{}: {size} bytes; a disk's size is a positive multiple of 512 (truncate -s makes it one)",
                path.display()
            )));
        }
        let file = file::open_direct(path, true)
            .map_err(|error| Error::io("open the disk", path, error))?;
        file::lock(&file, path)?;
        let mark = file::read_mark(&file);
        Ok(Self {
            options: options.clone(),
            file,
            size,
            mark,
        })
    }

    /// A marked image has, or had, its newest bytes in a log: a new one must not hide that.
    fn refuse_mark(&self, log_dir: &Path) -> Result<()> {
        match self.mark {
            None => Ok(()),
            Some(uuid) => Err(Error::new(
                ErrorKind::WrongLog,
                format!(
                    "{}: disk {} was not closed and its log is not at {}; name it with log=DIR, or give up what \
                     it holds with: setfattr -x user.walvisor.disk {0}",
                    self.options.path.display(),
                    file::hex(&uuid),
                    log_dir.display(),
                ),
            )),
        }
    }

    /// Finds the disk's entry in the log, and brings its path up to date there (in memory).
    fn attach(self, control: &mut ControlFile, log_dir: &Path) -> Result<DiskState> {
        let path = canonical(&self.options.path)?;
        let entries = &mut control.control.disks;
        let found = match self.mark {
            Some(uuid) => entries.iter().position(|entry| entry.disk == uuid),
            // Unmarked: closed cleanly, or copied without its attributes. Its place or its name tells.
            None => entries
                .iter()
                .position(|entry| entry_path(entry) == path)
                .or_else(|| {
                    let same = |entry: &DiskEntry| {
                        entry_path(entry).file_name() == path.file_name()
                            && entry.size.get() == self.size
                    };
                    entries.iter().position(same)
                }),
        };
        let Some(found) = found else {
            let others: Vec<_> = entries
                .iter()
                .map(|entry| entry_path(entry).display().to_string())
                .collect();
            return Err(Error::new(
                ErrorKind::WrongLog,
                format!(
                    "{}: the log in {} belongs to {}, not to this disk; name the right one with log=DIR",
                    self.options.path.display(),
                    log_dir.display(),
                    if others.is_empty() {
                        "no disk yet".into()
                    } else {
                        others.join(", ")
                    },
                ),
            ));
        };
        let entry = &mut entries[found];
        if entry.size.get() != self.size {
            return Err(Error::new(
                ErrorKind::WrongLog,
                format!(
                    "{}: {} bytes, but its log in {} knows a disk of {}; restore the image's size (truncate -s {3})",
                    self.options.path.display(),
                    self.size,
                    log_dir.display(),
                    entry.size.get(),
                ),
            ));
        }
        if entry_path(entry) != path {
            set_entry_path(entry, &path)?;
            control.moved = true;
        }
        Ok(DiskState {
            id: entry.id.get(),
            uuid: entry.disk,
            path: self.options.path,
            sectors: self.size / SECTOR_SIZE,
            base: Arc::new(self.file),
            read_only: self.options.read_only,
            no_flush: self.options.cache == CacheMode::Unsafe,
            write_cache: AtomicBool::new(self.options.cache != CacheMode::Writethrough),
            last_lsn: AtomicU64::new(0),
            index: RwLock::default(),
        })
    }
}

fn canonical(path: &Path) -> Result<PathBuf> {
    path.canonicalize()
        .map_err(|error| Error::io("find", path, error))
}

fn entry_path(entry: &DiskEntry) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    let len = usize::from(entry.path_len.get()).min(entry.path.len());
    PathBuf::from(std::ffi::OsStr::from_bytes(&entry.path[..len]))
}

fn set_entry_path(entry: &mut DiskEntry, path: &Path) -> Result<()> {
    use std::os::unix::ffi::OsStrExt;
    let bytes = path.as_os_str().as_bytes();
    let Some(into) = entry.path.get_mut(..bytes.len()) else {
        return Err(invalid(format!(
            "{}: a path of more than 480 bytes; use a shorter one",
            path.display()
        )));
    };
    into.copy_from_slice(bytes);
    entry.path_len = U16::new(bytes.len() as u16);
    Ok(())
}

fn has_control(log_dir: &Path) -> bool {
    log_dir.join("control").exists()
}

/// Makes the directory and a control file without disks; not yet written.
fn create_log(log_dir: &Path, options: &StoreOptions) -> Result<ControlFile> {
    match std::fs::create_dir(log_dir) {
        Ok(()) => {}
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            let read = |error| Error::io("read the log directory", log_dir, error);
            if std::fs::read_dir(log_dir).map_err(read)?.next().is_some() {
                return Err(Error::new(
                    ErrorKind::Damaged,
                    format!(
                        "{}: not empty, and no log (it has no control file); restore it, or name another directory",
                        log_dir.display()
                    ),
                ));
            }
        }
        Err(error) => return Err(Error::io("create the log directory", log_dir, error)),
    }
    let path = log_dir.join("control");
    let make = || -> std::io::Result<File> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .open(&path)?;
        file.set_len(2 * CONTROL_SLOT as u64)?;
        Ok(file)
    };
    let file = make().map_err(|error| Error::io("create the log's control file", &path, error))?;
    file::lock(&file, log_dir)?;
    file::sync_dir(log_dir)?;
    file::sync_dir(
        log_dir
            .parent()
            .filter(|p| !p.as_os_str().is_empty())
            .unwrap_or(Path::new(".")),
    )?;
    let mut header = ControlHeader::new_zeroed();
    header.magic = CONTROL_MAGIC;
    header.version = U32::new(VERSION);
    header.log = file::random();
    header.segment_size = U64::new(options.segment_size);
    header.max_segments = U32::new(options.max_segments);
    header.first_sequence = U64::new(1);
    header.next_lsn = U64::new(1);
    header.next_cid = U64::new(1);
    Ok(ControlFile {
        path,
        file,
        control: Control {
            header,
            disks: Vec::new(),
        },
        moved: false,
    })
}

/// Opens, locks and reads the control file.
fn open_control(log_dir: &Path) -> Result<ControlFile> {
    let path = log_dir.join("control");
    let open = OpenOptions::new().read(true).write(true).open(&path);
    let file = open.map_err(|error| Error::io("open the log", &path, error))?;
    file::lock(&file, log_dir)?;
    let mut newest: Option<Control> = None;
    for slot in 0..2 {
        let mut bytes = vec![0; CONTROL_SLOT];
        if file
            .read_exact_at(&mut bytes, slot * CONTROL_SLOT as u64)
            .is_err()
        {
            continue;
        }
        match Control::decode(&bytes) {
            Decoded::Version(version) => return Err(recovery::unknown_version(&path, version)),
            Decoded::Invalid => {}
            Decoded::Valid(control) => {
                let newer = |old: &Control| control.header.generation > old.header.generation;
                if newest.as_ref().is_none_or(newer) {
                    newest = Some(control);
                }
            }
        }
    }
    let sane = |control: &Control| {
        let header = &control.header;
        let options = StoreOptions {
            segment_size: header.segment_size.get(),
            max_segments: header.max_segments.get(),
            engine: EngineKind::Auto,
        };
        check_options(&options).is_ok()
    };
    match newest.filter(sane) {
        Some(control) => Ok(ControlFile {
            moved: false,
            path,
            file,
            control,
        }),
        None => Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "{}: truncated or damaged: no valid copy in it; restore the log from a copy",
                path.display()
            ),
        )),
    }
}

/// Adds a disk to the log's table (in memory).
fn register(control: &mut ControlFile, path: &Path, size: u64) -> Result<()> {
    let disks = &mut control.control.disks;
    if disks.len() >= MAX_DISKS {
        return Err(invalid(format!(
            "{}: the log holds {MAX_DISKS} disks, its most; use another log",
            control.path.display()
        )));
    }
    let mut entry = DiskEntry::new_zeroed();
    entry.disk = file::random();
    entry.id = U32::new(disks.iter().map(|disk| disk.id.get()).max().unwrap_or(0) + 1);
    entry.size = U64::new(size);
    set_entry_path(&mut entry, &canonical(path)?)?;
    disks.push(entry);
    Ok(())
}

fn refuse_stray(stray: Option<u64>, log_dir: &Path) -> Result<()> {
    match stray {
        None => Ok(()),
        Some(lsn) => Err(Error::new(
            ErrorKind::Damaged,
            format!(
                "{}: record {lsn} names no place on a disk of this log; restore the log",
                log_dir.display()
            ),
        )),
    }
}

/// Reads the log into the disks' indexes. Disks with records that nobody opened are opened too, and added to
/// `states`, so that the log can be checkpointed and recycled.
fn recover(
    log_dir: &Path,
    control: &mut ControlFile,
    states: &mut Vec<Arc<DiskState>>,
) -> Result<Scan> {
    let mut indexes: HashMap<u32, (Index, u64)> = HashMap::new();
    let sizes: HashMap<u32, u64> = control
        .control
        .disks
        .iter()
        .map(|d| (d.id.get(), d.size.get()))
        .collect();
    let mut stray = None;
    let scan = recovery::scan(
        log_dir,
        &control.control,
        &mut |lsn, descriptor, segment, offset| {
            let (sector, sectors) = (descriptor.sector.get(), u64::from(descriptor.sectors.get()));
            let size = sizes.get(&descriptor.disk_id.get()).copied().unwrap_or(0) / SECTOR_SIZE;
            if sectors == 0 || sector.checked_add(sectors).is_none_or(|end| end > size) {
                stray.get_or_insert(lsn);
                return;
            }
            let place = match Kind::from_raw(descriptor.kind.get()) {
                Some(Kind::Write) => Place::Log {
                    segment: segment.clone(),
                    offset,
                },
                kind => Place::Zero {
                    unmap: kind == Some(Kind::Discard),
                },
            };
            let (index, last_lsn) = indexes.entry(descriptor.disk_id.get()).or_default();
            index.active.insert(sector, sectors, lsn, place);
            *last_lsn = lsn;
        },
    )?;
    refuse_stray(stray, log_dir)?;
    for entry in control
        .control
        .disks
        .iter()
        .filter(|entry| indexes.contains_key(&entry.id.get()))
    {
        if states.iter().all(|state| state.id != entry.id.get()) {
            states.push(Arc::new(open_absent(entry, log_dir)?));
        }
    }
    for state in states.iter() {
        if let Some((index, last_lsn)) = indexes.remove(&state.id) {
            *state.index_mut() = index;
            state.last_lsn.store(last_lsn, Ordering::Release);
        }
    }
    let header = &mut control.control.header;
    let next_lsn = U64::new(scan.max_lsn.max(scan.last_lsn) + 1);
    if header.next_lsn != next_lsn || control.moved {
        // Before anything is wiped: numbers seen on the medium are never given out again.
        header.next_lsn = next_lsn;
        header.next_cid = U64::new(scan.max_cid + 1);
        control.write()?;
    }
    // What was read may be in the page cache only. It must be as durable as it looks before anyone builds on
    // it, and what is behind the end must never be taken for part of the log again.
    for live in &scan.live {
        live.segment
            .file
            .sync_data()
            .map_err(|e| Error::io("sync the log segment", &live.segment.path, e))?;
    }
    scan.void
        .iter()
        .try_for_each(|segment| recovery::wipe(segment))?;
    Ok(scan)
}

/// Opens a disk that has records in the log but was not asked for.
fn open_absent(entry: &DiskEntry, log_dir: &Path) -> Result<DiskState> {
    let path = entry_path(entry);
    let base = OpenBase::open(&DiskOptions::new(&path)).map_err(|error| {
        Error::new(
            error.kind(),
            format!(
                "{}: holds unapplied records of another disk, which can't be opened ({error}); put it back, or open \
                 both together",
                log_dir.display()
            ),
        )
    })?;
    if base.size != entry.size.get() || base.mark.is_some_and(|mark| mark != entry.disk) {
        return Err(Error::new(
            ErrorKind::WrongLog,
            format!(
                "{}: not the disk whose unapplied records are in {}; put it back",
                path.display(),
                log_dir.display()
            ),
        ));
    }
    Ok(DiskState {
        id: entry.id.get(),
        uuid: entry.disk,
        path,
        sectors: base.size / SECTOR_SIZE,
        base: Arc::new(base.file),
        read_only: true,
        no_flush: false,
        write_cache: AtomicBool::new(true),
        last_lsn: AtomicU64::new(0),
        index: RwLock::default(),
    })
}

fn new_log(log_dir: &Path, control: &ControlFile, engine: EngineKind, scan: Scan) -> Result<Log> {
    let header = &control.control.header;
    let files = Segment::list(log_dir)?
        .iter()
        .map(|(slot, _)| slot + 1)
        .max()
        .unwrap_or(0);
    let void = scan.void.into_iter();
    let live: std::collections::VecDeque<Live> = scan
        .live
        .into_iter()
        .map(|live| Live {
            segment: live.segment,
            sequence: live.sequence,
            last_lsn: live.last_lsn,
        })
        .collect();
    let state = State {
        next_lsn: scan.max_lsn.max(scan.last_lsn) + 1,
        appended: scan.last_lsn,
        batched: scan.last_lsn,
        next_cid: scan.max_cid + 1,
        next_sequence: scan.max_sequence + 1,
        pending: Default::default(),
        pending_bytes: 0,
        waiters: Vec::new(),
        busy: false,
        tail: None,
        keeper: KeeperState {
            checkpoint: live.len() * 2 >= header.max_segments.get() as usize,
            files,
            ..KeeperState::default()
        },
        live,
        free: scan.free.into_iter().chain(void).collect(),
        unsynced: Vec::new(),
        starved: false,
        ports: Vec::new(),
    };
    Ok(Log {
        dir: log_dir.to_path_buf(),
        uuid: header.log,
        segment_size: header.segment_size.get(),
        max_segments: header.max_segments.get(),
        engine,
        durable: AtomicU64::new(scan.last_lsn),
        written: AtomicU64::new(scan.last_lsn),
        poisoned: AtomicBool::new(false),
        held_back: AtomicBool::new(false),
        counters: Counters::default(),
        state: Mutex::new(state),
        keeper_wanted: Condvar::new(),
    })
}

// A request longer than a quarter of the default segment would be refused: keep the documented limit true.
const _: () = assert!(MAX_REQUEST_BYTES as u64 <= (64 << 20) / 4);
