//! Any CDBs with any data, several commands at the same time. Each command ends with a status that
//! the standards define, changes only what it may, and needs no more memory than the disk has.
//!
//! ```text
//!   input ──▶ harness.rs ── Task::new, next, ended ──▶ server over a RAM disk
//!                  └─ after each command: status, sense, data buffer, and the disk if nothing may have changed it
//! ```
//!
//! Seeds are in `corpus/cdb`. Build and run it as `requests` is.
#![no_main]

mod harness;

use libfuzzer_sys::fuzz_target;
use walvisor_devices_fuzz::bounded::DeviceBounds;

#[global_allocator]
static ALLOCATOR: DeviceBounds = DeviceBounds {};

fuzz_target!(|input: &[u8]| harness::run(input));
