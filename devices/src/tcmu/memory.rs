//! The memory shared with the kernel, and a command's data in it.

use std::io;
use std::os::fd::AsFd;
use std::ptr::NonNull;
use std::sync::Arc;

use rustix::mm::{MapFlags, ProtFlags, mmap, mmap_anonymous, munmap};
use smallvec::SmallVec;
use vm_memory::{Bytes, VolatileSlice};

use crate::scsi::DataBuffer;

/// Memory shared with the kernel, which may write to it at any time: all access is volatile or
/// atomic, and bounds-checked.
pub struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory belongs to the value and may be accessed from any thread; no code gets a plain
// reference to it.
unsafe impl Send for Mapping {}
// SAFETY: as above; all access is volatile or atomic, which several threads may do at once.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps the whole first region of a UIO device. `len` must be the region's length in bytes.
    ///
    /// # Errors
    /// If the kernel refuses, usually because `len` is not the region's length.
    pub fn of_device(device: impl AsFd, len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice: no memory that is in use
        // changes.
        let start = unsafe {
            mmap(
                std::ptr::null_mut(),
                len,
                protection,
                MapFlags::SHARED,
                device,
                0,
            )
        };
        Self::new(start?, len)
    }

    /// Private zeroed memory, for tests that play both sides.
    ///
    /// # Errors
    /// If there is not enough memory, or `len` is 0.
    pub fn anonymous(len: usize) -> io::Result<Self> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: as above.
        let start =
            unsafe { mmap_anonymous(std::ptr::null_mut(), len, protection, MapFlags::PRIVATE) };
        Self::new(start?, len)
    }

    fn new(start: *mut core::ffi::c_void, len: usize) -> io::Result<Self> {
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// Length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a mapping is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The whole mapping.
    pub fn slice(&self) -> VolatileSlice<'_> {
        // SAFETY: the memory is mapped, readable and writable, for as long as `self` lives, which
        // the slice borrows.
        unsafe { VolatileSlice::new(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by `of_device` or `anonymous` with this length; every slice of it borrows
        // `self`.
        let unmapped = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
        if let Err(error) = unmapped {
            tracing::error!("shared memory stays mapped: {error}");
        }
    }
}

/// The data of one command, in blocks of the shared memory. The kernel stores the data of a write
/// there before it queues the command, and fetches the data of a read from there after the command
/// has ended.
#[derive(Clone)]
pub struct CommandData {
    memory: Arc<Mapping>,
    /// Offset and length of each block; all lie inside the memory.
    pieces: SmallVec<[(usize, usize); 4]>,
    len: usize,
}

impl std::fmt::Debug for CommandData {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("CommandData").field(&self.pieces).finish()
    }
}

impl CommandData {
    pub(super) fn empty(memory: &Arc<Mapping>) -> Self {
        Self {
            memory: Arc::clone(memory),
            pieces: SmallVec::new(),
            len: 0,
        }
    }

    /// Appends a block. `None` if the block does not lie in the memory from `from` on, or if all
    /// blocks together would be longer than that.
    pub(super) fn push(&mut self, from: usize, offset: u64, len: u64) -> Option<()> {
        let (offset, len) = (usize::try_from(offset).ok()?, usize::try_from(len).ok()?);
        let area = self.memory.len() - from;
        let end = offset.checked_add(len)?;
        let total = self.len.checked_add(len)?;
        if offset < from || end > self.memory.len() || total > area {
            return None;
        }
        if len > 0 {
            self.pieces.push((offset, len));
            self.len = total;
        }
        Some(())
    }

    /// Overwrites all the data with zeroes.
    pub(super) fn clear(&self) {
        let zeroes = [0; 4096];
        for offset in (0..self.len).step_by(zeroes.len()) {
            let len = (self.len - offset).min(zeroes.len());
            self.write(offset, &zeroes[..len]);
        }
    }

    /// Calls `copy` for each block of `[offset, offset + len)`, with the block's offset in the
    /// memory, the number of bytes of the range before it, and its length.
    fn for_each_block(
        &self,
        offset: usize,
        len: usize,
        mut copy: impl FnMut(usize, usize, usize) -> bool,
    ) {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len);
        assert!(fits, "{len} bytes at {offset} of a command's {}", self.len);
        let (mut skip, mut done) = (offset, 0);
        for &(at, piece) in &self.pieces {
            if done == len {
                break;
            }
            if skip >= piece {
                skip -= piece;
                continue;
            }
            let now = (piece - skip).min(len - done);
            let copied = copy(at + skip, done, now);
            debug_assert!(copied, "blocks lie in the memory");
            done += now;
            skip = 0;
        }
    }
}

impl DataBuffer for CommandData {
    fn len(&self) -> usize {
        self.len
    }

    /// # Panics
    /// If the range exceeds the data.
    fn read(&self, offset: usize, into: &mut [u8]) {
        let memory = self.memory.slice();
        self.for_each_block(offset, into.len(), |at, done, len| {
            let part = &mut into[done..done + len];
            memory.read_slice(part, at).is_ok()
        });
    }

    /// # Panics
    /// If the range exceeds the data.
    fn write(&self, offset: usize, from: &[u8]) {
        let memory = self.memory.slice();
        self.for_each_block(offset, from.len(), |at, done, len| {
            memory.write_slice(&from[done..done + len], at).is_ok()
        });
    }
}
