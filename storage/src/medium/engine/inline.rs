//! The engine of a log's writer: each operation in the thread that submits it, done when `submit` returns.
//!
//! A thread that waits for its own write and sync is the fastest way to a durable group: one system call, and the
//! medium's answer wakes nobody else. Of an asynchronous write with `RWF_DSYNC` a kernel worker does the sync. It is
//! bound to one processor: if a guest computes there, each sync takes a tick of the scheduler.

use std::time::{Duration, Instant};

use super::operation::{Chunk, Done, Engine, Io, run};
use crate::medium::pace::Pace;
use crate::sync::{self, Arc};

/// See the module's documentation.
pub(super) struct Inline {
    /// Each sync takes so much longer than the medium needs.
    sync_latency: Duration,
    /// What every operation waits for.
    pace: Arc<Pace>,
    done: Vec<Done>,
    /// The wait that has begun: when it is over, and its id.
    wait: Option<(Instant, u64)>,
    lists: Vec<Vec<Chunk>>,
}

impl Inline {
    pub(super) fn new(sync_latency: Duration, pace: Arc<Pace>) -> Self {
        Self {
            sync_latency,
            pace,
            done: Vec::new(),
            wait: None,
            lists: Vec::new(),
        }
    }
}

impl Engine for Inline {
    fn submit(&mut self, id: u64, io: Io) {
        if let Io::Wait(time) = io {
            if let Some((_, earlier)) = self.wait.replace((sync::now() + time, id)) {
                self.done.push(Done {
                    id: earlier,
                    result: Ok(None),
                });
            }
            return;
        }
        let syncs = match &io {
            Io::Append { sync, .. } => sync.count(),
            _ => 0,
        };
        let bytes = io.written().map_or(0, |(_, _, chunks)| {
            chunks.iter().map(|chunk| chunk.len).sum()
        });
        self.pace.charge(bytes, syncs);
        let (result, list) = run(io);
        if list.capacity() > 0 {
            self.lists.push(list);
        }
        if !self.sync_latency.is_zero() && syncs > 0 {
            sync::sleep(self.sync_latency * syncs);
        }
        self.done.push(Done { id, result });
    }

    fn enter(&mut self) {}

    fn poll(&mut self, done: &mut Vec<Done>) {
        if let Some((_, id)) = self.wait.take_if(|(over, _)| *over <= sync::now()) {
            let result = Ok(None);
            self.done.push(Done { id, result });
        }
        done.append(&mut self.done);
    }

    fn due(&self) -> Option<Instant> {
        match self.done.is_empty() {
            true => self.wait.map(|(over, _)| over),
            false => Some(sync::now()),
        }
    }

    fn list(&mut self) -> Vec<Chunk> {
        self.lists.pop().unwrap_or_default()
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;

    /// A wait ends when another begins, and in its time.
    #[test]
    fn one_wait_at_a_time() {
        let mut engine = Inline::new(Duration::ZERO, Arc::default());
        let mut done = Vec::new();
        assert!(engine.due().is_none());
        engine.submit(20, Io::Wait(Duration::from_secs(3600)));
        engine.poll(&mut done);
        assert!(done.is_empty());
        engine.submit(21, Io::Wait(Duration::from_millis(1)));
        while done.len() < 2 {
            std::thread::sleep(engine.due().unwrap() - sync::now().min(engine.due().unwrap()));
            engine.poll(&mut done);
        }
        assert_eq!([done[0].id, done[1].id], [20, 21]);
        assert!(engine.due().is_none());
    }
}
