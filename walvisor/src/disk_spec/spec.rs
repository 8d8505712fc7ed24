//! The description of a disk on the command line.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use walvisor_devices::backend::{Answer, SECTOR_SIZE};
use walvisor_devices::throttle::{DEFAULT_WEIGHT, Limits};
use walvisor_storage::{ImageFormat, Point};
use walvisor_vmm::disk::{DeviceKind, Notifications, TransportKind};

use super::log_options::LogOptions;

/// Queue size if none is given.
const DEFAULT_QUEUE_SIZE: u16 = 256;

/// The commands that use disks. `VhostUser`, `Nbd`, `Tcmu` and `Ublk` also stand for the doors of a
/// daemon's disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum DiskCommand {
    /// `walvisor run`
    Run,
    /// `walvisor serve`, whose disks name their doors.
    Serve,
    /// `walvisor serve vhost-user`, `door=vhost-user`
    VhostUser,
    /// `walvisor serve nbd`, `door=nbd`
    Nbd,
    /// `walvisor serve tcmu`, `door=tcmu`
    Tcmu,
    /// `walvisor serve ublk`, `door=ublk`
    Ublk,
}

impl DiskCommand {
    /// The commands that imply a door, and `run`, in the order of the manual.
    pub const ALL: [Self; 5] = [
        Self::Run,
        Self::VhostUser,
        Self::Nbd,
        Self::Tcmu,
        Self::Ublk,
    ];
    /// The doors of a daemon.
    pub const DOORS: [Self; 4] = [Self::VhostUser, Self::Nbd, Self::Tcmu, Self::Ublk];

    /// The last word of the command.
    pub fn name(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Serve => "serve",
            Self::VhostUser => "vhost-user",
            Self::Nbd => "nbd",
            Self::Tcmu => "tcmu",
            Self::Ublk => "ublk",
        }
    }

    /// The command without the program's name.
    pub fn words(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::Serve => "serve",
            Self::VhostUser => "serve vhost-user",
            Self::Nbd => "serve nbd",
            Self::Tcmu => "serve tcmu",
            Self::Ublk => "serve ublk",
        }
    }
}

/// What stores a disk's data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendKind {
    /// A base image and a write-ahead log.
    #[default]
    Wal,
    /// An image alone. FLUSH is an fdatasync.
    Raw,
    /// Memory. The data is gone when the process ends.
    Ram,
}

impl BackendKind {
    /// All backends.
    pub const ALL: [Self; 3] = [Self::Wal, Self::Raw, Self::Ram];

    /// The backend's name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wal => "wal",
            Self::Raw => "raw",
            Self::Ram => "ram",
        }
    }
}

/// The fabric through which initiators reach a disk of the kernel's SCSI target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fabric {
    /// tcm_loop: the host sees the disk, as /dev/sdX.
    #[default]
    Loop,
    /// vhost-scsi: a guest of QEMU sees the disk.
    Vhost,
    /// No fabric: the administrator exports the disk, for example by iSCSI.
    None,
}

/// When a write completes, and the effect of a FLUSH.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DiskCache {
    /// Writes complete before they are durable; FLUSH makes them durable.
    #[default]
    Writeback,
    /// A write is durable before it completes.
    Writethrough,
    /// FLUSH does nothing: for throw-away guests.
    Unsafe,
}

/// The description of a disk on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSpec {
    /// The base image; `None` for a RAM disk.
    pub path: Option<PathBuf>,
    /// The log's directory; `None` is `<path>.wal`.
    pub log: Option<PathBuf>,
    /// The backend that keeps the data.
    pub backend: BackendKind,
    /// The image's format, if it is known.
    pub format: ImageFormat,
    /// How the disk is reached: by the guest of `walvisor run`, or through a daemon's door.
    pub door: DiskCommand,
    /// The virtio device through which the disk is seen.
    pub device: DeviceKind,
    /// The transport through which the guest reaches the disk.
    pub transport: TransportKind,
    /// Request queues; `None` is one per vCPU.
    pub queues: Option<u16>,
    /// Descriptors in each queue, or requests of the kernel; a power of two.
    pub queue_size: u16,
    /// Size of a logical block in bytes, 512 or 4096.
    pub block_size: u32,
    /// Whether the device offers IN_ORDER: to answer requests in the order in which they were made.
    pub in_order: bool,
    /// The processors to which the queues' workers are pinned, in turn. Empty: any processor.
    pub worker_cpus: Vec<u16>,
    /// How long an idle worker polls its ring before it sleeps.
    pub poll: Duration,
    /// How doorbells and interrupts travel between the guest and the device.
    pub notifications: Notifications,
    /// When a write completes.
    pub cache: DiskCache,
    /// When a server answers a write that is not durable yet.
    pub answer: Answer,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// Serve the disk as of this point of its history; `None`: as it is now.
    pub at: Option<Point>,
    /// Whether a disk with `at` can be written. The writes are thrown away at the end.
    pub scratch: bool,
    /// The serial number that a guest reads; `None` is the name of the image file.
    pub serial: Option<String>,
    /// Size of a RAM disk in bytes.
    pub size: Option<u64>,
    /// Limits on requests and bytes per second.
    pub limits: Limits,
    /// The options that it sets of its log.
    pub log_options: LogOptions,
    /// Images of disks on the log that nobody uses in this process, and to which the log may copy
    /// its records of them.
    pub detached: Vec<PathBuf>,
    /// The Unix socket at which a server offers the disk.
    pub socket: Option<PathBuf>,
    /// The TCP port at which a server offers the disk; 0 means any free port.
    pub port: Option<u16>,
    /// The address of that port.
    pub address: IpAddr,
    /// The disk's name in the kernel's SCSI target; `None` is the name of the image file.
    pub backstore: Option<String>,
    /// The fabric through which initiators reach the disk in the target.
    pub fabric: Fabric,
    /// The target's name in that fabric, `naa.` and 16 hexadecimal digits; `None` is made from the
    /// disk's name and path.
    pub wwn: Option<String>,
    /// Seconds after which the kernel times a command out; 0 means never. `None` keeps the kernel's
    /// default.
    pub command_timeout: Option<u32>,
}

impl Default for DiskSpec {
    /// The values of keys that are not given. A valid disk has a `path` or a `size` too.
    fn default() -> Self {
        Self {
            path: None,
            log: None,
            backend: BackendKind::default(),
            format: ImageFormat::Unknown,
            door: DiskCommand::Run,
            device: DeviceKind::default(),
            transport: TransportKind::default(),
            queues: None,
            queue_size: DEFAULT_QUEUE_SIZE,
            block_size: SECTOR_SIZE as u32,
            in_order: false,
            worker_cpus: Vec::new(),
            poll: Duration::ZERO,
            notifications: Notifications::default(),
            cache: DiskCache::default(),
            answer: Answer::default(),
            read_only: false,
            at: None,
            scratch: false,
            serial: None,
            size: None,
            limits: Limits {
                weight: DEFAULT_WEIGHT,
                ..Limits::default()
            },
            log_options: LogOptions::default(),
            detached: Vec::new(),
            socket: None,
            port: None,
            address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            backstore: None,
            fabric: Fabric::default(),
            wwn: None,
            command_timeout: None,
        }
    }
}

impl DiskSpec {
    /// The log's directory: as given, or `<path>.wal`. `None` if the disk's backend has no log.
    pub fn log_directory(&self) -> Option<PathBuf> {
        if self.backend != BackendKind::Wal {
            return None;
        }
        self.log.clone().or_else(|| {
            let mut name = self.path.clone()?.into_os_string();
            name.push(".wal");
            Some(PathBuf::from(name))
        })
    }

    /// What messages call the disk.
    pub fn name(&self) -> String {
        match &self.path {
            Some(path) => path.display().to_string(),
            None => "ram disk".to_owned(),
        }
    }
}
