//! A bound on what a driver can make the device allocate.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// The system's allocator, which aborts on what an unchecked length would ask for: one allocation
/// of more than `LONGEST` bytes, or more than `MOST` bytes at a time.
pub struct BoundedAllocator<const LONGEST: usize, const MOST: usize>;

/// Bounds for a device over a disk of 32 KiB: no request may need more memory. A RAM disk's chunk,
/// the inputs and the copies of guest memory are 64 KiB; queues have 16 descriptors.
pub type DeviceBounds = BoundedAllocator<{ 128 << 10 }, { 2 << 20 }>;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);
/// What was allocated before the first input.
static BEFORE: AtomicUsize = AtomicUsize::new(0);
/// A panic has taken more than the bounds, so that they mean nothing.
static PANICKED: AtomicBool = AtomicBool::new(false);

/// Lets what is allocated now not count.
pub(crate) fn begin() {
    BEFORE.store(ALLOCATED.load(Ordering::Relaxed), Ordering::Relaxed);
}

// SAFETY: every call is passed on to the system's allocator, which keeps the promises of this
// trait.
unsafe impl<const LONGEST: usize, const MOST: usize> GlobalAlloc
    for BoundedAllocator<LONGEST, MOST>
{
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::account(layout.size(), 0);
        // SAFETY: the caller keeps the rules of this function, which are those of the called one.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        Self::account(layout.size(), 0);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        Self::account(size, layout.size());
        // SAFETY: as above.
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        Self::account(0, layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(old, layout) }
    }
}

impl<const LONGEST: usize, const MOST: usize> BoundedAllocator<LONGEST, MOST> {
    /// Aborts the process if an allocation exceeds a bound: libFuzzer then keeps the input.
    fn account(more: usize, less: usize) {
        let before = ALLOCATED.fetch_add(more, Ordering::Relaxed);
        ALLOCATED.fetch_sub(less, Ordering::Relaxed);
        let before = before.saturating_sub(BEFORE.load(Ordering::Relaxed));
        if more <= LONGEST && before <= MOST {
            return;
        }
        // A panic's backtrace takes more, and keeps some of it while the test tells of it.
        if std::thread::panicking() {
            PANICKED.store(true, Ordering::Relaxed);
        }
        if !PANICKED.load(Ordering::Relaxed) {
            eprintln!(
                "an allocation of {more} bytes above {before}: more than {LONGEST} or {MOST}"
            );
            std::process::abort();
        }
    }
}
