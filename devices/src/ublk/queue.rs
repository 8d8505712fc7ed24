//! A queue of a device: its ring, its descriptors, and the data of its requests.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types::Fixed};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use zerocopy::IntoBytes;

use super::control::restricted_ring;
use super::layout::{Descriptor, IoCommand, Request, command, data_offset, descriptors};

/// What a tag of a queue ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TagEvent {
    /// It has a request.
    Request(u16),
    /// The device is being removed: the tag gets no more requests.
    Retired,
    /// The kernel refused a command, with this error.
    Failed(i32),
}

/// A queue of a device. After [`fetch_all`](Self::fetch_all), one thread must make all calls.
pub(super) struct QueueRing {
    ring: IoUring<squeue::Entry>,
    /// `None` before [`fetch_all`](Self::fetch_all).
    descriptors: Option<Descriptors>,
    file: Arc<File>,
    queue: u16,
    depth: u16,
}

impl QueueRing {
    /// `file`: /dev/ublkcN.
    pub(super) fn new(file: &Arc<File>, queue: u16, depth: u16) -> io::Result<Self> {
        let (ring, _) = restricted_ring(depth.max(1).into(), file, false)?;
        Ok(Self {
            ring,
            descriptors: None,
            file: Arc::clone(file),
            queue,
            depth,
        })
    }

    pub(super) fn index(&self) -> u16 {
        self.queue
    }

    pub(super) fn depth(&self) -> u16 {
        self.depth
    }

    /// Asks for a request for each tag.
    ///
    /// The driver remembers whose memory the descriptors are mapped in, and forgets it for the next
    /// server only once a queue was fetched. So a process that is killed on its way here leaves a
    /// device that waited as it was.
    pub(super) fn fetch_all(&mut self) -> io::Result<()> {
        for tag in 0..self.depth {
            self.push(command::FETCH, tag, 0);
        }
        self.submit()?;
        let (offset, len) = descriptors(self.queue, self.depth, rustix::param::page_size());
        self.descriptors = Some(Descriptors::map(&self.file, offset, len)?);
        Ok(())
    }

    /// Answers a request with `result`, the number of bytes moved or a negated errno, and asks for
    /// the next one, at the next [`submit`](Self::submit).
    pub(super) fn commit(&mut self, tag: u16, result: i32) {
        self.push(command::COMMIT_AND_FETCH, tag, result);
    }

    fn push(&mut self, operation: u32, tag: u16, result: i32) {
        let io = IoCommand {
            queue: self.queue,
            tag,
            result,
            address: 0,
        };
        let mut bytes = [0; 16];
        bytes.copy_from_slice(io.as_bytes());
        let entry = opcode::UringCmd16::new(Fixed(0), operation).cmd(bytes);
        let entry = entry.build().user_data(tag.into());
        // SAFETY: the command names no memory.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        // Each tag has one command at a time, and the ring has room for one of each.
        debug_assert!(pushed.is_ok(), "the ring has room for tag {tag}");
    }

    /// Whether answers wait for [`submit`](Self::submit).
    pub(super) fn has_answers(&mut self) -> bool {
        !self.ring.submission().is_empty()
    }

    /// Passes the answers to the kernel.
    pub(super) fn submit(&mut self) -> io::Result<()> {
        while self.has_answers() {
            let submitted = self.ring.submit();
            match submitted.as_ref().map_err(io::Error::raw_os_error) {
                Ok(_) | Err(Some(libc::EINTR)) => {}
                // The kernel is short of memory.
                Err(Some(libc::EAGAIN | libc::EBUSY)) => thread::sleep(Duration::from_millis(1)),
                _ => return submitted.map(drop),
            }
        }
        Ok(())
    }

    /// Takes what has happened to the tags.
    pub(super) fn events(&mut self, mut each: impl FnMut(TagEvent)) {
        for end in self.ring.completion() {
            each(match end.result() {
                0 => TagEvent::Request(end.user_data() as u16),
                result if -result == libc::ENODEV => TagEvent::Retired,
                result => TagEvent::Failed(-result),
            });
        }
    }

    /// The request of a tag; `None`: the kernel has sent one that no driver sends.
    pub(super) fn request(&self, tag: u16) -> Option<Request> {
        let descriptor = self.descriptors.as_ref()?.get(tag.into())?;
        descriptor.request()
    }

    /// Copies the data of a write.
    pub(super) fn read_data(&self, tag: u16, into: &mut [u8]) -> io::Result<()> {
        self.file.read_exact_at(into, data_offset(self.queue, tag))
    }

    /// Copies the data of a read, from byte `offset` of the request on.
    pub(super) fn write_data(&self, tag: u16, offset: usize, from: &[u8]) -> io::Result<()> {
        let at = data_offset(self.queue, tag) + offset as u64;
        self.file.write_all_at(from, at)
    }
}

impl AsFd for QueueRing {
    /// Readable when there are events.
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring keeps its descriptor open while it is borrowed.
        unsafe { BorrowedFd::borrow_raw(self.ring.as_raw_fd()) }
    }
}

/// The descriptors of a queue's requests, which the kernel writes.
struct Descriptors {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory belongs to the value; reads of it are volatile.
unsafe impl Send for Descriptors {}

impl Descriptors {
    fn map(file: &File, offset: u64, len: usize) -> io::Result<Self> {
        let (protection, flags) = (ProtFlags::READ, MapFlags::SHARED);
        // SAFETY: a new mapping at an address of the kernel's choice: no memory that is in use
        // changes.
        let start =
            unsafe { mmap(std::ptr::null_mut(), len, protection, flags, file, offset) }?.cast();
        let start = NonNull::new(start).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// `None`: there are fewer.
    fn get(&self, index: usize) -> Option<Descriptor> {
        let at = index * size_of::<Descriptor>();
        if at + size_of::<Descriptor>() > self.len {
            return None;
        }
        // SAFETY: the descriptor lies in the mapping, which is aligned to pages, and any bytes are
        // one. The kernel writes it before it hands out the tag, and not until the tag comes back.
        let place = unsafe { self.start.as_ptr().add(at).cast::<Descriptor>() };
        // SAFETY: as above.
        let descriptor = unsafe { place.read_volatile() };
        Some(descriptor)
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and nothing borrows it.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        if let Err(error) = unmapped {
            tracing::error!("descriptors stay mapped: {error}");
        }
    }
}
