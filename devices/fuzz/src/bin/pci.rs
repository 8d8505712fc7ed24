//! The target `pci` for libFuzzer.
#![no_main]

use libfuzzer_sys::fuzz_target;
use walvisor_devices_fuzz::bounded::DeviceBounds;
use walvisor_devices_fuzz::pci;

#[global_allocator]
static ALLOCATOR: DeviceBounds = DeviceBounds {};

fuzz_target!(|input: &[u8]| pci::run(input));
