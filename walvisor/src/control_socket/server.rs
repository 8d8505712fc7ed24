//! One thread accepts clients, and each client has a thread. Every wait ends when the server stops,
//! so a client that sends half a line or never reads delays neither the shutdown nor other clients.

use std::io::{self, ErrorKind, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use walvisor_devices::event_loop::EventSet;
use walvisor_devices::listen::{Stop, Threads, Waiter, WakeReason, accept_each};

use super::command::{ControlCommand, ControlError, ControlRequest, export_progress};
use super::controlled::ControlledProcess;
use super::lines::{InputLine, LineReader, MAX_LINE};
use crate::descriptors;

/// Limit on clients. A further one gets an error and is disconnected.
pub const MAX_CLIENTS: usize = 32;

/// How often a client gets the progress of its export.
const PROGRESS_PERIOD: Duration = Duration::from_millis(100);

/// The server's name in messages.
const OWNER: &str = "control socket";

/// The stack of each thread. A client's thread does whatever a request asks for, up to opening
/// disks and archives, in programs that are built without optimisation too. The deepest requests of
/// the tests take less than an eighth of it there. Stack that is never touched costs no memory.
const STACK: usize = 1 << 20;

/// A thread of the server.
fn thread(name: &str) -> thread::Builder {
    thread::Builder::new().name(name.into()).stack_size(STACK)
}

/// The server of a control socket. Dropping it finishes the requests in progress, and ends the
/// connections.
pub struct Server {
    stop: Stop,
    _threads: Threads,
}

impl Server {
    /// Starts to listen.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub fn start(listener: UnixListener, controlled: Arc<ControlledProcess>) -> io::Result<Self> {
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

fn listen(listener: &UnixListener, controlled: &Arc<ControlledProcess>, stop: &Stop) {
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
    // One line fits the buffer of a new socket.
    let _ = stream.write(&answer);
}

/// Answers a client's lines until the client leaves or the server stops.
fn converse(stream: &UnixStream, controlled: &ControlledProcess, stop: &Stop) -> io::Result<()> {
    let mut waiter = Waiter::new(stream, stop)?;
    let mut lines = LineReader::default();
    let mut buffer = [0; 4096];
    // Descriptors are for the request that they come with.
    let mut files = Vec::new();
    // The log that this client reads.
    let mut held = None;
    loop {
        if waiter.wait(stream, EventSet::IN, None)? == WakeReason::Stopped {
            return Ok(());
        }
        let received = descriptors::receive(stream, &mut buffer);
        let count = received.map_err(io::Error::from).map(|(count, with)| {
            if !with.is_empty() {
                files = with;
            }
            count
        });
        let count = match count {
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
                InputLine::Whole(line) => ControlRequest::parse(&line),
                InputLine::TooLong => ControlRequest::refused(ControlError::new(format_args!(
                    "the line is longer than {MAX_LINE} bytes: send a shorter one"
                ))),
            };
            let mut files = std::mem::take(&mut files);
            let outcome = request.command.clone().and_then(|command| {
                if let ControlCommand::Hold { log } = &command {
                    let (answer, hold) = controlled.hold(log, held.take())?;
                    held = Some(hold);
                    return Ok(answer);
                }
                let Some(file) = files.pop() else {
                    return controlled.execute(&command);
                };
                match &command {
                    ControlCommand::Export { disk, at, .. } => {
                        let mut tell = progress(stream, &mut waiter);
                        controlled.export(disk.as_ref(), at.as_deref(), file.into(), &mut tell)
                    }
                    ControlCommand::Look(request) => {
                        files.push(file);
                        controlled.look(request, files)
                    }
                    _ => controlled.execute(&command),
                }
            });
            send(stream, &request.answer(outcome), &mut waiter)?;
            // Some commands take effect after their answer.
            if let Ok(command) = &request.command {
                controlled.answered(command);
            }
        }
    }
}

/// Returns a function that sends a client the progress of its export from time to time. It returns
/// `false` once the client is gone or the server stops. It doesn't wait for a client that reads
/// nothing: the export would keep the log from making room meanwhile.
fn progress<'a>(
    stream: &'a UnixStream,
    waiter: &'a mut Waiter,
) -> impl FnMut(u64, u64) -> bool + 'a {
    let mut last_event = Instant::now();
    move |passed, total| {
        if last_event.elapsed() < PROGRESS_PERIOD {
            return true;
        }
        last_event = Instant::now();
        match waiter.wait(stream, EventSet::OUT, Some(last_event)) {
            Ok(WakeReason::Ready) => send(stream, &export_progress(passed, total), waiter).is_ok(),
            Ok(WakeReason::TimedOut) => true,
            Ok(WakeReason::Stopped | WakeReason::Message) | Err(_) => false,
        }
    }
}

/// Sends `bytes`, unless the server stops first.
fn send(mut stream: &UnixStream, mut bytes: &[u8], waiter: &mut Waiter) -> io::Result<()> {
    while !bytes.is_empty() {
        match stream.write(bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => {
                if waiter.wait(stream, EventSet::OUT, None)? == WakeReason::Stopped {
                    return Err(ErrorKind::ConnectionAborted.into());
                }
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
