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
//!
//! # In a program of your own
//!
//! Write a [`backend::Backend`], make a [`block::VirtioBlock`] over it, and give that to a transport: the program passes
//! on register accesses and the guest's memory, and gets its interrupts through an eventfd (MMIO) or an
//! [`interrupt::MsiRouter`] (PCI). Each queue has a worker thread of the device's own; the backend may do its part in any
//! thread or event loop. `examples/embed` does it in one of about the smallest kind: `cargo run --example embed`.
//!
//! # What it takes of `walvisor-storage`
//!
//! The crate is always built with it, engine and io_uring included; no feature leaves it out. For its own work it takes
//! the types of requests ([`backend::Operation`], [`backend::Completion`], [`backend::Failure`], [`backend::Buffer`],
//! [`backend::Extent`], [`backend::LogCounters`] and two constants) and one call that shortens the time slices of
//! worker threads. `Backend` for `walvisor_storage::Disk` is the only code here that reaches the store; [`backend::raw`]
//! takes the locked image and its extents of it, and has an io_uring of its own. A program with a backend of its own opens
//! no log, starts no thread of the store and makes no io_uring.

pub mod backend;
pub mod block;
pub mod control;
pub mod interrupt;
pub mod nbd;
mod status;
pub mod throttle;
pub mod transport;
pub mod vhost_user;
