//! A disk in memory: the fastest backend, and the only one that can lose power on request.
//!
//! ```text
//!   chunks of 64 KiB, a lock each; a chunk of zeroes takes no memory
//!   [ data ][ none ][ data ][ none ] …
//!       └─ with power loss: the contents that a sector had before it was last made durable
//! ```
//!
//! ```
//! use walvisor_block::ram::RamDisk;
//! use walvisor_block::{Backend, Buffer, Operation, flush};
//!
//! let disk = RamDisk::with_power_loss(8, true);
//! let mut queue = disk.open_queue()?;
//! let mut write = |byte| {
//!     let data = Buffer::from(&[byte; 512][..]);
//!     queue.submit(0, Operation::Write { sector: 0, data });
//! };
//! write(1);
//! flush(&disk)?;
//! write(2);
//! disk.power_loss();
//! queue.submit(1, Operation::Read { sector: 0, sectors: 1 });
//! let mut done = Vec::new();
//! queue.completions(&mut done);
//! let read = done.pop().unwrap().result.unwrap().unwrap();
//! assert_eq!(read[..], [1; 512]);
//! # std::io::Result::Ok(())
//! ```

use std::collections::BTreeMap;
use std::io;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::memory::MemoryReservation;
use crate::{
    Backend, BackendQueue, Buffer, Capabilities, Completion, Failure, MAX_REQUEST_BYTES, Operation,
    SECTOR_SIZE, check_range, descriptor,
};

/// Bytes in a chunk.
const CHUNK_LEN: u64 = 64 << 10;
const SECTOR_LEN: usize = SECTOR_SIZE as usize;

/// A RAM disk. Clones are the same disk.
///
/// Even empty, each 64 KiB take a few bytes in a table. So a disk much larger than the machine's
/// memory can't be made: the constructor panics, or the process runs out of memory.
///
/// Its medium is memory, and requests are applied on submission, so FLUSH has nothing to do.
/// [`with_power_loss`](Self::with_power_loss) adds a volatile write cache: then
/// [`power_loss`](Self::power_loss) undoes every write that was not made durable by a FLUSH or by
/// writethrough mode.
#[derive(Clone)]
pub struct RamDisk {
    shared: Arc<RamDiskState>,
}

struct RamDiskState {
    sectors: u64,
    read_only: bool,
    toggle: bool,
    write_cache: AtomicBool,
    chunks: Vec<RwLock<Option<Buffer>>>,
    /// By sector, the medium's contents where the cache differs. `None`: the disk can't lose power.
    durable: Option<Mutex<BTreeMap<u64, [u8; SECTOR_LEN]>>>,
    _memory: Option<MemoryReservation>,
}

impl RamDisk {
    /// An empty disk of `sectors` sectors, in writeback mode.
    pub fn new(sectors: u64) -> Self {
        Self::build(sectors, Vec::new(), false, true, false, None)
    }

    /// As [`new`](Self::new), of memory that is reserved for as long as the disk exists.
    pub fn reserved(sectors: u64, memory: MemoryReservation) -> Self {
        Self::build(sectors, Vec::new(), false, true, false, Some(memory))
    }

    /// An empty disk with a volatile write cache that [`power_loss`](Self::power_loss) loses.
    /// `toggle`: the cache can be switched off.
    pub fn with_power_loss(sectors: u64, toggle: bool) -> Self {
        Self::build(sectors, Vec::new(), false, toggle, true, None)
    }

    /// An empty disk of `sectors` sectors that refuses writes.
    pub fn empty_read_only(sectors: u64) -> Self {
        Self::build(sectors, Vec::new(), true, true, false, None)
    }

    /// A disk that holds `contents`, rounded up to whole sectors, and refuses writes.
    pub fn read_only(contents: &[u8]) -> Self {
        let sectors = (contents.len() as u64).div_ceil(SECTOR_SIZE);
        let chunks = contents
            .chunks(CHUNK_LEN as usize)
            .map(|bytes| {
                let mut chunk = Buffer::zeroed(CHUNK_LEN as usize);
                chunk[..bytes.len()].copy_from_slice(bytes);
                RwLock::new(Some(chunk))
            })
            .collect();
        Self::build(sectors, chunks, true, true, false, None)
    }

    fn build(
        sectors: u64,
        mut chunks: Vec<RwLock<Option<Buffer>>>,
        read_only: bool,
        toggle: bool,
        power_loss: bool,
        memory: Option<MemoryReservation>,
    ) -> Self {
        let count = sectors.saturating_mul(SECTOR_SIZE).div_ceil(CHUNK_LEN);
        chunks.resize_with(count as usize, RwLock::default);
        Self {
            shared: Arc::new(RamDiskState {
                sectors,
                read_only,
                toggle,
                write_cache: AtomicBool::new(true),
                chunks,
                durable: power_loss.then(Mutex::default),
                _memory: memory,
            }),
        }
    }

    /// Loses power: every sector goes back to its last durable contents. No effect without a
    /// volatile cache.
    pub fn power_loss(&self) {
        let Some(durable) = &self.shared.durable else {
            return;
        };
        let mut durable = durable.lock().unwrap_or_else(PoisonError::into_inner);
        for (sector, bytes) in std::mem::take(&mut *durable) {
            self.shared.write(sector * SECTOR_SIZE, &bytes);
        }
    }
}

impl RamDiskState {
    /// Splits `[offset, offset + len)` at chunk boundaries and calls `each` with the chunk, the
    /// offset in it and the range of the request.
    fn pieces(
        &self,
        offset: u64,
        len: u64,
        mut each: impl FnMut(&RwLock<Option<Buffer>>, usize, std::ops::Range<usize>),
    ) {
        let mut done = 0;
        while done < len {
            let at = offset + done;
            let within = at % CHUNK_LEN;
            let now = (CHUNK_LEN - within).min(len - done);
            let range = done as usize..(done + now) as usize;
            each(
                &self.chunks[(at / CHUNK_LEN) as usize],
                within as usize,
                range,
            );
            done += now;
        }
    }

    fn read(&self, offset: u64, bytes: &mut [u8]) {
        self.pieces(offset, bytes.len() as u64, |chunk, at, range| {
            let chunk = chunk.read().unwrap_or_else(PoisonError::into_inner);
            let target = &mut bytes[range];
            match &*chunk {
                Some(data) => target.copy_from_slice(&data[at..at + target.len()]),
                None => target.fill(0),
            }
        });
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        self.pieces(offset, bytes.len() as u64, |chunk, at, range| {
            let mut chunk = chunk.write().unwrap_or_else(PoisonError::into_inner);
            let data = chunk.get_or_insert_with(|| Buffer::zeroed(CHUNK_LEN as usize));
            data[at..at + range.len()].copy_from_slice(&bytes[range]);
        });
    }

    /// Writes zeroes. With `release`, whole chunks are freed; without, they are overwritten.
    fn zero(&self, offset: u64, len: u64, release: bool) {
        self.pieces(offset, len, |chunk, at, range| {
            let mut chunk = chunk.write().unwrap_or_else(PoisonError::into_inner);
            if release && range.len() as u64 == CHUNK_LEN {
                *chunk = None;
            } else if let Some(data) = chunk.as_mut() {
                data[at..at + range.len()].fill(0);
            }
        });
    }

    /// Applies a change to `[sector, sector + sectors)`, after saving the durable contents if the
    /// disk can lose power.
    fn change(&self, sector: u64, sectors: u64, apply: impl FnOnce()) {
        let Some(durable) = &self.durable else {
            return apply();
        };
        // The lock serializes changes of the same sector, and changes with FLUSH.
        let mut durable = durable.lock().unwrap_or_else(PoisonError::into_inner);
        if self.write_cache.load(Ordering::SeqCst) {
            for sector in sector..sector + sectors {
                durable.entry(sector).or_insert_with(|| {
                    let mut bytes = [0; SECTOR_LEN];
                    self.read(sector * SECTOR_SIZE, &mut bytes);
                    bytes
                });
            }
        } else {
            durable.clear();
        }
        apply();
    }

    fn flush(&self) {
        if let Some(durable) = &self.durable {
            durable
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .clear();
        }
    }

    fn erase(&self, sector: u64, sectors: u32, release: bool) -> Result<(), Failure> {
        let sectors = u64::from(sectors);
        check_range(sector, sectors, self.sectors)?;
        let (offset, len) = (sector * SECTOR_SIZE, sectors * SECTOR_SIZE);
        self.change(sector, sectors, || self.zero(offset, len, release));
        Ok(())
    }

    fn run(&self, operation: Operation) -> Result<Option<Buffer>, Failure> {
        if self.read_only && !matches!(operation, Operation::Read { .. } | Operation::Flush) {
            return Err(Failure::ReadOnly);
        }
        match operation {
            Operation::Read { sector, sectors } => {
                check_range(sector, sectors.into(), self.sectors)?;
                let len = sectors as usize * SECTOR_LEN;
                if len > MAX_REQUEST_BYTES {
                    return Err(Failure::TooLarge);
                }
                let mut data = Buffer::try_for_overwrite(len).map_err(|_| Failure::Io)?;
                self.read(sector * SECTOR_SIZE, &mut data);
                return Ok(Some(data));
            }
            Operation::Write { sector, data } => {
                if data.len() > MAX_REQUEST_BYTES || !data.len().is_multiple_of(SECTOR_LEN) {
                    return Err(Failure::TooLarge);
                }
                let sectors = (data.len() / SECTOR_LEN) as u64;
                check_range(sector, sectors, self.sectors)?;
                self.change(sector, sectors, || self.write(sector * SECTOR_SIZE, &data));
            }
            Operation::Discard { sector, sectors } => self.erase(sector, sectors, true)?,
            Operation::WriteZeroes {
                sector,
                sectors,
                unmap,
            } => self.erase(sector, sectors, unmap)?,
            Operation::Flush => self.flush(),
        }
        Ok(None)
    }
}

impl Backend for RamDisk {
    fn sectors(&self) -> u64 {
        self.shared.sectors
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            read_only: self.shared.read_only,
            flush: true,
            write_cache_toggle: self.shared.toggle,
            discard: true,
            write_zeroes: true,
            // The volatile cache keeps a copy of the old contents until a FLUSH, which frees it
            // without erasing it.
            secure_erase: self.shared.durable.is_none(),
        }
    }

    fn write_cache(&self) -> bool {
        self.shared.write_cache.load(Ordering::SeqCst)
    }

    fn set_write_cache(&self, on: bool) {
        self.shared.write_cache.store(on, Ordering::SeqCst);
    }

    fn open_queue(&self) -> io::Result<Box<dyn BackendQueue>> {
        Ok(Box::new(RamQueue {
            shared: Arc::clone(&self.shared),
            event: EventFd::new(EFD_NONBLOCK)?,
            done: Vec::new(),
        }))
    }
}

/// A queue of a RAM disk. Every request ends on submission.
struct RamQueue {
    shared: Arc<RamDiskState>,
    /// Never readable: no request ends later.
    event: EventFd,
    done: Vec<Completion>,
}

impl BackendQueue for RamQueue {
    fn submit(&mut self, token: u64, operation: Operation) {
        let result = self.shared.run(operation);
        self.done.push(Completion { token, result });
    }

    fn kick(&mut self) {}

    fn event(&self) -> BorrowedFd<'_> {
        descriptor(&self.event)
    }

    fn completions(&mut self, done: &mut Vec<Completion>) {
        done.append(&mut self.done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(disk: &RamDisk, operation: Operation) -> Result<Option<Buffer>, Failure> {
        let mut queue = disk.open_queue().expect("a queue");
        queue.submit(7, operation);
        queue.kick();
        let mut done = Vec::new();
        queue.completions(&mut done);
        assert_eq!(done.len(), 1);
        let completion = done.remove(0);
        assert_eq!(completion.token, 7);
        completion.result
    }

    fn write(disk: &RamDisk, sector: u64, byte: u8, sectors: usize) {
        let data = Buffer::from(vec![byte; sectors * SECTOR_LEN].as_slice());
        run(disk, Operation::Write { sector, data }).expect("a write");
    }

    fn bytes(disk: &RamDisk, sector: u64, sectors: u32) -> Vec<u8> {
        run(disk, Operation::Read { sector, sectors })
            .expect("a read")
            .expect("data")
            .to_vec()
    }

    #[test]
    fn what_was_written_is_read_across_chunks() {
        let disk = RamDisk::new(1024);
        write(&disk, 100, 0x5a, 300);
        let all = bytes(&disk, 0, 1024);
        for (sector, bytes) in all.chunks(SECTOR_LEN).enumerate() {
            let expected = if (100..400).contains(&sector) {
                0x5a
            } else {
                0
            };
            assert!(
                bytes.iter().all(|&byte| byte == expected),
                "sector {sector}"
            );
        }
        run(
            &disk,
            Operation::Discard {
                sector: 120,
                sectors: 200,
            },
        )
        .expect("a discard");
        let all = bytes(&disk, 0, 1024);
        for (sector, bytes) in all.chunks(SECTOR_LEN).enumerate() {
            let kept = (100..120).contains(&sector) || (320..400).contains(&sector);
            let expected = if kept { 0x5a } else { 0 };
            assert!(
                bytes.iter().all(|&byte| byte == expected),
                "sector {sector}"
            );
        }
    }

    #[test]
    fn ranges_are_checked() {
        let disk = RamDisk::new(8);
        for (sector, sectors) in [(8, 1), (7, 2), (0, 0), (u64::MAX, 1), (1 << 55, 1)] {
            let result = run(&disk, Operation::Read { sector, sectors });
            assert_eq!(
                result.err(),
                Some(Failure::OutOfRange),
                "{sector} + {sectors}"
            );
            let result = run(&disk, Operation::Discard { sector, sectors });
            assert_eq!(
                result.err(),
                Some(Failure::OutOfRange),
                "{sector} + {sectors}"
            );
        }
    }

    #[test]
    fn power_loss_takes_what_was_not_flushed() {
        let disk = RamDisk::with_power_loss(8, true);
        write(&disk, 0, 1, 4);
        run(&disk, Operation::Flush).expect("a flush");
        write(&disk, 1, 2, 1);
        run(
            &disk,
            Operation::Discard {
                sector: 2,
                sectors: 1,
            },
        )
        .expect("a discard");
        assert_eq!(bytes(&disk, 1, 1)[0], 2);
        disk.power_loss();
        assert!(bytes(&disk, 0, 4).iter().all(|&byte| byte == 1));

        disk.set_write_cache(false);
        write(&disk, 1, 3, 1);
        disk.power_loss();
        assert_eq!(bytes(&disk, 1, 1)[0], 3, "writethrough");
    }

    #[test]
    fn a_read_only_disk_keeps_its_contents_and_flushes() {
        let disk = RamDisk::read_only(&[9; 700]);
        assert_eq!(disk.sectors(), 2);
        let data = Buffer::zeroed(SECTOR_LEN);
        let result = run(&disk, Operation::Write { sector: 0, data });
        assert_eq!(result.err(), Some(Failure::ReadOnly));
        run(&disk, Operation::Flush).expect("a flush");
        let all = bytes(&disk, 0, 2);
        assert!(all[..700].iter().all(|&byte| byte == 9) && all[700..].iter().all(|&b| b == 0));
    }
}
