//! The target `tcmu_ring` for libFuzzer.
#![no_main]

use libfuzzer_sys::fuzz_target;
use walvisor_devices_fuzz::bounded::DeviceBounds;
use walvisor_devices_fuzz::tcmu_ring;

#[global_allocator]
static ALLOCATOR: DeviceBounds = DeviceBounds {};

fuzz_target!(|input: &[u8]| tcmu_ring::run(input));
