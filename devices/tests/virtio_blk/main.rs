//! virtio-blk from the driver's side: real rings in real guest memory, and every test over each
//! transport.

#[macro_use]
mod driver;

mod cache_mode;
mod control;
mod event_index;
mod features;
#[expect(dead_code, reason = "some of it is for virtio-scsi alone")]
mod gate;
mod guest_cases;
mod hostile;
mod lifecycle;
mod mmio;
mod msix;
mod negotiation;
mod pci;
mod requests;
mod ring_reset;
