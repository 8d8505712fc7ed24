//! Asking a disk which parts of it hold data, in a thread of its own.
//!
//! The answer may take a seek in the base image (SEEK_HOLE), for which a file system takes its time: one on a network, or
//! in user space, as much as it likes. A thread that serves many disks must not wait for that. Each export has a thread
//! for it, from its first question on, so that one slow file system keeps nobody waiting but those who ask for its disk.
//!
//! What waits for the thread is bounded by what connections may have in flight.

use std::io;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use crate::backend::{Backend, Extent};
use crate::listen::join;

/// A range of sectors, and at most how many extents are to be told of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Question {
    pub(super) sector: u64,
    pub(super) sectors: u64,
    pub(super) most: usize,
}

/// Whom to tell the answer, in whichever thread has it.
pub(super) type Asker = Box<dyn FnOnce(io::Result<Vec<Extent>>) + Send>;

/// The thread of an export, once there was a question. Dropping it ends the thread, after the questions that it has.
#[derive(Default)]
pub(super) struct Mapper(Mutex<Option<Running>>);

struct Running {
    questions: Sender<(Question, Asker)>,
    thread: JoinHandle<()>,
}

impl Mapper {
    /// Has `backend` asked, the same at each call, and `asker` told the answer.
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
