//! A thread for operations on one file, an image or the target of an export. It may never answer,
//! and the log's keeper and the export must go on all the same.

use std::sync::mpsc::{self, Receiver, Sender};
use std::time::Duration;

use crate::error::Result;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Mutex, thread};

/// An operation, with its way to report.
type FileTask = Box<dyn FnOnce() + Send>;

/// See the module's documentation. The thread starts with the first operation, and ends after the
/// last one once this is dropped.
#[derive(Debug, Default)]
pub(crate) struct FileThread {
    jobs: Mutex<Option<Sender<FileTask>>>,
    /// An operation is under way.
    busy: Arc<AtomicBool>,
}

/// The answer of an operation.
#[derive(Debug)]
pub(crate) struct FileAnswer<T>(Receiver<T>);

impl<T> FileAnswer<T> {
    /// Waits for it, not longer than this. `None`: the operation has not ended.
    pub(crate) fn wait(&self, limit: Duration) -> Option<T> {
        self.0.recv_timeout(limit).ok()
    }

    /// Waits for the answer. Calls `waiting` every `tick` meanwhile, whose error ends the wait.
    ///
    /// # Errors
    /// That of `waiting`.
    pub(crate) fn wait_unless(
        &self,
        tick: Duration,
        mut waiting: impl FnMut() -> Result<()>,
    ) -> Result<T> {
        loop {
            if let Some(answer) = self.wait(tick) {
                return Ok(answer);
            }
            waiting()?;
        }
    }

    /// The answer, if the operation has ended.
    pub(crate) fn take(&self) -> Option<T> {
        self.0.try_recv().ok()
    }
}

impl FileThread {
    /// Whether an operation is under way.
    pub(crate) fn is_busy(&self) -> bool {
        self.busy.load(Ordering::Acquire)
    }

    /// Begins an operation. `here`: carries it out in the calling thread, as is done too if no
    /// thread can be had.
    ///
    /// # Panics
    /// If one is under way.
    pub(crate) fn begin<T: Send + 'static>(
        &self,
        here: bool,
        operation: impl FnOnce() -> T + Send + 'static,
    ) -> FileAnswer<T> {
        assert!(
            !self.busy.swap(true, Ordering::AcqRel),
            "one operation at a time"
        );
        let (sender, receiver) = mpsc::channel();
        let busy = self.busy.clone();
        let job: FileTask = Box::new(move || {
            let ended = operation();
            busy.store(false, Ordering::Release);
            // Nobody may be waiting any more.
            let _ = sender.send(ended);
        });
        let mut jobs = self.jobs.lock().expect("file thread lock");
        if !here && jobs.is_none() {
            *jobs = start();
        }
        match jobs.as_ref().filter(|_| !here) {
            Some(jobs) => jobs.send(job).expect("the thread lives as long as this"),
            None => job(),
        }
        FileAnswer(receiver)
    }
}

/// Starts the thread. `None`: there is none to be had.
fn start() -> Option<Sender<FileTask>> {
    let (sender, receiver) = mpsc::channel::<FileTask>();
    let thread = thread::Builder::new().name("image".into());
    let started = thread.spawn(move || receiver.into_iter().for_each(|job| job()));
    started.ok().map(|_| sender)
}
