//! Adds and removes disks of a running daemon: `walvisor ctl SOCKET add-disk` and `remove-disk`.
//!
//! ```text
//!   add-disk    ─▶ the disk and its log lie beneath a --disk-dir ─▶ OpenLogs opens it ─▶ its Door serves it
//!   remove-disk ─▶ its Door answers the requests in flight and drops it ─▶ OpenLogs closes it, and a log without disks
//! ```
//! By then the process has given up most of its rights. `--disk-dir` decides, at the start, which
//! ones it keeps for this.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::{self, ScopedJoinHandle};

use walvisor_storage::has_log;
use walvisor_vmm::disk::OpenDisk;

use super::config::PoolFile;
use super::door::{Doors, with_door};
use super::pool::{self, DiskOrigin, PoolDisk, specs};
use crate::control_socket::{AddedDisk, DiskHotplug, RemovalError, SavedDisk, SavedPool};
use crate::disk_spec::{
    DiskCommand, DiskSpec, LogOptions, WrittenDisk, is_log_key, split_keys, take_size,
};
use crate::disks::{OpenLogs, RemovedDisk};
use crate::plan::real_path;

/// The logs of a daemon, which the main thread closes at the end. To open a log and to copy its
/// records to an image may take long, so each has a lock of its own.
#[derive(Clone)]
pub(super) struct SharedLogs(Arc<Mutex<BTreeMap<PathBuf, Arc<LogDirectory>>>>);

/// A directory with a log, or where there was one.
#[derive(Default)]
struct LogDirectory {
    /// The log, if it is open.
    log: Mutex<OpenLogs>,
    /// Whether it was open when this thread, or the one before it, had the lock.
    open: AtomicBool,
}

impl LogDirectory {
    fn new(log: OpenLogs) -> Self {
        Self {
            open: AtomicBool::new(!log.is_empty()),
            log: Mutex::new(log),
        }
    }

    /// Lets `act` open and close the log. Waits for another thread that does.
    fn with<T>(&self, act: impl FnOnce(&mut OpenLogs) -> T) -> T {
        // A panic between two steps leaves a log that can be closed.
        let mut log = self.log.lock().unwrap_or_else(PoisonError::into_inner);
        let done = act(&mut log);
        self.open.store(!log.is_empty(), Ordering::SeqCst);
        done
    }
}

impl SharedLogs {
    pub(super) fn new(logs: OpenLogs) -> Self {
        let places = logs.split();
        let places = places.map(|(directory, log)| (directory, Arc::new(LogDirectory::new(log))));
        Self(Arc::new(Mutex::new(places.collect())))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Arc<LogDirectory>>> {
        // No panic leaves the map half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The place of a disk's log, or one of no log.
    fn of(&self, spec: &DiskSpec) -> Arc<LogDirectory> {
        match OpenLogs::directory_of(spec) {
            Some(directory) => Arc::clone(self.lock().entry(directory).or_default()),
            None => Arc::default(),
        }
    }

    /// The directories of the logs that are open, or not closed yet.
    pub(super) fn open(&self) -> Vec<PathBuf> {
        let places = self.lock();
        let open = places.iter();
        let open = open.filter(|(_, place)| place.open.load(Ordering::SeqCst));
        open.map(|(directory, _)| directory.clone()).collect()
    }

    /// Closes all logs in parallel, as [`OpenLogs::close`] does.
    ///
    /// # Errors
    /// That of the first log that can't be closed. The others are closed all the same.
    pub(super) fn close(&self) -> Result<(), walvisor_storage::Error> {
        let places: Vec<_> = self.lock().values().map(Arc::clone).collect();
        let close = |place: &LogDirectory| place.with(|log| std::mem::take(log).close());
        let closed: Vec<_> = thread::scope(|scope| {
            let start = |place| thread::Builder::new().spawn_scoped(scope, move || close(place));
            let threads = places.iter().map(|place| (place, start(place)));
            let threads: Vec<_> = threads.collect();
            let end =
                |(place, thread): (&Arc<LogDirectory>, io::Result<ScopedJoinHandle<'_, _>>)| {
                    match thread.map(ScopedJoinHandle::join) {
                        Ok(Ok(closed)) => closed,
                        Ok(Err(panic)) => resume_unwind(panic),
                        // The system has no thread to spare.
                        Err(_) => close(place),
                    }
                };
            threads.into_iter().map(end).collect()
        });
        closed.into_iter().collect()
    }
}

/// What a daemon serves. Whoever needs a list of its disks takes this one.
pub(super) struct ServedDisks {
    /// The doors, and what is open for each.
    pub(super) doors: Doors,
    /// The disks, oldest first.
    pub(super) disks: Vec<PoolDisk>,
    /// Images of disks that were removed, and of which their log keeps records, after the log's
    /// directory. With links resolved.
    left: Vec<(PathBuf, PathBuf)>,
    /// The keys that the file of `--config` has for disks that lack them.
    pub(super) defaults: Vec<(String, String)>,
    /// The disks that are being opened or closed, which may take long.
    changing: Vec<PoolDisk>,
}

impl ServedDisks {
    pub(super) fn new(doors: Doors, disks: Vec<PoolDisk>) -> Self {
        Self {
            doors,
            disks,
            left: Vec::new(),
            defaults: Vec::new(),
            changing: Vec::new(),
        }
    }

    /// Notes whether a log keeps records of a disk that is not served.
    fn note_left(&mut self, disk: &PoolDisk, keeps: bool) {
        let log = OpenLogs::directory_of(disk.spec());
        let (Some(log), Some(image)) = (log, disk.image()) else {
            return;
        };
        self.left.retain(|(_, other)| other != image);
        self.left.extend(keeps.then(|| (log, image.to_owned())));
    }

    /// Takes over what the file says now of the disks that are served. Returns the names of those
    /// that are served with other keys.
    pub(super) fn take_over(&mut self, file: &[PoolDisk]) -> Vec<String> {
        let mut differ = Vec::new();
        for disk in &mut self.disks {
            let Some(said) = file.iter().find(|said| said.is(disk)) else {
                continue;
            };
            let brought =
                disk.origin == DiskOrigin::Control && said.written.describes(&disk.written);
            disk.origin = DiskOrigin::File;
            if brought {
                disk.written = said.written.clone();
            } else if !said.written.says(&disk.written) {
                differ.push(disk.name.clone());
            }
        }
        differ
    }
}

/// Adds disks to a daemon, and removes them. Copies share the disks. No lock that others need is
/// held while a disk is opened or closed.
#[derive(Clone)]
pub(super) struct Hotplug {
    served: Arc<Mutex<ServedDisks>>,
    logs: SharedLogs,
    /// Disks may be added beneath these directories. Canonical paths.
    disk_dirs: Vec<PathBuf>,
    /// The file of `--config`. An absolute path.
    config: Option<PathBuf>,
    /// The door of a disk that names none.
    kind: DiskCommand,
}

impl Hotplug {
    pub(super) fn new(
        kind: DiskCommand,
        mut served: ServedDisks,
        disk_dirs: &[PathBuf],
        logs: &SharedLogs,
        file: Option<&PoolFile>,
    ) -> Self {
        served.defaults = file.map_or_else(Vec::new, |file| file.defaults.clone());
        Self {
            kind,
            config: file.map(|file| file.path().to_owned()),
            served: Arc::new(Mutex::new(served)),
            logs: logs.clone(),
            disk_dirs: disk_dirs.to_vec(),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, ServedDisks> {
        // After a panic, the disk that was being added or removed is still in the list and can be
        // removed.
        self.served.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The directories of the logs that are open, or not closed yet.
    pub(super) fn open_logs(&self) -> Vec<PathBuf> {
        self.logs.open()
    }

    /// The names of the disks that are being opened or closed, as far as one knows without waiting.
    pub(super) fn changing(&self) -> Vec<String> {
        let served = match self.served.try_lock() {
            Ok(served) => served,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return Vec::new(),
        };
        let changing = served.changing.iter();
        changing.map(|disk| disk.name.clone()).collect()
    }

    /// Refuses a path outside every `--disk-dir`.
    fn check_place(&self, name: &str, path: &Path) -> Result<(), String> {
        let real = real_path(path);
        let beneath = |dir: &PathBuf| real.starts_with(dir) && real != *dir;
        if self.disk_dirs.iter().any(beneath) {
            return Ok(());
        }
        let path = path.display();
        let dirs = self.disk_dirs.iter().map(|dir| dir.display().to_string());
        let dirs: Vec<_> = dirs.collect();
        Err(format!(
            "disk '{name}': {path} is not beneath a --disk-dir of this daemon ({}): \
             choose a path there, or start the daemon with a --disk-dir above it",
            dirs.join(", ")
        ))
    }

    /// Refuses a disk that can't be added once those of `leaving` are gone.
    fn check(
        &self,
        served: &ServedDisks,
        disk: &PoolDisk,
        leaving: &[PoolDisk],
    ) -> Result<(), String> {
        let (name, spec) = (&disk.name, disk.spec());
        if self.disk_dirs.is_empty() {
            let above = spec.path.as_ref();
            let above = above.map(|path| format!(", a directory above {}", path.display()));
            return Err(format!(
                "disk '{name}': this daemon gave up the right to open disks when it started: \
                 start it with --disk-dir DIR{}",
                above.unwrap_or_default()
            ));
        }
        let door = served.doors.of(spec)?;
        if served.changing.iter().any(|other| other.name == *name) {
            return Err(format!(
                "disk '{name}' is being added or removed: wait for that, then add it again"
            ));
        }
        if spec.scratch {
            return Err(format!(
                "disk '{name}': scratch=on works only for disks of the daemon's command line: \
                 leave it out"
            ));
        }
        let others = served.disks.iter().chain(&served.changing);
        let stays = |other: &&PoolDisk| !leaving.iter().any(|disk| disk.is(other));
        let mut all: Vec<_> = others.filter(stays).cloned().collect();
        let others = with_door(spec.door, &specs(&all));
        let mut added = disk.clone();
        let is_open = self.logs.of(spec).open.load(Ordering::SeqCst);
        if is_open {
            // `OpenLogs` compares them with those of the log.
            added.written.spec.log_options = LogOptions::default();
        }
        all.push(added);
        pool::plan(&all, None)?;
        let socket = door.check_added(spec, &others)?;
        let log = spec.log_directory();
        let log = log.filter(|_| !is_open);
        let paths = [&spec.path, &log, &socket];
        let mut paths = paths.into_iter().flatten();
        paths.try_for_each(|path| self.check_place(name, path))
    }

    /// The keys of a disk, and those of the file's defaults that it lacks. Defaults of a log apply
    /// only to a log that this disk makes: an older one keeps its own until the next start. Those
    /// of an archive never apply, because only the start of the daemon starts a push.
    fn with_defaults(&self, own: &[(String, String)]) -> Vec<(String, String)> {
        let mut defaults = self.lock().defaults.clone();
        let mut all = DiskSpec::with_defaults(own, &defaults, self.kind);
        // The caller reports what is wrong with the keys.
        let _ = take_size(&mut all);
        let spec = DiskSpec::from_keys(&all, self.kind).ok();
        let log = spec.and_then(|spec| spec.log_directory());
        let is_new = !log.is_some_and(|log| has_log(&log));
        defaults.retain(|(key, _)| !is_log_key(key) || is_new && !key.starts_with("archive"));
        DiskSpec::with_defaults(own, &defaults, self.kind)
    }

    /// Lists a disk as one that is being changed.
    fn change(&self, served: &mut ServedDisks, disk: PoolDisk) -> DiskChange<'_> {
        served.changing.push(disk.clone());
        DiskChange {
            hotplug: self,
            disk,
            listed: false,
        }
    }

    /// Opens a disk, to be served once those of `leaving` are gone. `size`: its image is made, with
    /// so many bytes.
    ///
    /// # Errors
    /// One line. Nothing has changed then.
    pub(super) fn open(
        &self,
        disk: PoolDisk,
        leaving: &[PoolDisk],
        size: Option<u64>,
    ) -> Result<OpenedDisk<'_>, String> {
        let mut served = self.lock();
        self.check(&served, &disk, leaving)?;
        let spec = disk.spec().clone();
        let change = self.change(&mut served, disk);
        drop(served);
        let image = size.map(|size| NewImage::create(&spec, size)).transpose()?;
        let open = self.logs.of(&spec).with(|log| log.add(&spec, 1))?;
        if let Some(image) = image {
            // A log with history holds the image from now on.
            image.keep();
        }
        Ok(OpenedDisk {
            open: Some(open),
            change,
        })
    }

    /// Lets the clients of disks in.
    ///
    /// # Errors
    /// One line. None of the disks is served then.
    pub(super) fn serve(&self, disks: Vec<OpenedDisk<'_>>) -> Result<Vec<AddedDisk>, String> {
        let mut added: Vec<AddedDisk> = Vec::new();
        for disk in disks {
            match disk.serve() {
                Ok(one) => added.push(one),
                Err(error) => {
                    let names: Vec<_> = added.into_iter().map(|added| added.disk.name).collect();
                    for name in names {
                        if let Err(RemovalError { reason, .. }) = self.remove(&name, false) {
                            tracing::error!("disk '{name}': {reason}");
                        }
                    }
                    return Err(error);
                }
            }
        }
        Ok(added)
    }

    /// Refuses to remove a disk, where that is known before.
    pub(super) fn check_removed(&self, disk: &PoolDisk) -> Result<(), String> {
        let refused = self.lock().doors.check_removed(disk.spec());
        refused.map_err(|reason| format!("disk '{}': {reason}", disk.name))
    }

    /// Serves a disk again after it could not be closed.
    fn serve_again(&self, spec: &DiskSpec, error: &dyn std::fmt::Display) -> RemovalError {
        let disk = self.logs.of(spec).with(|log| log.reopen(spec, 1));
        let added = disk.ok_or_else(|| "it is no longer open".to_owned());
        let doors = &mut self.lock().doors;
        match added.and_then(|disk| doors.of_mut(spec)?.add(spec, &disk)) {
            Ok(AddedDisk { disk, .. }) => RemovalError {
                reason: format!("{error}; it is served again"),
                disk: Some(disk),
            },
            Err(other) => RemovalError {
                reason: format!("{error}; it is no longer served either: {other}"),
                disk: None,
            },
        }
    }
}

/// A disk that is being opened or closed. Dropping this ends that, even after a panic.
struct DiskChange<'a> {
    hotplug: &'a Hotplug,
    disk: PoolDisk,
    /// It is served from then on.
    listed: bool,
}

impl Drop for DiskChange<'_> {
    fn drop(&mut self) {
        let mut served = self.hotplug.lock();
        served.changing.retain(|disk| !disk.is(&self.disk));
        served.disks.extend(self.listed.then(|| self.disk.clone()));
    }
}

/// A disk that is open and not served yet. Dropping it closes it.
pub(super) struct OpenedDisk<'a> {
    open: Option<OpenDisk>,
    change: DiskChange<'a>,
}

impl OpenedDisk<'_> {
    fn name(&self) -> &str {
        &self.change.disk.name
    }

    /// Whether it can be served only once one of these disks is gone, whose name it has here or at
    /// its door.
    pub(super) fn waits_for(&self, leaving: &[PoolDisk]) -> bool {
        let spec = self.change.disk.spec();
        let others = with_door(spec.door, &specs(leaving));
        let served = self.change.hotplug.lock();
        let door = served.doors.of(spec);
        leaving.iter().any(|other| other.name == self.name())
            || door.is_ok_and(|door| door.check_added(spec, &others).is_err())
    }

    /// Lets its clients in.
    pub(super) fn serve(mut self) -> Result<AddedDisk, String> {
        let mut served = self.change.hotplug.lock();
        let open = self.open.as_ref().ok_or("it is no longer open")?;
        let (name, spec) = (self.name(), self.change.disk.spec());
        if served.disks.iter().any(|other| other.name == name) {
            return Err(format!("another disk is still called '{name}'"));
        }
        let added = served.doors.of_mut(spec)?.add(spec, open)?;
        assert_eq!(
            added.disk.name, name,
            "'remove-disk' finds the disk by the name that clients see"
        );
        self.open = None;
        self.change.listed = true;
        served.note_left(&self.change.disk, false);
        Ok(added)
    }
}

impl Drop for OpenedDisk<'_> {
    fn drop(&mut self) {
        if self.open.take().is_none() {
            return;
        }
        let spec = self.change.disk.spec();
        let logs = &self.change.hotplug.logs;
        if let Err(error) = logs.of(spec).with(|log| log.remove(spec, false)) {
            tracing::error!("{error}");
        }
    }
}

/// An image that was made for a disk. Dropping this removes the image.
struct NewImage(Option<PathBuf>);

impl NewImage {
    /// Makes an image of zeros.
    fn create(spec: &DiskSpec, size: u64) -> Result<Self, String> {
        let path = spec
            .path
            .as_ref()
            .ok_or("size= makes an image: give path=FILE too")?;
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::AlreadyExists => format!(
                "disk '{}': size= makes a new image, and there is one already: leave size= out",
                spec.name()
            ),
            _ => format!("disk '{}': can't make its image: {error}", spec.name()),
        };
        let mut made = File::options();
        let made = made.write(true).create_new(true).mode(0o600);
        let file = made.open(path).map_err(failed)?;
        let image = Self(Some(path.clone()));
        file.set_len(size).map_err(failed)?;
        file.sync_all().map_err(failed)?;
        let directory = path.parent().filter(|parent| *parent != Path::new(""));
        let directory = File::open(directory.unwrap_or(Path::new(".")));
        directory
            .and_then(|directory| directory.sync_all())
            .map_err(failed)?;
        Ok(image)
    }

    /// The image is in use.
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for NewImage {
    fn drop(&mut self) {
        if let Some(path) = &self.0
            && let Err(error) = fs::remove_file(path)
        {
            tracing::error!("{}: {error}", path.display());
        }
    }
}

impl DiskHotplug for Hotplug {
    fn config(&self, saved: &[String]) -> Option<SavedPool> {
        let file = self.config.clone()?;
        let mut served = self.lock();
        let disks = served.disks.iter_mut();
        let disks = disks.filter(|disk| disk.origin != DiskOrigin::CommandLine);
        let disks = disks.map(|disk| {
            if saved.contains(&disk.name) {
                disk.origin = DiskOrigin::File;
            }
            SavedDisk {
                name: disk.name.clone(),
                spec: disk.written.text(),
                log: OpenLogs::directory_of(disk.spec()),
            }
        });
        let disks = disks.collect();
        let logs = served.disks.iter();
        let logs: Vec<_> = logs
            .filter_map(|disk| OpenLogs::directory_of(disk.spec()))
            .collect();
        let left = served.left.iter().filter(|(log, _)| logs.contains(log));
        let left = left.cloned().collect();
        Some(SavedPool { file, disks, left })
    }

    fn add(&self, spec: &str) -> Result<AddedDisk, String> {
        let own = split_keys(spec).map_err(|error| error.to_string())?;
        let mut keys = self.with_defaults(&own);
        let size = take_size(&mut keys).map_err(|error| error.to_string())?;
        let disk = WrittenDisk::new(keys, self.kind).map_err(|error| error.to_string())?;
        let disk = PoolDisk::new(disk, DiskOrigin::Control);
        self.open(disk, &[], size)?.serve()
    }

    fn remove(&self, name: &str, keep_records: bool) -> Result<RemovedDisk, RemovalError> {
        let mut served = self.lock();
        let refused = |reason: String| RemovalError { reason, disk: None };
        let Some(place) = served.disks.iter().position(|disk| disk.name == name) else {
            return Err(refused("it is not served".to_owned()));
        };
        let ServedDisks { doors, disks, .. } = &mut *served;
        let spec = disks[place].spec().clone();
        let removal = doors.of_mut(&spec).map_err(refused)?.remove(&spec)?;
        let disk = disks.remove(place);
        let mut change = self.change(&mut served, disk);
        // Until it is closed.
        change.listed = true;
        drop(served);
        removal()?;
        let removed = self
            .logs
            .of(&spec)
            .with(|log| log.remove(&spec, keep_records));
        match removed {
            Ok(removed) => {
                change.listed = false;
                let mut served = self.lock();
                served.note_left(&change.disk, removed == RemovedDisk::InLog);
                let doors = &mut served.doors;
                doors.of_mut(&spec).map_err(refused)?.forget(&spec);
                Ok(removed)
            }
            Err(error) => Err(self.serve_again(&spec, &error)),
        }
    }
}
