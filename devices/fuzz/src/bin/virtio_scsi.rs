//! The target `virtio_scsi` for libFuzzer.
#![no_main]

use libfuzzer_sys::fuzz_target;
use walvisor_devices_fuzz::bounded::DeviceBounds;
use walvisor_devices_fuzz::virtio_scsi;

#[global_allocator]
static ALLOCATOR: DeviceBounds = DeviceBounds {};

fuzz_target!(|input: &[u8]| virtio_scsi::run(input));
