//! Signals to a front-end, sent without ever waiting for it.
//!
//! A front-end shares the open file description of every descriptor that it passes. It can clear
//! O_NONBLOCK and fill a counter or a pipe at any moment, so a check for room guarantees nothing
//! about the write that follows. A thread that serves a ring also serves rings of other front-ends,
//! so it never writes to such a descriptor:
//!
//! ```text
//!   event descriptor: io_submit of a read that ends at once; the kernel then signals the descriptor (IOCB_FLAG_RESFD)
//!   Unix socket:      a send that does not wait (MSG_DONTWAIT), whatever O_NONBLOCK says
//! ```
//! The kernel adds 1 to an event descriptor under a spin lock, and leaves a full counter alone. So
//! does a Unix socket queue bytes. For a pipe, and for sockets of other families, the kernel holds
//! a mutex while it copies to the reader's memory, and the reader can make that take long: those
//! are refused. User-mode Linux passes one end of a Unix socket pair; all other front-ends pass
//! event descriptors.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::net::{AddressFamily, SendFlags, send, sockopt};

use super::outcome::{Outcome, refuse};

/// The most completions of signals that the kernel keeps for [`EventNotifier::reap`].
const MAX_COMPLETIONS: usize = 64;

/// The kernel's name for an open file. Unlike a stat, it needs no answer from a file system, which
/// the front-end may control.
fn file_kind(file: &File) -> Outcome<String> {
    let link = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let link =
        link.map_err(|error| refuse(format!("a descriptor cannot be inspected: {error}")))?;
    Ok(link.to_string_lossy().into_owned())
}

/// Whether an open file is an event descriptor.
pub(super) fn is_event(file: &File) -> Outcome<bool> {
    Ok(file_kind(file)? == "anon_inode:[eventfd]")
}

/// Adds 1 to event descriptors of front-ends, and never waits.
pub(super) struct EventNotifier {
    context: libc::c_ulong,
    /// An empty file to read from.
    empty_file: OwnedFd,
}

impl EventNotifier {
    /// # Errors
    /// If the system refuses a descriptor or an AIO context.
    pub(super) fn new() -> io::Result<Self> {
        let empty_file = memfd_create("nothing", MemfdFlags::CLOEXEC)?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes the context's handle, which has this type.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, MAX_COMPLETIONS, &raw mut context) };
        if made < 0 {
            let error = io::Error::last_os_error();
            return Err(io::Error::new(
                error.kind(),
                format!(
                    "front-ends cannot be signalled: io_setup: {error}: a kernel with CONFIG_AIO \
                     is needed, and room below fs.aio-max-nr"
                ),
            ));
        }
        Ok(Self {
            context,
            empty_file,
        })
    }

    /// Adds 1 to `event`; returns whether that succeeded.
    fn ring(&self, event: &File) -> bool {
        // SAFETY: all of its fields are integers.
        let mut block: libc::iocb = unsafe { std::mem::zeroed() };
        block.aio_lio_opcode = IOCB_CMD_PREAD;
        block.aio_fildes = self.empty_file.as_raw_fd() as u32;
        block.aio_flags = IOCB_FLAG_RESFD;
        block.aio_resfd = event.as_raw_fd() as u32;
        let mut list = [&raw mut block];
        loop {
            // SAFETY: the list has one pointer, to a block that names no memory, as it reads 0
            // bytes. The kernel reads both during the call.
            let submitted =
                unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, list.as_mut_ptr()) };
            if submitted == 1 {
                return true;
            }
            // EAGAIN: the context is full of completions of earlier signals. Take them out and
            // retry.
            let full = io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN);
            if !full || !self.reap() {
                return false;
            }
        }
    }

    /// Takes completions out of the context; returns whether there were any.
    fn reap(&self) -> bool {
        let mut completions = [[0_u64; 4]; MAX_COMPLETIONS];
        let now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: a completion (struct io_event) is four numbers of 64 bits, and there is room for
        // MAX_COMPLETIONS of them.
        let taken = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                0,
                MAX_COMPLETIONS,
                completions.as_mut_ptr(),
                &raw const now,
            )
        };
        taken > 0
    }
}

/// linux/aio_abi.h.
const IOCB_CMD_PREAD: u16 = 0;
const IOCB_FLAG_RESFD: u32 = 1;

impl Drop for EventNotifier {
    fn drop(&mut self) {
        // SAFETY: the context belongs to this value, and nothing in it is in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

/// A descriptor on which the back-end signals a front-end.
pub(super) enum Signal {
    /// An event descriptor.
    Event(File),
    /// A Unix socket.
    Socket(File),
}

impl Signal {
    /// Prepares a descriptor for signalling.
    pub(super) fn new(file: File) -> Outcome<Self> {
        let kind = file_kind(&file)?;
        if kind == "anon_inode:[eventfd]" {
            return Ok(Self::Event(file));
        }
        let family = sockopt::socket_domain(file.as_fd());
        if kind.starts_with("socket:[") && family == Ok(AddressFamily::UNIX) {
            return Ok(Self::Socket(file));
        }
        Err(refuse(format!(
            "a call descriptor is neither an event descriptor nor a Unix socket: {kind}"
        )))
    }

    /// Signals the front-end; returns whether that succeeded. A socket that is full has signals
    /// that are not read yet.
    pub(super) fn ring(&self, notifier: &EventNotifier) -> bool {
        match self {
            Self::Event(event) => notifier.ring(event),
            Self::Socket(socket) => {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                let sent = send(socket, &1_u64.to_ne_bytes(), flags);
                sent.is_ok() || sent == Err(rustix::io::Errno::AGAIN)
            }
        }
    }
}
