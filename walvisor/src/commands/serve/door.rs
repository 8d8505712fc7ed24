//! The doors of a daemon: the protocols by which clients reach its disks.

use std::collections::BTreeMap;
use std::path::PathBuf;

use walvisor_devices::nbd::Tls;
use walvisor_vmm::disk::OpenDisk;
use walvisor_vmm::seccomp::SyscallProfile;

use super::nbd::NbdDoor;
use super::tcmu::TcmuDoor;
use super::ublk::UblkDoor;
use super::vhost_user::VhostUserDoor;
use crate::commands::CommandError;
use crate::commands::socket::Sockets;
use crate::commands::socket_names::SocketNames;
use crate::control_socket::{AddedDisk, RemovalError};
use crate::disk_spec::{DiskCommand, DiskSpec};
use crate::disks::disk_name;
use crate::landlock::AllowedPaths;

/// Waits until the requests in flight of a disk that is no longer served are answered, and nobody
/// in this process uses it any more.
///
/// # Errors
/// If somebody outside this process keeps the disk. It is then served as before.
pub(super) type Removal = Box<dyn FnOnce() -> Result<(), RemovalError>>;

/// A protocol, and what this process has open for it.
///
/// ```text
///   check ─▶ bind ─▶ allow ─▶ the process gives up its rights, disks are opened ─▶ add ... ─▶ start ─▶ stop ─▶ logs_closed
///                                                                                   add, remove, forget: while it serves
/// ```
pub(super) trait Door: Send {
    /// The key of `--disk` that gives a disk its name.
    fn name_key(&self) -> &'static str {
        "serial"
    }

    /// The name of a disk in control requests.
    fn name(&self, spec: &DiskSpec) -> String {
        disk_name(spec)
    }

    /// Refuses disks that can't be served together. `specs`: all disks of this door.
    fn check(&self, specs: &[DiskSpec]) -> Result<(), String>;

    /// Makes what clients connect to. It comes before the disks are opened, which may take long
    /// after a crash: clients that connect early wait instead of being refused. Call it while there
    /// is one thread.
    fn bind(
        &mut self,
        specs: &[DiskSpec],
        sockets: &mut Sockets,
        names: &mut SocketNames,
    ) -> Result<(), CommandError>;

    /// Allows the paths that the door needs besides images and logs.
    fn allow(&self, _paths: &mut AllowedPaths) {}

    /// Refuses a disk that can't be added to `others`, before it is opened. Returns the path of the
    /// socket that [`add`](Self::add) will make for it, if any.
    fn check_added(&self, spec: &DiskSpec, others: &[DiskSpec]) -> Result<Option<PathBuf>, String>;

    /// Serves a disk. Before [`start`](Self::start), clients are let in only then.
    fn add(&mut self, spec: &DiskSpec, disk: &OpenDisk) -> Result<AddedDisk, String>;

    /// Lets clients in. Call it once.
    fn start(&mut self) -> Result<(), CommandError>;

    /// Refuses to let go of a disk, as [`remove`](Self::remove) would, where that is known before.
    fn check_removed(&self, _spec: &DiskSpec) -> Result<(), String> {
        Ok(())
    }

    /// Stops serving a disk, in the function that it returns: that may wait for a medium that does
    /// not answer, and is called without any lock.
    ///
    /// # Errors
    /// If somebody outside this process must let go of the disk first. It is then served as before.
    fn remove(&mut self, spec: &DiskSpec) -> Result<Removal, RemovalError>;

    /// Drops what was kept in case a removed disk had to be served again.
    fn forget(&mut self, _spec: &DiskSpec) {}

    /// Stops serving all disks, and returns when the door no longer uses any.
    fn stop(&mut self) -> Result<(), CommandError>;

    /// Last step, after the logs of the disks are closed.
    fn logs_closed(&mut self) -> Result<(), CommandError> {
        Ok(())
    }
}

/// The doors that the disks of a daemon have.
#[derive(Default)]
pub(super) struct Doors(BTreeMap<DiskCommand, Box<dyn Door>>);

impl Doors {
    /// The doors that `specs` name, with nothing open yet. `mode`: permissions of sockets; `grows`:
    /// disks may be added later.
    pub(super) fn new(specs: &[DiskSpec], mode: u32, grows: bool, tls: &Tls) -> Self {
        let mut doors: BTreeMap<DiskCommand, Box<dyn Door>> = BTreeMap::new();
        for spec in specs {
            doors.entry(spec.door).or_insert_with(|| match spec.door {
                DiskCommand::VhostUser => Box::new(VhostUserDoor::new(mode)),
                DiskCommand::Tcmu => Box::new(TcmuDoor::new(grows)),
                DiskCommand::Ublk => Box::new(UblkDoor::default()),
                _ => Box::new(NbdDoor::new(tls.clone())),
            });
        }
        Self(doors)
    }

    /// The system calls that they need.
    pub(super) fn profile(&self) -> SyscallProfile {
        SyscallProfile::Daemon {
            vhost_user: self.0.contains_key(&DiskCommand::VhostUser),
            tcmu: self.0.contains_key(&DiskCommand::Tcmu),
        }
    }

    /// As [`Door::check`].
    pub(super) fn check(&self, specs: &[DiskSpec]) -> Result<(), String> {
        let mut doors = self.0.iter();
        doors.try_for_each(|(kind, door)| door.check(&with_door(*kind, specs)))
    }

    /// As [`Door::bind`].
    pub(super) fn bind(
        &mut self,
        specs: &[DiskSpec],
        sockets: &mut Sockets,
        names: &mut SocketNames,
    ) -> Result<(), CommandError> {
        for (kind, door) in &mut self.0 {
            door.bind(&with_door(*kind, specs), sockets, names)?;
        }
        Ok(())
    }

    /// As [`Door::allow`].
    pub(super) fn allow(&self, paths: &mut AllowedPaths) {
        self.0.values().for_each(|door| door.allow(paths));
    }

    /// As [`Door::start`].
    pub(super) fn start(&mut self) -> Result<(), CommandError> {
        self.0.values_mut().try_for_each(|door| door.start())
    }

    /// As [`Door::stop`]. All doors are stopped; the first error is returned.
    pub(super) fn stop(&mut self) -> Result<(), CommandError> {
        let stopped: Vec<_> = self.0.values_mut().map(|door| door.stop()).collect();
        stopped.into_iter().collect()
    }

    /// As [`Door::logs_closed`].
    pub(super) fn logs_closed(&mut self) -> Result<(), CommandError> {
        self.0.values_mut().try_for_each(|door| door.logs_closed())
    }

    /// The door of a disk.
    pub(super) fn of(&self, spec: &DiskSpec) -> Result<&dyn Door, String> {
        let door = self.0.get(&spec.door).ok_or_else(|| no_door(spec))?;
        Ok(&**door)
    }

    /// As [`of`](Self::of), mutable.
    pub(super) fn of_mut(&mut self, spec: &DiskSpec) -> Result<&mut dyn Door, String> {
        let door = self.0.get_mut(&spec.door).ok_or_else(|| no_door(spec))?;
        Ok(&mut **door)
    }

    /// The name of a disk in control requests.
    pub(super) fn name(&self, spec: &DiskSpec) -> String {
        self.of(spec)
            .map_or_else(|_| disk_name(spec), |door| door.name(spec))
    }

    /// As [`Door::check_removed`].
    pub(super) fn check_removed(&self, spec: &DiskSpec) -> Result<(), String> {
        self.of(spec)?.check_removed(spec)
    }
}

/// The error for a disk whose door the daemon doesn't have.
fn no_door(spec: &DiskSpec) -> String {
    format!(
        "disk '{}': this daemon started with no disk with door={}, so it lacks the rights for one: \
         start it with such a disk",
        spec.name(),
        spec.door.name()
    )
}

/// The `specs` with this door.
pub(super) fn with_door(door: DiskCommand, specs: &[DiskSpec]) -> Vec<DiskSpec> {
    let mine = specs.iter().filter(|spec| spec.door == door);
    mine.cloned().collect()
}
