//! A disk of which each request is a call that blocks, served by a few threads.
//!
//! ```text
//!   queue ──(token, operation)──▶ ┌──────┐ ──▶ thread ──▶ SyncBackend::read_at, write_at
//!   queue ──(token, operation)──▶ └──────┘ ──▶ thread ──▶ SyncBackend::flush, for all that wait
//!     ▲                                           │
//!     └───── Completion, event of its queue ──────┘
//! ```
//! One flush runs at a time. What waits for a flush when one ends shares the next: its writes had
//! ended before. And of two at a time that sync one file, only one would get the kernel's error.

use std::io;
use std::os::fd::BorrowedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{
    Backend, BackendQueue, Buffer, Capabilities, Completion, Condition, Failure, MAX_REQUEST_BYTES,
    Operation, SECTOR_SIZE, Trouble, check_range, descriptor,
};

/// A disk whose requests are calls that block; [`ThreadedDisk`] makes it a [`Backend`].
///
/// Several threads call it at a time. Offsets and lengths are in bytes, multiples of
/// [`SECTOR_SIZE`], and on the disk. A call that panics fails as one that returns an error does,
/// where panics unwind.
pub trait SyncBackend: Send + Sync + 'static {
    /// Fills `bytes` with what the disk has from byte `offset` on.
    ///
    /// # Errors
    /// Whatever went wrong: it is logged, and the client gets an I/O error.
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()>;

    /// Writes `bytes` from byte `offset` on.
    ///
    /// # Errors
    /// As [`read_at`](Self::read_at).
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()>;

    /// Makes everything durable whose [`write_at`](Self::write_at) has returned. It is called by
    /// one thread at a time.
    ///
    /// # Errors
    /// What was written may be lost. So it is not tried again: from then on all writes and flushes
    /// fail, until the disk is opened anew.
    fn flush(&self) -> io::Result<()>;
}

/// A [`SyncBackend`] as a [`Backend`]: its calls are made in threads of their own, so that no
/// front-end waits.
///
/// It has a volatile write cache, which can be switched off; then a flush follows each write.
/// DISCARD and WRITE ZEROES are not offered. Once it and its queues are dropped, the threads carry
/// out what was submitted, and end.
pub struct ThreadedDisk<B> {
    /// Dropped first, so that the backend is dropped where the disk is.
    threads: Arc<DiskThreads>,
    shared: Arc<SharedBackend<B>>,
}

impl<B: SyncBackend> ThreadedDisk<B> {
    /// A disk of `bytes` bytes, with `threads` threads of its own: as many calls of `backend` run
    /// at a time.
    ///
    /// # Errors
    /// If the size is not a positive multiple of [`SECTOR_SIZE`], no thread is asked for, or the
    /// system refuses one.
    pub fn new(backend: B, bytes: u64, threads: usize) -> io::Result<Self> {
        Self::start(backend, bytes, false, threads)
    }

    /// As [`new`](Self::new), of a disk that refuses writes.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn read_only(backend: B, bytes: u64, threads: usize) -> io::Result<Self> {
        Self::start(backend, bytes, true, threads)
    }

    fn start(backend: B, bytes: u64, read_only: bool, threads: usize) -> io::Result<Self> {
        let refuse = |why| Err(io::Error::new(io::ErrorKind::InvalidInput, why));
        if bytes == 0 || !bytes.is_multiple_of(SECTOR_SIZE) {
            return refuse(format!(
                "a disk of {bytes} bytes: give a positive multiple of {SECTOR_SIZE}"
            ));
        }
        if threads == 0 {
            return refuse("a disk with 0 threads: give at least 1".to_owned());
        }
        let shared = Arc::new(SharedBackend {
            sectors: bytes / SECTOR_SIZE,
            read_only,
            write_cache: AtomicBool::new(true),
            failed: OnceLock::new(),
            flushes: Mutex::default(),
            backend,
        });
        let (jobs, waiting) = channel();
        let mut started = DiskThreads {
            jobs: Some(jobs),
            threads: Vec::new(),
        };
        let waiting = Arc::new(Mutex::new(waiting));
        for _ in 0..threads {
            let (shared, waiting) = (Arc::clone(&shared), Arc::clone(&waiting));
            let thread = thread::Builder::new().name("sync-backend".into());
            let thread = thread.spawn(move || shared.serve(&waiting))?;
            started.threads.push(thread);
        }
        let threads = Arc::new(started);
        Ok(Self { threads, shared })
    }

    /// The backend.
    pub fn backend(&self) -> &B {
        &self.shared.backend
    }
}

/// A request, and the queue that waits for it.
struct QueuedRequest {
    token: u64,
    operation: Operation,
    mailbox: Arc<EndedRequests>,
}

/// Where a queue finds its requests that have ended.
struct EndedRequests {
    ended: Mutex<Vec<Completion>>,
    event: EventFd,
}

impl EndedRequests {
    fn put(&self, token: u64, result: Result<Option<Buffer>, Failure>) {
        locked(&self.ended).push(Completion { token, result });
        // Fails only when it is readable already.
        let _ = self.event.write(1);
    }
}

/// The threads, and the way to them. Dropping it ends them, after what was submitted.
struct DiskThreads {
    /// `None` only while dropping.
    jobs: Option<Sender<QueuedRequest>>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for DiskThreads {
    fn drop(&mut self) {
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // Panics of the backend don't get here.
            let _ = thread.join();
        }
    }
}

struct SharedBackend<B> {
    backend: B,
    sectors: u64,
    read_only: bool,
    write_cache: AtomicBool,
    /// Set once a flush has failed.
    failed: OnceLock<Trouble>,
    flushes: Mutex<Flushes>,
}

#[derive(Default)]
struct Flushes {
    /// A thread flushes, and goes on until nobody waits.
    running: bool,
    waiting: Vec<(u64, Arc<EndedRequests>)>,
}

/// Locks `mutex`. What these locks guard is whole at every step.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: SyncBackend> SharedBackend<B> {
    /// Serves requests until nobody can submit any.
    fn serve(&self, jobs: &Mutex<Receiver<QueuedRequest>>) {
        loop {
            let job = locked(jobs).recv();
            let Ok(QueuedRequest {
                token,
                operation,
                mailbox,
            }) = job
            else {
                return;
            };
            let flushes = match operation {
                Operation::Flush => !self.read_only,
                Operation::Write { .. } => !self.write_cache.load(Ordering::Acquire),
                _ => false,
            };
            match self.carry_out(operation) {
                Ok(_) if flushes => self.flush((token, mailbox)),
                result => mailbox.put(token, result),
            }
        }
    }

    fn carry_out(&self, operation: Operation) -> Result<Option<Buffer>, Failure> {
        match operation {
            Operation::Read { sector, sectors } => {
                let len = u64::from(sectors) * SECTOR_SIZE;
                self.check(sector, len)?;
                let mut data = Buffer::try_zeroed(len as usize).map_err(|_| Failure::Io)?;
                let offset = sector * SECTOR_SIZE;
                let what = || format!("a read of {len} bytes at byte {offset}");
                self.call(what, |backend| backend.read_at(&mut data, offset))
                    .map_err(|_| Failure::Io)?;
                Ok(Some(data))
            }
            _ if self.read_only && !matches!(operation, Operation::Flush) => Err(Failure::ReadOnly),
            Operation::Write { sector, data } => {
                let len = data.len() as u64;
                self.check(sector, len)?;
                if self.failed.get().is_some() {
                    return Err(Failure::Io);
                }
                let offset = sector * SECTOR_SIZE;
                let what = || format!("a write of {len} bytes at byte {offset}");
                self.call(what, |backend| backend.write_at(&data, offset))
                    .map_err(|_| Failure::Io)?;
                Ok(None)
            }
            Operation::Flush => Ok(None),
            // Never offered, so never asked for.
            Operation::Discard { .. } | Operation::WriteZeroes { .. } => Err(Failure::Io),
        }
    }

    fn check(&self, sector: u64, len: u64) -> Result<(), Failure> {
        if len > MAX_REQUEST_BYTES as u64 || !len.is_multiple_of(SECTOR_SIZE) {
            return Err(Failure::TooLarge);
        }
        check_range(sector, len / SECTOR_SIZE, self.sectors)
    }

    /// Flushes for this waiter, or has the thread do it that flushes already.
    fn flush(&self, waiter: (u64, Arc<EndedRequests>)) {
        let mut flushes = locked(&self.flushes);
        flushes.waiting.push(waiter);
        if flushes.running {
            return;
        }
        flushes.running = true;
        while !flushes.waiting.is_empty() {
            let served = std::mem::take(&mut flushes.waiting);
            drop(flushes);
            let result = self.flush_once();
            for (token, mailbox) in served {
                mailbox.put(token, result.map(|()| None));
            }
            flushes = locked(&self.flushes);
        }
        flushes.running = false;
    }

    fn flush_once(&self) -> Result<(), Failure> {
        if self.failed.get().is_some() {
            return Err(Failure::Io);
        }
        let flushed = self.call(|| "a flush".to_owned(), SyncBackend::flush);
        flushed.map_err(|error| {
            // Only this thread flushes.
            let _ = self.failed.set(Trouble::now(error, true));
            Failure::Io
        })
    }

    /// Makes a call of the backend, and logs how it fails.
    fn call(
        &self,
        what: impl Fn() -> String,
        call: impl FnOnce(&B) -> io::Result<()>,
    ) -> io::Result<()> {
        let called = catch_unwind(AssertUnwindSafe(|| call(&self.backend)));
        // The panic's own message was printed.
        let result = called.unwrap_or_else(|_| Err(io::Error::other("the backend panicked")));
        result.inspect_err(|error| tracing::error!("{} failed: {error}", what()))
    }
}

impl<B: SyncBackend> Backend for ThreadedDisk<B> {
    fn sectors(&self) -> u64 {
        self.shared.sectors
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: self.shared.read_only,
            flush: true,
            write_cache_toggle: !self.shared.read_only,
            ..Capabilities::default()
        }
    }

    fn write_cache(&self) -> bool {
        self.shared.write_cache.load(Ordering::Acquire)
    }

    fn set_write_cache(&self, on: bool) {
        self.shared.write_cache.store(on, Ordering::Release);
    }

    fn open_queue(&self) -> io::Result<Box<dyn BackendQueue>> {
        let mailbox = EndedRequests {
            ended: Mutex::default(),
            event: EventFd::new(EFD_NONBLOCK)?,
        };
        Ok(Box::new(ThreadedQueue {
            threads: Arc::clone(&self.threads),
            mailbox: Arc::new(mailbox),
        }))
    }

    fn condition(&self) -> Condition {
        let failed = self.shared.failed.get();
        failed.map_or(Condition::Ok, |failed| Condition::ReadOnly(failed.clone()))
    }
}

/// One queue of a [`ThreadedDisk`].
struct ThreadedQueue {
    threads: Arc<DiskThreads>,
    mailbox: Arc<EndedRequests>,
}

impl BackendQueue for ThreadedQueue {
    fn submit(&mut self, token: u64, operation: Operation) {
        let mailbox = Arc::clone(&self.mailbox);
        let job = QueuedRequest {
            token,
            operation,
            mailbox,
        };
        let jobs = self.threads.jobs.as_ref();
        let jobs = jobs.expect("it is there until nobody has the threads");
        jobs.send(job).expect("the threads end after the sender");
    }

    fn kick(&mut self) {}

    fn event(&self) -> BorrowedFd<'_> {
        descriptor(&self.mailbox.event)
    }

    fn completions(&mut self, done: &mut Vec<Completion>) {
        // Clear the event first; a later completion sets it again.
        let _ = self.mailbox.event.read();
        done.append(&mut locked(&self.mailbox.ended));
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;
    use crate::BlockingDisk;

    const SECTORS: u64 = 64;
    const BYTES: u64 = SECTORS * SECTOR_SIZE;
    /// A request of this sector panics, one of the next fails.
    const PANICS: u64 = 60;
    const FAILS: u64 = 61;

    /// Bytes in memory. What it has seen outlives the disk.
    #[derive(Clone, Default)]
    struct Memory(Arc<Observations>);

    #[derive(Default)]
    struct Observations {
        bytes: Mutex<Vec<u8>>,
        inside: AtomicUsize,
        most_inside: AtomicUsize,
        threads: Mutex<HashSet<thread::ThreadId>>,
        flushes: AtomicUsize,
        /// A flush waits for one message from here.
        gate: Mutex<Option<Receiver<io::Result<()>>>>,
    }

    impl Memory {
        fn new() -> Self {
            let memory = Self::default();
            *locked(&memory.0.bytes) = vec![0; BYTES as usize];
            memory
        }

        /// Has each flush wait for a message, and end with it.
        fn gate(&self) -> Sender<io::Result<()>> {
            let (open, gate) = channel();
            *locked(&self.0.gate) = Some(gate);
            open
        }

        fn request(&self, offset: u64, access: impl FnOnce(&mut [u8])) -> io::Result<()> {
            let seen = &self.0;
            let inside = seen.inside.fetch_add(1, Ordering::SeqCst) + 1;
            seen.most_inside.fetch_max(inside, Ordering::SeqCst);
            locked(&seen.threads).insert(thread::current().id());
            access(&mut locked(&seen.bytes)[offset as usize..]);
            seen.inside.fetch_sub(1, Ordering::SeqCst);
            match offset / SECTOR_SIZE {
                PANICS => panic!("the backend's own bug"),
                FAILS => Err(io::Error::other("broken")),
                _ => Ok(()),
            }
        }
    }

    impl SyncBackend for Memory {
        fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
            self.request(offset, |from| bytes.copy_from_slice(&from[..bytes.len()]))
        }

        fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
            self.request(offset, |to| to[..bytes.len()].copy_from_slice(bytes))
        }

        fn flush(&self) -> io::Result<()> {
            self.0.flushes.fetch_add(1, Ordering::SeqCst);
            match &*locked(&self.0.gate) {
                Some(gate) => gate.recv().expect("the test lets it pass"),
                None => Ok(()),
            }
        }
    }

    fn write(sector: u64, byte: u8) -> Operation {
        let data = Buffer::from(&[byte; 512][..]);
        Operation::Write { sector, data }
    }

    /// The tokens of the next requests that end, at least one, in order, with whether they
    /// succeeded.
    fn ended(queue: &mut dyn BackendQueue) -> Vec<(u64, bool)> {
        let mut done = Vec::new();
        let limit = Timespec::try_from(Duration::from_secs(60)).unwrap();
        queue.kick();
        while done.is_empty() {
            let mut event = [PollFd::from_borrowed_fd(queue.event(), PollFlags::IN)];
            assert_eq!(poll(&mut event, Some(&limit)), Ok(1), "no request ends");
            queue.completions(&mut done);
        }
        let ended = done.iter().map(|end| (end.token, end.result.is_ok()));
        ended.collect()
    }

    #[test]
    fn no_more_calls_run_at_a_time_than_there_are_threads() {
        let memory = Memory::new();
        let disk = BlockingDisk::new(ThreadedDisk::new(memory.clone(), BYTES, 3).unwrap());
        thread::scope(|scope| {
            for thread in 0..6 {
                let disk = &disk;
                scope.spawn(move || {
                    let mut read = [0; 512];
                    for round in 1..=50 {
                        disk.write(&[round; 512], thread * 512).unwrap();
                        disk.read(&mut read, thread * 512).unwrap();
                        assert_eq!(read, [round; 512]);
                    }
                });
            }
        });
        assert!((1..=3).contains(&memory.0.most_inside.load(Ordering::SeqCst)));
        let threads = locked(&memory.0.threads);
        assert!(threads.len() <= 3 && !threads.contains(&thread::current().id()));
    }

    #[test]
    fn a_call_that_panics_or_fails_is_an_io_error_and_the_disk_goes_on() {
        let disk = ThreadedDisk::new(Memory::new(), BYTES, 2).unwrap();
        let disk = BlockingDisk::new(disk);
        for _ in 0..5 {
            for sector in [PANICS, FAILS] {
                let at = sector * SECTOR_SIZE;
                let error = disk.read(&mut [0; 512], at).unwrap_err().to_string();
                assert!(error.ends_with("I/O error"), "{error}");
                disk.write(&[1; 512], at).unwrap_err();
            }
        }
        disk.write(&[1; 512], 0).unwrap();
        disk.flush().unwrap();
        assert_eq!(disk.backend().condition(), Condition::Ok);
    }

    #[test]
    fn flushes_that_wait_share_the_next_one() {
        let memory = Memory::new();
        let open = memory.gate();
        let disk = ThreadedDisk::new(memory.clone(), BYTES, 2).unwrap();
        let mut queue = disk.open_queue().unwrap();
        for token in 0..5 {
            queue.submit(token, Operation::Flush);
        }
        // One thread is in the first flush. The other has seen all others once this has ended.
        queue.submit(5, write(0, 1));
        assert_eq!(ended(&mut *queue), [(5, true)]);
        open.send(Ok(())).unwrap();
        assert_eq!(ended(&mut *queue), [(0, true)]);
        open.send(Ok(())).unwrap();
        let mut others = Vec::new();
        while others.len() < 4 {
            others.extend(ended(&mut *queue));
        }
        assert_eq!(others, [1, 2, 3, 4].map(|token| (token, true)));
        assert_eq!(memory.0.flushes.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn after_a_failed_flush_writes_and_flushes_fail_and_reads_go_on() {
        for panics in [false, true] {
            let memory = Memory::new();
            let open = memory.gate();
            let disk = BlockingDisk::new(ThreadedDisk::new(memory.clone(), BYTES, 2).unwrap());
            disk.write(&[1; 512], 0).unwrap();
            if panics {
                drop(open);
            } else {
                open.send(Err(io::Error::other("broken"))).unwrap();
            }
            disk.flush().unwrap_err();
            disk.flush().unwrap_err();
            disk.write(&[2; 512], 0).unwrap_err();
            let mut read = [0; 512];
            disk.read(&mut read, 0).unwrap();
            assert_eq!(read, [1; 512]);
            assert_eq!(memory.0.flushes.load(Ordering::SeqCst), 1);
            assert_eq!(disk.backend().condition().name(), "read_only");
        }
    }

    #[test]
    fn a_flush_follows_each_write_once_the_cache_is_off() {
        let memory = Memory::new();
        let disk = ThreadedDisk::new(memory.clone(), BYTES, 1).unwrap();
        disk.set_write_cache(false);
        let mut queue = disk.open_queue().unwrap();
        for token in 1..=3 {
            queue.submit(token, write(token, 1));
            assert_eq!(ended(&mut *queue), [(token, true)]);
            let flushes = memory.0.flushes.load(Ordering::SeqCst);
            assert_eq!(flushes as u64, token);
        }
    }

    #[test]
    fn what_was_submitted_is_carried_out_before_the_last_drop_returns() {
        let memory = Memory::new();
        let disk = ThreadedDisk::new(memory.clone(), BYTES, 2).unwrap();
        let mut queue = disk.open_queue().unwrap();
        for sector in 0..PANICS {
            queue.submit(sector, write(sector, 9));
        }
        drop(disk);
        drop(queue);
        let written = &locked(&memory.0.bytes)[..(PANICS * SECTOR_SIZE) as usize];
        assert!(written.iter().all(|&byte| byte == 9));
        assert_eq!(Arc::strong_count(&memory.0), 1);
    }

    #[test]
    fn what_the_disk_cant_do_is_refused() {
        let disk = ThreadedDisk::new(Memory::new(), BYTES, 1).unwrap();
        let mut queue = disk.open_queue().unwrap();
        for operation in [
            Operation::Read {
                sector: SECTORS,
                sectors: 1,
            },
            Operation::Read {
                sector: 0,
                sectors: u32::MAX,
            },
            Operation::Read {
                sector: 0,
                sectors: 0,
            },
            Operation::Discard {
                sector: 0,
                sectors: 1,
            },
            write(u64::MAX, 1),
        ] {
            queue.submit(1, operation);
            assert_eq!(ended(&mut *queue), [(1, false)]);
        }
        let read_only = ThreadedDisk::read_only(Memory::new(), BYTES, 1).unwrap();
        let mut queue = read_only.open_queue().unwrap();
        queue.submit(1, write(0, 1));
        assert_eq!(ended(&mut *queue), [(1, false)]);
        queue.submit(2, Operation::Flush);
        assert_eq!(ended(&mut *queue), [(2, true)]);
        for (bytes, threads, why) in [(512, 0, "0 threads"), (0, 1, "0 bytes"), (100, 1, "100 b")] {
            let refused = ThreadedDisk::new(Memory::new(), bytes, threads);
            let error = refused.err().expect("refused");
            assert!(error.to_string().contains(why), "{error}");
        }
    }
}
