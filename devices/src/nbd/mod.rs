//! The disk for NBD clients: fixed newstyle handshake, structured and extended replies (the protocol's `doc/proto.md`).
//!
//! ```text
//!   Server     a thread a listener: accept                                    server.rs
//!     ├─────   a thread a client that chooses: TLS, export, kind of replies   handshake.rs, tls.rs
//!     └ Pool   a thread a processor: an event loop over sockets and ports     worker.rs
//!         Connection                                                          connection.rs
//!           incoming ─▶ requests ─▶ BackendQueue ─▶ outgoing                  incoming.rs, request.rs, outgoing.rs
//!           Wire   the socket, bare or under TLS                              wire.rs
//!   Mapper     a thread an export that is asked for its holes                 mapper.rs
//! ```
//! Requests of a connection run beside each other and are answered as they end. What a connection may keep in memory is
//! bounded: above the bound nothing more is read from its socket. Nothing is shared between connections but the disk,
//! and a FLUSH covers the completed writes of all of them (CAN_MULTI_CONN).
//!
//! A write is answered when it outlives this process ([`Answer`]), since a client that connects again does not repeat it.
//! A FLUSH waits for more, so a write with FUA asks for nothing beside its FLUSH.
//!
//! TLS sits between the socket and both halves of a connection: a socket never blocks, and rustls never touches one, so
//! the loops are the same. The one difference: bytes may be decrypted already when no byte is left in the socket, so that
//! epoll would not tell of them.
//!
//! Not from a crate: of those on crates.io `nbd` calls itself a first sketch and serves one request at a time from
//! anything that can seek, without structured replies, block status or FUA, and `nbdkit` writes plugins for another
//! server. The codec is small, and pipelining, back-pressure and group commit are what this door is for.

mod connection;
mod desk;
mod handshake;
mod inbox;
mod incoming;
mod mapper;
mod outgoing;
mod protocol;
mod request;
mod server;
mod tls;
mod wire;
mod worker;

use std::io;
use std::sync::Arc;

use mapper::Mapper;

use crate::backend::{Answer, Backend, SECTOR_SIZE};
use crate::block::BlockMetrics;
use crate::control::{DeviceControl, Gate};
use crate::throttle::Throttle;

pub use protocol::DEFAULT_PORT;
pub use server::{Listener, MAX_CONNECTIONS, Server, Service};
pub use tls::{Tls, TlsConfig, TlsError};

/// A disk under a name that clients ask for.
pub struct Export {
    name: String,
    description: String,
    backend: Arc<dyn Backend>,
    metrics: Arc<BlockMetrics>,
    gate: Arc<Gate>,
    throttle: Arc<Throttle>,
    answer: Answer,
    mapper: Mapper,
}

impl Export {
    /// Longest name, and longest description, in bytes (the protocol's limit on strings).
    pub const MAX_NAME_BYTES: usize = 4096;

    /// Presents `backend` as `name`; `description` is for people. Both are cut to [`MAX_NAME_BYTES`](Self::MAX_NAME_BYTES).
    pub fn new(name: &str, description: &str, backend: Arc<dyn Backend>) -> Self {
        let cut = |text: &str| text[..text.floor_char_boundary(Self::MAX_NAME_BYTES)].to_owned();
        Self {
            name: cut(name),
            description: cut(description),
            backend,
            metrics: Arc::new(BlockMetrics::of_queues(1)),
            gate: Arc::default(),
            throttle: Arc::default(),
            answer: Answer::default(),
            mapper: Mapper::default(),
        }
    }

    /// The same, whose clients' writes are answered so.
    pub fn answering(self, answer: Answer) -> Self {
        Self { answer, ..self }
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What clients have asked for so far.
    pub fn metrics(&self) -> Arc<BlockMetrics> {
        Arc::clone(&self.metrics)
    }

    /// The limits of the export, for all of its clients together.
    pub fn throttle(&self) -> Arc<Throttle> {
        Arc::clone(&self.throttle)
    }

    /// The export in use, for its owner.
    pub fn control(&self) -> Arc<dyn DeviceControl> {
        Arc::new(ExportControl {
            gate: Arc::clone(&self.gate),
            backend: Arc::clone(&self.backend),
        })
    }

    /// Bytes of the disk.
    fn size(&self) -> u64 {
        self.backend.sectors().saturating_mul(SECTOR_SIZE)
    }

    /// The transmission flags: what the disk really does.
    fn flags(&self, structured: bool) -> u16 {
        use protocol::transmission as flag;
        let can = self.backend.capabilities();
        let when = |condition: bool, flags: u16| if condition { flags } else { 0 };
        // A FLUSH waits for the newest record of the disk, whoever wrote it.
        flag::HAS_FLAGS
            | flag::CAN_MULTI_CONN
            | when(can.read_only, flag::READ_ONLY)
            | when(can.flush, flag::SEND_FLUSH | flag::SEND_FUA)
            | when(can.discard, flag::SEND_TRIM)
            // Zeroes are a record without payload, so never slower than a write.
            | when(can.write_zeroes, flag::SEND_WRITE_ZEROES | flag::SEND_FAST_ZERO)
            // A read is answered as one chunk anyway.
            | when(structured, flag::SEND_DF)
    }
}

/// An export as its owner sees it.
struct ExportControl {
    gate: Arc<Gate>,
    backend: Arc<dyn Backend>,
}

impl DeviceControl for ExportControl {
    /// The protocol has no word for it: who connects from now on learns the size, and others reach all of it too.
    fn capacity_changed(&self) {}

    /// Clients are told of FLUSH whatever the mode, so they flush where they have to.
    fn set_write_cache(&self, on: bool) -> bool {
        if self.backend.capabilities().write_cache_toggle {
            self.backend.set_write_cache(on);
        }
        self.backend.write_cache()
    }

    fn pause(&self) -> io::Result<()> {
        self.gate.close();
        Ok(())
    }

    fn resume(&self) {
        self.gate.open();
    }
}
