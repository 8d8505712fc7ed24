//! Threads that serve connections. Each is an event loop over many sockets, with a port to each disk that they use.
//!
//! A thread per connection would cost two context switches per request, which with many clients that flush is most of a
//! request's cost. One thread serves a dozen clients better: it submits the requests of all of them to the disk as one
//! batch, and a commit group wakes it once for all the clients that the group served.

use std::io;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use slab::Slab;
use walvisor_block::request_short_slices;

use super::connection::{Connection, part};
use super::desk::{Desk, kind};
use super::ended::{ConnectionEnd, report};
use super::export::{Export, Used};
use super::inbox::{Inbox, Mail, Mapped, Source};
use crate::backend::{Buffer, Completion, Failure};
use crate::block::most_threads;
use crate::control::Wake;
use crate::event_loop::{Event, EventLoop, EventSet};
use crate::listen::join;
use crate::throttle::QueueLimits;

/// How many rounds of completions a worker handles before it looks at sockets again. The steps of one long request may
/// complete as they are submitted, for a long time.
const ROUNDS: usize = 64;

/// The threads of a server. The pool starts them as connections arrive, up to [`most_threads`] shared ones.
pub(super) struct Pool {
    most: usize,
    workers: Mutex<Vec<Handle>>,
}

struct Handle {
    inbox: Arc<Inbox>,
    /// The thread serves one connection and no other.
    alone: bool,
    thread: JoinHandle<()>,
}

impl Default for Pool {
    fn default() -> Self {
        Self {
            most: most_threads(),
            workers: Mutex::default(),
        }
    }
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, Vec<Handle>> {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands a connection to a worker, which serves it to its end.
    ///
    /// # Errors
    /// If the system refuses a thread or a descriptor.
    pub(super) fn serve(&self, connection: Connection) -> io::Result<()> {
        let mut workers = self.lock();
        for ended in workers.extract_if(.., |worker| worker.thread.is_finished()) {
            join(ended.thread, "NBD");
        }
        // A read that blocks must not hold up other clients.
        let alone = connection.export().backend.blocks();
        let shared = || workers.iter().filter(|worker| !worker.alone);
        let least = shared().min_by_key(|worker| worker.inbox.load.load(Ordering::Relaxed));
        match least {
            Some(worker)
                if !alone
                    && (shared().count() >= self.most
                        || worker.inbox.load.load(Ordering::Relaxed) == 0) =>
            {
                worker.inbox.put(connection);
            }
            _ => {
                let worker = start(alone)?;
                worker.inbox.put(connection);
                if alone {
                    worker.inbox.send(Mail::Closed);
                }
                workers.push(worker);
            }
        }
        Ok(())
    }
}

impl Drop for Pool {
    /// Ends every connection, and waits for the workers.
    fn drop(&mut self) {
        let workers: Vec<Handle> = self.lock().drain(..).collect();
        workers
            .iter()
            .for_each(|worker| worker.inbox.send(Mail::Stop));
        workers
            .into_iter()
            .for_each(|worker| join(worker.thread, "NBD"));
    }
}

fn start(alone: bool) -> io::Result<Handle> {
    let events = EventLoop::new()?;
    let inbox = Arc::new(Inbox::new(events.remote()));
    let worker = Worker {
        events,
        happened: Vec::new(),
        inbox: Arc::clone(&inbox),
        desks: Slab::new(),
        clients: Slab::new(),
        touched: Vec::new(),
        decrypted: Vec::new(),
        ended: Vec::new(),
        next_desk: 0,
        closed: false,
        stopping: false,
    };
    let thread = thread::Builder::new()
        .name("nbd-worker".into())
        .spawn(move || worker.run())?;
    Ok(Handle {
        inbox,
        alone,
        thread,
    })
}

struct Client {
    /// `None`: the client is gone, but some of its requests are still in flight.
    connection: Option<Connection>,
    /// Requests in flight of a client that is gone.
    left: usize,
    desk: usize,
    /// The events for which its socket is watched; empty: the socket is not watched.
    watched: EventSet,
    /// The client is in [`Worker::touched`].
    touched: bool,
}

struct Worker {
    events: EventLoop<Source, Mail>,
    /// The events of this turn. Empty between turns, and kept for its allocation.
    happened: Vec<Event<Source, Mail>>,
    inbox: Arc<Inbox>,
    desks: Slab<Desk>,
    clients: Slab<Client>,
    /// Clients that may have something to send, or need their socket watched for other events.
    touched: Vec<usize>,
    /// Clients with decrypted data to read that their sockets do not report.
    decrypted: Vec<usize>,
    /// Completions being handled. Empty between turns, and kept for its allocation.
    ended: Vec<Completion>,
    /// The key after that of the desk served last.
    next_desk: usize,
    /// No more connections will arrive.
    closed: bool,
    /// The server stops.
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
        let mut happened = std::mem::take(&mut self.happened);
        self.events.wait(self.timeout(), &mut happened)?;
        for key in std::mem::take(&mut self.decrypted) {
            self.receive(key);
        }
        for event in happened.drain(..) {
            match event {
                Event::Ready(Source::Desk(key), _) => {
                    if let Some(desk) = self.desks.get_mut(key) {
                        desk.rung = true;
                    }
                }
                Event::Ready(Source::Timer(key), _) => {
                    if let Some(desk) = self.desks.get_mut(key) {
                        desk.limits.release(&mut *desk.queue);
                        desk.submitted = true;
                    }
                }
                // The read finds out whether the socket has data, an error or its end.
                Event::Ready(Source::Client(key), what) if what != EventSet::OUT => {
                    self.receive(key);
                }
                Event::Ready(Source::Client(key), _) => self.touch(key),
                Event::Message(mail) => self.open(mail),
            }
        }
        self.happened = happened;
        self.serve_desks();
        self.settle();
        Ok(())
    }

    fn timeout(&self) -> Option<Duration> {
        if !self.decrypted.is_empty() || self.busy_desk().is_some() {
            return Some(Duration::ZERO);
        }
        let connections = self.clients.iter();
        let connections = connections.filter_map(|(_, client)| client.connection.as_ref());
        let end = connections.filter_map(Connection::end).min()?;
        Some(end.saturating_duration_since(Instant::now()))
    }

    /// Handles a message from another thread.
    fn open(&mut self, mail: Mail) {
        match mail {
            Mail::Connection(connection) => self.welcome(*connection),
            Mail::Answer(answer) => self.end_question(answer),
            // With an open gate, received requests go on; with a closed one, sockets are no longer watched for input. The
            // connections to a removed export end.
            Mail::Gate => self.keys().into_iter().for_each(|key| self.submit(key)),
            Mail::Closed => self.closed = true,
            Mail::Stop => {
                self.closed = true;
                self.part();
            }
        }
    }

    fn keys(&self) -> Vec<usize> {
        self.clients.iter().map(|(key, _)| key).collect()
    }

    /// The server stops: clients get the replies to requests already taken, and no more are read.
    fn part(&mut self) {
        self.stopping = true;
        for key in self.keys() {
            if let Some(connection) = &mut self.clients[key].connection {
                connection.close();
            }
            self.touch(key);
        }
    }

    /// Takes on a new client.
    fn welcome(&mut self, connection: Connection) {
        let desk = match self.desk(connection.export()) {
            Ok(desk) => desk,
            Err(ended) => {
                if let ConnectionEnd::Socket(error) = ended {
                    let name = connection.export().name();
                    tracing::error!("NBD export '{name}': {error}: a client was turned away");
                }
                self.inbox.load.fetch_sub(1, Ordering::Relaxed);
                return;
            }
        };
        self.desks[desk].count(1);
        let key = self.clients.insert(Client {
            connection: Some(connection),
            left: 0,
            desk,
            watched: EventSet::empty(),
            touched: false,
        });
        // Data that the client has sent already may have been decrypted with the handshake.
        self.receive(key);
    }

    /// The desk of an export, opened if this worker has none yet.
    ///
    /// # Errors
    /// If the export is being removed, or the system refuses a descriptor.
    fn desk(&mut self, export: &Arc<Export>) -> Result<usize, ConnectionEnd> {
        let same = |(_, desk): &(usize, &Desk)| Arc::ptr_eq(&desk.export, export);
        if let Some((key, _)) = self.desks.iter().find(same) {
            return Ok(key);
        }
        let used = Used::begin(export).ok_or(ConnectionEnd::Gone)?;
        let (queue, limits) = (
            export.backend.open_queue()?,
            QueueLimits::new(&export.throttle)?,
        );
        let watcher: Arc<dyn Wake> = Arc::clone(&self.inbox) as _;
        export.gate.watch(Arc::downgrade(&watcher));
        export.users.watch(Arc::downgrade(&watcher));
        let key = self.desks.insert(Desk {
            export: used,
            part: part(export),
            queue,
            limits,
            in_flight: Slab::new(),
            clients: 0,
            submitted: false,
            rung: false,
        });
        let (desk, events) = (&self.desks[key], &mut self.events);
        let watched = events.watch(desk.queue.event(), Source::Desk(key), EventSet::IN);
        watched
            .and_then(|()| events.watch(desk.limits.timer(), Source::Timer(key), EventSet::IN))
            .inspect_err(|_| self.close_desk(key))?;
        Ok(key)
    }

    /// Closes a desk that no client of this worker uses any more.
    fn close_desk(&mut self, key: usize) {
        let desk = self.desks.remove(key);
        for event in [desk.queue.event(), desk.limits.timer()] {
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
            Err(ended) => self.leave(key, Err(ended)),
        }
    }

    /// Submits a client's received requests, as far as its connection has room.
    fn submit(&mut self, key: usize) {
        // The clock is read once for all of them.
        let mut since = None;
        loop {
            let client = &mut self.clients[key];
            let Some(connection) = &mut client.connection else {
                return;
            };
            let pending = match connection.next() {
                Ok(Some(pending)) => pending,
                Ok(None) => break,
                Err(ended) => return self.leave(key, Err(ended)),
            };
            let desk = &mut self.desks[client.desk];
            let token =
                desk.in_flight
                    .insert((key, pending, *since.get_or_insert_with(Instant::now)));
            desk.begin(client.desk, token, &self.inbox);
        }
        self.touch(key);
    }

    /// Kicks what was submitted and handles completions, until no desk has work or [`ROUNDS`] have passed.
    fn serve_desks(&mut self) {
        let mut ended = std::mem::take(&mut self.ended);
        for _ in 0..ROUNDS {
            let Some(key) = self.busy_desk() else {
                break;
            };
            self.next_desk = key + 1;
            let in_flight = self.desks.iter().map(|(_, desk)| desk.in_flight.len());
            let alone = in_flight.sum::<usize>() == 1;
            let desk = &mut self.desks[key];
            if std::mem::take(&mut desk.submitted) {
                match alone {
                    true => desk.queue.kick_alone(),
                    false => desk.queue.kick(),
                }
            }
            desk.rung = false;
            desk.queue.completions(&mut ended);
            for Completion { token, result } in ended.drain(..) {
                self.end_step(key, token as usize, result);
            }
        }
        self.ended = ended;
    }

    /// A desk with something to do, chosen round-robin.
    fn busy_desk(&self) -> Option<usize> {
        let busy = |(_, desk): &(usize, &Desk)| desk.submitted || desk.rung;
        let mut desks = self.desks.iter();
        let next = desks.find(|desk| desk.0 >= self.next_desk && busy(desk));
        let found = next.or_else(|| self.desks.iter().find(busy));
        found.map(|(key, _)| key)
    }

    /// Goes on after a step of a request has ended: submits the next step, or answers.
    fn end_step(&mut self, desk_key: usize, token: usize, result: Result<Option<Buffer>, Failure>) {
        let desk = &mut self.desks[desk_key];
        let Some((key, pending, _)) = desk.in_flight.get_mut(token) else {
            debug_assert!(false, "completion of unknown token {token}");
            return;
        };
        let key = *key;
        let gone = self.clients[key].connection.is_none();
        let result = match result {
            Ok(data) => {
                pending.stepped(data);
                if self.stopping {
                    pending.cut();
                }
                if !gone && (desk.step(token) || desk.waits(token)) {
                    return;
                }
                Ok(())
            }
            Err(failure) => Err(failure),
        };
        self.end_request(desk_key, token, result);
    }

    /// Takes the answer to a BLOCK_STATUS question about a disk, and answers the request.
    fn end_question(&mut self, answer: Mapped) {
        let Mapped {
            desk,
            token,
            extents,
        } = answer;
        // The desk and the token live as long as the request is in flight.
        let in_flight = &mut self.desks[desk].in_flight;
        let result = match (extents, in_flight.get_mut(token)) {
            (Ok(extents), Some((_, pending, _))) => {
                pending.mapped(extents);
                Ok(())
            }
            (Ok(_), None) => return,
            // Such as a snapshot that was deleted after the client had asked for its context.
            (Err(error), _) if error.kind() == io::ErrorKind::NotFound => Err(Failure::OutOfRange),
            (Err(error), _) => {
                tracing::error!(
                    "cannot tell which parts of a disk hold data or have changed: {error}"
                );
                Err(Failure::Io)
            }
        };
        self.end_request(desk, token, result);
    }

    /// Answers a request.
    fn end_request(&mut self, desk: usize, token: usize, result: Result<(), Failure>) {
        let desk = &mut self.desks[desk];
        let (key, pending, since) = desk.in_flight.remove(token);
        if let Some(kind) = kind(pending.command()) {
            let latencies = &desk.export.metrics.latencies;
            latencies.count(0, kind, since.elapsed());
        }
        desk.export.gate.leave();
        let client = &mut self.clients[key];
        match &mut client.connection {
            Some(connection) => {
                connection.answer(pending, result);
                // The connection may have room now for requests that arrived before.
                self.submit(key);
            }
            None => {
                client.left -= 1;
                self.forget(key);
            }
        }
    }

    fn touch(&mut self, key: usize) {
        if let Some(client) = self.clients.get_mut(key)
            && !std::mem::replace(&mut client.touched, true)
        {
            self.touched.push(key);
        }
    }

    /// Sends pending replies, updates the watched events of sockets, and drops clients that are over or too late.
    fn settle(&mut self) {
        for key in std::mem::take(&mut self.touched) {
            let Some(client) = self.clients.get_mut(key) else {
                continue;
            };
            client.touched = false;
            let Some(connection) = &mut client.connection else {
                continue;
            };
            if let Err(ended) = connection.send() {
                self.leave(key, Err(ended));
                continue;
            }
            if connection.is_over() {
                self.leave(key, Ok(()));
                continue;
            }
            if connection.has_decrypted() {
                self.decrypted.push(key);
            }
            let wanted = connection.interest();
            let watched = match (client.watched.is_empty(), wanted.is_empty()) {
                _ if client.watched == wanted => Ok(()),
                (true, _) => self.events.watch(&*connection, Source::Client(key), wanted),
                // When a client that is neither read from nor written to hangs up, its socket would wake this thread
                // over and over.
                (_, true) => self.events.unwatch(&*connection),
                _ => self.events.rewatch(&*connection, wanted),
            };
            match watched {
                Ok(()) => client.watched = wanted,
                Err(error) => self.leave(key, Err(error.into())),
            }
        }
        let is_late = |client: &Client| {
            let end = client.connection.as_ref().and_then(Connection::end);
            end.is_some_and(|end| end <= Instant::now())
        };
        let late = self.clients.iter().filter(|(_, client)| is_late(client));
        for key in late.map(|(key, _)| key).collect::<Vec<_>>() {
            self.leave(key, Err(ConnectionEnd::Gone));
        }
    }

    /// Ends a connection. Its requests in flight are carried out all the same.
    fn leave(&mut self, key: usize, outcome: Result<(), ConnectionEnd>) {
        let client = &mut self.clients[key];
        if let Some(mut connection) = client.connection.take() {
            if !client.watched.is_empty()
                && let Err(error) = self.events.unwatch(&connection)
            {
                tracing::debug!("NBD: a client's socket was not watched: {error}");
            }
            connection.say_goodbye();
            client.left = connection.requests();
            report(outcome);
        }
        self.forget(key);
    }

    /// Forgets a client that is gone once it has no requests in flight, and closes its desk if no other client uses it.
    fn forget(&mut self, key: usize) {
        let client = &self.clients[key];
        if client.connection.is_some() || client.left > 0 {
            return;
        }
        let desk = client.desk;
        self.clients.remove(key);
        self.inbox.load.fetch_sub(1, Ordering::Relaxed);
        self.desks[desk].count(-1);
        if self.desks[desk].clients == 0 {
            self.close_desk(desk);
        }
    }
}
