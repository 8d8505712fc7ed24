//! Asks a disk which parts of it hold data, or have changed, in a thread of its own.
//!
//! The answer may take a seek in the base image (SEEK_HOLE). A file system on a network or in user space may take
//! arbitrarily long for it, and a worker that serves many disks must not wait. So each export starts a thread with its
//! first question, and a slow file system delays only the clients that ask about its own disk.
//!
//! The questions that wait for the thread are bounded by the requests that connections may have in flight.

use std::io;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use super::protocol::extent;
use crate::backend::{Allocation, Backend};
use crate::listen::join;

/// What is told of a disk's parts. The position in a connection's list of contexts is the context's ID.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Context {
    /// Which hold data.
    Allocation,
    /// Which have changed since this point of the past.
    Changes(u64),
}

/// A range of sectors, what is to be told of it, and the most extents wanted for each context in the answer.
#[derive(Clone, Debug)]
pub(super) struct Question {
    pub(super) sector: u64,
    pub(super) sectors: u64,
    pub(super) most: usize,
    pub(super) contexts: Arc<[Context]>,
}

/// A number of sectors, and their state in a context.
pub(super) type Status = (u64, u32);

/// Receives the answer, in the thread that has it: consecutive extents for each context.
pub(super) type Asker = Box<dyn FnOnce(io::Result<Vec<Vec<Status>>>) + Send>;

impl Question {
    fn answer(&self, backend: &dyn Backend) -> io::Result<Vec<Vec<Status>>> {
        let &Self {
            sector,
            sectors,
            most,
            ..
        } = self;
        let of = |context: &Context| match *context {
            Context::Allocation => {
                let extents = backend.extents(sector, sectors, most)?.into_iter();
                let status = extents.map(|extent| match extent.allocation {
                    Allocation::Data => (extent.sectors, 0),
                    Allocation::Zero => (extent.sectors, extent::ZERO),
                    Allocation::Hole => (extent.sectors, extent::HOLE | extent::ZERO),
                });
                Ok(status.collect())
            }
            Context::Changes(since) => {
                let changes = backend.changes(since, sector, sectors, most)?.into_iter();
                let status = changes.map(|change| match change.changed {
                    true => (change.sectors, extent::DIRTY),
                    false => (change.sectors, 0),
                });
                Ok(status.collect())
            }
        };
        self.contexts.iter().map(of).collect()
    }
}

/// The thread of an export, started by its first question. Dropping this ends the thread, after the pending questions.
#[derive(Default)]
pub(super) struct Mapper(Mutex<Option<Running>>);

struct Running {
    questions: Sender<(Question, Asker)>,
    thread: JoinHandle<()>,
}

impl Mapper {
    /// Has the thread ask `backend`, which must be the same at each call, and pass the answer to `asker`.
    pub(super) fn ask(&self, backend: &Arc<dyn Backend>, question: Question, asker: Asker) {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if running.is_none() {
            match start(Arc::clone(backend)) {
                Ok(started) => *running = Some(started),
                Err(error) => return asker(Err(error)),
            }
        }
        if let Some(running) = &*running
            && let Err(unsent) = running.questions.send((question, asker))
        {
            let (_, asker) = unsent.0;
            asker(Err(io::Error::other("the thread that asks has panicked")));
        }
    }
}

fn start(backend: Arc<dyn Backend>) -> io::Result<Running> {
    let (questions, asked) = channel::<(Question, Asker)>();
    let thread = thread::Builder::new()
        .name("nbd-map".into())
        .spawn(move || {
            for (question, asker) in asked {
                asker(question.answer(&*backend));
            }
        })?;
    Ok(Running { questions, thread })
}

impl Drop for Mapper {
    fn drop(&mut self) {
        let running = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(Running { questions, thread }) = running.take() {
            drop(questions);
            join(thread, "NBD");
        }
    }
}
