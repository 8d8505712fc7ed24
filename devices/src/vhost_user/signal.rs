//! What a back-end rings to tell a front-end of something, without ever waiting for it.
//!
//! A front-end keeps the file description of what it gives. It can clear O_NONBLOCK and fill a counter or a pipe at any
//! moment, so a look whether there is room says nothing about the write that follows, and threads that serve a ring serve
//! rings of other front-ends too. So nothing is written to such a descriptor by them:
//!
//! ```text
//!   event descriptor: io_submit of a read that ends at once, with the descriptor as what the kernel signals then (IOCB_FLAG_RESFD)
//!   pipe or socket:   a thread of its own, which may wait for ever, and for which nobody waits
//! ```
//! The kernel adds 1 to an event descriptor under a spin lock, and leaves a full one full. A pipe's mutex is held while its
//! reader's memory is filled, which the reader can draw out. User-mode Linux gives a pair of sockets, all others event
//! descriptors.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread;

use rustix::fs::{MemfdFlags, memfd_create};

use super::outcome::{Outcome, refused};

/// Signals that the kernel keeps the ends of until they are taken.
const ENDS: usize = 64;
/// Most threads that write to pipes of one disk's front-ends, those of earlier ones that never came back included.
const MOST_PIPES: usize = 512;

/// What an open file is, as the kernel names it: that asks nobody who may not answer, as a file system of the front-end's
/// would.
fn kind(file: &File) -> Outcome<String> {
    let link = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let link =
        link.map_err(|error| refused(format!("a descriptor cannot be looked at: {error}")))?;
    Ok(link.to_string_lossy().into_owned())
}

/// Whether an open file is an event descriptor.
pub(super) fn is_event(file: &File) -> Outcome<bool> {
    Ok(kind(file)? == "anon_inode:[eventfd]")
}

/// A way to add 1 to event descriptors of others that never waits.
pub(super) struct Bell {
    context: libc::c_ulong,
    /// What is read: nothing, of an empty file.
    nothing: OwnedFd,
    /// Threads that write to pipes.
    pipes: Arc<AtomicUsize>,
}

impl Bell {
    /// # Errors
    /// If the system refuses.
    pub(super) fn new() -> io::Result<Self> {
        let nothing = memfd_create("nothing", MemfdFlags::CLOEXEC)?;
        let mut context: libc::c_ulong = 0;
        // SAFETY: the kernel writes the context's handle, which has this type.
        let made = unsafe { libc::syscall(libc::SYS_io_setup, ENDS, &raw mut context) };
        if made < 0 {
            let error = io::Error::last_os_error();
            return Err(io::Error::new(
                error.kind(),
                format!(
                    "front-ends cannot be signalled: io_setup: {error}: a kernel with CONFIG_AIO is needed, and room below fs.aio-max-nr"
                ),
            ));
        }
        Ok(Self {
            context,
            nothing,
            pipes: Arc::default(),
        })
    }

    /// Adds 1 to `event`; whether that was done.
    fn ring(&self, event: &File) -> bool {
        // SAFETY: all of its fields are integers.
        let mut block: libc::iocb = unsafe { std::mem::zeroed() };
        block.aio_lio_opcode = IOCB_CMD_PREAD;
        block.aio_fildes = self.nothing.as_raw_fd() as u32;
        block.aio_flags = IOCB_FLAG_RESFD;
        block.aio_resfd = event.as_raw_fd() as u32;
        let mut list = [&raw mut block];
        loop {
            // SAFETY: the list has one pointer, to a block that names no memory: 0 bytes are read. The kernel reads both
            // within the call.
            let submitted =
                unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, list.as_mut_ptr()) };
            if submitted == 1 {
                return true;
            }
            // The ends of earlier ones have filled their room.
            let full = io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN);
            if !full || !self.take_ends() {
                return false;
            }
        }
    }

    /// Makes room; whether there is any.
    fn take_ends(&self) -> bool {
        let mut ends = [[0_u64; 4]; ENDS];
        let now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: an end (struct io_event) is four numbers of 64 bits, and there is room for as many as are asked for.
        let taken = unsafe {
            libc::syscall(
                libc::SYS_io_getevents,
                self.context,
                0,
                ENDS,
                ends.as_mut_ptr(),
                &raw const now,
            )
        };
        taken > 0
    }
}

/// linux/aio_abi.h.
const IOCB_CMD_PREAD: u16 = 0;
const IOCB_FLAG_RESFD: u32 = 1;

impl Drop for Bell {
    fn drop(&mut self) {
        // SAFETY: the context is this value's, and nothing of it is in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

/// A descriptor of a front-end's that is rung.
pub(super) enum Signal {
    /// An event descriptor.
    Event(File),
    /// A pipe or a socket: who writes to it.
    Pipe(SyncSender<()>),
}

impl Signal {
    /// Takes a descriptor that is to be rung.
    pub(super) fn new(file: File, bell: &Bell) -> Outcome<Self> {
        let kind = kind(&file)?;
        match kind.as_str() {
            "anon_inode:[eventfd]" => Ok(Self::Event(file)),
            kind if kind.starts_with("pipe:[") || kind.starts_with("socket:[") => {
                pipe(file, &bell.pipes)
            }
            kind => Err(refused(format!(
                "a call descriptor is neither an event descriptor, a pipe nor a socket: {kind}"
            ))),
        }
    }

    /// Rings it; whether that was done. What has been rung and not been looked at need not be rung again.
    pub(super) fn ring(&self, bell: &Bell) -> bool {
        match self {
            Self::Event(event) => bell.ring(event),
            Self::Pipe(writer) => {
                !matches!(writer.try_send(()), Err(TrySendError::Disconnected(())))
            }
        }
    }
}

/// Starts the thread that writes to a pipe or a socket until nobody wants it any more.
fn pipe(file: File, pipes: &Arc<AtomicUsize>) -> Outcome<Signal> {
    let place = Place::take(pipes).ok_or_else(|| {
        refused(format!(
            "more than {MOST_PIPES} pipes, and nobody reads them"
        ))
    })?;
    let (ring, rung) = sync_channel(1);
    thread::Builder::new()
        .name("vhost-user-pipe".into())
        .spawn(move || {
            let _place = place;
            for () in rung {
                // Whatever is wrong with it: whoever reads it misses something.
                let _ = rustix::io::write(file.as_fd(), &1_u64.to_ne_bytes());
            }
        })?;
    Ok(Signal::Pipe(ring))
}

/// One of the threads that write to pipes.
struct Place(Arc<AtomicUsize>);

impl Place {
    fn take(all: &Arc<AtomicUsize>) -> Option<Self> {
        let place = Self(Arc::clone(all));
        (all.fetch_add(1, Ordering::Relaxed) < MOST_PIPES).then_some(place)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
