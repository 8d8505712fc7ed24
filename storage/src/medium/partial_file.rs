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
/// How long requests still wait for chunks when somebody waits for the requests to end; and how long
/// they fail from then on.
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
    fetch: Arc<Fetch>,
}

impl PartialFile {
    /// The image at `path`, open as `file`, with its map if there is one.
    ///
    /// # Errors
    /// If the map is damaged, or can't be read.
    pub(crate) fn over(file: Box<dyn DataFile>, path: &Path) -> Result<Box<dyn DataFile>> {
        let Some(map) = FetchMap::open(path)? else {
            return Ok(file);
        };
        map.refuse_unready(path)?;
        map.settle_abandoned()?;
        let fetch = Arc::new(Fetch {
            image: path.to_owned(),
            complete: AtomicBool::new(map.is_complete()),
            sign: Mutex::new((map.pulse(), Instant::now())),
            refusal: Mutex::default(),
            waiters: Mutex::default(),
            map,
        });
        Ok(Box::new(Self { file, fetch }))
    }

    /// Waits for the chunks of `len` bytes from `offset` on.
    ///
    /// # Errors
    /// If they can't be had, or have not come within [`PLAIN_WAIT`].
    fn need(&self, offset: u64, len: u64) -> io::Result<()> {
        let (bytes, began) = (offset..offset.saturating_add(len), Instant::now());
        loop {
            let arrivals = self.fetch.map.arrivals();
            match self.fetch.check(bytes.clone()) {
                FetchState::Present => return Ok(()),
                FetchState::Failed(error) => return Err(error),
                FetchState::Absent if began.elapsed() > PLAIN_WAIT => {
                    return Err(self
                        .fetch
                        .error("a chunk has not come from the archive in time"));
                }
                FetchState::Absent => {
                    self.fetch.map.ask(bytes.clone());
                    self.fetch.map.wait_for_arrival(arrivals, LOOK);
                }
            }
        }
    }
}

/// Whether an operation on an image can be carried out.
#[derive(Debug)]
pub(crate) enum FetchState {
    Present,
    Absent,
    Failed(io::Error),
}

/// The fetching of an image, as its disk's owner sees it.
#[derive(Debug)]
pub(crate) struct Fetch {
    image: PathBuf,
    map: FetchMap,
    /// Whether the image has everything.
    complete: AtomicBool,
    /// The restore's last sign of life, and when it was seen.
    sign: Mutex<(u32, Instant)>,
    /// From when on requests fail instead of waiting, for [`REFUSAL`].
    refusal: Mutex<Option<Instant>>,
    waiters: Mutex<Waiters>,
}

/// Who is woken when chunks come.
#[derive(Debug, Default)]
struct Waiters {
    /// By descriptor, so that an engine that waits for several chunks is here once.
    events: HashMap<RawFd, Event>,
    /// Whether the thread runs that wakes them.
    watched: bool,
}

impl Fetch {
    /// Whether an operation on these bytes can be carried out.
    pub(crate) fn check(&self, bytes: Range<u64>) -> FetchState {
        if self.complete.load(Ordering::Acquire) {
            return FetchState::Present;
        }
        match self.map.presence(bytes) {
            Presence::Present => FetchState::Present,
            Presence::Lost => FetchState::Failed(self.error(
                "a chunk can't be had from the archive: 'walvisor archive restore' said why",
            )),
            Presence::Absent if self.is_silent() => FetchState::Failed(self.error(
                "a chunk is not fetched yet, and nobody fetches it: run 'walvisor archive \
                 restore' again, with the same arguments",
            )),
            Presence::Absent => FetchState::Absent,
        }
    }

    /// Whether the image has these bytes already.
    pub(crate) fn has(&self, offset: u64, len: u64) -> bool {
        let bytes = offset..offset.saturating_add(len);
        matches!(self.check(bytes), FetchState::Present)
    }

    /// Bytes of the chunks that the image lacks.
    pub(crate) fn absent_bytes(&self) -> u64 {
        self.map.absent_bytes()
    }

    /// Lets requests wait for chunks for some seconds more at most.
    pub(crate) fn limit_waits(&self) {
        let mut refusal = self.refusal.lock().expect("refusal lock");
        refusal.get_or_insert(Instant::now() + LAST_WAIT);
    }

    /// Why a request for absent chunks fails instead of waiting; `None`: it may wait.
    pub(crate) fn refuses(&self) -> Option<io::Error> {
        let mut refusal = self.refusal.lock().expect("refusal lock");
        let over = (*refusal)?.elapsed();
        if over > REFUSAL {
            *refusal = None;
        }
        let refuses = !over.is_zero() && over <= REFUSAL;
        refuses.then(|| {
            self.error("a chunk is not fetched yet, and somebody waits for the requests to end")
        })
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
            let (fetch, arrivals) = (self.clone(), self.map.arrivals());
            let watch = thread::Builder::new().name("fetch-watch".into());
            watch.spawn(move || fetch.watch(arrivals))?;
            waiters.watched = true;
        }
        drop(waiters);
        // They may have come before the thread looked.
        if !matches!(self.check(bytes), FetchState::Absent) {
            event.signal();
        }
        Ok(())
    }

    /// Wakes the waiters whenever chunks have come, until nobody waits. `arrivals`: those so far.
    fn watch(&self, mut arrivals: u32) {
        loop {
            self.map.wait_for_arrival(arrivals, LOOK);
            // Before the waiters are: who comes after that has seen what had arrived.
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
        self.fetch.is_complete().then(|| self.file.host()).flatten()
    }
}

impl DataFile for PartialFile {
    fn fetch(&self) -> Option<&Arc<Fetch>> {
        Some(&self.fetch)
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
