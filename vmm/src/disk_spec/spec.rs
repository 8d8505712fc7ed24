//! A disk as the command line describes it.

use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use walvisor_devices::backend::{Answer, SECTOR_SIZE};
use walvisor_devices::throttle::Limits;
use walvisor_storage::CommitWait;

/// Queue size if none is given.
const DEFAULT_QUEUE_SIZE: u16 = 256;

/// The commands that put disks in use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskCommand {
    /// `walvisor run`
    Run,
    /// `walvisor serve vhost-user`
    VhostUser,
    /// `walvisor serve nbd`
    Nbd,
    /// `walvisor serve tcmu`
    Tcmu,
}

impl DiskCommand {
    /// All of them, in the order of the manual.
    pub const ALL: [Self; 4] = [Self::Run, Self::VhostUser, Self::Nbd, Self::Tcmu];

    /// The last word of the command.
    pub fn name(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::VhostUser => "vhost-user",
            Self::Nbd => "nbd",
            Self::Tcmu => "tcmu",
        }
    }

    /// The command without the program's name.
    pub fn words(self) -> &'static str {
        match self {
            Self::Run => "run",
            Self::VhostUser => "serve vhost-user",
            Self::Nbd => "serve nbd",
            Self::Tcmu => "serve tcmu",
        }
    }
}

/// What keeps the disk's data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendKind {
    /// A base image and a write-ahead log.
    #[default]
    Wal,
    /// A base image alone: FLUSH is an fdatasync.
    Raw,
    /// Memory: gone when the guest ends.
    Ram,
}

impl BackendKind {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Wal, Self::Raw, Self::Ram];

    /// As the command line says it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wal => "wal",
            Self::Raw => "raw",
            Self::Ram => "ram",
        }
    }
}

/// Through what initiators reach a disk of the kernel's SCSI target.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fabric {
    /// tcm_loop: this machine itself sees it, as /dev/sdX.
    #[default]
    Loop,
    /// vhost-scsi: a guest of QEMU sees it.
    Vhost,
    /// None: somebody else exports it, by iSCSI for example.
    None,
}

/// How the guest reaches the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportKind {
    /// virtio-mmio, version 2.
    #[default]
    Mmio,
    /// virtio-pci, modern, with MSI-X.
    Pci,
}

impl TransportKind {
    /// As the command line says it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mmio => "mmio",
            Self::Pci => "pci",
        }
    }
}

/// How doorbells and interrupts cross between a guest and the device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Notifications {
    /// KVM signals an eventfd for a doorbell (ioeventfd), and takes another for an interrupt (irqfd): no vCPU leaves the
    /// guest for user space.
    #[default]
    Eventfds,
    /// A doorbell is an exit of its vCPU to user space, an interrupt an ioctl (KVM_IRQ_LINE, KVM_SIGNAL_MSI).
    Exits,
}

/// When a write completes, and what a FLUSH does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// Writes complete before they are durable; FLUSH makes them so.
    #[default]
    Writeback,
    /// A write is durable before it completes.
    Writethrough,
    /// FLUSH completes at once and makes nothing durable: for throw-away guests.
    Unsafe,
}

/// A disk as the command line describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSpec {
    /// The base image; `None` for a RAM disk that starts empty.
    pub path: Option<PathBuf>,
    /// The log's directory; `None` is `<path>.wal`.
    pub log: Option<PathBuf>,
    /// What keeps the data.
    pub backend: BackendKind,
    /// How the guest reaches it.
    pub transport: TransportKind,
    /// Request queues; `None` is one per vCPU.
    pub queues: Option<u16>,
    /// Descriptors in each queue, a power of two.
    pub queue_size: u16,
    /// Logical block in bytes, 512 or 4096.
    pub block_size: u32,
    /// Whether requests may be answered in the order in which they were made, should the guest want it so.
    pub in_order: bool,
    /// Processors for the queues' workers, by queue, again from the first when there are more queues. Empty: any.
    pub worker_cpus: Vec<u16>,
    /// How long an idle worker looks at its ring before it sleeps.
    pub poll: Duration,
    /// How doorbells and interrupts cross.
    pub notifications: Notifications,
    /// When a write completes.
    pub cache: CacheMode,
    /// When a server answers a write that is not durable yet.
    pub answer: Answer,
    /// Whether the guest may only read.
    pub read_only: bool,
    /// The serial a GET_ID request returns; `None` is the name of the image file.
    pub serial: Option<String>,
    /// Size of a RAM disk in bytes.
    pub size: Option<u64>,
    /// How much of the disk may be used.
    pub limits: Limits,
    /// How long the log's commit groups wait for more to join them.
    pub commit_wait: CommitWait,
    /// The Unix socket that a server offers the disk at.
    pub socket: Option<PathBuf>,
    /// The TCP port that a server offers the disk at; 0 is any that is free.
    pub port: Option<u16>,
    /// The address of that port.
    pub address: IpAddr,
    /// What the disk is called in the kernel's SCSI target; `None` is the name of the image file.
    pub backstore: Option<String>,
    /// Through what initiators reach it there.
    pub fabric: Fabric,
    /// The target's name in that fabric, `naa.` and 16 hexadecimal digits; `None` is made from the disk's name and path.
    pub wwn: Option<String>,
    /// Seconds that the kernel gives a command; 0: any. `None` is what the kernel has.
    pub command_timeout: Option<u32>,
}

impl Default for DiskSpec {
    /// What holds where a key is not given. There is no `path`, so that alone it describes no disk.
    fn default() -> Self {
        Self {
            path: None,
            log: None,
            backend: BackendKind::default(),
            transport: TransportKind::default(),
            queues: None,
            queue_size: DEFAULT_QUEUE_SIZE,
            block_size: SECTOR_SIZE as u32,
            in_order: false,
            worker_cpus: Vec::new(),
            poll: Duration::ZERO,
            notifications: Notifications::default(),
            cache: CacheMode::default(),
            answer: Answer::default(),
            read_only: false,
            serial: None,
            size: None,
            limits: Limits::default(),
            commit_wait: CommitWait::default(),
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
    /// The log's directory: as given, or `<path>.wal`. `None` for a disk without one.
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
