//! The io_uring engine: one system call for all reads and writes of a turn.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsRawFd;

use io_uring::{IoUring, opcode, squeue, types};
use slab::Slab;

use super::operation::{Chunk, Done, Engine, Io, run, write_chunks};
use crate::Buffer;
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
    let needed = [opcode::Writev::CODE, opcode::Read::CODE];
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
    /// The caller's number for the operation.
    id: u64,
    io: Io,
    /// The list that `Writev` points at. Never touched while in flight.
    slices: Slices,
}

#[derive(Default)]
struct Slices(Vec<libc::iovec>);

// SAFETY: the pointers point into buffers that the operation owns, which are `Send`; nothing else uses them.
unsafe impl Send for Slices {}

/// See the module's documentation.
pub(super) struct Uring {
    ring: IoUring,
    in_flight: Slab<InFlight>,
    /// Entries that did not fit the submission queue.
    waiting: VecDeque<squeue::Entry>,
    done: Vec<Done>,
    /// Memory for the next operations: their slices and chunk lists, and the entries that have ended.
    slices: Vec<Slices>,
    lists: Vec<Vec<Chunk>>,
    ended: Vec<(u64, i32)>,
    /// Entries submitted and not completed.
    open: usize,
}

impl Uring {
    pub(super) fn new(event: &Event) -> io::Result<Self> {
        // Completions do not interrupt the thread while it runs: its next system call takes them. Linux 5.19.
        let cooperative = IoUring::builder().setup_coop_taskrun().build(ENTRIES);
        let ring = cooperative.or_else(|_| IoUring::new(ENTRIES))?;
        ring.submitter().register_eventfd(event.fd().as_raw_fd())?;
        Ok(Self {
            ring,
            in_flight: Slab::new(),
            waiting: VecDeque::new(),
            done: Vec::new(),
            slices: Vec::new(),
            lists: Vec::new(),
            ended: Vec::new(),
            open: 0,
        })
    }

    /// Moves entries from `waiting` to the submission queue while there is room.
    fn fill(&mut self) {
        while let Some(entry) = self.waiting.pop_front() {
            if !self.push(&entry) {
                return self.waiting.push_front(entry);
            }
        }
    }

    /// Puts an entry into the submission queue, if there is room.
    fn push(&mut self, entry: &squeue::Entry) -> bool {
        let mut queue = self.ring.submission();
        if self.open >= IN_FLIGHT || queue.is_full() {
            return false;
        }
        // SAFETY: every buffer and descriptor that the entry names is owned by the operation in
        // `in_flight`, which is removed only when its completion has come.
        unsafe { queue.push(entry).expect("room was checked") };
        self.open += 1;
        true
    }

    fn account(&mut self, key: usize, result: i32) {
        self.open -= 1;
        let Some(operation) = self.in_flight.try_remove(key) else {
            return;
        };
        let InFlight { id, io, mut slices } = operation;
        if slices.0.capacity() > 0 {
            slices.0.clear();
            self.slices.push(slices);
        }
        // An operation that was interrupted, or not begun for want of memory, has moved nothing: plain calls carry it
        // out, as they do the rest of a short one.
        let result = match result {
            interrupted if [-libc::EINTR, -libc::EAGAIN].contains(&interrupted) => 0,
            result => result,
        };
        let result = match usize::try_from(result) {
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
            Ok(moved) => {
                let (result, list) = end(io, moved);
                if list.capacity() > 0 {
                    self.lists.push(list);
                }
                result
            }
        };
        self.done.push(Done { id, result });
    }
}

/// Ends an operation that has moved `moved` bytes. Returns its result, and an append's chunk list, emptied. Fewer
/// bytes than asked for are no error: plain calls do the rest, or report why they cannot.
fn end(mut io: Io, moved: usize) -> (io::Result<Option<Buffer>>, Vec<Chunk>) {
    let written = match io.written() {
        Some((file, offset, chunks)) => write_chunks(file, offset, chunks, moved, false),
        None => Ok(()),
    };
    let list = io.take_list();
    let ended = written.and_then(|()| match io {
        Io::Read { buffer, .. } if moved == buffer.len() => Ok(Some(buffer)),
        read @ Io::Read { .. } => run(read).0,
        _ => Ok(None),
    });
    (ended, list)
}

impl Engine for Uring {
    fn submit(&mut self, id: u64, mut io: Io) {
        let key = self.in_flight.vacant_key() as u64;
        let mut slices = Slices::default();
        let entry = match &mut io {
            Io::Read {
                source,
                offset,
                buffer,
            } => {
                let fd = types::Fd(source.file().raw_fd());
                let read = opcode::Read::new(fd, buffer.as_mut_ptr(), buffer.len() as u32);
                read.offset(*offset).build()
            }
            other => match other.written().filter(|_| !other.syncs()) {
                Some((file, offset, chunks)) => {
                    slices = self.slices.pop().unwrap_or_default();
                    slices.0.extend(chunks.iter().map(|chunk| libc::iovec {
                        iov_base: chunk.buffer.as_ptr().cast_mut().cast(),
                        iov_len: chunk.len,
                    }));
                    let fd = types::Fd(file.raw_fd());
                    let write = opcode::Writev::new(fd, slices.0.as_ptr(), slices.0.len() as u32);
                    write.offset(offset).build()
                }
                // Syncs are the leader's work: one that is done here takes this thread's time.
                None => {
                    let (result, _) = run(io);
                    return self.done.push(Done { id, result });
                }
            },
        };
        self.in_flight.insert(InFlight { id, io, slices });
        let entry = entry.user_data(key);
        if !self.waiting.is_empty() || !self.push(&entry) {
            self.waiting.push_back(entry);
        }
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
                // The kernel is short of memory. With entries in flight, a completion makes `poll` try again; without
                // any, nothing would, so wait here.
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
            for (key, result) in ended.drain(..) {
                self.account(key as usize, result);
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

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;
    use crate::medium::engine::Source;
    use crate::medium::file::DataFile;
    use crate::sync::Arc;

    /// An operation that was interrupted, or for which the kernel had no memory, is still done; any other error is
    /// reported.
    #[test]
    fn an_interrupted_operation_is_carried_out_by_plain_calls() {
        if let Err(error) = probe() {
            return println!("skipped: no io_uring here: {error}");
        }
        let file = tempfile::tempfile().unwrap();
        DataFile::write_all_at(&file, &[7; 512], 0).unwrap();
        let base: Arc<dyn DataFile> = Arc::new(file);
        let event = Event::new().unwrap();
        let mut engine = Uring::new(&event).unwrap();
        for (error, done) in [
            (libc::EINTR, true),
            (libc::EAGAIN, true),
            (libc::EIO, false),
        ] {
            let key = engine.in_flight.insert(InFlight {
                id: 1,
                io: Io::Read {
                    source: Source::Base(base.clone()),
                    offset: 0,
                    buffer: Buffer::zeroed(512),
                },
                slices: Slices::default(),
            });
            engine.open += 1;
            engine.account(key, -error);
            let result = engine.done.pop().unwrap().result;
            match done {
                true => assert_eq!(&result.unwrap().unwrap()[..], [7; 512]),
                false => assert_eq!(result.unwrap_err().raw_os_error(), Some(error)),
            }
        }
    }
}
