//! Recovery on any bytes: it gives an error or a consistent store, and neither panics nor loops nor
//! believes a length.
//!
//! `make fuzz` builds it on stable Rust and runs it for a while on the seeds in `corpus/recover`,
//! which `WALVISOR_WRITE_CORPUS=1 cargo test -p walvisor-storage real_logs` makes anew from real
//! logs. An input that fails is left there too, and becomes a test (`the_corpus_recovers`); given as
//! the only argument it is run alone.
#![no_main]

use std::alloc::{GlobalAlloc, Layout, System};

use libfuzzer_sys::fuzz_target;

/// Longest allocation: a recovery reads segments through a window of 1 MiB, and those of inputs are
/// 64 KiB.
const LONGEST: usize = 4 << 20;

/// The system's allocator, refusing what an unchecked length would ask for.
struct BoundedAllocator;

// SAFETY: every call is passed on to the system's allocator, whose promises these are.
unsafe impl GlobalAlloc for BoundedAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        refuse_long(layout.size());
        // SAFETY: the caller keeps the rules of this function, which are those of the called one.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        refuse_long(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        refuse_long(size);
        // SAFETY: as above.
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(old, layout) }
    }
}

/// Ends the process: libFuzzer then keeps the input.
fn refuse_long(size: usize) {
    if size > LONGEST {
        eprintln!("an allocation of {size} bytes: more than {LONGEST}");
        std::process::abort();
    }
}

#[global_allocator]
static ALLOCATOR: BoundedAllocator = BoundedAllocator;

fuzz_target!(|input: &[u8]| walvisor_storage::fuzzing::recover_input(input));
