//! A dm-log-writes device: what is written to it is also written, in the order in which it became durable, to a log, and
//! whoever wants to may put marks between.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// Bytes of `struct dm_ioctl`, and where its fields are.
const HEADER: usize = 312;
const NAME_AT: usize = 48;
/// The name of the only device.
const NAME: &[u8] = b"writes";

/// Numbers of the requests, in `linux/dm-ioctl.h`.
const CREATE: u8 = 3;
const REMOVE: u8 = 4;
/// "Suspend", which without a flag resumes.
const RESUME: u8 = 6;
const LOAD: u8 = 9;
const MESSAGE: u8 = 14;

/// The device. It stays when this is dropped.
pub struct LogWrites {
    control: File,
}

impl LogWrites {
    /// Makes it of the block device `data`, of so many sectors of 512 bytes, and of the block device `log`.
    pub fn create(data: &Path, sectors: u64, log: &Path) -> io::Result<Self> {
        let mut control = File::options();
        control.read(true).write(true);
        let device = Self {
            control: control.open("/dev/mapper/control")?,
        };
        device.request(CREATE, 0, &[])?;
        // A target: first sector, sectors, status, next, type; then its parameters.
        let mut table = Vec::new();
        table.extend(0u64.to_ne_bytes());
        table.extend(sectors.to_ne_bytes());
        table.extend([0; 8]);
        table.extend(b"log-writes\0\0\0\0\0\0");
        table.extend(format!("{} {}\0", data.display(), log.display()).bytes());
        table.resize(table.len().next_multiple_of(8), 0);
        device.request(LOAD, 1, &table)?;
        device.request(RESUME, 0, &[])?;
        Ok(device)
    }

    /// The device's file.
    pub fn path(&self) -> PathBuf {
        PathBuf::from("/dev/dm-0")
    }

    /// Puts a mark into the log, behind all that is durable now. `text` has no spaces.
    pub fn mark(&self, text: &str) -> io::Result<()> {
        // The sector that tells which target is meant, then the message.
        let mut message = vec![0; 8];
        message.extend(format!("mark {text}\0").bytes());
        self.request(MESSAGE, 0, &message)
    }

    /// Ends the device; its log is complete then.
    pub fn remove(self) -> io::Result<()> {
        self.request(REMOVE, 0, &[])
    }

    fn request(&self, number: u8, targets: u32, data: &[u8]) -> io::Result<()> {
        let mut request = vec![0; HEADER];
        request[..4].copy_from_slice(&4u32.to_ne_bytes());
        // What the kernel answers takes room too.
        let size = (HEADER + data.len()).max(4096);
        request[12..16].copy_from_slice(&(size as u32).to_ne_bytes());
        request[16..20].copy_from_slice(&(HEADER as u32).to_ne_bytes());
        request[20..24].copy_from_slice(&targets.to_ne_bytes());
        request[NAME_AT..NAME_AT + NAME.len()].copy_from_slice(NAME);
        request.extend(data);
        request.resize(size, 0);
        let code = nix::request_code_readwrite!(0xfd, number, HEADER);
        // SAFETY: the kernel reads and writes at most as many bytes as the request says that it has.
        let done = unsafe { libc::ioctl(self.control.as_raw_fd(), code, request.as_mut_ptr()) };
        match done {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}
