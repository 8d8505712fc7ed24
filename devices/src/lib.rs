//! Frontends: virtio-blk and its transports, vhost-user, NBD. Knows no KVM. Generic over the [`backend::Backend`] trait.
//!
//! ```text
//!  driver ──registers──▶ transport::{MmioTransport, PciTransport}      vCPU thread, never blocks on I/O
//!     │                     └─ one DeviceState: status, features, queues, reset
//!     └─doorbell (eventfd)─▶ queue worker, one thread a queue           block/worker.rs
//!                               take chains ─▶ parse ─▶ BackendQueue    block/{virtqueue,request}.rs
//!                               publish used index once ─▶ Interrupt    interrupt.rs
//!
//!  vhost-user front-end ──socket──▶ a thread a socket ─▶ queue workers   vhost_user/
//!  NBD client ──socket──▶ a thread a connection ─▶ BackendQueue            nbd/
//! ```

pub mod backend;
pub mod block;
pub mod control;
pub mod interrupt;
pub mod nbd;
mod status;
pub mod throttle;
pub mod transport;
pub mod vhost_user;
