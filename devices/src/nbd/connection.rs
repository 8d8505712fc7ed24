//! The transmission phase of a connection: received bytes become requests, and completed requests
//! become replies. Nothing here blocks.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::connection_end::ConnectionEnd;
use super::export::{ClientGuard, Export};
use super::handshake::HandshakeResult;
use super::protocol::command;
use super::reply_queue::ReplyQueue;
use super::request::{
    LongRead, NbdAction, NbdRules, PendingRequest, check_request, memory_of, refuse,
};
use super::request_reader::RequestReader;
use super::slots::ConnectionSlot;
use super::wire::Wire;
use crate::backend::{Failure, MemoryBudget, MemoryClient, SECTOR_SIZE};
use crate::control::GateGuard;
use crate::event_loop::EventSet;
use crate::latency::add;
use crate::metrics::BlockMetrics;

/// Cap on the bytes of requests in flight and unsent replies; above it the connection reads no
/// more. One request may exceed it.
const MAX_BYTES: usize = 32 << 20;
/// Cap on the bytes of unsent headers and errors, which no charge covers; above it the connection
/// reads no more.
const MAX_HEADERS: usize = 64 << 10;
/// How long a client may take to read its last replies when the server ends the connection.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Most requests in flight on one connection.
const MAX_REQUESTS: usize = 256;

/// Since when the client takes the replies that were unsent then.
struct UnsentReplies {
    since: Instant,
    /// The value of [`Connection::sent`] at which it has taken them.
    until: u64,
}

/// A connection that has chosen its export.
pub(super) struct Connection {
    wire: Wire,
    reader: RequestReader,
    replies: ReplyQueue,
    max_step: usize,
    memory: MemoryClient,
    /// A read whose parts are taken one by one.
    long_read: Option<LongRead>,
    /// Since when the next request waits for memory.
    hungry_since: Option<Instant>,
    /// Bytes of replies that were sent, in all.
    sent: u64,
    unsent: Option<UnsentReplies>,
    /// Since when a payload is arriving.
    partial_since: Option<Instant>,
    /// Requests in flight, and the bytes of memory that they hold.
    requests: usize,
    bytes: usize,
    /// The connection reads no more requests; those in flight are still completed and answered.
    closing: bool,
    /// Set once the server ends the connection: a client that has not read its replies by then is
    /// disconnected.
    deadline: Option<Instant>,
    _seat: ConnectionSlot,
    _client: ClientGuard,
    /// The last field, so that the export stays in use until everything else of the connection is
    /// dropped.
    handshake: HandshakeResult,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }
}

impl Connection {
    pub(super) fn new(handshake: HandshakeResult, wire: Wire, slot: ConnectionSlot) -> Self {
        let max_step = max_step_bytes(&handshake.export);
        Self {
            reader: RequestReader::new(handshake.framing, max_step),
            replies: ReplyQueue::default(),
            max_step,
            memory: MemoryBudget::of_process().client(),
            long_read: None,
            hungry_since: None,
            sent: 0,
            unsent: None,
            partial_since: None,
            requests: 0,
            bytes: 0,
            closing: false,
            deadline: None,
            _seat: slot,
            _client: ClientGuard::new(&handshake.export),
            handshake,
            wire,
        }
    }

    pub(super) fn export(&self) -> &Arc<Export> {
        &self.handshake.export
    }

    /// When a client that does not read its replies will be disconnected; `None`: no deadline yet.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline.filter(|_| self.has_unsent())
    }

    /// Requests in flight.
    pub(super) fn requests(&self) -> usize {
        self.requests
    }

    /// Calls `leave`, in any thread, when the client has to leave because of the memory that it
    /// holds. The next [`next`](Self::next) then fails.
    pub(super) fn on_eviction(&self, leave: impl Fn() + Send + 'static) {
        self.memory.on_eviction(leave);
    }

    /// Whether a request waits for memory: [`next`](Self::next) has to be called again soon.
    pub(super) fn is_hungry(&self) -> bool {
        self.hungry_since.is_some()
    }

    /// Whether the client is gone. A socket that is not watched does not tell.
    pub(super) fn is_hung_up(&self) -> bool {
        let mut socket = [PollFd::new(self, PollFlags::empty())];
        let now = Timespec::default();
        poll(&mut socket, Some(&now)).is_ok_and(|ready| ready > 0)
    }

    /// Stops taking requests: the server stops, or the export is removed.
    pub(super) fn close(&mut self) {
        self.closing = true;
        self.hungry_since = None;
        if let Some(read) = self.long_read.take() {
            read.cut_short(self.handshake.framing, &mut self.replies);
        }
        self.deadline
            .get_or_insert_with(|| Instant::now() + CLOSE_TIMEOUT);
    }

    /// Whether the connection is closing and every request has been answered and sent.
    pub(super) fn is_over(&self) -> bool {
        self.closing && self.requests == 0 && self.long_read.is_none() && !self.has_unsent()
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.replies.is_empty() || self.wire.has_unsent()
    }

    /// The events for which the worker must watch the socket.
    pub(super) fn interest(&self) -> EventSet {
        let mut interest = EventSet::empty();
        interest.set(EventSet::IN, self.wants_requests());
        interest.set(EventSet::OUT, self.has_unsent());
        interest
    }

    /// Whether decrypted data may be waiting, which makes no socket readable.
    pub(super) fn has_decrypted(&self) -> bool {
        self.wants_requests() && self.wire.may_have_data()
    }

    /// Whether requests, or parts of a long read, may be waiting that were received already.
    pub(super) fn has_received(&self) -> bool {
        let waiting = self.long_read.is_some() || self.reader.has_data();
        waiting && (self.wants_requests() || self.long_read.is_some() && self.has_room())
    }

    fn wants_requests(&self) -> bool {
        !self.closing && !self.is_hungry() && self.has_room()
    }

    fn has_room(&self) -> bool {
        let full = self.bytes + self.replies.len() >= MAX_BYTES
            || self.replies.headers() >= MAX_HEADERS
            || self.requests >= MAX_REQUESTS;
        !full && !self.export().gate.is_closed()
    }

    /// Reads from the socket once. Returns the number of bytes.
    ///
    /// # Errors
    /// If the socket fails.
    pub(super) fn receive(&mut self) -> Result<usize, ConnectionEnd> {
        if !self.wants_requests() {
            return Ok(0);
        }
        match self.reader.receive(&mut self.wire) {
            // Requests that it has sent before are carried out.
            Ok(0) => self.closing = true,
            Ok(read) => return Ok(read),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(0)
    }

    /// The next request for the disk that has arrived in full, if the connection has room for it.
    /// Invalid requests are refused here. The request stays inside its export's gate until its last
    /// step has ended.
    ///
    /// # Errors
    /// If the client breaks the protocol, or has to leave because of the memory that it holds. Its
    /// earlier requests are carried out all the same.
    pub(super) fn next(&mut self) -> Result<Option<PendingRequest>, ConnectionEnd> {
        if self.export().users.is_closed() {
            self.close();
        }
        if self.memory.is_evicted() {
            return Err(ConnectionEnd::Greedy(self.memory.held()));
        }
        while (self.long_read.is_some() || !self.closing) && self.has_room() {
            // Enter the gate before parsing, so that a thread that closes the gate waits for this
            // request.
            let Some(guard) = GateGuard::enter(&self.handshake.export.gate) else {
                break;
            };
            if let Some(read) = &mut self.long_read {
                let Some(charge) = self.memory.charge(read.next_bytes()) else {
                    drop(guard);
                    self.wait_for_memory();
                    break;
                };
                self.hungry_since = None;
                let part = read.next_part(charge);
                if read.next_bytes() == 0 {
                    self.long_read = None;
                }
                guard.keep();
                self.requests += 1;
                self.bytes += part.bytes();
                return Ok(Some(part));
            }
            let export = &self.handshake.export;
            let rules = NbdRules {
                backend: export.backend.as_ref(),
                capabilities: export.backend.capabilities(),
                framing: self.handshake.framing,
                contexts: &self.handshake.contexts,
            };
            let broken = |_| ConnectionEnd::Broken("a request has the wrong magic number");
            let mut refused = false;
            let (memory, contexts) = (&self.memory, rules.contexts.len());
            let message = self.reader.next(|request| {
                let bytes = memory_of(request, rules.framing, contexts, self.max_step);
                let charge = memory.charge(bytes);
                refused = charge.is_none();
                charge
            });
            let message = message.map_err(broken)?;
            if refused {
                drop(guard);
                self.wait_for_memory();
                break;
            }
            self.hungry_since = None;
            let Some(message) = message else {
                break;
            };
            add(&export.metrics.requests, 1);
            count(&export.metrics, message.request.command);
            match check_request(message, &rules) {
                NbdAction::Run(pending) => {
                    guard.keep();
                    self.requests += 1;
                    self.bytes += pending.bytes();
                    return Ok(Some(pending));
                }
                NbdAction::Split(read) => self.long_read = Some(read),
                NbdAction::Refuse(request, error) => {
                    add(&export.metrics.errors, 1);
                    refuse(&request, error, rules.framing, &mut self.replies);
                }
                NbdAction::Disconnect => self.closing = true,
            }
        }
        self.note_slowness();
        Ok(None)
    }

    /// The next request waits for memory.
    fn wait_for_memory(&mut self) {
        let since = *self.hungry_since.get_or_insert_with(Instant::now);
        self.memory.wait_since(since);
    }

    /// Notes since when what the client holds waits for the client.
    fn note_slowness(&mut self) {
        let before = (self.unsent.is_some(), self.partial_since.is_some());
        let taken = |unsent: &UnsentReplies| self.sent >= unsent.until;
        let renewed = self.unsent.as_ref().is_some_and(taken);
        if self.replies.is_empty() {
            self.unsent = None;
        } else if self.unsent.is_none() || renewed {
            self.unsent = Some(UnsentReplies {
                since: Instant::now(),
                until: self.sent + self.replies.len() as u64,
            });
        }
        if self.reader.has_partial() {
            self.partial_since.get_or_insert_with(Instant::now);
        } else {
            self.partial_since = None;
        }
        if renewed || before != (self.unsent.is_some(), self.partial_since.is_some()) {
            let unsent = self.unsent.as_ref().map(|unsent| unsent.since);
            let since = unsent.into_iter().chain(self.partial_since).min();
            self.memory.set_slow_since(since);
        }
    }

    /// Answers a request that [`next`](Self::next) has returned.
    pub(super) fn answer(&mut self, pending: PendingRequest, result: Result<(), Failure>) {
        let metrics = &self.handshake.export.metrics;
        let (command, bytes) = (pending.command(), pending.bytes());
        self.requests -= 1;
        self.bytes -= bytes;
        let answered = pending.answer(result, self.handshake.framing, &mut self.replies);
        match command {
            _ if !answered => add(&metrics.errors, 1),
            command::READ => add(&metrics.bytes_read, bytes as u64),
            command::WRITE => add(&metrics.bytes_written, bytes as u64),
            _ => {}
        }
    }

    /// Sends as many bytes of replies as the socket takes, about `most` at most. Returns the number
    /// of bytes, and whether the socket may take more.
    ///
    /// # Errors
    /// If the client is gone.
    pub(super) fn send(&mut self, most: usize) -> Result<(usize, bool), ConnectionEnd> {
        let (sent, more) = self.replies.send(&mut self.wire, most)?;
        self.sent += sent as u64;
        if !more {
            self.note_slowness();
        }
        Ok((sent, more))
    }

    /// Sends the TLS closure alert, if there is TLS and the socket takes it at once.
    pub(super) fn close_tls(&mut self) {
        self.wire.close();
    }
}

/// The most bytes that one step of a request may move on this export: whole sectors.
pub(super) fn max_step_bytes(export: &Export) -> usize {
    let sector = SECTOR_SIZE as usize;
    (export.backend.max_request_bytes() / sector).max(1) * sector
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

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::sync::Mutex;
    use std::thread;

    use super::*;
    use crate::backend::ram::RamDisk;
    use crate::nbd::export::ExportGuard;
    use crate::nbd::protocol::Framing;
    use crate::nbd::slots::ClientSlots;

    /// A connection may end before a worker takes it on; then it is the export's only user.
    #[test]
    fn an_export_is_removed_only_after_its_last_connection_is_gone() {
        let order = Arc::new(Mutex::new(Vec::new()));
        let note = |what| {
            let order = Arc::clone(&order);
            move || order.lock().unwrap().push(what)
        };
        let (let_go, removed) = (note("let go"), note("removed"));
        let export = Arc::new(
            Export::new("disk", "", Arc::new(RamDisk::new(8))).when_deserted(move || {
                // Long enough for the other thread to run ahead, if nothing blocks it.
                thread::sleep(Duration::from_millis(100));
                let_go();
            }),
        );
        let handshake = HandshakeResult {
            export: ExportGuard::enter(&export).unwrap(),
            framing: Framing::Simple,
            contexts: Arc::new([]),
        };
        let (socket, _client) = UnixStream::pair().unwrap();
        let slot = ClientSlots::default()
            .handshake(None, &socket)
            .unwrap()
            .connection();
        let connection = Connection::new(handshake, Wire::new(socket.into()), slot.unwrap());
        let removing = thread::spawn(move || {
            export.users.close();
            removed();
        });
        drop(connection);
        removing.join().unwrap();
        assert_eq!(*order.lock().unwrap(), ["let go", "removed"]);
    }
}
