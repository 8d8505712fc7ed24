//! Signals from the back-end to a front-end, sent without ever waiting for the front-end.
//!
//! A front-end shares the open file description of a descriptor that it passes. It can clear O_NONBLOCK and fill a
//! counter or a pipe at any moment, so a check for room guarantees nothing about the write that follows. A thread that
//! serves a ring also serves rings of other front-ends, so it never writes to such a descriptor:
//!
//! ```text
//!   event descriptor: io_submit of a read that ends at once; the kernel then signals the descriptor (IOCB_FLAG_RESFD)
//!   pipe or socket:   a thread of its own, which may block for ever, and for which no other thread waits
//! ```
//! The kernel adds 1 to an event descriptor under a spin lock, and leaves a full counter as it is. For a pipe it holds
//! a mutex while it copies to the reader's memory, and the reader can make that last. User-mode Linux passes one end of
//! a socket pair, all other front-ends pass event descriptors.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread;

use rustix::fs::{MemfdFlags, memfd_create};

use super::outcome::{Outcome, refused};

/// Most completions of signals that the kernel keeps until [`Bell::take_ends`] takes them.
const ENDS: usize = 64;
/// Most threads that write to pipes of one disk's front-ends. Threads blocked on pipes of earlier front-ends count too.
const MOST_PIPES: usize = 512;

/// The kernel's name for an open file. Unlike a stat, it needs no answer from a file system, which may be the
/// front-end's own.
fn kind(file: &File) -> Outcome<String> {
    let link = fs::read_link(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let link =
        link.map_err(|error| refused(format!("a descriptor cannot be inspected: {error}")))?;
    Ok(link.to_string_lossy().into_owned())
}

/// Whether an open file is an event descriptor.
pub(super) fn is_event(file: &File) -> Outcome<bool> {
    Ok(kind(file)? == "anon_inode:[eventfd]")
}

/// Adds 1 to event descriptors of front-ends, and never waits.
pub(super) struct Bell {
    context: libc::c_ulong,
    /// An empty file, the target of the reads.
    nothing: OwnedFd,
    /// The number of threads that write to pipes.
    pipes: Arc<AtomicUsize>,
}

impl Bell {
    /// # Errors
    /// If the system refuses a descriptor or an AIO context.
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

    /// Adds 1 to `event`; returns whether that succeeded.
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
            // EAGAIN: completions of earlier signals fill the context, so they are taken out first.
            let full = io::Error::last_os_error().raw_os_error() == Some(libc::EAGAIN);
            if !full || !self.take_ends() {
                return false;
            }
        }
    }

    /// Takes completions out of the context; returns whether there were any.
    fn take_ends(&self) -> bool {
        let mut ends = [[0_u64; 4]; ENDS];
        let now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: a completion (struct io_event) is four numbers of 64 bits, and there is room for ENDS of them.
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
        // SAFETY: the context belongs to this value, and nothing in it is in flight.
        unsafe { libc::syscall(libc::SYS_io_destroy, self.context) };
    }
}

/// A descriptor of a front-end that the back-end signals.
pub(super) enum Signal {
    /// An event descriptor.
    Event(File),
    /// A pipe or a socket: the channel to the thread that writes to it.
    Pipe(SyncSender<()>),
}

impl Signal {
    /// Takes a descriptor to signal.
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

    /// Signals the front-end; returns whether that succeeded. A signal that the pipe's thread has yet to write is enough.
    pub(super) fn ring(&self, bell: &Bell) -> bool {
        match self {
            Self::Event(event) => bell.ring(event),
            Self::Pipe(writer) => {
                !matches!(writer.try_send(()), Err(TrySendError::Disconnected(())))
            }
        }
    }
}

/// Starts the thread that writes to a pipe or a socket until its [`Signal`] is dropped.
fn pipe(file: File, pipes: &Arc<AtomicUsize>) -> Outcome<Signal> {
    let place = PipeThread::take(pipes).ok_or_else(|| {
        refused(format!(
            "more than {MOST_PIPES} pipes, and no process reads them"
        ))
    })?;
    let (ring, rung) = sync_channel(1);
    thread::Builder::new()
        .name("vhost-user-pipe".into())
        .spawn(move || {
            let _place = place;
            for () in rung {
                // If the write fails, the pipe's reader misses the signal.
                let _ = rustix::io::write(file.as_fd(), &1_u64.to_ne_bytes());
            }
        })?;
    Ok(Signal::Pipe(ring))
}

/// One thread counted against [`MOST_PIPES`], until this is dropped.
struct PipeThread(Arc<AtomicUsize>);

impl PipeThread {
    fn take(all: &Arc<AtomicUsize>) -> Option<Self> {
        let place = Self(Arc::clone(all));
        (all.fetch_add(1, Ordering::Relaxed) < MOST_PIPES).then_some(place)
    }
}

impl Drop for PipeThread {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
