//! The io_uring engine: one system call for all reads and writes of a turn.
//!
//! Batches that nobody has to sync are written through the kernel's page cache. A kill of the daemon can't lose them there, so
//! their writers need not wait for the medium; a checkpoint copies them without a read; and a later fdatasync of the segment
//! includes them. So that this sync stays short, the kernel writes them back in steps, and the log waits for the step before.

use std::io;
use std::ops::Range;

use io_uring::{opcode, types};
use rustix::io::Errno;

use crate::Buffer;
use crate::medium::file::{Chunk, Done, Engine, Io, SyncScope, run, write_chunks};
use crate::medium::ring::Ring;
use crate::sync::Event;

/// The kernel begins to write a segment back whenever so many bytes of it are in the page cache.
const WRITE_BACK: u64 = 1 << 20;

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

/// What became of an operation at the page cache.
enum Cached {
    /// It does not go through it.
    Not,
    /// It has ended.
    Ended(io::Result<()>),
    /// It was written, and ends once these bytes of the segment are being written back.
    EndsStep(Range<u64>),
}

/// See the module's documentation.
pub(super) struct Uring {
    ring: Ring<InFlight>,
    done: Vec<Done>,
    /// Memory for the next operations: their slices and chunk lists.
    slices: Vec<Slices>,
    lists: Vec<Vec<Chunk>>,
    /// Signalled for operations that end while they are submitted; the ring signals it for all others.
    event: Event,
}

impl Uring {
    pub(super) fn new(event: &Event) -> io::Result<Self> {
        Ok(Self {
            ring: Ring::new(&event.fd())?,
            done: Vec::new(),
            slices: Vec::new(),
            lists: Vec::new(),
            event: event.try_clone()?,
        })
    }

    /// Carries out a write that ends without a sync through the page cache, if its segment takes it there.
    fn write_cached(&mut self, io: &mut Io) -> Cached {
        let Io::Append {
            segment,
            offset,
            chunks,
            sync: SyncScope::None,
            ..
        } = io
        else {
            return Cached::Not;
        };
        // Where a server does the work of the file system, it would do each write at once.
        let cache = match segment.needs_sync {
            true => None,
            false => segment.cache(),
        };
        let Some(file) = cache else {
            return Cached::Not;
        };
        let written = write_chunks(file, *offset, chunks, 0, false);
        let end = *offset + chunks.iter().map(|chunk| chunk.len as u64).sum::<u64>();
        let step = written_back(*offset..end);
        self.lists.push(io.take_list());
        match (written, step) {
            (Ok(()), Some(step)) => Cached::EndsStep(step),
            (written, _) => Cached::Ended(written),
        }
    }

    fn account(&mut self, operation: InFlight, moved: Result<usize, Errno>) {
        let InFlight { id, io, mut slices } = operation;
        if slices.0.capacity() > 0 {
            slices.0.clear();
            self.slices.push(slices);
        }
        // An operation that was interrupted, or not begun for want of memory, has moved nothing: plain calls carry it
        // out, as they do the rest of a short one.
        let moved = match moved {
            Err(Errno::INTR | Errno::AGAIN) => Ok(0),
            moved => moved,
        };
        let result = moved.map_err(io::Error::from).and_then(|moved| {
            let (result, list) = end(io, moved);
            if list.capacity() > 0 {
                self.lists.push(list);
            }
            result
        });
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

/// What is to be written back once these bytes of a segment are in the page cache: the step that they end, and the step before it
/// with what parallel writes may have left there. `None` if they end no step.
fn written_back(written: Range<u64>) -> Option<Range<u64>> {
    let begin = written.start / WRITE_BACK;
    let end = written.end / WRITE_BACK;
    (begin < end).then(|| begin.saturating_sub(1) * WRITE_BACK..end * WRITE_BACK)
}

impl Engine for Uring {
    fn submit(&mut self, id: u64, mut io: Io) {
        let mut slices = Slices::default();
        let write_back = match self.write_cached(&mut io) {
            Cached::Not => None,
            Cached::EndsStep(range) => Some(range),
            Cached::Ended(written) => {
                let result = written.map(|()| None);
                return self.done.push(Done { id, result });
            }
        };
        let entry = match &mut io {
            Io::Append { segment, .. } if let Some(range) = write_back => {
                let fd = types::Fd(segment.file.raw_fd());
                let len = (range.end - range.start) as u32;
                let flags = libc::SYNC_FILE_RANGE_WAIT_BEFORE | libc::SYNC_FILE_RANGE_WRITE;
                let sync = opcode::SyncFileRange::new(fd, len).offset(range.start);
                sync.flags(flags).build()
            }
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
        // SAFETY: the operation owns its file, its buffers and its slices, all of them behind pointers.
        unsafe { self.ring.submit(InFlight { id, io, slices }, entry) };
    }

    fn enter(&mut self) {
        self.ring.enter();
        if !self.done.is_empty() {
            self.event.signal();
        }
    }

    fn poll(&mut self, done: &mut Vec<Done>) {
        while let Some((operation, moved)) = self.ring.next_ended() {
            self.account(operation, moved);
        }
        done.append(&mut self.done);
    }

    fn list(&mut self) -> Vec<Chunk> {
        self.lists.pop().unwrap_or_default()
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::time::Timespec;

    use super::*;
    use crate::medium::directory::{Medium, directory};
    use crate::medium::engine::EngineKind;
    use crate::medium::file::{DataFile, Source};
    use crate::sync::Arc;

    #[test]
    fn a_step_is_written_back_with_the_one_before() {
        const STEP: u64 = WRITE_BACK;
        assert_eq!(written_back(0..STEP - 1), None);
        assert_eq!(written_back(4096..STEP), Some(0..STEP));
        assert_eq!(written_back(STEP..STEP + 4096), None);
        assert_eq!(
            written_back(2 * STEP - 4096..2 * STEP + 4096),
            Some(0..2 * STEP)
        );
        assert_eq!(
            written_back(3 * STEP..5 * STEP + 1),
            Some(2 * STEP..5 * STEP)
        );
    }

    /// The first batch ends while it is submitted, so nobody but the engine can wake the thread that sleeps until then. The second
    /// ends a step. The third is written past the cache, because there is no such file any more.
    #[test]
    fn a_batch_without_a_sync_ends_and_wakes_its_port() {
        if let Err(error) = crate::medium::ring::probe() {
            return println!("skipped: no io_uring here: {error}");
        }
        let dir = tempfile::tempdir().unwrap();
        let medium = directory(dir.path(), EngineKind::IoUring);
        let create = |slot| Arc::new(medium.create_segment(slot, 4 << 20, &mut |_| {}).unwrap());
        let (segment, removed) = (create(0), create(1));
        std::fs::remove_file(&removed.path).unwrap();
        let event = Event::new().unwrap();
        let mut engine = Uring::new(&event).unwrap();
        let batches = [
            (&segment, 4096, 8192),
            (&segment, 12288, 2 << 20),
            (&removed, 0, 4096),
        ];
        for (id, (segment, offset, len)) in (1..).zip(batches) {
            let bytes = vec![id as u8; len];
            let io = Io::Append {
                segment: segment.clone(),
                offset,
                chunks: vec![Chunk {
                    buffer: Buffer::from(&bytes[..]).share(),
                    len,
                }],
                payloads: 0..1,
                sync: SyncScope::None,
            };
            engine.submit(id, io);
            engine.enter();
            let mut signal = [PollFd::from_borrowed_fd(event.fd(), PollFlags::IN)];
            let long = Timespec {
                tv_sec: 60,
                tv_nsec: 0,
            };
            assert_eq!(poll(&mut signal, Some(&long)).unwrap(), 1, "batch {id}");
            event.clear();
            let mut done = Vec::new();
            engine.poll(&mut done);
            assert!(done.len() == 1 && done[0].id == id, "{done:?}");
            assert!(done[0].result.is_ok(), "{done:?}");
            let mut read = Buffer::zeroed(len);
            segment.file.read_exact_at(&mut read, offset).unwrap();
            assert!(read[..] == bytes, "batch {id}");
            let cached = segment.source().raw_fd() != segment.file.raw_fd();
            assert_eq!(cached, segment.path.exists(), "batch {id}");
        }
    }

    /// An operation that was interrupted, or for which the kernel had no memory, is still done; any other error is
    /// reported.
    #[test]
    fn an_interrupted_operation_is_carried_out_by_plain_calls() {
        if let Err(error) = crate::medium::ring::probe() {
            return println!("skipped: no io_uring here: {error}");
        }
        let file = tempfile::tempfile().unwrap();
        DataFile::write_all_at(&file, &[7; 512], 0).unwrap();
        let base: Arc<dyn DataFile> = Arc::new(file);
        let event = Event::new().unwrap();
        let mut engine = Uring::new(&event).unwrap();
        for (error, done) in [
            (Errno::INTR, true),
            (Errno::AGAIN, true),
            (Errno::IO, false),
        ] {
            let operation = InFlight {
                id: 1,
                io: Io::Read {
                    source: Source::File(base.clone()),
                    offset: 0,
                    buffer: Buffer::zeroed(512),
                },
                slices: Slices::default(),
            };
            engine.account(operation, Err(error));
            let result = engine.done.pop().unwrap().result;
            match done {
                true => assert_eq!(&result.unwrap().unwrap()[..], [7; 512]),
                false => assert_eq!(
                    result.unwrap_err().raw_os_error(),
                    Some(error.raw_os_error())
                ),
            }
        }
    }
}
