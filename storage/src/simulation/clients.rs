//! The ports of an open log, which report to the oracle.

use std::collections::HashSet;

use super::fixture::{Fixture, RunningStore};
use super::oracle::{Oracle, Violation};
use crate::log::pipeline::MarkCommit;
use crate::{Backend, BackendQueue, Completion, MarkText, Operation, Port};

/// Ports that one thread uses.
pub(super) struct Clients {
    /// The disk of each port, and the port; `None` while the disk is not on the log.
    ports: Vec<(usize, Option<Port>)>,
    /// The port that its owner neither uses nor polls.
    pub away: Option<usize>,
    next_token: u64,
    /// Tokens of changes for which the port has not been asked yet to notify once they are written.
    unasked: HashSet<u64>,
    /// Whether the thread that uses the ports runs quick syncs itself.
    alone: bool,
}

impl Clients {
    /// Opens `count` ports on the disks in turn.
    pub(super) fn open(running: &RunningStore, count: usize, alone: bool) -> Self {
        let port = |i: usize| {
            let place = i % running.disks.len();
            let port = running.disks[place].open_port().expect("a port");
            (running.places[place], Some(port))
        };
        Self {
            ports: (0..count).map(port).collect(),
            away: None,
            next_token: 0,
            unasked: HashSet::new(),
            alone,
        }
    }

    /// Whether a port is used.
    pub(super) fn is_open(&self, which: usize) -> bool {
        self.away != Some(which) && self.ports[which].1.is_some()
    }

    /// Whether no port is used.
    pub(super) fn all_closed(&self) -> bool {
        (0..self.ports.len()).all(|which| !self.is_open(which))
    }

    /// A disk leaves the log.
    pub(super) fn close(&mut self, disk: usize) {
        let ports = self.ports.iter_mut().filter(|(of, _)| *of == disk);
        ports.for_each(|(_, port)| *port = None);
    }

    /// A disk is on the log again.
    pub(super) fn reopen(&mut self, running: &RunningStore, disk: usize) {
        let opened = running.disk(disk).expect("an open disk");
        let ports = self.ports.iter_mut().filter(|(of, _)| *of == disk);
        ports.for_each(|(_, port)| *port = Some(opened.open_port().expect("a port")));
    }

    /// Drops a port, and opens another one.
    pub(super) fn replace(&mut self, running: &RunningStore, which: usize) {
        let (disk, port) = &mut self.ports[which];
        let disk = running.disk(*disk).expect("an open disk");
        *port = None;
        *port = Some(disk.open_port().expect("a port"));
    }

    /// The token of the newest request.
    pub(super) fn newest(&self) -> u64 {
        self.next_token
    }

    /// Submits a request.
    pub(super) fn submit(
        &mut self,
        oracle: &mut Oracle,
        running: &RunningStore,
        which: usize,
        operation: Operation,
    ) {
        let (disk, Some(port)) = &mut self.ports[which] else {
            return;
        };
        self.next_token += 1;
        let through = !running.disk(*disk).expect("an open disk").write_cache();
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
        running: &RunningStore,
        which: usize,
        number: u32,
        text: &MarkText,
    ) {
        let (disk, Some(port)) = &mut self.ports[which] else {
            return;
        };
        self.next_token += 1;
        let before = running.appended();
        oracle.submit_mark(which, self.next_token, *disk, number);
        port.mark(self.next_token, text, MarkCommit::default());
        oracle.place(which, running.appended() - before);
    }

    /// Starts submitted requests.
    pub(super) fn kick(&mut self, which: usize) {
        match &mut self.ports[which].1 {
            Some(port) if self.alone => port.kick_alone(),
            Some(port) => port.kick(),
            None => {}
        }
    }

    /// Starts submitted requests and takes completions.
    pub(super) fn poll(
        &mut self,
        oracle: &mut Oracle,
        running: &RunningStore,
        which: usize,
    ) -> Vec<Completion> {
        let before = running.appended();
        let mut done = Vec::new();
        let used = self.is_open(which);
        if used {
            self.kick(which);
        }
        running.step_writer();
        let Some(port) = self.ports[which].1.as_mut().filter(|_| used) else {
            return done;
        };
        port.completions(&mut done);
        done.retain(|end| {
            let ask = self.unasked.remove(&end.token) && end.result.is_ok();
            !ask || port.notify_written(end.token)
        });
        oracle.place(which, running.appended() - before);
        done
    }

    /// Reports to the oracle which requests have ended.
    pub(super) fn complete(
        oracle: &mut Oracle,
        running: &RunningStore,
        fixture: &Fixture,
        which: usize,
        done: Vec<Completion>,
    ) -> Result<(), Violation> {
        for completion in done {
            let world = fixture.medium.lock();
            let good = !running.poisoned() && !world.crashed;
            oracle.complete(which, completion, good, !world.failed_read)?;
        }
        Ok(())
    }
}
