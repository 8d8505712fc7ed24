//! Reads in flight. A read is split into parts, each from one place; the parts are verified and put
//! together.
//!
//! A port's reads are in a [`ReadQueue`] of their own, because two threads end them: the port's,
//! and the keeper when it needs the segments that they pin.

use std::path::{Path, PathBuf};

use slab::Slab;
use smallvec::SmallVec;

use crate::index::{Location, Piece};
use crate::log::image::DiskImage;
use crate::log::waiters::{Mailbox, PortReads};
use crate::medium::file::{DataFile, Engine, Io, IoCompletion, ReadSource};
use crate::medium::segment::LogRead;
use crate::sync::{Arc, Mutex};
use crate::{
    Buffer, Completion, Failure, MAX_REQUEST_BYTES, SECTOR_SIZE, SharedBuffer, check_range,
};

/// A part of a read.
pub(crate) struct ReadPart {
    pub sector: u64,
    pub sectors: u64,
    pub origin: PartOrigin,
}

/// Where a part's bytes come from.
pub(crate) enum PartOrigin {
    /// In memory, from `offset` of the payload on.
    Memory {
        payload: SharedBuffer,
        offset: usize,
    },
    /// In the log.
    Log(LogRead),
    /// In a file, at the same offset as on the disk.
    File(Arc<dyn DataFile>),
    /// Nowhere: zeroes.
    Zero,
}

impl ReadPart {
    /// The parts for a piece of an index over the image `base`.
    pub(crate) fn of(piece: Piece, base: &DiskImage) -> SmallVec<[Self; 1]> {
        let Piece {
            sector,
            sectors,
            place,
        } = piece;
        let len = (sectors * SECTOR_SIZE) as usize;
        let origin = match place {
            Some(Location::Memory { payload, offset }) => PartOrigin::Memory { payload, offset },
            Some(Location::Log { segment, offset }) => {
                PartOrigin::Log(LogRead::new(segment, offset, len))
            }
            Some(Location::Zero { .. }) => PartOrigin::Zero,
            None => {
                let mut parts = SmallVec::new();
                base.visit(sector..sector + sectors, |part, file| {
                    parts.push(Self {
                        sector: part.start,
                        sectors: part.end - part.start,
                        origin: PartOrigin::File(file.clone()),
                    });
                });
                return parts;
            }
        };
        SmallVec::from_buf([Self {
            sector,
            sectors,
            origin,
        }])
    }
}

/// Refuses a read of sectors that a disk of `capacity` sectors does not have, or of too many.
pub(crate) fn check_read(sector: u64, sectors: u32, capacity: u64) -> Result<(), Failure> {
    check_range(sector, u64::from(sectors), capacity)?;
    if sectors as usize * SECTOR_SIZE as usize > MAX_REQUEST_BYTES {
        Err(Failure::TooLarge)
    } else {
        Ok(())
    }
}

/// A read whose parts are in flight.
struct PendingRead {
    token: u64,
    /// `None` if one part is the whole read: the part's buffer becomes the result.
    buffer: Option<Buffer>,
    open: u32,
    /// The parts that come from the log, by first sector in the read.
    logged: SmallVec<[(u64, LogRead); 1]>,
    failed: bool,
}

/// The reads in flight of one thread.
#[derive(Default)]
pub(crate) struct InFlightReads {
    /// A part's engine id: the key of its read here, in 31 bits, then the part's first sector in
    /// the read, in 32 bits.
    reads: Slab<PendingRead>,
}

impl InFlightReads {
    /// Begins a read of `sectors` sectors from `sector` on, already accepted by [`check_read`].
    /// `parts`: its parts, in order. `submit` takes operations for an engine, with ids below 2^63.
    /// Returns the data if no operation is needed.
    ///
    /// # Errors
    /// If there is no memory for it, and no part of it was submitted. Otherwise it fails when its
    /// parts have ended.
    pub(crate) fn begin(
        &mut self,
        token: u64,
        sector: u64,
        sectors: u32,
        parts: impl Iterator<Item = ReadPart>,
        mut submit: impl FnMut(u64, Io),
    ) -> Result<Option<Buffer>, Failure> {
        let len = sectors as usize * SECTOR_SIZE as usize;
        let key = self.reads.vacant_key();
        let mut whole = false;
        let mut buffer = None;
        let mut open = 0;
        let mut logged = SmallVec::new();
        let mut failed = false;
        let mut next = sector;
        for part in parts {
            assert_eq!(part.sector, next, "parts follow one another");
            next += part.sectors;
            let skipped = part.sector - sector;
            let at = (skipped * SECTOR_SIZE) as usize;
            let bytes = (part.sectors * SECTOR_SIZE) as usize;
            whole = bytes == len;
            let (source, offset, bytes) = match part.origin {
                PartOrigin::Memory { payload, offset } => {
                    let bytes = &payload[offset..offset + bytes];
                    if whole {
                        buffer = Buffer::try_for_overwrite(len).ok();
                    }
                    let Some(all) = whole_buffer(&mut buffer, len) else {
                        failed = true;
                        break;
                    };
                    all[at..at + bytes.len()].copy_from_slice(bytes);
                    continue;
                }
                PartOrigin::Zero => continue,
                PartOrigin::Log(read) => {
                    let (offset, bytes) = (read.offset(), read.bytes());
                    let source = ReadSource::Segment(read.segment().clone());
                    logged.push((skipped, read));
                    (source, offset, bytes)
                }
                PartOrigin::File(file) => {
                    (ReadSource::File(file), part.sector * SECTOR_SIZE, bytes)
                }
            };
            let Ok(part) = Buffer::try_for_overwrite(bytes) else {
                failed = true;
                break;
            };
            open += 1;
            let io = Io::Read {
                source,
                offset,
                buffer: part,
            };
            submit((key as u64) << 32 | skipped, io);
        }
        assert!(
            failed || next == sector + u64::from(sectors),
            "the parts are the whole read"
        );
        // Parts without an operation are zeroes.
        if !failed && (open == 0 || !whole) {
            failed = whole_buffer(&mut buffer, len).is_none();
        }
        if failed {
            tracing::error!("a read of {len} bytes failed: out of memory");
        }
        match open {
            0 if failed => Err(Failure::Io),
            0 => Ok(buffer),
            _ => {
                self.reads.insert(PendingRead {
                    token,
                    buffer,
                    open,
                    logged,
                    failed,
                });
                Ok(None)
            }
        }
    }

    /// Handles the end of a part. Returns the read's completion if this was its last part. `path`
    /// names the disk in messages about failed reads.
    pub(crate) fn end_part(&mut self, path: &Path, end: IoCompletion) -> Option<Completion> {
        let (key, skipped) = ((end.id >> 32) as usize, end.id & u64::from(u32::MAX));
        let at = (skipped * SECTOR_SIZE) as usize;
        let read = self.reads.get_mut(key)?;
        read.open -= 1;
        let logged = read.logged.iter().position(|(first, _)| *first == skipped);
        let logged = logged.map(|found| read.logged.swap_remove(found).1);
        let result = end.result.map_err(|error| error.to_string());
        // Verify bytes of the log before the client gets them: bytes that the medium changed, or
        // never wrote, are an error.
        let result = result.and_then(|part| match (part, logged) {
            (Some(part), Some(logged)) => {
                let verified = logged.verified(part).map_err(|error| error.to_string());
                verified.map(Some)
            }
            (part, _) => Ok(part),
        });
        match (result, &mut read.buffer) {
            (Ok(Some(part)), Some(whole)) => whole[at..at + part.len()].copy_from_slice(&part),
            (Ok(part), whole) => *whole = part,
            (Err(error), _) => {
                tracing::error!("{}: a read failed: {error}", path.display());
                read.failed = true;
            }
        }
        if read.open > 0 {
            return None;
        }
        let read = self.reads.try_remove(key)?;
        Some(Completion {
            token: read.token,
            result: if read.failed {
                Err(Failure::Io)
            } else {
                Ok(read.buffer)
            },
        })
    }
}

/// The buffer of a read of `len` bytes, zeroes at first; `None`: there is no memory for it.
fn whole_buffer(buffer: &mut Option<Buffer>, len: usize) -> Option<&mut Buffer> {
    if buffer.is_none() {
        *buffer = Buffer::try_zeroed(len).ok();
    }
    buffer.as_mut()
}

/// The reads of a port, and the engine that carries them out.
pub(crate) struct ReadQueue {
    /// The image of the port's disk, for messages.
    path: PathBuf,
    engine: Box<dyn Engine>,
    /// Operations submitted to the engine and not yet polled.
    in_engine: usize,
    reads: InFlightReads,
    /// Completions of ended reads, until they are polled.
    ended: Vec<Completion>,
    /// Scratch list for ended operations.
    parts: Vec<IoCompletion>,
}

impl ReadQueue {
    /// A queue for reads of the disk with the image `path`.
    pub(crate) fn new(engine: Box<dyn Engine>, path: &Path) -> Self {
        Self {
            path: path.to_owned(),
            engine,
            in_engine: 0,
            reads: InFlightReads::default(),
            ended: Vec::new(),
            parts: Vec::new(),
        }
    }

    /// Begins a read, see [`InFlightReads::begin`]. It may start now or at the next
    /// [`start`](Self::start).
    pub(crate) fn begin(
        &mut self,
        token: u64,
        sector: u64,
        sectors: u32,
        parts: impl Iterator<Item = ReadPart>,
    ) -> Result<Option<Buffer>, Failure> {
        let (engine, in_engine) = (&mut self.engine, &mut self.in_engine);
        self.reads.begin(token, sector, sectors, parts, |id, io| {
            *in_engine += 1;
            engine.submit(id, io);
        })
    }

    /// Starts the reads that were begun.
    pub(crate) fn start(&mut self) {
        if self.in_engine > 0 {
            self.engine.enter();
        }
    }

    /// Ends the reads that the medium has answered. Their completions wait for the next
    /// [`poll`](Self::poll).
    fn collect(&mut self) {
        if self.in_engine == 0 {
            return;
        }
        self.engine.poll(&mut self.parts);
        self.in_engine -= self.parts.len();
        for part in self.parts.drain(..) {
            self.ended.extend(self.reads.end_part(&self.path, part));
        }
    }

    /// Appends the completions of reads that have ended to `done`.
    pub(crate) fn poll(&mut self, done: &mut Vec<Completion>) {
        self.collect();
        done.append(&mut self.ended);
    }
}

/// A port's reads, which another thread may end too.
pub(crate) struct SharedReads {
    /// `None` once the port is gone.
    pub queue: Mutex<Option<ReadQueue>>,
    /// Signalled when another thread has ended a read.
    pub mailbox: Arc<Mailbox>,
}

impl SharedReads {
    /// Gives the port's thread access to its reads.
    ///
    /// # Panics
    /// If the port is gone.
    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut ReadQueue) -> T) -> T {
        let mut queue = self.queue.lock().expect("reads lock");
        act(queue.as_mut().expect("the port is there"))
    }
}

impl PortReads for SharedReads {
    fn reap(&self) {
        let Ok(mut guard) = self.queue.try_lock() else {
            return;
        };
        let Some(queue) = guard.as_mut() else {
            return;
        };
        let before = queue.ended.len();
        queue.collect();
        let more = queue.ended.len() > before;
        drop(guard);
        if more {
            self.mailbox.event.signal();
        }
    }
}
