//! virtio-blk from the driver's side: real rings in real guest memory, and every test over each
//! transport.

#[macro_use]
mod driver;

mod cache_mode;
mod control;
mod event_index;
mod features;
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
