//! All keys of `--disk`. The parser, its errors, `--disk help` and the manual's page read this
//! table.

use std::path::PathBuf;
use std::time::Duration;

use walvisor_devices::backend::{Answer, SECTOR_SIZE};
use walvisor_devices::block::{MAX_POLL, MAX_QUEUE_SIZE, MIN_QUEUE_SIZE};
use walvisor_devices::throttle::MAX_WEIGHT;
use walvisor_storage::{FullLogPolicy, ImageFormat, Point, Retention};
use walvisor_vmm::disk::{DeviceKind, Notifications, TransportKind};

use super::key::{Key, Value};
use super::spec::{BackendKind, DiskCache, DiskCommand, Fabric};

/// Longest serial in bytes: the size of a GET_ID answer (virtio 1.2, 5.2.6).
pub const MAX_SERIAL_BYTES: usize = 20;
/// Most queues of one disk.
pub const MAX_QUEUES: u16 = 64;
/// Longest wait for more FLUSHes to join a commit group, in microseconds.
const MAX_COMMIT_WAIT_US: u64 = 1_000_000;
/// Largest number of FLUSHes that a commit group can be configured to wait for.
const MAX_COMMIT_WAIT_COUNT: u64 = 65_536;
/// Longest time that closing can be given to copy the log to the images, in seconds: a day.
const MAX_CLOSE_SECONDS: u64 = 86_400;
/// Largest number of a processor. Kernels support fewer.
const MAX_CPU: u16 = 1023;
/// Longest name of a disk in the kernel's SCSI target, in bytes.
const MAX_BACKSTORE_BYTES: usize = 32;
/// Longest command timeout that the kernel can be given, in seconds.
const MAX_COMMAND_TIMEOUT: u64 = 86_400;

const EVERYWHERE: &[DiskCommand] = &DiskCommand::ALL;
const GUEST: &[DiskCommand] = &[DiskCommand::Run];
const VIRTIO: &[DiskCommand] = &[DiskCommand::Run, DiskCommand::VhostUser];
const QUEUES: &[DiskCommand] = &[DiskCommand::Run, DiskCommand::VhostUser, DiskCommand::Ublk];
const SOCKETS: &[DiskCommand] = &[DiskCommand::VhostUser, DiskCommand::Nbd];
/// Doors whose clients may outlive the process.
const SURVIVORS: &[DiskCommand] = &[DiskCommand::VhostUser, DiskCommand::Nbd, DiskCommand::Ublk];
const NBD: &[DiskCommand] = &[DiskCommand::Nbd];
const TCMU: &[DiskCommand] = &[DiskCommand::Tcmu];
const DOORS: &[DiskCommand] = &DiskCommand::DOORS;

const ANY: &[BackendKind] = &BackendKind::ALL;
const LOGGED: &[BackendKind] = &[BackendKind::Wal];
const IMAGE: &[BackendKind] = &[BackendKind::Wal, BackendKind::Raw];
const MEMORY: &[BackendKind] = &[BackendKind::Ram];

/// All keys, in the order of the manual. A default of one word is a value that the key accepts.
pub fn keys() -> impl Iterator<Item = &'static Key> {
    DISK_KEYS.iter().chain(LOG_KEYS).chain(DOOR_KEYS)
}

/// The key of this name.
pub fn key(name: &str) -> Option<&'static Key> {
    keys().find(|key| key.name == name)
}

/// Whether a key sets an option of the disk's log.
pub fn is_log_key(name: &str) -> bool {
    LOG_KEYS.iter().any(|key| key.name == name)
}

const DISK_KEYS: &[Key] = &[
    Key {
        name: "path",
        value: Value::Text {
            expected: "a path",
            set: |spec, text| path(text).map(|path| spec.path = Some(path)),
        },
        default: "none, it is required",
        commands: EVERYWHERE,
        backends: IMAGE,
        help: "The base image, a raw file or a block device",
    },
    Key {
        name: "log",
        value: Value::Text {
            expected: "a path",
            set: |spec, text| path(text).map(|path| spec.log = Some(path)),
        },
        default: "the image's path with .wal appended",
        commands: EVERYWHERE,
        backends: LOGGED,
        help: "The log's directory; disks that name the same one share the log and its syncs",
    },
    Key {
        name: "backend",
        value: Value::Choice(&[
            ("wal", |spec| spec.backend = BackendKind::Wal),
            ("raw", |spec| spec.backend = BackendKind::Raw),
            ("ram", |spec| spec.backend = BackendKind::Ram),
        ]),
        default: "wal",
        commands: EVERYWHERE,
        backends: ANY,
        help: "Where data is stored: in an image with a log, in an image alone, or in memory, \
            which is lost at the end",
    },
    Key {
        name: "format",
        value: Value::Choice(&[("raw", |spec| spec.format = ImageFormat::Raw)]),
        default: "raw, but a new image that begins as another format does is refused",
        commands: EVERYWHERE,
        backends: IMAGE,
        help: "The image is raw, whatever its first bytes are",
    },
    Key {
        name: "size",
        value: Value::Size {
            multiple: SECTOR_SIZE,
            set: |spec, bytes| spec.size = Some(bytes),
        },
        default: "none, it is required",
        commands: EVERYWHERE,
        backends: MEMORY,
        help: "The size of a disk in memory; with 'walvisor ctl SOCKET add-disk' also of an image, \
            which is then made",
    },
    Key {
        name: "cache",
        value: Value::Choice(&[
            ("writeback", |spec| spec.cache = DiskCache::Writeback),
            ("writethrough", |spec| spec.cache = DiskCache::Writethrough),
            ("unsafe", |spec| spec.cache = DiskCache::Unsafe),
        ]),
        default: "writeback",
        commands: EVERYWHERE,
        backends: ANY,
        help: "writeback: FLUSH makes writes durable; writethrough: a write is durable before it \
            completes; unsafe: FLUSH does nothing, for throw-away guests",
    },
    Key {
        name: "readonly",
        value: Value::Switch(|spec, on| spec.read_only = on),
        default: "off",
        commands: EVERYWHERE,
        backends: ANY,
        help: "The disk can only be read",
    },
    Key {
        name: "serial",
        value: Value::Text {
            expected: "1 to 20 printable ASCII characters",
            set: |spec, text| {
                let printable = text.bytes().all(|byte| byte.is_ascii_graphic());
                let fits = (1..=MAX_SERIAL_BYTES).contains(&text.len()) && printable;
                fits.then(|| spec.serial = Some(text.to_owned()))
            },
        },
        default: "the image's file name (serve tcmu, device=scsi: made from name and path)",
        commands: EVERYWHERE,
        backends: ANY,
        help: "The serial number that a guest reads; with NBD, the name of the export",
    },
    Key {
        name: "at",
        value: Value::Text {
            expected: Point::FORMS,
            set: |spec, text| text.parse().ok().map(|point| spec.at = Some(point)),
        },
        default: "the disk as it is now",
        commands: EVERYWHERE,
        backends: LOGGED,
        help: "Serve the disk as of this point of its history, read-only unless scratch=on; nobody \
            else may write to it meanwhile",
    },
    Key {
        name: "scratch",
        value: Value::Switch(|spec, on| spec.scratch = on),
        default: "off",
        commands: EVERYWHERE,
        backends: LOGGED,
        help: "With at=: allow writes, which go to a file in TMPDIR (/var/tmp) that is gone when \
            the disk is closed",
    },
    Key {
        name: "device",
        value: Value::Choice(&[
            ("blk", |spec| spec.device = DeviceKind::Blk),
            ("scsi", |spec| spec.device = DeviceKind::Scsi),
        ]),
        default: "blk",
        commands: VIRTIO,
        backends: ANY,
        help: "The virtio device: virtio-blk, or virtio-scsi, which tells the guest that writes \
            are atomic; disks with the same socket are one SCSI target's LUNs, in order",
    },
    Key {
        name: "transport",
        value: Value::Choice(&[
            ("mmio", |spec| spec.transport = TransportKind::Mmio),
            ("pci", |spec| spec.transport = TransportKind::Pci),
        ]),
        default: "mmio",
        commands: GUEST,
        backends: ANY,
        help: "How the guest reaches the disk: virtio-mmio or virtio-pci",
    },
    Key {
        name: "ioeventfd",
        value: Value::Switch(|spec, on| {
            spec.notifications = if on {
                Notifications::Eventfds
            } else {
                Notifications::Exits
            };
        }),
        default: "on",
        commands: GUEST,
        backends: ANY,
        help: "KVM passes doorbells and interrupts through eventfds; off: a doorbell is an exit to \
            user space, an interrupt an ioctl",
    },
    Key {
        name: "queues",
        value: Value::Number {
            least: 1,
            most: MAX_QUEUES as u64,
            set: |spec, number| spec.queues = Some(number as u16),
        },
        default: "one for each vCPU (serve vhost-user: one for each CPU of the host; serve ublk: \
            one for every two)",
        commands: QUEUES,
        backends: ANY,
        help: "Request queues",
    },
    Key {
        name: "queue-size",
        value: Value::PowerOfTwo {
            least: MIN_QUEUE_SIZE as u64,
            most: MAX_QUEUE_SIZE as u64,
            set: |spec, number| spec.queue_size = number as u16,
        },
        default: "256",
        commands: QUEUES,
        backends: ANY,
        help: "Descriptors in each queue (serve ublk: requests)",
    },
    Key {
        name: "in-order",
        value: Value::Switch(|spec, on| spec.in_order = on),
        default: "off",
        commands: VIRTIO,
        backends: ANY,
        help: "Offer IN_ORDER; a READ then waits for the FLUSH before it",
    },
    Key {
        name: "worker-cpus",
        value: Value::Text {
            expected: "CPU numbers and ranges joined by '+', such as 0-3+8",
            set: |spec, text| cpus(text).map(|cpus| spec.worker_cpus = cpus),
        },
        default: "any CPU",
        commands: VIRTIO,
        backends: ANY,
        help: "Pin the queues' workers to these CPUs, in turn",
    },
    Key {
        name: "poll-usec",
        value: Value::Number {
            least: 0,
            most: MAX_POLL.as_micros() as u64,
            set: |spec, number| spec.poll = Duration::from_micros(number),
        },
        default: "0",
        commands: VIRTIO,
        backends: ANY,
        help: "How many microseconds an idle worker polls its ring before it sleeps",
    },
    Key {
        name: "block-size",
        value: Value::Choice(&[
            ("512", |spec| spec.block_size = 512),
            ("4096", |spec| spec.block_size = 4096),
        ]),
        default: "512",
        commands: &[
            DiskCommand::Run,
            DiskCommand::VhostUser,
            DiskCommand::Tcmu,
            DiskCommand::Ublk,
        ],
        backends: ANY,
        help: "The logical block size that the guest sees, in bytes",
    },
    Key {
        name: "answer",
        value: Value::Choice(&[
            ("written", |spec| spec.answer = Answer::Written),
            ("memory", |spec| spec.answer = Answer::Memory),
        ]),
        default: "written",
        commands: SURVIVORS,
        backends: LOGGED,
        help: "written: answer a write once it survives a kill of the server; memory: answer it at \
            once, and a kill may lose it; with serve ublk the device then ends with the server",
    },
    Key {
        name: "ops-per-second",
        value: Value::Number {
            least: 1,
            most: u64::MAX,
            set: |spec, number| spec.limits.ops_per_second = number,
        },
        default: "no limit",
        commands: EVERYWHERE,
        backends: ANY,
        help: "Requests per second",
    },
    Key {
        name: "ops-burst",
        value: Value::Number {
            least: 1,
            most: u64::MAX,
            set: |spec, number| spec.limits.ops_burst = number,
        },
        default: "the limit of one second",
        commands: EVERYWHERE,
        backends: ANY,
        help: "Requests that may pass at once after an idle time",
    },
    Key {
        name: "bytes-per-second",
        value: Value::Size {
            multiple: 1,
            set: |spec, bytes| spec.limits.bytes_per_second = bytes,
        },
        default: "no limit",
        commands: EVERYWHERE,
        backends: ANY,
        help: "Bytes read and written per second",
    },
    Key {
        name: "bytes-burst",
        value: Value::Size {
            multiple: 1,
            set: |spec, bytes| spec.limits.bytes_burst = bytes,
        },
        default: "the limit of one second",
        commands: EVERYWHERE,
        backends: ANY,
        help: "Bytes that may pass at once after an idle time",
    },
    Key {
        name: "weight",
        value: Value::Number {
            least: 1,
            most: MAX_WEIGHT as u64,
            set: |spec, number| spec.limits.weight = number as u16,
        },
        default: "100",
        commands: EVERYWHERE,
        backends: ANY,
        help: "The disk's part of a thread, and of its log's room, beside other disks that have \
               work: one with 200 moves twice as many bytes as one with 100",
    },
];

/// The keys of [`LogOptions`](super::LogOptions).
pub const LOG_KEYS: &[Key] = &[
    Key {
        name: "commit-wait-usec",
        value: Value::Number {
            least: 0,
            most: MAX_COMMIT_WAIT_US,
            set: |spec, number| spec.log_options.commit_wait = Some(Duration::from_micros(number)),
        },
        default: "adaptive, from the size of recent groups",
        commands: EVERYWHERE,
        backends: LOGGED,
        help: "Longest time that a commit group waits for more FLUSHes, in microseconds; 0: it \
            never waits",
    },
    Key {
        name: "commit-wait-count",
        value: Value::Number {
            least: 1,
            most: MAX_COMMIT_WAIT_COUNT,
            set: |spec, number| spec.log_options.commit_count = Some(number as u32),
        },
        default: "adaptive, from the size of recent groups",
        commands: EVERYWHERE,
        backends: LOGGED,
        help: "Number of FLUSHes at which a commit group stops waiting",
    },
    Key {
        name: "close-seconds",
        value: Value::Number {
            least: 0,
            most: MAX_CLOSE_SECONDS,
            set: |spec, number| spec.log_options.close_time = Some(Duration::from_secs(number)),
        },
        default: "10 seconds",
        commands: EVERYWHERE,
        backends: LOGGED,
        help: "Longest time that closing copies the log to the images, in seconds; the rest stays \
            in the log until the next open; 0: all of it stays",
    },
    Key {
        name: "retain",
        value: Value::Text {
            expected: Retention::FORMS,
            set: |spec, text| {
                text.parse()
                    .ok()
                    .map(|retain| spec.log_options.retain = Some(retain))
            },
        },
        default: "as the log was last set; off for a new log",
        commands: EVERYWHERE,
        backends: LOGGED,
        help: "How much history the log keeps: any state in it can be looked at or restored; the \
            image lags behind by as much",
    },
    Key {
        name: "index-memory",
        value: Value::Size {
            multiple: 1 << 20,
            set: |spec, bytes| spec.log_options.index_memory = Some(bytes),
        },
        default: "64 MiB",
        commands: EVERYWHERE,
        backends: LOGGED,
        help: "Memory limit of the log's index; at half of it the log is copied to the images, and \
            at all of it writes wait for the copy; looks and snapshots may take as much again",
    },
    Key {
        name: "spill-limit",
        value: Value::Size {
            multiple: 1,
            set: |spec, bytes| spec.log_options.spill_limit = Some(bytes),
        },
        default: "the disk's size",
        commands: EVERYWHERE,
        backends: LOGGED,
        help: "Most bytes of a disk that its spill file takes while its image can't be written; \
            beyond that, or with less space beside the log than the log's size, only this disk's \
            writes do as on-full= says",
    },
    Key {
        name: "on-full",
        value: Value::Choice(&[
            ("fail", |spec| {
                spec.log_options.on_full = Some(FullLogPolicy::Fail)
            }),
            ("pause", |spec| {
                spec.log_options.on_full = Some(FullLogPolicy::Pause)
            }),
        ]),
        default: "fail, unless another disk of the log says pause",
        commands: EVERYWHERE,
        backends: LOGGED,
        help: "What writes and FLUSHes do while the log is full and there is no space to empty it: \
            fail, or wait until there is space",
    },
    Key {
        name: "archive",
        value: Value::Text {
            expected: "s3://BUCKET/PREFIX or file:///DIRECTORY",
            set: |spec, text| {
                let url = (!text.is_empty()).then(|| text.to_owned());
                url.map(|url| spec.log_options.archive = Some(url))
            },
        },
        default: "no archive, unless another disk of the log has one",
        commands: EVERYWHERE,
        backends: LOGGED,
        help: "A second place for the log and its images, to which a process of its own sends what \
            is new; keys for the store come from the environment",
    },
    Key {
        name: "archive-interval",
        value: Value::Text {
            expected: "a time such as 500ms, 1s or 1h",
            set: |spec, text| time(text).map(|time| spec.log_options.archive_interval = Some(time)),
        },
        default: "1 second",
        commands: EVERYWHERE,
        backends: LOGGED,
        help: "How often what is new in the log goes to its archive",
    },
    Key {
        name: "archive-sync",
        value: Value::Switch(|spec, on| spec.log_options.archive_sync = Some(on)),
        default: "off, unless another disk of the log has it on",
        commands: EVERYWHERE,
        backends: LOGGED,
        help: "A FLUSH completes only once the log's archive has its writes too",
    },
    Key {
        name: "archive-limit",
        value: Value::Size {
            multiple: 1 << 20,
            set: |spec, bytes| spec.log_options.archive_limit = Some(bytes),
        },
        default: "none: the archive gets a hole where the log keeps less than it lacks",
        commands: EVERYWHERE,
        backends: LOGGED,
        help: "The log keeps what its archive lacks, and writes wait while that is so many bytes of \
            log; the log must keep history (retain=)",
    },
];

const DOOR_KEYS: &[Key] = &[
    Key {
        name: "detached",
        value: Value::Text {
            expected: "paths separated by ':'",
            set: |spec, text| {
                let paths: Option<Vec<_>> = text.split(':').map(path).collect();
                paths.map(|paths| spec.detached = paths)
            },
        },
        default: "no other image",
        commands: EVERYWHERE,
        backends: LOGGED,
        help: "Images of disks on the log that are not used here, separated by ':'; the log may \
               copy its records of them there",
    },
    Key {
        name: "door",
        value: Value::Choice(&[
            ("vhost-user", |spec| spec.door = DiskCommand::VhostUser),
            ("nbd", |spec| spec.door = DiskCommand::Nbd),
            ("tcmu", |spec| spec.door = DiskCommand::Tcmu),
            ("ublk", |spec| spec.door = DiskCommand::Ublk),
        ]),
        default: "the command's, such as nbd for serve nbd; required for serve",
        commands: DOORS,
        backends: ANY,
        help: "How clients reach the disk; disks with different doors can be in one daemon and \
            share a log",
    },
    Key {
        name: "socket",
        value: Value::Text {
            expected: "a path",
            set: |spec, text| path(text).map(|path| spec.socket = Some(path)),
        },
        default: "none, it is required (serve nbd: or port)",
        commands: SOCKETS,
        backends: ANY,
        help: "The Unix socket where the disk is served",
    },
    Key {
        name: "port",
        value: Value::Number {
            least: 0,
            most: u16::MAX as u64,
            set: |spec, number| spec.port = Some(number as u16),
        },
        default: "none, it is required (or socket)",
        commands: NBD,
        backends: ANY,
        help: "The TCP port where the disk is served, usually 10809; 0: any free port",
    },
    Key {
        name: "address",
        value: Value::Text {
            expected: "an IP address, such as 127.0.0.1 or ::",
            set: |spec, text| text.parse().ok().map(|address| spec.address = address),
        },
        default: "127.0.0.1",
        commands: NBD,
        backends: ANY,
        help: "The address of that port",
    },
    Key {
        name: "name",
        value: Value::Text {
            expected: "1 to 32 of the characters A-Z, a-z, 0-9, '.', '_' and '-'",
            set: |spec, text| {
                is_backstore_name(text).then(|| spec.backstore = Some(text.to_owned()))
            },
        },
        default: "the image's file name without .img",
        commands: TCMU,
        backends: ANY,
        help: "The disk's name in the kernel's SCSI target",
    },
    Key {
        name: "fabric",
        value: Value::Choice(&[
            ("loop", |spec| spec.fabric = Fabric::Loop),
            ("vhost", |spec| spec.fabric = Fabric::Vhost),
            ("none", |spec| spec.fabric = Fabric::None),
        ]),
        default: "loop",
        commands: TCMU,
        backends: ANY,
        help: "loop: this host gets /dev/sdX; vhost: a guest of QEMU uses vhost-scsi; none: \
            nothing is exported",
    },
    Key {
        name: "wwn",
        value: Value::Text {
            expected: "naa. and 16 hexadecimal digits in lower case",
            set: |spec, text| is_wwn(text).then(|| spec.wwn = Some(text.to_owned())),
        },
        default: "made from name and path",
        commands: TCMU,
        backends: ANY,
        help: "The target's name in its fabric",
    },
    Key {
        name: "command-timeout",
        value: Value::Number {
            least: 0,
            most: MAX_COMMAND_TIMEOUT,
            set: |spec, number| spec.command_timeout = Some(number as u32),
        },
        default: "the kernel's",
        commands: TCMU,
        backends: ANY,
        help: "Seconds after which the kernel fails a command; 0: never",
    },
];

/// Whether `name` is allowed in configfs and in the name of a UIO device.
pub fn is_backstore_name(name: &str) -> bool {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    let dots = name.bytes().all(|byte| byte == b'.');
    name.len() <= MAX_BACKSTORE_BYTES && !dots && name.bytes().all(allowed)
}

fn is_wwn(text: &str) -> bool {
    let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.strip_prefix("naa.")
        .is_some_and(|digits| digits.len() == 16 && digits.bytes().all(digit))
}

/// A time that is not zero.
pub fn time(text: &str) -> Option<Duration> {
    match text.parse() {
        Ok(Retention::Time(time)) if !time.is_zero() => Some(time),
        _ => None,
    }
}

fn path(text: &str) -> Option<PathBuf> {
    (!text.is_empty()).then(|| PathBuf::from(text))
}

/// A list of processors: numbers and ranges joined by `+`, because a comma ends the value.
fn cpus(text: &str) -> Option<Vec<u16>> {
    let mut list = Vec::new();
    for part in text.split('+') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (u16, u16) = (first.parse().ok()?, last.parse().ok()?);
        if first > last || last > MAX_CPU {
            return None;
        }
        list.extend(first..=last);
    }
    Some(list)
}
