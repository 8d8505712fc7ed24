//! A thread's part in group commit: waiting for an LSN, and leading what falls to it ([`Role`]) when nobody does.

use std::io;

use crate::log::group::{Role, Spare, Task};
use crate::log::state::{FailOnPanic, Log};
use crate::log::waiters::{Mailbox, Waiter, deliver};
use crate::medium::engine::{Done, Engine, Io};
use crate::mutant::{Mutant, planted};
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, Event};
use crate::{Completion, Failure};

/// Engine ids from here on belong to tasks; those below to reads.
const TASKS: u64 = 1 << 63;

/// One thread's engine, mailbox and lead.
pub(crate) struct Committer {
    pub log: Arc<Log>,
    pub mailbox: Arc<Mailbox>,
    engine: Box<dyn Engine>,
    /// What this thread leads, by engine id.
    tasks: Vec<(u64, Task)>,
    next_task: u64,
    spare: Spare,
    /// Memory for what has ended.
    ended: Vec<Done>,
    /// Set when going away: no new group is taken.
    resigned: bool,
}

impl Committer {
    /// For `clients` who may join a group.
    pub(crate) fn new(log: Arc<Log>, clients: usize) -> io::Result<Self> {
        let event = Event::new()?;
        let engine = log.medium.engine(&event)?;
        Ok(Self::with(log, clients, event, engine))
    }

    /// For the log's writer, which it becomes.
    pub(crate) fn writer(log: Arc<Log>) -> io::Result<Self> {
        let event = Event::internal();
        let engine = log.medium.writer_engine(&event)?;
        let writer = Self::with(log, 0, event, engine);
        let first = writer.log.writer.set(writer.mailbox.clone());
        debug_assert!(first.is_ok(), "a log has one writer");
        Ok(writer)
    }

    fn with(log: Arc<Log>, clients: usize, event: Event, engine: Box<dyn Engine>) -> Self {
        let mailbox = Arc::new(Mailbox::new(event));
        let mut state = log.lock();
        state.ports.push(Arc::downgrade(&mailbox));
        state.set_clients(&mailbox, clients);
        drop(state);
        Self {
            log,
            mailbox,
            engine,
            tasks: Vec::new(),
            next_task: TASKS,
            spare: Spare::default(),
            ended: Vec::new(),
            resigned: false,
        }
    }

    fn role(&self) -> Role {
        match self.log.writer.get() {
            None => Role::All,
            Some(writer) if Arc::ptr_eq(writer, &self.mailbox) => Role::Syncs,
            Some(_) => Role::Batches,
        }
    }

    /// Completes `token` once `lsn` is durable. `Ok(true)`: it is already, nothing waits.
    pub(crate) fn wait_for(&self, lsn: u64, token: u64) -> Result<bool, Failure> {
        let mut state = self.log.lock();
        if self.log.poisoned.load(Ordering::Acquire) {
            return Err(Failure::Io);
        }
        // Looked at under the lock: a group that ends now either covers this waiter or sees it.
        let watermark = match planted(Mutant::AckOwnWrite) {
            true => &self.log.written,
            false => &self.log.durable,
        };
        let covered = watermark.load(Ordering::Acquire) >= lsn;
        // Without group commit not even a sync that happened to come after the write serves a second FLUSH.
        if covered && (self.log.most_served > 1 || state.tail.is_none()) {
            return Ok(true);
        }
        if lsn > state.batched && state.is_stuck() {
            return Err(Failure::Io);
        }
        state.join(Waiter {
            lsn,
            token,
            mailbox: self.mailbox.clone(),
        });
        Ok(false)
    }

    /// Takes the lead if there is work and no leader, and starts all submitted I/O.
    pub(crate) fn start(&mut self) {
        let role = self.role();
        // A group that was taken and not begun would never end.
        let log = self.log.clone();
        let _failing = FailOnPanic::new(&log);
        while !self.resigned {
            if self.spare.chunks.capacity() == 0 {
                self.spare.chunks = self.engine.list();
            }
            let mut state = self.log.lock();
            let Some((io, task)) = self.log.lead(&mut state, &mut self.spare, role) else {
                let stuck = state.take_stuck();
                let called = match role {
                    Role::Batches => self.log.call_writer(&mut state),
                    _ => {
                        state.writer_asleep = role == Role::Syncs;
                        None
                    }
                };
                drop(state);
                if let Some(writer) = called {
                    writer.wake();
                }
                deliver(stuck.into_iter(), Err(Failure::Io), None);
                break;
            };
            drop(state);
            self.tasks.push((self.next_task, task));
            self.engine.submit(self.next_task, io);
            self.next_task += 1;
        }
        self.engine.enter();
    }

    /// Submits a read. Its end comes out of [`poll`](Self::poll).
    pub(crate) fn submit_read(&mut self, id: u64, io: Io) {
        self.engine.submit(id, io);
    }

    /// Ends what has ended: groups here, reads are left in `reads`, completions in `done`.
    pub(crate) fn poll(&mut self, reads: &mut Vec<Done>, done: &mut Vec<Completion>) {
        // Cleared first: what is signalled from here on is seen by the next call.
        if !planted(Mutant::SignalClearedLate) {
            self.mailbox.event.clear();
        }
        let mut ended = std::mem::take(&mut self.ended);
        self.engine.poll(&mut ended);
        for end in ended.drain(..) {
            if end.id < TASKS {
                reads.push(end);
                continue;
            }
            let task = self.tasks.iter().position(|(id, _)| *id == end.id);
            // None: a wait that was given up.
            let Some(task) = task else { continue };
            match self.tasks.swap_remove(task).1 {
                Task::Group(group) => {
                    let result = end.result.map(drop);
                    self.log
                        .end_group(group, result, &self.mailbox, &mut self.spare);
                }
                Task::Wait(number) => self.log.lock().gather.over(number),
            }
        }
        self.ended = ended;
        self.start();
        done.append(&mut self.mailbox.completions.lock().expect("mailbox lock"));
        if planted(Mutant::SignalClearedLate) {
            self.mailbox.event.clear();
        }
    }

    /// Sleeps until there may be something to do.
    pub(crate) fn sleep(&self) {
        self.mailbox.event.sleep_until(self.engine.due());
    }

    /// Makes everything up to `lsn` durable, blocking. For the keeper, which leads nobody afterwards.
    pub(crate) fn flush(&mut self, lsn: u64) -> Result<(), Failure> {
        self.resigned = false;
        if self.wait_for(lsn, 0)? {
            return Ok(());
        }
        self.start();
        let (mut reads, mut done) = (Vec::new(), Vec::new());
        loop {
            self.poll(&mut reads, &mut done);
            if !done.is_empty() {
                break;
            }
            self.sleep();
        }
        self.resign();
        done.swap_remove(0).result.map(drop)
    }

    /// Lets the wait that this thread keeps the time of, if any, be begun anew by another.
    fn abandon_wait(&mut self) {
        let mut state = self.log.lock();
        self.tasks.retain(|(_, task)| match task {
            Task::Wait(number) => {
                state.gather.abandon(*number);
                false
            }
            Task::Group(_) => true,
        });
    }

    /// Ends the groups in flight and takes no more, leaving those who still wait to another leader.
    fn resign(&mut self) {
        self.resigned = true;
        let (mut reads, mut done) = (Vec::new(), Vec::new());
        self.abandon_wait();
        while !self.tasks.is_empty() {
            self.sleep();
            self.poll(&mut reads, &mut done);
        }
        if !planted(Mutant::LeaderLeavesSilently) {
            self.log.wake_ports();
        }
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        let mut state = self.log.lock();
        // Nobody is told: the port is going away.
        let own = |waiter: &mut Waiter| Arc::ptr_eq(&waiter.mailbox, &self.mailbox);
        state.take_waiters(own);
        state.awaiting.take(own).for_each(drop);
        state.set_clients(&self.mailbox, 0);
        drop(state);
        self.resign();
    }
}

impl Committer {
    /// Completes `token` once `lsn` is written. `Ok(true)`: it is already, nothing waits.
    pub(crate) fn wait_written(&self, lsn: u64, token: u64) -> Result<bool, Failure> {
        let covered = || match self.log.poisoned.load(Ordering::Acquire) {
            true => Err(Failure::Io),
            false => Ok(self.log.written.load(Ordering::Acquire) >= lsn),
        };
        if covered()? || planted(Mutant::AnsweredUnwritten) {
            return Ok(true);
        }
        let mut state = self.log.lock();
        // Again, under the lock: a batch that ends now either covers this waiter or sees it.
        if covered()? {
            return Ok(true);
        }
        if lsn > state.batched && state.is_stuck() {
            return Err(Failure::Io);
        }
        state.awaiting.join(Waiter {
            lsn,
            token,
            mailbox: self.mailbox.clone(),
        });
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::{
        Buffer, CommitWait, DiskOptions, Failure, Operation, Port, Store, StoreOptions,
        create_disk, default_log_dir,
    };

    fn write(port: &mut Port, byte: u8) -> Result<Option<Buffer>, Failure> {
        port.end_for_test(Operation::Write {
            sector: 0,
            data: Buffer::from(&[byte; 4096][..]),
        })
    }

    /// Promise 5: after the log fails everyone who waits gets an error, later writes and flushes too, reads go
    /// on, closing says so, and only reopening clears it, with what had been acknowledged.
    #[test]
    fn an_error_is_final_until_reopened() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk.img");
        let log = default_log_dir(&disk);
        let options = StoreOptions {
            segment_size: 1 << 20,
            // One of two who could wait has its group held.
            commit_wait: CommitWait {
                longest: Some(Duration::from_secs(3600)),
                count: Some(2),
            },
            ..StoreOptions::default()
        };
        create_disk(&disk, 1 << 20, &log, &options).unwrap();
        let store = Store::open(&log, &[DiskOptions::new(&disk)], &options).unwrap();
        let mut first = store.disks()[0].open_port().unwrap();
        write(&mut first, 1).unwrap();
        first.end_for_test(Operation::Flush).unwrap();
        let mut ports = [first, store.disks()[0].open_port().unwrap()];
        // One waits, not started yet, when the log fails.
        write(&mut ports[0], 2).unwrap();
        ports[0].submit(7, Operation::Flush);
        store.disks()[0]
            .log
            .poison(&std::io::Error::other("planted"));
        let mut done = Vec::new();
        ports[0].completions(&mut done);
        assert_eq!(
            (done[0].token, done[0].result.as_ref().unwrap_err()),
            (7, &Failure::Io)
        );
        for port in &mut ports {
            assert_eq!(
                port.end_for_test(Operation::Flush).unwrap_err(),
                Failure::Io
            );
            assert_eq!(write(port, 3).unwrap_err(), Failure::Io);
            let read = port
                .end_for_test(Operation::Read {
                    sector: 0,
                    sectors: 8,
                })
                .unwrap()
                .unwrap();
            assert!(read.iter().all(|&byte| byte == 2));
        }
        drop(ports);
        assert!(store.close().unwrap_err().to_string().contains("reopen"));
        let store = Store::open(&log, &[DiskOptions::new(&disk)], &options).unwrap();
        let mut port = store.disks()[0].open_port().unwrap();
        let read = port
            .end_for_test(Operation::Read {
                sector: 0,
                sectors: 8,
            })
            .unwrap()
            .unwrap();
        assert!(read.iter().all(|&byte| byte == 1));
        write(&mut port, 4).unwrap();
        port.end_for_test(Operation::Flush).unwrap();
    }
}
