//! Any requests in any descriptor chains, over a real queue. The device changes its disk and guest
//! memory exactly as a model does, and a reset makes it work again after any contents of the rings.
//!
//! ```text
//!   input ──▶ harness.rs ── registers, rings ──▶ device over a RAM disk     the results
//!                  └─ guest memory ──▶ model.rs ──────────────────────────▶ must be equal
//! ```
//!
//! `make fuzz` builds this target on stable Rust and runs it for a while on the seeds in
//! `corpus/requests`. libFuzzer leaves a failing input in `devices/fuzz/artifacts`; with that file
//! as its only argument the target runs that input alone. libFuzzer's `-timeout` finds hangs.
#![no_main]

mod harness;
mod model;

use libfuzzer_sys::fuzz_target;
use walvisor_devices_fuzz::bounded::DeviceBounds;

#[global_allocator]
static ALLOCATOR: DeviceBounds = DeviceBounds {};

fuzz_target!(|input: &[u8]| harness::run(input));
