//! Adds and removes disks of a running daemon: `walvisor ctl SOCKET add-disk` and `remove-disk`.
//!
//! ```text
//!   add-disk    ─▶ the disk and its log lie beneath a --disk-dir ─▶ OpenLogs opens it ─▶ its Door serves it
//!   remove-disk ─▶ its Door answers the requests in flight and drops it ─▶ OpenLogs closes it, and a log without disks
//! ```
//! By then the process has given up most of its rights. `--disk-dir` decides, at the start, which
//! ones it keeps for this.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::door::{Doors, with_door};
use crate::control_socket::{AddedDisk, DiskHotplug, RemovalError};
use crate::disk_spec::DiskSpec;
use crate::disks::{self, OpenLogs, RemovedDisk, real_path};

/// The logs of a daemon, which the main thread closes at the end.
#[derive(Clone)]
pub(super) struct SharedLogs(Arc<Mutex<OpenLogs>>);

impl SharedLogs {
    pub(super) fn new(logs: OpenLogs) -> Self {
        Self(Arc::new(Mutex::new(logs)))
    }

    fn lock(&self) -> MutexGuard<'_, OpenLogs> {
        // A panic between two steps leaves logs that can be closed.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the logs, and leaves none.
    pub(super) fn take(&self) -> OpenLogs {
        std::mem::take(&mut *self.lock())
    }
}

/// What a daemon serves.
pub(super) struct ServedDisks {
    /// The doors, and what is open for each.
    pub(super) doors: Doors,
    /// The disks, oldest first.
    pub(super) specs: Vec<DiskSpec>,
}

impl ServedDisks {
    /// The names of the disks in control requests.
    pub(super) fn names(&self) -> Vec<String> {
        let specs = self.specs.iter();
        specs.map(|spec| self.doors.name(spec)).collect()
    }
}

/// Adds disks to a daemon, and removes them. Copies share the disks.
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
        if served.specs.iter().any(|other| name_of(other) == name) {
            return Err(format!(
                "disk '{name}' is served already: remove it first, or give the new one its own {}=",
                door.name_key()
            ));
        }
        let image =
            |spec: &DiskSpec| Some(real_path(spec.path.as_ref()?)).filter(|_| spec.at.is_none());
        let mut others = served.specs.iter();
        if let Some(path) = image(spec)
            && let Some(other) = others.find(|other| image(other).as_ref() == Some(&path))
        {
            return Err(format!(
                "disk '{name}': its image is served already, as '{}': remove that disk first",
                name_of(other)
            ));
        }
        if spec.scratch {
            return Err(format!(
                "disk '{name}': scratch=on works only for disks of the daemon's command line: \
                 leave it out"
            ));
        }
        let socket = door.check_added(spec, &with_door(spec.door, &served.specs))?;
        let log = spec.log_directory();
        let log = log.filter(|_| !self.logs.lock().has_log_of(spec));
        let paths = [&spec.path, &log, &socket];
        let mut paths = paths.into_iter().flatten();
        paths.try_for_each(|path| self.check_place(&name, path))?;
        let all: Vec<_> = served.specs.iter().chain([spec]).cloned().collect();
        disks::check(&all)
    }

    /// Serves a disk again after it could not be closed.
    fn serve_again(
        &self,
        doors: &mut Doors,
        spec: &DiskSpec,
        error: &dyn std::fmt::Display,
    ) -> RemovalError {
        let disk = self.logs.lock().reopen(spec, 1);
        let added = disk.ok_or_else(|| "it is no longer open".to_owned());
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

impl DiskHotplug for Hotplug {
    fn config(&self) -> Option<&Path> {
        self.config.as_deref()
    }

    fn add(&self, spec: &DiskSpec) -> Result<AddedDisk, String> {
        let mut served = self.lock();
        self.check(&served, spec)?;
        let disk = self.logs.lock().add(spec, 1)?;
        match served.doors.of_mut(spec)?.add(spec, &disk) {
            Ok(added) => {
                assert_eq!(
                    added.disk.name,
                    served.doors.name(spec),
                    "'remove-disk' finds the disk by the name that clients see"
                );
                served.specs.push(spec.clone());
                Ok(added)
            }
            Err(error) => {
                drop(disk);
                let closed = self.logs.lock().remove(spec);
                if let Err(error) = closed {
                    tracing::error!("{error}");
                }
                Err(error)
            }
        }
    }

    fn remove(&self, name: &str) -> Result<RemovedDisk, RemovalError> {
        let mut served = self.lock();
        let ServedDisks { doors, specs } = &mut *served;
        let refused = |reason: String| RemovalError { reason, disk: None };
        let Some(place) = specs.iter().position(|spec| doors.name(spec) == name) else {
            return Err(refused("it is not served".to_owned()));
        };
        doors
            .of_mut(&specs[place])
            .map_err(refused)?
            .remove(&specs[place])?;
        let closed = self.logs.lock().remove(&specs[place]);
        match closed {
            Ok(removed) => {
                let spec = specs.remove(place);
                doors.of_mut(&spec).map_err(refused)?.forget(&spec);
                Ok(removed)
            }
            Err(error) => Err(self.serve_again(doors, &specs[place], &error)),
        }
    }
}
