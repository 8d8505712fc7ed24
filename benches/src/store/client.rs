//! Clients of a disk.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use walvisor::commands::CommandError;
use walvisor_storage::{BackendQueue, Buffer, Completion, Disk, Operation, Port, SECTOR_SIZE};

use crate::blocks::{BLOCK, stamped_block};

/// A write of the block with this number, which `writer` stamps.
pub fn write_block(writer: u64, block: u64) -> Operation {
    Operation::Write {
        sector: block * BLOCK as u64 / SECTOR_SIZE,
        data: stamped_block(BLOCK, writer, block),
    }
}

/// Sleeps until a port has completions.
fn wait(event: BorrowedFd<'_>) {
    // If the wait is interrupted, the caller just checks the port again.
    let _ = rustix::event::poll(&mut [PollFd::from_borrowed_fd(event, PollFlags::IN)], None);
}

fn data(completion: Completion) -> Result<Option<Buffer>, CommandError> {
    let failed = |failure| CommandError::Failed(format!("a request failed: {failure}"));
    completion.result.map_err(failed)
}

/// A client with one request at a time.
pub struct StoreClient {
    port: Port,
    done: Vec<Completion>,
}

impl StoreClient {
    /// A client of `disk`.
    ///
    /// # Errors
    /// If the system refuses a port.
    pub fn open(disk: &Disk) -> Result<Self, CommandError> {
        let port = disk.open_port().map_err(CommandError::failed)?;
        let done = Vec::new();
        Ok(Self { port, done })
    }

    /// Submits a request and waits until it has ended.
    ///
    /// # Errors
    /// If the request failed.
    pub fn run(&mut self, operation: Operation) -> Result<Option<Buffer>, CommandError> {
        self.port.submit(0, operation);
        self.port.kick_alone();
        loop {
            self.port.completions(&mut self.done);
            if let Some(completion) = self.done.pop() {
                return data(completion);
            }
            wait(self.port.event());
        }
    }

    /// Reads the block at `sector`.
    ///
    /// # Errors
    /// If the read failed.
    pub fn read(&mut self, sector: u64) -> Result<Buffer, CommandError> {
        let sectors = (BLOCK as u64 / SECTOR_SIZE) as u32;
        let read = self.run(Operation::Read { sector, sectors })?;
        read.ok_or_else(|| CommandError::Failed("a read ended without data".to_owned()))
    }
}

/// A client with many requests in flight, submitted in batches as a queue's worker does.
pub struct QueueClient {
    port: Port,
    done: Vec<Completion>,
    started: Vec<Instant>,
    /// Slots without a request.
    idle: Vec<usize>,
}

impl QueueClient {
    /// A client of `disk` with `depth` requests in flight.
    ///
    /// # Errors
    /// If the system refuses a port.
    pub fn open(disk: &Disk, depth: usize) -> Result<Self, CommandError> {
        Ok(Self {
            port: disk.open_port().map_err(CommandError::failed)?,
            done: Vec::new(),
            started: vec![Instant::now(); depth],
            idle: (0..depth).collect(),
        })
    }

    /// Keeps the queue full with requests from `next`, until that returns `None`. Waits until a
    /// request completes, and returns its slot, its data and its time; `None` once no request is in
    /// flight.
    ///
    /// # Errors
    /// If the request failed.
    pub fn step(
        &mut self,
        mut next: impl FnMut(usize) -> Option<Operation>,
    ) -> Result<Option<(usize, Option<Buffer>, Duration)>, CommandError> {
        loop {
            if let Some(completion) = self.done.pop() {
                let slot = completion.token as usize;
                self.idle.push(slot);
                let time = self.started[slot].elapsed();
                return Ok(Some((slot, data(completion)?, time)));
            }
            let mut submitted = false;
            while let Some(&slot) = self.idle.last() {
                let Some(operation) = next(slot) else { break };
                self.idle.pop();
                self.started[slot] = Instant::now();
                self.port.submit(slot as u64, operation);
                submitted = true;
            }
            if self.idle.len() == self.started.len() {
                return Ok(None);
            }
            if submitted {
                self.port.kick();
            }
            self.port.completions(&mut self.done);
            if self.done.is_empty() {
                wait(self.port.event());
            }
        }
    }

    /// Runs these requests, then flushes.
    ///
    /// # Errors
    /// If a request failed.
    pub fn run(
        &mut self,
        mut requests: impl Iterator<Item = Operation>,
    ) -> Result<(), CommandError> {
        while self.step(|_| requests.next())?.is_some() {}
        let mut flush = Some(Operation::Flush);
        while self.step(|_| flush.take())?.is_some() {}
        Ok(())
    }
}
