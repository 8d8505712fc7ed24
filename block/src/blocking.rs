//! Reads, writes and flushes that return once they have ended.
//!
//! ```text
//!   thread ──read, write, flush──▶ BlockingDisk ──▶ a queue that no other call uses now
//!   thread ──read, write, flush──▶     └─ keeps its queues: as many as calls have run at a time
//! ```

use std::io;
use std::sync::{Mutex, PoisonError};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

use crate::{Backend, BackendQueue, Buffer, Operation, SECTOR_SIZE};

/// A disk for callers that wait for each request. Any number of threads may use it at a time.
///
/// Drop it before the disk's owner closes the disk, for instance before a `Store` of
/// `walvisor-storage` is closed.
pub struct BlockingDisk<B> {
    backend: B,
    /// Those that no call uses.
    queues: Mutex<Vec<Box<dyn BackendQueue>>>,
}

impl<B: Backend> BlockingDisk<B> {
    /// A handle of `backend`. No queue is opened yet.
    pub fn new(backend: B) -> Self {
        let queues = Mutex::default();
        Self { backend, queues }
    }

    /// The disk.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// Fills `bytes` with what the disk has from byte `offset` on. Both its length and the offset
    /// are multiples of [`SECTOR_SIZE`]. A read of more than [`Backend::max_request_bytes`] is
    /// several requests.
    ///
    /// # Errors
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) for a range that is not of whole sectors, or
    /// not on the disk; or if the disk can't be read, or the system refuses a queue. `bytes` then
    /// holds anything.
    pub fn read(&self, bytes: &mut [u8], offset: u64) -> io::Result<()> {
        let of = ("read", bytes.len(), offset);
        let (mut sector, most) = (whole_sectors(of)?, self.backend.max_request_bytes());
        self.with_queue(|queue| {
            for piece in bytes.chunks_mut(most) {
                let sectors = (piece.len() as u64 / SECTOR_SIZE) as u32;
                let data = carry_out(queue, Operation::Read { sector, sectors });
                let data = data.map_err(|error| named(of, error))?;
                piece.copy_from_slice(&data.expect("a READ completes with data"));
                sector += u64::from(sectors);
            }
            Ok(())
        })
    }

    /// Writes `bytes` from byte `offset` on, as one request. Both its length and the offset are
    /// multiples of [`SECTOR_SIZE`]. What is written survives a power loss once a later
    /// [`flush`](Self::flush) has returned.
    ///
    /// # Errors
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) for a range that is not of whole sectors, or
    /// not on the disk, or longer than [`Backend::max_request_bytes`]; or if the disk can't be
    /// written, or the system refuses a queue.
    pub fn write(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        let of = ("write", bytes.len(), offset);
        let (sector, most) = (whole_sectors(of)?, self.backend.max_request_bytes());
        if bytes.len() > most {
            let why = format!("one request has at most {most} bytes");
            return Err(named(of, io::Error::new(io::ErrorKind::InvalidInput, why)));
        }
        if bytes.is_empty() {
            return Ok(());
        }
        let data = Buffer::from(bytes);
        let written = self.with_queue(|queue| carry_out(queue, Operation::Write { sector, data }));
        written.map(drop).map_err(|error| named(of, error))
    }

    /// Makes everything durable whose write has returned, of any thread. Does nothing on a disk
    /// without FLUSH, whose writes have no volatile cache to stay in.
    ///
    /// # Errors
    /// If the flush fails, or the system refuses a queue.
    pub fn flush(&self) -> io::Result<()> {
        if !self.backend.capabilities().flush {
            return Ok(());
        }
        self.with_queue(|queue| carry_out(queue, Operation::Flush))
            .map(drop)
    }

    fn with_queue<T>(
        &self,
        call: impl FnOnce(&mut dyn BackendQueue) -> io::Result<T>,
    ) -> io::Result<T> {
        let free = self.queues().pop();
        let mut queue = free.map_or_else(|| self.backend.open_queue(), Ok)?;
        let result = call(&mut *queue);
        self.queues().push(queue);
        result
    }

    fn queues(&self) -> std::sync::MutexGuard<'_, Vec<Box<dyn BackendQueue>>> {
        // The list is whole at every step.
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Flushes `backend`, for a caller without a queue: opens one, and blocks until everything written
/// so far is durable. Does nothing for a backend without FLUSH.
///
/// # Errors
/// If the system refuses a queue, or the flush fails.
pub fn flush(backend: &dyn Backend) -> io::Result<()> {
    if !backend.capabilities().flush {
        return Ok(());
    }
    carry_out(&mut *backend.open_queue()?, Operation::Flush).map(drop)
}

/// Submits a request to a queue that has no other, and waits for its end.
fn carry_out(queue: &mut dyn BackendQueue, operation: Operation) -> io::Result<Option<Buffer>> {
    queue.submit(0, operation);
    queue.kick_alone();
    let mut done = Vec::new();
    loop {
        queue.completions(&mut done);
        if let Some(completion) = done.pop() {
            return completion.result.map_err(io::Error::from);
        }
        let mut event = [PollFd::from_borrowed_fd(queue.event(), PollFlags::IN)];
        match poll(&mut event, None) {
            // Out of memory passes, and the request has to end before the queue gets another.
            Ok(_) | Err(Errno::INTR | Errno::NOMEM | Errno::AGAIN) => {}
            Err(error) => unreachable!("poll of one open descriptor: {error}"),
        }
    }
}

/// The first sector of a range in bytes.
fn whole_sectors(of @ (_, len, offset): (&str, usize, u64)) -> io::Result<u64> {
    if !(len as u64 | offset).is_multiple_of(SECTOR_SIZE) {
        let why = "length and offset must be multiples of 512";
        return Err(named(of, io::Error::new(io::ErrorKind::InvalidInput, why)));
    }
    Ok(offset / SECTOR_SIZE)
}

fn named((what, len, offset): (&str, usize, u64), error: io::Error) -> io::Error {
    let message = format!("a {what} of {len} bytes at byte {offset}: {error}");
    io::Error::new(error.kind(), message)
}

#[cfg(test)]
mod tests {
    use std::io::ErrorKind;
    use std::thread;

    use super::*;
    use crate::MAX_REQUEST_BYTES;
    use crate::ram::RamDisk;

    #[test]
    fn threads_read_back_what_they_have_written() {
        let disk = BlockingDisk::new(RamDisk::new(8 * 64));
        thread::scope(|scope| {
            for thread in 0..8_u8 {
                let disk = &disk;
                scope.spawn(move || {
                    let mut read = [0; 1024];
                    for at in (0..64 * 512).step_by(1024) {
                        let offset = u64::from(thread) * 64 * 512 + at;
                        disk.write(&[thread + 1; 1024], offset).unwrap();
                        disk.flush().unwrap();
                        disk.read(&mut read, offset).unwrap();
                        assert_eq!(read, [thread + 1; 1024]);
                    }
                });
            }
        });
        assert!((1..=8).contains(&disk.queues().len()));
    }

    #[test]
    fn a_flush_makes_writes_survive_a_power_loss() {
        let disk = BlockingDisk::new(RamDisk::with_power_loss(8, true));
        let mut read = [0; 512];
        for (byte, flushed, left) in [(1, true, 1), (2, false, 1)] {
            disk.write(&[byte; 512], 0).unwrap();
            if flushed {
                disk.flush().unwrap();
            }
            disk.backend().power_loss();
            disk.read(&mut read, 0).unwrap();
            assert_eq!(read, [left; 512]);
        }
    }

    #[test]
    fn a_read_longer_than_a_request_is_several() {
        let sectors = 2 * MAX_REQUEST_BYTES as u64 / SECTOR_SIZE;
        let disk = BlockingDisk::new(RamDisk::new(sectors));
        let second = MAX_REQUEST_BYTES as u64;
        disk.write(&[7; 512], second).unwrap();
        let mut all = vec![0xff; MAX_REQUEST_BYTES + 512];
        disk.read(&mut all, 0).unwrap();
        assert!(all[..MAX_REQUEST_BYTES].iter().all(|&byte| byte == 0));
        assert_eq!(all[MAX_REQUEST_BYTES..], [7; 512]);
        let error = disk.write(&all, 0).unwrap_err();
        assert!(error.to_string().contains("at most 16777216"), "{error}");
    }

    #[test]
    fn errors_say_which_request_and_leave_the_disk_usable() {
        let disk = BlockingDisk::new(RamDisk::new(2));
        for (len, offset, why) in [
            (100, 0, "a read of 100 bytes at byte 0: length and offset"),
            (512, 7, "a read of 512 bytes at byte 7: length and offset"),
            (512, 1024, "a read of 512 bytes at byte 1024: the range"),
            (1536, 0, "a read of 1536 bytes at byte 0: the range"),
        ] {
            let error = disk.read(&mut vec![0; len], offset).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
            assert!(error.to_string().starts_with(why), "{error}");
        }
        disk.read(&mut [], 4096).unwrap();
        disk.write(&[], 0).unwrap();
        disk.write(&[1; 1024], 0).unwrap();
        let read_only = BlockingDisk::new(RamDisk::empty_read_only(2));
        let error = read_only.write(&[1; 512], 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ReadOnlyFilesystem, "{error}");
    }
}
