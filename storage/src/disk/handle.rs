//! An open disk, which its ports share.

use std::io;
use std::os::fd::BorrowedFd;
use std::path::Path;

use crate::catalog::options::{Resize, check_size};
use crate::disk::allocation::{LIMIT, STEP, file_extents, push};
use crate::disk::port::Port;
use crate::error::{Error, Result, invalid};
use crate::index::Place;
use crate::log::disk_state::DiskState;
use crate::log::orders::KeeperTask;
use crate::log::state::Log;
use crate::sync::Arc;
use crate::sync::atomic::Ordering;
use crate::{
    Allocation, Backend, BackendQueue, Capabilities, Condition, Extent, LogCounters, SECTOR_SIZE,
};

/// An open disk of a [`Store`](crate::Store). Cheap to clone; all clones are one disk.
#[derive(Clone)]
pub struct Disk {
    pub(crate) log: Arc<Log>,
    pub(crate) state: Arc<DiskState>,
}

impl Disk {
    /// Opens a port for one thread.
    ///
    /// # Errors
    /// If the system refuses a ring, a thread or a descriptor.
    pub fn open_port(&self) -> Result<Port> {
        Port::new(&self.log, &self.state)
            .map_err(|error| Error::io("open a queue on the disk", &self.state.path, error))
    }

    /// Copies all that has been written so far to the base images of the disk's log, while requests go on. Returns
    /// the LSN up to which the images now hold everything.
    ///
    /// # Errors
    /// If the log had failed, is being closed, or the copy fails. Nothing is lost.
    pub fn checkpoint(&self) -> Result<u64> {
        let newest = self.log.lock().pipeline.appended();
        self.log.order(KeeperTask::Checkpoint(newest))?;
        Ok(newest)
    }

    /// Makes the disk longer while it is in use: `size` in bytes. The new part reads as zeroes. A crash leaves the
    /// old or the new size. A live disk does not shrink: see [`resize_disk`](crate::resize_disk).
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind) if the size is no multiple of 512, below the present one or more
    /// than the file system holds; or the files cannot be changed. The disk is then unchanged.
    pub fn grow(&self, size: u64) -> Result<Resize> {
        let disk = Arc::clone(&self.state);
        check_size(&disk.path, size)?;
        let old_size = disk.sectors() * SECTOR_SIZE;
        if size < old_size {
            return Err(invalid(format!(
                "{}: the disk is in use, so it cannot shrink from {old_size} to {size} bytes; stop the program that \
                 uses it, then run 'walvisor disk resize'",
                disk.path.display()
            )));
        }
        self.log.order(KeeperTask::Grow(disk, size))?;
        Ok(Resize { old_size, size })
    }

    /// Appends the extents of a range that only the base image holds.
    fn base_extents(&self, sector: u64, sectors: u64, extents: &mut Vec<Extent>) -> Result<()> {
        // SAFETY: the base image is open as long as `self.state`, which outlives this call.
        let base = unsafe { BorrowedFd::borrow_raw(self.state.base.raw_fd()) };
        file_extents(base, &self.state.path, sector, sectors, extents)
    }
}

impl Backend for Disk {
    fn sectors(&self) -> u64 {
        self.state.sectors()
    }

    fn capabilities(&self) -> Capabilities {
        let writable = !self.state.read_only;
        Capabilities {
            read_only: !writable,
            flush: true,
            write_cache_toggle: writable,
            discard: writable,
            write_zeroes: writable,
            // Zeroes are a record like any other. The data that they replace stays in older segments of the log until
            // those are reused, and in blocks that the file system frees.
            secure_erase: false,
        }
    }

    fn write_cache(&self) -> bool {
        self.state.write_cache.load(Ordering::Acquire)
    }

    fn set_write_cache(&self, on: bool) {
        self.state.write_cache.store(on, Ordering::Release);
    }

    fn open_queue(&self) -> io::Result<Box<dyn BackendQueue>> {
        Ok(Box::new(self.open_port()?))
    }

    /// The blocking engine reads in the submitting thread.
    fn blocks(&self) -> bool {
        self.log.medium.blocks()
    }

    /// [`MAX_REQUEST_BYTES`](crate::MAX_REQUEST_BYTES), or less if the log's segments are small.
    fn max_request_bytes(&self) -> usize {
        self.log.max_request_bytes()
    }

    fn extents(&self, sector: u64, sectors: u64, most: usize) -> io::Result<Vec<Extent>> {
        let end = sector
            .saturating_add(sectors.min(LIMIT))
            .min(self.sectors());
        let (mut extents, mut pieces) = (Vec::new(), Vec::new());
        let mut at = sector;
        // One extent more than asked for is looked up, so that the last one is reported in full.
        while at < end && extents.len() <= most {
            let step = STEP.min(end - at);
            self.state.index().pieces(at, step, &mut pieces);
            for piece in pieces.drain(..) {
                match piece.place {
                    Some(Place::Memory { .. } | Place::Log { .. }) => {
                        push(&mut extents, piece.sectors, Allocation::Data);
                    }
                    Some(Place::Zero { unmap: false }) => {
                        push(&mut extents, piece.sectors, Allocation::Zero);
                    }
                    Some(Place::Zero { unmap: true }) => {
                        push(&mut extents, piece.sectors, Allocation::Hole);
                    }
                    None => self.base_extents(piece.sector, piece.sectors, &mut extents)?,
                }
            }
            at += step;
        }
        extents.truncate(most.max(1));
        Ok(extents)
    }

    fn grow(&self, bytes: u64) -> io::Result<()> {
        Disk::grow(self, bytes)?;
        Ok(())
    }

    fn checkpoint(&self) -> io::Result<()> {
        Disk::checkpoint(self)?;
        Ok(())
    }

    fn log_counters(&self) -> Option<LogCounters> {
        Some(self.log.counters.snapshot())
    }

    fn log_dir(&self) -> Option<&Path> {
        Some(&self.log.dir)
    }

    fn condition(&self) -> Condition {
        self.log.condition()
    }

    fn is_unsafe(&self) -> bool {
        self.state.no_flush
    }
}
