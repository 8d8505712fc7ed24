//! A model of what a virtio-blk device does with one descriptor chain (virtio 1.2, 2.7.5 and 5.2.6;
//! `CONFORMANCE.md` lists the choices where the specification leaves some). Shares no code with the
//! device.

use std::cmp::Ordering;

use crate::chain::{self, Segment};
use crate::guest::{QUEUE_SIZE, SECTOR};

/// The serial that GET_ID returns.
pub const SERIAL: &[u8; 20] = b"a-serial-of-20-bytes";

const OK: u8 = 0;
const IOERR: u8 = 1;
const UNSUPP: u8 = 2;

/// The outcome of a chain.
pub enum Verdict {
    /// The device cannot answer the chain: it sets DEVICE_NEEDS_RESET and changes no byte.
    Broken,
    /// The device answers the chain; its status byte and data are in memory.
    Answered {
        /// Length in the used element.
        written: u32,
    },
}

/// A disk, and the memory of its guest, which begins at address 0.
pub struct Model {
    pub disk: Vec<u8>,
    pub read_only: bool,
    pub memory: Vec<u8>,
    /// Ranges (start, length) of memory whose contents are undefined: buffers of reads that failed
    /// half-way.
    pub any: Vec<(usize, usize)>,
}

impl Model {
    /// Carries out the chain at `head` of the table at `table`.
    pub fn execute(&mut self, table: u64, head: u16) -> Verdict {
        let Some((readable, writable)) = chain::walk(&self.memory, table, head, QUEUE_SIZE) else {
            return Verdict::Broken;
        };
        let writable_len: u64 = writable.iter().map(|segment| segment.len).sum();
        // The status byte is the last writable byte, however the descriptors divide the chain.
        let Some(status_at) = writable
            .iter()
            .rfind(|segment| segment.len > 0)
            .and_then(|last| last.address.checked_add(last.len - 1))
            .filter(|&at| at < self.memory.len() as u64)
        else {
            return Verdict::Broken;
        };
        let room = writable_len - 1;
        let mut written = 0;
        let status = match self.request(&readable, room) {
            Err(status) => status,
            Ok(None) => OK,
            Ok(Some(data)) => {
                if chain::scatter(&mut self.memory, &mut self.any, &writable, &data) {
                    written = data.len() as u64;
                    OK
                } else {
                    IOERR
                }
            }
        };
        self.memory[status_at as usize] = status;
        // The status byte counts only if every byte before it was written.
        if written == room {
            written += 1;
        }
        Verdict::Answered {
            written: written as u32,
        }
    }

    /// Carries out a request and returns the data for the driver. `room`: bytes that the chain has
    /// for data.
    fn request(&mut self, readable: &[Segment], room: u64) -> Result<Option<Vec<u8>>, u8> {
        let header = chain::gather(&self.memory, readable, 0, 16).ok_or(IOERR)?;
        let kind = number(&header[..4]);
        let sector = number(&header[8..]);
        let len = readable.iter().map(|segment| segment.len).sum::<u64>() - 16;
        match kind {
            0 => {
                let range = self.range(sector, room)?;
                Ok(Some(self.disk[range].to_vec()))
            }
            1 => {
                if self.read_only {
                    return Err(IOERR);
                }
                let range = self.range(sector, len)?;
                let data = chain::gather(&self.memory, readable, 16, len).ok_or(IOERR)?;
                self.disk[range].copy_from_slice(&data);
                Ok(None)
            }
            4 => Ok(None),
            8 => Ok(Some(SERIAL[..room.min(20) as usize].to_vec())),
            11 | 13 | 14 if !self.read_only => {
                match len.cmp(&16) {
                    Ordering::Less => return Err(IOERR),
                    Ordering::Greater => return Err(UNSUPP),
                    Ordering::Equal => {}
                }
                let segment = chain::gather(&self.memory, readable, 16, 16).ok_or(IOERR)?;
                let flags = number(&segment[12..]);
                if flags & !u64::from(kind == 13) != 0 {
                    return Err(UNSUPP);
                }
                let sectors = number(&segment[8..12]);
                let range = self.range(number(&segment[..8]), sectors * SECTOR as u64)?;
                self.disk[range].fill(0);
                Ok(None)
            }
            _ => Err(UNSUPP),
        }
    }

    /// A range of the disk: whole sectors, at least one.
    fn range(&self, sector: u64, len: u64) -> Result<std::ops::Range<usize>, u8> {
        let start = u128::from(sector) * SECTOR as u128;
        let end = start + u128::from(len);
        if len == 0 || !len.is_multiple_of(SECTOR as u64) || end > self.disk.len() as u128 {
            return Err(IOERR);
        }
        Ok(start as usize..end as usize)
    }
}

/// A little-endian number of up to 8 bytes.
fn number(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |n, &byte| n << 8 | u64::from(byte))
}
