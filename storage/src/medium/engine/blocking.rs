//! The engine for kernels without io_uring: one thread for writes; reads happen in the caller's
//! thread.

use std::io;

use crate::medium::file::{Engine, Io, IoCompletion, run};
use crate::sync::Event;
use crate::sync::mpsc::{Receiver, Sender, channel};
use crate::sync::thread::{self, JoinHandle};

/// See the module's documentation.
pub(super) struct BlockingEngine {
    event: Event,
    writer: Option<WriterThread>,
    /// Operations that ended as they were submitted.
    ended: Vec<IoCompletion>,
}

/// The thread that writes.
struct WriterThread {
    /// `None` only while dropping.
    jobs: Option<Sender<(u64, Io)>>,
    ended: Receiver<IoCompletion>,
    thread: Option<JoinHandle<()>>,
}

impl BlockingEngine {
    pub(super) fn new(event: Event) -> Self {
        Self {
            event,
            writer: None,
            ended: Vec::new(),
        }
    }

    /// Hands an operation to the writer thread, which the first one starts: an engine that only
    /// reads needs none.
    fn write(&mut self, id: u64, io: Io) -> io::Result<()> {
        let writer = match &mut self.writer {
            Some(writer) => writer,
            none => none.insert(WriterThread::start(self.event.try_clone()?)?),
        };
        let jobs = writer.jobs.as_ref();
        if jobs.is_some_and(|jobs| jobs.send((id, io)).is_ok()) {
            Ok(())
        } else {
            Err(io::Error::other("the thread that writes has ended"))
        }
    }
}

impl WriterThread {
    fn start(event: Event) -> io::Result<Self> {
        let (jobs, todo) = channel::<(u64, Io)>();
        let (report, ended) = channel();
        let thread = thread::Builder::new()
            .name("disk-write".into())
            .spawn(move || {
                while let Ok((id, io)) = todo.recv() {
                    let (result, _) = run(io);
                    // If the receiver or event is gone, its port is being dropped and no request
                    // waits.
                    let _ = report.send(IoCompletion { id, result });
                    event.signal();
                }
            })?;
        Ok(Self {
            jobs: Some(jobs),
            ended,
            thread: Some(thread),
        })
    }
}

impl Engine for BlockingEngine {
    fn submit(&mut self, id: u64, io: Io) {
        let result = match io {
            Io::Read { .. } => run(io).0,
            write => match self.write(id, write) {
                Ok(()) => return,
                Err(error) => Err(error),
            },
        };
        self.ended.push(IoCompletion { id, result });
    }

    fn enter(&mut self) {}

    fn poll(&mut self, done: &mut Vec<IoCompletion>) {
        done.append(&mut self.ended);
        if let Some(writer) = &self.writer {
            done.extend(writer.ended.try_iter());
        }
    }
}

impl Drop for WriterThread {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // The thread ends once its queue is empty; a panic of the thread has been printed
            // already.
            let _ = thread.join();
        }
    }
}
