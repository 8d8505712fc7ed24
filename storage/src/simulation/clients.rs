//! The ports of an open log, which report to the oracle.

use std::collections::HashSet;

use super::fixture::{Fixture, Running};
use super::oracle::{Broken, Oracle};
use crate::log::pipeline::Marked;
use crate::{Backend, BackendQueue, Completion, MarkText, Operation, Port};

/// Ports that one thread uses.
pub(super) struct Clients {
    /// Each port, with its disk.
    ports: Vec<(usize, Port)>,
    next_token: u64,
    /// Tokens of changes whose port has not been asked yet to complete them only once they are written.
    unasked: HashSet<u64>,
    /// Whether the thread that uses the ports makes quick syncs itself.
    alone: bool,
}

impl Clients {
    /// Opens `count` ports on the disks in turn.
    pub(super) fn open(running: &Running, count: usize, alone: bool) -> Self {
        let port = |i: usize| {
            let disk = i % running.disks.len();
            (disk, running.disks[disk].open_port().expect("a port"))
        };
        Self {
            ports: (0..count).map(port).collect(),
            next_token: 0,
            unasked: HashSet::new(),
            alone,
        }
    }

    /// The token of the newest request.
    pub(super) fn newest(&self) -> u64 {
        self.next_token
    }

    /// Submits a request.
    pub(super) fn submit(
        &mut self,
        oracle: &mut Oracle,
        running: &Running,
        which: usize,
        operation: Operation,
    ) {
        self.next_token += 1;
        let (disk, port) = &mut self.ports[which];
        let through = !running.disks[*disk].write_cache();
        let before = running.appended();
        oracle.submit(which, self.next_token, *disk, &operation, through);
        if oracle.written && !matches!(operation, Operation::Read { .. } | Operation::Flush) {
            self.unasked.insert(self.next_token);
        }
        port.submit(self.next_token, operation);
        oracle.place(which, running.appended() - before);
    }

    /// Writes a mark.
    pub(super) fn mark(
        &mut self,
        oracle: &mut Oracle,
        running: &Running,
        which: usize,
        number: u32,
        text: &MarkText,
    ) {
        self.next_token += 1;
        let before = running.appended();
        oracle.submit_mark(which, self.next_token, number);
        let (_, port) = &mut self.ports[which];
        port.mark(self.next_token, text, Marked::default());
        oracle.place(which, running.appended() - before);
    }

    /// Starts submitted requests and takes those that have ended.
    pub(super) fn poll(
        &mut self,
        oracle: &mut Oracle,
        running: &Running,
        which: usize,
    ) -> Vec<Completion> {
        let before = running.appended();
        let mut done = Vec::new();
        let (_, port) = &mut self.ports[which];
        match self.alone {
            true => port.kick_alone(),
            false => port.kick(),
        }
        running.step_writer();
        let (_, port) = &mut self.ports[which];
        port.completions(&mut done);
        done.retain(|end| {
            let ask = self.unasked.remove(&end.token) && end.result.is_ok();
            !ask || port.when_written(end.token)
        });
        oracle.place(which, running.appended() - before);
        done
    }

    /// Reports to the oracle which requests have ended.
    pub(super) fn complete(
        oracle: &mut Oracle,
        running: &Running,
        fixture: &Fixture,
        which: usize,
        done: Vec<Completion>,
    ) -> Result<(), Broken> {
        for completion in done {
            let world = fixture.medium.lock();
            let good = !running.poisoned() && !world.crashed;
            oracle.complete(which, completion, good, !world.failed_read)?;
        }
        Ok(())
    }
}
