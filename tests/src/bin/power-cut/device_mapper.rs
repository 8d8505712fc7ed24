//! A dm-log-writes device. It also copies each write to a log, in the order in which the writes
//! became durable. A program can put marks between them.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

/// Bytes of `struct dm_ioctl`, and the offset of the device's name in it.
const HEADER: usize = 312;
const NAME_AT: usize = 48;
/// The name of the only device.
const NAME: &[u8] = b"writes";

/// Numbers of the requests in `linux/dm-ioctl.h`.
const CREATE: u8 = 3;
const REMOVE: u8 = 4;
/// The "suspend" request, which resumes the device if the suspend flag is not set.
const RESUME: u8 = 6;
const LOAD: u8 = 9;
const MESSAGE: u8 = 14;

/// The device. Dropping this value does not remove it.
pub struct LogWrites {
    control: File,
}

impl LogWrites {
    /// Creates the device over the block device `data` of `sectors` sectors of 512 bytes, with its
    /// log on the block device `log`.
    pub fn create(data: &Path, sectors: u64, log: &Path) -> io::Result<Self> {
        let mut control = File::options();
        control.read(true).write(true);
        let device = Self {
            control: control.open("/dev/mapper/control")?,
        };
        device.request(CREATE, 0, &[])?;
        // A target: first sector, number of sectors, status, next, type; then its parameters.
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

    /// Puts a mark into the log, after everything that is durable now. `text` must not contain
    /// spaces.
    pub fn mark(&self, text: &str) -> io::Result<()> {
        // The message begins with a sector, which selects the target.
        let mut message = vec![0; 8];
        message.extend(format!("mark {text}\0").bytes());
        self.request(MESSAGE, 0, &message)
    }

    /// Removes the device, which completes its log.
    pub fn remove(self) -> io::Result<()> {
        self.request(REMOVE, 0, &[])
    }

    fn request(&self, number: u8, targets: u32, data: &[u8]) -> io::Result<()> {
        let mut request = vec![0; HEADER];
        request[..4].copy_from_slice(&4u32.to_ne_bytes());
        // The kernel's answer needs room in the same buffer.
        let size = (HEADER + data.len()).max(4096);
        request[12..16].copy_from_slice(&(size as u32).to_ne_bytes());
        request[16..20].copy_from_slice(&(HEADER as u32).to_ne_bytes());
        request[20..24].copy_from_slice(&targets.to_ne_bytes());
        request[NAME_AT..NAME_AT + NAME.len()].copy_from_slice(NAME);
        request.extend(data);
        request.resize(size, 0);
        let code = nix::request_code_readwrite!(0xfd, number, HEADER);
        // SAFETY: the kernel reads and writes at most as many bytes as the request's size field
        // states.
        let done = unsafe { libc::ioctl(self.control.as_raw_fd(), code, request.as_mut_ptr()) };
        match done {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}
