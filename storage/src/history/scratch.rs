//! Writes to a look, which go to a file that is thrown away with the look.
//!
//! The disk's bytes have the same offsets in the file. The file is sparse, so it takes only the
//! space of what was written.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;

use crate::SECTOR_SIZE;
use crate::error::{Error, Result};
use crate::medium::file::DataFile;
use crate::medium::host;
use crate::sync::{Arc, Mutex, MutexGuard};

/// Makes an unnamed file for the writes to a [`Look`](crate::Look), in `$TMPDIR` or `/var/tmp`. It
/// is gone once closed, even by a kill.
///
/// # Errors
/// If no such file can be made in the directory.
pub fn scratch_file() -> Result<File> {
    let directory = std::env::var_os("TMPDIR").filter(|named| !named.is_empty());
    let directory = PathBuf::from(directory.unwrap_or_else(|| "/var/tmp".into()));
    create_unnamed_file(&directory).map_err(|error| {
        let doing = "make a scratch file there; TMPDIR can name another directory";
        Error::io(doing, &directory, error)
    })
}

/// Makes an unnamed file in a directory.
fn create_unnamed_file(directory: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    let flags = OFlags::TMPFILE.bits() as i32;
    if let Ok(file) = options.clone().custom_flags(flags).open(directory) {
        return Ok(file);
    }
    // A few file systems can't do that. There, create a file and remove its name at once.
    let number = u64::from_le_bytes(host::random());
    let path = directory.join(format!("walvisor-scratch-{number:016x}"));
    let file = options.create_new(true).open(&path)?;
    std::fs::remove_file(&path)?;
    Ok(file)
}

/// What was written to a look, shared by its queues.
pub(crate) struct Scratch {
    file: Arc<File>,
    written: Mutex<ScratchMap>,
}

impl Scratch {
    /// Takes an empty file for a disk of `bytes` bytes.
    pub(crate) fn new(file: File, bytes: u64) -> io::Result<Self> {
        file.set_len(bytes)?;
        Ok(Self {
            file: Arc::new(file),
            written: Mutex::default(),
        })
    }

    pub(crate) fn file(&self) -> Arc<dyn DataFile> {
        self.file.clone()
    }

    pub(crate) fn layer(&self) -> MutexGuard<'_, ScratchMap> {
        self.written.lock().expect("scratch lock")
    }

    /// Reserves space for a write, so that it can't fail half-way for lack of it.
    pub(crate) fn reserve(&self, sectors: &Range<u64>) -> io::Result<()> {
        if self.layer().has_all(sectors.clone()) {
            return Ok(());
        }
        let (offset, len) = (sectors.start * SECTOR_SIZE, sectors.end - sectors.start);
        let len = len * SECTOR_SIZE;
        match rustix::fs::fallocate(&*self.file, FallocateFlags::empty(), offset, len) {
            Err(Errno::OPNOTSUPP) => Ok(()),
            reserved => Ok(reserved?),
        }
    }

    /// Makes sectors read as zeroes.
    pub(crate) fn zero(&self, sectors: Range<u64>) {
        self.layer().set(sectors.clone(), ScratchContent::Zero);
        // Free the space, best effort; these bytes are never read again.
        let (offset, len) = (sectors.start * SECTOR_SIZE, sectors.end - sectors.start);
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = rustix::fs::fallocate(&*self.file, mode, offset, len * SECTOR_SIZE);
    }
}

/// What the sectors of a range hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScratchContent {
    /// The bytes in the scratch file.
    Written,
    Zero,
}

/// The sectors that were written, or zeroed, in ranges that do not overlap.
#[derive(Debug, Default)]
pub(crate) struct ScratchMap {
    /// By first sector: the end, and the content.
    ranges: BTreeMap<u64, (u64, ScratchContent)>,
}

impl ScratchMap {
    /// Sets the content of a non-empty range.
    pub(crate) fn set(&mut self, sectors: Range<u64>, content: ScratchContent) {
        let Range { mut start, mut end } = sectors;
        // Join touching ranges of the same content; cut others to what lies outside.
        let touching = self.ranges.range(..=end).rev();
        let touching = touching.take_while(|(_, (old_end, _))| *old_end >= start);
        let touching: Vec<_> = touching.map(|(&first, &old)| (first, old)).collect();
        for (old_start, (old_end, old)) in touching {
            self.ranges.remove(&old_start);
            if old == content {
                (start, end) = (start.min(old_start), end.max(old_end));
                continue;
            }
            if old_start < start {
                self.ranges.insert(old_start, (start, old));
            }
            if old_end > end {
                self.ranges.insert(end, (old_end, old));
            }
        }
        self.ranges.insert(start, (end, content));
    }

    /// Calls `each` with the pieces of the range, in order, gaps included.
    pub(crate) fn visit(
        &self,
        sectors: Range<u64>,
        each: &mut impl FnMut(Range<u64>, Option<ScratchContent>),
    ) {
        let Range { mut start, end } = sectors;
        let before = self.ranges.range(..=start).next_back();
        let from = before.map_or(start, |(&first, _)| first);
        for (&first, &(last, content)) in self.ranges.range(from..end) {
            if last <= start {
                continue;
            }
            if first > start {
                each(start..first, None);
                start = first;
            }
            let part = start..last.min(end);
            start = part.end;
            each(part, Some(content));
        }
        if start < end {
            each(start..end, None);
        }
    }

    /// Whether all sectors were written.
    fn has_all(&self, sectors: Range<u64>) -> bool {
        let mut all = true;
        self.visit(sectors, &mut |_, content| {
            all &= content == Some(ScratchContent::Written);
        });
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scratch_file_has_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = create_unnamed_file(dir.path()).unwrap();
        DataFile::write_all_at(&file, &[1], 0).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(create_unnamed_file(&dir.path().join("missing")).is_err());
    }

    /// The map and a list of sectors agree, whatever is set.
    #[test]
    fn the_map_has_what_was_set_last() {
        let mut random = 1_u64;
        let mut below = |limit: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (random >> 33) % limit
        };
        for _ in 0..200 {
            let (mut layer, mut model) = (ScratchMap::default(), [None; 40]);
            for _ in 0..30 {
                let start = below(40);
                let end = start + 1 + below(40 - start);
                let content = [ScratchContent::Written, ScratchContent::Zero][below(2) as usize];
                layer.set(start..end, content);
                model[start as usize..end as usize].fill(Some(content));
                let from = below(40);
                let to = from + 1 + below(40 - from);
                let (mut at, mut last) = (from, None);
                layer.visit(from..to, &mut |part, content| {
                    assert!(part.start == at && part.end > at);
                    assert_ne!(last, Some(content), "neighbours are joined");
                    let is = |sector: &Option<ScratchContent>| *sector == content;
                    assert!(model[part.start as usize..part.end as usize].iter().all(is));
                    (at, last) = (part.end, Some(content));
                });
                assert_eq!(at, to);
            }
        }
    }
}
