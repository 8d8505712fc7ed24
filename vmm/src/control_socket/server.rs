//! A thread that accepts, and a thread a client. All wait for the end of the server beside what they wait for, so that a
//! client which sends half a line, or never reads, holds up nobody.

use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use walvisor_devices::listen::accepted;

use super::command::{ControlError, Request};
use super::controlled::Controlled;
use super::lines::{Line, Lines, MAX_LINE};

/// Most clients at a time. One more is told so, and disconnected.
pub const MAX_CLIENTS: usize = 32;

/// Threads of clients do little.
const STACK: usize = 256 << 10;

/// A control socket that is being listened at. Dropping it ends the conversations, and returns when requests that are
/// being carried out are done.
pub struct Server {
    stop: Arc<OwnedFd>,
    listener: Option<JoinHandle<()>>,
}

impl Server {
    /// Starts to listen.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub fn start(listener: UnixListener, controlled: Arc<Controlled>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let stop = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let stop = Arc::new(stop);
        let ends = Arc::clone(&stop);
        let thread = thread::Builder::new()
            .name("control".into())
            .stack_size(STACK)
            .spawn(move || listen(&listener, &controlled, &ends))?;
        Ok(Self {
            stop,
            listener: Some(thread),
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A full counter is readable all the same.
        let _ = rustix::io::write(&self.stop, &1_u64.to_ne_bytes());
        self.listener.take().into_iter().for_each(join);
    }
}

fn join(thread: JoinHandle<()>) {
    if thread.join().is_err() {
        tracing::error!("a thread of the control socket has panicked");
    }
}

/// Waits until `what` is ready; `false`: the server is to stop.
fn wait(what: impl AsFd, flags: PollFlags, stop: BorrowedFd<'_>) -> io::Result<bool> {
    loop {
        let mut fds = [
            PollFd::from_borrowed_fd(what.as_fd(), flags),
            PollFd::from_borrowed_fd(stop, PollFlags::IN),
        ];
        match poll(&mut fds, None) {
            Ok(_) if !fds[1].revents().is_empty() => return Ok(false),
            Ok(_) if !fds[0].revents().is_empty() => return Ok(true),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

fn listen(listener: &UnixListener, controlled: &Arc<Controlled>, stop: &Arc<OwnedFd>) {
    let mut clients: Vec<JoinHandle<()>> = Vec::new();
    loop {
        match wait(listener, PollFlags::IN, stop.as_fd()) {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                tracing::error!("control socket: nobody more is heard: {error}");
                break;
            }
        }
        for ended in clients.extract_if(.., |client| client.is_finished()) {
            join(ended);
        }
        let outcome = listener.accept().and_then(|(stream, _)| {
            stream.set_nonblocking(true)?;
            Ok(stream)
        });
        let Some(stream) = accepted(outcome, "control socket") else {
            continue;
        };
        if clients.len() >= MAX_CLIENTS {
            turn_away(&stream);
            continue;
        }
        let (controlled, stop) = (Arc::clone(controlled), Arc::clone(stop));
        let spawned = thread::Builder::new()
            .name("control-client".into())
            .stack_size(STACK)
            .spawn(move || {
                if let Err(error) = converse(&stream, &controlled, stop.as_fd()) {
                    tracing::debug!("control socket: a client is gone: {error}");
                }
            });
        match spawned {
            Ok(client) => clients.push(client),
            Err(error) => {
                tracing::warn!("control socket: a client could not be served: {error}");
            }
        }
    }
    clients.into_iter().for_each(join);
}

fn turn_away(mut stream: &UnixStream) {
    let error = ControlError::new(format_args!(
        "{MAX_CLIENTS} clients are connected: close one and try again"
    ));
    let answer = Request::refused(error.clone()).answer(Err(error));
    // A new socket has room for a line.
    let _ = stream.write(&answer);
}

/// Answers a client's lines until it goes or the server stops.
fn converse(
    mut stream: &UnixStream,
    controlled: &Controlled,
    stop: BorrowedFd<'_>,
) -> io::Result<()> {
    let mut lines = Lines::default();
    let mut buffer = [0; 4096];
    loop {
        if !wait(stream, PollFlags::IN, stop)? {
            return Ok(());
        }
        let count = match stream.read(&mut buffer) {
            Ok(0) if lines.is_open() => {
                let error = ControlError::new("the last line has no end: nothing was done for it");
                return send(
                    stream,
                    &Request::refused(error.clone()).answer(Err(error)),
                    stop,
                );
            }
            Ok(0) => return Ok(()),
            Ok(count) => count,
            Err(error)
                if matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::WouldBlock) =>
            {
                continue;
            }
            Err(error) => return Err(error),
        };
        for line in lines.push(&buffer[..count]) {
            let request = match line {
                Line::Whole(line) => Request::parse(&line),
                Line::TooLong => Request::refused(ControlError::new(format_args!(
                    "the line is longer than {MAX_LINE} bytes: send a shorter one"
                ))),
            };
            let outcome = request
                .command
                .clone()
                .and_then(|command| controlled.execute(&command));
            send(stream, &request.answer(outcome), stop)?;
            // What takes effect once its answer is on its way.
            if let Ok(command) = &request.command {
                controlled.answered(command);
            }
        }
    }
}

/// Sends all of `bytes`, unless the server stops first.
fn send(mut stream: &UnixStream, mut bytes: &[u8], stop: BorrowedFd<'_>) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if !wait(stream, PollFlags::OUT, stop)? {
                    return Err(ErrorKind::ConnectionAborted.into());
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
