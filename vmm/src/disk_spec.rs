//! SPEC: a disk as the command line describes it, `path=disk.img,transport=pci,queues=4`.

use std::collections::HashSet;
use std::fmt;
use std::net::IpAddr;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use walvisor_devices::backend::SECTOR_SIZE;
use walvisor_devices::block::MAX_POLL;
use walvisor_devices::throttle::Limits;
use walvisor_storage::CommitWait;

use crate::size::parse_size;

/// Every key that this version carries out, in the order of the manual.
const KEYS: &str = "path, log, backend, transport, queues, queue-size, block-size, in-order, worker-cpus, poll-usec, \
     cache, readonly, serial, size, ops-per-second, ops-burst, bytes-per-second, bytes-burst, commit-wait-usec, \
     commit-wait-count, socket, port, address";

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

/// How the guest reaches the disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportKind {
    /// virtio-mmio, version 2.
    #[default]
    Mmio,
    /// virtio-pci, modern, with MSI-X.
    Pci,
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
    /// When a write completes.
    pub cache: CacheMode,
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
            cache: CacheMode::default(),
            read_only: false,
            serial: None,
            size: None,
            limits: Limits::default(),
            commit_wait: CommitWait::default(),
            socket: None,
            port: None,
            address: None,
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
            "cache" => {
                self.cache = match value {
                    "writeback" => CacheMode::Writeback,
                    "writethrough" => CacheMode::Writethrough,
                    "unsafe" => CacheMode::Unsafe,
                    _ => return Err(wrong("cache", value, "writeback, writethrough or unsafe")),
                }
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
        ];
        match served.into_iter().find(|(given, _)| *given) {
            Some((_, key)) => Err(DiskSpecError::Serve(key)),
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

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<DiskSpec, String> {
        text.parse()
            .map_err(|error: DiskSpecError| error.to_string())
    }

    #[test]
    fn a_path_alone_has_the_defaults() {
        let spec = parse("path=disk.img").unwrap();
        assert_eq!(spec.path, Some(PathBuf::from("disk.img")));
        assert_eq!(spec.log_directory(), Some(PathBuf::from("disk.img.wal")));
        assert_eq!(spec.backend, BackendKind::Wal);
        assert_eq!(spec.transport, TransportKind::Mmio);
        assert_eq!(spec.cache, CacheMode::Writeback);
        assert!(!spec.read_only);
        assert_eq!((spec.queues, spec.queue_size), (None, 256));
    }

    #[test]
    fn every_key_is_carried_out() {
        let spec = parse(
            "path=a.img,log=l,backend=wal,transport=pci,queues=4,queue-size=128,cache=writethrough,readonly=on,serial=S1",
        )
        .unwrap();
        assert_eq!(spec.log_directory(), Some(PathBuf::from("l")));
        assert_eq!(spec.transport, TransportKind::Pci);
        assert_eq!((spec.queues, spec.queue_size), (Some(4), 128));
        assert_eq!(spec.cache, CacheMode::Writethrough);
        assert!(spec.read_only);
        assert_eq!(spec.serial.as_deref(), Some("S1"));
        assert_eq!(spec.commit_wait, CommitWait::default());
        assert_eq!((spec.block_size, spec.in_order), (512, false));
        let blocks = parse("path=a,block-size=4096,in-order=on").unwrap();
        assert_eq!((blocks.block_size, blocks.in_order), (4096, true));
        let pinned = parse("path=a,worker-cpus=2-4+0,poll-usec=50").unwrap();
        assert_eq!(pinned.worker_cpus, [2, 3, 4, 0]);
        assert_eq!(pinned.poll, Duration::from_micros(50));
        let waiting = parse("path=a,commit-wait-usec=500,commit-wait-count=8").unwrap();
        let wait = CommitWait {
            longest: Some(Duration::from_micros(500)),
            count: Some(8),
        };
        assert_eq!(waiting.commit_wait, wait);
        let ram = parse("backend=ram,size=64M,cache=unsafe").unwrap();
        assert_eq!(
            (ram.backend, ram.size, ram.cache),
            (BackendKind::Ram, Some(64 << 20), CacheMode::Unsafe)
        );
        assert_eq!(ram.log_directory(), None);
    }

    #[test]
    fn a_wrong_key_is_named_with_the_valid_ones() {
        let error = parse("path=a,cashe=unsafe").unwrap_err();
        assert!(
            error.contains("'cashe'") && error.contains("cache, readonly"),
            "{error}"
        );
        assert!(!error.contains('\n'));
    }

    #[test]
    fn a_raw_disk_has_an_image_and_no_log() {
        let raw = parse("path=a.img,backend=raw,cache=writethrough,readonly=on").unwrap();
        assert_eq!(raw.backend, BackendKind::Raw);
        assert_eq!(raw.log_directory(), None);
        for (wrong, part) in [
            ("backend=raw", "path=FILE"),
            ("backend=raw,path=a,log=l", "leave log= out"),
            ("backend=raw,path=a,size=1M", "size="),
            ("backend=raw,path=a,commit-wait-usec=0", "commit-wait-usec="),
            ("path=a,backend=qcow2", "wal, raw or ram"),
        ] {
            let error = parse(wrong).unwrap_err();
            assert!(error.contains(part), "{wrong}: {error}");
        }
    }

    #[test]
    fn what_is_for_servers_is_refused_elsewhere() {
        for (text, key) in [
            ("path=a,socket=s", "socket="),
            ("path=a,port=10809", "port="),
            ("path=a,port=0,address=::1", "port="),
        ] {
            let spec: DiskSpec = text.parse().unwrap();
            let error = spec.check_not_served().unwrap_err().to_string();
            assert!(
                error.contains(key) && error.contains("walvisor serve"),
                "{error}"
            );
        }
        assert_eq!(
            "path=a".parse::<DiskSpec>().unwrap().check_not_served(),
            Ok(())
        );
    }

    #[test]
    fn wrong_values_are_refused() {
        for text in [
            "",
            "path",
            "path=",
            "path=a,path=b",
            "path=a,queues=0",
            "path=a,queues=65",
            "path=a,queue-size=100",
            "path=a,queue-size=65536",
            "path=a,block-size=1024",
            "path=a,block-size=0x200",
            "path=a,in-order=yes",
            "path=a,worker-cpus=",
            "path=a,worker-cpus=1-",
            "path=a,worker-cpus=3-1",
            "path=a,worker-cpus=0+",
            "path=a,worker-cpus=70000",
            "path=a,worker-cpus=0-1024",
            "path=a,poll-usec=1001",
            "path=a,readonly=yes",
            "path=a,serial=",
            "path=a,serial=123456789012345678901",
            "path=a,cache=none",
            "path=a,transport=ccw",
            "log=l",
            "backend=ram",
            "backend=ram,size=513",
            "backend=ram,size=0",
            "backend=ram,size=1M,log=l",
            "backend=ram,path=x,size=1M",
            "path=a,size=1M",
            "path=a,commit-wait-usec=1000001",
            "path=a,commit-wait-usec=1.5",
            "path=a,commit-wait-count=0",
            "path=a,socket=",
            "path=a,socket=s,port=1",
            "path=a,port=65536",
            "path=a,port=1,address=localhost",
            "path=a,address=::1",
            "backend=ram,size=1M,commit-wait-usec=0",
            "path=a,",
        ] {
            assert!(parse(text).is_err(), "{text:?} was taken");
        }
    }
}
