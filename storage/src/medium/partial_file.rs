//! An image that lacks chunks, which a restore is fetching (see
//! [`fetch_map`](crate::medium::fetch_map)).
//!
//! Plain calls wait for the chunks of their range. Engines do not:
//! [`GatedEngine`](crate::medium::engine::gated::GatedEngine) keeps an operation until they are
//! there.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::medium::fetch_map::{FetchMap, Presence};
use crate::medium::file::{CachedFile, DataFile, ReadFile};
use crate::medium::mark::{ImageMark, Inode};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Event, Mutex, thread};

/// Without a sign from the restore for this long, requests for what it should fetch fail.
const SILENCE: Duration = Duration::from_secs(10);
/// How long reads still wait for chunks when somebody waits for them to end, and for how long they
/// fail after that.
const LAST_WAIT: Duration = Duration::from_secs(5);
const REFUSAL: Duration = Duration::from_secs(3);
/// How long a plain call waits for chunks: the log's keeper, which has other work, may be the
/// caller.
const PLAIN_WAIT: Duration = Duration::from_secs(30);
/// How often those who wait look for such a sign.
const LOOK: Duration = Duration::from_secs(1);

/// An image's file, and which chunks of it are there.
#[derive(Debug)]
pub(crate) struct PartialFile {
    file: Box<dyn DataFile>,
    gate: Arc<ChunkGate>,
}

impl PartialFile {
    /// The image at `path`, open as `file`, with its map if there is one. `builds`: this process
    /// makes the image, so that it need not be ready.
    ///
    /// # Errors
    /// If the image is not ready, or the map is damaged or can't be read.
    pub(crate) fn over(
        file: Box<dyn DataFile>,
        path: &Path,
        builds: bool,
    ) -> Result<Box<dyn DataFile>> {
        let Some(map) = FetchMap::open(path)? else {
            return Ok(file);
        };
        if !builds {
            map.refuse_unready(path)?;
            map.settle_abandoned()?;
        }
        let gate = Arc::new(ChunkGate {
            image: path.to_owned(),
            complete: AtomicBool::new(map.is_complete()),
            sign: Mutex::new((map.pulse(), Instant::now())),
            refusal: Mutex::default(),
            waiters: Mutex::default(),
            map,
        });
        Ok(Box::new(Self { file, gate }))
    }

    /// Waits for the chunks of `len` bytes from `offset` on.
    ///
    /// # Errors
    /// If they can't be had, or have not come within [`PLAIN_WAIT`].
    fn need(&self, offset: u64, len: u64) -> io::Result<()> {
        let (bytes, began) = (offset..offset.saturating_add(len), Instant::now());
        loop {
            let arrivals = self.gate.map.arrivals();
            match self.gate.check(bytes.clone()) {
                GateState::Present => return Ok(()),
                GateState::Failed(error) => return Err(error),
                GateState::Absent if began.elapsed() > PLAIN_WAIT => {
                    return Err(self.gate.error("a chunk has not come in time"));
                }
                GateState::Absent => {
                    self.gate.map.ask(bytes.clone());
                    self.gate.map.wait_for_arrival(arrivals, LOOK);
                }
            }
        }
    }
}

/// Whether an operation on an image can be carried out.
#[derive(Debug)]
pub(crate) enum GateState {
    Present,
    Absent,
    Failed(io::Error),
}

/// Lets operations on an image pass once the image has their chunks.
#[derive(Debug)]
pub(crate) struct ChunkGate {
    image: PathBuf,
    map: FetchMap,
    /// Whether the image has everything.
    complete: AtomicBool,
    /// The restore's last sign of life, and when it was seen.
    sign: Mutex<(u32, Instant)>,
    /// From when on reads fail instead of waiting, for [`REFUSAL`].
    refusal: Mutex<Option<Instant>>,
    waiters: Mutex<ChunkWaiters>,
}

/// Who is woken when chunks come.
#[derive(Debug, Default)]
struct ChunkWaiters {
    /// By descriptor, so that an engine that waits for several chunks is here once.
    events: HashMap<RawFd, Event>,
    /// Whether the thread runs that wakes them.
    watched: bool,
}

impl ChunkGate {
    /// The same image, opened once more.
    pub(crate) fn guard(self: &Arc<Self>, file: Box<dyn DataFile>) -> Box<dyn DataFile> {
        let gate = self.clone();
        Box::new(PartialFile { file, gate })
    }

    /// Whether an operation on these bytes can be carried out.
    pub(crate) fn check(&self, bytes: Range<u64>) -> GateState {
        if self.complete.load(Ordering::Acquire) {
            return GateState::Present;
        }
        match self.map.presence(bytes) {
            Presence::Present => GateState::Present,
            Presence::Lost => GateState::Failed(
                self.error("a chunk is lost: the command that fetches the image said which"),
            ),
            Presence::Absent if self.is_silent() => GateState::Failed(self.error(
                "a chunk is not fetched yet, and nobody fetches it: run 'walvisor archive \
                 restore' or 'disk clone --serve' again, with the same arguments",
            )),
            Presence::Absent => GateState::Absent,
        }
    }

    /// Whether the image has these bytes already.
    pub(crate) fn has(&self, offset: u64, len: u64) -> bool {
        let bytes = offset..offset.saturating_add(len);
        matches!(self.check(bytes), GateState::Present)
    }

    /// Bytes of the chunks that the image lacks.
    pub(crate) fn absent_bytes(&self) -> u64 {
        self.map.absent_bytes()
    }

    /// See [`FetchMap::refuse_absent`].
    pub(crate) fn refuse_absent(&self, image: &Path) -> Result<()> {
        self.map.refuse_absent(image)
    }

    /// Lets reads wait for chunks for some seconds more at most.
    pub(crate) fn limit_waits(&self) {
        let mut refusal = self.refusal.lock().expect("refusal lock");
        refusal.get_or_insert(Instant::now() + LAST_WAIT);
    }

    /// Why a read of absent chunks fails instead of waiting; `None`: it may wait.
    pub(crate) fn refuses(&self) -> Option<io::Error> {
        let mut refusal = self.refusal.lock().expect("refusal lock");
        let (from, now) = ((*refusal)?, Instant::now());
        if now < from {
            return None;
        } else if now > from + REFUSAL {
            *refusal = None;
            return None;
        }
        let why = "a chunk is not fetched yet, and somebody waits for the requests to end";
        Some(self.error(why))
    }

    fn error(&self, why: &str) -> io::Error {
        io::Error::other(format!("{}: {why}", self.image.display()))
    }

    /// Whether the restore has ended, as far as one can see.
    fn is_silent(&self) -> bool {
        let mut sign = self.sign.lock().expect("sign lock");
        let pulse = self.map.pulse();
        if sign.0 != pulse {
            *sign = (pulse, Instant::now());
        }
        sign.1.elapsed() > SILENCE
    }

    /// Asks for the chunks of these bytes. Signals `event` once, when chunks have come, or after a
    /// second.
    ///
    /// # Errors
    /// If the system refuses a thread or a descriptor.
    pub(crate) fn ask(self: &Arc<Self>, bytes: Range<u64>, event: &Event) -> io::Result<()> {
        self.map.ask(bytes.clone());
        let mut waiters = self.waiters.lock().expect("waiters lock");
        // Whoever had this number before may have closed it.
        let key = event.fd().as_raw_fd();
        waiters.events.insert(key, event.try_clone()?);
        if !waiters.watched {
            let (gate, arrivals) = (self.clone(), self.map.arrivals());
            let watch = thread::Builder::new().name("fetch-watch".into());
            watch.spawn(move || gate.watch(arrivals))?;
            waiters.watched = true;
        }
        drop(waiters);
        // The chunks may have come before the thread looked.
        if !matches!(self.check(bytes), GateState::Absent) {
            event.signal();
        }
        Ok(())
    }

    /// Wakes the waiters whenever chunks have come, until nobody waits. `arrivals`: those so far.
    fn watch(&self, mut arrivals: u32) {
        loop {
            self.map.wait_for_arrival(arrivals, LOOK);
            // Read before the waiters are woken: whoever registers later has seen these arrivals.
            arrivals = self.map.arrivals();
            let mut waiters = self.waiters.lock().expect("waiters lock");
            if waiters.events.is_empty() {
                waiters.watched = false;
                return;
            }
            for (_, event) in waiters.events.drain() {
                event.signal();
            }
        }
    }

    /// Whether the image has everything by now.
    fn is_complete(&self) -> bool {
        if !self.complete.load(Ordering::Acquire) && self.map.is_complete() {
            self.complete.store(true, Ordering::Release);
        }
        self.complete.load(Ordering::Acquire)
    }
}

impl ReadFile for PartialFile {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.need(offset, buffer.len() as u64)?;
        self.file.read_exact_at(buffer, offset)
    }

    fn raw_fd(&self) -> RawFd {
        self.file.raw_fd()
    }

    /// `None` while chunks are absent: the file's holes are then not those of the disk.
    fn host(&self) -> Option<&File> {
        self.gate.is_complete().then(|| self.file.host()).flatten()
    }
}

impl DataFile for PartialFile {
    fn chunk_gate(&self) -> Option<&Arc<ChunkGate>> {
        Some(&self.gate)
    }

    fn attributes(&self) -> Option<&File> {
        self.file.attributes()
    }

    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.need(offset, bytes.len() as u64)?;
        self.file.write_all_at(bytes, offset)
    }

    fn write_slices_at(
        &self,
        slices: &[io::IoSlice<'_>],
        offset: u64,
        durably: bool,
    ) -> io::Result<usize> {
        let len: usize = slices.iter().map(|slice| slice.len()).sum();
        self.need(offset, len as u64)?;
        self.file.write_slices_at(slices, offset, durably)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.file.sync_data()
    }

    fn drop_cache(&self) -> io::Result<()> {
        self.file.drop_cache()
    }

    fn len(&self) -> io::Result<u64> {
        self.file.len()
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.file.set_len(len)
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        self.file.allocate(len)
    }

    fn sync_all(&self) -> io::Result<()> {
        self.file.sync_all()
    }

    fn try_lock(&self, shared: bool) -> io::Result<bool> {
        self.file.try_lock(shared)
    }

    fn zero_range(&self, offset: u64, len: u64, unmap: bool) -> io::Result<()> {
        self.need(offset, len)?;
        self.file.zero_range(offset, len, unmap)
    }

    /// Without the time of the last write, which may be the restore's.
    fn inode(&self) -> io::Result<Inode> {
        let inode = self.file.inode()?;
        Ok(Inode {
            written: 0,
            ..inode
        })
    }

    fn read_mark(&self) -> io::Result<Option<ImageMark>> {
        self.file.read_mark()
    }

    fn write_mark(&self, mark: Option<&ImageMark>) -> io::Result<bool> {
        self.file.write_mark(mark)
    }

    fn open_cached(&self, path: &Path) -> io::Result<Box<dyn CachedFile>> {
        self.file.open_cached(path)
    }
}
