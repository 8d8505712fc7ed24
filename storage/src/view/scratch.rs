//! Writes to a look, which go to a file that is thrown away with the look.
//!
//! The disk's bytes have the same offsets in the file. The file is sparse, so it takes only the
//! space of what was written.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, OFlags};
use rustix::io::Errno;

use crate::SECTOR_SIZE;
use crate::error::{Error, Result};
use crate::index::{ExtentLimit, SectorMap};
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
    written: Mutex<SectorMap<ScratchContent>>,
    /// What the map may take with others.
    limit: ExtentLimit,
}

impl Scratch {
    /// Takes an empty file for a disk of `bytes` bytes.
    pub(crate) fn new(file: File, bytes: u64, limit: ExtentLimit) -> io::Result<Self> {
        file.set_len(bytes)?;
        let mut written = SectorMap::default();
        written.count_in(&limit.memory);
        Ok(Self {
            file: Arc::new(file),
            written: Mutex::new(written),
            limit,
        })
    }

    pub(crate) fn file(&self) -> Arc<dyn DataFile> {
        self.file.clone()
    }

    pub(crate) fn layer(&self) -> MutexGuard<'_, SectorMap<ScratchContent>> {
        self.written.lock().expect("scratch lock")
    }

    /// Reserves space for a write, so that it can't fail half-way for lack of it.
    ///
    /// # Errors
    /// If there is none, in the file system or for the map.
    pub(crate) fn reserve(&self, sectors: &Range<u64>) -> io::Result<()> {
        if self
            .layer()
            .has_all(sectors.clone(), ScratchContent::Written)
        {
            return Ok(());
        }
        self.refuse_full()?;
        let (offset, len) = (sectors.start * SECTOR_SIZE, sectors.end - sectors.start);
        let len = len * SECTOR_SIZE;
        match rustix::fs::fallocate(&*self.file, FallocateFlags::empty(), offset, len) {
            Err(Errno::OPNOTSUPP) => Ok(()),
            reserved => Ok(reserved?),
        }
    }

    /// Refuses to let the map grow beyond its memory.
    fn refuse_full(&self) -> io::Result<()> {
        if self.limit.has_room_for_sectors() {
            return Ok(());
        }
        Err(io::Error::other(format!(
            "looks have been written to in so many places that the map of these takes half of the \
             {} bytes that index-memory allows; end looks, or open the disk with a larger \
             index-memory",
            self.limit.most
        )))
    }

    /// Makes sectors read as zeroes.
    ///
    /// # Errors
    /// If the map has no room.
    pub(crate) fn zero(&self, sectors: Range<u64>) -> io::Result<()> {
        self.refuse_full()?;
        self.layer().set(sectors.clone(), ScratchContent::Zero);
        // Free the space, best effort; these bytes are never read again.
        let (offset, len) = (sectors.start * SECTOR_SIZE, sectors.end - sectors.start);
        let mode = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let _ = rustix::fs::fallocate(&*self.file, mode, offset, len * SECTOR_SIZE);
        Ok(())
    }
}

/// What the sectors of a range hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScratchContent {
    /// The bytes in the scratch file.
    Written,
    Zero,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::IndexMemory;

    #[test]
    fn a_scratch_file_has_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = create_unnamed_file(dir.path()).unwrap();
        DataFile::write_all_at(&file, &[1], 0).unwrap();
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(create_unnamed_file(&dir.path().join("missing")).is_err());
    }

    /// Whoever writes to a look in ever other places does not take the memory of the process.
    #[test]
    fn a_map_of_writes_has_a_limit() {
        let dir = tempfile::tempdir().unwrap();
        let limit = ExtentLimit::beside(&IndexMemory::default(), 1 << 20, dir.path());
        let file = create_unnamed_file(dir.path()).unwrap();
        let scratch = Scratch::new(file, 1 << 40, limit.clone()).unwrap();
        let write = |sector| {
            scratch.reserve(&(sector..sector + 1)).map(|()| {
                let written = ScratchContent::Written;
                scratch.layer().set(sector..sector + 1, written);
            })
        };
        let first = (0..1 << 20).map(|at| at * 2).find(|at| write(*at).is_err());
        let first = first.expect("the map is full");
        // A range more at most.
        assert!(limit.memory.bytes() < (1 << 19) + 100);
        let refused = write(first).unwrap_err().to_string();
        assert!(refused.contains("index-memory"), "{refused}");
        assert!(scratch.zero(first..first + 1).is_err());
        // What needs no memory goes on, and what was written is there.
        write(first - 2).unwrap();
        drop(scratch);
        assert_eq!(limit.memory.bytes(), 0);
    }
}
