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
use crate::log::stamp::Stamps;
use crate::log::state::{FailOnPanic, KeeperState, Live, Log, State};
use crate::medium::directory::{Directory, Medium, directory};
use crate::medium::engine;
use crate::medium::filesystem;
use crate::medium::pace::{Pace, Slowed};
use crate::parallel::Progress;
use crate::recovery::replay::{Indexes, read_for_recovery, recover};
use crate::recovery::scan::Scan;
use crate::store::attach::{OpenBase, attach};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Arc, Call, Condvar, Mutex};
use crate::{LogCounters, MAX_REQUEST_BYTES, parallel};

/// An open log with its disks. Dropping it closes it; [`close`](Self::close) tells whether that worked.
pub struct Store {
    log: Arc<Log>,
    disks: Vec<Disk>,
    keeper: Option<JoinHandle<Result<()>>>,
    /// Goes last: until everything is durable it is needed.
    writer: Option<Writer>,
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
            .try_for_each(|disk| filesystem::settle_name(&disk.path))?;
        if has_control(log_dir) {
            return filesystem::settle_name(log_dir);
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

    /// As [`open`](Self::open), and reports the progress of recovery to `progress`. A log that was closed cleanly needs no recovery, and
    /// `progress` is not called.
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

/// How the options make the log's medium slower than it is, if they do.
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
        waiting_clients: 0,
        open_clients: 0,
        writing: Default::default(),
        end: 0,
        led: false,
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
        leader_alone: options.leader_alone(),
        most_served: if options.group_commit { usize::MAX } else { 1 },
        durable: AtomicU64::new(scan.last_lsn),
        written: AtomicU64::new(scan.last_lsn),
        poisoned: AtomicBool::new(false),
        held_back: AtomicBool::new(false),
        counters: Counters::default(),
        state: Mutex::new(state),
        leader_called: Call::default(),
        keeper_wanted: Condvar::new(),
    }
}

// A request longer than a quarter of the default segment would be refused: keep the documented limit true.
const _: () = assert!(MAX_REQUEST_BYTES as u64 <= (64 << 20) / 4);
