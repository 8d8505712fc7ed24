//! Creating, opening, checking and closing: a log directory and the disks on it.

use std::collections::HashMap;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use zerocopy::little_endian::U64;

use crate::attach::{Indexes, OpenBase, Waiting, attach};
use crate::catalog::{check_options, find_control, has_control, open_or_create_log, register};
use crate::counters::Counters;
use crate::disk::{CacheMode, Disk, DiskState};
use crate::engine::{self, EngineKind};
use crate::error::{Error, ErrorKind, Result};
use crate::file;
use crate::format::{Control, Kind};
use crate::gather::{CommitWait, Gather};
use crate::index::Place;
use crate::keeper::{ControlFile, Keeper};
use crate::log::{FailOnPanic, KeeperState, Live, Log, State};
use crate::mutant::{Mutant, planted};
use crate::pace::Pace;
use crate::parallel;
use crate::recovery::{self, Found, Scan};
use crate::segment::{Directory, Medium};
use crate::stamp::Stamps;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Arc, Condvar, Mutex};
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

/// Makes the log in `log_dir`, for base images that belong to no log; or opens the one that others have made meanwhile.
fn first_control(
    bases: &[OpenBase],
    log_dir: &Path,
    options: &StoreOptions,
) -> Result<ControlFile> {
    bases
        .iter()
        .try_for_each(|base| base.refuse_open(log_dir))?;
    let opened = open_or_create_log(log_dir, options, &mut |control| {
        let mut bases = bases.iter();
        bases.try_for_each(|base| register(control, &base.path, base.size).map(drop))
    });
    Ok(opened?.0)
}

impl Store {
    /// Makes the log in `log_dir` for these disks, as [`open`](Self::open) would, if there is none, and makes the names of what is
    /// there durable: for a process that gives up the right to do so before it opens the log.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn make_log(log_dir: &Path, disks: &[DiskOptions], options: &StoreOptions) -> Result<()> {
        check_options(options)?;
        // Of a log that is there, and of the images, the names are made durable: that takes a right too.
        disks
            .iter()
            .try_for_each(|disk| file::settle_name(&disk.path))?;
        if has_control(log_dir) {
            return file::settle_name(log_dir);
        }
        let bases = OpenBase::open_all(disks, false)?;
        first_control(&bases, log_dir, options).map(drop)
    }

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
        let opened = open_log(Box::new(medium), log_dir, disks, options, progress)?;
        let (log, disks, keeper) = opened;
        Self::start(log, disks, keeper)
    }

    /// Starts the threads of an assembled log.
    pub(crate) fn start(log: Arc<Log>, disks: Vec<Disk>, keeper: Keeper) -> Result<Self> {
        let failed = |error| Error::io("start the log's threads", &log.dir, error);
        let writer = Some(Writer::start(&log).map_err(failed)?);
        let keeper = thread::Builder::new()
            .name("log-keeper".into())
            .spawn(move || {
                let log = keeper.log.clone();
                let _failing = FailOnPanic::new(&log);
                keeper.run()
            });
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

/// Opens the log in `log_dir` with these disks, as [`Store::open`] does, and makes it ready to run. Its keeper has not
/// begun.
pub(crate) fn open_log(
    medium: Box<dyn Medium>,
    log_dir: &Path,
    disks: &[DiskOptions],
    options: &StoreOptions,
    progress: Progress<'_>,
) -> Result<(Arc<Log>, Vec<Disk>, Keeper)> {
    let control = find_control(log_dir)?;
    let bases = OpenBase::open_all(disks, control.is_some())?;
    let mut control = match control {
        Some(control) => control,
        None => first_control(&bases, log_dir, options)?,
    };
    let read = read_for_recovery(medium.as_ref(), log_dir, &mut control, progress)?;
    let states = attach(bases, &mut control, log_dir, &read.1)?;
    let (log, keeper) = assemble(medium, log_dir, control, &states, read, options)?;
    let disks = states[..disks.len()]
        .iter()
        .map(|state| Disk {
            log: log.clone(),
            state: state.clone(),
        })
        .collect();
    Ok((log, disks, keeper))
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

/// Recovers a log that was read, with all disks that it holds records of, and makes it ready to run; its keeper has not
/// begun.
fn assemble(
    medium: Box<dyn Medium>,
    log_dir: &Path,
    mut control: ControlFile,
    states: &[Arc<DiskState>],
    read: (Scan, Indexes),
    options: &StoreOptions,
) -> Result<(Arc<Log>, Keeper)> {
    for state in states {
        // Two copies of a disk that both go on from here shall not meet again at one generation.
        let step = 1 + (medium.salt() >> 32);
        if let Some(entry) = control.control.disk_mut(state.id) {
            entry.announce(step);
            let next = entry.next_generation.get();
            state.generation.store(next, Ordering::Relaxed);
        }
    }
    let scan = recover(&mut control, states, read)?;
    // Durable before the first record is logged.
    let marked = states.iter().map(|state| state.mark(true));
    let marked = marked.collect::<Result<Vec<_>>>()?;
    control.change(|control| {
        for (state, marked) in states.iter().zip(marked) {
            if let Some(entry) = control.disk_mut(state.id) {
                entry.marked = u8::from(marked);
                entry.settle();
            }
        }
    })?;
    let recovered = (scan.records > 0).then_some(scan.last_lsn);
    let log = Arc::new(new_log(log_dir, &control, medium, scan, options));
    let keeper = Keeper::new(log.clone(), states.to_vec(), control, recovered)?;
    Ok((log, keeper))
}

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
            let waiting = indexes.entry(descriptor.disk_id.get()).or_default();
            waiting.index.active.insert(sector, sectors, lsn, place);
            waiting.last_lsn = lsn;
            waiting.records += 1;
            waiting.payload_bytes += descriptor.payload_len();
        },
        progress,
    )?;
    let mut scan = scan;
    // What a later record has replaced nobody reads any more.
    scan.damaged.retain(|damaged| {
        let needed = |waiting: &Waiting| damaged.is_needed(&waiting.index.active);
        indexes.get(&damaged.disk_id).is_some_and(needed)
    });
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

/// Reads the whole log, to build on it: what is read is on the medium, not in the page cache only.
pub(crate) fn read_for_recovery(
    medium: &dyn Medium,
    log_dir: &Path,
    control: &mut ControlFile,
    progress: Progress<'_>,
) -> Result<(Scan, Indexes)> {
    control.confirm()?;
    for (_, segment) in medium.segments()? {
        let dropped = match () {
            () if planted(Mutant::RecoverySkipsSync) => Ok(()),
            () if planted(Mutant::RecoveryTrustsCache) => segment.file.sync_data(),
            () => segment.file.drop_cache(),
        };
        dropped.map_err(|e| Error::io("sync the log segment", &segment.path, e))?;
    }
    let (scan, waiting) = read_log(medium, log_dir, &control.control, progress)?;
    if let Some(first) = scan.damaged.first() {
        let (count, dir) = (scan.damaged.len(), log_dir.display());
        tracing::error!(
            "{dir}: {count} blocks of 4096 bytes are not what was written, the first in record {}: reads of them fail; \
             'walvisor disk check', with the disk closed, names sectors and LSNs",
            first.lsn
        );
    }
    Ok((scan, waiting))
}

/// Gives the disks what the log holds of them, and makes where it ends durable.
pub(crate) fn recover(
    control: &mut ControlFile,
    states: &[Arc<DiskState>],
    (scan, mut indexes): (Scan, Indexes),
) -> Result<Scan> {
    // Frozen at once: the first checkpoint copies what was recovered, whatever is written meanwhile, and so needs
    // no room in a ring that may be full.
    for state in states {
        if let Some(waiting) = indexes.remove(&state.id) {
            *state.index_mut() = waiting.index;
            state.index_mut().freeze();
            state.last_lsn.store(waiting.last_lsn, Ordering::Release);
        }
    }
    let header = &mut control.control.header;
    let seen = match planted(Mutant::LsnRestart) {
        true => scan.last_lsn,
        false => scan.max_lsn.max(scan.last_lsn),
    };
    // Before anything is wiped: numbers seen on the medium are never given out again.
    header.next_lsn = U64::new(seen + 1);
    header.next_cid = U64::new(scan.max_cid + 1);
    control.write()?;
    // What is behind the end must never be taken for part of the log again.
    scan.void
        .iter()
        .try_for_each(|segment| recovery::wipe(segment))?;
    Ok(scan)
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
        awaiting: Default::default(),
        group_end: None,
        waiting_clients: 0,
        open_clients: 0,
        writing: Default::default(),
        end: 0,
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
