//! A store in memory that refuses requests, loses answers, and carries requests out late.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use futures_util::StreamExt;
use futures_util::stream::{self, BoxStream};
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    PutMode, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use walvisor_testkit::Random;

#[derive(Debug)]
pub(super) struct FaultyStore {
    inner: Arc<InMemory>,
    random: Mutex<Random>,
    /// One request in so many goes wrong; 0: none.
    one_in: AtomicU64,
    /// Requests until all fail.
    left: AtomicU64,
    /// Requests that failed and will be carried out.
    late: Mutex<Vec<(Path, PutPayload, PutMode)>>,
    pub(super) faults: AtomicU64,
    /// Creates what exists.
    careless: bool,
    /// Refuses to write, as to keys that may only read.
    read_only: bool,
    /// Has every object, as far as HEAD tells.
    pub(super) has_all: bool,
    /// Refuses requests for names with this in them.
    pub(super) refused: Mutex<Option<&'static str>>,
    /// Its lists have so many chunks too.
    pub(super) chunks: u64,
    /// Its lists of parts have no end: the same names again and again, or none.
    pub(super) endless: Option<Vec<&'static str>>,
    /// Its lists have sizes that are so many bytes larger.
    pub(super) sizes: u64,
    /// Names that its lists have told.
    pub(super) listed: Arc<AtomicU64>,
    /// Lets another thread do something before each request that reads an object.
    turns: Mutex<Option<(Sender<()>, Receiver<()>)>>,
    /// So many writes are carried out, and fail, as when the sync of a directory does.
    pub(super) unsynced: AtomicU64,
    /// Objects that were not synced, and not written since.
    pub(super) cached: Mutex<BTreeSet<Path>>,
}

fn failed() -> object_store::Error {
    object_store::Error::Generic {
        store: "faulty",
        source: "503".into(),
    }
}

impl FaultyStore {
    pub(super) fn new(inner: Arc<InMemory>, seed: u64, one_in: u64) -> Self {
        Self {
            inner,
            random: Mutex::new(Random(seed)),
            one_in: one_in.into(),
            left: u64::MAX.into(),
            late: Mutex::default(),
            faults: 0.into(),
            careless: false,
            read_only: false,
            has_all: false,
            refused: Mutex::default(),
            chunks: 0,
            endless: None,
            sizes: 0,
            listed: Arc::default(),
            turns: Mutex::default(),
            unsynced: 0.into(),
            cached: Mutex::default(),
        }
    }

    pub(super) fn read_only(inner: Arc<InMemory>) -> Self {
        Self {
            read_only: true,
            ..Self::new(inner, 0, 0)
        }
    }

    pub(super) fn careless(inner: Arc<InMemory>) -> Self {
        Self {
            careless: true,
            ..Self::new(inner, 0, 0)
        }
    }

    /// Lets one request in so many go wrong. Returns how many it was before.
    pub(super) fn fail_one_in(&self, one_in: u64) -> u64 {
        self.one_in.swap(one_in, Ordering::Relaxed)
    }

    /// Each request that reads an object sends something to the first one that is returned, and
    /// waits for an answer to the second, until one of them is gone.
    pub(super) fn take_turns(&self) -> (Receiver<()>, Sender<()>) {
        let ((begin, begun), (end, ended)) = (channel(), channel());
        *self.turns.lock().unwrap() = Some((begin, ended));
        (begun, end)
    }

    fn end_turn(&self) {
        let mut turns = self.turns.lock().unwrap();
        let ended = |(begin, ended): &(Sender<()>, Receiver<()>)| {
            begin.send(()).is_err() || ended.recv().is_err()
        };
        if turns.as_ref().is_some_and(ended) {
            *turns = None;
        }
    }

    /// Ends the turns that were begun with [`take_turns`](Self::take_turns).
    pub(super) fn end_turns(&self) {
        *self.turns.lock().unwrap() = None;
    }

    fn refuses(&self, name: &Path) -> bool {
        let refused = *self.refused.lock().unwrap();
        refused.is_some_and(|refused| name.as_ref().contains(refused))
    }

    pub(super) fn fail_after(&self, requests: u64) {
        self.left.store(requests, Ordering::Relaxed);
    }

    /// Which fault this request has, from 0; `None`: none.
    fn fault(&self) -> Option<u64> {
        let left = self.left.load(Ordering::Relaxed);
        if left == 0 {
            return Some(0);
        } else if left < u64::MAX {
            self.left.store(left - 1, Ordering::Relaxed);
        }
        let one_in = self.one_in.load(Ordering::Relaxed);
        let mut random = self.random.lock().unwrap();
        let fails = one_in > 0 && random.one_in(one_in);
        fails.then(|| {
            self.faults.fetch_add(1, Ordering::Relaxed);
            random.next()
        })
    }

    /// Carries out one of the requests that are late.
    async fn catch_up(&self) {
        let late = {
            let mut late = self.late.lock().unwrap();
            let mut random = self.random.lock().unwrap();
            let due = !late.is_empty() && random.one_in(3);
            due.then(|| late.remove(0))
        };
        if let Some((path, payload, mode)) = late {
            let _ = self.inner.put_opts(&path, payload, mode.into()).await;
        }
    }
}

impl std::fmt::Display for FaultyStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("faulty")
    }
}

#[async_trait::async_trait]
impl ObjectStore for FaultyStore {
    async fn put_opts(
        &self,
        location: &Path,
        payload: PutPayload,
        mut options: PutOptions,
    ) -> Result<PutResult> {
        self.catch_up().await;
        if self.refuses(location) {
            return Err(failed());
        }
        if self.read_only {
            return Err(object_store::Error::PermissionDenied {
                path: location.to_string(),
                source: "AccessDenied".into(),
            });
        }
        if self.careless {
            options.mode = PutMode::Overwrite;
        }
        let unsynced = self.unsynced.load(Ordering::Relaxed);
        if unsynced > 0 {
            self.unsynced.store(unsynced - 1, Ordering::Relaxed);
            self.inner.put_opts(location, payload, options).await?;
            return Err(failed());
        }
        match self.fault().map(|fault| fault % 4) {
            Some(0) => Err(failed()),
            Some(1) => {
                let _ = self.inner.put_opts(location, payload, options).await;
                Err(failed())
            }
            Some(2) => {
                let late = (location.clone(), payload, options.mode);
                self.late.lock().unwrap().push(late);
                Err(failed())
            }
            Some(_) => {
                // Carried out twice.
                let late = (location.clone(), payload.clone(), options.mode.clone());
                self.late.lock().unwrap().push(late);
                self.inner.put_opts(location, payload, options).await
            }
            None => {
                let put = self.inner.put_opts(location, payload, options).await?;
                self.cached.lock().unwrap().remove(location);
                Ok(put)
            }
        }
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.inner.put_multipart_opts(location, options).await
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.end_turn();
        self.catch_up().await;
        if self.has_all && options.head {
            let log = Path::from("a/log/log.json");
            return self.inner.get_opts(&log, options).await;
        }
        match self.fault().map(|fault| fault % 2) {
            None => self.inner.get_opts(location, options).await,
            Some(0) => Err(failed()),
            Some(_) => {
                // Half an object.
                let len = self
                    .inner
                    .get_opts(location, options.clone())
                    .await?
                    .meta
                    .size;
                let half = GetOptions {
                    range: (!options.head && len > 1).then(|| (0..len / 2).into()),
                    ..options
                };
                self.inner.get_opts(location, half).await
            }
        }
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        if prefix.is_some_and(|prefix| self.refuses(prefix)) {
            return stream::once(async { Err(failed()) }).boxed();
        }
        if self.chunks > 0 && prefix.is_some_and(|prefix| prefix.filename() == Some("chunks")) {
            let chunk = |number: u64| {
                Ok(ObjectMeta {
                    location: format!("a/log/chunks/00/{number:064x}").into(),
                    last_modified: std::time::SystemTime::now().into(),
                    size: 1,
                    e_tag: None,
                    version: None,
                })
            };
            return stream::iter((0..self.chunks).map(chunk)).boxed();
        }
        if let Some(names) = &self.endless
            && prefix.is_some_and(|prefix| prefix.filename() == Some("parts"))
        {
            let found = |name: &'static str| {
                Ok(ObjectMeta {
                    location: format!("a/log/parts/{name}").into(),
                    last_modified: std::time::SystemTime::now().into(),
                    size: 1,
                    e_tag: None,
                    version: None,
                })
            };
            return match names[..] {
                [] => stream::pending().boxed(),
                _ => stream::iter(names.clone().into_iter().cycle().map(found)).boxed(),
            };
        }
        match self.fault().map(|fault| fault % 2) {
            None => {
                let listed = self.listed.clone();
                let count = move |_: &_| {
                    let _ = listed.fetch_add(1, Ordering::Relaxed);
                };
                let more = self.sizes;
                let resized = move |mut object: ObjectMeta| {
                    object.size += more;
                    object
                };
                let listed = self.inner.list(prefix).inspect(count);
                listed.map(move |found| found.map(resized)).boxed()
            }
            Some(0) => stream::once(async { Err(failed()) }).boxed(),
            // It does not show yet what was put last.
            Some(_) => {
                let all = self.inner.list(prefix).collect::<Vec<_>>();
                let all = stream::once(all).map(|mut all| {
                    all.sort_by_key(|found| {
                        found.as_ref().ok().map(|found| found.location.clone())
                    });
                    all.pop();
                    stream::iter(all)
                });
                all.flatten().boxed()
            }
        }
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let later = self.inner.list_with_offset(prefix, offset);
        if self.fault().is_some() {
            return stream::once(async { Err(failed()) }).boxed();
        }
        let listed = self.listed.clone();
        let count = move |_: &_| {
            let _ = listed.fetch_add(1, Ordering::Relaxed);
        };
        later.inspect(count).boxed()
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}
