//! Any requests in any descriptor chains, over a real queue: the device does to its disk and to guest memory what a model
//! does, byte for byte, and after the worst of rings a reset makes it work again.
//!
//! ```text
//!   input ──▶ harness.rs ── registers, rings ──▶ device over a RAM disk     what came of it
//!                  └─ guest memory ──▶ model.rs ──────────────────────────▶ is what should
//! ```
//!
//! `make fuzz` builds it on stable Rust and runs it for a while on the seeds in `corpus/requests`. An input that fails
//! is left in `devices/fuzz/artifacts`; given as the only argument it is run alone. A hang is found by libFuzzer's
//! `-timeout`.
#![no_main]

mod harness;
mod model;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use libfuzzer_sys::fuzz_target;

/// Longest allocation. The disk has 32 KiB, so no request may cost more; a RAM disk's chunk and the inputs are 64 KiB.
const LONGEST: usize = 128 << 10;
/// Most that may be allocated at a time. One request is in flight; the harness's own copies of memory count too.
const MOST: usize = 2 << 20;

/// The system's allocator, refusing what an unchecked length would ask for.
struct Bounded;

static ALLOCATED: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on to the system's allocator, whose promises these are.
unsafe impl GlobalAlloc for Bounded {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        account(layout.size(), 0);
        // SAFETY: the caller keeps the rules of this function, which are those of the called one.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        account(layout.size(), 0);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        account(size, layout.size());
        // SAFETY: as above.
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        account(0, layout.size());
        // SAFETY: as above.
        unsafe { System.dealloc(old, layout) }
    }
}

/// Ends the process if it is too much: libFuzzer then keeps the input.
fn account(more: usize, less: usize) {
    let before = ALLOCATED.fetch_add(more, Ordering::Relaxed);
    ALLOCATED.fetch_sub(less, Ordering::Relaxed);
    if more > LONGEST || before > MOST {
        eprintln!("an allocation of {more} bytes above {before}: more than {LONGEST} or {MOST}");
        std::process::abort();
    }
}

#[global_allocator]
static ALLOCATOR: Bounded = Bounded;

fuzz_target!(|input: &[u8]| harness::run(input));
