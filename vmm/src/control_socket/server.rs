//! One thread accepts clients, and one thread serves each client. Every wait also ends when the server stops,
//! so a client that sends half a line, or never reads, holds up neither the server nor the other clients.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;

use walvisor_devices::event_loop::EventSet;
use walvisor_devices::listen::{Stop, Threads, Waited, Waiter, accept_each};

use super::command::{ControlError, ControlRequest};
use super::controlled::Controlled;
use super::lines::{Line, Lines, MAX_LINE};

/// Most clients at a time. A further client gets an error, and is disconnected.
pub const MAX_CLIENTS: usize = 32;

/// The server's name in messages.
const OWNER: &str = "control socket";

/// A thread of the server. It needs little stack.
fn thread(name: &str) -> thread::Builder {
    thread::Builder::new()
        .name(name.into())
        .stack_size(256 << 10)
}

/// A control socket with its server. Dropping it ends the connections, and returns when the requests in
/// progress are done.
pub struct Server {
    stop: Stop,
    _threads: Threads,
}

impl Server {
    /// Starts to listen.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub fn start(listener: UnixListener, controlled: Arc<Controlled>) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let stop = Stop::new()?;
        let ends = stop.clone();
        let mut threads = Threads::new(OWNER);
        threads.start(thread("control"), move || {
            listen(&listener, &controlled, &ends);
        })?;
        Ok(Self {
            stop,
            _threads: threads,
        })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.tell();
    }
}

fn listen(listener: &UnixListener, controlled: &Arc<Controlled>, stop: &Stop) {
    let accept = |listener: &UnixListener| {
        let (stream, _) = listener.accept()?;
        stream.set_nonblocking(true)?;
        Ok(stream)
    };
    let mut clients = Threads::new(OWNER);
    accept_each(listener, stop, OWNER, accept, |stream| {
        if clients.count() >= MAX_CLIENTS {
            turn_away(&stream);
            return;
        }
        let (controlled, stop) = (Arc::clone(controlled), stop.clone());
        let started = clients.start(thread("control-client"), move || {
            if let Err(error) = converse(&stream, &controlled, &stop) {
                tracing::debug!("control socket: a client is gone: {error}");
            }
        });
        if let Err(error) = started {
            tracing::warn!("control socket: a client could not be served: {error}");
        }
    });
}

fn turn_away(mut stream: &UnixStream) {
    let error = ControlError::new(format_args!(
        "{MAX_CLIENTS} clients are connected: close one and try again"
    ));
    let answer = ControlRequest::refused(error.clone()).answer(Err(error));
    // The buffer of a new socket has room for one line.
    let _ = stream.write(&answer);
}

/// Answers a client's lines until the client leaves or the server stops.
fn converse(mut stream: &UnixStream, controlled: &Controlled, stop: &Stop) -> io::Result<()> {
    let mut waiter = Waiter::new(stream, stop)?;
    let mut lines = Lines::default();
    let mut buffer = [0; 4096];
    loop {
        if waiter.wait(stream, EventSet::IN, None)? == Waited::Stopped {
            return Ok(());
        }
        let count = match stream.read(&mut buffer) {
            Ok(0) if lines.is_open() => {
                let error = ControlError::new("the last line is incomplete and was ignored");
                return send(
                    stream,
                    &ControlRequest::refused(error.clone()).answer(Err(error)),
                    &mut waiter,
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
                Line::Whole(line) => ControlRequest::parse(&line),
                Line::TooLong => ControlRequest::refused(ControlError::new(format_args!(
                    "the line is longer than {MAX_LINE} bytes: send a shorter one"
                ))),
            };
            let outcome = request
                .command
                .clone()
                .and_then(|command| controlled.execute(&command));
            send(stream, &request.answer(outcome), &mut waiter)?;
            // Some commands take effect only after their answer was sent.
            if let Ok(command) = &request.command {
                controlled.answered(command);
            }
        }
    }
}

/// Sends all of `bytes`, unless the server stops first.
fn send(mut stream: &UnixStream, mut bytes: &[u8], waiter: &mut Waiter) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if waiter.wait(stream, EventSet::OUT, None)? == Waited::Stopped {
                    return Err(ErrorKind::ConnectionAborted.into());
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
