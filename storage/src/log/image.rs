//! The image of an open disk: its file, and what that could not take.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::path::Path;

use crate::SECTOR_SIZE;
use crate::log::spill::Spill;
use crate::medium::file::{CachedFile, DataFile, ReadFile};
use crate::medium::mark::{ImageMark, Inode};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, RwLock};

/// A disk's image. As a [`DataFile`] it reads as image and [spill file](crate::log::spill) together; everything else
/// concerns the image alone.
#[derive(Debug)]
pub(crate) struct Image {
    file: Arc<dyn DataFile>,
    /// Whether there is a spill file, for readers that look without the lock.
    spilled: AtomicBool,
    spill: RwLock<Option<Arc<Spill>>>,
}

impl Image {
    pub(crate) fn new(file: Arc<dyn DataFile>, spill: Option<Spill>) -> Self {
        Self {
            file,
            spilled: AtomicBool::new(spill.is_some()),
            spill: RwLock::new(spill.map(Arc::new)),
        }
    }

    /// The image alone.
    pub(crate) fn file(&self) -> &Arc<dyn DataFile> {
        &self.file
    }

    /// Whether the image lacks bytes that are in a spill file.
    pub(crate) fn is_spilled(&self) -> bool {
        self.spilled.load(Ordering::Acquire)
    }

    /// The spill file.
    pub(crate) fn spill(&self) -> Option<Arc<Spill>> {
        if !self.is_spilled() {
            return None;
        }
        self.spill.read().expect("image lock").clone()
    }

    /// Uses this spill file from now on; or none, because the image has everything. Only the log's keeper does this,
    /// with no copy under way.
    pub(crate) fn set_spill(&self, spill: Option<Arc<Spill>>) {
        let mut own = self.spill.write().expect("image lock");
        self.spilled.store(spill.is_some(), Ordering::Release);
        *own = spill;
    }

    /// Calls `each` with the parts of a range of sectors, in order, and the file that has each, at the same offset as on
    /// the disk.
    pub(crate) fn visit(
        &self,
        sectors: Range<u64>,
        mut each: impl FnMut(Range<u64>, &Arc<dyn DataFile>),
    ) {
        match self.spill() {
            None => each(sectors, &self.file),
            Some(spill) => spill.visit(sectors, |part, spilled| {
                each(part, if spilled { spill.data() } else { &self.file });
            }),
        }
    }
}

impl ReadFile for Image {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        if !self.is_spilled() {
            return self.file.read_exact_at(buffer, offset);
        }
        let end = offset + buffer.len() as u64;
        let sectors = offset / SECTOR_SIZE..end.div_ceil(SECTOR_SIZE);
        // Not read while the map is locked: an image that fails may take long.
        let mut parts = Vec::new();
        self.visit(sectors, |part, file| parts.push((part, file.clone())));
        for (part, file) in parts {
            let part = (part.start * SECTOR_SIZE).max(offset)..(part.end * SECTOR_SIZE).min(end);
            let into = &mut buffer[(part.start - offset) as usize..(part.end - offset) as usize];
            file.read_exact_at(into, part.start)?;
        }
        Ok(())
    }

    /// That of the image alone.
    fn raw_fd(&self) -> RawFd {
        self.file.raw_fd()
    }
}

impl DataFile for Image {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        self.file.write_all_at(bytes, offset)
    }

    fn write_slices_at(
        &self,
        slices: &[io::IoSlice<'_>],
        offset: u64,
        durably: bool,
    ) -> io::Result<usize> {
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
        self.file.zero_range(offset, len, unmap)
    }

    fn inode(&self) -> io::Result<Inode> {
        self.file.inode()
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

    /// `None` while there is a spill file: the holes of the image are then not those of the disk.
    fn host(&self) -> Option<&File> {
        if self.is_spilled() {
            None
        } else {
            self.file.host()
        }
    }
}
