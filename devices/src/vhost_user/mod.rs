//! virtio-blk for other programs: the back-end of the vhost-user protocol (QEMU's `docs/interop/vhost-user.rst`).
//!
//! ```text
//!  front-end ──messages──▶ a thread a listener ▶ Session ──▶ VirtioBlock ──▶ block::Worker, one a queue
//!   (a VMM)   descriptors     message.rs        memory, rings                │         ▲
//!       └── rings and buffers in shared memory ◀───────────────────────────┴── kick, call
//! ```
//!
//! Why without the crates `vhost` and `vhost-user-backend` (0.18 and 0.24): the second brings threads and rings of its
//! own and answers neither GET_INFLIGHT_FD nor SET_INFLIGHT_FD; here the queue worker is the one of the other transports,
//! so batches, the single store of the used index and EVENT_IDX are the same code everywhere. The first refuses the memory
//! table of user-mode Linux, whose message is longer than its table, takes a message that comes in two pieces for a bad
//! one, and cannot be interrupted in the middle of one.
//!
//! A front-end is as little trusted as a guest. What it sends is checked before it is used, its memory is mapped only as
//! far as the files behind it reach, and whatever it does wrong ends its own connection.

mod cut_off;
mod inflight;
mod memory;
mod message;
mod outcome;
mod owner;
mod server;
mod session;
mod signal;
mod vring;

pub use server::{Server, Service};
