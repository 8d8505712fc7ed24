//! Copying the base images of a log that may be in use.
//!
//! ```text
//!   root ─ copy chunks ... ─ root again ─ the log up to there is archived ─ manifest
//! ```
//! While the copy runs, checkpoints change the images. So the copy is of no moment; but all records
//! from its beginning to its end are in the log, which makes it exact: as if the log's owner had
//! been killed in the middle of a checkpoint.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use bytes::Bytes;
use walvisor_storage::{ImageReader, LogRoot, RootImage};

use crate::error::{Error, ErrorKind, Result};
use crate::layout::{self, ObjectId};
use crate::object::{self, BaseImage, MOST_CHUNK_BYTES};
use crate::remote::{AT_ONCE, Archive, ListEntry};

/// New chunks of a step while FLUSHes wait.
const FEW: usize = 2;
/// Bytes of a chunk of an image.
pub const CHUNK_BYTES: u64 = if cfg!(test) { 64 << 10 } else { 4 << 20 };

/// If a notice was not renewed for this long, whoever removed something was killed.
pub(crate) const NOTICE_LAPSE: Duration = Duration::from_secs(60);
/// Bytes of a manifest that name no chunk, at most.
const OTHER_BYTES: u64 = 1 << 20;

/// Chunks that the archive has, by hash, with their bytes as they are stored; 0: not known.
pub(crate) type KnownChunks = HashMap<String, u32>;

/// Bytes that name a chunk in a manifest, and say its size.
fn named_bytes(hash: &Option<String>) -> u64 {
    let size = "99999999,".len();
    hash.as_ref()
        .map_or("null,".len(), |hash| hash.len() + 3 + size) as u64
}

/// How far a copy of the base images has come, in bytes of the disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BaseProgress {
    /// Bytes that were read, or found to be holes.
    pub passed: u64,
    /// Bytes of all images.
    pub total: u64,
    /// Bytes of chunks that the archive did not have yet, before compression.
    pub sent: u64,
}

/// A copy under way.
pub(crate) struct BaseCopy {
    /// The root when the copy began.
    pub root: LogRoot,
    /// The part in which the first segment begins that the log needed then.
    pub first_part: ObjectId,
    pub first_sequence: u64,
    images: Vec<ImageCopy>,
    /// Bytes that the manifest needs to name the chunks.
    named: u64,
    pub began: Instant,
    /// Chunks that it has sent.
    sent: KnownChunks,
    pub progress: BaseProgress,
    /// The root when the copy had ended.
    pub ended: Option<LogRoot>,
}

struct ImageCopy {
    image: RootImage,
    reader: ImageReader,
    chunks: Vec<Option<String>>,
}

impl BaseCopy {
    /// Begins a copy.
    ///
    /// # Errors
    /// If an image can't be opened.
    pub(crate) fn new(root: LogRoot, first_part: ObjectId, first_sequence: u64) -> Result<Self> {
        refuse_spilled(&root)?;
        let images = root.images().into_iter().map(|image| {
            Ok(ImageCopy {
                reader: ImageReader::open(&image)?,
                image,
                chunks: Vec::new(),
            })
        });
        let images: Vec<_> = images.collect::<Result<_>>()?;
        let total = images.iter().map(|copy| copy.image.bytes).sum();
        Ok(Self {
            root,
            first_part,
            first_sequence,
            images,
            named: 0,
            began: Instant::now(),
            sent: KnownChunks::new(),
            progress: BaseProgress {
                total,
                ..BaseProgress::default()
            },
            ended: None,
        })
    }

    /// Copies some chunks; only a `few` while FLUSHes wait. `known`: the chunks of a manifest that
    /// stays until this one is there. Returns whether all are copied.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`]: the same chunks are copied by the next call.
    /// [`ErrorKind::InvalidInput`]: no manifest can name so many; nothing more is sent.
    pub(crate) fn step(
        &mut self,
        archive: &Archive,
        known: &KnownChunks,
        few: bool,
    ) -> Result<bool> {
        let (most_new, most) = if few {
            (FEW, 4 * FEW)
        } else {
            // A long hole takes many steps, so that the log is not forgotten meanwhile.
            (AT_ONCE, 64 * AT_ONCE)
        };
        let unfinished = |copy: &&mut ImageCopy| copy.next().is_some();
        let Some(copy) = self.images.iter_mut().find(unfinished) else {
            return Ok(true);
        };
        // Found in this step: hash and compressed bytes, and its place.
        let (mut found, mut new, mut passed, mut sent) = (Vec::new(), Vec::new(), 0, 0);
        while let Some(offset) = copy.at(found.len())
            && new.len() < most_new
            && found.len() < most
        {
            let bytes = copy.reader.read(offset, CHUNK_BYTES)?;
            passed += CHUNK_BYTES.min(copy.image.bytes - offset);
            let data = bytes.filter(|bytes| bytes.iter().any(|&byte| byte != 0));
            let hash = data.as_deref().map(object::hash);
            if let (Some(data), Some(hash)) = (&data, &hash)
                && !known.contains_key(hash)
                && !self.sent.contains_key(hash)
                && !new.iter().any(|(other, _)| other == hash)
            {
                sent += data.len() as u64;
                new.push((hash.clone(), Bytes::from(object::pack(data)?)));
            }
            found.push(hash);
        }
        let named = self.named + found.iter().map(named_bytes).sum::<u64>();
        if named > object::MOST_BYTES - OTHER_BYTES {
            return Err(object::too_large());
        }
        let puts = new.iter().map(|(hash, bytes)| async {
            let name = layout::chunk(hash);
            archive.put(&name, bytes).await
        });
        archive.block_on(archive.in_order(puts, |()| Ok(true)))?;
        let new = new.into_iter();
        self.sent
            .extend(new.map(|(hash, bytes)| (hash, bytes.len() as u32)));
        self.named = named;
        copy.chunks.extend(found);
        self.progress.passed += passed;
        self.progress.sent += sent;
        Ok(self.images.iter().all(|copy| copy.next().is_none()))
    }

    /// Bytes of a chunk, as it is stored, of those that it has sent and those `known`.
    pub(crate) fn stored(&self, hash: &str, known: &KnownChunks) -> u32 {
        let sent = self.sent.get(hash).or_else(|| known.get(hash));
        sent.copied().unwrap_or(0)
    }

    /// The images for the manifest.
    pub(crate) fn images(&self) -> Vec<BaseImage> {
        let images = self.images.iter().map(|copy| BaseImage {
            disk_id: copy.image.disk_id,
            name: image_name(&copy.image),
            bytes: copy.image.bytes,
            chunks: copy.chunks.clone(),
        });
        images.collect()
    }
}

impl ImageCopy {
    /// The offset of the next chunk.
    fn next(&self) -> Option<u64> {
        self.at(0)
    }

    /// The offset of the chunk after `more` others.
    fn at(&self, more: usize) -> Option<u64> {
        let offset = (self.chunks.len() + more) as u64 * CHUNK_BYTES;
        (offset < self.image.bytes).then_some(offset)
    }
}

/// Watches for notices that somebody removes what is too old. See [`expire`](crate::expire()).
///
/// Clocks of machines differ, so none counts here but this one's: a notice lives as long as it is
/// renewed.
pub(crate) struct NoticeWatch {
    /// When each was last written, by the store's clock, and since when that has not changed.
    seen: HashMap<String, (u64, Instant)>,
    /// One that has not changed for so long has ended.
    pub lapse: Duration,
}

impl NoticeWatch {
    pub(crate) fn new() -> Self {
        Self {
            seen: HashMap::new(),
            lapse: NOTICE_LAPSE,
        }
    }

    /// Looks at the notices that there are now. Returns the names of those that live, and of those
    /// whose process was killed.
    pub(crate) fn look(
        &mut self,
        notices: Vec<ListEntry>,
        now: Instant,
    ) -> (Vec<String>, Vec<String>) {
        let before = std::mem::take(&mut self.seen);
        let (mut live, mut ended) = (Vec::new(), Vec::new());
        for ListEntry {
            name, modified_us, ..
        } in notices
        {
            let same = before.get(&name).filter(|seen| seen.0 == modified_us);
            let since = same.map_or(now, |seen| seen.1);
            self.seen.insert(name.clone(), (modified_us, since));
            if same.is_some() && now.duration_since(since) >= self.lapse {
                ended.push(name);
            } else {
                live.push(name);
            }
        }
        (live, ended)
    }
}

/// The chunks of those named that the store lacks, or has with other bytes.
/// Each is named with its bytes, as they are stored; 0: not known. Of those that the store's list
/// has with that size, the bytes are taken for what was sent.
pub(crate) async fn lost_chunks<'a>(
    archive: &Archive,
    named: impl Iterator<Item = (&'a str, u32)>,
) -> Result<HashSet<String>> {
    let mut doubtful: HashMap<&str, u32> = named.collect();
    let listed = archive.visit(layout::CHUNKS, None, |chunk| {
        let hash = chunk.name.rsplit('/').next().unwrap_or_default();
        let stored = doubtful.get(hash).map(|&stored| u64::from(stored));
        if chunk.bytes > 0 && stored.is_some_and(|stored| stored == 0 || stored == chunk.bytes) {
            doubtful.remove(hash);
        }
    });
    listed.await?;
    let mut lost = HashSet::new();
    for hash in doubtful.into_keys() {
        // A list may lag behind, and have sizes of its own.
        let found = archive.get(&layout::chunk(hash)).await?;
        let bytes = found.and_then(|found| object::unpack(&found, MOST_CHUNK_BYTES as usize));
        if bytes.is_none_or(|bytes| object::hash(&bytes) != hash) {
            lost.insert(hash.to_owned());
        }
    }
    Ok(lost)
}

/// Refuses images that lack bytes.
pub(crate) fn refuse_spilled(root: &LogRoot) -> Result<()> {
    match root.images().iter().find(|image| image.spilled) {
        None => Ok(()),
        Some(image) => Err(Error::new(
            ErrorKind::Local,
            format!(
                "{}: the image fails, and what it lacks is in a file beside the log; it can be \
                 archived once that was copied back",
                image.path.display()
            ),
        )),
    }
}

fn image_name(image: &RootImage) -> String {
    let name = image.path.file_name().unwrap_or_default();
    name.to_string_lossy().into_owned()
}
