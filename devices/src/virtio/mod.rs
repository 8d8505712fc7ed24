//! What the virtio devices have in common: features, queues and their threads, and what a transport
//! asks of them (virtio 1.2, 2).
//!
//! ```text
//!   transport ─▶ VirtioDevice ── start_queue ─▶ QueueHandle      the owner's side
//!                                                   │
//!           a thread of a WorkerPool: worker ── ActiveQueue ── Virtqueue ── split_chain      the rings
//!                                                    └── DriverPort                          doorbell, interrupt
//! ```

mod active_queue;
mod device;
mod driver_port;
mod features;
mod halves;
mod pool;
mod tracker;
mod virtqueue;

pub use device::VirtioDevice;
pub use pool::{Starter, WorkerPool};

pub(crate) use active_queue::ActiveQueue;
pub(crate) use device::{DeviceType, QueueStart, read_space};
pub(crate) use features::Features;
pub(crate) use halves::{
    GuestRange, MemoryFault, ReadableBytes, split_chain, split_ranges, write_to_driver,
};
pub(crate) use pool::{QueueHandle, QueueKind};
pub(crate) use tracker::{Tracker, UsedElement};
pub(crate) use virtqueue::{Chain, NextChain, QueueError, QueueSetup, UsedBatch};
