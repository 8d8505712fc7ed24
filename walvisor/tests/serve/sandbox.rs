//! A thread of a daemon that a stranger has taken over: what it could do through the rings of the
//! process.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;

use rustix::process::{Pid, PidfdFlags, pidfd_open};
use walvisor_testkit::nbd::RawClient;

use super::{Daemon, create};

/// struct io_uring_params (linux/io_uring.h): ten numbers, then the offsets of the parts of both
/// queues.
#[repr(C)]
#[derive(Default)]
struct RingParams {
    head: [u32; 10],
    submission: [u32; 10],
    completion: [u32; 10],
}

const ENTRIES: u32 = 256;

/// Where the parts of a ring with [`ENTRIES`] entries are.
fn layout() -> Option<RingParams> {
    let mut params = RingParams::default();
    // SAFETY: the kernel fills the parameters, which have the size that it expects.
    let fd = unsafe { libc::syscall(libc::SYS_io_uring_setup, ENTRIES, &raw mut params) };
    if fd < 0 {
        return None;
    }
    // SAFETY: nobody else has the new descriptor.
    drop(unsafe { OwnedFd::from_raw_fd(fd as i32) });
    Some(params)
}

/// A ring of another process, of which this one has a descriptor.
struct StolenRing {
    fd: OwnedFd,
    rings: *mut u8,
    entries: *mut u8,
    layout: RingParams,
}

impl StolenRing {
    fn new(fd: OwnedFd) -> Self {
        let map = |offset: i64| {
            let prot = libc::PROT_READ | libc::PROT_WRITE;
            // SAFETY: a new mapping, which nothing else uses.
            let at = unsafe {
                libc::mmap(
                    ptr::null_mut(),
                    1 << 14,
                    prot,
                    libc::MAP_SHARED,
                    fd.as_raw_fd(),
                    offset,
                )
            };
            assert!(
                at != libc::MAP_FAILED,
                "{}",
                std::io::Error::last_os_error()
            );
            at.cast::<u8>()
        };
        Self {
            rings: map(0),
            entries: map(0x1000_0000),
            layout: layout().unwrap(),
            fd,
        }
    }

    fn number(&self, offset: u32) -> *mut u32 {
        // SAFETY: the kernel's offsets lie in the mapping.
        unsafe { self.rings.add(offset as usize).cast() }
    }

    /// Submits an operation of which nothing is set but its number and descriptor, and returns its
    /// result.
    fn result(&self, operation: u8, descriptor: i32) -> i32 {
        let [_, sq_tail, sq_mask, _, _, _, array, ..] = self.layout.submission;
        let [_, cq_tail, cq_mask, _, _, cqes, ..] = self.layout.completion;
        // SAFETY: the kernel's offsets lie in the mappings, and nobody else submits to an idle
        // ring.
        unsafe {
            let tail = self.number(sq_tail).read_volatile();
            let slot = tail & self.number(sq_mask).read_volatile();
            let entry = self.entries.add(slot as usize * 64);
            ptr::write_bytes(entry, 0, 64);
            entry.write(operation);
            entry.add(4).cast::<i32>().write(descriptor);
            self.number(array + slot * 4).write(slot);
            let completed = self.number(cq_tail).read_volatile();
            self.number(sq_tail).write_volatile(tail.wrapping_add(1));
            let (fd, none) = (self.fd.as_raw_fd(), ptr::null::<u8>());
            let entered = libc::syscall(libc::SYS_io_uring_enter, fd, 1, 0, 0, none, 0);
            assert_eq!(entered, 1, "{}", std::io::Error::last_os_error());
            let slot = completed & self.number(cq_mask).read_volatile();
            self.number(cqes + slot * 16 + 8)
                .read_volatile()
                .cast_signed()
        }
    }
}

#[test]
fn no_ring_of_a_daemon_opens_connects_or_splices() {
    if layout().is_none() {
        return println!("skipped: no io_uring here");
    }
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    create(dir, "disk.img", "1M");
    let daemon = Daemon::start(dir, "--disk path=disk.img,socket=s");
    let mut client = RawClient::extended(&dir.join("s"));
    client.write(1, 0, &[7; 4096]);
    client.flush(2);

    let pid = daemon.child.id();
    let process = pidfd_open(Pid::from_child(&daemon.child), PidfdFlags::empty()).unwrap();
    let mut rings = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let path = entry.unwrap().path();
        if std::fs::read_link(&path).is_ok_and(|to| to.to_str() == Some("anon_inode:[io_uring]")) {
            let number: i32 = path.file_name().unwrap().to_str().unwrap().parse().unwrap();
            // SAFETY: the call takes numbers alone.
            let fd =
                unsafe { libc::syscall(libc::SYS_pidfd_getfd, process.as_raw_fd(), number, 0) };
            if fd < 0 {
                let error = std::io::Error::last_os_error();
                return println!("skipped: the daemon's descriptors can't be had: {error}");
            }
            // SAFETY: nobody else has the new descriptor.
            rings.push(StolenRing::new(unsafe { OwnedFd::from_raw_fd(fd as i32) }));
        }
    }
    // Those that are ready for ports that will come, at least.
    assert!(rings.len() > 32, "{} rings", rings.len());
    // linux/io_uring.h.
    let operations = [
        (0, "NOP"),
        (9, "SENDMSG"),
        (16, "CONNECT"),
        (18, "OPENAT"),
        (28, "OPENAT2"),
        (30, "SPLICE"),
        (45, "SOCKET"),
        (46, "URING_CMD"),
    ];
    for ring in &rings {
        for (operation, name) in operations {
            let result = ring.result(operation, -1);
            assert_eq!(result, -libc::EACCES, "{name}");
        }
    }
    // Strange completions may have ended it.
    daemon.kill();
}
