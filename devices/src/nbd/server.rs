//! Listeners and handshakes. Each listener, and each client in the handshake, has a thread, and one
//! event stops them all. After the handshake a worker takes the connection.

use std::io;
use std::net::{IpAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::net::sockopt;

use super::connection::Connection;
use super::connection_end::{ConnectionEnd, report};
use super::disk_session::Pool;
use super::export::{Export, Exports};
use super::handshake::negotiate;
use super::slots::{ClientSlots, HandshakeSlot};
use super::wire::{Tls, Wire};
use crate::listen::{Stop, Threads, accept_each};

/// Why a client that has chosen an export is not served.
const FULL: &str = "as many clients as one listener serves, 128, are connected";
/// A client on a TCP connection that says nothing is asked whether it is still there.
const KEEPALIVE: Duration = Duration::from_secs(60);
/// A client is gone if it acknowledges no byte for so long.
const UNACKNOWLEDGED: Duration = Duration::from_secs(60);

/// The socket where clients connect.
pub enum Listener {
    /// A Unix socket.
    Unix(UnixListener),
    /// A TCP port.
    Tcp(TcpListener),
}

impl Listener {
    fn set_nonblocking(&self) -> io::Result<()> {
        match self {
            Self::Unix(listener) => listener.set_nonblocking(true),
            Self::Tcp(listener) => listener.set_nonblocking(true),
        }
    }

    /// The next client's socket, non-blocking, and its address in the network.
    fn accept(&self) -> io::Result<(OwnedFd, Option<IpAddr>)> {
        match self {
            Self::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Ok((stream.into(), None))
            }
            Self::Tcp(listener) => {
                let (stream, address) = listener.accept()?;
                stream.set_nonblocking(true)?;
                // A reply is a whole message: Nagle's algorithm must not delay it.
                stream.set_nodelay(true)?;
                // A client whose machine is gone sends nothing more: without these it would keep
                // its slot.
                sockopt::set_socket_keepalive(&stream, true)?;
                sockopt::set_tcp_keepidle(&stream, KEEPALIVE)?;
                sockopt::set_tcp_user_timeout(&stream, UNACKNOWLEDGED.as_millis() as u32)?;
                Ok((stream.into(), Some(address.ip().to_canonical())))
            }
        }
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Self::Unix(listener) => listener.as_fd(),
            Self::Tcp(listener) => listener.as_fd(),
        }
    }
}

/// A listener and the exports it offers. A client that names no export gets the only one.
pub struct Service {
    /// The socket where clients connect.
    pub listener: Listener,
    /// The exports, each with a name of its own.
    pub exports: Vec<Export>,
    /// Whether clients use TLS.
    pub tls: Tls,
}

/// A running server. Dropping it stops it.
pub struct Server {
    stop: Stop,
    /// Joined before the pool is dropped: these threads hand connections to it.
    listeners: Threads,
    pool: Arc<Pool>,
    /// The exports of each service, in the order of the services.
    exports: Vec<Arc<Exports>>,
}

impl Server {
    /// Starts to serve.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub fn start(services: Vec<Service>) -> io::Result<Self> {
        let mut server = Self {
            stop: Stop::new()?,
            listeners: Threads::new("NBD"),
            pool: Arc::default(),
            exports: Vec::new(),
        };
        for service in services {
            let Service {
                listener,
                exports,
                tls,
            } = service;
            listener.set_nonblocking()?;
            let offered = Arc::<Exports>::default();
            for export in exports {
                offered.add(export);
            }
            server.exports.push(Arc::clone(&offered));
            let (stop, pool) = (server.stop.clone(), Arc::clone(&server.pool));
            let thread = thread::Builder::new().name("nbd-listener".into());
            server.listeners.start(thread, move || {
                accept_clients(&listener, &offered, &tls, &stop, &pool);
            })?;
        }
        Ok(server)
    }

    /// Offers another export at the listener of the service with this number, counted from 0 in the
    /// order of [`start`](Self::start). `false`: another export has this name, or there is no such
    /// service.
    pub fn add(&self, service: usize, export: Export) -> bool {
        let exports = self.exports.get(service);
        exports.is_some_and(|exports| exports.add(export))
    }

    /// Removes an export of a service. Its clients get the replies to requests already taken, and
    /// are disconnected; one that does not read its replies gets two seconds. Returns once no
    /// client and no thread of the server uses the disk; `false`: there is no such export.
    pub fn remove(&self, service: usize, name: &str) -> bool {
        let exports = self.exports.get(service);
        exports.is_some_and(|exports| exports.remove(name))
    }

    /// Stops accepting clients, answers the requests in flight, and returns when every connection
    /// has ended. A request that zeroes more than 1 TiB is cut short with ESHUTDOWN. A client that
    /// does not read its replies gets two seconds.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.tell();
    }
}

/// Accepts clients until `stop` is signalled, then waits for the handshakes still running.
fn accept_clients(
    listener: &Listener,
    exports: &Arc<Exports>,
    tls: &Tls,
    stop: &Stop,
    pool: &Arc<Pool>,
) {
    let slots = ClientSlots::new(!matches!(tls, Tls::Off));
    let mut handshakes = Threads::new("NBD");
    accept_each(
        listener,
        stop,
        "NBD",
        Listener::accept,
        |(socket, address)| {
            let slot = match slots.handshake(address, &socket) {
                Ok(slot) => slot,
                Err(why) => return tracing::warn!("NBD: {why}: one more was turned away"),
            };
            let (exports, tls) = (Arc::clone(exports), tls.clone());
            let (stop, pool) = (stop.clone(), Arc::clone(pool));
            let thread = thread::Builder::new().name("nbd-handshake".into());
            let started = handshakes.start(thread, move || {
                report(run_handshake(socket, &exports, &tls, &stop, slot, &pool));
            });
            if let Err(error) = started {
                tracing::warn!("NBD: a client could not be served: {error}");
            }
        },
    );
}

/// Runs the handshake, in which the client chooses its export, then gives the connection to a
/// worker.
fn run_handshake(
    socket: OwnedFd,
    exports: &Exports,
    tls: &Tls,
    stop: &Stop,
    slot: HandshakeSlot,
    pool: &Pool,
) -> Result<(), ConnectionEnd> {
    let mut wire = Wire::new(socket);
    let chosen = negotiate(&mut wire, stop, exports, tls);
    let seated = chosen.and_then(|handshake| {
        let slot = slot.connection().ok_or(ConnectionEnd::Broken(FULL))?;
        Ok((handshake, slot))
    });
    match seated {
        Ok((handshake, slot)) => pool.serve(Connection::new(handshake, wire, slot)),
        Err(ended) => {
            wire.close();
            Err(ended)
        }
    }
}
