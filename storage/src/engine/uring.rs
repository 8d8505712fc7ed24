//! The io_uring engine: a write linked to its fdatasync, one system call for both and for all reads.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;
use std::time::Duration;

use io_uring::{IoUring, opcode, squeue, types};
use slab::Slab;

use super::{Chunk, Done, Engine, Io, SyncScope, write_chunks};
use crate::sync::Event;

/// Submission entries; the kernel gives twice as many completion entries.
const ENTRIES: u32 = 256;
/// Most entries in flight, so that the completion queue never overflows.
const IN_FLIGHT: usize = 2 * ENTRIES as usize;

/// Whether the kernel gives a ring with the operations used here (Linux 5.6).
pub(super) fn probe() -> io::Result<()> {
    let ring = IoUring::new(4)?;
    let mut probe = io_uring::Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let needed = [
        opcode::Writev::CODE,
        opcode::Fsync::CODE,
        opcode::Read::CODE,
        opcode::Timeout::CODE,
        opcode::TimeoutRemove::CODE,
    ];
    match needed.iter().all(|&code| probe.is_supported(code)) {
        true => Ok(()),
        false => Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "this io_uring lacks an operation",
        )),
    }
}

/// An operation in the kernel, with all the memory that the kernel may touch.
struct InFlight {
    /// The caller's number for it.
    id: u64,
    io: Io,
    /// What `Writev` points at. Never touched while in flight.
    slices: Slices,
    /// What `Timeout` points at.
    _time: Option<Box<types::Timespec>>,
    /// Completions still to come, and the first error among those that came.
    open: usize,
    failed: Option<io::Error>,
    /// Result of the write or read, in bytes.
    moved: usize,
}

#[derive(Default)]
struct Slices(Vec<libc::iovec>);

// SAFETY: the pointers point into buffers that the operation owns, which are `Send`; nothing else uses them.
unsafe impl Send for Slices {}

/// See the module's documentation.
pub(super) struct Uring {
    ring: IoUring,
    in_flight: Slab<InFlight>,
    /// Entries that did not fit the submission queue, whole operations at a time.
    waiting: VecDeque<Vec<squeue::Entry>>,
    done: Vec<Done>,
    /// Memory for the next operation's entries and slices, and for what has ended.
    entries: Vec<squeue::Entry>,
    slices: Vec<Slices>,
    lists: Vec<Vec<Chunk>>,
    ended: Vec<(u64, i32)>,
    /// Entries submitted and not completed.
    open: usize,
    /// What the injected latency's `Timeout` points at.
    sync_latency: Option<Box<types::Timespec>>,
    /// The newest wait.
    wait: Option<usize>,
}

const MOVE: u64 = 0;
const SYNC: u64 = 1;
/// Of completions that belong to no operation.
const NOBODY: u64 = u64::MAX >> 1;

impl Uring {
    /// Each sync takes `sync_latency` longer than the medium needs.
    pub(super) fn new(event: &Event, sync_latency: Duration) -> io::Result<Self> {
        // Completions interrupt nobody who runs: the next system call takes them. Linux 5.19.
        let cooperative = IoUring::builder().setup_coop_taskrun().build(ENTRIES);
        let ring = cooperative.or_else(|_| IoUring::new(ENTRIES))?;
        ring.submitter().register_eventfd(event.fd().as_raw_fd())?;
        Ok(Self {
            ring,
            in_flight: Slab::new(),
            waiting: VecDeque::new(),
            done: Vec::new(),
            entries: Vec::new(),
            slices: Vec::new(),
            lists: Vec::new(),
            ended: Vec::new(),
            open: 0,
            wait: None,
            sync_latency: (!sync_latency.is_zero()).then(|| Box::new(sync_latency.into())),
        })
    }

    /// Moves whole operations from `waiting` to the submission queue while there is room.
    fn fill(&mut self) {
        while let Some(entries) = self.waiting.pop_front() {
            if !self.push(&entries) {
                return self.waiting.push_front(entries);
            }
        }
    }

    /// Starts an operation, or lets it wait for room.
    fn start(&mut self, entries: &[squeue::Entry]) {
        if !self.waiting.is_empty() || !self.push(entries) {
            self.waiting.push_back(entries.to_vec());
        }
    }

    /// Puts an operation into the submission queue, if there is room.
    fn push(&mut self, entries: &[squeue::Entry]) -> bool {
        let mut queue = self.ring.submission();
        let room = (queue.capacity() - queue.len()).min(IN_FLIGHT.saturating_sub(self.open));
        if room < entries.len() {
            return false;
        }
        // SAFETY: every buffer and descriptor that the entries name is owned by the operation in
        // `in_flight`, which is removed only when its last completion has come.
        unsafe { queue.push_multiple(entries).expect("room was checked") };
        self.open += entries.len();
        true
    }

    /// Ends the wait in flight, if any. Timers that nobody needs any more would fill the ring.
    fn end_wait(&mut self) {
        if let Some(key) = self.wait.take() {
            let remove = opcode::TimeoutRemove::new((key as u64) << 1 | SYNC).build();
            self.start(&[remove.user_data(NOBODY << 1)]);
        }
    }

    fn complete(&mut self, key: usize) {
        // Another operation may get this key.
        self.wait.take_if(|wait| *wait == key);
        let Some(operation) = self.in_flight.try_remove(key) else {
            return;
        };
        let InFlight {
            id,
            io,
            mut slices,
            failed,
            moved,
            ..
        } = operation;
        if slices.0.capacity() > 0 {
            slices.0.clear();
            self.slices.push(slices);
        }
        let result = match (io, failed) {
            (_, Some(error)) => Err(error),
            (
                Io::Read {
                    source,
                    offset,
                    buffer,
                },
                None,
            ) => match moved == buffer.len() {
                true => Ok(Some(buffer)),
                // Short: the end of the file, or an interruption. The plain call tells which.
                false => super::read_exact(&source, offset, buffer).map(Some),
            },
            (Io::Append { mut chunks, .. }, None) => {
                chunks.clear();
                self.lists.push(chunks);
                Ok(None)
            }
            (Io::Write { .. } | Io::Wait(_), None) => Ok(None),
        };
        self.done.push(Done { id, result });
    }

    fn account(&mut self, user_data: u64, result: i32) {
        self.open -= 1;
        let (key, stage) = ((user_data >> 1) as usize, user_data & 1);
        let Some(operation) = self.in_flight.get_mut(key) else {
            return;
        };
        operation.open -= 1;
        // A timeout that ran its time says ETIME.
        if result >= 0 || result == -libc::ETIME {
            if stage == MOVE {
                operation.moved = result as usize;
            }
        } else if result != -libc::ECANCELED || operation.failed.is_none() {
            // A cancelled sync follows a write that failed or came short; the write's own error says more.
            let replace = operation
                .failed
                .as_ref()
                .is_none_or(|e| e.raw_os_error() == Some(libc::ECANCELED));
            if replace {
                operation.failed = Some(io::Error::from_raw_os_error(-result));
            }
        }
        if operation.open > 0 {
            return;
        }
        if let Some((file, offset, chunks)) = operation.io.written() {
            let total: usize = chunks.iter().map(|chunk| chunk.len).sum();
            let cancelled = operation
                .failed
                .as_ref()
                .is_none_or(|e| e.raw_os_error() == Some(libc::ECANCELED));
            if operation.moved < total && cancelled {
                // A short write is no error, but it broke the link to the sync: end both here. Rare.
                let mut ended = write_chunks(file, offset, chunks, operation.moved);
                if let Io::Append { segment, sync, .. } = &operation.io {
                    ended = ended.and_then(|()| sync.carry_out(segment));
                }
                operation.failed = ended.err();
            }
        }
        self.complete(key);
    }
}

impl Engine for Uring {
    fn submit(&mut self, id: u64, mut io: Io) {
        let slot = self.in_flight.vacant_key();
        let key = slot as u64;
        let mut slices = Slices::default();
        let mut entries = std::mem::take(&mut self.entries);
        let mut time = None;
        if let Some((file, offset, chunks)) = io.written()
            && !chunks.is_empty()
        {
            slices = self.slices.pop().unwrap_or_default();
            slices.0.extend(chunks.iter().map(|chunk| libc::iovec {
                iov_base: chunk.buffer.as_ptr().cast_mut().cast(),
                iov_len: chunk.len,
            }));
            let flags = match &io {
                Io::Append {
                    sync: SyncScope::Write,
                    ..
                } => libc::RWF_DSYNC,
                _ => 0,
            };
            let fd = types::Fd(file.raw_fd());
            let write = opcode::Writev::new(fd, slices.0.as_ptr(), slices.0.len() as u32)
                .offset(offset)
                .rw_flags(flags);
            entries.push(write.build().user_data(key << 1 | MOVE));
        }
        match &mut io {
            Io::Read {
                source,
                offset,
                buffer,
            } => {
                let fd = types::Fd(source.file().raw_fd());
                let read =
                    opcode::Read::new(fd, buffer.as_mut_ptr(), buffer.len() as u32).offset(*offset);
                entries.push(read.build().user_data(key << 1 | MOVE));
            }
            Io::Append { sync, .. } => {
                entries.extend(sync.segments().iter().map(|segment| {
                    let fsync = opcode::Fsync::new(types::Fd(segment.file.raw_fd()));
                    fsync
                        .flags(types::FsyncFlags::DATASYNC)
                        .build()
                        .user_data(key << 1 | SYNC)
                }));
                if let Some(latency) = &self.sync_latency {
                    let late = opcode::Timeout::new(&**latency).build();
                    let late = late.user_data(key << 1 | SYNC);
                    entries.extend((0..sync.count()).map(|_| late.clone()));
                }
                let last = entries.len().saturating_sub(1);
                for entry in &mut entries[..last] {
                    *entry = entry.clone().flags(squeue::Flags::IO_LINK);
                }
            }
            Io::Write { .. } => {}
            Io::Wait(duration) => {
                self.end_wait();
                self.wait = Some(slot);
                let time = time.insert(Box::new(types::Timespec::from(*duration)));
                let timeout = opcode::Timeout::new(&**time).build();
                entries.push(timeout.user_data(key << 1 | SYNC));
            }
        }
        let operation = InFlight {
            id,
            io,
            _time: time,
            slices,
            open: entries.len(),
            failed: None,
            moved: 0,
        };
        self.in_flight.insert(operation);
        if entries.is_empty() {
            self.complete(slot);
        } else {
            self.start(&entries);
        }
        entries.clear();
        self.entries = entries;
    }

    fn enter(&mut self) {
        self.fill();
        loop {
            if self.ring.submission().is_empty() {
                return;
            }
            match self.ring.submit() {
                Ok(_) => self.fill(),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // The kernel is short of memory. With entries in flight, a completion makes `poll` try again;
                // without, nothing would: wait here.
                Err(_) if self.open > self.ring.submission().len() => return,
                Err(_) => std::thread::sleep(std::time::Duration::from_millis(1)),
            }
        }
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        loop {
            let mut ended = std::mem::take(&mut self.ended);
            let entries = self.ring.completion();
            ended.extend(entries.map(|entry| (entry.user_data(), entry.result())));
            let any = !ended.is_empty();
            for (user_data, result) in ended.drain(..) {
                self.account(user_data, result);
            }
            self.ended = ended;
            if !any {
                break;
            }
            self.enter();
        }
        if !self.ring.submission().is_empty() {
            self.enter();
        }
        done.append(&mut self.done);
    }

    fn list(&mut self) -> Vec<Chunk> {
        self.lists.pop().unwrap_or_default()
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        // The kernel may still write into buffers of operations in flight: wait for each.
        let mut done = Vec::new();
        self.end_wait();
        self.enter();
        self.poll(&mut done);
        while !self.in_flight.is_empty() {
            if let Err(error) = self.ring.submit_and_wait(1)
                && error.raw_os_error() != Some(libc::EINTR)
            {
                // Leak rather than free memory that the kernel may use.
                tracing::error!("io_uring can't be drained: {error}");
                std::mem::forget(std::mem::take(&mut self.in_flight));
                return;
            }
            self.poll(&mut done);
        }
    }
}
