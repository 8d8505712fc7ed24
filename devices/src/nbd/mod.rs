//! An NBD server: fixed newstyle handshake, structured and extended replies (the protocol's
//! `doc/proto.md`).
//!
//! ```text
//!   Server     a thread per listener: accept                                  server.rs
//!     ├─────   a thread per client in the handshake: TLS, export, framing     handshake.rs, tls.rs
//!     └ Pool   a thread per two processors, and one per connection to a
//!              disk that blocks: a reactor over sessions, one for each disk   disk_session.rs
//!         Connection                                                          connection.rs
//!           RequestReader ─▶ requests ─▶ BackendQueue ─▶ ReplyQueue           request_reader.rs, request.rs, reply_queue.rs
//!           Wire   the socket, bare or under TLS                              wire.rs, tls_session.rs
//!   LookUpThread   a thread per export whose extents a client asks for        ../look_up.rs
//! ```
//! Requests of a connection run concurrently, and each is answered as it ends. The memory of a
//! connection is bounded: above the bound the worker reads nothing more from its socket.
//! Connections share nothing but the disk, and a FLUSH on one covers the completed writes of all of
//! them (CAN_MULTI_CONN).
//!
//! A write is answered once it would survive the end of this process
//! ([`Answer`](crate::backend::Answer)), since a client that reconnects does not repeat it. A FLUSH
//! makes it durable, so a write with FUA needs only its FLUSH.
//!
//! TLS sits between the socket and both halves of a connection. The socket never blocks and rustls
//! waits for nothing, so the event loop is the same with and without TLS. The one difference:
//! decrypted bytes may be left when the socket is empty, and the event loop does not report those.
//!
//! Why no crate from crates.io: `nbd` calls itself a first sketch. It serves one request at a time
//! from anything that can seek, without structured replies, block status or FUA. `nbdkit` is for
//! plugins of another server. The codec is small, and pipelining, back-pressure and group commit
//! are the reason to have this server.
//!
//! ```
//! use std::io::Read;
//! use std::os::unix::net::{UnixListener, UnixStream};
//! use std::sync::Arc;
//! use walvisor_devices::backend::ram::RamDisk;
//! use walvisor_devices::nbd::{Export, Listener, Server, Service, Tls};
//!
//! let place = tempfile::tempdir()?;
//! let socket = place.path().join("disk.sock");
//! let server = Server::start(vec![Service {
//!     listener: Listener::Unix(UnixListener::bind(&socket)?),
//!     exports: vec![Export::new("disk", "a RAM disk", Arc::new(RamDisk::new(2048)))],
//!     tls: Tls::Off,
//! }])?;
//! let mut greeting = [0; 8];
//! UnixStream::connect(&socket)?.read_exact(&mut greeting)?;
//! assert_eq!(&greeting, b"NBDMAGIC");
//! drop(server);
//! # std::io::Result::Ok(())
//! ```

mod connection;
mod connection_end;
mod disk_session;
mod export;
mod extent_query;
mod handshake;
mod protocol;
mod reply_queue;
mod request;
mod request_reader;
mod server;
mod slots;
#[cfg_attr(not(feature = "tls"), path = "no_tls.rs")]
mod tls;
mod tls_session;
mod wire;

pub use export::Export;
pub use protocol::DEFAULT_PORT;
pub use server::{Listener, Server, Service};
pub use slots::MAX_CONNECTIONS;
pub use tls::TlsConfig;
#[cfg(feature = "tls")]
pub use tls::TlsError;
pub use wire::Tls;
