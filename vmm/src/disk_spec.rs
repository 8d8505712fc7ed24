//! SPEC: a disk as the command line describes it, `path=disk.img,transport=pci,queues=4`.

#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use walvisor_devices::backend::{Answer, SECTOR_SIZE};
use walvisor_devices::block::MAX_POLL;
use walvisor_devices::throttle::Limits;
use walvisor_storage::CommitWait;

use crate::size::parse_size;

/// What `--help` says of a disk.
pub fn help() -> String {
    format!(
        "A disk: path=FILE[,key=value ...]; may be given several times. Keys: {KEYS}. With ioeventfd=off doorbells exit to \
         user space and interrupts are ioctls"
    )
}

/// Every key that this version carries out, in the order of the manual.
const KEYS: &str = "path, log, backend, transport, queues, queue-size, block-size, in-order, worker-cpus, poll-usec, \
     ioeventfd, cache, answer, readonly, serial, size, ops-per-second, ops-burst, bytes-per-second, bytes-burst, commit-wait-usec, \
     commit-wait-count, socket, port, address, name, fabric, wwn, command-timeout";

/// Longest serial in bytes: what a GET_ID request returns (virtio 1.2, 5.2.6).
pub const MAX_SERIAL_BYTES: usize = 20;
/// Most queues of one disk.
pub const MAX_QUEUES: u16 = 64;
/// Smallest queue size: fewer descriptors than one request with data needs make no sense.
pub const MIN_QUEUE_SIZE: u16 = 4;
/// Largest queue size: a bound on what one queue can keep in flight. The specification allows 32768 (virtio 1.2, 2.7).
pub const MAX_QUEUE_SIZE: u16 = 1024;
/// Longest wait for more FLUSHes to join a commit group, in microseconds.
pub const MAX_COMMIT_WAIT_US: u32 = 1_000_000;
/// Most FLUSHes that a commit group can be told to wait for.
pub const MAX_COMMIT_WAIT_COUNT: u32 = 65_536;
/// Largest number of a processor: more than the kernel knows of.
const MAX_CPU: u16 = 1023;
/// Longest name of a disk in the kernel's SCSI target, in bytes.
const MAX_BACKSTORE_BYTES: usize = 32;
/// Longest time that the kernel can be told to give a command, in seconds.
const MAX_COMMAND_TIMEOUT: u32 = 86_400;
/// Queue size if none is given.
pub const DEFAULT_QUEUE_SIZE: u16 = 256;

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
    /// When a server answers a write that is not durable yet; `None` is once it outlives the server.
    pub answer: Option<Answer>,
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
    /// The address of that port; `None` is the loopback address.
    pub address: Option<IpAddr>,
    /// What the disk is called in the kernel's SCSI target; `None` is the name of the image file.
    pub backstore: Option<String>,
    /// Through what initiators reach it there; `None` is tcm_loop.
    pub fabric: Option<Fabric>,
    /// The target's name in that fabric, `naa.` and 16 hexadecimal digits; `None` is made from the disk's name and path.
    pub wwn: Option<String>,
    /// Seconds that the kernel gives a command; 0: any. `None` is what the kernel has.
    pub command_timeout: Option<u32>,
}

/// Why a SPEC was refused. Its text is one line and names the key.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskSpecError {
    /// A part has no `=`.
    #[error("'{0}' has no '=': a disk is path=FILE[,key=value ...] (keys: {KEYS})")]
    NoValue(String),
    /// A key that does not exist.
    #[error("unknown key '{0}' (keys: {KEYS})")]
    UnknownKey(String),
    /// A key given twice.
    #[error("key '{0}' is given twice: give it once")]
    Twice(String),
    /// A value that its key does not take.
    #[error("{key}={value}: give {expected}")]
    Value {
        /// The key.
        key: &'static str,
        /// The value as given.
        value: String,
        /// What it takes.
        expected: String,
    },
    /// A key that only `walvisor serve` carries out.
    #[error("{0}= is for 'walvisor serve': leave it out")]
    Serve(&'static str),
    /// A key that only `walvisor serve tcmu` carries out.
    #[error("{0}= is for 'walvisor serve tcmu': leave it out")]
    Target(&'static str),
    /// A disk with no `path`.
    #[error("a disk needs path=FILE (or backend=ram,size=N)")]
    NoPath,
    /// Two keys that contradict each other.
    #[error("{0}")]
    Conflict(&'static str),
}

impl FromStr for DiskSpec {
    type Err = DiskSpecError;

    fn from_str(text: &str) -> Result<Self, DiskSpecError> {
        let mut spec = Self {
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
            answer: None,
            read_only: false,
            serial: None,
            size: None,
            limits: Limits::default(),
            commit_wait: CommitWait::default(),
            socket: None,
            port: None,
            address: None,
            backstore: None,
            fabric: None,
            wwn: None,
            command_timeout: None,
        };
        let mut seen = HashSet::new();
        for part in text.split(',') {
            let Some((key, value)) = part.split_once('=') else {
                return Err(DiskSpecError::NoValue(part.to_owned()));
            };
            if !seen.insert(key) {
                return Err(DiskSpecError::Twice(key.to_owned()));
            }
            spec.set(key, value)?;
        }
        spec.check()?;
        Ok(spec)
    }
}

impl DiskSpec {
    /// Carries out one `key=value`.
    fn set(&mut self, key: &str, value: &str) -> Result<(), DiskSpecError> {
        match key {
            "path" => self.path = Some(path("path", value)?),
            "log" => self.log = Some(path("log", value)?),
            "backend" => {
                self.backend = match value {
                    "wal" => BackendKind::Wal,
                    "ram" => BackendKind::Ram,
                    "raw" => BackendKind::Raw,
                    _ => return Err(wrong("backend", value, "wal, raw or ram")),
                }
            }
            "transport" => {
                self.transport = match value {
                    "mmio" => TransportKind::Mmio,
                    "pci" => TransportKind::Pci,
                    _ => return Err(wrong("transport", value, "mmio or pci")),
                }
            }
            "queues" => {
                self.queues = Some(number("queues", value, 1..=MAX_QUEUES)?);
            }
            "queue-size" => {
                self.queue_size = value
                    .parse()
                    .ok()
                    .filter(|size: &u16| {
                        size.is_power_of_two() && (MIN_QUEUE_SIZE..=MAX_QUEUE_SIZE).contains(size)
                    })
                    .ok_or_else(|| {
                        let range =
                            format!("a power of two from {MIN_QUEUE_SIZE} to {MAX_QUEUE_SIZE}");
                        wrong("queue-size", value, range)
                    })?;
            }
            "block-size" => {
                self.block_size = match value {
                    "512" => 512,
                    "4096" => 4096,
                    _ => return Err(wrong("block-size", value, "512 or 4096")),
                }
            }
            "in-order" => self.in_order = switch("in-order", value)?,
            "worker-cpus" => {
                let expected = "CPU numbers and ranges joined by '+', such as 0-3+8";
                self.worker_cpus =
                    cpus(value).ok_or_else(|| wrong("worker-cpus", value, expected))?;
            }
            "poll-usec" => {
                let most = MAX_POLL.as_micros() as u64;
                self.poll = Duration::from_micros(number("poll-usec", value, 0..=most)?);
            }
            "ioeventfd" => {
                self.notifications = match switch("ioeventfd", value)? {
                    true => Notifications::Eventfds,
                    false => Notifications::Exits,
                };
            }
            "cache" => {
                self.cache = match value {
                    "writeback" => CacheMode::Writeback,
                    "writethrough" => CacheMode::Writethrough,
                    "unsafe" => CacheMode::Unsafe,
                    _ => return Err(wrong("cache", value, "writeback, writethrough or unsafe")),
                }
            }
            "answer" => {
                self.answer = Some(match value {
                    "written" => Answer::Written,
                    "memory" => Answer::Memory,
                    _ => return Err(wrong("answer", value, "written or memory")),
                });
            }
            "readonly" => self.read_only = switch("readonly", value)?,
            "serial" => {
                let printable = value.bytes().all(|byte| byte.is_ascii_graphic());
                if value.is_empty() || value.len() > MAX_SERIAL_BYTES || !printable {
                    let limit = format!("1 to {MAX_SERIAL_BYTES} printable ASCII characters");
                    return Err(wrong("serial", value, limit));
                }
                self.serial = Some(value.to_owned());
            }
            "size" => {
                let bytes = parse_size(value).map_err(|_| {
                    wrong(
                        "size",
                        value,
                        "a number of bytes, or one with K, M, G, T, P or E",
                    )
                })?;
                if bytes == 0 || !bytes.is_multiple_of(SECTOR_SIZE) {
                    return Err(wrong("size", value, "a positive multiple of 512 bytes"));
                }
                self.size = Some(bytes);
            }
            "ops-per-second" => {
                self.limits.ops_per_second = number("ops-per-second", value, 1..=u64::MAX)?;
            }
            "ops-burst" => self.limits.ops_burst = number("ops-burst", value, 1..=u64::MAX)?,
            "bytes-per-second" => self.limits.bytes_per_second = rate("bytes-per-second", value)?,
            "bytes-burst" => self.limits.bytes_burst = rate("bytes-burst", value)?,
            "commit-wait-usec" => {
                let wait = number("commit-wait-usec", value, 0..=MAX_COMMIT_WAIT_US)?;
                self.commit_wait.longest = Some(Duration::from_micros(wait.into()));
            }
            "commit-wait-count" => {
                let count = number("commit-wait-count", value, 1..=MAX_COMMIT_WAIT_COUNT)?;
                self.commit_wait.count = Some(count);
            }
            "socket" => self.socket = Some(path("socket", value)?),
            "port" => self.port = Some(number("port", value, 0..=u16::MAX)?),
            "address" => {
                let address = value.parse();
                let expected = "an IP address, such as 127.0.0.1 or ::";
                self.address = Some(address.map_err(|_| wrong("address", value, expected))?);
            }
            "name" => self.backstore = Some(backstore(value)?),
            "fabric" => {
                self.fabric = Some(match value {
                    "loop" => Fabric::Loop,
                    "vhost" => Fabric::Vhost,
                    "none" => Fabric::None,
                    _ => return Err(wrong("fabric", value, "loop, vhost or none")),
                });
            }
            "wwn" => {
                let hexadecimal = |digits: &str| {
                    let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
                    digits.len() == 16 && digits.bytes().all(digit)
                };
                if !value.strip_prefix("naa.").is_some_and(hexadecimal) {
                    let expected = "naa. and 16 hexadecimal digits in lower case";
                    return Err(wrong("wwn", value, expected));
                }
                self.wwn = Some(value.to_owned());
            }
            "command-timeout" => {
                let timeout = number("command-timeout", value, 0..=MAX_COMMAND_TIMEOUT)?;
                self.command_timeout = Some(timeout);
            }
            _ => return Err(DiskSpecError::UnknownKey(key.to_owned())),
        }
        Ok(())
    }

    /// Refuses what is for a server alone: a VM's disk is offered to nobody else.
    ///
    /// # Errors
    /// A line that names the key.
    pub fn check_not_served(&self) -> Result<(), DiskSpecError> {
        let served = [
            (self.socket.is_some(), "socket"),
            (self.port.is_some(), "port"),
            (self.address.is_some(), "address"),
            (self.answer.is_some(), "answer"),
        ];
        match served.into_iter().find(|(given, _)| *given) {
            Some((_, key)) => Err(DiskSpecError::Serve(key)),
            None => self.check_no_target(),
        }
    }

    /// Refuses what is for the kernel's SCSI target alone.
    ///
    /// # Errors
    /// A line that names the key.
    pub fn check_no_target(&self) -> Result<(), DiskSpecError> {
        let keys = [
            (self.backstore.is_some(), "name"),
            (self.fabric.is_some(), "fabric"),
            (self.wwn.is_some(), "wwn"),
            (self.command_timeout.is_some(), "command-timeout"),
        ];
        match keys.into_iter().find(|(given, _)| *given) {
            Some((_, key)) => Err(DiskSpecError::Target(key)),
            None => Ok(()),
        }
    }

    /// Refuses keys that contradict each other.
    fn check(&self) -> Result<(), DiskSpecError> {
        if self.socket.is_some() && self.port.is_some() {
            return Err(DiskSpecError::Conflict(
                "socket= and port= are two places: give one of them",
            ));
        }
        if self.address.is_some() && self.port.is_none() {
            return Err(DiskSpecError::Conflict(
                "address= is where a port is: give port=N too",
            ));
        }
        let Limits {
            ops_per_second,
            ops_burst,
            bytes_per_second,
            bytes_burst,
        } = self.limits;
        if (ops_burst > 0 && ops_per_second == 0) || (bytes_burst > 0 && bytes_per_second == 0) {
            return Err(DiskSpecError::Conflict(
                "a burst is of a limit: give ops-per-second=N or bytes-per-second=SIZE too",
            ));
        }
        if self.answer == Some(Answer::Memory) && self.cache == CacheMode::Writethrough {
            return Err(DiskSpecError::Conflict(
                "answer=memory contradicts cache=writethrough, which answers a write when it is durable: give one of them",
            ));
        }
        match self.backend {
            BackendKind::Wal | BackendKind::Raw => {
                if self.size.is_some() {
                    return Err(DiskSpecError::Conflict(
                        "size= is for backend=ram: a disk image has a size ('walvisor disk create' sets it)",
                    ));
                }
                if self.path.is_none() {
                    return Err(DiskSpecError::NoPath);
                }
                if self.backend == BackendKind::Raw {
                    self.check_no_log()?;
                }
            }
            BackendKind::Ram => {
                self.check_no_log()?;
                if self.path.is_some() {
                    return Err(DiskSpecError::Conflict(
                        "backend=ram starts empty: give size=N in place of path=",
                    ));
                }
                if self.size.is_none() {
                    return Err(DiskSpecError::Conflict(
                        "backend=ram needs size=N, such as size=64M",
                    ));
                }
            }
        }
        Ok(())
    }

    /// Refuses what is of a log alone.
    fn check_no_log(&self) -> Result<(), DiskSpecError> {
        if self.log.is_some() {
            return Err(DiskSpecError::Conflict(
                "only backend=wal has a log: leave log= out",
            ));
        }
        if self.commit_wait != CommitWait::default() {
            return Err(DiskSpecError::Conflict(
                "only backend=wal has a log: leave commit-wait-usec= and commit-wait-count= out",
            ));
        }
        if self.answer.is_some() {
            return Err(DiskSpecError::Conflict(
                "only backend=wal has a log that a write can be answered before: leave answer= out",
            ));
        }
        Ok(())
    }

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

/// A value that is a path.
fn path(key: &'static str, value: &str) -> Result<PathBuf, DiskSpecError> {
    if value.is_empty() {
        Err(wrong(key, value, "a path"))
    } else {
        Ok(PathBuf::from(value))
    }
}

/// A name in configfs, which is also a part of a UIO device's name.
fn backstore(value: &str) -> Result<String, DiskSpecError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let dots = value.bytes().all(|byte| byte == b'.');
    if value.len() > MAX_BACKSTORE_BYTES || dots || !value.bytes().all(allowed) {
        let expected =
            format!("1 to {MAX_BACKSTORE_BYTES} of the characters A-Z, a-z, 0-9, '.', '_' and '-'");
        return Err(wrong("name", value, expected));
    }
    Ok(value.to_owned())
}

/// A list of processors: numbers and ranges joined by `+`, for a comma ends the value.
fn cpus(value: &str) -> Option<Vec<u16>> {
    let mut list = Vec::new();
    for part in value.split('+') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last > MAX_CPU {
            return None;
        }
        list.extend(first..=last);
    }
    Some(list)
}

/// A value that is on or off.
fn switch(key: &'static str, value: &str) -> Result<bool, DiskSpecError> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(wrong(key, value, "on or off")),
    }
}

/// A value that is a number in a range.
fn number<T: FromStr + PartialOrd + fmt::Display>(
    key: &'static str,
    value: &str,
    range: RangeInclusive<T>,
) -> Result<T, DiskSpecError> {
    let number = value.parse().ok().filter(|number| range.contains(number));
    let expected = || format!("a number from {} to {}", range.start(), range.end());
    number.ok_or_else(|| wrong(key, value, expected()))
}

/// A value that `key` does not take.
fn wrong(key: &'static str, value: &str, expected: impl Into<String>) -> DiskSpecError {
    DiskSpecError::Value {
        key,
        value: value.to_owned(),
        expected: expected.into(),
    }
}

/// Bytes, at least one.
fn rate(key: &'static str, value: &str) -> Result<u64, DiskSpecError> {
    let bytes = parse_size(value).ok().filter(|bytes| *bytes > 0);
    bytes.ok_or_else(|| wrong(key, value, "a number of bytes, or one with K, M or G"))
}
