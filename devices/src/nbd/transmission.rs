//! The transmission phase of a connection: an event loop over its socket and its port to the disk.

use std::io::ErrorKind;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::time::Timespec;

use super::handshake::{Agreed, Ended};
use super::incoming::Incoming;
use super::outgoing::Outgoing;
use super::protocol::command;
use super::request::{Action, Pending, Rules, answer_extents, judge, refuse};
use super::wire::Wire;
use crate::backend::{BackendQueue, Completion, SECTOR_SIZE};
use crate::block::{BlockMetrics, add};

/// Bytes of requests in flight and replies not sent above which nothing more is read. One request may overshoot it.
const MAX_BYTES: usize = 32 << 20;
/// Most requests in flight.
const MAX_REQUESTS: usize = 256;
/// How long a client may take to read its last replies when the server stops.
const PARTING: Duration = Duration::from_secs(2);

/// Requests on their way, by token.
#[derive(Default)]
struct InFlight {
    slots: Vec<Option<Pending>>,
    free: Vec<usize>,
    bytes: usize,
}

impl InFlight {
    fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// A token for a request.
    fn insert(&mut self, pending: Pending) -> u64 {
        self.bytes += pending.bytes();
        let slot = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        self.slots[slot] = Some(pending);
        slot as u64
    }

    fn get(&mut self, token: u64) -> Option<&mut Pending> {
        self.slots.get_mut(token as usize)?.as_mut()
    }

    fn remove(&mut self, token: u64) -> Option<Pending> {
        let pending = self.slots.get_mut(token as usize)?.take()?;
        self.free.push(token as usize);
        self.bytes -= pending.bytes();
        Some(pending)
    }
}

/// A connection that has chosen its export.
pub(super) struct Transmission<'a> {
    agreed: Agreed<'a>,
    wire: &'a mut Wire,
    stop: BorrowedFd<'a>,
    disk: Box<dyn BackendQueue>,
    /// Longest step in bytes.
    part: usize,
    incoming: Incoming,
    outgoing: Outgoing,
    in_flight: InFlight,
    /// Completions being worked on; kept for its memory.
    ended: Vec<Completion>,
    /// Nothing more is read: what is in flight ends and is answered.
    closing: bool,
    /// When the client is left alone with what it has not read.
    end: Option<Instant>,
}

impl<'a> Transmission<'a> {
    /// Opens a port of the export's disk.
    ///
    /// # Errors
    /// If the system refuses one.
    pub(super) fn new(
        agreed: Agreed<'a>,
        wire: &'a mut Wire,
        stop: BorrowedFd<'a>,
    ) -> std::io::Result<Self> {
        let backend = &agreed.export.backend;
        let sector = SECTOR_SIZE as usize;
        let part = (backend.max_request_bytes() / sector).max(1) * sector;
        Ok(Self {
            disk: backend.open_queue()?,
            part,
            incoming: Incoming::new(agreed.framing, part),
            outgoing: Outgoing::default(),
            in_flight: InFlight::default(),
            ended: Vec::new(),
            closing: false,
            end: None,
            agreed,
            wire,
            stop,
        })
    }

    /// Serves until the client has gone, or `stop` is readable and what was in flight is answered.
    ///
    /// # Errors
    /// If the client breaks the protocol, or the socket fails. What it has asked for in full is carried out all the same.
    pub(super) fn run(mut self) -> Result<(), Ended> {
        loop {
            self.work()?;
            self.outgoing.send(self.wire)?;
            if self.closing && self.in_flight.len() == 0 && self.is_all_sent() {
                return Ok(());
            }
            self.wait()?;
        }
    }

    fn is_all_sent(&self) -> bool {
        self.outgoing.is_empty() && !self.wire.has_unsent()
    }

    fn has_room(&self) -> bool {
        self.in_flight.bytes + self.outgoing.len() < MAX_BYTES
            && self.in_flight.len() < MAX_REQUESTS
    }

    /// Takes what has come and answers what has ended, until nothing is left to do.
    fn work(&mut self) -> Result<(), Ended> {
        loop {
            let took = self.take()?;
            if took {
                self.disk.kick();
            }
            let answered = self.complete();
            if !took && !answered {
                return Ok(());
            }
        }
    }

    /// Submits the requests that are there, while there is room. Returns whether there were any.
    fn take(&mut self) -> Result<bool, Ended> {
        let export = self.agreed.export;
        let rules = Rules {
            backend: export.backend.as_ref(),
            capabilities: export.backend.capabilities(),
            framing: self.agreed.framing,
            allocation: self.agreed.allocation,
        };
        let mut took = false;
        while !self.closing && self.has_room() {
            let message = self
                .incoming
                .next()
                .map_err(|_| Ended::Broken("a request does not begin as one"))?;
            let Some(message) = message else {
                break;
            };
            took = true;
            add(&export.metrics.requests, 1);
            count(&export.metrics, message.request.command);
            match judge(message, &rules) {
                Action::Run(pending) => {
                    let token = self.in_flight.insert(pending);
                    step(&mut self.in_flight, self.disk.as_mut(), token, self.part);
                }
                Action::Extents(request, extents) => {
                    answer_extents(&request, &extents, rules.framing, &mut self.outgoing);
                }
                Action::Refuse(request, error) => {
                    add(&export.metrics.errors, 1);
                    refuse(&request, error, rules.framing, &mut self.outgoing);
                }
                Action::Disconnect => self.closing = true,
            }
        }
        Ok(took)
    }

    /// Goes on with the requests of which a step has ended, and answers those that were the last. Returns whether
    /// there were any.
    fn complete(&mut self) -> bool {
        let mut ended = std::mem::take(&mut self.ended);
        self.disk.completions(&mut ended);
        let any = !ended.is_empty();
        let mut stepped = false;
        for Completion { token, result } in ended.drain(..) {
            let result = match (result, self.in_flight.get(token)) {
                (Ok(data), Some(pending)) => {
                    pending.stepped(data);
                    if step(&mut self.in_flight, self.disk.as_mut(), token, self.part) {
                        stepped = true;
                        continue;
                    }
                    Ok(())
                }
                (result, _) => result.map(|_| ()),
            };
            let Some(pending) = self.in_flight.remove(token) else {
                debug_assert!(false, "completion of unknown token {token}");
                continue;
            };
            let metrics = &self.agreed.export.metrics;
            let (command, bytes) = (pending.command(), pending.bytes() as u64);
            let answered = pending.answer(result, self.agreed.framing, &mut self.outgoing);
            match command {
                _ if !answered => add(&metrics.errors, 1),
                command::READ => add(&metrics.bytes_read, bytes),
                command::WRITE => add(&metrics.bytes_written, bytes),
                _ => {}
            }
        }
        if stepped {
            self.disk.kick();
        }
        self.ended = ended;
        any
    }

    /// Waits until there is something to do, and reads once if the client has sent something.
    fn wait(&mut self) -> Result<(), Ended> {
        let mut interest = PollFlags::empty();
        interest.set(PollFlags::IN, !self.closing && self.has_room());
        interest.set(PollFlags::OUT, !self.is_all_sent());
        // What was decrypted already wakes nobody.
        let decrypted = interest.contains(PollFlags::IN) && self.wire.may_have_data();
        let mut fds = vec![PollFd::from_borrowed_fd(self.disk.event(), PollFlags::IN)];
        // The end of a client that is neither read from nor written to would wake this thread over and over.
        let socket = (!interest.is_empty()).then(|| {
            fds.push(PollFd::new(self.wire, interest));
            fds.len() - 1
        });
        let stop = self.end.is_none().then(|| {
            fds.push(PollFd::from_borrowed_fd(self.stop, PollFlags::IN));
            fds.len() - 1
        });
        let left = self.end.filter(|_| !self.is_all_sent()).map(|end| {
            Timespec::try_from(end.saturating_duration_since(Instant::now())).unwrap_or_default()
        });
        let left = if decrypted {
            Some(Timespec::default())
        } else {
            left
        };
        match poll(&mut fds, left.as_ref()) {
            Ok(0) if !decrypted => return Err(Ended::Gone),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let ready = |index: Option<usize>| index.is_some_and(|at| !fds[at].revents().is_empty());
        let (readable, stopped) = (decrypted || ready(socket), ready(stop));
        if stopped {
            self.closing = true;
            self.end = Some(Instant::now() + PARTING);
        }
        if readable && interest.contains(PollFlags::IN) && !self.closing {
            match self.incoming.receive(self.wire) {
                Ok(0) => self.closing = true,
                Ok(_) => {}
                Err(error)
                    if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Submits the next step of a request; `false`: there is none.
fn step(in_flight: &mut InFlight, disk: &mut dyn BackendQueue, token: u64, part: usize) -> bool {
    let operation = in_flight.get(token).and_then(|pending| pending.step(part));
    let Some(operation) = operation else {
        return false;
    };
    disk.submit(token, operation);
    true
}

/// Counts a request by its kind.
fn count(metrics: &BlockMetrics, command: u16) {
    let counter = match command {
        command::READ => &metrics.reads,
        command::WRITE => &metrics.writes,
        command::FLUSH => &metrics.flushes,
        command::TRIM => &metrics.discards,
        command::WRITE_ZEROES => &metrics.write_zeroes,
        _ => return,
    };
    add(counter, 1);
}
