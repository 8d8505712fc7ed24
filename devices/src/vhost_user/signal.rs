//! Signals to a front-end, sent without ever waiting for it.
//!
//! A front-end shares the open file description of every descriptor that it passes. It can clear O_NONBLOCK and fill a
//! counter or a pipe at any moment, so a check for room guarantees nothing about the write that follows. A thread that
//! serves a ring also serves rings of other front-ends, so it never writes to such a descriptor:
//!
//! ```text
//!   event descriptor: io_submit of a read that ends at once; the kernel then signals the descriptor (IOCB_FLAG_RESFD)
//!   pipe or socket:   a thread of its own, which may block forever, and which no other thread waits for
//! ```
//! The kernel adds 1 to an event descriptor under a spin lock, and leaves a full counter alone. For a pipe it holds a
//! mutex while it copies to the reader's memory, and the reader can make that take long. User-mode Linux passes one end
//! of a socket pair; all other front-ends pass event descriptors.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::thread;

use rustix::fs::{MemfdFlags, memfd_create};

use super::outcome::{Outcome, refuse};

/// The most completions of signals that the kernel keeps for [`EventNotifier::reap`].
const MAX_COMPLETIONS: usize = 64;
/// The most threads that write to pipes of one disk's front-ends, including threads blocked on pipes of earlier ones.
const MAX_PIPES: usize = 512;

/// The kernel's name for an open file. Unlike a stat, it needs no answer from a file system, which the front-end may
/// control.
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
    /// The number of threads that write to pipes.
    pipes: Arc<AtomicUsize>,
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
                    "front-ends cannot be signalled: io_setup: {error}: a kernel with CONFIG_AIO is needed, and room below fs.aio-max-nr"
                ),
            ));
        }
        Ok(Self {
            context,
            empty_file,
            pipes: Arc::default(),
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
            // SAFETY: the list has one pointer, to a block that names no memory, as it reads 0 bytes. The kernel reads both
            // during the call.
            let submitted =
                unsafe { libc::syscall(libc::SYS_io_submit, self.context, 1, list.as_mut_ptr()) };
            if submitted == 1 {
                return true;
            }
            // EAGAIN: the context is full of completions of earlier signals. Take them out and retry.
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
        // SAFETY: a completion (struct io_event) is four numbers of 64 bits, and there is room for MAX_COMPLETIONS of them.
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
    /// A pipe or a socket: the channel to the thread that writes to it.
    Pipe(SyncSender<()>),
}

impl Signal {
    /// Prepares a descriptor for signalling.
    pub(super) fn new(file: File, notifier: &EventNotifier) -> Outcome<Self> {
        let kind = file_kind(&file)?;
        match kind.as_str() {
            "anon_inode:[eventfd]" => Ok(Self::Event(file)),
            kind if kind.starts_with("pipe:[") || kind.starts_with("socket:[") => {
                start_pipe_thread(file, &notifier.pipes)
            }
            kind => Err(refuse(format!(
                "a call descriptor is neither an event descriptor, a pipe nor a socket: {kind}"
            ))),
        }
    }

    /// Signals the front-end; returns whether that succeeded. If the pipe's thread still has a signal to write, that one
    /// counts for both.
    pub(super) fn ring(&self, notifier: &EventNotifier) -> bool {
        match self {
            Self::Event(event) => notifier.ring(event),
            Self::Pipe(writer) => {
                !matches!(writer.try_send(()), Err(TrySendError::Disconnected(())))
            }
        }
    }
}

/// Starts the thread that writes to a pipe or a socket until its [`Signal`] is dropped.
fn start_pipe_thread(file: File, pipes: &Arc<AtomicUsize>) -> Outcome<Signal> {
    let permit = PipePermit::take(pipes)
        .ok_or_else(|| refuse(format!("more than {MAX_PIPES} pipes that nobody reads")))?;
    let (sender, signals) = sync_channel(1);
    thread::Builder::new()
        .name("vhost-user-pipe".into())
        .spawn(move || {
            let _permit = permit;
            for () in signals {
                // If the write fails, the pipe's reader misses the signal.
                let _ = rustix::io::write(file.as_fd(), &1_u64.to_ne_bytes());
            }
        })?;
    Ok(Signal::Pipe(sender))
}

/// Permission for one more pipe thread. It counts against [`MAX_PIPES`] until it is dropped.
struct PipePermit(Arc<AtomicUsize>);

impl PipePermit {
    fn take(taken: &Arc<AtomicUsize>) -> Option<Self> {
        let permit = Self(Arc::clone(taken));
        (taken.fetch_add(1, Ordering::Relaxed) < MAX_PIPES).then_some(permit)
    }
}

impl Drop for PipePermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}
