//! The disk for NBD clients: fixed newstyle handshake, structured and extended replies (the protocol's `doc/proto.md`).
//!
//! ```text
//!   Server     a thread a listener: accept                                    server.rs
//!     ├─────   a thread a client that chooses: TLS, export, kind of replies   handshake.rs, tls.rs
//!     └ Pool   a thread for two processors, and one for each connection to a
//!              disk that blocks: an event loop over sockets and disks         worker.rs, inbox.rs, desk.rs
//!         Connection                                                          connection.rs
//!           incoming ─▶ requests ─▶ BackendQueue ─▶ outgoing                  incoming.rs, request.rs, outgoing.rs
//!           Wire   the socket, bare or under TLS                              wire.rs
//!   Mapper     a thread an export that is asked for its holes                 mapper.rs
//! ```
//! Requests of a connection run beside each other and are answered as they end. What a connection may keep in memory is
//! bounded: above the bound nothing more is read from its socket. Nothing is shared between connections but the disk,
//! and a FLUSH covers the completed writes of all of them (CAN_MULTI_CONN).
//!
//! A write is answered when it outlives this process ([`Answer`](crate::backend::Answer)), since a client that connects again does not repeat it.
//! A FLUSH waits for more, so a write with FUA asks for nothing beside its FLUSH.
//!
//! TLS sits between the socket and both halves of a connection: a socket never blocks, and rustls never touches one, so
//! the loops are the same. The one difference: bytes may be decrypted already when no byte is left in the socket, so that
//! the event loop would not tell of them.
//!
//! Not from a crate: of those on crates.io `nbd` calls itself a first sketch and serves one request at a time from
//! anything that can seek, without structured replies, block status or FUA, and `nbdkit` writes plugins for another
//! server. The codec is small, and pipelining, back-pressure and group commit are what this door is for.

mod connection;
mod desk;
mod ended;
mod export;
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

pub use export::Export;
pub use protocol::DEFAULT_PORT;
pub use server::{Listener, MAX_CONNECTIONS, Server, Service};
pub use tls::{Tls, TlsConfig, TlsError};
