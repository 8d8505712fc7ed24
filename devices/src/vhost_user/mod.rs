//! virtio-blk for other programs: the back-end of the vhost-user protocol (QEMU's `docs/interop/vhost-user.rst`).
//!
//! ```text
//!  front-end ──messages──▶ a thread a socket ──▶ Session ──▶ VirtioBlock ──▶ block::Worker, one a queue
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
mod owner;
mod server;
mod session;
mod signal;
mod vring;

pub use server::{Server, Service};

/// Why a connection ends.
#[derive(Debug)]
enum Ended {
    /// The front-end has left, or the server stops.
    Gone,
    /// The front-end does what it must not: told in one line.
    Refused(String),
    /// The system refuses.
    System(std::io::Error),
}

impl From<std::io::Error> for Ended {
    fn from(error: std::io::Error) -> Self {
        Self::System(error)
    }
}

impl From<rustix::io::Errno> for Ended {
    fn from(error: rustix::io::Errno) -> Self {
        Self::System(error.into())
    }
}

/// The outcome of something that a front-end wants.
type Outcome<T> = Result<T, Ended>;

/// The front-end's fault.
fn refused(what: impl Into<String>) -> Ended {
    Ended::Refused(what.into())
}
