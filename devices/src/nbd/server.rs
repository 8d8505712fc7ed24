//! Listeners and connections: a thread each, all ended by one event.

use std::io;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::Export;
use super::handshake::{Ended, negotiate};
use super::tls::Tls;
use super::transmission::Transmission;
use super::wire::Wire;

/// Most connections of one listener at a time. One more is closed at once.
pub const MAX_CONNECTIONS: usize = 128;

/// How long a listener rests when the system has no descriptors left.
const REST: Duration = Duration::from_millis(100);

/// Where clients come in.
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

    /// The next client's socket, non-blocking.
    fn accept(&self) -> io::Result<OwnedFd> {
        match self {
            Self::Unix(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                Ok(stream.into())
            }
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nonblocking(true)?;
                // A reply is a message: nothing comes that it should wait for.
                stream.set_nodelay(true)?;
                Ok(stream.into())
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

/// A listener with what is to be had there. A client that names no export gets the only one.
pub struct Service {
    /// Where clients come in.
    pub listener: Listener,
    /// The exports, of different names.
    pub exports: Vec<Export>,
    /// Whether what clients say is encrypted.
    pub tls: Tls,
}

/// A running server. Dropping it stops it.
pub struct Server {
    /// Readable once the server is to stop; never read.
    stop: Arc<OwnedFd>,
    listeners: Vec<JoinHandle<()>>,
}

impl Server {
    /// Starts to serve.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub fn start(services: Vec<Service>) -> io::Result<Self> {
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let mut server = Self {
            stop: Arc::new(stop),
            listeners: Vec::new(),
        };
        for service in services {
            let Service {
                listener,
                exports,
                tls,
            } = service;
            listener.set_nonblocking()?;
            let exports: Arc<[Export]> = exports.into();
            let stop = Arc::clone(&server.stop);
            let thread = thread::Builder::new()
                .name("nbd-listener".into())
                .spawn(move || listen(&listener, &exports, &tls, &stop))?;
            server.listeners.push(thread);
        }
        Ok(server)
    }

    /// Accepts nobody more, answers what is in flight, and returns when every connection has ended. A client that does
    /// not read its replies is waited for two seconds.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A full counter is readable all the same.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        for thread in self.listeners.drain(..) {
            join(thread);
        }
    }
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!("an NBD thread has panicked");
    }
}

/// Accepts clients until `stop` is readable, then waits for their threads.
fn listen(listener: &Listener, exports: &Arc<[Export]>, tls: &Tls, stop: &Arc<OwnedFd>) {
    let mut connections: Vec<JoinHandle<()>> = Vec::new();
    loop {
        let mut fds = [
            PollFd::new(listener, PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
        ];
        if let Err(error) = poll(&mut fds, None)
            && error != rustix::io::Errno::INTR
        {
            tracing::error!("NBD: no more clients are accepted: {error}");
            break;
        }
        if !fds[1].revents().is_empty() {
            break;
        }
        let (ended, alive) = connections.drain(..).partition(JoinHandle::is_finished);
        connections = alive;
        Vec::into_iter(ended).for_each(join);
        let socket = match listener.accept() {
            Ok(socket) => socket,
            Err(error) => {
                use io::ErrorKind::{ConnectionAborted, Interrupted, WouldBlock};
                if !matches!(error.kind(), ConnectionAborted | Interrupted | WouldBlock) {
                    tracing::warn!("NBD: a client could not be accepted: {error}");
                    thread::sleep(REST);
                }
                continue;
            }
        };
        if connections.len() >= MAX_CONNECTIONS {
            tracing::warn!(
                "NBD: {MAX_CONNECTIONS} clients are connected: one more was turned away"
            );
            continue;
        }
        let (exports, tls, stop) = (Arc::clone(exports), tls.clone(), Arc::clone(stop));
        let spawned = thread::Builder::new()
            .name("nbd-client".into())
            .spawn(move || connection(socket, &exports, &tls, &stop));
        match spawned {
            Ok(thread) => connections.push(thread),
            Err(error) => tracing::warn!("NBD: a client could not be served: {error}"),
        }
    }
    connections.into_iter().for_each(join);
}

/// Serves one client to its end.
fn connection(socket: OwnedFd, exports: &[Export], tls: &Tls, stop: &OwnedFd) {
    let mut wire = Wire::new(socket);
    let outcome = negotiate(&mut wire, stop.as_fd(), exports, tls).and_then(|agreed| {
        let name = agreed.export.name();
        match Transmission::new(agreed, &mut wire, stop.as_fd()) {
            Ok(transmission) => transmission.run(),
            Err(error) => {
                tracing::error!("NBD export '{name}': {error}");
                Err(Ended::Gone)
            }
        }
    });
    wire.close();
    match outcome {
        Err(Ended::Socket(error)) if error.kind() == io::ErrorKind::InvalidData => {
            tracing::warn!("an NBD client was disconnected: TLS: {error}");
        }
        Err(Ended::Broken(why)) => tracing::warn!("an NBD client was disconnected: {why}"),
        Err(Ended::Socket(error)) => tracing::info!("an NBD client is gone: {error}"),
        Ok(()) | Err(Ended::Gone) => {}
    }
}
