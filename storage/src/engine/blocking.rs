//! The engine for kernels without io_uring: writes on one thread, reads in the caller's.

use std::io;
use std::time::{Duration, Instant};

use super::{Done, Engine, Io, read_exact, write_chunks};
use crate::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{self, Event};

/// See the module's documentation.
pub(super) struct Blocking {
    /// `None` only while dropping.
    jobs: Option<Sender<(u64, Io)>>,
    ended: Receiver<Done>,
    reads: Vec<Done>,
    thread: Option<JoinHandle<()>>,
}

impl Blocking {
    /// Each sync takes `sync_latency` longer than the medium needs.
    pub(super) fn new(event: Event, sync_latency: Duration) -> io::Result<Self> {
        let (jobs, todo) = channel::<(u64, Io)>();
        let (report, ended) = channel();
        let thread = thread::Builder::new()
            .name("log-sync".into())
            .spawn(move || {
                // The wait that has begun: when it is over, and its id.
                let mut wait: Option<(Instant, u64)> = None;
                loop {
                    let job = match wait {
                        None => todo.recv().map_err(|_| RecvTimeoutError::Disconnected),
                        Some((over, _)) => {
                            let left = over.saturating_duration_since(sync::now());
                            sync::recv_timeout(&todo, left)
                        }
                    };
                    let (id, result) = match job {
                        Ok((id, Io::Wait(time))) => match wait.replace((sync::now() + time, id)) {
                            Some((_, earlier)) => (earlier, Ok(None)),
                            None => continue,
                        },
                        Ok((id, io)) => (id, run(io, sync_latency)),
                        Err(RecvTimeoutError::Timeout) => match wait.take() {
                            Some((_, id)) => (id, Ok(None)),
                            None => continue,
                        },
                        Err(RecvTimeoutError::Disconnected) => return,
                    };
                    let done = Done { id, result };
                    // A receiver or event that is gone belongs to a port that is being dropped: nobody waits.
                    let _ = report.send(done);
                    event.signal();
                }
            })?;
        Ok(Self {
            jobs: Some(jobs),
            ended,
            reads: Vec::new(),
            thread: Some(thread),
        })
    }
}

fn run(io: Io, sync_latency: Duration) -> io::Result<Option<crate::Buffer>> {
    if let Some((file, offset, chunks)) = io.written() {
        write_chunks(file, offset, chunks, 0)?;
    }
    match io {
        Io::Append { segment, sync, .. } => {
            sync.carry_out(&segment)?;
            sync::sleep(sync_latency * sync.count());
            Ok(None)
        }
        Io::Read {
            source,
            offset,
            buffer,
        } => read_exact(&source, offset, buffer).map(Some),
        Io::Write { .. } | Io::Wait(_) => Ok(None),
    }
}

impl Engine for Blocking {
    fn submit(&mut self, id: u64, io: Io) {
        if matches!(io, Io::Read { .. }) {
            self.reads.push(Done {
                id,
                result: run(io, Duration::ZERO),
            });
            return;
        }
        let sent = self
            .jobs
            .as_ref()
            .is_some_and(|jobs| jobs.send((id, io)).is_ok());
        if !sent {
            let gone = io::Error::other("the log's thread has ended");
            self.reads.push(Done {
                id,
                result: Err(gone),
            });
        }
    }

    fn enter(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.reads);
        done.extend(self.ended.try_iter());
    }
}

impl Drop for Blocking {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // It ends once its queue is empty; a panic in it has been printed already.
            let _ = thread.join();
        }
    }
}
