//! The target `control` for libFuzzer.
#![no_main]

use libfuzzer_sys::fuzz_target;
use walvisor_fuzz::{Bounds, run};

#[global_allocator]
static ALLOCATOR: Bounds = Bounds {};

fuzz_target!(|input: &[u8]| run(input));
