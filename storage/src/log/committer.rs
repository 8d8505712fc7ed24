//! A thread's part in group commit: waiting for an LSN, and writing batches while the log's leader syncs.

use std::io;

use crate::log::group::{Group, Spare};
use crate::log::leader::Leader;
use crate::log::state::{FailOnPanic, Log};
use crate::log::waiters::{Mailbox, Waiter};
use crate::medium::engine::{Done, Engine, Io};
use crate::mutant::{Mutant, planted};
use crate::sync::atomic::Ordering;
use crate::sync::{Arc, Event};
use crate::{Completion, Failure};

/// Engine ids from here on belong to batches; those below to reads.
const BATCHES: u64 = 1 << 63;

/// One thread's engine and mailbox.
pub(crate) struct Committer {
    pub log: Arc<Log>,
    pub mailbox: Arc<Mailbox>,
    engine: Box<dyn Engine>,
    /// The batches that this thread writes, by engine id.
    batches: Vec<(u64, Group)>,
    next_batch: u64,
    spare: Spare,
    leader: Leader,
    /// Memory for ended operations, which each poll uses again.
    ended: Vec<Done>,
    /// The port has appended a record or added a waiter since it last looked at the log.
    unstarted: bool,
    /// Set while the port resigns: it takes no new batch.
    resigned: bool,
}

impl Committer {
    /// A committer for a port with `clients` clients that may join a group.
    pub(crate) fn new(log: Arc<Log>, clients: usize) -> io::Result<Self> {
        let event = Event::new()?;
        let engine = log.medium.engine(&event)?;
        let mailbox = Arc::new(Mailbox::new(event));
        let mut state = log.lock();
        state.waiters.add_port(&mailbox, clients);
        drop(state);
        let leader = Leader::new(log.clone(), Some(mailbox.clone()));
        Ok(Self {
            log,
            leader,
            mailbox,
            engine,
            batches: Vec::new(),
            next_batch: BATCHES,
            spare: Spare::default(),
            ended: Vec::new(),
            unstarted: false,
            resigned: false,
        })
    }

    /// Notes that a record was appended, or had no room: there may be a batch to write.
    pub(crate) fn appended(&mut self) {
        self.unstarted = true;
    }

    /// Completes `token` once `lsn` is durable. `Ok(true)`: it is durable already, and no completion comes.
    pub(crate) fn wait_for(&mut self, lsn: u64, token: u64) -> Result<bool, Failure> {
        let mut state = self.log.lock();
        if self.log.poisoned.load(Ordering::Acquire) {
            return Err(Failure::Io);
        }
        // The watermark is read under the lock: a group that ends now either covers this waiter or sees it.
        let covered = state.pipeline.durable() >= lsn;
        // Without group commit each FLUSH gets a sync of its own, even if an earlier FLUSH's sync came after its
        // writes.
        if covered && (self.log.most_served > 1 || state.ring.tail().is_none()) {
            return Ok(true);
        }
        if lsn > state.pipeline.batched() && state.is_stuck() {
            return Err(Failure::Io);
        }
        state.waiters.join(Waiter {
            lsn,
            token,
            mailbox: self.mailbox.clone(),
        });
        drop(state);
        self.unstarted = true;
        Ok(false)
    }

    /// Starts the submitted operations, and calls the leader if it is wanted.
    /// `alone`: the thread has nothing to do until a request of this port ends, so it leads a lone, quick group itself.
    /// Returns whether it did.
    pub(crate) fn start(&mut self, alone: bool) -> bool {
        let led = self.unstarted && self.look(alone);
        self.engine.enter();
        led
    }

    /// Looks at the log: writes the batches that need no sync, and calls the leader for the others.
    fn look(&mut self, alone: bool) -> bool {
        self.unstarted = false;
        // If this thread panicked, a batch that it has taken and not begun would never end.
        let log = self.log.clone();
        let _failing = FailOnPanic::new(&log);
        loop {
            if self.spare.chunks.capacity() == 0 {
                self.spare.chunks = self.engine.list();
            }
            let mut state = log.lock();
            let batch = match self.resigned {
                true => None,
                false => log.write_behind(&mut state, &mut self.spare),
            };
            state.check(&log);
            let Some((io, batch)) = batch else {
                let stuck = state.take_stuck();
                let silent = self.resigned && planted(Mutant::LeaderLeavesSilently);
                let called = !state.led && log.wants_leader(&state) && !silent;
                let mut led = false;
                if called && alone && log.is_lone(&state, &self.mailbox) {
                    let next = self.leader.begin_locked(state);
                    led = self.leader.run(next);
                } else {
                    drop(state);
                    if called {
                        log.call_leader();
                    }
                }
                log.refuse_waiters(stuck);
                return led;
            };
            drop(state);
            self.batches.push((self.next_batch, batch));
            self.engine.submit(self.next_batch, io);
            self.next_batch += 1;
        }
    }

    /// Submits a read. [`poll`](Self::poll) returns its end.
    pub(crate) fn submit_read(&mut self, id: u64, io: Io) {
        self.engine.submit(id, io);
    }

    /// Collects what has ended: finishes batches, appends reads to `reads` and completions to `done`.
    pub(crate) fn poll(&mut self, reads: &mut Vec<Done>, done: &mut Vec<Completion>) {
        // The event is cleared first, so that the next call sees every signal from here on.
        if !planted(Mutant::SignalClearedLate) {
            self.mailbox.event.clear();
        }
        self.unstarted |= self.mailbox.called.swap(false, Ordering::Acquire);
        let mut ended = std::mem::take(&mut self.ended);
        self.engine.poll(&mut ended);
        for end in ended.drain(..) {
            let batch = self.batches.iter().position(|(id, _)| *id == end.id);
            let Some(batch) = batch else {
                reads.push(end);
                continue;
            };
            let (_, batch) = self.batches.swap_remove(batch);
            let (result, own) = (end.result.map(|_| 1), Some(&self.mailbox));
            let log = &self.log;
            log.end_group(batch, result, own, &mut self.spare, |state| {
                state.check(log);
            });
            self.unstarted = true;
        }
        self.ended = ended;
        if self.unstarted {
            self.start(false);
        }
        done.append(&mut self.mailbox.completions.lock().expect("mailbox lock"));
        if planted(Mutant::SignalClearedLate) {
            self.mailbox.event.clear();
        }
    }

    /// Sleeps until there may be something to do.
    pub(crate) fn sleep(&self) {
        self.mailbox.event.sleep_until(None);
    }

    /// Makes everything up to `lsn` durable, blocking. For the keeper, which has nothing else to do meanwhile: so it
    /// leads the group itself if there is no leader.
    pub(crate) fn flush(&mut self, lsn: u64, leader: &mut Leader) -> Result<(), Failure> {
        self.resigned = false;
        if self.wait_for(lsn, 0)? {
            return Ok(());
        }
        let (mut reads, mut done) = (Vec::new(), Vec::new());
        loop {
            let led = leader.lead_one();
            self.poll(&mut reads, &mut done);
            if !done.is_empty() {
                break;
            }
            if !led {
                self.sleep();
            }
        }
        self.resign();
        done.swap_remove(0).result.map(drop)
    }

    /// Waits for the batches in flight and takes no more; other ports and the leader serve the remaining waiters.
    fn resign(&mut self) {
        self.resigned = true;
        let (mut reads, mut done) = (Vec::new(), Vec::new());
        while !self.batches.is_empty() {
            self.sleep();
            self.poll(&mut reads, &mut done);
        }
        // Other ports now write what this port would have written.
        if !planted(Mutant::LeaderLeavesSilently) {
            self.log.wake_ports();
        }
    }
}

impl Drop for Committer {
    fn drop(&mut self) {
        let mut state = self.log.lock();
        state.waiters.remove_port(&self.mailbox);
        drop(state);
        self.resign();
    }
}

impl Committer {
    /// Completes `token` once `lsn` is written. `Ok(true)`: it is written already, and no completion comes.
    pub(crate) fn wait_written(&mut self, lsn: u64, token: u64) -> Result<bool, Failure> {
        let log = &self.log;
        let covered = || match log.poisoned.load(Ordering::Acquire) {
            true => Err(Failure::Io),
            false => Ok(log.written.load(Ordering::Acquire) >= lsn),
        };
        if covered()? || planted(Mutant::AnsweredUnwritten) {
            return Ok(true);
        }
        let mut state = log.lock();
        // The watermark is read again under the lock: a batch that ends now either covers this waiter or sees it.
        if covered()? {
            return Ok(true);
        }
        if lsn > state.pipeline.batched() && state.is_stuck() {
            return Err(Failure::Io);
        }
        state.waiters.join_written(Waiter {
            lsn,
            token,
            mailbox: self.mailbox.clone(),
        });
        drop(state);
        self.unstarted = true;
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use crate::{
        BackendQueue, Buffer, CommitWait, DiskOptions, Failure, Operation, Port, Store,
        StoreOptions, create_disk, default_log_dir,
    };

    fn write(port: &mut Port, byte: u8) -> Result<Option<Buffer>, Failure> {
        port.end_for_test(Operation::Write {
            sector: 0,
            data: Buffer::from(&[byte; 4096][..]),
        })
    }

    /// A thread that has nothing else to do makes the sync of its lone FLUSH itself.
    #[test]
    fn a_lone_flush_wakes_no_other_thread() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk.img");
        let log = default_log_dir(&disk);
        let options = StoreOptions {
            segment_size: 1 << 20,
            ..StoreOptions::default()
        };
        create_disk(&disk, 1 << 20, &log, &options).unwrap();
        let store = Store::open(&log, &[DiskOptions::new(&disk)], &options).unwrap();
        let mut port = store.disks()[0].open_port().unwrap();
        write(&mut port, 1).unwrap();
        port.submit(7, Operation::Flush);
        assert!(port.committer.start(true), "this thread made the sync");
        let mut done = Vec::new();
        port.completions(&mut done);
        assert_eq!(
            (done[0].token, port.committer.log.counters.snapshot().syncs),
            (7, 1)
        );
        // A thread with other work leaves the sync to the writer thread.
        write(&mut port, 2).unwrap();
        port.submit(8, Operation::Flush);
        assert!(!port.committer.start(false));
        while done.len() < 2 {
            port.sleep_for_test();
            port.completions(&mut done);
        }
        assert!(done[1].result.is_ok());
    }

    /// Promise 5: after the log fails, every waiter and all later writes and flushes get an error, reads go on, and
    /// closing reports the failure. Only reopening clears it, and then the acknowledged data is there.
    #[test]
    fn an_error_is_final_until_reopened() {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk.img");
        let log = default_log_dir(&disk);
        let options = StoreOptions {
            segment_size: 1 << 20,
            // Of two clients only one waits, so its group is held.
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
        // A FLUSH waits, its group not started yet, when the log fails.
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
