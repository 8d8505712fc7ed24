//! Creating, opening, checking and closing: a log directory and the disks on it.

use std::path::{Path, PathBuf};

use crate::catalog::control::{
    ControlFile, find_control, has_log, open_control, open_or_create_log, register,
};
use crate::catalog::log_location::LogLocation;
use crate::catalog::mark_text::MarkText;
use crate::catalog::options::{DiskOptions, FullLogPolicy, StoreOptions, check_options};
use crate::catalog::retention::Retention;
use crate::catalog::snapshot::Snapshot;
use crate::disk::handle::Disk;
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::keeper::Keeper;
use crate::log::clock::LogClock;
use crate::log::commit::{Commit, PositionCache, SavedExtentsCache};
use crate::log::commit_delay::CommitDelay;
use crate::log::counters::Counters;
use crate::log::disk_state::DiskState;
use crate::log::group_commit::Writer;
use crate::log::holds::Holds;
use crate::log::image::DiskImage;
use crate::log::pipeline::Pipeline;
use crate::log::ring::SegmentRing;
use crate::log::spill::Spill;
use crate::log::state::{Log, LogState, PanicGuard};
use crate::medium::directory::{Directory, Medium, directory, directory_to_read};
use crate::medium::engine::{self, EngineKind};
use crate::medium::file::{Appender, Segment};
use crate::medium::filesystem::{self, OpenMode};
use crate::medium::lock::Access;
use crate::medium::pace::{Pace, SlowAppender};
use crate::parallel::Progress;
use crate::recovery::replay::{UnappliedByDisk, read_for_recovery, read_log_until, recover};
use crate::recovery::scan::Scan;
use crate::store::attach::{OpenBase, announce_open, attach, enter_all, find};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Arc, Condvar, Mutex, WakeFlag};
use crate::{LogCounters, MAX_REQUEST_BYTES, parallel};

/// An open log with its disks. Dropping it closes it; [`close`](Self::close) also reports errors.
pub struct Store {
    pub(crate) log: Arc<Log>,
    pub(crate) disks: Vec<Disk>,
    keeper: Option<JoinHandle<Result<()>>>,
    /// Dropped last: the log needs its writer until everything is durable.
    pub(crate) writer: Option<Writer>,
    /// The control file of a log open for reading only, whose lock keeps writers out. Otherwise the
    /// keeper has it.
    pub(crate) control: Option<ControlFile>,
}

/// The disks that are not [detached](DiskOptions::detached).
fn used(disks: &[DiskOptions]) -> Vec<DiskOptions> {
    let used = disks.iter().filter(|disk| !disk.detached);
    used.cloned().collect()
}

/// Creates the log in `log_dir` for base images that belong to no log, or opens it if another
/// process has just created it.
fn first_control(
    bases: &[OpenBase],
    log_dir: &Path,
    options: &StoreOptions,
) -> Result<ControlFile> {
    bases
        .iter()
        .try_for_each(|base| base.refuse_foreign(log_dir))?;
    let opened = open_or_create_log(log_dir, options, &mut |control| {
        let mut bases = bases.iter();
        bases.try_for_each(|base| register(control, &base.path, base.size, 0).map(drop))
    });
    Ok(opened?.0)
}

impl Store {
    /// Creates the log in `log_dir` for these disks if there is none, as [`open`](Self::open)
    /// would, and makes the names of the log and the images durable. For a process that drops the
    /// necessary privileges before it opens the log.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn make_log(log_dir: &Path, disks: &[DiskOptions], options: &StoreOptions) -> Result<()> {
        check_options(options)?;
        // Syncing the names of an existing log and of the images needs privileges too.
        disks
            .iter()
            .try_for_each(|disk| filesystem::settle_name(&disk.path))?;
        if has_log(log_dir) {
            return filesystem::settle_name(log_dir);
        }
        let bases = OpenBase::open_all(&used(disks), Access::Write, log_dir, false)?;
        first_control(&bases, log_dir, options).map(drop)
    }

    /// Opens the log in `log_dir` with these disks, recovering it after a crash. If there is no
    /// log, creates it, for base images that belong to no other log.
    ///
    /// # Errors
    /// See [`ErrorKind`]. Unless it is [`ErrorKind::Io`], nothing on the medium has changed.
    pub fn open(log_dir: &Path, disks: &[DiskOptions], options: &StoreOptions) -> Result<Self> {
        Self::open_with_progress(log_dir, disks, options, &mut |_, _| {})
    }

    /// As [`open`](Self::open), and reports the progress of recovery. For a cleanly closed log,
    /// which needs no recovery, `progress` is not called.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_with_progress(
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
            ..directory(log_dir, engine)
        };
        let opened = open_log(Box::new(medium), log_dir, disks, options, progress)?;
        let (log, disks, keeper) = opened;
        Self::start(log, disks, keeper)
    }

    /// Opens an existing log with these disks for reading only, whatever their options say. Nothing
    /// is written, and what is only in the log is read from there. So the log and the images may be
    /// on a read-only file system or belong to another user, and several processes may open them
    /// like this at the same time.
    ///
    /// # Errors
    /// As [`open`](Self::open); [`ErrorKind::NotFound`] if there is no log.
    pub fn open_read_only(
        log_dir: &Path,
        disks: &[DiskOptions],
        options: &StoreOptions,
    ) -> Result<Self> {
        check_options(options)?;
        let engine = engine::probe(options.engine)
            .map_err(|e| Error::io("use io_uring for the log", log_dir, e))?;
        let medium = Directory {
            engine,
            ..directory_to_read(log_dir, Access::LogRead, options.threads)
        };
        let mut control = open_control(log_dir, Access::LogRead)?;
        let bases = OpenBase::open_all(&used(disks), Access::Read, log_dir, true)?;
        let known = &mut control.control;
        let (scan, mut unapplied) = read_log_until(&medium, log_dir, known, u64::MAX)?;
        let found = find(&bases, &control, log_dir, &unapplied)?;
        let newest = scan.newest(&control.control).lsn;
        for (base, place) in bases.iter().zip(&found) {
            base.without_past(&mut control, *place, newest)?;
        }
        let segments = (scan, Vec::new());
        let log = Arc::new(new_log(
            log_dir,
            &control,
            Box::new(medium),
            segments,
            options,
        ));
        log.lock().keeper.gone = true;
        let disks = bases.into_iter().zip(found).map(|(base, place)| {
            let options = DiskOptions {
                read_only: true,
                ..base.options
            };
            let known = &control.control;
            let entry = &known.disks[place];
            let spill = Spill::of(&control, entry.id.get(), OpenMode::Read)?;
            let image = DiskImage::new(base.file.into(), spill);
            let mut state = DiskState::new(entry, &options, image);
            state.rewinds = Mutex::new(known.rewinds_of(state.id).copied().collect());
            state.since_lsn = known.since(state.id);
            let mut index = state.index_mut();
            index.active = unapplied.remove(&state.id).unwrap_or_default().extents;
            index.count_in(&log.counters.index);
            drop(index);
            Ok(Disk {
                log: log.clone(),
                state: Arc::new(state),
            })
        });
        Ok(Self {
            disks: disks.collect::<Result<_>>()?,
            log,
            keeper: None,
            writer: None,
            control: Some(control),
        })
    }

    /// Starts the threads of a log that is ready to run.
    pub(crate) fn start(log: Arc<Log>, disks: Vec<Disk>, keeper: Keeper) -> Result<Self> {
        let failed = |error| Error::io("start the log's threads", &log.dir, error);
        for absent in &keeper.disks[disks.len()..] {
            absent.detached.store(true, Ordering::Relaxed);
        }
        let writer = Some(Writer::start(&log).map_err(failed)?);
        let keeper = thread::Builder::new()
            .name("log-keeper".into())
            .spawn(move || {
                let log = keeper.log.clone();
                let _failing = PanicGuard::new(&log);
                keeper.run()
            });
        let keeper = Some(keeper.map_err(failed)?);
        Ok(Self {
            log,
            disks,
            keeper,
            writer,
            control: None,
        })
    }

    /// The disks, in the order in which they were given and then [added](Self::add_disk).
    pub fn disks(&self) -> &[Disk] {
        &self.disks
    }

    /// Writes a mark into the log: see [`Disk::mark`].
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the store has no disk; else as [`Disk::mark`].
    pub fn mark(&self, text: &MarkText) -> Result<Commit> {
        let none = || {
            let dir = self.log.dir.display();
            invalid(format!("{dir}: a mark needs a disk of the log: open one"))
        };
        self.disks.first().ok_or_else(none)?.mark(text)
    }

    /// What the log has done since it was opened.
    pub fn log_counters(&self) -> LogCounters {
        self.log.counters.snapshot()
    }

    /// Makes everything durable, copies the log to the base images, and closes. The base images are
    /// then plain raw images, unless [`StoreOptions::close_time`] ran out first: then a warning
    /// says how much stays in the log, and the next open goes on copying. Drop every
    /// [`Port`](crate::Port) before.
    ///
    /// # Errors
    /// If the log had failed, or the copy fails. Nothing acknowledged is lost; the next open
    /// recovers it.
    pub fn close(mut self) -> Result<()> {
        self.stop()
    }

    /// [Closes](Self::close) several logs at the same time.
    ///
    /// # Errors
    /// The error of the first log that can't be closed. The others are closed all the same.
    pub fn close_all(stores: Vec<Self>) -> Result<()> {
        stores.iter().for_each(|store| store.log.stop_keeper());
        let closed: Vec<_> = stores.into_iter().map(Self::close).collect();
        closed.into_iter().collect()
    }

    fn stop(&mut self) -> Result<()> {
        let Some(keeper) = self.keeper.take() else {
            return Ok(());
        };
        self.log.stop_keeper();
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

/// Opens a log with this disk, and others as detached disks, and closes it once the base images
/// have everything.
///
/// # Errors
/// If the log keeps history, which this would end.
pub(crate) fn copy_closed(path: &Path, log_dir: &Path, detached: &[PathBuf]) -> Result<()> {
    let medium = Box::new(directory(log_dir, EngineKind::Blocking));
    let mut disks = vec![DiskOptions::new(path)];
    disks.extend(detached.iter().map(DiskOptions::detached));
    let options = StoreOptions::default();
    let (log, disks, mut keeper) = open_log(medium, log_dir, &disks, &options, &mut |_, _| {})?;
    if log.lock().keeps_history() {
        return Err(invalid(format!(
            "{0}: its log keeps the history of its disks, which this would end; end it with \
             'walvisor disk checkpoint {0}', then try again",
            path.display()
        )));
    }
    keeper.close()?;
    let mut spilled = keeper.disks.iter();
    if let Some(disk) = spilled.find(|disk| disk.base.is_spilled()) {
        let trouble = disk.condition();
        let why = trouble
            .trouble()
            .map_or("", |trouble| trouble.error.as_str());
        let message = format!("{}: its image is failing: {why}", disk.path.display());
        return Err(Error::new(ErrorKind::Io, message));
    }
    // This also releases the locks.
    drop((log, disks, keeper));
    Ok(())
}

/// Opens the log in `log_dir` with these disks, as [`Store::open`] does, ready to run but without
/// starting threads.
pub(crate) fn open_log(
    medium: Box<dyn Medium>,
    log_dir: &Path,
    disks: &[DiskOptions],
    options: &StoreOptions,
    progress: Progress<'_>,
) -> Result<(Arc<Log>, Vec<Disk>, Keeper)> {
    let control = find_control(log_dir, Access::Log)?;
    let bases = OpenBase::open_all(&used(disks), Access::Write, log_dir, control.is_some())?;
    let detached = OpenBase::open_detached(disks, &bases, log_dir)?;
    let used = bases.len();
    let mut control = match control {
        Some(control) => control,
        None => first_control(&bases, log_dir, options)?,
    };
    let read = read_for_recovery(medium.as_ref(), log_dir, &mut control, progress)?;
    let newest = read.0.newest(&control.control).lsn;
    let states = attach(bases, detached, &mut control, log_dir, &read.1, newest)?;
    let (log, keeper) = assemble(medium, log_dir, control, &states, (read, false), options)?;
    let disks = states[..used]
        .iter()
        .map(|state| Disk {
            log: log.clone(),
            state: state.clone(),
        })
        .collect();
    Ok((log, disks, keeper))
}

/// Opens a log for one change of the disks with these images. Nothing is copied to any image, so
/// those of other disks need not be there. Dropping the disks and the keeper leaves the log as a
/// kill would.
///
/// # Errors
/// If the log can't be read, or an image is not one of it or can't be used.
pub(crate) fn open_for_change(
    medium: Box<dyn Medium>,
    log_dir: &Path,
    mut control: ControlFile,
    bases: Vec<OpenBase>,
) -> Result<(Vec<Disk>, Keeper)> {
    let read = read_for_recovery(medium.as_ref(), log_dir, &mut control, &mut |_, _| {})?;
    let newest = read.0.newest(&control.control).lsn;
    let found = find(&bases, &control, log_dir, &read.1)?;
    let states = enter_all(bases, &found, &mut control, newest)?;
    let options = StoreOptions::default();
    let (log, keeper) = assemble(medium, log_dir, control, &states, (read, true), &options)?;
    log.lock().keeper.checkpoint = false;
    let disks = states.into_iter().map(|state| Disk {
        log: log.clone(),
        state,
    });
    Ok((disks.collect(), keeper))
}

/// Recovers a log that was read, for all disks with records in it, and makes it ready to run
/// without starting threads. `keeps_records`: they stay in the log even without history.
fn assemble(
    medium: Box<dyn Medium>,
    log_dir: &Path,
    mut control: ControlFile,
    states: &[Arc<DiskState>],
    (read, keeps_records): ((Scan, UnappliedByDisk), bool),
    options: &StoreOptions,
) -> Result<(Arc<Log>, Keeper)> {
    // The mark of an image with a spill file says that it is open, and may be impossible to write.
    let marked = states.iter().filter(|state| !state.base.is_spilled());
    let marked: Vec<_> = marked.collect();
    for state in &marked {
        announce_open(&mut control, state, medium.salt());
    }
    let history = &mut control.control.history;
    let retain = options.retain.unwrap_or(Retention::of(history));
    retain.set(&mut control.control)?;
    let kept = Holds::of(&control.control).kept();
    let keeps_records = keeps_records || retain != Retention::Nothing || kept.is_some();
    let (scan, free) = recover(&mut control, states, read, keeps_records)?;
    let location = LogLocation::of(&control);
    for state in states {
        location.write(state.base.file().as_ref(), &state.path);
    }
    // The marks must be durable before the first record is logged.
    let attributes = marked.iter().map(|state| state.mark(true));
    let attributes = attributes.collect::<Result<Vec<_>>>()?;
    control.change(|control| {
        for (state, marked) in marked.iter().zip(attributes) {
            if let Some(entry) = control.disk_mut(state.id) {
                entry.marked = u8::from(marked);
                entry.settle();
            }
        }
    })?;
    // Even if no record counts, because a restore in place has undone them all.
    let frozen = states.iter().any(|state| state.index().frozen.is_some());
    let recovered = frozen.then_some(scan.last.lsn);
    let log = Arc::new(new_log(log_dir, &control, medium, (scan, free), options));
    for state in states {
        state.index_mut().count_in(&log.counters.index);
    }
    if let Err(bytes) = log.reserve_checksums(control.control.header.max_segments.get()) {
        tracing::warn!(
            "log {}: its checksums may take {bytes} bytes of memory, more than the daemon's limit \
             leaves: retain less, or give a larger --memory-limit",
            log_dir.display()
        );
    }
    let mut keeper = Keeper::new(log.clone(), states.to_vec(), control, recovered)?;
    keeper.remove_saved();
    keeper.remove_stale_spills();
    if let Some(disk) = states.first() {
        keeper.give_lsn_to_changes(disk)?;
    }
    Ok((log, keeper))
}

/// The log's appender, as slow as the options say.
fn appender(medium: &dyn Medium, options: &StoreOptions) -> Box<dyn Appender> {
    let medium = medium.appender();
    if !options.leader_alone() && options.sync_latency.is_zero() {
        return medium;
    }
    Box::new(SlowAppender {
        medium,
        pace: Pace::new(options.operations_per_second, options.operation_latency),
        sync_latency: options.sync_latency,
        write_per_record: options.write_per_waiter,
    })
}

fn new_log(
    log_dir: &Path,
    control: &ControlFile,
    medium: Box<dyn Medium>,
    (scan, free): (Scan, Vec<Arc<Segment>>),
    options: &StoreOptions,
) -> Log {
    let header = &control.control.header;
    let (last_lsn, checkpoint_lsn) = (scan.last.lsn, header.checkpoint_lsn.get());
    let next_cid = scan.max_cid + 1;
    let pipeline = Pipeline::new(header.next_lsn.get(), last_lsn, checkpoint_lsn, next_cid);
    let ring = SegmentRing::new(
        header.segment_size.get(),
        (scan.files, header.max_segments.get()),
        scan.max_sequence + 1,
        scan.live.into(),
        free.into(),
    );
    let commit_delay = CommitDelay::new(options.commit_wait);
    let newest = (scan.last.unix_us, scan.passed);
    let clock = LogClock::open(log_dir, newest, control.created_us());
    let mut state = LogState::new(pipeline, ring, commit_delay, clock);
    state.horizon = scan.horizon;
    state.keeper.retain = Retention::of(&control.control.history);
    state.keeper.snapshots = Snapshot::all(&control.control);
    state.keeper.holds = Holds::of(&control.control);
    let awaited = options.await_replica.then_some(0);
    state.keeper.holds.set_replica(awaited);
    state.keeper.pauses = options.on_full == FullLogPolicy::Pause;
    Log {
        dir: log_dir.to_path_buf(),
        uuid: header.log,
        segment_size: header.segment_size.get(),
        appender: appender(&*medium, options),
        medium,
        leader_alone: options.leader_alone(),
        close_time: options.close_time,
        index_limit: options.index_memory,
        spill_limit: options.spill_limit,
        most_served: if options.group_commit { usize::MAX } else { 1 },
        written: AtomicU64::new(last_lsn),
        poisoned: AtomicBool::new(false),
        held_back: AtomicBool::new(false),
        reads: AtomicU64::new(0),
        counters: Counters::default(),
        checksum_memory: Mutex::default(),
        positions: PositionCache::default(),
        saved_since: SavedExtentsCache::default(),
        state: Mutex::new(state),
        leader_called: WakeFlag::default(),
        keeper_wanted: Condvar::new(),
    }
}

// Requests longer than a quarter of a segment are refused; the documented limit must fit the
// default segment size.
const _: () = assert!(MAX_REQUEST_BYTES as u64 <= (64 << 20) / 4);
