//! The look of an export of a disk in use. It is closed when the log needs room: by the export's
//! thread; or, if that is stopped, or busy with something else, by the log's keeper.

use std::collections::VecDeque;
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::Buffer;
use crate::error::Result;
use crate::log::admission::RoomNeed;
use crate::log::holds::YieldingHold;
use crate::log::image::DiskImage;
use crate::log::state::Log;
use crate::medium::copying::{COPY_BYTES, KERNEL_COPY_BYTES};
use crate::medium::segment::LogRead;
use crate::store::view::DataPlace;
use crate::sync;
use crate::sync::{Arc, Mutex, MutexGuard};
use crate::view::look::Look;

/// Bytes of the disk whose parts are listed at a time.
const LISTED_BYTES: u64 = 64 << 20;
/// An export copies for at least this many times as long as it took to open its look, unless
/// writers wait for it.
const COPY_SHARE: u32 = 4;
/// How much later than the export's thread the keeper closes a look.
const GRACE: Duration = Duration::from_millis(if cfg!(test) { 0 } else { 100 });

/// See the module's documentation.
pub(crate) struct YieldingLook {
    log: Arc<Log>,
    slot: Arc<Mutex<Option<OpenLook>>>,
}

/// A look that is open, and all that the export has of the log by it.
pub(crate) struct OpenLook {
    look: Look,
    /// The next parts with data, up to `listed`.
    parts: VecDeque<(Range<u64>, DataPlace)>,
    listed: u64,
    since: Instant,
    /// Until when it stays open unless writers wait.
    until: Instant,
}

/// A part of the disk with data.
pub(crate) struct DiskPart {
    /// Where it ends, in bytes.
    pub end: u64,
    pub data: PartData,
}

/// The data of a part of the disk.
pub(crate) enum PartData {
    /// This range of the image at this path.
    Image(Arc<DiskImage>, PathBuf, Range<u64>),
    /// Bytes of the log, and where they are on the disk.
    Bytes(Buffer, u64),
}

impl OpenLook {
    /// The first part with data in this range of bytes; `None` if there is none. It is at most 64
    /// MiB, and of the log at most 1 MiB.
    ///
    /// # Errors
    /// If the look can't be read.
    fn next(&mut self, range: Range<u64>) -> Result<Option<DiskPart>> {
        loop {
            let Some((part, data)) = self.parts.pop_front() else {
                let from = range.start.max(self.listed);
                if from >= range.end {
                    return Ok(None);
                }
                self.listed = from.saturating_add(LISTED_BYTES).min(range.end);
                let parts = self.look.layers();
                let parts = parts.data(from..self.listed, KERNEL_COPY_BYTES);
                self.parts = parts.collect::<Result<_>>()?;
                continue;
            };
            let (start, mut end) = (part.start, part.end);
            let data = match data {
                DataPlace::Zero => continue,
                DataPlace::Base => {
                    let past = &self.look.past;
                    PartData::Image(past.base.clone(), past.path.clone(), part)
                }
                DataPlace::Log { segment, offset } => {
                    if end - start > COPY_BYTES {
                        end = start + COPY_BYTES;
                        let rest = DataPlace::Log {
                            segment: segment.clone(),
                            offset: offset + COPY_BYTES,
                        };
                        self.parts.push_front((end..part.end, rest));
                    }
                    let read = LogRead::new(segment, offset, (end - start) as usize);
                    PartData::Bytes(read.read()?, start)
                }
            };
            return Ok(Some(DiskPart { end, data }));
        }
    }
}

impl YieldingLook {
    /// One that is closed.
    pub(crate) fn new(log: &Arc<Log>) -> Self {
        let slot: Arc<Mutex<Option<OpenLook>>> = Arc::default();
        let of_keeper: Arc<dyn YieldingHold> = slot.clone();
        log.lock().keeper.add_yielding(&of_keeper);
        let log = log.clone();
        Self { log, slot }
    }

    /// Opens it with a look that began to open at `opening`.
    pub(crate) fn open(&self, look: Look, opening: Instant) {
        let since = sync::now();
        *self.lock() = Some(OpenLook {
            look,
            parts: VecDeque::new(),
            listed: 0,
            since,
            until: since + COPY_SHARE * since.duration_since(opening),
        });
    }

    pub(crate) fn is_open(&self) -> bool {
        self.lock().is_some()
    }

    #[cfg(test)]
    pub(crate) fn close(&self) {
        *self.lock() = None;
    }

    /// Closes it if the log needs room. Returns whether it is closed.
    pub(crate) fn give_way(&self) -> bool {
        let need = self.log.room_need(&self.log.lock());
        let mut open = self.lock();
        close_if_due(&mut open, need, Duration::ZERO);
        open.is_none()
    }

    /// The first part with data in this range of bytes; `None` if it is closed, `Some(None)` if
    /// there is none. Ranges continue one another.
    ///
    /// # Errors
    /// If the look can't be read.
    pub(crate) fn next(&self, range: Range<u64>) -> Result<Option<Option<DiskPart>>> {
        let mut open = self.lock();
        let next = open.as_mut().map(|open| open.next(range));
        next.transpose()
    }

    fn lock(&self) -> MutexGuard<'_, Option<OpenLook>> {
        self.slot.lock().expect("look lock")
    }
}

/// Closes a look that was to be closed `grace` ago.
fn close_if_due(look: &mut Option<OpenLook>, need: RoomNeed, grace: Duration) {
    let due = |open: &mut OpenLook| match need {
        RoomNeed::None => false,
        RoomNeed::Soon => sync::now() >= open.until + grace,
        RoomNeed::Now => sync::now() >= open.since + grace,
    };
    look.take_if(due);
}

impl YieldingHold for Mutex<Option<OpenLook>> {
    fn end_if_overdue(&self, need: RoomNeed) {
        // While its thread reads the log by it, that thread is busy with nothing else.
        if let Ok(mut look) = self.try_lock() {
            close_if_due(&mut look, need, GRACE);
        }
    }
}
