//! Memory for payloads: page-aligned, as O_DIRECT requires, and recycled instead of freed, so that
//! a running store does not allocate.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::mem::ManuallyDrop;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Alignment of every [`Buffer`] in bytes: the page size, which satisfies every O_DIRECT rule of
/// Linux.
pub const BUFFER_ALIGN: usize = 4096;

/// Most bytes that the pool keeps for reuse, in the whole process: what one queue may have in
/// flight.
const POOL_BYTES: usize = 32 << 20;
/// What a block takes beside its bytes: the allocator's note before it makes it begin a page later.
const BLOCK_OVERHEAD: u64 = BUFFER_ALIGN as u64;
/// Bytes of memory of all blocks, those kept for reuse included.
static ALLOCATED: AtomicU64 = AtomicU64::new(0);
/// Sizes that are recycled: `BUFFER_ALIGN << class`, so up to 4 MiB. Longer ones are rare and go to
/// the system.
const CLASSES: usize = 11;

/// A page-aligned byte buffer.
///
/// A request's payload lives in exactly one `Buffer` from the copy out of guest memory until the
/// request completes; the checksum is taken from it, never from memory that a guest can change.
///
/// Memory comes from a pool and goes back there; the process keeps up to 32 MiB.
pub struct Buffer(SharedBuffer);

/// A read-only [`Buffer`]. Clones share the memory.
#[derive(Clone)]
pub struct SharedBuffer {
    /// The last user returns the block to the pool instead of dropping it.
    block: ManuallyDrop<Arc<Block>>,
    len: usize,
}

/// Memory, recycled together with its reference count (the `Arc`). All its bytes are initialised.
struct Block {
    pointer: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a `Block` owns its allocation alone, as `Box<[u8]>` does.
unsafe impl Send for Block {}
// SAFETY: a shared `Block` is only read; what a `Buffer` writes to has no other user.
unsafe impl Sync for Block {}

impl Block {
    /// Allocates `size` zero bytes.
    fn new(size: usize) -> Result<Self, OutOfMemory> {
        let layout = Layout::from_size_align(size, BUFFER_ALIGN).map_err(|_| OutOfMemory)?;
        // SAFETY: the layout's size is at least BUFFER_ALIGN, never zero.
        let pointer = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(OutOfMemory)?;
        ALLOCATED.fetch_add(size as u64 + BLOCK_OVERHEAD, Ordering::Relaxed);
        Ok(Self { pointer, layout })
    }
}

/// The system has no memory for a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("out of memory")]
pub struct OutOfMemory;

impl From<OutOfMemory> for std::io::Error {
    fn from(_: OutOfMemory) -> Self {
        std::io::ErrorKind::OutOfMemory.into()
    }
}

/// Bytes of all buffers, those kept for reuse included.
pub(crate) fn allocated() -> u64 {
    ALLOCATED.load(Ordering::Relaxed)
}

/// Keeps buffers that take at most `memory` bytes for reuse from now on, or [`POOL_BYTES`] of them
/// if that is less. Returns how much memory they may take.
pub(crate) fn limit_pool(memory: u64) -> u64 {
    // The overhead of the smallest buffers is as large as they are.
    let most = usize::try_from(memory / 2)
        .unwrap_or(POOL_BYTES)
        .min(POOL_BYTES);
    BlockPool::lock().most = most;
    2 * most as u64
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this very layout and not freed before.
        unsafe { dealloc(self.pointer.as_ptr(), self.layout) }
        let bytes = self.layout.size() as u64 + BLOCK_OVERHEAD;
        ALLOCATED.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Blocks kept for reuse, by class.
struct BlockPool {
    classes: [Vec<Arc<Block>>; CLASSES],
    bytes: usize,
    /// Most bytes that are kept.
    most: usize,
}

static POOL: Mutex<BlockPool> = Mutex::new(BlockPool {
    classes: [const { Vec::new() }; CLASSES],
    bytes: 0,
    most: POOL_BYTES,
});

impl BlockPool {
    fn lock() -> MutexGuard<'static, Self> {
        // The pool is consistent at every step, so a panic does no harm.
        POOL.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The class of memory of `size` bytes; `None`: not recycled, but returned to the system.
    fn class(size: usize) -> Option<usize> {
        let pages = size.div_ceil(BUFFER_ALIGN).max(1);
        let class = pages.checked_next_power_of_two()?.trailing_zeros() as usize;
        (class < CLASSES).then_some(class)
    }

    fn give(&mut self, class: usize, block: Arc<Block>) {
        self.bytes += block.layout.size();
        self.classes[class].push(block);
        while self.bytes > self.most {
            // Evict from the class that holds most, so that sizes no longer needed make room for
            // those needed now.
            let most = self.classes.iter_mut().enumerate();
            let most = most.max_by_key(|(class, blocks)| blocks.len() << class);
            let freed = most.and_then(|(_, blocks)| blocks.pop());
            self.bytes -= freed.map_or(self.bytes, |block| block.layout.size());
        }
    }

    fn take(&mut self, class: usize) -> Option<Arc<Block>> {
        let block = self.classes[class].pop()?;
        self.bytes -= block.layout.size();
        Some(block)
    }
}

impl Buffer {
    /// `len` zero bytes.
    ///
    /// # Panics
    /// If `len` is above `isize::MAX - 4095`. Aborts when memory is exhausted, as `Vec` does.
    pub fn zeroed(len: usize) -> Self {
        Self::try_zeroed(len).unwrap_or_else(|OutOfMemory| abort_for(len))
    }

    /// `len` bytes with arbitrary contents, such as an earlier request's. The caller must overwrite
    /// every byte before other code sees the buffer.
    ///
    /// # Panics
    /// As [`zeroed`](Self::zeroed).
    pub fn for_overwrite(len: usize) -> Self {
        Self::try_for_overwrite(len).unwrap_or_else(|OutOfMemory| abort_for(len))
    }

    /// As [`for_overwrite`](Self::for_overwrite), for a length that a client has chosen.
    ///
    /// # Errors
    /// If the system has not so much memory.
    pub fn try_for_overwrite(len: usize) -> Result<Self, OutOfMemory> {
        Ok(Self::take(len)?.0)
    }

    /// As [`zeroed`](Self::zeroed), for a length that a client has chosen.
    ///
    /// # Errors
    /// If the system has not so much memory.
    pub fn try_zeroed(len: usize) -> Result<Self, OutOfMemory> {
        let (mut buffer, recycled) = Self::take(len)?;
        if recycled {
            buffer.fill(0);
        }
        Ok(buffer)
    }

    /// Bytes of memory that a buffer of `len` bytes takes.
    pub fn memory_of(len: u64) -> u64 {
        let block = match usize::try_from(len).ok().and_then(BlockPool::class) {
            Some(class) => (BUFFER_ALIGN << class) as u64,
            None => len,
        };
        block.saturating_add(BLOCK_OVERHEAD)
    }

    /// Makes the buffer read-only and cheap to clone.
    pub fn share(self) -> SharedBuffer {
        self.0
    }

    /// A buffer, and whether it may contain anything but zeroes.
    fn take(len: usize) -> Result<(Self, bool), OutOfMemory> {
        let class = BlockPool::class(len);
        let found = class.and_then(|class| BlockPool::lock().take(class));
        let recycled = found.is_some();
        let block = match found {
            Some(block) => block,
            None => {
                let size = match class {
                    Some(class) => BUFFER_ALIGN << class,
                    None => len
                        .checked_next_multiple_of(BUFFER_ALIGN)
                        .ok_or(OutOfMemory)?,
                };
                Arc::new(Block::new(size)?)
            }
        };
        let block = ManuallyDrop::new(block);
        Ok((Self(SharedBuffer { block, len }), recycled))
    }
}

/// Ends the process, as `Vec` does when memory is exhausted.
fn abort_for(len: usize) -> ! {
    let layout = Layout::from_size_align(len.max(1), BUFFER_ALIGN);
    handle_alloc_error(layout.expect("buffer length fits isize"))
}

impl From<&[u8]> for Buffer {
    fn from(bytes: &[u8]) -> Self {
        let mut buffer = Self::for_overwrite(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }
}

impl Deref for SharedBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the block holds at least `len` initialised bytes and lives as long as `self`. No
        // thread writes to them meanwhile: see `DerefMut` of `Buffer`.
        unsafe { std::slice::from_raw_parts(self.block.pointer.as_ptr(), self.len) }
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`. The block came from the pool or the system with no other user and
        // is not cloned before `share` ends this buffer, so `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.0.block.pointer.as_ptr(), self.0.len) }
    }
}

impl Drop for SharedBuffer {
    fn drop(&mut self) {
        // SAFETY: dropped once, and `self` is not used afterwards.
        let mut block = unsafe { ManuallyDrop::take(&mut self.block) };
        // The last user gives the block back. If two users drop it at the same moment, each may see
        // the other; then it is freed instead.
        if let Some(class) = BlockPool::class(block.layout.size())
            && Arc::get_mut(&mut block).is_some()
        {
            BlockPool::lock().give(class, block);
        }
    }
}

impl std::fmt::Debug for SharedBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_zeroed_or_copied_whatever_was_in_their_memory() {
        for len in [0, 1, 512, 4096, 4097, 100_000, 1 << 20, (4 << 20) + 1] {
            for _ in 0..3 {
                let mut buffer = Buffer::for_overwrite(len);
                buffer.fill(0xa5);
                drop(buffer);
                let buffer = Buffer::zeroed(len);
                assert_eq!(buffer.len(), len);
                assert_eq!(buffer.as_ptr() as usize % BUFFER_ALIGN, 0);
                assert!(buffer.iter().all(|&byte| byte == 0));
                drop(buffer);
                assert!(Buffer::from(&vec![7; len][..]).iter().all(|&b| b == 7));
            }
        }
    }

    #[test]
    fn memory_has_one_owner_until_its_last_clone_is_gone() {
        let threads: Vec<_> = (0..4u8)
            .map(|thread| {
                std::thread::spawn(move || {
                    let mut held = Vec::new();
                    for round in 0..2000u32 {
                        let mark = [thread, round as u8].repeat(256 << (round % 4));
                        let shared = Buffer::from(&mark[..]).share();
                        let clone = shared.clone();
                        // Another thread drops the clone, at any time.
                        held.push((shared, mark));
                        std::thread::spawn(move || drop(clone)).join().unwrap();
                        if held.len() > 16 {
                            let (shared, mark) = held.swap_remove(round as usize % 16);
                            assert_eq!(shared[..], mark[..]);
                        }
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|t| t.join().unwrap());
    }

    /// The test has a pool of its own, because the process's pool is shared with the other tests.
    #[test]
    fn the_pool_is_bounded_and_makes_room_for_other_sizes() {
        let mut pool = BlockPool {
            classes: [const { Vec::new() }; CLASSES],
            bytes: 0,
            most: POOL_BYTES,
        };
        let sum = |pool: &BlockPool| -> usize {
            let blocks = pool.classes.iter().flatten();
            blocks.map(|block| block.layout.size()).sum()
        };
        for _ in 0..POOL_BYTES / 4096 + 100 {
            pool.give(0, Arc::new(Block::new(4096).unwrap()));
        }
        assert_eq!((sum(&pool), pool.bytes), (POOL_BYTES, POOL_BYTES));
        for class in [10, 1].repeat(100) {
            pool.give(class, Arc::new(Block::new(4096 << class).unwrap()));
            assert!(sum(&pool) == pool.bytes && pool.bytes <= POOL_BYTES);
        }
        assert!(pool.classes[10].len() >= 2 && pool.classes[1].len() >= 100);
        assert_eq!(pool.take(1).unwrap().layout.size(), 8192);
        assert!(pool.take(8).is_none());
        assert_eq!(sum(&pool), pool.bytes);
    }
}
