#![doc = include_str!("../README.md")]
//!
//! The terms are those of `docs/glossary.md` in the repository.
//!
//! # Where things are
//!
//! ```text
//!  driver ──registers──▶ transport::{MmioTransport, PciTransport}      vCPU thread, never blocks on I/O
//!     │                     └─ one DeviceState: status, features, queues, reset
//!     └─doorbell (eventfd)─▶ queue workers, on a few shared threads      virtio/pool.rs, block/worker.rs
//!                               take chains ─▶ parse ─▶ BackendQueue    virtio/virtqueue.rs, block/request.rs
//!                               publish used index once ─▶ Interrupt    interrupt.rs
//!
//!  passt, a tap device ──frames──▶ queue workers of a network device        net/
//!  the same driver, of a SCSI target ─▶ queue workers ─▶ SCSI tasks          virtio_scsi/, scsi/
//!  vhost-user front-end ──socket──▶ a thread per listener ─▶ queue workers  vhost_user/
//!  NBD clients ──sockets──▶ a few shared threads ─▶ BackendQueue            nbd/
//!  the kernel's SCSI target ──UIO ring──▶ a thread per disk ─▶ SCSI tasks   tcmu/, scsi/
//!  the kernel's ublk ──io_urings──▶ a few shared threads ─▶ BackendQueue    ublk/
//! ```
//! "A few" is one per two processors. Each of these threads waits in an [`event_loop`].
//!
//! Write a [`backend::SyncBackend`] or a [`backend::Backend`], make a [`block::VirtioBlock`] over
//! it, and give that to a transport. The program passes the guest's memory and its register
//! accesses to the transport, and gets interrupts through an eventfd (MMIO) or an
//! [`interrupt::MsiRouter`] (PCI).

// Code that only some front-ends use is built even without them.
#![cfg_attr(
    not(all(
        feature = "nbd",
        feature = "tcmu",
        feature = "ublk",
        feature = "vhost-user"
    )),
    allow(dead_code, unused_imports)
)]

pub mod block;
pub mod control;
pub mod event_loop;
pub mod interrupt;
mod latency;
pub mod listen;
mod look_up;
mod memory;
mod metrics;
#[cfg(feature = "nbd")]
pub mod nbd;
pub mod net;
mod reactor;
#[cfg(feature = "scsi")]
pub mod scsi;
mod status;
#[cfg(feature = "tcmu")]
pub mod tcmu;
pub mod throttle;
pub mod transport;
#[cfg(feature = "ublk")]
pub mod ublk;
#[cfg(feature = "vhost-user")]
pub mod vhost_user;
mod virtio;
#[cfg(feature = "scsi")]
pub mod virtio_scsi;

#[doc(inline)]
pub use walvisor_block as backend;
// This API has types of these crates; a program takes them from here to get the same version.
pub use {virtio_bindings, virtio_queue, vm_memory, vmm_sys_util};
