//! Listeners: each has a thread, which serves one front-end at a time.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::message::{Channel, next};
use super::outcome::{Outcome, SessionEnd};
use super::owner::{ServiceControl, Wish};
use super::session::Session;
use super::signal::Bell;
use crate::block::VirtioBlock;
use crate::control::DeviceControl;
use crate::listen::{Stop, Threads, Waiter, check_accept};

/// A listening socket and the disk that it offers.
pub struct Service {
    listener: UnixListener,
    device: VirtioBlock,
    name: String,
    stop: Stop,
    waiter: Waiter<Wish>,
    bell: Arc<Bell>,
}

impl Service {
    /// Offers `device` to front-ends that connect to `listener`. One is served at a time; the next waits until it has
    /// left. Log messages call the disk `name`.
    ///
    /// # Errors
    /// If the system refuses a descriptor, or has no way to signal a front-end without waiting for it.
    pub fn new(listener: UnixListener, device: VirtioBlock, name: &str) -> io::Result<Self> {
        let stop = Stop::new()?;
        Ok(Self {
            listener,
            device,
            name: name.to_owned(),
            waiter: Waiter::idle(&stop)?,
            stop,
            bell: Arc::new(Bell::new()?),
        })
    }

    /// A handle with which the owner controls the disk while it is in use.
    pub fn control(&self) -> Arc<dyn DeviceControl> {
        Arc::new(ServiceControl {
            thread: self.waiter.sender(),
            cache: Arc::clone(self.device.cache()),
        })
    }
}

/// A running server. Dropping it stops it.
pub struct Server {
    running: Mutex<Vec<Running>>,
}

/// A service with its thread. Dropping it stops it, and returns when its device is dropped.
struct Running {
    name: String,
    stop: Stop,
    _thread: Threads,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop.tell();
    }
}

impl Server {
    /// Starts to serve.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub fn start(services: Vec<Service>) -> io::Result<Self> {
        let server = Self {
            running: Mutex::default(),
        };
        let mut services = services.into_iter();
        services.try_for_each(|service| server.add(service))?;
        Ok(server)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves another disk.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub fn add(&self, mut service: Service) -> io::Result<()> {
        service.listener.set_nonblocking(true)?;
        let (name, stop) = (service.name.clone(), service.stop.clone());
        let mut thread = Threads::new("vhost-user");
        thread.start(
            thread::Builder::new().name("vhost-user".into()),
            move || {
                if let Err(SessionEnd::System(error)) = service.listen() {
                    let name = &service.name;
                    tracing::error!("disk '{name}': no more front-ends are served: {error}");
                }
            },
        )?;
        self.lock().push(Running {
            name,
            stop,
            _thread: thread,
        });
        Ok(())
    }

    /// Removes the service of this name: closes its listener, answers the requests in flight, and disconnects its front-end.
    /// Returns when nothing of the server uses the disk any more; `false`: there is no such service.
    pub fn remove(&self, name: &str) -> bool {
        let mut running = self.lock();
        let place = running.iter().position(|service| service.name == name);
        let removed = place.map(|place| running.remove(place));
        drop(running);
        removed.is_some()
    }

    /// Stops accepting front-ends, answers the requests in flight, and returns when every front-end is disconnected.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // All are told before the first is waited for.
        self.lock().iter().for_each(|service| service.stop.tell());
    }
}

impl Service {
    /// Serves one front-end after the other until the server stops.
    fn listen(&mut self) -> Outcome<()> {
        // Whether the owner has paused the disk.
        let mut resting = false;
        self.waiter.watch(&self.listener)?;
        loop {
            if let Some(wish) = next(&mut self.waiter, &self.listener)? {
                match wish {
                    // No front-end is connected; the next one reads the current configuration.
                    Wish::Announce => drop(self.device.refresh_capacity()),
                    Wish::Rest(rests) => {
                        resting = true;
                        // The send fails if the owner has stopped waiting.
                        let _ = rests.send(());
                    }
                    Wish::Resume => resting = false,
                }
                continue;
            }
            let outcome = self.listener.accept().and_then(|(stream, _)| {
                stream.set_nonblocking(true)?;
                Ok(stream)
            });
            let name = &self.name;
            let Some(stream) = check_accept(outcome, format_args!("disk '{name}'")) else {
                continue;
            };
            // Other front-ends wait in the backlog until this one has left.
            self.waiter.unwatch(&self.listener);
            match self.serve(stream.as_fd(), &mut resting) {
                Ok(()) | Err(SessionEnd::Gone) => {}
                Err(SessionEnd::Refused(why)) => {
                    let name = &self.name;
                    tracing::warn!("disk '{name}': a front-end was disconnected: {why}");
                }
                Err(SessionEnd::System(error)) => {
                    let name = &self.name;
                    tracing::warn!("disk '{name}': a front-end was disconnected: {error}");
                }
            }
            self.waiter.watch(&self.listener)?;
        }
    }

    /// Serves one front-end to its end. Its rings are drained when this returns.
    fn serve(&mut self, socket: BorrowedFd<'_>, resting: &mut bool) -> Outcome<()> {
        let mut channel = Channel::new(socket, &mut self.waiter)?;
        let mut session = Session::new(&self.device, &self.bell);
        // Applies the owner's messages from before this front-end connected.
        self.device.refresh_capacity();
        session.set_resting(*resting)?;
        loop {
            match channel.wait_for_message()? {
                None => session.handle(channel.receive()?, &mut channel)?,
                Some(Wish::Announce) => session.capacity_changed(),
                Some(Wish::Rest(rests)) => {
                    *resting = true;
                    session.set_resting(true)?;
                    let _ = rests.send(());
                }
                Some(Wish::Resume) => {
                    *resting = false;
                    session.set_resting(false)?;
                }
            }
        }
    }
}
