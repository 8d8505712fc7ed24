//! The ublk door: each disk is a block device of the kernel, /dev/ublkbN.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use clap::Args;
use walvisor_devices::backend::Answer;
use walvisor_devices::ublk::{
    ControlDevice, Device, DeviceState, KernelDevice, ServedDevice, WantedDevice, WorkerPool,
};
use walvisor_vmm::disk::{DiskInUse, OpenDisk};

use super::daemon::{DaemonArguments, announce};
use super::door::{Door, Removal};
use crate::commands::CommandError;
use crate::commands::socket::Sockets;
use crate::commands::socket_names::SocketNames;
use crate::control_socket::{AddedDisk, RemovalError};
use crate::disk_spec::{BackendKind, DiskCache, DiskCommand, DiskSpec};
use crate::disks::{self, disk_name};
use crate::plan::real_path;

/// The arguments of `walvisor serve ublk`.
#[derive(Args, Debug)]
pub struct UblkArguments {
    /// The arguments of every daemon.
    #[command(flatten)]
    pub daemon: DaemonArguments,
    /// List walvisor's ublk devices, served or not, and exit
    #[arg(long, conflicts_with_all = ["disks", "config"])]
    pub list: bool,
    /// Remove devices that wait for a daemon, such as /dev/ublkb0, and exit; what waits for them
    /// fails
    #[arg(
        long,
        value_name = "DEVICE",
        num_args = 1..,
        value_parser = parse_device,
        conflicts_with_all = ["disks", "config", "list"]
    )]
    pub remove: Vec<u32>,
}

/// Parses the path of a device.
fn parse_device(text: &str) -> Result<u32, String> {
    let number = text.strip_prefix("/dev/ublkb").map(str::parse);
    number
        .and_then(Result::ok)
        .ok_or_else(|| "give a device as /dev/ublkbN ('--list' shows them)".to_owned())
}

/// Carries out `walvisor serve ublk`.
pub(super) fn run(arguments: &UblkArguments, started: Instant) -> Result<(), CommandError> {
    if !arguments.list && arguments.remove.is_empty() {
        return arguments.daemon.run(DiskCommand::Ublk, started);
    }
    let control = ControlDevice::open().map_err(CommandError::failed)?;
    let ours = control.devices();
    let ours = ours.into_iter().filter(|device| is_ours(device.identity));
    let ours: Vec<_> = ours.collect();
    if arguments.list {
        for device in ours {
            let state = match device.state {
                DeviceState::Served(process) => format!("served by process {process}"),
                DeviceState::Waiting => "waits to be served".to_owned(),
                DeviceState::Dead => "never started".to_owned(),
            };
            announce(&format!("{}: {state}\n", device.path()));
        }
        return Ok(());
    }
    for number in &arguments.remove {
        let Some(device) = ours.iter().find(|device| device.number == *number) else {
            return Err(CommandError::Failed(format!(
                "/dev/ublkb{number} is not a device of walvisor: '--list' shows its devices"
            )));
        };
        control.remove(*number).map_err(CommandError::failed)?;
        announce(&format!("removed {}\n", device.path()));
    }
    Ok(())
}

/// This process's devices.
#[derive(Default)]
pub(super) struct UblkDoor {
    /// Devices that are in the kernel and not served yet, by the disk's name.
    raised: HashMap<String, KernelDevice>,
    served: HashMap<String, SharedDevice>,
    workers: WorkerPool,
}

/// A device with the handle of its disk; `None`: it was taken out of the kernel.
type SharedDevice = Arc<Mutex<Option<(ServedDevice, DiskInUse)>>>;

fn lock(device: &SharedDevice) -> MutexGuard<'_, Option<(ServedDevice, DiskInUse)>> {
    // A device that a panic left half removed can be removed again.
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Door for UblkDoor {
    fn check(&self, specs: &[DiskSpec]) -> Result<(), String> {
        let mut names: Vec<_> = specs.iter().map(disk_name).collect();
        names.sort();
        match names.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(format!(
                "two disks have the name '{}': give one of them a serial=",
                pair[0]
            )),
            None => Ok(()),
        }
    }

    /// Makes the devices with all that they need to be open, or takes over those that wait for these
    /// disks: programs that use them wait meanwhile instead of getting errors.
    fn bind(
        &mut self,
        specs: &[DiskSpec],
        _sockets: &mut Sockets,
        _names: &mut SocketNames,
    ) -> Result<(), CommandError> {
        let control = ControlDevice::open().map_err(CommandError::failed)?;
        for spec in specs {
            let wanted = WantedDevice {
                queues: disks::queues(spec, 1),
                depth: spec.queue_size,
                identity: identity(spec),
                waits: outlives_process(spec),
            };
            let device = control.raise(&wanted).map_err(CommandError::failed)?;
            self.raised.insert(disk_name(spec), device);
        }
        write_back_for_others();
        Ok(())
    }

    fn check_added(
        &self,
        spec: &DiskSpec,
        _others: &[DiskSpec],
    ) -> Result<Option<PathBuf>, String> {
        Err(format!(
            "disk '{}': a disk with door=ublk can't be added to a running daemon, which gave up \
             the right to make its rings: restart the daemon with it (its other disks with \
             door=ublk wait meanwhile), or start another daemon",
            disk_name(spec)
        ))
    }

    fn add(&mut self, spec: &DiskSpec, disk: &OpenDisk) -> Result<AddedDisk, String> {
        let name = disk_name(spec);
        let kernel = self.raised.remove(&name).ok_or_else(|| {
            format!("disk '{name}': its device is gone: restart the daemon to get another")
        })?;
        let backend = disk.backend.clone();
        let device = Device::new(backend, &name, spec.block_size, outlives_process(spec));
        device.throttle().set(disk.limits);
        let throttle = device.throttle();
        let served = device.serve(kernel, &self.workers);
        let served = served.map_err(|error| format!("disk '{name}': {error}"))?;
        let in_use = DiskInUse {
            name: name.clone(),
            transport: DiskCommand::Ublk.name(),
            backend: disk.backend.clone(),
            metrics: served.metrics(),
            throttle,
            device: served.control(),
        };
        let place = served.path();
        let device = Arc::new(Mutex::new(Some((served, in_use.clone()))));
        self.served.insert(name, device);
        Ok(AddedDisk {
            disk: in_use,
            place,
        })
    }

    fn start(&mut self) -> Result<(), CommandError> {
        for device in self.served.values() {
            if let Some((served, _)) = &mut *lock(device) {
                served.start().map_err(CommandError::failed)?;
            }
        }
        Ok(())
    }

    fn remove(&mut self, spec: &DiskSpec) -> Result<Removal, RemovalError> {
        let device = self.served.get(&disk_name(spec)).cloned();
        Ok(Box::new(move || {
            let Some(device) = device else { return Ok(()) };
            let mut device = lock(&device);
            if let Some((served, in_use)) = &mut *device {
                served.remove().map_err(|error| RemovalError {
                    reason: error.to_string(),
                    disk: Some(in_use.clone()),
                })?;
            }
            *device = None;
            Ok(())
        }))
    }

    fn forget(&mut self, spec: &DiskSpec) {
        self.served.remove(&disk_name(spec));
    }

    fn stop(&mut self) -> Result<(), CommandError> {
        let served = std::mem::take(&mut self.served);
        let mut devices: Vec<_> = served.values().map(lock).collect();
        let present = devices.iter_mut().filter_map(|device| device.as_mut());
        let removed: Vec<_> = present.map(|(served, _)| served.remove()).collect();
        devices.iter_mut().for_each(|device| **device = None);
        // Devices that were never served are taken down too, or wait on.
        self.raised.clear();
        let removed: Result<(), _> = removed.into_iter().collect();
        removed.map_err(CommandError::failed)
    }
}

/// Whether what the disk has answered outlives the process, so that its device may wait for the
/// next one.
fn outlives_process(spec: &DiskSpec) -> bool {
    spec.backend != BackendKind::Ram
        && spec.cache != DiskCache::Unsafe
        && spec.answer == Answer::Written
        && !spec.scratch
}

/// The upper bits of the identities of walvisor's devices: "wv".
const OURS: u64 = 0x7776 << 48;

fn is_ours(identity: u64) -> bool {
    identity & (0xffff << 48) == OURS
}

/// What the next daemon finds the disk's device by.
fn identity(spec: &DiskSpec) -> u64 {
    let image = spec.path.as_deref().map(real_path);
    let at = spec.at.as_ref().map(|at| format!("{at:?}"));
    let hash = disks::identity(&disk_name(spec), &format!("{image:?}\0{at:?}"));
    OURS | hash & !(0xffff << 48)
}

/// Tells the kernel that this process writes back other programs' pages, so that it does not wait
/// for itself when memory is short.
fn write_back_for_others() {
    // linux/prctl.h.
    const PR_SET_IO_FLUSHER: libc::c_int = 57;
    // SAFETY: this sets a flag of the thread, which later threads inherit, and no memory.
    let set = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) };
    if set != 0 {
        let error = io::Error::last_os_error();
        tracing::warn!("the kernel may wait for this process while memory is short: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(text: &str) -> DiskSpec {
        DiskSpec::parse(text, DiskCommand::Ublk).unwrap()
    }

    #[test]
    fn a_disk_is_known_again_by_its_image_name_and_point() {
        let texts = [
            "path=a",
            "path=b",
            "path=a,serial=s",
            "path=a,at=newest",
            "backend=ram,size=1M",
        ];
        let mut all = texts.map(|text| identity(&spec(text))).to_vec();
        assert!(all.iter().all(|identity| is_ours(*identity)));
        assert_eq!(
            all[0],
            identity(&spec("path=a,queues=2,cache=writethrough"))
        );
        assert_eq!(all[0] >> 48, 0x7776);
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), texts.len());
        assert!(!is_ours(0) && !is_ours(u64::MAX));
    }

    #[test]
    fn a_device_waits_only_if_nothing_answered_can_be_lost() {
        for text in ["path=a", "path=a,backend=raw", "path=a,at=newest"] {
            assert!(outlives_process(&spec(text)), "{text}");
        }
        for text in [
            "path=a,answer=memory",
            "path=a,cache=unsafe",
            "path=a,at=newest,scratch=on",
            "backend=ram,size=1M",
        ] {
            assert!(!outlives_process(&spec(text)), "{text}");
        }
    }

    #[test]
    fn two_disks_need_two_names() {
        let door = UblkDoor::default();
        let specs = ["path=a", "path=b"].map(spec);
        assert_eq!(door.check(&specs), Ok(()));
        let same = ["backend=ram,size=1M", "backend=ram,size=1M"].map(spec);
        assert!(door.check(&same).unwrap_err().contains("serial="));
        assert_eq!(parse_device("/dev/ublkb12"), Ok(12));
        for wrong in ["ublkb1", "/dev/ublkc1", "/dev/ublkb", "/dev/ublkb-1"] {
            assert!(parse_device(wrong).is_err(), "{wrong}");
        }
    }
}
