//! Any chains on the control, event and request queues of a SCSI target, while its owner pauses
//! units and announces capacities. What can be answered is answered once and changes only the
//! buffers that its driver gave for it, an I_T NEXUS RESET ends all commands also of a paused unit,
//! and a reset makes the target work again after any contents of the rings.
//!
//! ```text
//!   input ──▶ harness.rs ── registers, rings ──▶ target over two RAM disks
//!                  └─ guest memory ──▶ model.rs: which chains are answered, and where
//! ```
//!
//! What commands do to a disk is the subject of `cdb`. Seeds are in `corpus/virtio_scsi`. Build and
//! run it as `requests` is.
#![no_main]

mod harness;
mod model;

use libfuzzer_sys::fuzz_target;
use walvisor_devices_fuzz::bounded::DeviceBounds;

#[global_allocator]
static ALLOCATOR: DeviceBounds = DeviceBounds {};

fuzz_target!(|input: &[u8]| harness::run(input));
