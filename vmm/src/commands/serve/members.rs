//! Disks of a daemon that come and go: `walvisor ctl SOCKET add-disk` and `remove-disk`.
//!
//! ```text
//!   add-disk    ─▶ the disk and its log lie beneath a --disk-dir ─▶ OpenLogs opens it ─▶ the Exposure serves it
//!   remove-disk ─▶ the Exposure answers what was taken, and lets go of it ─▶ OpenLogs closes it, and its log with its last disk
//! ```
//! The process has given up most of its rights by then. What it keeps for this is decided by `--disk-dir`, when it starts.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::control_socket::{Added, Members, NotRemoved};
use crate::disk::OpenDisk;
use crate::disk_spec::DiskSpec;
use crate::disks::{self, OpenLogs, Removed, disk_name, real_path};

/// The logs of a daemon, which its thread closes at the end.
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

    /// The logs, of which none are left.
    pub(super) fn take(&self) -> OpenLogs {
        std::mem::take(&mut *self.lock())
    }
}

/// How a daemon serves its disks.
pub(super) trait Exposure: Send {
    /// The key of `--disk` that gives a disk its name.
    const NAME_KEY: &str = "serial";

    /// The name of a disk in control requests.
    fn name(&self, spec: &DiskSpec) -> String {
        disk_name(spec)
    }

    /// Refuses a disk that cannot be served beside `others`, before it is opened. Returns the socket that serving it makes.
    fn check(&self, spec: &DiskSpec, others: &[DiskSpec]) -> Result<Option<PathBuf>, String>;

    /// Serves a disk.
    fn add(&mut self, spec: &DiskSpec, disk: &OpenDisk) -> Result<Added, String>;

    /// Stops to serve a disk, and returns when nothing of the daemon uses it any more.
    ///
    /// # Errors
    /// If something outside this process must let go of the disk first. Then it is served as before.
    fn remove(&mut self, spec: &DiskSpec) -> Result<(), NotRemoved>;

    /// Gives up what was kept to serve a removed disk again.
    fn forget(&mut self, spec: &DiskSpec);
}

/// The disks of a daemon. Dropping this ends serving them.
pub(super) struct Membership<E> {
    state: Mutex<State<E>>,
    logs: SharedLogs,
    disk_dirs: Vec<PathBuf>,
    /// Queues of a disk that does not say how many it has.
    queues: u8,
}

struct State<E> {
    exposure: E,
    specs: Vec<DiskSpec>,
}

impl<E: Exposure> Membership<E> {
    /// `exposure` serves the disks that `specs` describe. Others may be added beneath `disk_dirs`, which have no links.
    pub(super) fn new(
        exposure: E,
        specs: &[DiskSpec],
        disk_dirs: &[PathBuf],
        logs: &SharedLogs,
        queues: u8,
    ) -> Self {
        let specs = specs.to_vec();
        Self {
            state: Mutex::new(State { exposure, specs }),
            logs: logs.clone(),
            disk_dirs: disk_dirs.to_vec(),
            queues,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<E>> {
        // A disk whose addition or removal panicked is in the list, and can be removed.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses a path that lies beneath no directory that was given for disks that are added.
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
            "disk '{name}': {path} is not beneath a --disk-dir of this daemon ({}): name one there, or start the daemon with \
             --disk-dir DIR, a directory above it",
            dirs.join(", ")
        ))
    }

    fn check(&self, state: &State<E>, spec: &DiskSpec) -> Result<(), String> {
        let name_of = |spec| state.exposure.name(spec);
        let name = name_of(spec);
        if self.disk_dirs.is_empty() {
            let above = spec.path.as_ref();
            let above = above.map(|path| format!(", a directory above {}", path.display()));
            return Err(format!(
                "disk '{name}': this daemon gave up the right to open disks when it started: start it with --disk-dir DIR{}",
                above.unwrap_or_default()
            ));
        }
        if state.specs.iter().any(|other| name_of(other) == name) {
            return Err(format!(
                "disk '{name}' is served already: remove it first, or give the new one its own {}=",
                E::NAME_KEY
            ));
        }
        let image =
            |spec: &DiskSpec| Some(real_path(spec.path.as_ref()?)).filter(|_| spec.at.is_none());
        let mut others = state.specs.iter();
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
                "disk '{name}': scratch=on is for disks of the daemon's command line: leave it out"
            ));
        }
        let socket = state.exposure.check(spec, &state.specs)?;
        let log = spec.log_directory();
        let log = log.filter(|_| !self.logs.lock().has_log_of(spec));
        let paths = [&spec.path, &log, &socket];
        let mut paths = paths.into_iter().flatten();
        paths.try_for_each(|path| self.check_place(&name, path))?;
        let all: Vec<_> = state.specs.iter().chain([spec]).cloned().collect();
        disks::check(&all)
    }
}

impl<E: Exposure> Members for Membership<E> {
    fn add(&self, spec: &DiskSpec) -> Result<Added, String> {
        let mut state = self.lock();
        self.check(&state, spec)?;
        let disk = self.logs.lock().add(spec, self.queues)?;
        match state.exposure.add(spec, &disk) {
            Ok(added) => {
                state.specs.push(spec.clone());
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

    fn remove(&self, name: &str) -> Result<Removed, NotRemoved> {
        let mut state = self.lock();
        let State { exposure, specs } = &mut *state;
        let named = |spec: &DiskSpec| exposure.name(spec) == name;
        let Some(place) = specs.iter().position(named) else {
            let why = "it is not served".to_owned();
            return Err(NotRemoved { why, disk: None });
        };
        exposure.remove(&specs[place])?;
        let closed = self.logs.lock().remove(&specs[place]);
        match closed {
            Ok(removed) => {
                exposure.forget(&specs.remove(place));
                Ok(removed)
            }
            Err(error) => Err(self.serve_again(exposure, &specs[place], &error)),
        }
    }
}

impl<E: Exposure> Membership<E> {
    /// Serves a disk again that could not be closed.
    fn serve_again(
        &self,
        exposure: &mut E,
        spec: &DiskSpec,
        error: &dyn std::fmt::Display,
    ) -> NotRemoved {
        let disk = self.logs.lock().again(spec, self.queues);
        let added = disk.ok_or_else(|| "it is not open any more".to_owned());
        match added.and_then(|disk| exposure.add(spec, &disk)) {
            Ok(Added { disk, .. }) => NotRemoved {
                why: format!("{error}; it is served again"),
                disk: Some(disk),
            },
            Err(other) => NotRemoved {
                why: format!("{error}; it is not served again: {other}"),
                disk: None,
            },
        }
    }
}
