//! Frontends: virtio-blk and its transports, NBD. Knows no KVM. Generic over the [`backend::Backend`] trait.
//!
//! ```text
//!  driver ──registers──▶ transport::{MmioTransport, PciTransport}      vCPU thread, never blocks on I/O
//!     │                     └─ one DeviceState: status, features, queues, reset
//!     └─doorbell (eventfd)─▶ queue worker, one thread a queue           block/worker.rs
//!                               take chains ─▶ parse ─▶ BackendQueue    block/{virtqueue,request}.rs
//!                               publish used index once ─▶ Interrupt    interrupt.rs
//!
//!  NBD client ──socket──▶ a thread a connection ─▶ BackendQueue            nbd/
//! ```

pub mod backend;
pub mod block;
pub mod interrupt;
pub mod nbd;
mod status;
pub mod transport;
