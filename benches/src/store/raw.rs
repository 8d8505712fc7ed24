//! The baseline: a queue of a plain file without a log.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use io_uring::{IoUring, opcode, types};
use walvisor::commands::CommandError;
use walvisor_storage::Buffer;

/// The direction in which a queue moves bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the file.
    Read,
    /// To the file.
    Write,
}

/// A queue of reads or writes of one file: plain io_uring, with requests submitted in batches.
pub struct RawQueue<'a> {
    ring: IoUring,
    file: &'a File,
    direction: Direction,
    buffers: Vec<Buffer>,
    started: Vec<Instant>,
    idle: Vec<usize>,
    done: Vec<(usize, i32)>,
}

impl<'a> RawQueue<'a> {
    /// A queue with `depth` requests of `block` bytes in flight.
    ///
    /// # Errors
    /// If the kernel refuses a ring.
    pub fn new(
        file: &'a File,
        direction: Direction,
        block: usize,
        depth: usize,
    ) -> Result<Self, CommandError> {
        let ring = IoUring::new((depth as u32).next_power_of_two()).map_err(|error| {
            CommandError::Failed(format!(
                "no io_uring for the raw baseline ({error}): allow it (sysctl \
                 kernel.io_uring_disabled)"
            ))
        })?;
        Ok(Self {
            ring,
            file,
            direction,
            buffers: (0..depth).map(|_| Buffer::zeroed(block)).collect(),
            started: vec![Instant::now(); depth],
            idle: (0..depth).collect(),
            done: Vec::with_capacity(depth),
        })
    }

    /// The buffer of an idle slot.
    pub fn buffer(&mut self, slot: usize) -> &mut Buffer {
        &mut self.buffers[slot]
    }

    /// Keeps the queue full with the file offsets that `next` returns for a slot, until it returns
    /// `None`. Waits for one request to end, and returns its slot and its time; `None` once no
    /// request is in flight.
    ///
    /// # Errors
    /// If the request failed or was short.
    pub fn step(
        &mut self,
        mut next: impl FnMut(usize) -> Option<u64>,
    ) -> Result<Option<(usize, Duration)>, CommandError> {
        loop {
            if let Some((slot, result)) = self.done.pop() {
                self.idle.push(slot);
                return match usize::try_from(result) {
                    Ok(moved) if moved == self.buffers[slot].len() => {
                        Ok(Some((slot, self.started[slot].elapsed())))
                    }
                    Ok(_) => Err(CommandError::Failed(
                        "the raw file's I/O was short".to_owned(),
                    )),
                    Err(_) => Err(CommandError::Failed(format!(
                        "the raw file's I/O failed: {}",
                        std::io::Error::from_raw_os_error(-result)
                    ))),
                };
            }
            while let Some(&slot) = self.idle.last() {
                let Some(offset) = next(slot) else { break };
                self.idle.pop();
                self.started[slot] = Instant::now();
                self.push(slot, offset);
            }
            if self.idle.len() == self.buffers.len() {
                return Ok(None);
            }
            match self.ring.submit_and_wait(1) {
                Err(error) if error.raw_os_error() != Some(libc::EINTR) => {
                    return Err(CommandError::failed(error));
                }
                _ => {}
            }
            let ended = self.ring.completion();
            self.done
                .extend(ended.map(|cqe| (cqe.user_data() as usize, cqe.result())));
        }
    }

    /// Moves bytes at all of these file offsets.
    ///
    /// # Errors
    /// If a request failed or was short.
    pub fn run(&mut self, mut offsets: impl Iterator<Item = u64>) -> Result<(), CommandError> {
        while self.step(|_| offsets.next())?.is_some() {}
        Ok(())
    }

    fn push(&mut self, slot: usize, offset: u64) {
        let fd = types::Fd(self.file.as_raw_fd());
        let buffer = &mut self.buffers[slot];
        let len = buffer.len() as u32;
        let entry = match self.direction {
            Direction::Read => opcode::Read::new(fd, buffer.as_mut_ptr(), len)
                .offset(offset)
                .build(),
            Direction::Write => opcode::Write::new(fd, buffer.as_ptr(), len)
                .offset(offset)
                .build(),
        };
        // SAFETY: the file and the slot's buffer live as long as `self`, whose drop waits for the
        // requests in flight, and no code touches the buffer of a slot that is not idle.
        let pushed = unsafe { self.ring.submission().push(&entry.user_data(slot as u64)) };
        pushed.expect("an entry for each slot");
    }
}

impl Drop for RawQueue<'_> {
    fn drop(&mut self) {
        while self.idle.len() < self.buffers.len() {
            // An error of a request is ignored. After an error of the ring the kernel may still use
            // the buffers, so they are leaked.
            let before = self.idle.len();
            if self.step(|_| None).is_err() && self.idle.len() == before {
                std::mem::forget(std::mem::take(&mut self.buffers));
                return;
            }
        }
    }
}
