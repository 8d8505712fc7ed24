//! Speaking with the object store: names and bytes, one request at a time or several at once.
//!
//! A store's answer may be lost, or not be true: a request that "failed" may have been carried out.
//! So what matters is written under a name that must not exist (If-None-Match), and an unclear
//! answer is settled by reading what is there.

use std::future::Future;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use futures_util::{StreamExt, stream};
use object_store::aws::AmazonS3Builder;
use object_store::local::LocalFileSystem;
use object_store::path::Path as Key;
use object_store::{
    BackoffConfig, ClientOptions, ObjectStore, ObjectStoreExt, PutMode, PutOptions, PutPayload,
    RetryConfig,
};
use tokio::runtime::Runtime;

use crate::error::{Error, ErrorKind, Result};
use crate::url::{ArchiveUrl, StorePlace};

/// How long a request may take. An answer that comes later counts as lost.
const REQUEST: Duration = Duration::from_secs(60);
const CONNECT: Duration = Duration::from_secs(10);
/// How often a request is tried before it counts as failed; whoever needs it then tries again.
const TRIES: usize = 3;
/// How long to wait before an unclear request is tried again.
const PAUSE: Duration = Duration::from_millis(if cfg!(test) { 1 } else { 200 });
/// Most bytes of an object, and names in a list: a store may send anything.
const MOST_OBJECT_BYTES: u64 = 512 << 20;
const MOST_LISTED: usize = if cfg!(test) { 20_000 } else { 1 << 24 };
/// How long a list may go on without a name: longer than all attempts of a request.
const LISTED: Duration = Duration::from_secs(180);
/// Requests under way at a time.
pub(crate) const AT_ONCE: usize = 8;

/// An archive's objects, in an object store.
pub struct Archive {
    store: Arc<dyn ObjectStore>,
    prefix: Key,
    shown: String,
    /// What can be read may not be durable: the store is a directory.
    pub(crate) cached: bool,
    directory: Option<PathBuf>,
    /// This object is in the directory, or that is not the archive any more.
    anchor: Mutex<Option<Key>>,
    pub(crate) fencing: bool,
    /// A list without a name for so long has no end.
    pub(crate) listed_within: Duration,
    runtime: Runtime,
    counters: TrafficCounters,
    /// No keys are set: the store is asked with what the machine's owner gives it, if anything.
    keyless: bool,
}

#[derive(Default)]
struct TrafficCounters {
    reads: AtomicU64,
    writes: AtomicU64,
    lists: AtomicU64,
    sent: AtomicU64,
    received: AtomicU64,
}

/// Requests to the store and their bytes, since the archive was opened. Requests that the store's
/// client repeats count once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Requests that read an object.
    pub reads: u64,
    /// Requests that write or remove one.
    pub writes: u64,
    /// Requests that list names; long lists take several and count once.
    pub lists: u64,
    /// Bytes of objects that were sent.
    pub sent_bytes: u64,
    /// Bytes of objects that were received.
    pub received_bytes: u64,
}

/// An object in a list.
#[derive(Clone, Debug)]
pub(crate) struct ListEntry {
    pub name: String,
    /// Its size, as it is stored.
    pub bytes: u64,
    /// When it was last written, by the store's clock, in microseconds since 1970.
    pub modified_us: u64,
}

/// What came of creating an object.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum CreateOutcome {
    /// It is there, with these bytes, whoever has put it there.
    Done,
    /// It is there, with other bytes.
    Taken(Bytes),
}

impl Archive {
    /// Opens an archive; nothing is sent yet.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if the directory does not exist, or something is missing to
    /// reach the store, such as its keys.
    pub fn open(url: &ArchiveUrl) -> Result<Self> {
        let (store, prefix, keyless): (Arc<dyn ObjectStore>, _, _) = match &url.place {
            StorePlace::Directory(directory) => (directory_store(directory)?, String::new(), false),
            StorePlace::S3 { prefix, .. } => {
                let set = |name: &&str| std::env::var_os(name).is_some();
                // The environment's own come first.
                let keys = if set(&KEY_GIVERS[0]) {
                    None
                } else {
                    keys_of_profile()
                };
                let keyless = keys.is_none() && !KEY_GIVERS.iter().any(set);
                (s3_store(url, keys)?, prefix.clone(), keyless)
            }
        };
        Ok(Self {
            cached: url.directory().is_some(),
            directory: url.directory().map(Path::to_owned),
            keyless,
            ..Self::over(store, prefix, url.to_string(), url.fencing)?
        })
    }

    /// An archive in any store. `shown`: its name in errors.
    pub(crate) fn over(
        store: Arc<dyn ObjectStore>,
        prefix: String,
        shown: String,
        fencing: bool,
    ) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build();
        let runtime = runtime.map_err(|error| {
            let message = format!("can't start the network's thread: {error}");
            Error::new(ErrorKind::Local, message)
        })?;
        Ok(Self {
            store,
            prefix: Key::from(prefix),
            shown,
            cached: false,
            directory: None,
            anchor: Mutex::default(),
            fencing,
            listed_within: LISTED,
            runtime,
            counters: TrafficCounters::default(),
            keyless: false,
        })
    }

    /// The archive's address, for messages.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// What was sent and received so far.
    pub fn traffic(&self) -> Traffic {
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic {
            reads: of(&self.counters.reads),
            writes: of(&self.counters.writes),
            lists: of(&self.counters.lists),
            sent_bytes: of(&self.counters.sent),
            received_bytes: of(&self.counters.received),
        }
    }

    fn key(&self, name: &str) -> Key {
        let name = Key::from(name);
        self.prefix.parts().chain(name.parts()).collect()
    }

    /// The error for a request that failed.
    fn failed(&self, doing: &str, name: &str, error: &object_store::Error) -> Error {
        let message = one_line(&error.to_string());
        let (kind, advice) = match error {
            _ if message.contains("NoSuchBucket") => (
                ErrorKind::NotFound,
                "; make the bucket first, or correct its name in the address",
            ),
            object_store::Error::NotFound { .. } => (ErrorKind::NotFound, ""),
            _ if self.keyless => (
                ErrorKind::Unavailable,
                "; no keys are set: give AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the \
                 environment, or write them to ~/.aws/credentials",
            ),
            object_store::Error::PermissionDenied { .. }
            | object_store::Error::Unauthenticated { .. } => (
                ErrorKind::Unavailable,
                "; check the keys and what they may do",
            ),
            _ if self.directory.is_some() && is_denied(error) => (
                ErrorKind::Local,
                "; if its file system was mounted again, or the directory replaced, since this \
                 process has started, start the process again: Landlock keeps it to the directory \
                 that was there; otherwise check the directory's owner and mode",
            ),
            _ if is_refused(error) => (
                ErrorKind::Unavailable,
                "; nothing answers there: check the endpoint in the address, and that the store runs",
            ),
            _ => (ErrorKind::Unavailable, ""),
        };
        Error::new(
            kind,
            format!("{}: can't {doing} {name}: {message}{advice}", self.shown),
        )
    }

    pub(crate) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        self.runtime.block_on(future)
    }

    /// Reads an object; `None`: there is none.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`].
    pub(crate) async fn get(&self, name: &str) -> Result<Option<Bytes>> {
        self.counters.reads.fetch_add(1, Ordering::Relaxed);
        let read = async {
            let found = self.store.get(&self.key(name)).await?;
            if found.meta.size > MOST_OBJECT_BYTES {
                return Ok(None);
            }
            found.bytes().await.map(Some)
        };
        match read.await {
            Ok(None) => Err(Error::damaged(name, "more bytes than any object has")),
            Ok(Some(bytes)) => {
                let len = bytes.len() as u64;
                self.counters.received.fetch_add(len, Ordering::Relaxed);
                Ok(Some(bytes))
            }
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(self.failed("read", name, &error)),
        }
    }

    /// Reads an object that must be there.
    pub(crate) async fn need(&self, name: &str) -> Result<Bytes> {
        let found = self.get(name).await?;
        found.ok_or_else(|| Error::damaged(name, format!("it is missing in {}", self.shown)))
    }

    /// Whether there is an object of this name.
    pub(crate) async fn has(&self, name: &str) -> Result<bool> {
        self.counters.reads.fetch_add(1, Ordering::Relaxed);
        match self.store.head(&self.key(name)).await {
            Ok(_) => Ok(true),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(self.failed("look for", name, &error)),
        }
    }

    /// Creates an object that must not exist. If the answer is unclear, what is there tells.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`]: the object may be there or come yet.
    pub(crate) async fn create(&self, name: &str, bytes: &Bytes) -> Result<CreateOutcome> {
        let mut last = None;
        for _ in 0..TRIES {
            if !self.fencing
                && let Some(found) = self.get(name).await?
            {
                return Ok(settled(found, bytes));
            }
            let mode = if self.fencing {
                PutMode::Create
            } else {
                PutMode::Overwrite
            };
            let unclear = match self.put_as(name, bytes, mode).await {
                Ok(()) => return Ok(CreateOutcome::Done),
                Err(error) => error,
            };
            // It may be this very request that has created it, or an earlier one of ours.
            last = match self.get(name).await? {
                Some(found) if self.cached && found == *bytes => {
                    // What is in the page cache may not be on the medium, and the error was perhaps
                    // that of a sync: another file takes its place.
                    match self.put_as(name, bytes, PutMode::Overwrite).await {
                        Ok(()) => return Ok(CreateOutcome::Done),
                        Err(error) => Some(error),
                    }
                }
                Some(found) => return Ok(settled(found, bytes)),
                None => Some(unclear),
            };
            tokio::time::sleep(PAUSE).await;
        }
        let unclear = last.map(|error| self.failed("create", name, &error));
        Err(unclear.unwrap_or_else(|| Error::damaged(name, "never tried")))
    }

    /// Writes an object that has these bytes whoever writes it.
    pub(crate) async fn put(&self, name: &str, bytes: &Bytes) -> Result<()> {
        let put = self.put_as(name, bytes, PutMode::Overwrite).await;
        put.map_err(|error| self.failed("write", name, &error))
    }

    /// Writes an object again that may only be in the page cache: whoever has created it may have
    /// been killed, or have failed, before it was synced.
    pub(crate) async fn sync(&self, name: &str) -> Result<()> {
        if self.cached {
            let found = self.need(name).await?;
            self.put(name, &found).await?;
        }
        Ok(())
    }

    async fn put_as(
        &self,
        name: &str,
        bytes: &Bytes,
        mode: PutMode,
    ) -> std::result::Result<(), object_store::Error> {
        self.counters.writes.fetch_add(1, Ordering::Relaxed);
        let len = bytes.len() as u64;
        self.counters.sent.fetch_add(len, Ordering::Relaxed);
        let options = PutOptions {
            mode,
            ..PutOptions::default()
        };
        let payload = PutPayload::from_bytes(bytes.clone());
        let key = self.key(name);
        self.look_for_anchor().await?;
        self.store.put_opts(&key, payload, options).await?;
        // It may have been put into what another file system is mounted over now, or was.
        self.look_for_anchor().await
    }

    /// From now on, a directory that does not have this object counts as another one.
    pub(crate) fn anchor(&self, name: &str) {
        if self.directory.is_some()
            && let Ok(mut anchor) = self.anchor.lock()
        {
            *anchor = Some(self.key(name));
        }
    }

    async fn look_for_anchor(&self) -> std::result::Result<(), object_store::Error> {
        let anchor = self.anchor.lock().map_or(None, |anchor| anchor.clone());
        let Some(anchor) = anchor else {
            return Ok(());
        };
        match self.store.head(&anchor).await {
            Err(object_store::Error::NotFound { .. }) => Err(object_store::Error::Generic {
                store: "directory",
                source: format!(
                    "it lacks {anchor}: its file system is not mounted, or another directory is in \
                     its place; mount it, or put it back"
                )
                .into(),
            }),
            found => found.map(drop),
        }
    }

    /// Whether the store refuses to create an object twice.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`].
    pub(crate) async fn refuses_second(&self, name: &str) -> Result<bool> {
        let (one, other) = (Bytes::from_static(b"1"), Bytes::from_static(b"2"));
        let mut first = self.put_as(name, &one, PutMode::Create).await;
        if first.is_err() {
            // Its answer may have been lost.
            first = match self.get(name).await? {
                Some(found) if found == one => Ok(()),
                _ => first,
            };
        }
        first.map_err(|error| self.failed("create", name, &error))?;
        let second = self.put_as(name, &other, PutMode::Create).await;
        // An answer may be lost, and a proxy may make up another: the bytes tell.
        let kept = self.get(name).await?.is_some_and(|found| found == one);
        let _ = self.remove(name).await;
        match second {
            Ok(()) => Ok(false),
            Err(
                object_store::Error::AlreadyExists { .. }
                | object_store::Error::Precondition { .. },
            ) => Ok(kept),
            Err(error) => Err(self.failed("create", name, &error)),
        }
    }

    pub(crate) async fn remove(&self, name: &str) -> Result<()> {
        self.counters.writes.fetch_add(1, Ordering::Relaxed);
        match self.store.delete(&self.key(name)).await {
            Ok(()) | Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(self.failed("remove", name, &error)),
        }
    }

    /// Removes what writers to a directory that were killed have left: files of no object, last
    /// written before this time, in microseconds since 1970.
    pub(crate) fn remove_unfinished(&self, before_us: u64) -> Result<()> {
        let mut directories: Vec<_> = self.directory.iter().cloned().collect();
        while let Some(directory) = directories.pop() {
            let failed = |error| Error::local("look for unfinished files", &directory, error);
            for entry in std::fs::read_dir(&directory).map_err(failed)? {
                let entry = entry.map_err(failed)?;
                let (path, kind) = (entry.path(), entry.file_type().map_err(failed)?);
                if kind.is_dir() {
                    directories.push(path);
                } else if kind.is_file() && is_unfinished(&path) {
                    let written = entry.metadata().and_then(|metadata| metadata.modified());
                    let written = written.map_err(failed)?.duration_since(UNIX_EPOCH);
                    if written.is_ok_and(|since| since.as_micros() < u128::from(before_us)) {
                        std::fs::remove_file(&path).map_err(failed)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The objects in a folder, by name.
    pub(crate) async fn list(&self, folder: &str) -> Result<Vec<ListEntry>> {
        self.list_after(folder, None).await
    }

    /// Those of them with later names than this one. The store does not tell of the others.
    pub(crate) async fn list_after(
        &self,
        folder: &str,
        after: Option<&str>,
    ) -> Result<Vec<ListEntry>> {
        let mut listed = Vec::new();
        let each = |entry| listed.push(entry);
        self.visit(folder, after, each).await?;
        listed.sort_by(|one: &ListEntry, other| one.name.cmp(&other.name));
        Ok(listed)
    }

    /// Hands them to `each`, in any order.
    pub(crate) async fn visit(
        &self,
        folder: &str,
        after: Option<&str>,
        mut each: impl FnMut(ListEntry),
    ) -> Result<()> {
        self.counters.lists.fetch_add(1, Ordering::Relaxed);
        let folder_key = self.key(folder);
        let mut listed = match after {
            Some(name) => {
                let name = self.key(name);
                self.store.list_with_offset(Some(&folder_key), &name)
            }
            None => self.store.list(Some(&folder_key)),
        };
        let (mut count, mut seen) = (0, None);
        let endless = |why: &str| {
            let message = format!(
                "{}: the store's list of {folder} {why}; check the store, and what is between",
                self.shown
            );
            Error::new(ErrorKind::Damaged, message)
        };
        loop {
            // Pages without names are not seen here.
            let next = tokio::time::timeout(self.listed_within, listed.next()).await;
            let Some(found) = next.map_err(|_| endless("has no name for long, and no end"))? else {
                break;
            };
            let found = match found {
                Err(object_store::Error::NotFound { .. }) => break,
                found => found.map_err(|error| self.failed("list", folder, &error))?,
            };
            count += 1;
            if count > MOST_LISTED {
                return Err(endless(&format!(
                    "has more than {MOST_LISTED} names, or no end"
                )));
            } else if seen.as_ref() == Some(&found.location) && self.directory.is_none() {
                return Err(endless("has the same names again and again"));
            } else if usize::is_power_of_two(count) {
                // However long the list is before it repeats itself.
                seen = Some(found.location.clone());
            }
            // The store's names are encoded, and so is the prefix.
            let Some(parts) = found.location.prefix_match(&self.prefix) else {
                continue;
            };
            let parts: Vec<_> = parts.map(|part| part.as_ref().to_owned()).collect();
            each(ListEntry {
                name: parts.join("/"),
                bytes: found.size,
                modified_us: found.last_modified.timestamp_micros().max(0) as u64,
            });
        }
        Ok(())
    }

    /// Carries out several requests at once. `each` gets the results in order.
    pub(crate) async fn in_order<T, F: Future<Output = Result<T>>>(
        &self,
        requests: impl Iterator<Item = F>,
        mut each: impl FnMut(T) -> Result<bool>,
    ) -> Result<()> {
        let mut answers = stream::iter(requests).buffered(AT_ONCE);
        while let Some(answer) = answers.next().await {
            if !each(answer?)? {
                break;
            }
        }
        Ok(())
    }
}

/// Whether the system has refused something.
fn is_denied(error: &object_store::Error) -> bool {
    let mut causes = std::iter::successors(Some(error as &dyn std::error::Error), |error| {
        error.source()
    });
    causes.any(|cause| {
        let cause = cause.downcast_ref::<std::io::Error>();
        cause.is_some_and(|cause| cause.kind() == std::io::ErrorKind::PermissionDenied)
    })
}

/// Whether a file is one that is renamed once it is whole: `NAME#1`.
fn is_unfinished(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let number = name.rsplit_once('#').map(|(_, number)| number);
    number.is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit()))
}

/// An object is there already: is it the one that should be?
fn settled(found: Bytes, wanted: &Bytes) -> CreateOutcome {
    if found == wanted {
        CreateOutcome::Done
    } else {
        CreateOutcome::Taken(found)
    }
}

/// An error on one line: of a page of XML that a store has sent only what it is about.
fn one_line(text: &str) -> String {
    let element = |name: &str| {
        let (_, rest) = text.split_once(&format!("<{name}>"))?;
        rest.split_once('<').map(|(value, _)| value)
    };
    let told = [element("Code"), element("Message")];
    let told = told.iter().flatten().copied();
    let before = text.split("<?xml").next().unwrap_or_default();
    let words = before.split_whitespace().chain(told);
    words.collect::<Vec<_>>().join(" ")
}

fn directory_store(directory: &Path) -> Result<Arc<dyn ObjectStore>> {
    let missing = |why: String| {
        let directory = directory.display();
        let message =
            format!("{directory}: {why}; make the archive's directory: mkdir -p {directory}");
        Error::new(ErrorKind::InvalidInput, message)
    };
    if !directory.is_dir() {
        return Err(missing("not a directory".to_owned()));
    }
    let store = LocalFileSystem::new_with_prefix(directory);
    let store = store.map_err(|error| missing(one_line(&error.to_string())))?;
    Ok(Arc::new(store.with_fsync(true)))
}

fn s3_store(url: &ArchiveUrl, keys: Option<Keys>) -> Result<Arc<dyn ObjectStore>> {
    let StorePlace::S3 {
        bucket,
        endpoint,
        region,
        virtual_host,
        ..
    } = &url.place
    else {
        unreachable!("the caller has looked")
    };
    // Another part of the program may have set it already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        .with_virtual_hosted_style_request(*virtual_host)
        // Not all stores have it, and there is nothing to remove in bulk.
        .with_disable_bulk_delete(true)
        .with_retry(RetryConfig {
            backoff: BackoffConfig::default(),
            max_retries: TRIES,
            retry_timeout: REQUEST,
        });
    let mut options = ClientOptions::new()
        .with_timeout(REQUEST)
        .with_connect_timeout(CONNECT);
    if let Some(endpoint) = endpoint {
        builder = builder.with_endpoint(endpoint);
        options = options.with_allow_http(endpoint.starts_with("http://"));
    }
    if let Some(region) = region {
        builder = builder.with_region(region);
    }
    if let Some(keys) = keys {
        builder = builder
            .with_access_key_id(keys.id)
            .with_secret_access_key(keys.secret);
        if let Some(token) = keys.token {
            builder = builder.with_token(token);
        }
    }
    let store = builder.with_client_options(options).build();
    let store = store.map_err(|error| {
        let message = format!("{url}: {}", one_line(&error.to_string()));
        Error::new(ErrorKind::InvalidInput, message)
    })?;
    Ok(Arc::new(store))
}

/// Whether a connection was refused.
fn is_refused(error: &object_store::Error) -> bool {
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(error) = cause {
        let io = error.downcast_ref::<std::io::Error>();
        if io.is_some_and(|error| error.kind() == std::io::ErrorKind::ConnectionRefused) {
            return true;
        }
        cause = error.source();
    }
    false
}

/// What in the environment gives keys, or names who does; first the key itself.
const KEY_GIVERS: [&str; 4] = [
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
];

/// Keys of the file that the AWS command line keeps.
struct Keys {
    id: String,
    secret: String,
    token: Option<String>,
}

fn keys_of_profile() -> Option<Keys> {
    let text = std::fs::read_to_string(ArchiveUrl::keys_file()?).ok()?;
    let profile = std::env::var("AWS_PROFILE").unwrap_or_else(|_| "default".to_owned());
    keys_in(&text, &profile)
}

fn keys_in(text: &str, profile: &str) -> Option<Keys> {
    let (mut id, mut secret, mut token) = (None, None, None);
    let mut inside = false;
    for line in text.lines().map(str::trim) {
        if let Some(name) = line
            .strip_prefix('[')
            .and_then(|line| line.strip_suffix(']'))
        {
            inside = name.trim() == profile;
        } else if inside && let Some((key, value)) = line.split_once('=') {
            let value = Some(value.trim().to_owned());
            match key.trim() {
                "aws_access_key_id" => id = value,
                "aws_secret_access_key" => secret = value,
                "aws_session_token" => token = value,
                _ => {}
            }
        }
    }
    Some(Keys {
        id: id?,
        secret: secret?,
        token,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_those_of_the_profile() {
        let file = "[default]\naws_access_key_id = a\naws_secret_access_key=b\n\n[other]\n\
                    aws_access_key_id=c\naws_secret_access_key = d=e\naws_session_token=f\n";
        let keys = keys_in(file, "default").unwrap();
        assert_eq!(
            (keys.id.as_str(), keys.secret.as_str(), keys.token),
            ("a", "b", None)
        );
        let keys = keys_in(file, "other").unwrap();
        assert_eq!((keys.id.as_str(), keys.secret.as_str()), ("c", "d=e"));
        assert_eq!(keys.token.as_deref(), Some("f"));
        assert!(keys_in(file, "third").is_none());
    }
}
