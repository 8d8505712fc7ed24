//! Asks a disk which parts of it hold data, in a thread of its own.
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

use crate::backend::{Backend, Extent};
use crate::listen::join;

/// A range of sectors, and the most extents wanted in the answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question {
    pub(super) sector: u64,
    pub(super) sectors: u64,
    pub(super) most: usize,
}

/// Receives the answer, in the thread that has it.
pub(super) type Asker = Box<dyn FnOnce(io::Result<Vec<Extent>>) + Send>;

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
                let Question {
                    sector,
                    sectors,
                    most,
                } = question;
                asker(backend.extents(sector, sectors, most));
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
