//! virtio-blk and virtio-scsi for other programs: the back-end of the vhost-user protocol (QEMU's
//! `docs/interop/vhost-user.rst`).
//!
//! ```text
//!  front-end ──messages──▶ thread per listener ▶ FrontEndSession ──▶ VirtioBlock ──▶ worker per queue
//!   (a VMM)   descriptors     message.rs           memory, rings                      │         ▲
//!       └── rings and buffers in shared memory ◀──────────────────────────────────────┴── kick, call
//! ```
//!
//! Why not the crates `vhost` and `vhost-user-backend`: see the [crate's
//! page](crate#why-not-vhost-user-backend).
//!
//! A front-end is trusted no more than a guest. Its messages are checked before use, its memory is
//! mapped only as far as the files behind it reach, and a fault of a front-end ends only its own
//! connection.
//!
//! ```
//! use std::os::unix::net::UnixListener;
//! use std::sync::Arc;
//! use walvisor_devices::backend::ram::RamDisk;
//! use walvisor_devices::block::{BlockConfig, VirtioBlock};
//! use walvisor_devices::vhost_user::{Server, Service};
//!
//! let place = tempfile::tempdir()?;
//! let listener = UnixListener::bind(place.path().join("disk.sock"))?;
//! let device = VirtioBlock::new(Arc::new(RamDisk::new(2048)), BlockConfig::default())?;
//! let server = Server::start(vec![Service::new(listener, device, "disk")?])?;
//! server.stop();
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod inflight;
mod memory;
mod message;
mod outcome;
mod owner;
mod server;
mod session;
mod sigbus;
mod signal;
mod vring;

pub use server::{Server, Service};
pub use sigbus::survive_truncated_memory;
