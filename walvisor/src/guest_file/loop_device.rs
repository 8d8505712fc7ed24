//! A loop device: a file as a block device of this machine.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::PathBuf;

use libc::c_ulong;
use zerocopy::{Immutable, IntoBytes};

/// `LOOP_CTL_GET_FREE` of `linux/loop.h`: the number of a free device, which is made if there is
/// none.
const GET_FREE: c_ulong = 0x4c82;
/// `LOOP_CONFIGURE` (Linux 5.8).
const CONFIGURE: c_ulong = 0x4c0a;
/// `LO_FLAGS_AUTOCLEAR`: the device is free again once nobody has it open and nothing is mounted
/// from it.
const AUTOCLEAR: u32 = 4;
/// How often another program may take the device that was free.
const TRIES: usize = 64;

/// `struct loop_config`, with its `struct loop_info64`.
#[derive(Immutable, IntoBytes)]
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    /// Device, inode and rdevice, which only the kernel sets.
    ids: [u64; 3],
    offset: u64,
    size_limit: u64,
    /// Number, and type and key size of encryption.
    unused: [u32; 3],
    flags: u32,
    /// The file's name, and encryption.
    names: [u8; 160],
    init: [u64; 2],
    reserved: [u64; 8],
}

/// A file as a block device, while this or a mount has it open.
pub(super) struct LoopDevice {
    pub(super) path: PathBuf,
    _device: File,
}

impl LoopDevice {
    /// Makes `file` a block device, which may be written.
    pub(super) fn new(file: &File) -> io::Result<Self> {
        let config = LoopConfig {
            fd: file.as_raw_fd().cast_unsigned(),
            block_size: 512,
            ids: [0; 3],
            offset: 0,
            size_limit: 0,
            unused: [0; 3],
            flags: AUTOCLEAR,
            names: [0; 160],
            init: [0; 2],
            reserved: [0; 8],
        };
        const { assert!(size_of::<LoopConfig>() == 304) };
        let control = File::options()
            .read(true)
            .write(true)
            .open("/dev/loop-control")?;
        for _ in 0..TRIES {
            // SAFETY: the request has no argument, and changes nothing in this process.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), GET_FREE) };
            if number < 0 {
                return Err(io::Error::last_os_error());
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = File::options().read(true).write(true).open(&path)?;
            // SAFETY: the kernel reads a `struct loop_config`, which this is, during the call.
            if unsafe { libc::ioctl(device.as_raw_fd(), CONFIGURE, &raw const config) } == 0 {
                let _device = device;
                return Ok(Self { path, _device });
            }
            let error = io::Error::last_os_error();
            if error.raw_os_error() != Some(libc::EBUSY) {
                return Err(error);
            }
        }
        Err(io::Error::from_raw_os_error(libc::EBUSY))
    }
}
