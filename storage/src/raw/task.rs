//! A request as a series of kernel operations, the same for both engines.

use std::io;
use std::os::fd::BorrowedFd;

use rustix::fs::FallocateFlags;
use rustix::io::Errno;

use crate::Buffer;

/// Zeroes written at a time, on a file system that can't zero a range itself.
const ZEROES: u64 = 1 << 20;

/// A request that an engine carries out.
#[derive(Debug)]
pub(super) struct RawTask {
    pub token: u64,
    pub step: RawStep,
    /// Whether to sync before the request completes.
    pub durably: bool,
}

/// The next kernel operation. Owns the memory that the kernel uses.
#[derive(Debug)]
pub(super) enum RawStep {
    /// Fill `buffer` from its byte `done` on; its byte 0 is at `offset` of the file.
    Read {
        offset: u64,
        buffer: Buffer,
        done: usize,
    },
    /// Write `buffer` from its byte `done` on.
    Write {
        offset: u64,
        buffer: Buffer,
        done: usize,
    },
    /// Make a range read as zeroes.
    Zero { offset: u64, len: u64, unmap: bool },
    /// Zero-fill a range chunk by chunk.
    Fill {
        offset: u64,
        len: u64,
        zeroes: Buffer,
    },
}

impl RawStep {
    pub(super) fn read(offset: u64, buffer: Buffer) -> Self {
        let done = 0;
        Self::Read {
            offset,
            buffer,
            done,
        }
    }

    pub(super) fn write(offset: u64, buffer: Buffer) -> Self {
        let done = 0;
        Self::Write {
            offset,
            buffer,
            done,
        }
    }

    pub(super) fn zeroes(offset: u64, len: u64, unmap: bool) -> Self {
        Self::Zero { offset, len, unmap }
    }

    /// Its name in messages.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Read { .. } => "read",
            Self::Write { .. } => "write",
            Self::Zero { .. } | Self::Fill { .. } => "writing zeroes",
        }
    }

    /// The fallocate mode that makes a range read as zeroes.
    pub(super) fn zero_mode(unmap: bool) -> FallocateFlags {
        let how = if unmap {
            FallocateFlags::PUNCH_HOLE
        } else {
            FallocateFlags::ZERO_RANGE
        };
        how | FallocateFlags::KEEP_SIZE
    }

    /// The zeroes for the next write of a fill.
    pub(super) fn fill_chunk(zeroes: &Buffer, len: u64) -> &[u8] {
        &zeroes[..len.min(zeroes.len() as u64) as usize]
    }

    /// Carries out the step in the calling thread; returns the number of bytes moved.
    pub(super) fn call(&mut self, file: BorrowedFd<'_>) -> Result<usize, Errno> {
        match self {
            Self::Read {
                offset,
                buffer,
                done,
            } => rustix::io::pread(file, &mut buffer[*done..], *offset + *done as u64),
            Self::Write {
                offset,
                buffer,
                done,
            } => rustix::io::pwrite(file, &buffer[*done..], *offset + *done as u64),
            Self::Zero { offset, len, unmap } => {
                rustix::fs::fallocate(file, Self::zero_mode(*unmap), *offset, *len).map(|()| 0)
            }
            Self::Fill {
                offset,
                len,
                zeroes,
            } => rustix::io::pwrite(file, Self::fill_chunk(zeroes, *len), *offset),
        }
    }
}

impl RawTask {
    /// Continues after a step that moved `moved` bytes. Returns the request's result, or `None` if another step
    /// follows.
    pub(super) fn advance(&mut self, moved: Result<usize, Errno>) -> Option<io::Result<()>> {
        let moved = match (moved, &self.step) {
            (Ok(moved), _) => moved,
            // Interrupted by a signal: repeat the step.
            (Err(Errno::INTR), _) => return None,
            (Err(Errno::OPNOTSUPP), RawStep::Zero { offset, len, .. }) => {
                self.step = RawStep::Fill {
                    offset: *offset,
                    len: *len,
                    zeroes: Buffer::zeroed((*len).min(ZEROES) as usize),
                };
                return None;
            }
            (Err(errno), _) => return Some(Err(errno.into())),
        };
        match &mut self.step {
            // The file was truncated by another program.
            RawStep::Read { .. } if moved == 0 => Some(Err(io::ErrorKind::UnexpectedEof.into())),
            RawStep::Write { .. } | RawStep::Fill { .. } if moved == 0 => {
                Some(Err(io::ErrorKind::WriteZero.into()))
            }
            RawStep::Read { buffer, done, .. } => {
                *done += moved;
                (*done >= buffer.len()).then_some(Ok(()))
            }
            RawStep::Write { buffer, done, .. } => {
                *done += moved;
                (*done >= buffer.len()).then_some(Ok(()))
            }
            RawStep::Fill { offset, len, .. } => {
                *offset += moved as u64;
                *len = len.saturating_sub(moved as u64);
                (*len == 0).then_some(Ok(()))
            }
            RawStep::Zero { .. } => Some(Ok(())),
        }
    }
}
