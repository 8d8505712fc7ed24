//! The transmission phase of a connection: received bytes become requests, and completed requests become replies.
//! Nothing here blocks.

use std::io::ErrorKind;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::ended::ConnectionEnd;
use super::export::{Client, Export};
use super::handshake::Agreed;
use super::incoming::Incoming;
use super::outgoing::Outgoing;
use super::protocol::command;
use super::request::{NbdAction, NbdRules, PendingRequest, judge, refuse};
use super::wire::Wire;
use crate::backend::{Failure, SECTOR_SIZE};
use crate::control::Pass;
use crate::event_loop::EventSet;
use crate::latency::add;
use crate::metrics::BlockMetrics;

/// Bytes of requests in flight and unsent replies above which the connection reads no more. One request may exceed it.
const MAX_BYTES: usize = 32 << 20;
/// How long a client may take to read its last replies when its connection ends from here.
const PARTING: Duration = Duration::from_secs(2);
/// Most requests in flight on one connection.
const MAX_REQUESTS: usize = 256;

/// One client counted against its listener's limit, until this is dropped.
pub(super) struct Seat(Arc<AtomicUsize>);

impl Seat {
    pub(super) fn take(seats: &Arc<AtomicUsize>) -> Self {
        seats.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(seats))
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection that has chosen its export.
pub(super) struct Connection {
    wire: Wire,
    incoming: Incoming,
    outgoing: Outgoing,
    /// Requests in flight, and the bytes of memory that they hold.
    requests: usize,
    bytes: usize,
    /// The connection reads no more requests; those in flight are still completed and answered.
    closing: bool,
    /// Set when the connection ends from here: a client that has not read its replies by then is disconnected.
    end: Option<Instant>,
    _seat: Seat,
    _client: Client,
    /// The last field, so that the use of the export ends when nothing of the connection has the export any more.
    agreed: Agreed,
}

impl AsFd for Connection {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.wire.as_fd()
    }
}

impl Connection {
    pub(super) fn new(agreed: Agreed, wire: Wire, seat: Seat) -> Self {
        let part = part(&agreed.export);
        Self {
            incoming: Incoming::new(agreed.framing, part),
            outgoing: Outgoing::default(),
            requests: 0,
            bytes: 0,
            closing: false,
            end: None,
            _seat: seat,
            _client: Client::of(&agreed.export),
            agreed,
            wire,
        }
    }

    pub(super) fn export(&self) -> &Arc<Export> {
        &self.agreed.export
    }

    /// When a client that does not read its replies is to be disconnected; `None`: not soon.
    pub(super) fn end(&self) -> Option<Instant> {
        self.end.filter(|_| self.has_unsent())
    }

    /// Requests in flight.
    pub(super) fn requests(&self) -> usize {
        self.requests
    }

    /// Stops taking requests: the server stops, or the export is removed.
    pub(super) fn close(&mut self) {
        self.closing = true;
        self.end.get_or_insert_with(|| Instant::now() + PARTING);
    }

    /// Whether the connection is closing and every request has been answered and sent.
    pub(super) fn is_over(&self) -> bool {
        self.closing && self.requests == 0 && !self.has_unsent()
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.outgoing.is_empty() || self.wire.has_unsent()
    }

    /// The events for which the worker must watch the socket.
    pub(super) fn interest(&self) -> EventSet {
        let mut interest = EventSet::empty();
        interest.set(EventSet::IN, self.is_listening());
        interest.set(EventSet::OUT, self.has_unsent());
        interest
    }

    /// Whether there may be decrypted data to read that the socket does not report.
    pub(super) fn has_decrypted(&self) -> bool {
        self.is_listening() && self.wire.may_have_data()
    }

    fn is_listening(&self) -> bool {
        !self.closing && self.has_room()
    }

    fn has_room(&self) -> bool {
        let full = self.bytes + self.outgoing.len() >= MAX_BYTES || self.requests >= MAX_REQUESTS;
        !full && !self.export().gate.is_closed()
    }

    /// Reads from the socket once.
    ///
    /// # Errors
    /// If the socket fails.
    pub(super) fn receive(&mut self) -> Result<(), ConnectionEnd> {
        if !self.is_listening() {
            return Ok(());
        }
        match self.incoming.receive(&mut self.wire) {
            Ok(0) => self.closing = true,
            Ok(_) => {}
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// The next request for the disk that has arrived in full, if the connection has room for it. Invalid requests
    /// are refused here. The request stays inside its export's gate until its last step has ended.
    ///
    /// # Errors
    /// If the client breaks the protocol. Its earlier requests are carried out all the same.
    pub(super) fn next(&mut self) -> Result<Option<PendingRequest>, ConnectionEnd> {
        if self.export().users.is_closed() {
            self.close();
        }
        while !self.closing && self.has_room() {
            // The request enters the gate before it is parsed, so a thread that closes the gate waits for it.
            let Some(pass) = Pass::take(&self.agreed.export.gate) else {
                break;
            };
            let broken = |_| ConnectionEnd::Broken("a request does not begin as one");
            let Some(message) = self.incoming.next().map_err(broken)? else {
                break;
            };
            let export = &self.agreed.export;
            let rules = NbdRules {
                backend: export.backend.as_ref(),
                capabilities: export.backend.capabilities(),
                framing: self.agreed.framing,
                contexts: &self.agreed.contexts,
            };
            add(&export.metrics.requests, 1);
            count(&export.metrics, message.request.command);
            match judge(message, &rules) {
                NbdAction::Run(pending) => {
                    pass.keep();
                    self.requests += 1;
                    self.bytes += pending.bytes();
                    return Ok(Some(pending));
                }
                NbdAction::Refuse(request, error) => {
                    add(&export.metrics.errors, 1);
                    refuse(&request, error, rules.framing, &mut self.outgoing);
                }
                NbdAction::Disconnect => self.closing = true,
            }
        }
        Ok(None)
    }

    /// Answers a request that [`next`](Self::next) gave.
    pub(super) fn answer(&mut self, pending: PendingRequest, result: Result<(), Failure>) {
        let metrics = &self.agreed.export.metrics;
        let (command, bytes) = (pending.command(), pending.bytes());
        self.requests -= 1;
        self.bytes -= bytes;
        let answered = pending.answer(result, self.agreed.framing, &mut self.outgoing);
        match command {
            _ if !answered => add(&metrics.errors, 1),
            command::READ => add(&metrics.bytes_read, bytes as u64),
            command::WRITE => add(&metrics.bytes_written, bytes as u64),
            _ => {}
        }
    }

    /// Sends as many bytes of replies as the socket takes.
    ///
    /// # Errors
    /// If the client is gone.
    pub(super) fn send(&mut self) -> Result<(), ConnectionEnd> {
        Ok(self.outgoing.send(&mut self.wire)?)
    }

    /// Sends the TLS closure alert, if there is TLS and the socket takes it at once.
    pub(super) fn say_goodbye(&mut self) {
        self.wire.close();
    }
}

/// The longest step of a request to an export, in bytes: whole sectors.
pub(super) fn part(export: &Export) -> usize {
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
    use crate::nbd::export::Used;
    use crate::nbd::protocol::Framing;

    /// A connection may end before a worker has taken it on, so that it alone uses the export.
    #[test]
    fn an_export_is_removed_after_its_last_connection_has_let_go_of_it() {
        let order = Arc::new(Mutex::new(Vec::new()));
        let note = |what| {
            let order = Arc::clone(&order);
            move || order.lock().unwrap().push(what)
        };
        let (let_go, removed) = (note("let go"), note("removed"));
        let export = Arc::new(
            Export::new("disk", "", Arc::new(RamDisk::new(8))).when_deserted(move || {
                // Long enough for the other thread to go on, if nothing holds it up.
                thread::sleep(Duration::from_millis(100));
                let_go();
            }),
        );
        let agreed = Agreed {
            export: Used::begin(&export).unwrap(),
            framing: Framing::Simple,
            contexts: Arc::new([]),
        };
        let (socket, _client) = UnixStream::pair().unwrap();
        let seat = Seat::take(&Arc::default());
        let connection = Connection::new(agreed, Wire::new(socket.into()), seat);
        let removing = thread::spawn(move || {
            export.users.close();
            removed();
        });
        drop(connection);
        removing.join().unwrap();
        assert_eq!(*order.lock().unwrap(), ["let go", "removed"]);
    }
}
