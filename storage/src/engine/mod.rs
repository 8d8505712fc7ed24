//! How bytes reach the medium: one trait, and an engine for each kind of thread.
//!
//! ```text
//!   port ──submit──▶ Engine ──▶ io_uring, if the kernel has it                     (uring.rs)
//!     ▲                    └──▶ else a thread with pwritev2, reads inline          (blocking.rs)
//!     └──── poll ◀── event descriptor
//!
//!   the log's writer ──────▶ pwritev2(RWF_DSYNC) or fdatasync, and waits for it    (inline.rs)
//! ```
//! An operation owns its buffers until it is polled as done, so none can be freed under the kernel.

mod blocking;
mod inline;
mod uring;

use std::io;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::file::DataFile;
use crate::pace::Pace;
use crate::segment::Segment;
use crate::sync::{Arc, Event};
use crate::{Buffer, SharedBuffer};

/// Which engine moves the bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineKind {
    /// io_uring if the kernel offers all that is needed, else blocking calls.
    #[default]
    Auto,
    /// io_uring; opening fails where the kernel has none.
    IoUring,
    /// `pwritev2` on a thread.
    Blocking,
}

/// A slice of a shared buffer, to be written.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    pub buffer: SharedBuffer,
    pub len: usize,
}

/// What is read: the base image or a segment, which it pins.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    Base(Arc<dyn DataFile>),
    Segment(Arc<Segment>),
}

impl Source {
    fn file(&self) -> &dyn DataFile {
        match self {
            Self::Base(file) => file.as_ref(),
            Self::Segment(segment) => segment.file.as_ref(),
        }
    }
}

/// One operation.
#[derive(Debug)]
pub(crate) enum Io {
    /// Write `chunks` at `offset` of the segment (nothing if there are no chunks), then sync.
    Append {
        segment: Arc<Segment>,
        offset: u64,
        chunks: Vec<Chunk>,
        sync: SyncScope,
    },
    /// Fill `buffer` from `offset`.
    Read {
        source: Source,
        offset: u64,
        buffer: Buffer,
    },
    /// Write `chunks`, at most [`MAX_CHUNKS`], at `offset` of a base image.
    Write {
        base: Arc<dyn DataFile>,
        offset: u64,
        chunks: Vec<Chunk>,
    },
    /// End after this time, or as soon as another wait is submitted.
    Wait(Duration),
}

/// Most chunks of one [`Io::Write`]: Linux takes 1024 in one call.
pub(crate) const MAX_CHUNKS: usize = 256;

impl Io {
    /// What it writes, and where.
    fn written(&self) -> Option<(&dyn DataFile, u64, &[Chunk])> {
        match self {
            Self::Append {
                segment,
                offset,
                chunks,
                ..
            } => Some((segment.file.as_ref(), *offset, chunks)),
            Self::Write {
                base,
                offset,
                chunks,
            } => Some((base.as_ref(), *offset, chunks)),
            Self::Read { .. } | Self::Wait(_) => None,
        }
    }

    /// Whether it ends with a sync.
    fn syncs(&self) -> bool {
        match self {
            Self::Append { sync, .. } => sync.count() > 0,
            _ => false,
        }
    }

    /// The list of an append, emptied, for the next.
    fn take_list(&mut self) -> Vec<Chunk> {
        match self {
            Self::Append { chunks, .. } => {
                chunks.clear();
                std::mem::take(chunks)
            }
            _ => Vec::new(),
        }
    }
}

/// What an append makes durable.
#[derive(Debug)]
pub(crate) enum SyncScope {
    /// Nothing yet.
    None,
    /// What it writes itself, and not necessarily what was written before: a write with `RWF_DSYNC`, which a medium
    /// with FUA takes as one command.
    Write,
    /// All that was written to these segments, by an fdatasync of each.
    Segments(Vec<Arc<Segment>>),
}

impl SyncScope {
    fn segments(&self) -> &[Arc<Segment>] {
        match self {
            Self::None | Self::Write => &[],
            Self::Segments(segments) => segments,
        }
    }

    /// Device syncs that it takes.
    fn count(&self) -> u32 {
        match self {
            Self::None => 0,
            Self::Write => 1,
            Self::Segments(segments) => segments.len() as u32,
        }
    }
}

/// The end of an operation.
#[derive(Debug)]
pub(crate) struct Done {
    pub id: u64,
    /// The filled buffer of a read; `None` for all others.
    pub result: io::Result<Option<Buffer>>,
}

/// Moves bytes. Owned and called by one thread.
pub(crate) trait Engine: Send {
    /// Takes an operation; it may start now or at the next [`enter`](Self::enter).
    fn submit(&mut self, id: u64, io: Io);
    /// Starts everything submitted.
    fn enter(&mut self);
    /// Appends what has ended to `done`. The event given at creation is written at each end.
    fn poll(&mut self, done: &mut Vec<Done>);
    /// When [`poll`](Self::poll) has something to give without an event.
    fn due(&self) -> Option<Instant> {
        None
    }
    /// An empty list, of an append that has ended if there is one: the next need not allocate its own.
    fn list(&mut self) -> Vec<Chunk> {
        Vec::new()
    }
}

/// The kind that `kind` comes to on this kernel.
pub(crate) fn probe(kind: EngineKind) -> io::Result<EngineKind> {
    match kind {
        EngineKind::Blocking => Ok(kind),
        EngineKind::IoUring => uring::probe().map(|()| kind),
        EngineKind::Auto => Ok(match uring::probe() {
            Ok(()) => EngineKind::IoUring,
            Err(error) => {
                tracing::info!("io_uring is not usable ({error}): using pwritev2 and fdatasync");
                EngineKind::Blocking
            }
        }),
    }
}

/// Makes an engine of a probed kind that signals `event`.
pub(crate) fn create(kind: EngineKind, event: &Event) -> io::Result<Box<dyn Engine>> {
    Ok(match kind {
        EngineKind::Blocking => Box::new(blocking::Blocking::new(event.try_clone()?)?),
        EngineKind::Auto | EngineKind::IoUring => Box::new(uring::Uring::new(event)?),
    })
}

/// Makes the engine of a log's writer, whose operations wait for `pace`, and whose syncs take `sync_latency` longer than
/// the medium needs.
pub(crate) fn create_writer(sync_latency: Duration, pace: Arc<Pace>) -> Box<dyn Engine> {
    Box::new(inline::Inline::new(sync_latency, pace))
}

/// Does it now, in the calling thread: how it ended, and an append's list, empty. A wait is over at once.
fn run(mut io: Io) -> (io::Result<Option<Buffer>>, Vec<Chunk>) {
    let written = match (&io, io.written()) {
        (_, None) => Ok(()),
        (io, Some((file, offset, chunks))) => {
            let durably = matches!(
                io,
                Io::Append {
                    sync: SyncScope::Write,
                    ..
                }
            );
            write_chunks(file, offset, chunks, 0, durably)
        }
    };
    let list = io.take_list();
    let ended = written.and_then(|()| match io {
        Io::Append { sync, .. } => {
            let mut segments = sync.segments().iter();
            segments.try_for_each(|segment| segment.file.sync_data())?;
            Ok(None)
        }
        Io::Read {
            source,
            offset,
            buffer,
        } => read_exact(&source, offset, buffer).map(Some),
        Io::Write { .. } | Io::Wait(_) => Ok(None),
    });
    (ended, list)
}

/// Reads exactly `buffer.len()` bytes.
fn read_exact(source: &Source, offset: u64, mut buffer: Buffer) -> io::Result<Buffer> {
    source.file().read_exact_at(&mut buffer, offset)?;
    Ok(buffer)
}

/// Writes all of `chunks` from byte `skip` of them on, see [`DataFile::write_slices_at`].
pub(crate) fn write_chunks(
    file: &dyn DataFile,
    offset: u64,
    chunks: &[Chunk],
    skip: usize,
    durably: bool,
) -> io::Result<()> {
    let total: usize = chunks.iter().map(|chunk| chunk.len).sum();
    let mut done = skip;
    while done < total {
        let mut passed = 0;
        // Groups are seldom larger: no memory is allocated then.
        let mut slices: SmallVec<[io::IoSlice<'_>; 128]> = SmallVec::new();
        for chunk in chunks {
            let from = done.saturating_sub(passed).min(chunk.len);
            if from < chunk.len {
                slices.push(io::IoSlice::new(&chunk.buffer[from..chunk.len]));
            }
            passed += chunk.len;
        }
        match file.write_slices_at(&slices, offset + done as u64, durably) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => done += written,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::medium::Medium;

    fn finish(engine: &mut dyn Engine, event: &Event, count: usize) -> Vec<Done> {
        let mut done = Vec::new();
        engine.enter();
        while done.len() < count {
            engine.poll(&mut done);
            if done.len() < count {
                event.sleep_until(None);
                event.clear();
            }
        }
        done
    }

    #[test]
    fn both_engines_write_sync_and_read_back() {
        for kind in [EngineKind::IoUring, EngineKind::Blocking] {
            let kind = match probe(kind) {
                Ok(kind) => kind,
                Err(error) => {
                    println!("skipped: {kind:?}: {error}");
                    continue;
                }
            };
            let dir = tempfile::tempdir().unwrap();
            let medium = crate::medium::directory(dir.path(), kind);
            let segment = Arc::new(medium.create_segment(0, 1 << 20, &mut |_| {}).unwrap());
            let event = Event::new().unwrap();
            let mut engine = create(kind, &event).unwrap();
            let chunk = |byte: u8, len: usize| Chunk {
                buffer: Buffer::from(&vec![byte; len][..]).share(),
                len,
            };
            let chunks = vec![chunk(1, 4096), chunk(2, 512), chunk(3, 3584)];
            let sync = SyncScope::Write;
            engine.submit(
                7,
                Io::Append {
                    segment: segment.clone(),
                    offset: 8192,
                    chunks,
                    sync,
                },
            );
            let done = finish(engine.as_mut(), &event, 1);
            assert_eq!(done[0].id, 7);
            assert!(done[0].result.is_ok(), "{:?}", done[0].result);
            let source = Source::Segment(segment.clone());
            engine.submit(
                8,
                Io::Read {
                    source: source.clone(),
                    offset: 8192,
                    buffer: Buffer::zeroed(8192),
                },
            );
            engine.submit(
                9,
                Io::Read {
                    source,
                    offset: 1 << 20,
                    buffer: Buffer::zeroed(512),
                },
            );
            let mut done = finish(engine.as_mut(), &event, 2);
            done.sort_by_key(|d| d.id);
            let read = done[0].result.as_ref().unwrap().as_ref().unwrap();
            assert!(
                read[..4096].iter().all(|&b| b == 1) && read[4096..4608].iter().all(|&b| b == 2)
            );
            assert!(read[4608..].iter().all(|&b| b == 3));
            assert_eq!(
                done[1].result.as_ref().unwrap_err().kind(),
                io::ErrorKind::UnexpectedEof,
                "{kind:?}"
            );
            // A sync alone, and many operations at once.
            engine.submit(
                1,
                Io::Append {
                    segment: segment.clone(),
                    offset: 0,
                    chunks: vec![],
                    sync: SyncScope::Segments(vec![segment.clone()]),
                },
            );
            for i in 0..300 {
                let source = Source::Segment(segment.clone());
                engine.submit(
                    100 + i,
                    Io::Read {
                        source,
                        offset: i * 512,
                        buffer: Buffer::zeroed(512),
                    },
                );
            }
            assert!(
                finish(engine.as_mut(), &event, 301)
                    .iter()
                    .all(|d| d.result.is_ok())
            );
            // Base images: many chunks in one write, many writes at once.
            let path = dir.path().join("base");
            std::fs::write(&path, vec![0; 1 << 20]).unwrap();
            let base: Arc<dyn DataFile> = Arc::new(crate::file::open_direct(&path, true).unwrap());
            for i in 0..16u8 {
                engine.submit(
                    u64::from(i),
                    Io::Write {
                        base: base.clone(),
                        offset: u64::from(i) << 16,
                        chunks: (0..16).map(|j| chunk(16 * i + j, 4096)).collect(),
                    },
                );
            }
            let done = finish(engine.as_mut(), &event, 16);
            assert!(done.iter().all(|d| d.result.is_ok()), "{done:?}");
            let written = std::fs::read(&path).unwrap();
            let right = |(i, block): (usize, &[u8])| block.iter().all(|&byte| byte == i as u8);
            assert!(written.chunks(4096).enumerate().all(right));
        }
    }
}
