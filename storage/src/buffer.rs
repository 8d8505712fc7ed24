//! Memory for payloads: page-aligned, as O_DIRECT wants it, and owned by the operation that uses it.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

/// Alignment of every [`Buffer`] in bytes: the page size, which satisfies every O_DIRECT rule of Linux.
pub const BUFFER_ALIGN: usize = 4096;

/// A zero-initialised, page-aligned byte buffer.
///
/// A request's payload lives in exactly one `Buffer` from the copy out of guest memory until the
/// request completes; the checksum is taken from it, never from memory that a guest can change.
pub struct Buffer {
    pointer: NonNull<u8>,
    len: usize,
    layout: Layout,
}

// SAFETY: a `Buffer` owns its allocation alone, as `Box<[u8]>` does.
unsafe impl Send for Buffer {}
// SAFETY: shared access only reads bytes; mutation needs `&mut Buffer`.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Allocates `len` zero bytes. The allocation is rounded up to [`BUFFER_ALIGN`].
    ///
    /// # Panics
    /// If `len` is above `isize::MAX - 4095`. Aborts when memory is exhausted, as `Vec` does.
    pub fn zeroed(len: usize) -> Self {
        let size = len.max(1).next_multiple_of(BUFFER_ALIGN);
        let layout = Layout::from_size_align(size, BUFFER_ALIGN).expect("buffer length fits isize");
        // SAFETY: the layout's size is at least BUFFER_ALIGN, never zero.
        let pointer = unsafe { alloc_zeroed(layout) };
        let Some(pointer) = NonNull::new(pointer) else {
            handle_alloc_error(layout)
        };
        Self {
            pointer,
            len,
            layout,
        }
    }
}

impl From<&[u8]> for Buffer {
    fn from(bytes: &[u8]) -> Self {
        let mut buffer = Self::zeroed(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the allocation holds at least `len` initialised bytes and lives as long as `self`.
        unsafe { std::slice::from_raw_parts(self.pointer.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this very layout and not freed before.
        unsafe { dealloc(self.pointer.as_ptr(), self.layout) }
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}
