//! Frontends: virtio-blk and its transports, vhost-user, NBD, TCMU. Independent of KVM and of the store, and generic over
//! [`backend::Backend`]. `backend` is the crate `walvisor-block`, so that a program needs to depend on this crate alone.
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
//! virtio-blk over MMIO and PCI is always there. `vhost-user`, `nbd`, `tls` (NBD over TLS, which brings rustls), `scsi` and
//! `tcmu` are features, all on by default. A program that needs none of them sets `default-features = false`.

// What only some front-ends use is built without them too.
#![cfg_attr(
    not(all(feature = "nbd", feature = "tcmu", feature = "vhost-user")),
    allow(dead_code, unused_imports)
)]

pub mod block;
pub mod control;
pub mod event_loop;
pub mod interrupt;
mod latency;
pub mod listen;
mod memory;
mod metrics;
#[cfg(feature = "nbd")]
pub mod nbd;
#[cfg(feature = "scsi")]
pub mod scsi;
mod status;
#[cfg(feature = "tcmu")]
pub mod tcmu;
pub mod throttle;
pub mod transport;
#[cfg(feature = "vhost-user")]
pub mod vhost_user;

#[doc(inline)]
pub use walvisor_block as backend;
// Their types are in this API, so a program takes them from here, in the same version.
pub use {virtio_queue, vm_memory, vmm_sys_util};
