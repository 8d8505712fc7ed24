//! The image of an open disk: its file, and what that could not take.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::time::Duration;

use crate::SECTOR_SIZE;
use crate::log::file_thread::{FileAnswer, FileThread};
use crate::log::spill::Spill;
use crate::medium::file::{DataFile, ReadFile};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, RwLock};

/// A disk's image. It reads as its file and the [spill file](crate::log::spill) together.
#[derive(Debug)]
pub(crate) struct DiskImage {
    /// The image alone.
    file: Arc<dyn DataFile>,
    /// Whether there is a spill file, for readers that look without the lock.
    spilled: AtomicBool,
    spill: RwLock<Option<Arc<Spill>>>,
    thread: FileThread,
}

impl DiskImage {
    pub(crate) fn new(file: Arc<dyn DataFile>, spill: Option<Arc<Spill>>) -> Self {
        Self {
            file,
            spilled: AtomicBool::new(spill.is_some()),
            spill: RwLock::new(spill),
            thread: FileThread::default(),
        }
    }

    /// The image alone.
    pub(crate) fn file(&self) -> &Arc<dyn DataFile> {
        &self.file
    }

    /// Begins an operation on the image in a thread of the image's own. Only the log's keeper does
    /// this.
    ///
    /// # Errors
    /// If the image has not answered an earlier one yet.
    pub(crate) fn begin<T: Send + 'static>(
        &self,
        operation: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<FileAnswer<T>> {
        if self.thread.is_busy() {
            return Err(unanswered());
        }
        // Only the host's files may not answer.
        let hosted = self.file.host().is_some() || self.file.chunk_gate().is_some();
        let here = !hosted || cfg!(feature = "shuttle");
        Ok(self.thread.begin(here, operation))
    }

    /// Carries out an operation on the image, and waits for it no longer than `limit`, if there is
    /// one. If it has not ended then, it goes on, and until it has ended no other begins.
    ///
    /// # Errors
    /// If it, or an earlier one, has not ended.
    pub(crate) fn within<T: Send + 'static>(
        &self,
        limit: Option<Duration>,
        operation: impl FnOnce() -> T + Send + 'static,
    ) -> io::Result<T> {
        match limit {
            None => Ok(operation()),
            Some(limit) => {
                let ended = self.begin(operation)?.wait(limit);
                ended.ok_or_else(unanswered)
            }
        }
    }

    /// Lets reads wait for some seconds more at most for what a restore is to fetch.
    pub(crate) fn limit_waits(&self) {
        if let Some(gate) = self.file.chunk_gate() {
            gate.limit_waits();
        }
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

    /// Uses this spill file from now on; or none, because the image has everything. Only the log's
    /// keeper does this, with no copy under way.
    pub(crate) fn set_spill(&self, spill: Option<Arc<Spill>>) {
        let mut own = self.spill.write().expect("image lock");
        self.spilled.store(spill.is_some(), Ordering::Release);
        *own = spill;
    }

    /// Where copies of the log write: the spill file if there is one, else the image. Both have a
    /// byte where the disk has it.
    pub(crate) fn target(&self) -> Arc<dyn DataFile> {
        match self.spill() {
            Some(spill) => spill.data().clone(),
            None => self.file.clone(),
        }
    }

    /// A copy has written these sectors to its [`target`](Self::target).
    pub(crate) fn note_written(&self, sectors: Range<u64>) {
        if let Some(spill) = self.spill() {
            spill.note(sectors);
        }
    }

    /// Calls `each` with the parts of a range of sectors, in order, and the file that has each, at
    /// the same offset as on the disk.
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

fn unanswered() -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, "the image does not answer")
}

impl ReadFile for DiskImage {
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

    /// `None` while there is a spill file: the holes of the image are then not those of the disk.
    fn host(&self) -> Option<&File> {
        if self.is_spilled() {
            None
        } else {
            self.file.host()
        }
    }
}
