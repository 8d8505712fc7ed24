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

use libfuzzer_sys::fuzz_target;
use walvisor_devices_fuzz::bounded::DeviceBounds;

#[global_allocator]
static ALLOCATOR: DeviceBounds = DeviceBounds {};

fuzz_target!(|input: &[u8]| harness::run(input));
