//! Frontends: virtio-blk and its transports. Knows no KVM. Generic over the [`backend::Backend`] trait.
//!
//! ```text
//!  driver ──registers──▶ transport::{MmioTransport, PciTransport}      vCPU thread, never blocks on I/O
//!     │                     └─ one DeviceState: status, features, queues, reset
//!     └─doorbell (eventfd)─▶ queue worker, one thread a queue           block/worker.rs
//!                               take chains ─▶ parse ─▶ BackendQueue    block/{virtqueue,request}.rs
//!                               publish used index once ─▶ Interrupt    interrupt.rs
//! ```

pub mod backend;
pub mod block;
pub mod interrupt;
mod status;
pub mod transport;
