//! Sockets: a thread each, one front-end at a time.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};

use super::message::Channel;
use super::outcome::{Ended, Outcome};
use super::owner::{Owner, ServiceControl};
use super::session::Session;
use super::signal::Bell;
use crate::block::VirtioBlock;
use crate::control::DeviceControl;
use crate::listen::accepted;

/// A socket with the disk that is to be had there.
pub struct Service {
    listener: UnixListener,
    device: VirtioBlock,
    name: String,
    owner: Arc<Owner>,
    bell: Arc<Bell>,
}

impl Service {
    /// `device` for front-ends that come in at `listener`. One is served at a time; the next waits until it has gone.
    /// `name` is what the disk is called in messages.
    ///
    /// # Errors
    /// If the system refuses a descriptor, or has no way to signal a front-end without waiting for it.
    pub fn new(listener: UnixListener, device: VirtioBlock, name: &str) -> io::Result<Self> {
        Ok(Self {
            listener,
            device,
            name: name.to_owned(),
            owner: Arc::new(Owner::new()?),
            bell: Arc::new(Bell::new()?),
        })
    }

    /// The disk in use, for its owner.
    pub fn control(&self) -> Arc<dyn DeviceControl> {
        Arc::new(ServiceControl {
            owner: Arc::clone(&self.owner),
            cache: Arc::clone(self.device.cache()),
        })
    }
}

/// Tells the owner that nobody serves the disk any more, after a panic too.
struct OverGuard<'a>(&'a Owner);

impl Drop for OverGuard<'_> {
    fn drop(&mut self) {
        self.0.over();
    }
}

/// A running server. Dropping it stops it.
pub struct Server {
    /// Readable once the server is to stop; never read.
    stop: Arc<OwnedFd>,
    sockets: Vec<JoinHandle<()>>,
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
            sockets: Vec::new(),
        };
        for service in services {
            service.listener.set_nonblocking(true)?;
            let stop = Arc::clone(&server.stop);
            let thread = thread::Builder::new()
                .name("vhost-user".into())
                .spawn(move || listen(&service, &stop))?;
            server.sockets.push(thread);
        }
        Ok(server)
    }

    /// Accepts nobody more, answers what is in flight, and returns when every front-end is disconnected.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A full counter is readable all the same.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        for socket in self.sockets.drain(..) {
            if socket.join().is_err() {
                tracing::error!("a vhost-user thread has panicked");
            }
        }
    }
}

/// Serves one front-end after the other until `stop` is readable.
fn listen(service: &Service, stop: &OwnedFd) {
    let (name, owner) = (&service.name, &*service.owner);
    let _over = OverGuard(owner);
    loop {
        let mut fds = [
            PollFd::new(&service.listener, PollFlags::IN),
            PollFd::new(stop, PollFlags::IN),
            PollFd::from_borrowed_fd(owner.event(), PollFlags::IN),
        ];
        if let Err(error) = poll(&mut fds, None)
            && error != rustix::io::Errno::INTR
        {
            tracing::error!("disk '{name}': nobody more is served: {error}");
            return;
        }
        if !fds[1].revents().is_empty() {
            return;
        }
        if !fds[2].revents().is_empty() {
            let wishes = owner.hear();
            // Whoever comes reads the configuration as it is then.
            service.device.refresh_capacity();
            owner.rests(wishes.rest);
            continue;
        }
        let outcome = service.listener.accept().and_then(|(stream, _)| {
            stream.set_nonblocking(true)?;
            Ok(stream)
        });
        let Some(stream) = accepted(outcome, format_args!("disk '{name}'")) else {
            continue;
        };
        match serve(service, stream.as_fd(), stop.as_fd()) {
            Ok(()) | Err(Ended::Gone) => {}
            Err(Ended::Refused(why)) => {
                tracing::warn!("disk '{name}': a front-end was disconnected: {why}");
            }
            Err(Ended::System(error)) => {
                tracing::warn!("disk '{name}': a front-end was disconnected: {error}");
            }
        }
    }
}

/// Serves one front-end to its end. Its rings are drained when this returns.
fn serve(service: &Service, socket: BorrowedFd<'_>, stop: BorrowedFd<'_>) -> Outcome<()> {
    let owner = &*service.owner;
    let channel = Channel::new(socket, stop);
    let mut session = Session::new(&service.device, &service.bell);
    // What was wanted before it came.
    service.device.refresh_capacity();
    session.set_resting(owner.hear().rest)?;
    loop {
        if channel.wait_for_message(owner.event())? {
            session.handle(channel.receive()?, &channel)?;
            continue;
        }
        let wishes = owner.hear();
        session.set_resting(wishes.rest)?;
        owner.rests(wishes.rest);
        if wishes.announce {
            session.capacity_changed();
        }
    }
}
