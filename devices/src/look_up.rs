//! A thread that asks a disk what may need its file system.
//!
//! Which sectors hold data, or have changed, may take a seek in the base image (SEEK_HOLE), and that
//! takes arbitrarily long on a network or user-space file system. A worker that serves many disks
//! must not wait for it. So each disk of a front-end starts a thread with its first look-up, and a
//! slow file system delays only those that ask about its own disk.
//!
//! The number of waiting look-ups is bounded by the requests that clients may have in flight.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};

use crate::backend::{Backend, Extent};
use crate::listen::join;

/// As [`Mapped::extents`](crate::backend::Mapped::extents), of any disk: one that knows nothing of
/// its extents is all data.
///
/// # Errors
/// If the medium cannot be queried.
pub(crate) fn extents(
    backend: &dyn Backend,
    sector: u64,
    sectors: u64,
    most: usize,
) -> io::Result<Vec<Extent>> {
    match backend.mapped() {
        Some(mapped) => mapped.extents(sector, sectors, most),
        None => Ok(vec![Extent::data(sectors)]),
    }
}

/// A look-up, and what to do with its result.
type LookUp = Box<dyn FnOnce() + Send>;

/// The thread of a disk, started by its first look-up. Dropping this ends the thread, after the
/// pending look-ups.
#[derive(Default)]
pub(crate) struct LookUpThread(Mutex<Option<RunningThread>>);

struct RunningThread {
    look_ups: Sender<LookUp>,
    thread: JoinHandle<()>,
}

impl LookUpThread {
    /// Queues a look-up; the thread passes its result to `answer`. If the system refuses a thread,
    /// the caller's does, with the error.
    pub(crate) fn ask<T: 'static>(
        &self,
        backend: &Arc<dyn Backend>,
        look_up: impl FnOnce(&dyn Backend) -> io::Result<T> + Send + 'static,
        answer: impl FnOnce(io::Result<T>) + Send + 'static,
    ) {
        let mut running = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if running.is_none() {
            match start() {
                Ok(started) => *running = Some(started),
                Err(error) => return answer(Err(error)),
            }
        }
        let backend = Arc::clone(backend);
        let look_up = Box::new(move || {
            let found = catch_unwind(AssertUnwindSafe(|| look_up(&*backend)));
            // Whoever gets the answer may be the last to need the disk.
            drop(backend);
            answer(found.unwrap_or_else(|_| Err(io::Error::other("the look-up has panicked"))));
        });
        // The thread runs until its queue is gone.
        let sent = running
            .as_ref()
            .map(|running| running.look_ups.send(look_up));
        debug_assert!(matches!(sent, Some(Ok(()))), "the thread runs");
    }
}

fn start() -> io::Result<RunningThread> {
    let (look_ups, receiver) = channel::<LookUp>();
    let run = move || receiver.into_iter().for_each(|look_up| look_up());
    let thread = thread::Builder::new()
        .name("disk-look-up".into())
        .spawn(run)?;
    Ok(RunningThread { look_ups, thread })
}

impl Drop for LookUpThread {
    fn drop(&mut self) {
        let running = self.0.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(RunningThread { look_ups, thread }) = running.take() {
            drop(look_ups);
            join(thread, "a disk");
        }
    }
}
