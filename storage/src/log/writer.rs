//! The log's writer: a thread that leads every group that syncs, from one to the next.

use std::io;

use crate::log::committer::Committer;
use crate::log::state::{FailOnPanic, Log};
use crate::log::waiters::Mailbox;
use crate::schedule::short_slice;
use crate::sync::Arc;
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::thread::{self, JoinHandle};

/// The running writer of a log. Dropping it ends the group that is under way; then nobody leads another.
pub(crate) struct Writer {
    mailbox: Arc<Mailbox>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    /// Starts the writer of a log that has none.
    ///
    /// # Errors
    /// If the system refuses a descriptor or a thread.
    pub(crate) fn start(log: &Arc<Log>) -> io::Result<Self> {
        let mut committer = Committer::writer(log.clone())?;
        let mailbox = committer.mailbox.clone();
        let stop = Arc::new(AtomicBool::new(false));
        let (stopping, log) = (stop.clone(), log.clone());
        let thread = thread::Builder::new()
            .name("log-writer".into())
            .spawn(move || {
                let _failing = FailOnPanic::new(&log);
                short_slice();
                let (mut reads, mut done) = (Vec::new(), Vec::new());
                loop {
                    committer.poll(&mut reads, &mut done);
                    if stopping.load(Ordering::Acquire) {
                        return;
                    }
                    committer.sleep();
                }
            })?;
        Ok(Self {
            mailbox,
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Release);
        self.mailbox.wake();
        if let Some(thread) = self.thread.take() {
            // A panic in it has been printed, and has failed the log.
            let _ = thread.join();
        }
    }
}
