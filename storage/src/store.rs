//! Creating, opening, checking and closing: a log directory and the disks on it.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use zerocopy::little_endian::U64;

use crate::catalog::{
    OpenBase, canonical, check_options, create_log, entry_path, has_control, invalid, open_control,
    register, set_size,
};
use crate::counters::Counters;
use crate::disk::{CacheMode, Disk, DiskState};
use crate::engine::{self, EngineKind};
use crate::error::{Error, ErrorKind, Result};
use crate::format::{Control, DiskEntry, Kind};
use crate::gather::{CommitWait, Gather};
use crate::index::{Index, Place};
use crate::keeper::{ControlFile, Keeper};
use crate::log::{KeeperState, Live, Log, State};
use crate::mutant::{Mutant, planted};
use crate::pace::Pace;
use crate::parallel;
use crate::recovery::{self, Found, Scan};
use crate::segment::{Directory, Medium};
use crate::stamp::Stamps;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Arc, Condvar, Mutex, RwLock};
use crate::transfer::Progress;
use crate::writer::Writer;
use crate::{LogCounters, MAX_REQUEST_BYTES, SECTOR_SIZE};

/// How a log is made and run.
#[derive(Clone, Copy, Debug)]
pub struct StoreOptions {
    /// Bytes of a segment file of a new log: a multiple of 4096, 64 KiB to 1 GiB. Default 64 MiB. Requests longer
    /// than a quarter of it are refused.
    pub segment_size: u64,
    /// Most segment files of a new log: 4 to 65536. Default 32.
    pub max_segments: u32,
    /// Which engine moves the bytes.
    pub engine: EngineKind,
    /// Whether one sync serves every FLUSH that waits for it. Off, each FLUSH costs a sync of its own, as
    /// without group commit: for comparison only. Default on.
    pub group_commit: bool,
    /// How long a commit group may wait for more to join it. Default: adaptive.
    pub commit_wait: CommitWait,
    /// Whether each client that waits for a commit group has its records written by a write of their own, in the order of
    /// their LSNs, before the sync that all share: a client is a port. For comparison only, with what one write for the
    /// whole group is worth; the log that comes of it differs in nothing but the size of its batches. Without
    /// `group_commit` it changes nothing. Default off.
    pub write_per_waiter: bool,
    /// Added to the time of each sync of the log, to measure what a slower medium would do. Default zero.
    pub sync_latency: Duration,
    /// Most operations a second on the log's segments, as the small volumes of clouds have it: a sync is one, a write is
    /// one for each 256 KiB begun, and a write that syncs too is both. Checkpoints and reads are free. With this or
    /// `operation_latency` one thread does all writes of the log, so that no other has to wait. Default: no limit.
    pub operations_per_second: Option<NonZeroU32>,
    /// Added to the time of each write to the log's segments and of each sync of them. Default zero.
    pub operation_latency: Duration,
    /// Threads that read a log while it is opened, and copy an image while it is imported. Default: as many as there are
    /// processors.
    pub threads: Option<NonZeroUsize>,
}

impl Default for StoreOptions {
    fn default() -> Self {
        Self {
            segment_size: 64 << 20,
            max_segments: 32,
            engine: EngineKind::Auto,
            group_commit: true,
            commit_wait: CommitWait::default(),
            write_per_waiter: false,
            sync_latency: Duration::ZERO,
            operations_per_second: None,
            operation_latency: Duration::ZERO,
            threads: None,
        }
    }
}

impl StoreOptions {
    /// Whether the log's writer leads every batch.
    fn writer_alone(&self) -> bool {
        let paced = self.operations_per_second.is_some() || !self.operation_latency.is_zero();
        paced || self.write_per_waiter
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

/// An open log with its disks. Dropping it closes it; [`close`](Self::close) tells whether that worked.
pub struct Store {
    log: Arc<Log>,
    disks: Vec<Disk>,
    keeper: Option<JoinHandle<Result<()>>>,
    /// Goes last: until everything is durable it is needed.
    writer: Option<Writer>,
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
            "{}: a disk of {size} bytes can't be made: give a positive multiple of 512 below 2^63",
            path.display()
        )));
    }
    check_options(options)?;
    let create = OpenOptions::new().write(true).create_new(true).open(path);
    let file = create.map_err(|error| Error::io("create the disk", path, error))?;
    let fill = || {
        set_size(&file, path, size)?;
        let opened = has_control(log_dir).then(|| open_control(log_dir));
        adopt(path, size, log_dir, options, opened.transpose()?)
    };
    fill().inspect_err(|_| {
        // Best effort: the error that is being reported matters more.
        let _ = std::fs::remove_file(path);
    })
}

/// Registers a new base image, complete and synced, in the `opened` log, or in one that is made for it.
pub(crate) fn adopt(
    path: &Path,
    size: u64,
    log_dir: &Path,
    options: &StoreOptions,
    opened: Option<ControlFile>,
) -> Result<()> {
    match opened {
        Some(mut control) => {
            refuse_unapplied(path, log_dir, &control.control)?;
            register(&mut control, path, size)?;
            control.write()?;
        }
        None => {
            let control = create_log(log_dir, options, &[(path, size)])?;
            directory(log_dir, EngineKind::Blocking).create_segment(
                0,
                control.control.header.segment_size.get(),
                &mut |_| {},
            )?;
        }
    }
    Ok(())
}

/// Refuses to put a disk in the place of another whose records wait in the log.
fn refuse_unapplied(path: &Path, log_dir: &Path, control: &Control) -> Result<()> {
    let real = canonical(path)?;
    let Some(old) = control.disks.iter().find(|disk| entry_path(disk) == real) else {
        return Ok(());
    };
    let medium = directory(log_dir, EngineKind::Blocking);
    let (_, indexes) = read_log(&medium, log_dir, control, &mut |_, _| {})?;
    match indexes.contains_key(&old.id.get()) {
        false => Ok(()),
        true => Err(Error::new(
            ErrorKind::WrongLog,
            format!(
                "{}: the log in {} holds unapplied records of the disk that was here before; put that back, or \
                 remove the log",
                path.display(),
                log_dir.display()
            ),
        )),
    }
}

impl Store {
    /// Opens the log in `log_dir` with these disks, recovering what a crash left. A log that is not there is
    /// made, for base images that belong to no log.
    ///
    /// # Errors
    /// See [`ErrorKind`]. Unless it is [`ErrorKind::Io`], nothing was changed on the medium.
    pub fn open(log_dir: &Path, disks: &[DiskOptions], options: &StoreOptions) -> Result<Self> {
        Self::open_telling(log_dir, disks, options, &mut |_, _| {})
    }

    /// As [`open`](Self::open), and tells of recovery as it goes on: of a log that was closed there is none to tell of.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_telling(
        log_dir: &Path,
        disks: &[DiskOptions],
        options: &StoreOptions,
        progress: Progress<'_>,
    ) -> Result<Self> {
        check_options(options)?;
        let engine = engine::probe(options.engine)
            .map_err(|e| Error::io("use io_uring for the log", log_dir, e))?;
        let medium = Directory {
            threads: parallel::thread_count(options.threads),
            sync_latency: options.sync_latency,
            pace: Arc::new(Pace::new(
                options.operations_per_second,
                options.operation_latency,
            )),
            ..directory(log_dir, engine)
        };
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
                let disks: Vec<_> = opened
                    .iter()
                    .map(|base| (base.options.path.as_path(), base.size))
                    .collect();
                create_log(log_dir, options, &disks)?
            }
        };
        let mut states = Vec::new();
        for base in opened {
            states.push(Arc::new(base.attach(&mut control, log_dir)?));
        }
        let attached = states.len();
        let medium = Box::new(medium);
        let (log, keeper) = assemble(medium, log_dir, control, &mut states, options, progress)?;
        let disks = states[..attached]
            .iter()
            .map(|state| Disk {
                log: log.clone(),
                state: state.clone(),
            })
            .collect();
        Self::start(log, disks, keeper)
    }

    /// Starts the threads of an assembled log.
    pub(crate) fn start(log: Arc<Log>, disks: Vec<Disk>, keeper: Keeper) -> Result<Self> {
        let failed = |error| Error::io("start the log's threads", &log.dir, error);
        let writer = Some(Writer::start(&log).map_err(failed)?);
        let keeper = thread::Builder::new()
            .name("log-keeper".into())
            .spawn(move || keeper.run());
        let keeper = Some(keeper.map_err(failed)?);
        Ok(Self {
            log,
            disks,
            keeper,
            writer,
        })
    }

    /// The disks, in the order they were asked for.
    pub fn disks(&self) -> &[Disk] {
        &self.disks
    }

    /// What the log has done since it was opened.
    pub fn log_counters(&self) -> LogCounters {
        self.log.counters.snapshot()
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
        let closed = keeper.join().unwrap_or_else(|_| {
            Err(Error::new(
                ErrorKind::Io,
                format!("{}: the log's thread panicked", self.log.dir.display()),
            ))
        });
        self.writer = None;
        closed
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            tracing::error!("{error}");
        }
    }
}

pub(crate) fn directory(log_dir: &Path, engine: EngineKind) -> Directory {
    Directory {
        path: log_dir.to_path_buf(),
        engine,
        threads: parallel::thread_count(None),
        sync_latency: Duration::ZERO,
        pace: Arc::default(),
    }
}

/// Recovers a log and makes it ready to run; its keeper has not begun.
pub(crate) fn assemble(
    medium: Box<dyn Medium>,
    log_dir: &Path,
    mut control: ControlFile,
    states: &mut Vec<Arc<DiskState>>,
    options: &StoreOptions,
    progress: Progress<'_>,
) -> Result<(Arc<Log>, Keeper)> {
    let scan = recover(medium.as_ref(), log_dir, &mut control, states, progress)?;
    for state in states.iter() {
        let marked = state.base.write_mark(Some(&state.uuid));
        marked.map_err(|error| Error::io("mark", &state.path, error))?;
    }
    let recovered = (scan.records > 0).then_some(scan.last_lsn);
    let log = Arc::new(new_log(log_dir, &control, medium, scan, options));
    let keeper = Keeper::new(log.clone(), states.clone(), control, recovered)?;
    Ok((log, keeper))
}

/// The index of each disk by its id, with the LSN of its newest record.
pub(crate) type Indexes = HashMap<u32, (Index, u64)>;

/// Reads the whole log: what it holds, and where the newest bytes of each disk are.
pub(crate) fn read_log(
    medium: &dyn Medium,
    log_dir: &Path,
    control: &Control,
    progress: Progress<'_>,
) -> Result<(Scan, Indexes)> {
    let mut indexes = Indexes::new();
    let sizes: HashMap<u32, u64> = control
        .disks
        .iter()
        .map(|d| (d.id.get(), d.size.get()))
        .collect();
    let mut stray = None;
    let scan = recovery::scan(
        medium,
        log_dir,
        control,
        &mut |Found {
                  lsn,
                  descriptor,
                  segment,
                  offset,
                  in_base,
                  ..
              }| {
            if in_base {
                return;
            }
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
        progress,
    )?;
    match stray {
        None => Ok((scan, indexes)),
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
pub(crate) fn recover(
    medium: &dyn Medium,
    log_dir: &Path,
    control: &mut ControlFile,
    states: &mut Vec<Arc<DiskState>>,
    progress: Progress<'_>,
) -> Result<Scan> {
    let (scan, mut indexes) = read_log(medium, log_dir, &control.control, progress)?;
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
    // Frozen at once: the first checkpoint copies what was recovered, whatever is written meanwhile, and so needs
    // no room in a ring that may be full.
    for state in states.iter() {
        if let Some((index, last_lsn)) = indexes.remove(&state.id) {
            *state.index_mut() = index;
            state.index_mut().freeze();
            state.last_lsn.store(last_lsn, Ordering::Release);
        }
    }
    let header = &mut control.control.header;
    let seen = match planted(Mutant::LsnRestart) {
        true => scan.last_lsn,
        false => scan.max_lsn.max(scan.last_lsn),
    };
    let next_lsn = U64::new(seen + 1);
    if header.next_lsn != next_lsn || control.moved {
        // Before anything is wiped: numbers seen on the medium are never given out again.
        header.next_lsn = next_lsn;
        header.next_cid = U64::new(scan.max_cid + 1);
        control.write()?;
    }
    // What was read may be in the page cache only. It must be as durable as it looks before anyone builds on
    // it, and what is behind the end must never be taken for part of the log again.
    for live in scan
        .live
        .iter()
        .filter(|_| !planted(Mutant::RecoverySkipsSync))
    {
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
    if !base.size_fits(entry) || base.mark.is_some_and(|mark| mark != entry.disk) {
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
        sectors: AtomicU64::new(entry.size.get() / SECTOR_SIZE),
        base: Arc::new(base.file),
        read_only: true,
        no_flush: false,
        write_cache: AtomicBool::new(true),
        last_lsn: AtomicU64::new(0),
        index: RwLock::default(),
    })
}

fn new_log(
    log_dir: &Path,
    control: &ControlFile,
    medium: Box<dyn Medium>,
    scan: Scan,
    options: &StoreOptions,
) -> Log {
    let header = &control.control.header;
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
        next_lsn: header.next_lsn.get(),
        appended: scan.last_lsn,
        batched: scan.last_lsn,
        applied: header.checkpoint_lsn.get(),
        next_cid: scan.max_cid + 1,
        stamps: Stamps::after(scan.last_unix_us),
        next_sequence: scan.max_sequence + 1,
        pending: Default::default(),
        pending_bytes: 0,
        queued_bytes: 0,
        waiters: Vec::new(),
        group_end: None,
        waiting_clients: 0,
        open_clients: 0,
        writing: Default::default(),
        ends: Default::default(),
        syncing: false,
        writer_asleep: false,
        gather: Gather::new(options.commit_wait),
        tail: None,
        keeper: KeeperState {
            checkpoint: live.len() * 2 >= header.max_segments.get() as usize,
            files: scan.files,
            ..KeeperState::default()
        },
        live,
        free: scan.free.into_iter().chain(void).collect(),
        unsynced: Vec::new(),
        starved: false,
        ports: Vec::new(),
    };
    Log {
        dir: log_dir.to_path_buf(),
        uuid: header.log,
        segment_size: header.segment_size.get(),
        max_segments: header.max_segments.get(),
        medium,
        write_per_waiter: options.write_per_waiter && options.group_commit,
        writer_alone: options.writer_alone(),
        most_served: if options.group_commit { usize::MAX } else { 1 },
        durable: AtomicU64::new(scan.last_lsn),
        written: AtomicU64::new(scan.last_lsn),
        durable_end: AtomicU64::new(header.segment_size.get()),
        poisoned: AtomicBool::new(false),
        held_back: AtomicBool::new(false),
        counters: Counters::default(),
        writer: OnceLock::new(),
        state: Mutex::new(state),
        keeper_wanted: Condvar::new(),
    }
}

// A request longer than a quarter of the default segment would be refused: keep the documented limit true.
const _: () = assert!(MAX_REQUEST_BYTES as u64 <= (64 << 20) / 4);
