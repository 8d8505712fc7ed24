//! An allocator that counts what is requested from the system's.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

struct CountingAllocator;

#[global_allocator]
static HEAP: CountingAllocator = CountingAllocator;

static CALLS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static BYTES: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
    static LONGEST: Cell<usize> = const { Cell::new(0) };
}

/// The heap bytes of an allocation: glibc puts a word before it and rounds to 16 bytes.
fn footprint(size: usize) -> isize {
    (size + 8).next_multiple_of(16).max(32) as isize
}

fn count(bytes: isize) {
    let sum = BYTES.get() + bytes;
    BYTES.set(sum);
    MOST.set(MOST.get().max(sum));
}

fn note(size: usize) {
    LONGEST.with(|longest| longest.set(longest.get().max(size)));
}

/// Allocations of the whole process so far; a reallocation counts again.
#[allow(dead_code)]
pub fn calls() -> u64 {
    CALLS.load(Ordering::Relaxed)
}

/// The longest allocation, in bytes, that this thread asked for since the last call.
#[allow(dead_code)]
pub fn take_longest() -> usize {
    LONGEST.take()
}

/// Bytes of heap that this thread has allocated and not freed.
#[allow(dead_code)]
pub fn bytes() -> isize {
    BYTES.get()
}

/// How many bytes of heap this thread has had at once during this, more than before.
#[allow(dead_code)]
pub fn most_during(work: impl FnOnce()) -> isize {
    let before = BYTES.get();
    MOST.set(before);
    work();
    MOST.get() - before
}

// SAFETY: the system's allocator does all the work; counting touches no memory of it and allocates
// none.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        count(footprint(layout.size()));
        note(layout.size());
        // SAFETY: the caller's promises are those that `System` requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        count(footprint(layout.size()));
        note(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        count(footprint(size) - footprint(layout.size()));
        note(size);
        // SAFETY: as above.
        unsafe { System.realloc(pointer, layout, size) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-footprint(layout.size()));
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}
