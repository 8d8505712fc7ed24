//! Adds and removes disks of a running daemon: `walvisor ctl SOCKET add-disk` and `remove-disk`.
//!
//! ```text
//!   add-disk    ─▶ the disk and its log lie beneath a --disk-dir ─▶ OpenLogs opens it ─▶ its Door serves it
//!   remove-disk ─▶ its Door answers the requests in flight and drops it ─▶ OpenLogs closes it, and a log without disks
//! ```
//! By then the process has given up most of its rights. `--disk-dir` decides, at the start, which
//! ones it keeps for this.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::door::{Doors, with_door};
use crate::control_socket::{AddedDisk, DiskHotplug, RemovalError};
use crate::disk_spec::DiskSpec;
use crate::disks::{self, OpenLogs, RemovedDisk, real_path};

/// The logs of a daemon, which the main thread closes at the end. To open a log and to copy its
/// records to an image may take long, so each has a lock of its own.
#[derive(Clone)]
pub(super) struct SharedLogs(Arc<Mutex<BTreeMap<PathBuf, Arc<LogPlace>>>>);

/// A directory with a log, or where there was one.
#[derive(Default)]
struct LogPlace {
    /// The log, if it is open.
    log: Mutex<OpenLogs>,
    /// Whether it was open when this thread, or the one before it, had the lock.
    open: AtomicBool,
}

impl LogPlace {
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
        let places = places.map(|(directory, log)| (directory, Arc::new(LogPlace::new(log))));
        Self(Arc::new(Mutex::new(places.collect())))
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<PathBuf, Arc<LogPlace>>> {
        // No panic leaves the map half changed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The place of a disk's log, or one of no log.
    fn of(&self, spec: &DiskSpec) -> Arc<LogPlace> {
        match OpenLogs::directory_of(spec) {
            Some(directory) => Arc::clone(self.lock().entry(directory).or_default()),
            None => Arc::default(),
        }
    }

    /// Takes the logs, and leaves none.
    pub(super) fn take(&self) -> OpenLogs {
        let places: Vec<_> = self.lock().values().map(Arc::clone).collect();
        let mut logs = OpenLogs::default();
        for place in places {
            logs.join(place.with(std::mem::take));
        }
        logs
    }
}

/// What a daemon serves.
pub(super) struct ServedDisks {
    /// The doors, and what is open for each.
    pub(super) doors: Doors,
    /// The disks, oldest first.
    pub(super) specs: Vec<DiskSpec>,
    /// The disks that are being opened or closed, which may take long.
    changing: Vec<DiskSpec>,
    /// The images of all of them by the disk's name, as they were found when it was added: to look
    /// again would wait for a file system that does not answer.
    images: BTreeMap<String, PathBuf>,
}

/// The image of a disk, with links resolved. Looks at the past share theirs.
fn image_of(spec: &DiskSpec) -> Option<PathBuf> {
    let path = spec.path.as_ref().filter(|_| spec.at.is_none())?;
    Some(real_path(path))
}

impl ServedDisks {
    pub(super) fn new(doors: Doors, specs: Vec<DiskSpec>) -> Self {
        let image = |spec: &DiskSpec| Some((doors.name(spec), image_of(spec)?));
        Self {
            images: specs.iter().filter_map(image).collect(),
            doors,
            specs,
            changing: Vec::new(),
        }
    }

    /// The names of the disks in control requests.
    pub(super) fn names(&self) -> Vec<String> {
        let specs = self.specs.iter();
        specs.map(|spec| self.doors.name(spec)).collect()
    }

    /// The disk with this name in `specs`.
    fn named(&self, specs: &[DiskSpec], name: &str) -> Option<usize> {
        specs.iter().position(|spec| self.doors.name(spec) == name)
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
}

impl Hotplug {
    pub(super) fn new(
        served: ServedDisks,
        disk_dirs: &[PathBuf],
        logs: &SharedLogs,
        config: Option<&Path>,
    ) -> Self {
        Self {
            config: config.map(Path::to_owned),
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

    fn check(&self, served: &ServedDisks, spec: &DiskSpec) -> Result<(), String> {
        let name = served.doors.name(spec);
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
        let name_of = |spec| served.doors.name(spec);
        if served.named(&served.changing, &name).is_some() {
            return Err(format!(
                "disk '{name}' is being added or removed: wait for that, then add it again"
            ));
        }
        if served.specs.iter().any(|other| name_of(other) == name) {
            return Err(format!(
                "disk '{name}' is served already: remove it first, or give the new one its own {}=",
                door.name_key()
            ));
        }
        if let Some(path) = image_of(spec)
            && let Some((other, _)) = served.images.iter().find(|(_, image)| **image == path)
        {
            return Err(format!(
                "disk '{name}': its image is served already, as '{other}': remove that disk first"
            ));
        }
        if spec.scratch {
            return Err(format!(
                "disk '{name}': scratch=on works only for disks of the daemon's command line: \
                 leave it out"
            ));
        }
        let others: Vec<_> = served
            .specs
            .iter()
            .chain(&served.changing)
            .cloned()
            .collect();
        let socket = door.check_added(spec, &with_door(spec.door, &others))?;
        let log = spec.log_directory();
        let log = log.filter(|_| !self.logs.of(spec).open.load(Ordering::SeqCst));
        let paths = [&spec.path, &log, &socket];
        let mut paths = paths.into_iter().flatten();
        paths.try_for_each(|path| self.check_place(&name, path))?;
        disks::check(&[&others[..], std::slice::from_ref(spec)].concat())
    }

    /// Lists a disk as one that is being changed.
    fn change(&self, served: &mut ServedDisks, name: &str, spec: DiskSpec) -> DiskChange<'_> {
        served.changing.push(spec);
        DiskChange {
            hotplug: self,
            name: name.to_owned(),
            listed: None,
        }
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
    name: String,
    /// The disk, if it is served from then on.
    listed: Option<DiskSpec>,
}

impl Drop for DiskChange<'_> {
    fn drop(&mut self) {
        let mut served = self.hotplug.lock();
        let ServedDisks {
            doors,
            specs,
            changing,
            images,
        } = &mut *served;
        changing.retain(|spec| doors.name(spec) != self.name);
        if self.listed.is_none() {
            images.remove(&self.name);
        }
        specs.extend(self.listed.take());
    }
}

impl DiskHotplug for Hotplug {
    fn config(&self) -> Option<&Path> {
        self.config.as_deref()
    }

    fn add(&self, spec: &DiskSpec) -> Result<AddedDisk, String> {
        let mut served = self.lock();
        self.check(&served, spec)?;
        let name = served.doors.name(spec);
        let image = image_of(spec);
        served
            .images
            .extend(image.map(|image| (name.clone(), image)));
        let mut change = self.change(&mut served, &name, spec.clone());
        drop(served);
        let place = self.logs.of(spec);
        let disk = place.with(|log| log.add(spec, 1))?;
        let mut served = self.lock();
        match served.doors.of_mut(spec)?.add(spec, &disk) {
            Ok(added) => {
                assert_eq!(
                    added.disk.name, name,
                    "'remove-disk' finds the disk by the name that clients see"
                );
                change.listed = Some(spec.clone());
                Ok(added)
            }
            Err(error) => {
                drop((served, disk));
                if let Err(error) = place.with(|log| log.remove(spec, false)) {
                    tracing::error!("{error}");
                }
                Err(error)
            }
        }
    }

    fn remove(&self, name: &str, keep_records: bool) -> Result<RemovedDisk, RemovalError> {
        let mut served = self.lock();
        let refused = |reason: String| RemovalError { reason, disk: None };
        let Some(place) = served.named(&served.specs, name) else {
            return Err(refused("it is not served".to_owned()));
        };
        let ServedDisks { doors, specs, .. } = &mut *served;
        doors
            .of_mut(&specs[place])
            .map_err(refused)?
            .remove(&specs[place])?;
        let spec = specs.remove(place);
        let mut change = self.change(&mut served, name, spec.clone());
        // Until it is closed.
        change.listed = Some(spec.clone());
        drop(served);
        let removed = self
            .logs
            .of(&spec)
            .with(|log| log.remove(&spec, keep_records));
        match removed {
            Ok(removed) => {
                change.listed = None;
                let doors = &mut self.lock().doors;
                doors.of_mut(&spec).map_err(refused)?.forget(&spec);
                Ok(removed)
            }
            Err(error) => Err(self.serve_again(&spec, &error)),
        }
    }
}
