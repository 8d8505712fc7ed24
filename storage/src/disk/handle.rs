//! An open disk, shared by its ports.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::catalog::mark_text::MarkText;
use crate::catalog::options::{Resize, check_size};
use crate::catalog::retention::Retention;
use crate::catalog::snapshot::{Snapshot, SnapshotName};
use crate::disk::port::Port;
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::index::allocation::{ExtentLookUp, disk_extents};
use crate::log::admission::RoomNeed;
use crate::log::commit::Commit;
use crate::log::disk_state::DiskState;
use crate::log::holds::{HeldLog, HoldOwner, OpenHold, YieldingHold};
use crate::log::orders::KeeperTask;
use crate::log::pipeline::MarkCommit;
use crate::log::replica::{LogReplica, ReplicaCall, ReplicaOptions};
use crate::log::sharing::SyncSharing;
use crate::log::state::Log;
use crate::sync::atomic::Ordering;
use crate::sync::{self, Arc, Mutex, mpsc};
use crate::view::changed::{ChangesSince, SavedExtents, saved_since, unknown_point};
use crate::view::horizon::LogHistory;
use crate::view::look::Look;
use crate::view::point::Point;
use crate::view::rewind_plan::RewindReport;
use crate::{
    Backend, BackendQueue, Capabilities, Change, Condition, Extent, LogCounters, Logged, Mapped,
    PastPoint, Resizable, SECTOR_SIZE, Tracked, Transfer,
};

/// An open disk of a [`Store`](crate::Store). Cheap to clone; all clones are one disk.
#[derive(Clone)]
pub struct Disk {
    pub(crate) log: Arc<Log>,
    pub(crate) state: Arc<DiskState>,
}

impl Disk {
    /// The base image's path, as it was given.
    pub fn path(&self) -> &Path {
        &self.state.path
    }

    /// The disk's number in its log, as `walvisor log dump` shows it.
    pub fn id(&self) -> u32 {
        self.state.id
    }

    /// How its FLUSHes have shared the syncs of the log.
    pub fn sync_sharing(&self) -> SyncSharing {
        self.state.sharing.snapshot()
    }

    /// Opens a port for one thread.
    ///
    /// # Errors
    /// If the system refuses a ring, a thread or a descriptor.
    pub fn open_port(&self) -> Result<Port> {
        Port::new(&self.log, &self.state)
            .map_err(|error| Error::io("open a queue on the disk", &self.state.path, error))
    }

    /// Copies everything written so far to the base images of the disk's log, while requests go on.
    /// Returns the LSN up to which the images now hold everything. Images of other disks that fail
    /// don't count: what they lack is in spill files.
    ///
    /// # Errors
    /// If the log had failed, is being closed, or the copy fails, or this disk's image does; or
    /// [`ErrorKind::Locked`](crate::ErrorKind::Locked) if a restore has not fetched all of the
    /// image. Nothing is lost.
    pub fn checkpoint(&self) -> Result<u64> {
        let newest = self.log.lock().pipeline.appended();
        self.log.order(KeeperTask::Checkpoint(newest))?;
        if self.state.base.is_spilled() {
            self.log.order(KeeperTask::CopyBack(self.state.clone()))?;
        }
        if let Some(gate) = self.state.base.file().chunk_gate() {
            gate.refuse_absent(self.path())?;
        }
        Ok(newest)
    }

    /// Bytes of the image that a restore has still to fetch.
    pub fn unfetched(&self) -> u64 {
        let gate = self.state.base.file().chunk_gate();
        gate.map_or(0, |gate| gate.absent_bytes())
    }

    /// Makes a snapshot of the present state of all disks of the log, including everything written
    /// so far, while requests go on. The log keeps what the snapshot needs until it is
    /// [deleted](Self::delete_snapshot).
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`](crate::ErrorKind) if there is a snapshot of this name. Fails
    /// too if the log has no room for another snapshot, had failed, is being closed, or can't be
    /// written. On failure there is no new snapshot.
    pub fn snapshot(&self, name: SnapshotName) -> Result<Snapshot> {
        self.make_snapshot(name, None)
    }

    /// As [`snapshot`](Self::snapshot), of this disk only: the log keeps nothing of its other disks
    /// for it.
    ///
    /// # Errors
    /// As [`snapshot`](Self::snapshot).
    pub fn snapshot_alone(&self, name: SnapshotName) -> Result<Snapshot> {
        self.make_snapshot(name, Some(self.state.id))
    }

    fn make_snapshot(&self, name: SnapshotName, disk_id: Option<u32>) -> Result<Snapshot> {
        self.log.order(KeeperTask::Snapshot(name, disk_id))?;
        let mut snapshots = self.snapshots().into_iter();
        let made = snapshots.find(|snapshot| snapshot.name == name);
        made.ok_or_else(|| {
            let dir = self.log.dir.display();
            let message = format!(
                "{dir}: snapshot '{name}' was made, and another request has already deleted it"
            );
            Error::new(ErrorKind::NotFound, message)
        })
    }

    /// Deletes a snapshot of the log. What only it needed is copied to the base images or
    /// overwritten in due course.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind) if there is none of this name; or the log is being
    /// closed or can't be written.
    pub fn delete_snapshot(&self, name: SnapshotName) -> Result<()> {
        self.log.order(KeeperTask::DeleteSnapshot(name))
    }

    /// The snapshots of the log, oldest first.
    pub fn snapshots(&self) -> Vec<Snapshot> {
        self.log.lock().keeper.listed_snapshots()
    }

    /// Writes a mark into the log, now. It is durable when this returns, changes no disk, and is
    /// kept as long as the history around it. Returns its position; its `lsn` is a point like any
    /// other.
    ///
    /// # Errors
    /// [`ErrorKind::Io`](crate::ErrorKind) if the log is open for reading only, had failed, is
    /// full, or is being closed.
    pub fn mark(&self, text: &MarkText) -> Result<Commit> {
        let state = self.log.lock();
        if state.keeper.gone {
            return Err(self.log.no_keeper_error(&state));
        }
        drop(state);
        let (mut port, marked) = (self.open_port()?, MarkCommit::default());
        port.mark(1, text, marked.clone());
        port.kick_alone();
        let mut done = Vec::new();
        loop {
            port.completions(&mut done);
            match (done.pop().map(|end| end.result), marked.get()) {
                (Some(Ok(_)), Some(commit)) => return Ok(*commit),
                (Some(_), _) => return Err(self.unmarked()),
                (None, _) => port.committer.sleep(),
            }
        }
    }

    /// The error for a mark that the log did not take.
    fn unmarked(&self) -> Error {
        let why = match self.log.condition_of(&self.state) {
            Condition::Stalled(cause) => cause.to_string(),
            condition => condition.trouble().map_or_else(
                || {
                    "it is being closed, the disk is leaving it, or its replica did not take the \
                     mark"
                        .to_owned()
                },
                |trouble| trouble.error.clone(),
            ),
        };
        let dir = self.log.dir.display();
        Error::new(
            ErrorKind::Io,
            format!("{dir}: the log takes no mark: {why}"),
        )
    }

    /// Tells the log that it has a replica, which requests wait for as `options` say. `owner` is
    /// called when one begins to wait; it must not block. Whoever has the replica then
    /// [acknowledges](LogReplica::acknowledge) what is there, perhaps in another thread. Call this
    /// before the disks serve anyone.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`](crate::ErrorKind) if the log has a replica;
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind) if there is a [limit](ReplicaOptions::limit),
    /// and the log keeps no history.
    pub fn replicate(
        &self,
        options: ReplicaOptions,
        owner: impl Fn(ReplicaCall) + Send + Sync + 'static,
    ) -> Result<LogReplica> {
        LogReplica::of(&self.log, options, Arc::new(owner))
    }

    /// All disks on the log, open or not: their ids, and the paths of their base images when they
    /// were last open, empty where unknown.
    ///
    /// # Errors
    /// The log is open for reading only, or is being closed.
    pub fn members(&self) -> Result<Vec<(u32, PathBuf)>> {
        let (sent, members) = mpsc::channel();
        self.log.order(KeeperTask::Members(sent))?;
        members.recv().map_err(|_| self.log.closed())
    }

    /// The history of the log's disks.
    pub fn history(&self) -> LogHistory {
        LogHistory::of(&self.log)
    }

    /// Opens the disk as it was at a point in its history, or as it is now, while it is in use. The
    /// look has the disk's present size. For [`Newest`](Point::Newest), it includes everything that
    /// completed before the call. `scratch`: as for [`Look::open`].
    ///
    /// While a look is open, nothing is copied to the log's base images, whether or not the log
    /// keeps history. A log that is full of what looks need fails writes, with the reason, or makes
    /// them wait ([`FullLogPolicy`](crate::FullLogPolicy)), until a look is dropped. A running copy
    /// ends before the look opens. Drop looks before closing the store; otherwise their records
    /// stay in the log, and the disk stays locked.
    ///
    /// The extents of all looks of a log, plus what it keeps in memory for snapshots, may take
    /// [`StoreOptions::index_memory`](crate::StoreOptions::index_memory) bytes in addition to the
    /// index, or 1 MiB if that is more.
    ///
    /// # Errors
    /// As [`restore_disk`](crate::restore_disk), for the point; or the look would take more memory
    /// than that ([`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput)); or the disk has
    /// left the log, or the log had failed, is being closed, is open for reading only, or has
    /// records that can't be read.
    pub fn look(&self, at: Point, scratch: Option<File>) -> crate::Result<Look> {
        let held = self.hold(HoldOwner::Look)?;
        Look::in_use(&self.log, &self.state, at, held, scratch)
    }

    /// Makes everything written so far durable, and holds the log.
    ///
    /// # Errors
    /// If the disk has left the log, or the log had failed, is being closed, is open for reading
    /// only, or can't be copied although it must.
    pub(crate) fn hold(&self, owner: HoldOwner) -> crate::Result<HeldLog> {
        let (held, holds) = mpsc::channel();
        let task = KeeperTask::Look(self.state.clone(), owner, held);
        self.log.order(task)?;
        holds.recv().map_err(|_| self.log.closed())
    }

    /// Holds the log for another process, which reads it as a
    /// [`ReadableLog::held`](crate::ReadableLog::held), up to the newest record that is durable.
    /// The hold [ends](ReadHold::is_kept) early if the log needs room, or its files change: what was
    /// read by then may be wrong, and is read again.
    ///
    /// # Errors
    /// If the disk has left the log, or the log had failed, is being closed, or is open for reading
    /// only.
    pub fn hold_to_read(&self) -> crate::Result<ReadHold> {
        let held = self.hold(HoldOwner::Reader)?;
        let open = (held.hold, sync::now());
        let hold = Arc::new(Mutex::new(Some(open)));
        let of_keeper: Arc<dyn YieldingHold> = hold.clone();
        self.log.lock().keeper.add_yielding(&of_keeper);
        let newest = held.newest;
        Ok(ReadHold { newest, hold })
    }

    /// As [`rewind_disk`](crate::rewind_disk), for an open disk. Its writes wait in the meantime;
    /// other disks of the log go on.
    ///
    /// The contents change at once, as by a WRITE of the whole disk. The caller must make sure that
    /// no user of the disk relies on the old contents, in caches for instance.
    ///
    /// # Errors
    /// As [`rewind_disk`](crate::rewind_disk), for the point; [`ErrorKind::Locked`] if the disk was
    /// written to meanwhile; [`ErrorKind::InvalidInput`] if it is open for reading only; or the
    /// disk has left the log, or the log had failed, is being closed, or has records that can't be
    /// read or copied, or has no room. The disk is then unchanged.
    pub fn rewind(&self, at: Point) -> Result<RewindReport> {
        let path = self.state.path.display();
        if self.state.read_only {
            return Err(invalid(format!(
                "{path}: the disk is open for reading only"
            )));
        }
        let newest = self.state.last_lsn.load(Ordering::Acquire);
        let held = self.hold(HoldOwner::Rewind)?;
        let (mut done, rewinding) = RewindReport::plan(&self.log, &self.state, at, newest, &held)?;
        let Some(rewinding) = rewinding else {
            return Ok(done);
        };
        let (rewound, lsn) = mpsc::channel();
        let task = KeeperTask::Rewind(self.state.clone(), rewinding, rewound);
        self.log.order(task)?;
        // The keeper sends it before it answers.
        let lsn = lsn.recv().map_err(|_| self.log.closed())?;
        done.lsn = Some(lsn);
        // Records of other disks may have come in between.
        done.from_lsn = lsn - 1;
        Ok(done)
    }

    /// How much history the log retains.
    pub fn retain(&self) -> Retention {
        self.log.lock().keeper.retain
    }

    /// Whether [`set_retain`](Self::set_retain) to this retention gives up history that the log
    /// still has, and that its present retention keeps.
    pub fn gives_up_history(&self, retain: Retention) -> bool {
        let mut state = self.log.lock();
        let now = state.clock.now().passed;
        let beyond = |retain| state.ring.beyond(retain, now);
        state.horizon.lsn < state.pipeline.appended()
            && beyond(retain) > beyond(state.keeper.retain)
    }

    /// Sets the retention. What a smaller one does not cover is [given up](Self::gives_up_history).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind) if the log can't have as many segments; or the
    /// log is being closed or can't be written.
    pub fn set_retain(&self, retain: Retention) -> Result<()> {
        self.log.order(KeeperTask::SetRetention(retain))
    }

    /// Grows the disk to `size` bytes while it is in use. New space reads as zeroes. A crash leaves
    /// the old or the new size. A disk in use can't shrink, see
    /// [`resize_disk`](crate::resize_disk).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind) if the size is no multiple of 512, below the
    /// present one or more than the file system holds; or the files cannot be changed. The disk is
    /// then unchanged.
    pub fn grow(&self, size: u64) -> Result<Resize> {
        let disk = Arc::clone(&self.state);
        check_size(&disk.path, size)?;
        let old_size = disk.sectors() * SECTOR_SIZE;
        if size < old_size {
            return Err(invalid(format!(
                "{}: the disk is in use, so it cannot shrink from {old_size} to {size} bytes; stop \
                 the program that uses it, then run 'walvisor disk resize --shrink'",
                disk.path.display()
            )));
        }
        self.log.order(KeeperTask::Grow(disk, size))?;
        Ok(Resize { old_size, size })
    }
}

/// A hold of another process that reads the log: see [`Disk::hold_to_read`].
pub struct ReadHold {
    newest: u64,
    hold: Arc<Mutex<Option<OpenReading>>>,
}

/// The hold, and since when it is there.
type OpenReading = (OpenHold, Instant);

/// A reader's hold ends after this time if the log needs room soon.
const READING: Duration = Duration::from_secs(1);
/// A reader's hold ends after this time if writers wait for room.
const READING_WAITED_FOR: Duration = Duration::from_millis(100);

impl ReadHold {
    /// The newest record that was durable.
    pub fn newest_lsn(&self) -> u64 {
        self.newest
    }

    /// Whether the log is still held, so that all that was read is right.
    pub fn is_kept(&self) -> bool {
        self.hold.lock().expect("hold lock").is_some()
    }
}

impl YieldingHold for Mutex<Option<OpenReading>> {
    fn end_if_overdue(&self, need: RoomNeed) {
        let most = match need {
            RoomNeed::None => return,
            RoomNeed::Soon => READING,
            RoomNeed::Now => READING_WAITED_FOR,
        };
        let overdue = |(_, since): &mut OpenReading| sync::now() - *since >= most;
        let ended = self.lock().expect("hold lock").take_if(overdue);
        // This locks the log.
        drop(ended);
    }

    fn end_if_reader(&self) {
        let ended = self.lock().expect("hold lock").take();
        drop(ended);
    }
}

impl Backend for Disk {
    fn sectors(&self) -> u64 {
        self.state.sectors()
    }

    fn capabilities(&self) -> Capabilities {
        let writable = !self.state.read_only;
        Capabilities {
            read_only: !writable,
            flush: true,
            write_cache_toggle: writable,
            discard: writable,
            write_zeroes: writable,
            // Zeroes are a record like any other. The data that they replace stays in older
            // segments of the log until those are reused, and in blocks that the file system frees.
            secure_erase: false,
        }
    }

    fn write_cache(&self) -> bool {
        self.state.write_cache.load(Ordering::Acquire)
    }

    fn set_write_cache(&self, on: bool) {
        self.state.write_cache.store(on, Ordering::Release);
    }

    /// The disk's part of the log's room, and of the memory for records that are not written yet.
    fn set_weight(&self, weight: u16) {
        self.log.lock().room.set_weight(self.state.id, weight);
    }

    fn open_queue(&self) -> io::Result<Box<dyn BackendQueue>> {
        Ok(Box::new(self.open_port()?))
    }

    /// The blocking engine reads in the submitting thread.
    fn blocks(&self) -> bool {
        self.log.medium.blocks()
    }

    /// [`MAX_REQUEST_BYTES`](crate::MAX_REQUEST_BYTES), or less if the log's segments are small.
    fn max_request_bytes(&self) -> usize {
        self.log.max_request_bytes()
    }

    /// A WRITE is one record, whatever its length, and a record is all there or not at all.
    fn max_atomic_bytes(&self) -> usize {
        if self.state.read_only {
            0
        } else {
            self.log.max_request_bytes()
        }
    }

    fn resizable(&self) -> Option<&dyn Resizable> {
        Some(self)
    }

    fn mapped(&self) -> Option<&dyn Mapped> {
        Some(self)
    }

    fn tracked(&self) -> Option<&dyn Tracked> {
        Some(self)
    }

    fn logged(&self) -> Option<&dyn Logged> {
        Some(self)
    }

    fn condition(&self) -> Condition {
        self.log.condition_of(&self.state)
    }

    fn limit_waits(&self) {
        self.log.limit_waits();
        self.state.base.limit_waits();
    }

    fn end_pauses(&self) {
        self.log.end_pauses();
        self.state.base.limit_waits();
    }

    fn is_unsafe(&self) -> bool {
        self.state.no_flush
    }
}

impl Resizable for Disk {
    fn grow(&self, bytes: u64) -> io::Result<()> {
        Disk::grow(self, bytes)?;
        Ok(())
    }
}

impl Mapped for Disk {
    fn extents(&self, sector: u64, sectors: u64, most: usize) -> io::Result<Vec<Extent>> {
        let state = &self.state;
        let mut look_up = ExtentLookUp::new(&*state.base, &state.path, most);
        let append = |sector, sectors, extents: &mut Vec<Extent>| {
            let mut pieces = Vec::new();
            state.index().pieces(sector, sectors, &mut pieces);
            for piece in &pieces {
                if !look_up.push_piece(piece, extents)? {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        Ok(disk_extents(sector, sectors, self.sectors(), most, append)?)
    }
}

impl Tracked for Disk {
    /// The snapshots of the log, by name and LSN.
    fn past_points(&self) -> Vec<PastPoint> {
        let snapshots = self.snapshots().into_iter();
        let known = snapshots
            .filter(|snapshot| snapshot.has(self.state.id) && self.state.comes_from(snapshot.lsn));
        known.map(PastPoint::from).collect()
    }

    fn changes(
        &self,
        since: u64,
        sector: u64,
        sectors: u64,
        most: usize,
    ) -> io::Result<Vec<Change>> {
        let (log, state) = (&self.log, &self.state);
        let append = |sector, sectors, changes: &mut Vec<Change>| {
            let mut pieces = Vec::new();
            state.index().pieces(sector, sectors, &mut pieces);
            // In this order: what has left the index in the meantime was saved before that.
            let guard = log.lock();
            let (live, files) = (guard.ring.all_live(), guard.keeper.saved.clone());
            drop(guard);
            let disk = (state.id, state.sectors() * SECTOR_SIZE);
            let medium = log.medium.files();
            let saved = saved_since(
                &*medium,
                &log.dir,
                &files,
                disk,
                since..u64::MAX,
                (&log.saved_since, log.beside_limit()),
            )?;
            let since = match saved {
                Some(extents) => ChangesSince::saved(
                    since,
                    SavedExtents {
                        extents,
                        and_log: true,
                    },
                ),
                None => ChangesSince::new(since, &live, log.segment_size, &log.positions)?,
            };
            pieces.iter().for_each(|piece| since.append(piece, changes));
            Ok(true)
        };
        let changes = disk_extents(sector, sectors, self.sectors(), most, append)?;
        // So far nothing after a held LSN has left the log, and what a snapshot needs from the
        // base image was saved.
        let guard = log.lock();
        let kept = guard.keeper.holds.kept().is_some_and(|lsn| lsn <= since);
        let named = guard
            .keeper
            .snapshots
            .iter()
            .any(|named| named.lsn == since);
        let known = kept || named && guard.keeper.saved.has(since, state.id);
        drop(guard);
        if known && state.comes_from(since) {
            Ok(changes)
        } else {
            Err(unknown_point(since).into())
        }
    }
}

impl Logged for Disk {
    fn checkpoint(&self) -> io::Result<()> {
        Disk::checkpoint(self)?;
        Ok(())
    }

    fn export(
        &self,
        target: File,
        progress: &mut dyn FnMut(u64, u64) -> bool,
    ) -> io::Result<Transfer> {
        Ok(Disk::export(self, target, progress)?)
    }

    fn log_counters(&self) -> LogCounters {
        self.log.counters.snapshot()
    }

    fn log_dir(&self) -> &Path {
        &self.log.dir
    }
}
