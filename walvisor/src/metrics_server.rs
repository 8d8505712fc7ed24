//! `--metrics-listen`: metrics over HTTP/1.1, as Prometheus asks for them.
//!
//! ```text
//!   accept ─▶ Client: Asking (8 KiB of a request) ─▶ Answering ─▶ Leaving ─▶ closed
//! ```
//! Anybody may connect who can reach the address, so nobody can get much: one thread serves all
//! clients. A connection is for one request and lasts for ten seconds. Of more clients than there
//! are places, the newest stay.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

use httparse::{EMPTY_HEADER, Request, Status};
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use walvisor_devices::event_loop::{Event, EventLoop, EventSet};
use walvisor_devices::listen::{Stop, Threads, check_accept};

/// Limit on clients, over all addresses.
pub const MAX_CLIENTS: usize = 16;
/// Longest head of a request, in bytes.
const MAX_HEAD: usize = 8 << 10;
/// Most header fields of a request.
const MAX_FIELDS: usize = 64;
/// Most bytes that are read after the answer.
const MAX_DROPPED: usize = 64 << 10;
/// How long a connection may last.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a text is given to those who ask for it again.
const FRESH: Duration = Duration::from_millis(100);
/// The stack of the server's thread. It parses a head and renders the text, neither of which calls
/// itself. In a program that is built without optimisation the largest request takes less than a
/// quarter of it.
const STACK: usize = 256 << 10;
/// The server's name in messages.
const OWNER: &str = "metrics server";

/// The server of `--metrics-listen`. Dropping it closes its connections.
pub struct MetricsServer {
    stop: Stop,
    _threads: Threads,
}

impl MetricsServer {
    /// Serves the text of `render` at listening stream sockets. Without any it does nothing.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub fn start(
        listeners: Vec<OwnedFd>,
        render: impl Fn() -> String + Send + 'static,
    ) -> io::Result<Self> {
        Self::start_with(STACK, listeners, render)
    }

    fn start_with(
        stack: usize,
        listeners: Vec<OwnedFd>,
        render: impl Fn() -> String + Send + 'static,
    ) -> io::Result<Self> {
        let stop = Stop::new()?;
        let mut events = EventLoop::new()?;
        events.watch(&stop, Key::Stop, EventSet::IN)?;
        let serves = !listeners.is_empty();
        for (index, listener) in listeners.iter().enumerate() {
            rustix::io::ioctl_fionbio(listener, true)?;
            events.watch(listener, Key::Listener(index), EventSet::IN)?;
        }
        let mut service = Service {
            events,
            _stop: stop.clone(),
            listeners,
            clients: VecDeque::new(),
            next: 0,
            page: Page { render, last: None },
        };
        let mut threads = Threads::new(OWNER);
        let thread = thread::Builder::new().name("metrics".into());
        if serves {
            threads.start(thread.stack_size(stack), move || {
                if let Err(error) = service.run() {
                    tracing::error!("{OWNER}: no more clients are served: {error}");
                }
            })?;
        }
        Ok(Self {
            stop,
            _threads: threads,
        })
    }
}

impl Drop for MetricsServer {
    fn drop(&mut self) {
        self.stop.tell();
    }
}

/// What the thread waits for.
#[derive(Clone, Copy, Debug)]
enum Key {
    Stop,
    Listener(usize),
    /// The number of a client.
    Client(u64),
}

/// The server's thread.
struct Service<R> {
    events: EventLoop<Key, ()>,
    /// Open as long as it is watched.
    _stop: Stop,
    listeners: Vec<OwnedFd>,
    /// Oldest first.
    clients: VecDeque<Client>,
    /// The number of the next client.
    next: u64,
    page: Page<R>,
}

impl<R: Fn() -> String> Service<R> {
    /// Serves until the stop is told.
    fn run(&mut self) -> io::Result<()> {
        let mut ready = Vec::new();
        loop {
            let until = self.clients.front().map(|oldest| oldest.ends);
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            self.events.wait(left, &mut ready)?;
            for event in ready.drain(..) {
                match event {
                    Event::Ready(Key::Stop, _) => return Ok(()),
                    Event::Ready(Key::Listener(index), _) => self.accept(index)?,
                    Event::Ready(Key::Client(number), _) => self.serve(number)?,
                    Event::Message(()) => {}
                }
            }
            let now = Instant::now();
            while self
                .clients
                .front()
                .is_some_and(|oldest| oldest.ends <= now)
            {
                self.close(0)?;
            }
        }
    }

    fn accept(&mut self, index: usize) -> io::Result<()> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let accepted = accept_with(&self.listeners[index], flags).map_err(io::Error::from);
        let Some(socket) = check_accept(accepted, OWNER) else {
            return Ok(());
        };
        if self.clients.len() == MAX_CLIENTS {
            self.close(0)?;
        }
        let number = self.next;
        self.next += 1;
        self.events
            .watch(&socket, Key::Client(number), EventSet::IN)?;
        self.clients.push_back(Client {
            number,
            socket: socket.into(),
            ends: Instant::now() + PATIENCE,
            state: State::Asking(Vec::new()),
        });
        Ok(())
    }

    /// Goes on with a client that can be read from or written to.
    fn serve(&mut self, number: u64) -> io::Result<()> {
        let place = self.clients.iter().position(|one| one.number == number);
        let Some(place) = place else {
            return Ok(());
        };
        let client = &mut self.clients[place];
        match client.advance(&mut self.page) {
            Ok(()) => self
                .events
                .rewatch(&client.socket, client.state.waits_for()),
            // The client has left, in one way or another.
            Err(_) => self.close(place),
        }
    }

    fn close(&mut self, place: usize) -> io::Result<()> {
        let client = self.clients.remove(place).expect("a client is there");
        self.events.unwatch(&client.socket)
    }
}

/// The text that all clients get, rendered ten times a second at most.
struct Page<R> {
    render: R,
    last: Option<(Instant, String)>,
}

impl<R: Fn() -> String> Page<R> {
    fn text(&mut self) -> &str {
        self.last.take_if(|(made, _)| made.elapsed() >= FRESH);
        let render = &self.render;
        let made = || (Instant::now(), render());
        &self.last.get_or_insert_with(made).1
    }
}

/// A connection.
struct Client {
    number: u64,
    socket: File,
    /// When it is closed at the latest.
    ends: Instant,
    state: State,
}

/// How far a connection is.
enum State {
    /// These bytes of the request have come.
    Asking(Vec<u8>),
    /// These bytes of the answer are not sent yet.
    Answering(VecDeque<u8>),
    /// All is sent. So many more bytes are read and dropped: a close would take the answer from a
    /// client that still sends.
    Leaving(usize),
}

impl State {
    fn waits_for(&self) -> EventSet {
        match self {
            Self::Answering(_) => EventSet::OUT,
            Self::Asking(_) | Self::Leaving(_) => EventSet::IN,
        }
    }
}

impl Client {
    /// Does what can be done without waiting, a step at a time. An error: the connection is over.
    fn advance(&mut self, page: &mut Page<impl Fn() -> String>) -> io::Result<()> {
        let done = self.step(page);
        match done {
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                Ok(())
            }
            done => done,
        }
    }

    fn step(&mut self, page: &mut Page<impl Fn() -> String>) -> io::Result<()> {
        let mut buffer = [0; 4096];
        match &mut self.state {
            State::Asking(head) => {
                let count = read(&mut self.socket, &mut buffer)?;
                head.extend(&buffer[..count]);
                if let Some(answer) = answer(head, page) {
                    self.state = State::Answering(answer.into());
                }
            }
            State::Answering(left) => {
                let count = self.socket.write(left.as_slices().0)?;
                left.drain(..count);
                if left.is_empty() {
                    shutdown(&self.socket, Shutdown::Write)?;
                    self.state = State::Leaving(MAX_DROPPED);
                }
            }
            State::Leaving(left) => {
                let count = read(&mut self.socket, &mut buffer)?;
                *left = left.checked_sub(count).ok_or(ErrorKind::FileTooLarge)?;
            }
        }
        Ok(())
    }
}

/// Reads what has come. An end of file is an error.
fn read(socket: &mut File, buffer: &mut [u8]) -> io::Result<usize> {
    match socket.read(buffer)? {
        0 => Err(ErrorKind::UnexpectedEof.into()),
        count => Ok(count),
    }
}

/// The answer to a request that begins with `head`; `None`: its head is not complete.
fn answer(head: &[u8], page: &mut Page<impl Fn() -> String>) -> Option<Vec<u8>> {
    let mut fields = [EMPTY_HEADER; MAX_FIELDS];
    let mut request = Request::new(&mut fields);
    let parsed = request.parse(head);
    let path = request.path.map(|path| path.split('?').next());
    let (status, field, body) = match (parsed, request.method, path.flatten()) {
        (Ok(Status::Partial), ..) if head.len() < MAX_HEAD => return None,
        (Ok(Status::Partial) | Err(httparse::Error::TooManyHeaders), ..) => (
            "431 Request Header Fields Too Large",
            "",
            "the head of the request is too long\n",
        ),
        (Err(_), ..) => ("400 Bad Request", "", "this is no request of HTTP/1.1\n"),
        (_, Some("GET" | "HEAD"), Some("/metrics")) => ("200 OK", "; version=0.0.4", page.text()),
        (_, Some("GET" | "HEAD"), _) => ("404 Not Found", "", "metrics are at /metrics\n"),
        _ => ("405 Method Not Allowed", "", "give GET or HEAD\n"),
    };
    let allow = if status.starts_with("405") {
        "Allow: GET, HEAD\r\n"
    } else {
        ""
    };
    let length = body.len();
    let body = if request.method == Some("HEAD") {
        ""
    } else {
        body
    };
    let answer = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain{field}; charset=utf-8\r\n\
         Content-Length: {length}\r\n{allow}Connection: close\r\n\r\n{body}"
    );
    Some(answer.into_bytes())
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::net::Shutdown;
    use std::os::unix::net::{UnixListener, UnixStream};

    use walvisor_devices::backend::ram::RamDisk;

    use super::*;
    use crate::control_socket::fixture::{daemon, disk};

    fn page(render: impl Fn() -> String) -> Page<impl Fn() -> String> {
        Page { render, last: None }
    }

    #[test]
    fn each_request_gets_its_status() {
        let mut page = page(|| "up 1\n".to_owned());
        let mut answer = |request: &str| {
            let answer = answer(request.as_bytes(), &mut page);
            answer.map(|answer| String::from_utf8(answer).unwrap())
        };
        assert_eq!(
            answer("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n").unwrap(),
            "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: 5\r\n\
             Connection: close\r\n\r\nup 1\n"
        );
        let head = answer("HEAD /metrics?x=1 HTTP/1.0\r\n\r\n").unwrap();
        assert!(
            head.contains("Content-Length: 5\r\n") && head.ends_with("\r\n\r\n"),
            "{head}"
        );
        let post = answer("POST /metrics HTTP/1.1\r\nContent-Length: 9\r\n\r\n").unwrap();
        assert!(post.contains("\r\nAllow: GET, HEAD\r\n"), "{post}");
        let many = format!(
            "GET / HTTP/1.1\r\n{}\r\n",
            "a: b\r\n".repeat(MAX_FIELDS + 1)
        );
        let long = format!("GET /{} HTTP/1.1\r\n", "x".repeat(MAX_HEAD));
        for (request, status) in [
            ("POST / HTTP/1.1\r\n\r\n", "405 "),
            ("get /metrics HTTP/1.1\r\n\r\n", "405 "),
            ("GET / HTTP/1.1\r\n\r\n", "404 "),
            ("GET /metrics/ HTTP/1.1\r\n\r\n", "404 "),
            ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "400 "),
            ("\u{16}\u{3}\u{1}", "400 "),
            ("GET /metrics\r\n\r\n", "400 "),
            ("GET / HTTP/1.1\r\n: b\r\n\r\n", "400 "),
            (&many, "431 "),
            (&long, "431 "),
        ] {
            let answer = answer(request).unwrap();
            assert!(
                answer.starts_with(&format!("HTTP/1.1 {status}")),
                "{request}: {answer}"
            );
        }
        for part in [
            "",
            "\r\n",
            "GET",
            "GET /metrics HTTP/1.1\r\n",
            "GET / HTTP/1.1\r\nHost: a\r\n",
        ] {
            assert_eq!(answer(part), None, "{part}");
        }
    }

    #[test]
    fn a_text_is_rendered_again_when_it_is_old() {
        let rendered = Cell::new(0);
        let mut page = page(|| {
            rendered.set(rendered.get() + 1);
            rendered.get().to_string()
        });
        assert_eq!(page.text(), "1");
        page.last.as_mut().unwrap().0 += PATIENCE;
        assert_eq!(page.text(), "1");
        page.last.as_mut().unwrap().0 -= PATIENCE + FRESH;
        assert_eq!(page.text(), "2");
    }

    /// A server of a text of a megabyte at a socket.
    fn serve(path: &std::path::Path) -> MetricsServer {
        let listener = UnixListener::bind(path).unwrap();
        MetricsServer::start(vec![listener.into()], || "x".repeat(1 << 20)).unwrap()
    }

    fn connect(path: &std::path::Path) -> UnixStream {
        let stream = UnixStream::connect(path).unwrap();
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        stream
    }

    /// The largest head of the largest page, on a quarter of the stack.
    #[test]
    fn the_largest_page_takes_a_quarter_of_the_stack() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let listener = UnixListener::bind(&path).unwrap();
        let disk = |number: usize| disk(&format!("disk {number}"), RamDisk::new(8));
        let controlled = daemon((0..1000).map(disk).collect());
        let render = move || controlled.metrics_text();
        let _server = MetricsServer::start_with(STACK / 4, vec![listener.into()], render).unwrap();
        let mut stream = connect(&path);
        let field = format!("a: {}\r\n", "b".repeat(MAX_HEAD / MAX_FIELDS - 6));
        let head = format!("GET /metrics HTTP/1.1\r\n{}\r\n", field.repeat(MAX_FIELDS));
        assert!(head.len() > MAX_HEAD - 100, "{}", head.len());
        stream.write_all(head.as_bytes()).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 OK\r\n"), "{answer}");
        assert!(answer.contains("\"disk 999\""), "{answer}");
    }

    /// The length of the answer.
    fn scrape(path: &std::path::Path) -> usize {
        let mut stream = connect(path);
        // A request may come in pieces.
        for piece in ["GET /met", "rics HTTP/1.1\r\n", "\r\n"] {
            stream.write_all(piece.as_bytes()).unwrap();
        }
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        answer.len()
    }

    #[test]
    fn of_too_many_clients_the_oldest_go() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let server = serve(&path);
        // Some say nothing, some read nothing.
        let mut idle: Vec<_> = (0..3 * MAX_CLIENTS).map(|_| connect(&path)).collect();
        for stream in idle.iter_mut().skip(2 * MAX_CLIENTS) {
            // The server may have closed it.
            let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n");
        }
        assert!(scrape(&path) > 1 << 20);
        let mut closed = Vec::new();
        // An error: what it sent came after the close.
        let _ = idle[0].read_to_end(&mut closed);
        assert_eq!(closed, b"");
        // The stop waits for nobody.
        drop(server);
        let mut rest = Vec::new();
        let _ = idle.last_mut().unwrap().read_to_end(&mut rest);
        assert!(rest.len() < 1 << 20, "it was read before the end");
    }

    #[test]
    fn a_client_that_still_sends_gets_its_answer_and_is_closed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let _server = serve(&path);
        let mut stream = connect(&path);
        stream.write_all(b"BREW /pot HTTP/1.1\r\n\r\n").unwrap();
        let sent = (0..).find(|_| stream.write_all(&[b'x'; 4096]).is_err());
        assert!(sent > Some(MAX_DROPPED / 4096 / 2), "{sent:?}");
        let mut answer = vec![0; 30];
        stream.read_exact(&mut answer).unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 405 "));
        // Half a request, and its end.
        let mut stream = connect(&path);
        stream.write_all(b"GET").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
        // A whole one, and its end.
        let mut stream = connect(&path);
        stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n").unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).unwrap();
        assert!(answer.len() > 1 << 20);
        assert!(scrape(&path) > 1 << 20);
    }
}
