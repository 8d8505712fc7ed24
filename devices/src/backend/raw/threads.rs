//! Tasks through plain calls, for kernels without io_uring: a thread that moves bytes, and one that syncs, so that no
//! read waits for a sync.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};

use vmm_sys_util::eventfd::EventFd;

use super::task::{Step, Task};
use super::{Completion, Mover, Shared};

/// See the module's documentation.
pub(super) struct Threads {
    /// To the thread that moves, and to the one that syncs; `None` only while dropping.
    lanes: Option<[Sender<Task>; 2]>,
    ended: Receiver<Completion>,
    shared: Arc<Shared>,
    /// What no thread took.
    refused: Vec<Completion>,
    threads: Vec<JoinHandle<()>>,
}

/// What a thread works with.
struct Lane {
    tasks: Receiver<Task>,
    /// Where tasks go on that come to a sync; `None`: here.
    syncs: Option<Sender<Task>>,
    ended: Sender<Completion>,
    event: EventFd,
    shared: Arc<Shared>,
}

impl Lane {
    fn run(self) {
        while let Ok(task) = self.tasks.recv() {
            if let Some(completion) = self.carry_out(task) {
                // A receiver or event that is gone belongs to a queue that is being dropped: nobody waits.
                let _ = self.ended.send(completion);
                let _ = self.event.write(1);
            }
        }
    }

    /// How the task ended; `None` if the other thread goes on with it.
    fn carry_out(&self, mut task: Task) -> Option<Completion> {
        loop {
            if let (Step::Sync, Some(syncs)) = (&task.step, &self.syncs) {
                let Err(task) = syncs.send(task) else {
                    return None;
                };
                return Some(gone(&self.shared, task.0));
            }
            let moved = task.step.call(self.shared.fd());
            if let Some(result) = task.advance(moved) {
                return Some(self.shared.end(task, result));
            }
        }
    }
}

fn gone(shared: &Shared, task: Task) -> Completion {
    let error = io::Error::other("the disk's thread has ended");
    shared.end(task, Err(error))
}

impl Threads {
    pub(super) fn new(event: &EventFd, shared: &Arc<Shared>) -> io::Result<Self> {
        let (move_to, moves) = channel();
        let (sync_to, syncs) = channel();
        let (report, ended) = channel();
        let lanes = [
            ("raw-move", moves, Some(sync_to.clone())),
            ("raw-sync", syncs, None),
        ];
        // Threads that have begun when a later one is refused end with the senders.
        let threads = lanes.into_iter().map(|(name, tasks, syncs)| {
            let lane = Lane {
                tasks,
                syncs,
                ended: report.clone(),
                event: event.try_clone()?,
                shared: Arc::clone(shared),
            };
            thread::Builder::new()
                .name(name.into())
                .spawn(move || lane.run())
        });
        let threads = threads.collect::<io::Result<_>>()?;
        Ok(Self {
            lanes: Some([move_to, sync_to]),
            ended,
            shared: Arc::clone(shared),
            refused: Vec::new(),
            threads,
        })
    }
}

impl Mover for Threads {
    fn submit(&mut self, task: Task) {
        let Some([moves, syncs]) = &self.lanes else {
            return;
        };
        let lane = match task.step {
            Step::Sync => syncs,
            _ => moves,
        };
        // It died of a panic, which has been printed.
        if let Err(task) = lane.send(task) {
            self.refused.push(gone(&self.shared, task.0));
        }
    }

    fn enter(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.refused);
        done.extend(self.ended.try_iter());
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.lanes = None;
        for thread in self.threads.drain(..) {
            // It ends once its tasks are done; a panic in it has been printed already.
            let _ = thread.join();
        }
    }
}
