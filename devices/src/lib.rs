//! Frontends: virtio-blk and its transports, vhost-user, NBD, TCMU. Independent of KVM, and generic over
//! [`backend::Backend`].
//!
//! ```text
//!  driver ──registers──▶ transport::{MmioTransport, PciTransport}      vCPU thread, never blocks on I/O
//!     │                     └─ one DeviceState: status, features, queues, reset
//!     └─doorbell (eventfd)─▶ queue workers, at a few shared threads      block/{pool,worker}.rs
//!                               take chains ─▶ parse ─▶ BackendQueue    block/{virtqueue,request}.rs
//!                               publish used index once ─▶ Interrupt    interrupt.rs
//!
//!  vhost-user front-end ──socket──▶ a thread a listener ─▶ queue workers  vhost_user/
//!  NBD clients ──sockets──▶ a few shared threads ─▶ BackendQueue            nbd/
//!  the kernel's SCSI target ──UIO ring──▶ a thread a disk ─▶ SCSI tasks     tcmu/, scsi/
//! ```
//! "A few" is one for two processors. Each of these threads waits in an [`event_loop`].
//!
//! # In a program of your own
//!
//! Write a [`backend::Backend`], make a [`block::VirtioBlock`] over it, and give that to a transport. The program
//! passes register accesses and the guest's memory to the transport, and gets its interrupts through an eventfd (MMIO)
//! or an [`interrupt::MsiRouter`] (PCI). The queues are served by threads of the device's own, or of a
//! [`block::WorkerPool`] that devices share; the backend may do its part in any thread or event loop. `examples/embed`
//! is a small example: `cargo run --example embed`.
//!
//! # Features
//!
//! Both are on by default, and both include the engine of `walvisor-storage`:
//! - `wal`: `Backend` for `walvisor_storage::Disk`, a disk with a write-ahead log;
//! - `raw`: `backend::raw`, a raw image through io_uring.
//!
//! A program with a backend of its own needs neither. With `default-features = false` this crate uses only these parts
//! of `walvisor-storage`: the types of requests ([`backend::Operation`], [`backend::Completion`],
//! [`backend::Failure`], [`backend::Buffer`], [`backend::Extent`], [`backend::LogCounters`]), two constants, and one
//! call that shortens the time slices of worker threads. No log and no io_uring are built.

pub mod backend;
pub mod block;
pub mod control;
pub mod event_loop;
pub mod interrupt;
mod latency;
pub mod listen;
mod memory;
mod metrics;
pub mod nbd;
pub mod scsi;
mod status;
pub mod tcmu;
pub mod throttle;
pub mod transport;
pub mod vhost_user;
