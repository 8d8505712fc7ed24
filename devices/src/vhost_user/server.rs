//! Listeners. Each has a thread, which serves one front-end at a time.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;

use super::message::{Channel, NextEvent, next_request};
use super::outcome::{Outcome, SessionEnd, refuse};
use super::owner::{OwnerRequest, ServiceControl};
use super::session::FrontEndSession;
use super::signal::EventNotifier;
use crate::block::VirtioBlock;
use crate::control::DeviceControl;
use crate::event_loop::EventSet;
use crate::listen::{Stop, Threads, Waiter, check_accept};
use crate::virtio::VirtioDevice;

/// A listening socket and the device that it offers: a disk, or a SCSI target.
pub struct Service<D = VirtioBlock> {
    listener: UnixListener,
    device: D,
    name: String,
    stop: Stop,
    waiter: Waiter<OwnerRequest>,
    notifier: Arc<EventNotifier>,
}

impl<D: VirtioDevice> Service<D> {
    /// Offers `device` to front-ends that connect to `listener`, one at a time: the next one waits
    /// until it has left. Log messages call the disk `name`.
    ///
    /// # Errors
    /// If the system refuses a descriptor, or cannot signal a front-end without waiting for it.
    pub fn new(listener: UnixListener, device: D, name: &str) -> io::Result<Self> {
        let stop = Stop::new()?;
        Ok(Self {
            listener,
            device,
            name: name.to_owned(),
            waiter: Waiter::idle(&stop)?,
            stop,
            notifier: Arc::new(EventNotifier::new()?),
        })
    }
}

impl Service {
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
    running: Mutex<Vec<RunningService>>,
}

/// A service with its thread. Dropping it stops the service, and returns once its device is
/// dropped.
struct RunningService {
    name: String,
    stop: Stop,
    _thread: Threads,
}

impl Drop for RunningService {
    fn drop(&mut self) {
        self.stop.tell();
    }
}

impl Server {
    /// Starts serving.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub fn start<D: VirtioDevice + 'static>(services: Vec<Service<D>>) -> io::Result<Self> {
        let server = Self {
            running: Mutex::default(),
        };
        let mut services = services.into_iter();
        services.try_for_each(|service| server.add(service))?;
        Ok(server)
    }

    fn lock(&self) -> MutexGuard<'_, Vec<RunningService>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves another disk.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub fn add<D: VirtioDevice + 'static>(&self, mut service: Service<D>) -> io::Result<()> {
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
        self.lock().push(RunningService {
            name,
            stop,
            _thread: thread,
        });
        Ok(())
    }

    /// Removes the service of this name: closes its listener, answers the requests in flight, and
    /// disconnects its front-end. Returns once the server no longer uses the disk; `false`: there
    /// is no such service.
    pub fn remove(&self, name: &str) -> bool {
        let mut running = self.lock();
        let index = running.iter().position(|service| service.name == name);
        let removed = index.map(|index| running.remove(index));
        drop(running);
        removed.is_some()
    }

    /// Stops accepting front-ends, answers the requests in flight, and returns once every front-end
    /// is disconnected.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Stop all services before waiting for the first.
        self.lock().iter().for_each(|service| service.stop.tell());
    }
}

impl<D: VirtioDevice> Service<D> {
    /// Serves one front-end after another until the server stops.
    fn listen(&mut self) -> Outcome<()> {
        // Whether the owner has paused the disk.
        let mut paused = false;
        self.waiter.watch(&self.listener)?;
        loop {
            if let Some(request) = next_request(&mut self.waiter, &self.listener, EventSet::IN)? {
                match request {
                    // No front-end is connected; the next one will read the new configuration.
                    OwnerRequest::CapacityChanged => drop(self.device.refresh_config()),
                    OwnerRequest::Pause(done) => {
                        paused = true;
                        // Fails if the owner has stopped waiting.
                        let _ = done.send(());
                    }
                    OwnerRequest::Resume => paused = false,
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
            // Other front-ends wait in the backlog until this one leaves.
            self.waiter.unwatch(&self.listener);
            match self.serve(stream.as_fd(), &mut paused) {
                Ok(()) | Err(SessionEnd::Gone) => {}
                Err(SessionEnd::Refused(reason)) => {
                    let name = &self.name;
                    tracing::warn!("disk '{name}': a front-end was disconnected: {reason}");
                }
                Err(SessionEnd::System(error)) => {
                    let name = &self.name;
                    tracing::warn!("disk '{name}': a front-end was disconnected: {error}");
                }
            }
            self.waiter.watch(&self.listener)?;
        }
    }

    /// Serves one front-end until it leaves. Its rings are drained when this returns.
    fn serve(&mut self, socket: BorrowedFd<'_>, paused: &mut bool) -> Outcome<()> {
        let mut channel = Channel::new(socket, &mut self.waiter)?;
        let mut session = FrontEndSession::new(&self.device, &self.notifier, socket)?;
        // Applies what the owner requested before this front-end connected.
        self.device.refresh_config();
        session.set_paused(*paused)?;
        let ended = loop {
            if let Err(ended) = Self::turn(&mut session, &mut channel, paused) {
                break ended;
            }
        };
        if session.has_lost_memory() {
            Err(refuse("it has truncated the memory that it shares"))
        } else {
            Err(ended)
        }
    }

    /// Carries out the next request of the front-end or the disk's owner.
    fn turn(
        session: &mut FrontEndSession<'_, D>,
        channel: &mut Channel<'_>,
        paused: &mut bool,
    ) -> Outcome<()> {
        match channel.next()? {
            NextEvent::Message(message) => session.handle(message, channel)?,
            NextEvent::Owner(OwnerRequest::CapacityChanged) => session.capacity_changed(),
            NextEvent::Owner(OwnerRequest::Pause(done)) => {
                *paused = true;
                session.set_paused(true)?;
                let _ = done.send(());
            }
            NextEvent::Owner(OwnerRequest::Resume) => {
                *paused = false;
                session.set_paused(false)?;
            }
        }
        Ok(())
    }
}
