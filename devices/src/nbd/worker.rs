//! Threads that serve connections. Each is an event loop over many sockets, with a session for each disk that they use.
//!
//! A thread per connection would cost two context switches per request, most of a request's cost when many clients
//! flush. One thread serves a dozen clients better: it submits all their requests to the disk as one batch, and a commit
//! group wakes it once for all clients whose requests the group completed.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use slab::Slab;
use walvisor_block::request_short_slices;

use super::connection::{Connection, max_step_bytes};
use super::connection_end::{ConnectionEnd, report};
use super::disk_session::{DiskSession, kind};
use super::export::{Export, ExportGuard};
use super::inbox::{ExtentAnswer, WorkerEvent, WorkerInbox, WorkerMessage};
use crate::backend::{Buffer, Completion, Failure};
use crate::block::max_threads;
use crate::control::GateWatcher;
use crate::event_loop::{Event, EventLoop, EventSet};
use crate::listen::join;
use crate::throttle::QueueLimits;

/// Rounds of completions that a worker handles before it looks at its sockets again. Without this limit a long request
/// whose steps complete at once would starve the other clients.
const ROUNDS: usize = 64;

/// The threads of a server. The pool starts them as connections arrive, up to [`max_threads`] shared ones.
pub(super) struct Pool {
    most: usize,
    workers: Mutex<Vec<WorkerHandle>>,
}

struct WorkerHandle {
    inbox: Arc<WorkerInbox>,
    /// Whether the thread serves one connection only.
    dedicated: bool,
    thread: JoinHandle<()>,
}

impl Default for Pool {
    fn default() -> Self {
        Self {
            most: max_threads(),
            workers: Mutex::default(),
        }
    }
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Vec<WorkerHandle>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a connection to a worker, which serves it until it ends.
    ///
    /// # Errors
    /// If the system refuses a thread or a descriptor.
    pub(super) fn serve(&self, connection: Connection) -> io::Result<()> {
        let mut workers = self.lock();
        for ended in workers.extract_if(.., |worker| worker.thread.is_finished()) {
            join(ended.thread, "NBD");
        }
        // A read that blocks must not hold up other clients.
        let dedicated = connection.export().backend.blocks();
        let shared = || workers.iter().filter(|worker| !worker.dedicated);
        let least = shared().min_by_key(|worker| worker.inbox.load.load(Ordering::Relaxed));
        match least {
            Some(worker)
                if !dedicated
                    && (shared().count() >= self.most
                        || worker.inbox.load.load(Ordering::Relaxed) == 0) =>
            {
                worker.inbox.add_connection(connection);
            }
            _ => {
                let worker = start(dedicated)?;
                worker.inbox.add_connection(connection);
                if dedicated {
                    worker.inbox.send(WorkerMessage::Closed);
                }
                workers.push(worker);
            }
        }
        Ok(())
    }
}

impl Drop for Pool {
    /// Ends every connection, and waits for the workers to exit.
    fn drop(&mut self) {
        let workers: Vec<WorkerHandle> = self.lock().drain(..).collect();
        workers
            .iter()
            .for_each(|worker| worker.inbox.send(WorkerMessage::Stop));
        workers
            .into_iter()
            .for_each(|worker| join(worker.thread, "NBD"));
    }
}

fn start(dedicated: bool) -> io::Result<WorkerHandle> {
    let events = EventLoop::new()?;
    let inbox = Arc::new(WorkerInbox::new(events.sender()));
    let worker = Worker {
        events,
        ready: Vec::new(),
        inbox: Arc::clone(&inbox),
        sessions: Slab::new(),
        clients: Slab::new(),
        dirty: Vec::new(),
        decrypted: Vec::new(),
        completions: Vec::new(),
        next_session: 0,
        closed: false,
        stopping: false,
    };
    let thread = thread::Builder::new()
        .name("nbd-worker".into())
        .spawn(move || worker.run())?;
    Ok(WorkerHandle {
        inbox,
        dedicated,
        thread,
    })
}

/// A client that the worker serves, or whose last requests are still in flight.
struct Client {
    /// `None`: the client is gone, but some of its requests are still in flight.
    connection: Option<Connection>,
    /// Requests still in flight, once the client is gone.
    abandoned: usize,
    session: usize,
    /// The events that the worker watches its socket for; empty: it does not watch the socket.
    watched: EventSet,
    /// Whether the client is in [`Worker::dirty`].
    dirty: bool,
}

struct Worker {
    events: EventLoop<WorkerEvent, WorkerMessage>,
    /// The events of this turn. Empty between turns, and kept for its allocation.
    ready: Vec<Event<WorkerEvent, WorkerMessage>>,
    inbox: Arc<WorkerInbox>,
    sessions: Slab<DiskSession>,
    clients: Slab<Client>,
    /// Clients that may have replies to send, or whose socket may have to be watched for other events.
    dirty: Vec<usize>,
    /// Clients with decrypted data to read, which makes no socket readable.
    decrypted: Vec<usize>,
    /// Completions being handled. Empty between turns, and kept for its allocation.
    completions: Vec<Completion>,
    /// One more than the key of the session served last.
    next_session: usize,
    /// Whether no more connections will arrive.
    closed: bool,
    /// Whether the server is stopping.
    stopping: bool,
}

impl Worker {
    fn run(mut self) {
        request_short_slices();
        while !(self.closed && self.clients.is_empty()) {
            if let Err(error) = self.turn() {
                tracing::error!(
                    "NBD: {} clients were disconnected: {error}",
                    self.clients.len()
                );
                return;
            }
        }
    }

    /// Waits for events, and handles them.
    fn turn(&mut self) -> io::Result<()> {
        let mut ready = std::mem::take(&mut self.ready);
        self.events.wait(self.timeout(), &mut ready)?;
        for key in std::mem::take(&mut self.decrypted) {
            self.receive(key);
        }
        for event in ready.drain(..) {
            match event {
                Event::Ready(WorkerEvent::DiskSession(key), _) => {
                    if let Some(session) = self.sessions.get_mut(key) {
                        session.signalled = true;
                    }
                }
                Event::Ready(WorkerEvent::Timer(key), _) => {
                    if let Some(session) = self.sessions.get_mut(key) {
                        session.limits.release(&mut *session.queue);
                        session.submitted = true;
                    }
                }
                // The read will tell data, an error and the end of the stream apart.
                Event::Ready(WorkerEvent::Client(key), what) if what != EventSet::OUT => {
                    self.receive(key);
                }
                Event::Ready(WorkerEvent::Client(key), _) => self.mark_dirty(key),
                Event::Message(message) => self.handle_message(message),
            }
        }
        self.ready = ready;
        self.serve_sessions();
        self.update_clients();
        Ok(())
    }

    fn timeout(&self) -> Option<Duration> {
        if !self.decrypted.is_empty() || self.busy_session().is_some() {
            return Some(Duration::ZERO);
        }
        let connections = self.clients.iter();
        let connections = connections.filter_map(|(_, client)| client.connection.as_ref());
        let deadline = connections.filter_map(Connection::deadline).min()?;
        Some(deadline.saturating_duration_since(Instant::now()))
    }

    /// Handles a message from another thread.
    fn handle_message(&mut self, message: WorkerMessage) {
        match message {
            WorkerMessage::Connection(connection) => self.add_client(*connection),
            WorkerMessage::Extents(answer) => self.end_query(answer),
            // If the gate is open, requests already received are submitted; if it is closed, sockets are no longer watched
            // for input. Connections to a removed export end.
            WorkerMessage::Gate => self
                .session_keys()
                .into_iter()
                .for_each(|key| self.submit(key)),
            WorkerMessage::Closed => self.closed = true,
            WorkerMessage::Stop => {
                self.closed = true;
                self.close_connections();
            }
        }
    }

    fn session_keys(&self) -> Vec<usize> {
        self.clients.iter().map(|(key, _)| key).collect()
    }

    /// Begins to end all connections: clients get the replies to requests already taken, and no more requests are read.
    fn close_connections(&mut self) {
        self.stopping = true;
        for key in self.session_keys() {
            if let Some(connection) = &mut self.clients[key].connection {
                connection.close();
            }
            self.mark_dirty(key);
        }
    }

    /// Takes on a new client.
    fn add_client(&mut self, connection: Connection) {
        let session = match self.session(connection.export()) {
            Ok(session) => session,
            Err(ended) => {
                if let ConnectionEnd::Socket(error) = ended {
                    let name = connection.export().name();
                    tracing::error!("NBD export '{name}': {error}: a client was turned away");
                }
                self.inbox.load.fetch_sub(1, Ordering::Relaxed);
                return;
            }
        };
        self.sessions[session].add_clients(1);
        let key = self.clients.insert(Client {
            connection: Some(connection),
            abandoned: 0,
            session,
            watched: EventSet::empty(),
            dirty: false,
        });
        // The client's first requests may have been decrypted together with the end of the handshake.
        self.receive(key);
    }

    /// The session of an export, opened if this worker has none yet.
    ///
    /// # Errors
    /// If the export is being removed, or the system refuses a descriptor.
    fn session(&mut self, export: &Arc<Export>) -> Result<usize, ConnectionEnd> {
        let same = |(_, session): &(usize, &DiskSession)| Arc::ptr_eq(&session.export, export);
        if let Some((key, _)) = self.sessions.iter().find(same) {
            return Ok(key);
        }
        let guard = ExportGuard::enter(export).ok_or(ConnectionEnd::Gone)?;
        let (queue, limits) = (
            export.backend.open_queue()?,
            QueueLimits::new(&export.throttle)?,
        );
        let watcher: Arc<dyn GateWatcher> = Arc::clone(&self.inbox) as _;
        export.gate.watch(Arc::downgrade(&watcher));
        export.users.watch(Arc::downgrade(&watcher));
        let key = self.sessions.insert(DiskSession {
            export: guard,
            max_step: max_step_bytes(export),
            queue,
            limits,
            in_flight: Slab::new(),
            clients: 0,
            submitted: false,
            signalled: false,
        });
        let (session, events) = (&self.sessions[key], &mut self.events);
        let watched = events.watch(
            session.queue.event(),
            WorkerEvent::DiskSession(key),
            EventSet::IN,
        );
        watched
            .and_then(|()| {
                events.watch(
                    session.limits.timer(),
                    WorkerEvent::Timer(key),
                    EventSet::IN,
                )
            })
            .inspect_err(|_| self.close_session(key))?;
        Ok(key)
    }

    /// Closes a session that no client of this worker uses any more.
    fn close_session(&mut self, key: usize) {
        let session = self.sessions.remove(key);
        for event in [session.queue.event(), session.limits.timer()] {
            if let Err(error) = self.events.unwatch(event) {
                tracing::debug!("NBD: a queue's event was not watched: {error}");
            }
        }
    }

    /// Reads from a client's socket, and submits the requests that arrived.
    fn receive(&mut self, key: usize) {
        let client = self.clients.get_mut(key);
        let Some(connection) = client.and_then(|client| client.connection.as_mut()) else {
            return;
        };
        match connection.receive() {
            Ok(()) => self.submit(key),
            Err(ended) => self.disconnect(key, Err(ended)),
        }
    }

    /// Submits the requests that a client has sent, as far as its connection has room.
    fn submit(&mut self, key: usize) {
        // One clock reading for all of them.
        let mut since = None;
        loop {
            let client = &mut self.clients[key];
            let Some(connection) = &mut client.connection else {
                return;
            };
            let pending = match connection.next() {
                Ok(Some(pending)) => pending,
                Ok(None) => break,
                Err(ended) => return self.disconnect(key, Err(ended)),
            };
            let session = &mut self.sessions[client.session];
            let token =
                session
                    .in_flight
                    .insert((key, pending, *since.get_or_insert_with(Instant::now)));
            session.begin(client.session, token, &self.inbox);
        }
        self.mark_dirty(key);
    }

    /// Kicks queues and handles completions until no session has work, for at most [`ROUNDS`] rounds.
    fn serve_sessions(&mut self) {
        let mut completions = std::mem::take(&mut self.completions);
        for _ in 0..ROUNDS {
            let Some(key) = self.busy_session() else {
                break;
            };
            self.next_session = key + 1;
            let in_flight = self
                .sessions
                .iter()
                .map(|(_, session)| session.in_flight.len());
            let alone = in_flight.sum::<usize>() == 1;
            let session = &mut self.sessions[key];
            if std::mem::take(&mut session.submitted) {
                if alone {
                    session.queue.kick_alone();
                } else {
                    session.queue.kick();
                }
            }
            session.signalled = false;
            session.queue.completions(&mut completions);
            for Completion { token, result } in completions.drain(..) {
                self.end_step(key, token as usize, result);
            }
        }
        self.completions = completions;
    }

    /// A session with something to do, chosen round-robin.
    fn busy_session(&self) -> Option<usize> {
        let busy = |(_, session): &(usize, &DiskSession)| session.submitted || session.signalled;
        let mut sessions = self.sessions.iter();
        let next = sessions.find(|session| session.0 >= self.next_session && busy(session));
        let found = next.or_else(|| self.sessions.iter().find(busy));
        found.map(|(key, _)| key)
    }

    /// Handles the end of a step: submits the request's next step, or answers the request.
    fn end_step(
        &mut self,
        session_key: usize,
        token: usize,
        result: Result<Option<Buffer>, Failure>,
    ) {
        let session = &mut self.sessions[session_key];
        let Some((key, pending, _)) = session.in_flight.get_mut(token) else {
            debug_assert!(false, "completion of unknown token {token}");
            return;
        };
        let key = *key;
        let gone = self.clients[key].connection.is_none();
        let result = match result {
            Ok(data) => {
                pending.store_data(data);
                if self.stopping {
                    pending.cut_short();
                }
                if !gone && (session.submit_step(token) || session.waits_for_write(token)) {
                    return;
                }
                Ok(())
            }
            Err(failure) => Err(failure),
        };
        self.end_request(session_key, token, result);
    }

    /// Answers a BLOCK_STATUS request whose query has its result.
    fn end_query(&mut self, answer: ExtentAnswer) {
        let ExtentAnswer {
            session,
            token,
            extents,
        } = answer;
        // The session and the token are valid as long as the request is in flight.
        let in_flight = &mut self.sessions[session].in_flight;
        let result = match (extents, in_flight.get_mut(token)) {
            (Ok(extents), Some((_, pending, _))) => {
                pending.set_extents(extents);
                Ok(())
            }
            (Ok(_), None) => return,
            // For instance a snapshot that was deleted after the client chose its context.
            (Err(error), _) if error.kind() == io::ErrorKind::NotFound => Err(Failure::OutOfRange),
            (Err(error), _) => {
                tracing::error!(
                    "cannot tell which parts of a disk hold data or have changed: {error}"
                );
                Err(Failure::Io)
            }
        };
        self.end_request(session, token, result);
    }

    /// Answers a request.
    fn end_request(&mut self, session: usize, token: usize, result: Result<(), Failure>) {
        let session = &mut self.sessions[session];
        let (key, pending, since) = session.in_flight.remove(token);
        if let Some(kind) = kind(pending.command()) {
            let latencies = &session.export.metrics.latencies;
            latencies.count(0, kind, since.elapsed());
        }
        session.export.gate.leave();
        let client = &mut self.clients[key];
        match &mut client.connection {
            Some(connection) => {
                connection.answer(pending, result);
                // There may be room now for requests that have already arrived.
                self.submit(key);
            }
            None => {
                client.abandoned -= 1;
                self.remove_if_idle(key);
            }
        }
    }

    fn mark_dirty(&mut self, key: usize) {
        if let Some(client) = self.clients.get_mut(key)
            && !std::mem::replace(&mut client.dirty, true)
        {
            self.dirty.push(key);
        }
    }

    /// Sends pending replies, updates which events sockets are watched for, and drops clients that are done or too late.
    fn update_clients(&mut self) {
        for key in std::mem::take(&mut self.dirty) {
            let Some(client) = self.clients.get_mut(key) else {
                continue;
            };
            client.dirty = false;
            let Some(connection) = &mut client.connection else {
                continue;
            };
            if let Err(ended) = connection.send() {
                self.disconnect(key, Err(ended));
                continue;
            }
            if connection.is_over() {
                self.disconnect(key, Ok(()));
                continue;
            }
            if connection.has_decrypted() {
                self.decrypted.push(key);
            }
            let wanted = connection.interest();
            let watched = match (client.watched.is_empty(), wanted.is_empty()) {
                _ if client.watched == wanted => Ok(()),
                (true, _) => self
                    .events
                    .watch(&*connection, WorkerEvent::Client(key), wanted),
                // A watched socket reports a hang-up again and again, even if nothing is read from it or written to it.
                (_, true) => self.events.unwatch(&*connection),
                _ => self.events.rewatch(&*connection, wanted),
            };
            match watched {
                Ok(()) => client.watched = wanted,
                Err(error) => self.disconnect(key, Err(error.into())),
            }
        }
        let is_late = |client: &Client| {
            let deadline = client.connection.as_ref().and_then(Connection::deadline);
            deadline.is_some_and(|deadline| deadline <= Instant::now())
        };
        let late = self.clients.iter().filter(|(_, client)| is_late(client));
        for key in late.map(|(key, _)| key).collect::<Vec<_>>() {
            self.disconnect(key, Err(ConnectionEnd::Gone));
        }
    }

    /// Ends a connection. Its requests in flight are still carried out.
    fn disconnect(&mut self, key: usize, outcome: Result<(), ConnectionEnd>) {
        let client = &mut self.clients[key];
        if let Some(mut connection) = client.connection.take() {
            if !client.watched.is_empty()
                && let Err(error) = self.events.unwatch(&connection)
            {
                tracing::debug!("NBD: a client's socket was not watched: {error}");
            }
            connection.close_tls();
            client.abandoned = connection.requests();
            report(outcome);
        }
        self.remove_if_idle(key);
    }

    /// Removes a client that is gone and has no requests in flight, and closes its session if it was the last client there.
    fn remove_if_idle(&mut self, key: usize) {
        let client = &self.clients[key];
        if client.connection.is_some() || client.abandoned > 0 {
            return;
        }
        let session = client.session;
        self.clients.remove(key);
        self.inbox.load.fetch_sub(1, Ordering::Relaxed);
        self.sessions[session].add_clients(-1);
        if self.sessions[session].clients == 0 {
            self.close_session(session);
        }
    }
}
