//! The operations of engines, and their results.

use std::io;
use std::ops::Range;

use smallvec::SmallVec;

use crate::medium::file::DataFile;
use crate::medium::segment::Segment;
use crate::sync::Arc;
use crate::{Buffer, SharedBuffer};

/// A slice of a shared buffer, to be written.
#[derive(Clone, Debug)]
pub(crate) struct Chunk {
    pub buffer: SharedBuffer,
    pub len: usize,
}

/// The source of a read: a file as it is, or a segment, which the read pins.
#[derive(Clone, Debug)]
pub(crate) enum Source {
    File(Arc<dyn DataFile>),
    Segment(Arc<Segment>),
}

impl Source {
    pub(super) fn file(&self) -> &dyn DataFile {
        match self {
            Self::File(file) => file.as_ref(),
            Self::Segment(segment) => segment.source(),
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
        /// Which of the chunks are payloads of records, one each.
        payloads: Range<usize>,
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
}

/// Most chunks of one [`Io::Write`]: Linux takes 1024 in one call.
pub(crate) const MAX_CHUNKS: usize = 256;

impl Io {
    /// The file, the offset and the chunks that the operation writes.
    pub(crate) fn written(&self) -> Option<(&dyn DataFile, u64, &[Chunk])> {
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
            Self::Read { .. } => None,
        }
    }

    /// Whether the operation ends with a sync.
    pub(super) fn syncs(&self) -> bool {
        match self {
            Self::Append { sync, .. } => sync.count() > 0,
            _ => false,
        }
    }

    /// Takes the chunk list of an append, emptied, for the next append.
    pub(super) fn take_list(&mut self) -> Vec<Chunk> {
        match self {
            Self::Append { chunks, .. } => {
                chunks.clear();
                std::mem::take(chunks)
            }
            _ => Vec::new(),
        }
    }
}

/// The writes that an append makes durable.
#[derive(Debug)]
pub(crate) enum SyncScope {
    /// Nothing yet.
    None,
    /// Its own write, and not necessarily earlier ones: a write with `RWF_DSYNC`, which a medium with FUA takes as
    /// one command.
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

    /// Number of device syncs.
    pub(crate) fn count(&self) -> u32 {
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

/// The end of an append that the calling thread carried out.
#[derive(Debug)]
pub(crate) struct Appended {
    /// How many writes it took.
    pub result: io::Result<u64>,
    /// The append's chunk list, emptied, for the next append.
    pub list: Vec<Chunk>,
}

/// How the log's leader appends.
pub(crate) trait Append: Send + Sync {
    /// Carries out an append in the calling thread.
    fn append(&self, io: Io) -> Appended;
}

/// Appends by system calls in the calling thread: the fastest way to a durable group. It is one call, and the
/// medium's answer wakes no other thread. In an asynchronous write with `RWF_DSYNC` a kernel worker does the sync.
/// The worker is bound to one processor: if a guest computes there, each sync takes a tick of the scheduler.
pub(crate) struct Direct;

impl Append for Direct {
    fn append(&self, io: Io) -> Appended {
        let (result, list) = run(io);
        Appended {
            result: result.map(|_| 1),
            list,
        }
    }
}

/// Moves bytes. Owned and called by one thread.
pub(crate) trait Engine: Send {
    /// Takes an operation; it may start now or at the next [`enter`](Self::enter).
    fn submit(&mut self, id: u64, io: Io);
    /// Starts everything submitted.
    fn enter(&mut self);
    /// Appends the ended operations to `done`. The event given at creation is signalled at each end.
    fn poll(&mut self, done: &mut Vec<Done>);
    /// An empty chunk list, from an ended append if there is one: so the next append need not allocate its own.
    fn list(&mut self) -> Vec<Chunk> {
        Vec::new()
    }
}

/// Carries out an operation in the calling thread. Returns its result, and an append's chunk list, emptied.
pub(super) fn run(mut io: Io) -> (io::Result<Option<Buffer>>, Vec<Chunk>) {
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
        Io::Write { .. } => Ok(None),
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
        // Groups seldom have more chunks, so usually no memory is allocated.
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
