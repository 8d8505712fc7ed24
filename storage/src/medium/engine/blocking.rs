//! The engine for kernels without io_uring: writes on one thread, reads in the caller's.

use std::io;

use crate::medium::file::{Done, Engine, Io, run};
use crate::sync::Event;
use crate::sync::mpsc::{Receiver, Sender, channel};
use crate::sync::thread::{self, JoinHandle};

/// See the module's documentation.
pub(super) struct Blocking {
    /// `None` only while dropping.
    jobs: Option<Sender<(u64, Io)>>,
    ended: Receiver<Done>,
    reads: Vec<Done>,
    thread: Option<JoinHandle<()>>,
}

impl Blocking {
    pub(super) fn new(event: Event) -> io::Result<Self> {
        let (jobs, todo) = channel::<(u64, Io)>();
        let (report, ended) = channel();
        let thread = thread::Builder::new()
            .name("log-write".into())
            .spawn(move || {
                while let Ok((id, io)) = todo.recv() {
                    let (result, _) = run(io);
                    // A receiver or event that is gone belongs to a port that is being dropped, so no request waits.
                    let _ = report.send(Done { id, result });
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

impl Engine for Blocking {
    fn submit(&mut self, id: u64, io: Io) {
        if matches!(io, Io::Read { .. }) {
            let (result, _) = run(io);
            self.reads.push(Done { id, result });
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
            // The thread ends once its queue is empty; a panic of the thread has been printed already.
            let _ = thread.join();
        }
    }
}
