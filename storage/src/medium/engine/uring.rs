//! The io_uring engine: one system call for all reads and writes of a turn.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use io_uring::squeue::Flags;
use io_uring::{opcode, types};
use rustix::io::{Errno, ReadWriteFlags, preadv2};

use crate::Buffer;
use crate::medium::file::{Engine, Io, IoCompletion, run, write_chunks};
use crate::medium::host;
use crate::medium::io_ring::IoRing;
use crate::sync::Event;

/// An operation in the kernel, with all the memory that the kernel may touch.
struct InFlightIo {
    /// The caller's number for the operation.
    id: u64,
    io: Io,
    /// The list that `Writev` points at. Never touched while in flight.
    slices: IoVecs,
}

#[derive(Default)]
struct IoVecs(Vec<libc::iovec>);

// SAFETY: the pointers point into buffers that the operation owns, which are `Send`; nothing else
// uses them.
unsafe impl Send for IoVecs {}

/// Reads start once this many are gathered. The kernel starts the reads of one system call
/// together, once the last is prepared. Without this limit, 32 reads reach the medium as one burst
/// and come back as one, and it idles in between: 42,000 a second instead of 64,000.
const READS_AT_ONCE: usize = 4;

/// See the module's documentation.
pub(super) struct UringEngine {
    ring: IoRing<InFlightIo>,
    done: Vec<IoCompletion>,
    /// Memory for the slices of the next operations.
    slices: Vec<IoVecs>,
    /// Reads that were submitted and not started.
    gathered_reads: usize,
    /// The flags of operations on a file, by its descriptor, once known.
    flags: Vec<Option<Flags>>,
    /// Signalled for operations that end while they are submitted; the ring signals it for all
    /// others.
    event: Event,
}

impl UringEngine {
    pub(super) fn new(event: &Event) -> io::Result<Self> {
        Ok(Self {
            ring: IoRing::new(&event.fd())?,
            done: Vec::new(),
            slices: Vec::new(),
            gathered_reads: 0,
            flags: Vec::new(),
            event: event.try_clone()?,
        })
    }

    /// Starts what was submitted.
    fn start(&mut self) {
        self.gathered_reads = 0;
        self.ring.enter();
    }

    /// The flags of operations on an open file.
    fn flags_of(&mut self, fd: RawFd) -> Flags {
        let place = usize::try_from(fd).expect("an open file");
        if self.flags.len() <= place {
            self.flags.resize(place + 1, None);
        }
        *self.flags[place].get_or_insert_with(|| {
            // SAFETY: the caller's operation owns the file.
            let file = unsafe { BorrowedFd::borrow_raw(fd) };
            if answers_at_once(file) {
                Flags::empty()
            } else {
                Flags::ASYNC
            }
        })
    }

    fn account(&mut self, operation: InFlightIo, moved: Result<usize, Errno>) {
        let InFlightIo { id, io, mut slices } = operation;
        if slices.0.capacity() > 0 {
            slices.0.clear();
            self.slices.push(slices);
        }
        let result = match moved {
            Ok(moved) => end(io, moved),
            // It was interrupted, or not started for lack of memory. Plain calls carry it out.
            Err(Errno::INTR | Errno::AGAIN) => run(io).0,
            Err(error) => Err(error.into()),
        };
        self.done.push(IoCompletion { id, result });
    }
}

/// Whether the kernel can begin an operation on the file without waiting for its file system. For
/// others, such as FUSE, the system call that submits the operation asks the file system, and the
/// thread could serve no other file meanwhile. With `ASYNC`, a thread of the kernel does that.
fn answers_at_once(file: BorrowedFd<'_>) -> bool {
    let mut byte = [0];
    let into = &mut [io::IoSliceMut::new(&mut byte)];
    // The flag is refused before the file system is asked.
    preadv2(file, into, 0, ReadWriteFlags::NOWAIT) != Err(Errno::OPNOTSUPP)
}

/// Ends an operation that has moved `moved` bytes. Too few is not an error: plain calls do the
/// rest, or report why they can't.
fn end(io: Io, moved: usize) -> io::Result<Option<Buffer>> {
    match io {
        Io::Read { buffer, .. } if moved == buffer.len() => Ok(Some(buffer)),
        Io::Write {
            base,
            offset,
            chunks,
        } => write_chunks(base.as_ref(), offset, &chunks, moved, false).map(|()| None),
        Io::Zero { .. } => Ok(None),
        other => run(other).0,
    }
}

impl Engine for UringEngine {
    fn submit(&mut self, id: u64, mut io: Io) {
        let mut slices = IoVecs::default();
        let entry = match &mut io {
            Io::Read {
                source,
                offset,
                buffer,
            } => {
                self.gathered_reads += 1;
                let file = source.file().raw_fd();
                let (fd, len) = (types::Fd(file), buffer.len() as u32);
                let read = opcode::Read::new(fd, buffer.as_mut_ptr(), len).offset(*offset);
                read.build().flags(self.flags_of(file))
            }
            Io::Write {
                base,
                offset,
                chunks,
            } => {
                slices = self.slices.pop().unwrap_or_default();
                slices.0.extend(chunks.iter().map(|chunk| libc::iovec {
                    iov_base: chunk.buffer.as_ptr().cast_mut().cast(),
                    iov_len: chunk.len,
                }));
                let file = base.raw_fd();
                let (fd, len) = (types::Fd(file), slices.0.len() as u32);
                let write = opcode::Writev::new(fd, slices.0.as_ptr(), len).offset(*offset);
                write.build().flags(self.flags_of(file))
            }
            Io::Zero { file, range, unmap } => {
                let fd = types::Fd(file.as_raw_fd());
                let zero = opcode::Fallocate::new(fd, range.end - range.start);
                let mode = host::zero_mode(*unmap).bits() as i32;
                zero.offset(range.start).mode(mode).build()
            }
            // Appends are done by the thread that needs them.
            Io::Append { .. } | Io::WriteBack(_) => {
                let (result, _) = run(io);
                return self.done.push(IoCompletion { id, result });
            }
        };
        // SAFETY: the operation owns its file, its buffers and its slices, all of them behind
        // pointers.
        unsafe { self.ring.submit(InFlightIo { id, io, slices }, entry) };
        if self.gathered_reads == READS_AT_ONCE {
            self.start();
        }
    }

    fn enter(&mut self) {
        self.start();
        if !self.done.is_empty() {
            self.event.signal();
        }
    }

    fn poll(&mut self, done: &mut Vec<IoCompletion>) {
        while let Some((operation, moved)) = self.ring.next_ended() {
            self.account(operation, moved);
        }
        done.append(&mut self.done);
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;
    use crate::medium::file::{DataFile, ReadSource};
    use crate::sync::Arc;

    /// Whether there is no io_uring here; says so.
    fn lacks_io_uring() -> bool {
        let probed = crate::medium::io_ring::probe();
        probed
            .inspect_err(|error| println!("skipped: no io_uring here: {error}"))
            .is_err()
    }

    /// A read of the first sector.
    fn read(file: &Arc<dyn DataFile>) -> Io {
        Io::Read {
            source: ReadSource::File(file.clone()),
            offset: 0,
            buffer: Buffer::zeroed(512),
        }
    }

    /// The medium has the first reads while later ones are still being submitted.
    #[test]
    fn reads_start_a_few_at_a_time() {
        if lacks_io_uring() {
            return;
        }
        let file: Arc<dyn DataFile> = Arc::new(tempfile::tempfile().unwrap());
        file.write_all_at(&[7; 512], 0).unwrap();
        let event = Event::new().unwrap();
        let mut engine = UringEngine::new(&event).unwrap();
        for id in 0..READS_AT_ONCE as u64 {
            engine.submit(id, read(&file));
        }
        let mut done = Vec::new();
        while done.len() < READS_AT_ONCE {
            event.sleep_until(None);
            event.clear();
            engine.poll(&mut done);
        }
        assert!(done.iter().all(|read| read.result.is_ok()));
    }

    /// An operation that was interrupted, or for which the kernel had no memory, is still carried
    /// out; any other error is reported.
    #[test]
    fn an_interrupted_operation_is_carried_out_by_plain_calls() {
        if lacks_io_uring() {
            return;
        }
        let file = Arc::new(tempfile::tempfile().unwrap());
        DataFile::write_all_at(file.as_ref(), &[7; 1024], 0).unwrap();
        let base: Arc<dyn DataFile> = file.clone();
        let event = Event::new().unwrap();
        let mut engine = UringEngine::new(&event).unwrap();
        for (error, done) in [
            (Errno::INTR, true),
            (Errno::AGAIN, true),
            (Errno::IO, false),
        ] {
            let operation = InFlightIo {
                id: 1,
                io: read(&base),
                slices: IoVecs::default(),
            };
            engine.account(operation, Err(error));
            let result = engine.done.pop().unwrap().result;
            if done {
                assert_eq!(&result.unwrap().unwrap()[..], [7; 512])
            } else {
                assert_eq!(
                    result.unwrap_err().raw_os_error(),
                    Some(error.raw_os_error())
                )
            }
        }
        let zero = InFlightIo {
            id: 1,
            io: Io::Zero {
                file,
                range: 512..1024,
                unmap: true,
            },
            slices: IoVecs::default(),
        };
        engine.account(zero, Err(Errno::INTR));
        assert!(engine.done.pop().unwrap().result.is_ok());
        let mut bytes = [1; 1024];
        base.read_exact_at(&mut bytes, 0).unwrap();
        assert!(bytes[..512] == [7; 512] && bytes[512..] == [0; 512]);
    }
}
