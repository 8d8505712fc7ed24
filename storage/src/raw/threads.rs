//! Tasks as plain system calls in a thread of their own, for kernels without io_uring.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use super::shared::{RawMailbox, RawShared, TaskRunner};
use super::task::RawTask;

/// An ended task and its result.
type FinishedTask = (RawTask, io::Result<()>);

/// See the module's documentation.
pub(super) struct BlockingRunner {
    /// `None` only while dropping.
    tasks: Option<Sender<RawTask>>,
    ended: Receiver<FinishedTask>,
    /// Tasks that the thread could not take, with their error.
    refused: Vec<FinishedTask>,
    thread: Option<JoinHandle<()>>,
}

impl BlockingRunner {
    pub(super) fn new(mailbox: &Arc<RawMailbox>, shared: &Arc<RawShared>) -> io::Result<Self> {
        let (move_to, tasks) = channel::<RawTask>();
        let (report, ended) = channel();
        let (mailbox, shared) = (Arc::clone(mailbox), Arc::clone(shared));
        let work = move || {
            for task in tasks {
                // If the receiver is gone, its queue is being dropped and no request waits. If the counter is full, the
                // event is readable already.
                let _ = report.send(carry_out(task, &shared));
                let _ = mailbox.event.write(1);
            }
        };
        let thread = thread::Builder::new().name("raw-move".into()).spawn(work)?;
        Ok(Self {
            tasks: Some(move_to),
            ended,
            refused: Vec::new(),
            thread: Some(thread),
        })
    }
}

fn carry_out(mut task: RawTask, shared: &RawShared) -> FinishedTask {
    loop {
        let moved = task.step.call(shared.fd());
        if let Some(result) = task.advance(moved) {
            return (task, result);
        }
    }
}

impl TaskRunner for BlockingRunner {
    fn submit(&mut self, task: RawTask) {
        let Some(tasks) = &self.tasks else {
            return;
        };
        // Fails if the thread has panicked, which was printed.
        if let Err(task) = tasks.send(task) {
            let error = io::Error::other("the disk's thread has ended");
            self.refused.push((task.0, Err(error)));
        }
    }

    fn enter(&mut self) {}

    fn poll(&mut self, moved: &mut Vec<FinishedTask>) {
        moved.append(&mut self.refused);
        moved.extend(self.ended.try_iter());
    }
}

impl Drop for BlockingRunner {
    fn drop(&mut self) {
        self.tasks = None;
        if let Some(thread) = self.thread.take() {
            // The thread ends once its tasks are done. A panic was printed.
            let _ = thread.join();
        }
    }
}
