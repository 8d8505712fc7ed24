//! A disk's clients in one thread: a source of the reactor.
//!
//! A thread per connection would cost two context switches per request, most of a request's cost
//! when many clients flush. One thread serves a dozen clients better: it submits all their requests
//! to the disk as one batch, and a commit group wakes it once for all clients whose requests the
//! group completed.
//!
//! Within the disk's turn its clients take turns too: one receives once, and takes [a
//! few](MAX_TAKEN) of its requests; one gets a step of a request; and so on, until the turn is
//! over. So others come between the steps of a long request, and between many short ones.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

use slab::Slab;

use super::connection::{Connection, max_step_bytes};
use super::connection_end::{ConnectionEnd, report};
use super::export::{Export, ExportGuard};
use super::extent_query::ExtentStatus;
use super::protocol::command;
use super::request::PendingRequest;
use crate::backend::{Answer, Buffer, Completion, Failure, MemoryClient};
use crate::control::GateWatcher;
use crate::event_loop::EventSet;
use crate::latency::OperationKind;
use crate::reactor::{
    DedicatedThread, DiskPort, FIRST_OWN_EVENT, LEAST_IN_FLIGHT, NextStep, ReactorPool,
    ReactorThread, Reservation, Source, SourceHandle, Turn,
};
use crate::throttle::{Throttle, bytes_of};

/// Most requests of a client that are taken before those of others.
const MAX_TAKEN: usize = 16;

/// The sessions of a server, and their threads.
pub(super) struct Pool {
    threads: ReactorPool,
    sessions: Mutex<Vec<SessionEntry>>,
}

/// A session, as the threads that find clients for it see it.
struct SessionEntry {
    export: Weak<Export>,
    source: SourceHandle,
    inbox: Arc<SessionInbox>,
}

impl Default for Pool {
    fn default() -> Self {
        Self {
            threads: ReactorPool::new("nbd-worker"),
            sessions: Mutex::default(),
        }
    }
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Vec<SessionEntry>> {
        self.sessions.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a connection to a thread, which serves it until it ends.
    ///
    /// # Errors
    /// If its export is being removed, or the system refuses a thread or a descriptor.
    pub(super) fn serve(&self, connection: Connection) -> Result<(), ConnectionEnd> {
        // The export stays in use until this returns.
        let export = ExportGuard::enter(connection.export()).ok_or(ConnectionEnd::Gone)?;
        let mut sessions = self.lock();
        sessions.retain(|session| !session.source.is_gone());
        // A read that blocks must not hold up other clients.
        let dedicated = export.backend.blocks().then(|| DedicatedThread {
            name: "nbd-worker".into(),
            cpu: None,
        });
        let reservation = self.threads.reserve(dedicated)?;
        let shared = sessions.iter().find(|session| {
            session.source.thread().has(&reservation)
                && session.export.as_ptr() == Arc::as_ptr(&export)
        });
        let message = SessionMessage::Connection(Box::new(connection), Some(reservation));
        // A session that has just ended takes no more.
        let sent = match shared {
            Some(session) => session.inbox.send(message),
            None => Err(message),
        };
        let Err(SessionMessage::Connection(connection, Some(reservation))) = sent else {
            return Ok(());
        };
        let (session, inbox) = DiskSession::open(&export, reservation.thread())?;
        // The session has the connection's reservation, and the session is there as long as its
        // clients.
        let sent = inbox.send(SessionMessage::Connection(connection, None));
        debug_assert!(sent.is_ok(), "the session is new");
        sessions.push(SessionEntry {
            export: Arc::downgrade(&export),
            source: reservation.serve(Box::new(session)),
            inbox,
        });
        Ok(())
    }
}

impl Drop for Pool {
    /// Ends every connection, and waits until no thread uses a disk.
    fn drop(&mut self) {
        let sessions = std::mem::take(&mut *self.lock());
        sessions.iter().for_each(|s| s.source.request_stop());
        sessions.iter().for_each(|s| s.source.wait_until_gone());
    }
}

/// A message to a session.
enum SessionMessage {
    /// A client to serve, and its reservation in the thread.
    Connection(Box<Connection>, Option<Reservation>),
    /// What the export's `LookUpThread` has found for the request with this token.
    Extents(usize, io::Result<Vec<Vec<ExtentStatus>>>),
    /// The export's gate has opened or closed, the export is being removed, or a client has to
    /// leave.
    Gate,
}

/// Messages from other threads.
struct SessionInbox {
    /// `None`: the session takes no more.
    messages: Mutex<Option<Vec<SessionMessage>>>,
    thread: ReactorThread,
}

impl SessionInbox {
    fn lock(&self) -> MutexGuard<'_, Option<Vec<SessionMessage>>> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a message; returns it if the session takes no more.
    fn send(&self, message: SessionMessage) -> Result<(), SessionMessage> {
        match &mut *self.lock() {
            Some(messages) => messages.push(message),
            None => return Err(message),
        }
        self.thread.wake();
        Ok(())
    }

    fn take(&self) -> Vec<SessionMessage> {
        self.lock().as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Takes no more messages, unless some are waiting.
    fn close(&self) -> bool {
        let mut messages = self.lock();
        let empty = messages.as_ref().is_none_or(Vec::is_empty);
        if empty {
            *messages = None;
        }
        empty
    }
}

impl GateWatcher for SessionInbox {
    fn wake(&self) {
        // A session that has ended does not care.
        let _ = self.send(SessionMessage::Gate);
    }
}

/// A client that the session serves, or whose last requests are still in flight.
struct Client {
    /// `None`: the client is gone, but some of its requests are still in flight.
    connection: Option<Connection>,
    /// Requests still in flight, once the client is gone.
    abandoned: usize,
    /// The events that its socket is watched for; empty: it is not watched.
    watched: EventSet,
    /// Whether the client is in [`DiskSession::readable`].
    readable: bool,
    /// Whether it may have sent more requests than were taken. They come before what its socket
    /// has, which may be its end.
    has_more: bool,
    /// Whether the client is in [`DiskSession::dirty`].
    dirty: bool,
    /// Whether the client is in [`DiskSession::hungry`].
    hungry: bool,
    _reservation: Option<Reservation>,
}

/// A request in flight.
struct SessionRequest {
    /// Key of its client.
    client: usize,
    pending: PendingRequest,
    /// When it was taken.
    since: Instant,
    /// What its step in flight counts for, of the bytes in flight.
    moving: usize,
}

/// Requests whose next step may be submitted, by token: those of a client in order, and clients in
/// turns.
#[derive(Default)]
struct RunnableRequests {
    /// The requests of each client, by its key.
    tokens: Vec<VecDeque<usize>>,
    /// Keys of the clients that have some, in the order of their turns.
    turns: VecDeque<usize>,
}

impl RunnableRequests {
    fn push(&mut self, client: usize, token: usize) {
        if self.tokens.len() <= client {
            self.tokens.resize_with(client + 1, VecDeque::new);
        }
        if self.tokens[client].is_empty() {
            self.turns.push_back(client);
        }
        self.tokens[client].push_back(token);
    }

    fn pop(&mut self) -> Option<usize> {
        let client = self.turns.pop_front()?;
        let token = self.tokens[client].pop_front();
        if !self.tokens[client].is_empty() {
            self.turns.push_back(client);
        }
        token
    }

    fn is_empty(&self) -> bool {
        self.turns.is_empty()
    }
}

/// The clients of one disk in one thread, and their queue of the disk.
struct DiskSession {
    port: DiskPort,
    /// Declared after the port: the queue must be closed before the export may be removed.
    export: ExportGuard,
    /// The most bytes of one step.
    max_step: usize,
    inbox: Arc<SessionInbox>,
    clients: Slab<Client>,
    /// Requests in flight, by token.
    in_flight: Slab<SessionRequest>,
    /// Bytes that all steps in flight move.
    moving: usize,
    /// Clients that may have sent something, in the order of their turns.
    readable: VecDeque<usize>,
    runnable: RunnableRequests,
    /// Clients that may have replies to send, or whose socket may have to be watched for other
    /// events.
    dirty: VecDeque<usize>,
    /// Clients whose next request waits for memory, in the order of their turns.
    hungry: VecDeque<usize>,
    /// When they ask again.
    ask_at: Option<Instant>,
    /// Completions still to handle, the next one last. Empty between turns, unless a panic has
    /// ended the turn.
    completions: Vec<Completion>,
    /// The client whose connection the session works on: a panic costs it alone.
    serving: Option<usize>,
    /// Clients lost by a panic.
    panicked: Vec<usize>,
    /// Whether the server is stopping.
    stopping: bool,
    /// Whether the session serves no more.
    given_up: bool,
}

impl DiskSession {
    /// Opens a queue of the export's disk, for a session in `thread`.
    ///
    /// # Errors
    /// If the export is being removed, or the system refuses a descriptor.
    fn open(
        export: &Arc<Export>,
        thread: ReactorThread,
    ) -> Result<(Self, Arc<SessionInbox>), ConnectionEnd> {
        let guard = ExportGuard::enter(export).ok_or(ConnectionEnd::Gone)?;
        let inbox = Arc::new(SessionInbox {
            messages: Mutex::new(Some(Vec::new())),
            thread,
        });
        let session = Self {
            port: DiskPort::open(&*export.backend, &export.throttle)?,
            max_step: max_step_bytes(export),
            export: guard,
            inbox: Arc::clone(&inbox),
            clients: Slab::new(),
            in_flight: Slab::new(),
            moving: 0,
            readable: VecDeque::new(),
            runnable: RunnableRequests::default(),
            dirty: VecDeque::new(),
            hungry: VecDeque::new(),
            ask_at: None,
            completions: Vec::new(),
            serving: None,
            panicked: Vec::new(),
            stopping: false,
            given_up: false,
        };
        let watcher: Arc<dyn GateWatcher> = Arc::clone(&inbox) as _;
        export.gate.watch(Arc::downgrade(&watcher));
        export.users.watch(Arc::downgrade(&watcher));
        Ok((session, inbox))
    }

    /// Handles a message from another thread.
    fn handle(&mut self, message: SessionMessage, turn: &mut Turn<'_>) {
        match message {
            SessionMessage::Connection(connection, reservation) => {
                let key = self.clients.insert(Client {
                    connection: Some(*connection),
                    abandoned: 0,
                    watched: EventSet::empty(),
                    readable: false,
                    has_more: false,
                    dirty: false,
                    hungry: false,
                    _reservation: reservation,
                });
                let inbox = Arc::downgrade(&self.inbox);
                if let Some(connection) = &self.clients[key].connection {
                    connection.on_eviction(move || {
                        // A session that has ended does not care.
                        let _ = inbox
                            .upgrade()
                            .map(|inbox| inbox.send(SessionMessage::Gate));
                    });
                }
                self.port.set_clients(self.clients.len());
                // The client's first requests may have been decrypted together with the end of the
                // handshake.
                self.mark_readable(key);
            }
            SessionMessage::Extents(token, extents) => self.end_query(token, extents, turn),
            // If the gate is open, requests already received are taken; if it is closed, sockets
            // are no longer watched for input. Connections to a removed export end.
            SessionMessage::Gate => self
                .client_keys()
                .into_iter()
                .for_each(|key| self.take_requests(key, turn)),
        }
    }

    /// Lets a client's connection work for itself: a panic costs that client alone. `None`: the
    /// connection is gone.
    fn with_connection<T>(
        &mut self,
        key: usize,
        work: impl FnOnce(&mut Connection) -> T,
    ) -> Option<T> {
        let connection = self.clients.get_mut(key)?.connection.as_mut()?;
        self.serving = Some(key);
        let done = work(connection);
        self.serving = None;
        Some(done)
    }

    fn client_keys(&self) -> Vec<usize> {
        self.clients.iter().map(|(key, _)| key).collect()
    }

    /// Begins to end all connections: clients get the replies to requests already taken, and no
    /// more requests are read.
    fn close_connections(&mut self) {
        for key in self.client_keys() {
            if let Some(connection) = &mut self.clients[key].connection {
                connection.close();
            }
            self.mark_dirty(key);
        }
    }

    fn mark_readable(&mut self, key: usize) {
        if let Some(client) = self.clients.get_mut(key)
            && !std::mem::replace(&mut client.readable, true)
        {
            self.readable.push_back(key);
        }
    }

    fn mark_dirty(&mut self, key: usize) {
        if let Some(client) = self.clients.get_mut(key)
            && !std::mem::replace(&mut client.dirty, true)
        {
            self.dirty.push_back(key);
        }
    }

    /// Reads from a client's socket once, and takes the requests that have arrived.
    fn receive(&mut self, key: usize, turn: &mut Turn<'_>) {
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        client.readable = false;
        if std::mem::take(&mut client.has_more) {
            return self.take_requests(key, turn);
        }
        match self.with_connection(key, Connection::receive) {
            None => {}
            Some(Ok(read)) => {
                turn.charge(read);
                self.take_requests(key, turn);
            }
            Some(Err(ended)) => self.disconnect(key, Err(ended), turn),
        }
    }

    /// Takes requests that a client has sent, as far as its connection has room. Others come before
    /// the rest.
    fn take_requests(&mut self, key: usize, turn: &mut Turn<'_>) {
        // One clock reading for all of them.
        let mut since = None;
        let mut taken = 0;
        loop {
            if taken == MAX_TAKEN {
                self.clients[key].has_more = true;
                self.mark_readable(key);
                break;
            }
            taken += 1;
            let pending = match self.with_connection(key, Connection::next) {
                None => return,
                Some(Ok(Some(pending))) => pending,
                Some(Ok(None)) => break,
                Some(Err(ended)) => return self.disconnect(key, Err(ended), turn),
            };
            turn.charge_request(0);
            let query = pending.query();
            let token = self.in_flight.insert(SessionRequest {
                client: key,
                pending,
                since: *since.get_or_insert_with(Instant::now),
                moving: 0,
            });
            let Some(query) = query else {
                self.runnable.push(key, token);
                continue;
            };
            let inbox = Arc::clone(&self.inbox);
            // The session is there as long as the request is in flight.
            let answer = move |extents| drop(inbox.send(SessionMessage::Extents(token, extents)));
            let Export {
                look_ups, backend, ..
            } = &**self.export;
            look_ups.ask(backend, move |backend| query.run(backend), answer);
        }
        let client = &mut self.clients[key];
        if client
            .connection
            .as_ref()
            .is_some_and(Connection::is_hungry)
            && !client.hungry
        {
            client.hungry = true;
            self.hungry.push_back(key);
        }
        self.mark_dirty(key);
    }

    /// Lets the clients that wait for memory ask again.
    fn ask_again(&mut self, turn: &mut Turn<'_>) {
        if self.ask_at.take_if(|at| *at <= Instant::now()).is_none() {
            return;
        }
        for _ in 0..self.hungry.len() {
            if let Some(key) = self.hungry.pop_front()
                && let Some(client) = self.clients.get_mut(key)
            {
                client.hungry = false;
                let connection = client.connection.as_ref();
                if connection.is_some_and(Connection::is_hung_up) {
                    self.disconnect(key, Err(ConnectionEnd::Gone), turn);
                } else {
                    self.take_requests(key, turn);
                }
            }
        }
    }

    /// Submits the next step of a request.
    fn submit_step(&mut self, token: usize, turn: &mut Turn<'_>) {
        let Some(request) = self.in_flight.get_mut(token) else {
            return;
        };
        let most = self.max_step.min(turn.part());
        let Some(operation) = request.pending.next_step(most) else {
            debug_assert!(false, "request {token} has no more steps");
            return;
        };
        let bytes = bytes_of(&operation) as usize;
        turn.charge(bytes);
        turn.take_room(bytes);
        if bytes > 0 {
            request.moving = bytes.max(LEAST_IN_FLIGHT);
            self.moving += request.moving;
        }
        self.port.submit(token as u64, operation);
    }

    /// Handles the end of a step: lets the request's next step run, or answers the request.
    fn end_step(
        &mut self,
        token: usize,
        result: Result<Option<Buffer>, Failure>,
        turn: &mut Turn<'_>,
    ) {
        let Some(request) = self.in_flight.get_mut(token) else {
            debug_assert!(false, "completion of unknown token {token}");
            return;
        };
        self.moving -= std::mem::take(&mut request.moving);
        let gone = self.clients[request.client].connection.is_none();
        let pending = &mut request.pending;
        let result = match result {
            Ok(data) => {
                pending.store_data(data);
                if self.stopping {
                    pending.cut_short();
                }
                if !gone && pending.has_steps() {
                    return self.runnable.push(request.client, token);
                }
                let waits = pending.take_await_written() && self.export.answer == Answer::Written;
                if !gone && waits && !self.port.notify_written(token as u64) {
                    return;
                }
                Ok(())
            }
            Err(failure) => Err(failure),
        };
        self.end_request(token, result, turn);
    }

    /// Answers a BLOCK_STATUS request whose query has its result.
    fn end_query(
        &mut self,
        token: usize,
        extents: io::Result<Vec<Vec<ExtentStatus>>>,
        turn: &mut Turn<'_>,
    ) {
        let result = match (extents, self.in_flight.get_mut(token)) {
            (Ok(extents), Some(request)) => {
                request.pending.set_extents(extents);
                Ok(())
            }
            (_, None) => return,
            // For instance a snapshot that was deleted after the client chose its context.
            (Err(error), _) if error.kind() == io::ErrorKind::NotFound => Err(Failure::OutOfRange),
            (Err(error), _) => {
                tracing::error!(
                    "cannot tell which parts of a disk hold data or have changed: {error}"
                );
                Err(Failure::Io)
            }
        };
        self.end_request(token, result, turn);
    }

    /// Answers a request.
    fn end_request(&mut self, token: usize, result: Result<(), Failure>, turn: &mut Turn<'_>) {
        let SessionRequest {
            client: key,
            pending,
            since,
            ..
        } = self.in_flight.remove(token);
        if let Some(kind) = kind(pending.command()) {
            let latencies = &self.export.metrics.latencies;
            latencies.count(0, kind, since.elapsed());
        }
        self.export.gate.leave();
        let answered = self.with_connection(key, |connection| connection.answer(pending, result));
        if answered.is_some() {
            // There may be room now for requests that have already arrived.
            self.take_requests(key, turn);
        } else {
            self.clients[key].abandoned -= 1;
            self.remove_if_idle(key);
        }
    }

    /// Sends replies of a client, updates which events its socket is watched for, and drops it if
    /// it is done.
    fn update_client(&mut self, key: usize, turn: &mut Turn<'_>) {
        let Some(client) = self.clients.get_mut(key) else {
            return;
        };
        client.dirty = false;
        let (sent, more) =
            match self.with_connection(key, |connection| connection.send(turn.left())) {
                None => return,
                Some(Ok((sent, more))) => (sent, more),
                Some(Err(ended)) => return self.disconnect(key, Err(ended), turn),
            };
        turn.charge(sent);
        let client = &mut self.clients[key];
        let Some(connection) = &client.connection else {
            return;
        };
        if connection.is_over() {
            return self.disconnect(key, Ok(()), turn);
        }
        // What it received before its replies took all room makes no socket readable.
        let has_more = connection.has_decrypted() || sent > 0 && connection.has_received();
        let wanted = connection.interest();
        let event = FIRST_OWN_EVENT + key;
        let watched = match (client.watched.is_empty(), wanted.is_empty()) {
            _ if client.watched == wanted => Ok(()),
            (true, _) => turn.watch(connection, event, wanted),
            // A watched socket reports a hang-up again and again, even if nothing is read from it
            // or written to it.
            (_, true) => {
                turn.unwatch(connection);
                Ok(())
            }
            _ => turn.rewatch(connection, wanted),
        };
        match watched {
            Ok(()) => client.watched = wanted,
            Err(error) => return self.disconnect(key, Err(error.into()), turn),
        }
        if has_more {
            self.mark_readable(key);
        }
        if more {
            self.mark_dirty(key);
        }
    }

    /// When the first of the clients that don't read their last replies is disconnected;
    /// disconnects those that are late.
    fn end_late(&mut self, turn: &mut Turn<'_>) -> Option<Instant> {
        if !self.stopping && !self.export.users.is_closed() {
            return None;
        }
        let now = Instant::now();
        let deadline = |client: &Client| client.connection.as_ref().and_then(Connection::deadline);
        for key in self.client_keys() {
            if deadline(&self.clients[key]).is_some_and(|at| at <= now) {
                self.disconnect(key, Err(ConnectionEnd::Gone), turn);
            }
        }
        self.clients
            .iter()
            .filter_map(|(_, client)| deadline(client))
            .min()
    }

    /// Ends a connection. Its requests in flight are still carried out.
    fn disconnect(&mut self, key: usize, outcome: Result<(), ConnectionEnd>, turn: &mut Turn<'_>) {
        let client = &mut self.clients[key];
        if let Some(mut connection) = client.connection.take() {
            if !client.watched.is_empty() {
                turn.unwatch(&connection);
            }
            connection.close_tls();
            client.abandoned = connection.requests();
            report(outcome);
        }
        self.remove_if_idle(key);
    }

    /// Ends the connections that a panic has left in an unknown state. Their requests in flight are
    /// still carried out.
    fn drop_panicked(&mut self, turn: &mut Turn<'_>) {
        for key in std::mem::take(&mut self.panicked) {
            let in_flight = self.in_flight.iter();
            let abandoned = in_flight
                .filter(|(_, request)| request.client == key)
                .count();
            let Some(client) = self.clients.get_mut(key) else {
                continue;
            };
            client.abandoned = abandoned;
            if let Some(connection) = client.connection.take()
                && !client.watched.is_empty()
            {
                turn.unwatch(&connection);
            }
            self.remove_if_idle(key);
        }
    }

    /// Removes a client that is gone and has no requests in flight.
    fn remove_if_idle(&mut self, key: usize) {
        let client = &self.clients[key];
        if client.connection.is_some() || client.abandoned > 0 {
            return;
        }
        self.readable.retain(|&other| other != key);
        self.dirty.retain(|&other| other != key);
        self.hungry.retain(|&other| other != key);
        self.clients.remove(key);
        self.port.set_clients(self.clients.len());
    }
}

impl Source for DiskSession {
    fn throttle(&self) -> &Arc<Throttle> {
        self.port.throttle()
    }

    fn begin(&mut self, turn: &mut Turn<'_>) -> io::Result<()> {
        self.port.watch(turn)
    }

    fn ready(&mut self, event: usize, what: EventSet, _: bool) {
        match event.checked_sub(FIRST_OWN_EVENT) {
            None => self.port.ready(event),
            Some(key) if what == EventSet::OUT => self.mark_dirty(key),
            // The read will tell data, an error and the end of the stream apart.
            Some(key) => self.mark_readable(key),
        }
    }

    fn take(&mut self, turn: &mut Turn<'_>) {
        self.drop_panicked(turn);
        for message in self.inbox.take() {
            self.handle(message, turn);
        }
        if turn.is_stopping() && !std::mem::replace(&mut self.stopping, true) {
            self.close_connections();
        }
        self.ask_again(turn);
        let mut more = true;
        while more && !turn.is_over() {
            more = false;
            if let Some(key) = self.readable.pop_front() {
                self.receive(key, turn);
                more = true;
            }
            if let Some(token) = self.runnable.pop() {
                self.submit_step(token, turn);
                more = true;
            }
        }
    }

    fn kick(&mut self, alone: bool) {
        self.port.kick(alone && self.in_flight.len() == 1);
    }

    fn answer(&mut self, turn: &mut Turn<'_>) -> NextStep {
        if self.completions.is_empty() {
            self.port.completions(&mut self.completions);
            self.completions.reverse();
        }
        // The first may end, whatever it takes.
        while let Some(Completion { token, result }) = self.completions.pop() {
            turn.charge_request(0);
            self.end_step(token as usize, result, turn);
            if turn.is_over() {
                break;
            }
        }
        // Each client once: one whose replies did not fit the turn is at the end of the list again.
        for _ in 0..self.dirty.len() {
            if turn.is_over() {
                break;
            }
            if let Some(key) = self.dirty.pop_front() {
                self.update_client(key, turn);
            }
        }
        let mut deadline = self.end_late(turn);
        if !self.hungry.is_empty() {
            let at = *self
                .ask_at
                .get_or_insert_with(|| Instant::now() + MemoryClient::RETRY);
            deadline = Some(deadline.map_or(at, |deadline| deadline.min(at)));
        }
        if self.given_up || (self.clients.is_empty() && self.inbox.close()) {
            NextStep::End
        } else if self.port.has_submitted()
            || !self.completions.is_empty()
            || !self.dirty.is_empty()
        {
            NextStep::Work
        } else if !self.readable.is_empty() || !self.runnable.is_empty() {
            NextStep::Take
        } else {
            deadline.map_or(NextStep::Wait, NextStep::WaitUntil)
        }
    }

    fn has_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }

    fn bytes_in_flight(&self) -> usize {
        self.moving
    }

    fn survive(&mut self, reason: &str) -> bool {
        let Some(key) = self.serving.take() else {
            return false;
        };
        let name = self.export.name();
        tracing::error!("NBD export '{name}': a client was disconnected: {reason}");
        self.panicked.push(key);
        true
    }

    fn give_up(&mut self, reason: &str) {
        let name = self.export.name();
        let clients = self.clients.len();
        tracing::error!("NBD export '{name}': {clients} clients were disconnected: {reason}");
        self.given_up = true;
    }
}

impl Drop for DiskSession {
    /// Requests still in flight were abandoned after an error. They leave the gate without a reply.
    fn drop(&mut self) {
        *self.inbox.lock() = None;
        for _ in self.in_flight.drain() {
            self.export.gate.leave();
        }
    }
}

/// The kind of operation that a command's latency counts as.
fn kind(command: u16) -> Option<OperationKind> {
    match command {
        command::READ => Some(OperationKind::Read),
        command::WRITE => Some(OperationKind::Write),
        command::FLUSH => Some(OperationKind::Flush),
        command::TRIM => Some(OperationKind::Discard),
        command::WRITE_ZEROES => Some(OperationKind::WriteZeroes),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;
    use crate::backend::ram::RamDisk;
    use crate::backend::{Backend, BackendQueue, Capabilities};
    use crate::nbd::handshake::HandshakeResult;
    use crate::nbd::protocol::Framing;
    use crate::nbd::slots::ClientSlots;
    use crate::nbd::wire::Wire;

    /// A disk that panics once when a connection checks a request.
    struct PanickingDisk {
        ram: RamDisk,
        panics: Arc<AtomicBool>,
    }

    impl Backend for PanickingDisk {
        fn sectors(&self) -> u64 {
            self.ram.sectors()
        }

        fn capabilities(&self) -> Capabilities {
            assert!(
                !self.panics.swap(false, Ordering::SeqCst),
                "a test asked for it"
            );
            self.ram.capabilities()
        }

        fn write_cache(&self) -> bool {
            self.ram.write_cache()
        }

        fn set_write_cache(&self, on: bool) {
            self.ram.set_write_cache(on);
        }

        fn open_queue(&self) -> io::Result<Box<dyn BackendQueue>> {
            self.ram.open_queue()
        }
    }

    #[test]
    fn a_client_with_many_requests_leaves_the_others_their_turns() {
        let mut runnable = RunnableRequests::default();
        (0..100).for_each(|token| runnable.push(2, token));
        runnable.push(0, 100);
        assert_eq!([runnable.pop(), runnable.pop()], [Some(0), Some(100)]);
        runnable.push(0, 101);
        runnable.push(5, 102);
        let rest: Vec<_> = std::iter::from_fn(|| runnable.pop()).collect();
        assert_eq!(rest[..4], [1, 101, 102, 2]);
        assert!(rest[4..].iter().copied().eq(3..100) && runnable.is_empty());
    }

    #[test]
    fn a_panic_costs_the_client_that_is_served_and_no_other() {
        let panics = Arc::new(AtomicBool::new(false));
        let disk = PanickingDisk {
            ram: RamDisk::new(8),
            panics: Arc::clone(&panics),
        };
        let export = Arc::new(Export::new("disk", "", Arc::new(disk)));
        let pool = Pool {
            threads: ReactorPool::with_threads("test", 1),
            sessions: Mutex::default(),
        };
        let connect = || {
            let (ours, theirs) = UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            let handshake = HandshakeResult {
                export: ExportGuard::enter(&export).unwrap(),
                framing: Framing::Simple,
                contexts: Arc::new([]),
            };
            let slot = ClientSlots::default()
                .handshake(None, &ours)
                .unwrap()
                .connection();
            let wire = Wire::new(ours.into());
            pool.serve(Connection::new(handshake, wire, slot.unwrap()))
                .unwrap();
            theirs
        };
        let clients = [connect(), connect(), connect()];
        let flush = |mut client: &UnixStream| {
            let mut request = [0; 28];
            request[..4].copy_from_slice(&0x2560_9513_u32.to_be_bytes());
            request[7] = command::FLUSH as u8;
            client.write_all(&request).unwrap();
            client.read_exact(&mut [0; 16])
        };
        assert!(clients.iter().all(|client| flush(client).is_ok()));
        panics.store(true, Ordering::SeqCst);
        assert!(flush(&clients[1]).is_err());
        assert!(flush(&clients[0]).is_ok() && flush(&clients[2]).is_ok());
        assert!(flush(&connect()).is_ok());
        drop(clients);
        drop(pool);
        export.users.close();
    }
}
