//! Creating, opening, checking and closing: a log directory and the disks on it.

use std::path::Path;

use crate::catalog::control::{
    ControlFile, find_control, has_control, open_or_create_log, register,
};
use crate::catalog::options::{DiskOptions, StoreOptions, check_options};
use crate::checkpoint::keeper::Keeper;
use crate::disk::handle::Disk;
use crate::error::{Error, ErrorKind, Result};
use crate::log::counters::Counters;
use crate::log::disk_state::DiskState;
use crate::log::gather::Gather;
use crate::log::leader::Writer;
use crate::log::pipeline::Pipeline;
use crate::log::ring::{Live, SegmentRing};
use crate::log::stamp::Stamps;
use crate::log::state::{FailOnPanic, Log, State};
use crate::medium::directory::{Directory, Medium, directory};
use crate::medium::engine;
use crate::medium::filesystem;
use crate::medium::lock::Use;
use crate::medium::pace::{Pace, Slowed};
use crate::parallel::Progress;
use crate::recovery::replay::{Indexes, read_for_recovery, recover};
use crate::recovery::scan::Scan;
use crate::store::attach::{OpenBase, attach};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Arc, Call, Condvar, Mutex};
use crate::{LogCounters, MAX_REQUEST_BYTES, parallel};

/// An open log with its disks. Dropping it closes it; [`close`](Self::close) also returns an error if closing
/// fails.
pub struct Store {
    log: Arc<Log>,
    disks: Vec<Disk>,
    keeper: Option<JoinHandle<Result<()>>>,
    /// Dropped last: the log needs its writer until everything is durable.
    writer: Option<Writer>,
}

/// Creates the log in `log_dir` for base images that belong to no log, or opens it if another process has created
/// it meanwhile.
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
        bases.try_for_each(|base| register(control, &base.path, base.size).map(drop))
    });
    Ok(opened?.0)
}

impl Store {
    /// Creates the log in `log_dir` for these disks if there is none, as [`open`](Self::open) would, and makes the
    /// names of the log and the images durable. It is for a process that drops the privileges for this before it
    /// opens the log.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn make_log(log_dir: &Path, disks: &[DiskOptions], options: &StoreOptions) -> Result<()> {
        check_options(options)?;
        // Syncing the names of an existing log and of the images needs privileges too.
        disks
            .iter()
            .try_for_each(|disk| filesystem::settle_name(&disk.path))?;
        if has_control(log_dir) {
            return filesystem::settle_name(log_dir);
        }
        let bases = OpenBase::open_all(disks, false)?;
        first_control(&bases, log_dir, options).map(drop)
    }

    /// Opens the log in `log_dir` with these disks and recovers it after a crash. If there is no log, it is created
    /// for base images that belong to no other log.
    ///
    /// # Errors
    /// See [`ErrorKind`]. Unless it is [`ErrorKind::Io`], nothing was changed on the medium.
    pub fn open(log_dir: &Path, disks: &[DiskOptions], options: &StoreOptions) -> Result<Self> {
        Self::open_telling(log_dir, disks, options, &mut |_, _| {})
    }

    /// As [`open`](Self::open), and reports the progress of recovery to `progress`. A log that was closed cleanly
    /// needs no recovery: `progress` is not called.
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
            slowed: slowed(options),
            ..directory(log_dir, engine)
        };
        let opened = open_log(Box::new(medium), log_dir, disks, options, progress)?;
        let (log, disks, keeper) = opened;
        Self::start(log, disks, keeper)
    }

    /// Starts the threads of a log that is ready to run.
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

    /// The disks, in the order in which they were given.
    pub fn disks(&self) -> &[Disk] {
        &self.disks
    }

    /// What the log has done since it was opened.
    pub fn log_counters(&self) -> LogCounters {
        self.log.counters.snapshot()
    }

    /// Makes everything durable, copies the log to the base images, and closes. The base images are then plain raw
    /// images, unless [`StoreOptions::close_time`] has passed before: a warning in the log of the process then says
    /// how much stays in the log, and the next open goes on copying it. Every [`Port`](crate::Port) should have been
    /// dropped before.
    ///
    /// # Errors
    /// If the log had failed, or the copy fails. Nothing acknowledged is lost: the next open recovers it.
    pub fn close(mut self) -> Result<()> {
        self.stop()
    }

    /// [Closes](Self::close) several logs at the same time.
    ///
    /// # Errors
    /// The error of the first log that can't be closed; the others are closed all the same.
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

/// Opens the log in `log_dir` with these disks, as [`Store::open`] does, and makes it ready to run. The keeper's
/// thread has not been started.
pub(crate) fn open_log(
    medium: Box<dyn Medium>,
    log_dir: &Path,
    disks: &[DiskOptions],
    options: &StoreOptions,
    progress: Progress<'_>,
) -> Result<(Arc<Log>, Vec<Disk>, Keeper)> {
    let control = find_control(log_dir, Use::Log)?;
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

/// Recovers a log that was read, for all disks that have records in it, and makes it ready to run. The keeper's
/// thread has not been started.
fn assemble(
    medium: Box<dyn Medium>,
    log_dir: &Path,
    mut control: ControlFile,
    states: &[Arc<DiskState>],
    read: (Scan, Indexes),
    options: &StoreOptions,
) -> Result<(Arc<Log>, Keeper)> {
    for state in states {
        // Two copies of a disk that are both used from here on must not reach the same generation, so the step is
        // salted.
        let step = 1 + (medium.salt() >> 32);
        if let Some(entry) = control.control.disk_mut(state.id) {
            entry.announce(step);
            let next = entry.next_generation.get();
            state.generation.store(next, Ordering::Relaxed);
        }
    }
    let scan = recover(&mut control, states, read)?;
    // The marks must be durable before the first record is logged.
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
    for state in states {
        state.index_mut().count_in(&log.counters.index);
    }
    let keeper = Keeper::new(log.clone(), states.to_vec(), control, recovered)?;
    Ok((log, keeper))
}

/// How much the options slow down the log's medium; `None` if they do not.
fn slowed(options: &StoreOptions) -> Option<Slowed> {
    let slow = options.leader_alone() || !options.sync_latency.is_zero();
    slow.then(|| Slowed {
        pace: Pace::new(options.operations_per_second, options.operation_latency),
        sync_latency: options.sync_latency,
        write_per_record: options.write_per_waiter,
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
    let (last_lsn, checkpoint_lsn) = (scan.last_lsn, header.checkpoint_lsn.get());
    let live = scan.live.into_iter().map(|live| Live {
        segment: live.segment,
        sequence: live.sequence,
        last_lsn: live.last_lsn,
    });
    let next_cid = scan.max_cid + 1;
    let pipeline = Pipeline::new(header.next_lsn.get(), last_lsn, checkpoint_lsn, next_cid);
    let ring = SegmentRing::new(
        header.segment_size.get(),
        (scan.files, header.max_segments.get()),
        scan.max_sequence + 1,
        live.collect(),
        scan.free.into_iter().chain(scan.void).collect(),
    );
    let (gather, stamps) = (
        Gather::new(options.commit_wait),
        Stamps::after(scan.last_unix_us),
    );
    let state = State::new(pipeline, ring, gather, stamps);
    Log {
        dir: log_dir.to_path_buf(),
        uuid: header.log,
        segment_size: header.segment_size.get(),
        medium,
        leader_alone: options.leader_alone(),
        close_time: options.close_time,
        index_limit: options.index_memory,
        most_served: if options.group_commit { usize::MAX } else { 1 },
        written: AtomicU64::new(last_lsn),
        poisoned: AtomicBool::new(false),
        held_back: AtomicBool::new(false),
        counters: Counters::default(),
        state: Mutex::new(state),
        leader_called: Call::default(),
        keeper_wanted: Condvar::new(),
    }
}

// A request longer than a quarter of a segment is refused. With the default segment size the documented limit must
// fit.
const _: () = assert!(MAX_REQUEST_BYTES as u64 <= (64 << 20) / 4);
