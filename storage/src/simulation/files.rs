//! The simulated medium as the store uses it: files, and the segments of a log.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

use super::bytes::SECTOR;
use super::medium::{LateWrite, World, due};
use super::names::DIRECTORY;
use crate::Buffer;
use crate::medium::file::{CachedFile, DataFile, ReadFile, Segment};
use crate::medium::filesystem::{FileSystem, OpenMode, PathKind, SIMULATED};
use crate::medium::mark::{ImageMark, Inode};
use crate::mutant::{Mutant, planted};
use crate::sync::atomic::{AtomicBool, Ordering};
use crate::sync::{Arc, Event, Mutex, MutexGuard};

/// The medium as the store uses it; all clones share one world.
#[derive(Clone, Debug)]
pub(super) struct SimulatedMedium {
    pub world: Arc<Mutex<World>>,
}

impl SimulatedMedium {
    pub(super) fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().expect("world lock")
    }

    /// Makes this medium the thread's file system until the returned guard is dropped.
    pub(super) fn enter(&self) -> FileSystemGuard {
        let files: Arc<dyn FileSystem> = Arc::new(self.clone());
        FileSystemGuard(SIMULATED.replace(Some(files)))
    }

    pub(super) fn file(&self, name: &str) -> Box<dyn DataFile> {
        let index = self.lock().find(name);
        self.numbered(index)
    }

    fn numbered(&self, index: usize) -> Box<dyn DataFile> {
        Box::new(SimulatedFile {
            medium: self.clone(),
            index,
            descriptor: self.lock().describe(index),
            locked: AtomicBool::new(false),
        })
    }

    /// Whether engines are the real ones, on files of this medium. `event` is signalled when power
    /// is lost.
    pub(super) fn blocking(&self, event: &Event) -> io::Result<bool> {
        let woken = Arc::new(event.try_clone()?);
        let mut world = self.lock();
        world.events.push(woken);
        Ok(world.blocking)
    }

    /// Syncs a range, as a write with `RWF_DSYNC` does on a medium with FUA.
    pub(super) fn sync_range(
        &self,
        segment: &Segment,
        offset: u64,
        len: usize,
    ) -> io::Result<Option<Buffer>> {
        let range = offset as usize..offset as usize + len;
        let mut world = self.lock();
        world.sync(descriptor(segment.file.as_ref()), Some(range))?;
        Ok(None)
    }

    /// Leaves a write in flight: the process is killed.
    pub(super) fn leave_in_flight(&self, file: &dyn DataFile, offset: u64, bytes: Vec<u8>) {
        let mut world = self.lock();
        let file = world.file_of(descriptor(file));
        world.late.push(LateWrite {
            file,
            offset,
            bytes,
        });
    }
}

/// Returned by [`SimulatedMedium::enter`]. Holds the thread's former file system.
pub(super) struct FileSystemGuard(Option<Arc<dyn FileSystem>>);

impl Drop for FileSystemGuard {
    fn drop(&mut self) {
        SIMULATED.set(self.0.take());
    }
}

/// The number of a simulated file's descriptor.
fn descriptor(file: &dyn DataFile) -> usize {
    (file.raw_fd() - FIRST_DESCRIPTOR) as usize
}

/// The first descriptor of simulated files: these numbers are open in no process.
const FIRST_DESCRIPTOR: RawFd = 1 << 30;

#[derive(Debug)]
struct SimulatedFile {
    medium: SimulatedMedium,
    index: usize,
    descriptor: usize,
    locked: AtomicBool,
}

impl Drop for SimulatedFile {
    fn drop(&mut self) {
        if *self.locked.get_mut() {
            let mut world = self.medium.lock();
            let mut readers = world.shared.iter();
            match readers.position(|&locked| locked == self.index) {
                Some(place) => drop(world.shared.swap_remove(place)),
                None => world.locked.retain(|&locked| locked != self.index),
            }
        }
    }
}

impl SimulatedMedium {
    /// Reads from a file, past the page cache unless `from_cache`.
    fn read(
        &self,
        file: usize,
        buffer: &mut [u8],
        offset: u64,
        from_cache: bool,
    ) -> io::Result<()> {
        let mut world = self.lock();
        if world.crashed {
            return Err(io::Error::other("power lost"));
        }
        world.land_some();
        if due(&mut world.fail_read) {
            world.failed_read = true;
            world.fail("read")?;
        }
        world.bytes_read += buffer.len() as u64;
        if world.read(file, buffer, offset as usize, from_cache) {
            Ok(())
        } else {
            Err(io::ErrorKind::UnexpectedEof.into())
        }
    }

    /// Writes all or a part of `slices`, past the page cache unless `to_cache`.
    fn write(
        &self,
        file: usize,
        slices: &[io::IoSlice<'_>],
        offset: u64,
        to_cache: bool,
    ) -> io::Result<usize> {
        let slices: Vec<&[u8]> = slices.iter().map(|slice| &slice[..]).collect();
        let bytes = slices.concat();
        let mut world = self.lock();
        let sectors = bytes.len() / SECTOR;
        let part = if world.short_writes && sectors > 1 && world.random.one_in(3) {
            1 + world.random.below(sectors as u64 - 1) as usize
        } else {
            sectors
        };
        world.write(file, &bytes[..part * SECTOR], offset, to_cache)?;
        Ok(part * SECTOR)
    }
}

impl ReadFile for SimulatedFile {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.medium.read(self.index, buffer, offset, false)
    }

    fn raw_fd(&self) -> RawFd {
        FIRST_DESCRIPTOR + self.descriptor as RawFd
    }

    fn host(&self) -> Option<&File> {
        None
    }
}

/// A file through the simulated page cache.
#[derive(Debug)]
struct SimulatedCache {
    medium: SimulatedMedium,
    index: usize,
    descriptor: usize,
    /// The descriptor that it was opened by.
    syncing: usize,
}

impl ReadFile for SimulatedCache {
    fn read_exact_at(&self, buffer: &mut [u8], offset: u64) -> io::Result<()> {
        self.medium.read(self.index, buffer, offset, true)
    }

    fn raw_fd(&self) -> RawFd {
        FIRST_DESCRIPTOR + self.descriptor as RawFd
    }

    fn host(&self) -> Option<&File> {
        None
    }
}

impl CachedFile for SimulatedCache {
    fn write_slices_at(&self, slices: &[io::IoSlice<'_>], offset: u64) -> io::Result<usize> {
        self.medium.write(self.index, slices, offset, true)
    }

    fn write_back(&self, range: Range<u64>) -> io::Result<()> {
        let (range, mut world) = (range.start as usize..range.end as usize, self.medium.lock());
        if planted(Mutant::WriteBackTakesError) {
            // Its own result comes too late for the following sync.
            let _ = world.write_back(self.syncing, range);
            return Ok(());
        }
        world.write_back(self.descriptor, range)
    }

    fn read_ahead(&self, _offset: u64, _len: u64) {}
}

impl DataFile for SimulatedFile {
    fn write_all_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.medium.lock().write(self.index, bytes, offset, false)
    }

    fn write_slices_at(
        &self,
        slices: &[io::IoSlice<'_>],
        offset: u64,
        durably: bool,
    ) -> io::Result<usize> {
        let written = self.medium.write(self.index, slices, offset, false)?;
        if durably {
            let range = offset as usize..offset as usize + written;
            self.medium.lock().sync(self.descriptor, Some(range))?;
        }
        Ok(written)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.medium.lock().sync(self.descriptor, None)
    }

    fn drop_cache(&self) -> io::Result<()> {
        let mut world = self.medium.lock();
        let segment = world.is_segment(self.index);
        if segment && planted(Mutant::RecoverySkipsSync) {
            return Ok(());
        }
        world.sync(self.descriptor, None)?;
        if !(segment && planted(Mutant::RecoveryTrustsCache)) {
            world.drop_clean(self.index);
        }
        Ok(())
    }

    fn len(&self) -> io::Result<u64> {
        Ok(self.medium.lock().files[self.index].current.len() as u64)
    }

    fn set_len(&self, len: u64) -> io::Result<()> {
        self.medium.lock().set_len(self.index, len)
    }

    fn allocate(&self, len: u64) -> io::Result<()> {
        self.medium.lock().allocate(self.index, len)
    }

    fn sync_all(&self) -> io::Result<()> {
        self.medium.lock().sync_all(self.descriptor)
    }

    fn try_lock(&self, shared: bool) -> io::Result<bool> {
        let mut world = self.medium.lock();
        if world.locked.contains(&self.index) || !shared && world.shared.contains(&self.index) {
            return Ok(false);
        }
        if world.is_segment(self.index) && planted(Mutant::SegmentsNotLocked) {
            return Ok(true);
        }
        // A killed process's writes in flight hold the lock until they are done.
        world.await_late(self.index);
        if shared {
            world.shared.push(self.index)
        } else {
            world.locked.push(self.index)
        }
        self.locked.store(true, Ordering::Relaxed);
        Ok(true)
    }

    fn zero_range(&self, offset: u64, len: u64, _unmap: bool) -> io::Result<()> {
        self.write_all_at(&vec![0; len as usize], offset)
    }

    fn inode(&self) -> io::Result<Inode> {
        let number = 1 + self.index as u64;
        Ok(Inode {
            device: 1,
            number,
            born: number,
            written: self.medium.lock().modified(self.index),
        })
    }

    fn read_mark(&self) -> io::Result<Option<ImageMark>> {
        let world = self.medium.lock();
        let mark = world.files[self.index].mark();
        Ok(mark.filter(|_| !world.without_attributes))
    }

    fn write_mark(&self, mark: Option<&ImageMark>) -> io::Result<bool> {
        let mut world = self.medium.lock();
        if world.without_attributes {
            return Ok(false);
        }
        world.set_mark(self.index, mark.copied())?;
        Ok(true)
    }

    fn open_cached(&self, _path: &Path) -> io::Result<Box<dyn CachedFile>> {
        let mut world = self.medium.lock();
        if world.without_cache {
            return Err(io::Error::from_raw_os_error(libc::EMFILE));
        }
        let descriptor = world.describe(self.index);
        Ok(Box::new(SimulatedCache {
            medium: self.medium.clone(),
            index: self.index,
            descriptor,
            syncing: self.descriptor,
        }))
    }
}

impl FileSystem for SimulatedMedium {
    fn open(&self, path: &Path, how: OpenMode) -> io::Result<Box<dyn DataFile>> {
        let index = self.lock().open(path, how)?;
        Ok(self.numbered(index))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.lock().create_dir(path)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.lock().rename(from, to, true)
    }

    fn rename_new(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.lock().rename(from, to, false)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.lock().remove(path)
    }

    fn names(&self, dir: &Path) -> io::Result<Vec<OsString>> {
        let world = self.lock();
        if world.names.has_directory(dir) {
            Ok(world.names.in_directory(dir))
        } else {
            Err(io::ErrorKind::NotFound.into())
        }
    }

    fn kind(&self, path: &Path) -> io::Result<PathKind> {
        match self.lock().names.get(path) {
            None => Err(io::ErrorKind::NotFound.into()),
            Some(DIRECTORY) => Ok(PathKind::Other),
            Some(_) => Ok(PathKind::File),
        }
    }

    fn exists(&self, path: &Path) -> io::Result<bool> {
        Ok(self.lock().names.get(path).is_some())
    }

    fn real_path(&self, path: &Path) -> io::Result<PathBuf> {
        let there = path.parent().is_none() || self.exists(path)?;
        if there {
            Ok(path.to_owned())
        } else {
            Err(io::ErrorKind::NotFound.into())
        }
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.lock().sync_dir(dir)
    }
}
