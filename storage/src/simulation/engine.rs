//! The engine of the simulated medium.

use std::io;
use std::path::Path;

use super::files::SimulatedMedium;
use super::medium::{EngineTiming, LOG};
use crate::Buffer;
use crate::error::{Error, ErrorKind, Result};
use crate::medium::cost::MediumCost;
use crate::medium::directory::Medium;
use crate::medium::engine::{self, EngineKind};
use crate::medium::file::{
    self, AppendResult, AppendStats, Appender, Engine, Io, IoCompletion, Segment, SyncScope,
};
use crate::medium::filesystem::FileSystem;
use crate::medium::lock::Access;
use crate::medium::segment::ZeroingPace;
use crate::mutant::{Mutant, planted};
use crate::sync::{Arc, Event, thread};

/// Writes reach the cache when they are submitted or later, syncs happen later still, and
/// operations end in any order.
pub(super) struct SimulatedEngine {
    medium: SimulatedMedium,
    event: Event,
    queued: Vec<QueuedIo>,
    failed: Vec<IoCompletion>,
}

pub(super) struct QueuedIo {
    id: u64,
    pub io: Io,
    /// Whether an append's bytes are in the cache; `cached`: in the page cache.
    written: bool,
    cached: bool,
}

impl QueuedIo {
    pub(super) fn new(id: u64, io: Io) -> Self {
        let (written, cached) = (false, false);
        Self {
            id,
            io,
            written,
            cached,
        }
    }

    /// Puts an append's bytes into the cache.
    pub(super) fn write(&mut self) -> io::Result<()> {
        if let Io::Append {
            segment,
            offset,
            chunks,
            sync,
            ..
        } = &self.io
            && !chunks.is_empty()
        {
            if planted(Mutant::SyncTooEarly) {
                sync_segments(sync)?;
            }
            match file::append_cached(&self.io) {
                Some(written) => self.cached = written?.cached,
                None => file::write_chunks(segment.file.as_ref(), *offset, chunks, 0, false)?,
            }
        }
        self.written = true;
        Ok(())
    }

    /// What an append has written.
    fn appended(&self) -> AppendStats {
        AppendStats {
            cached: self.cached,
            ..AppendStats::DIRECT
        }
    }

    /// Leaves the unwritten bytes in flight on the medium: the process is killed.
    fn leave(self, medium: &SimulatedMedium) {
        let (file, offset, chunks) = match &self.io {
            Io::Append {
                segment,
                offset,
                chunks,
                ..
            } if !self.written => (segment.file.as_ref(), offset, chunks),
            Io::Write {
                base,
                offset,
                chunks,
            } => (base.as_ref(), offset, chunks),
            _ => return,
        };
        let chunks = chunks.iter().map(|chunk| &chunk.buffer[..chunk.len]);
        let chunks: Vec<&[u8]> = chunks.collect();
        medium.leave_in_flight(file, *offset, chunks.concat());
    }
}

/// Syncs whole segments.
fn sync_segments(scope: &SyncScope) -> io::Result<()> {
    let SyncScope::Segments(segments) = scope else {
        return Ok(());
    };
    let last = if planted(Mutant::SyncLastSegmentOnly) {
        segments.len() - 1
    } else {
        0
    };
    let mut segments = segments[last..].iter();
    segments.try_for_each(|segment| segment.file.sync_data())
}

impl SimulatedEngine {
    pub(super) fn new(medium: SimulatedMedium, event: Event) -> Self {
        Self {
            medium,
            event,
            queued: Vec::new(),
            failed: Vec::new(),
        }
    }
}

impl SimulatedMedium {
    pub(super) fn simulated(&self, event: &Event) -> io::Result<Box<dyn Engine>> {
        let engine = SimulatedEngine::new(self.clone(), event.try_clone()?);
        Ok(Box::new(engine))
    }

    /// Ends an operation whose bytes are written: does its sync, or its read.
    pub(super) fn end(&self, io: Io) -> io::Result<Option<Buffer>> {
        match io {
            Io::Append {
                segment,
                offset,
                chunks,
                sync,
                ..
            } => {
                let own = || {
                    let bytes = chunks.iter().map(|chunk| chunk.len).sum();
                    self.sync_range(&segment, offset, bytes)
                };
                let synced = match sync {
                    SyncScope::Write if planted(Mutant::AckBeforeSync) => Ok(None),
                    SyncScope::None | SyncScope::Later => Ok(None),
                    SyncScope::Write => own(),
                    SyncScope::Segments(_) if planted(Mutant::SyncLost) => Ok(None),
                    SyncScope::Segments(_)
                        if planted(Mutant::SyncTooEarly) && !chunks.is_empty() =>
                    {
                        Ok(None)
                    }
                    SyncScope::Segments(_)
                        if planted(Mutant::SyncOwnWrite) && !chunks.is_empty() =>
                    {
                        own()
                    }
                    segments => sync_segments(&segments).map(|()| None),
                };
                if planted(Mutant::FailedSyncRetried) {
                    Ok(None)
                } else {
                    synced
                }
            }
            Io::Read {
                source,
                offset,
                mut buffer,
            } => {
                let read = source.file().read_exact_at(&mut buffer, offset);
                read.map(|()| -> Option<Buffer> { Some(buffer) })
            }
            Io::Write {
                base,
                offset,
                chunks,
            } => file::write_chunks(base.as_ref(), offset, &chunks, 0, false).map(|()| None),
            Io::Zero { .. } | Io::WriteBack(_) => file::run(io).0,
        }
    }
}

impl Drop for SimulatedEngine {
    fn drop(&mut self) {
        if self.medium.lock().crashed {
            let queued = self.queued.drain(..);
            queued.for_each(|queued| queued.leave(&self.medium));
        }
    }
}

impl Engine for SimulatedEngine {
    fn submit(&mut self, id: u64, io: Io) {
        self.event.signal();
        let mut queued = QueuedIo::new(id, io);
        if self.medium.lock().crashed {
            let result = Err(io::Error::other("power lost"));
            return self.failed.push(IoCompletion { id, result });
        }
        let at_once = {
            let mut world = self.medium.lock();
            match world.pace {
                EngineTiming::Random => world.random.one_in(2),
                pace => pace == EngineTiming::AtOnce,
            }
        };
        if at_once && let Err(error) = queued.write() {
            self.failed.push(IoCompletion {
                id,
                result: Err(error),
            });
            return;
        }
        self.queued.push(queued);
    }

    fn enter(&mut self) {}

    fn poll(&mut self, done: &mut Vec<IoCompletion>) {
        done.append(&mut self.failed);
        if self.queued.is_empty() {
            return;
        }
        if self.medium.lock().crashed {
            for queued in self.queued.drain(..) {
                let (id, result) = (queued.id, Err(io::Error::other("power lost")));
                done.push(IoCompletion { id, result });
                queued.leave(&self.medium);
            }
            return;
        }
        let end = {
            let world = &mut self.medium.lock();
            match world.pace {
                EngineTiming::Random => {
                    let random = &mut world.random;
                    let count = random.below(self.queued.len() as u64 + 1) as usize;
                    (0..count)
                        .map(|i| random.below((self.queued.len() - i) as u64) as usize)
                        .collect::<Vec<_>>()
                }
                EngineTiming::AtOnce => vec![0; self.queued.len()],
                EngineTiming::Late => vec![0],
            }
        };
        let blocked = self.medium.lock().base_blocked;
        for index in end {
            if blocked && matches!(self.queued[index].io, Io::Write { .. }) {
                continue;
            }
            let mut queued = self.queued.remove(index);
            let id = queued.id;
            if let (false, Io::Append { sync, .. }) = (queued.written, &queued.io) {
                let ended = sync.count() == 0;
                match queued.write() {
                    Ok(()) if !ended => self.queued.insert(index, queued),
                    result => done.push(IoCompletion {
                        id,
                        result: result.map(|()| None),
                    }),
                }
                continue;
            }
            let result = self.medium.end(queued.io);
            done.push(IoCompletion { id, result });
        }
        if !self.queued.is_empty() {
            self.event.signal();
        }
    }
}

impl Medium for SimulatedMedium {
    fn create_segment(&self, slot: u32, size: u64, pace: &mut ZeroingPace<'_>) -> Result<Segment> {
        let panics = self.lock().create_panics;
        assert!(!panics, "planted");
        Segment::create(self, Path::new(LOG), slot, size, pace)
    }

    fn check_place(&self) -> Result<()> {
        if self.lock().moved {
            return Err(Error::new(ErrorKind::Io, "planted: moved"));
        }
        Ok(())
    }

    fn files(&self) -> Arc<dyn FileSystem> {
        Arc::new(self.clone())
    }

    fn segments(&self) -> Result<Vec<(u32, Segment)>> {
        Segment::open_all(self, Path::new(LOG), Access::Log)
    }

    fn salt(&self) -> u64 {
        if planted(Mutant::ReuseSalt) {
            7
        } else {
            self.lock().random.next()
        }
    }

    fn engine(&self, event: &Event) -> io::Result<Box<dyn Engine>> {
        if self.blocking(event)? {
            engine::create(EngineKind::Blocking, event)
        } else {
            self.simulated(event)
        }
    }

    fn cost(&self, _: &Arc<Segment>, _: u64) -> MediumCost {
        MediumCost {
            operation: self.lock().operation_bytes,
            ..MediumCost::USUAL
        }
    }

    fn appender(&self) -> Box<dyn Appender> {
        Box::new(self.clone())
    }
}

impl Appender for SimulatedMedium {
    /// Lets other threads run before the sync.
    fn append(&self, io: Io) -> AppendResult {
        let mut queued = QueuedIo::new(0, io);
        let written = queued.write();
        let appended = queued.appended();
        thread::yield_now();
        let ended = written.and_then(|()| self.end(queued.io));
        AppendResult {
            result: ended.map(|_| appended),
            list: Vec::new(),
        }
    }
}
