//! A model of what a virtio-blk device does with one descriptor chain (virtio 1.2, 2.7.5 and 5.2.6; `CONFORMANCE.md`
//! lists the choices where the specification leaves some). Shares no code with the device.

use std::cmp::Ordering;

/// Bytes in a sector.
pub const SECTOR: usize = 512;
/// Descriptors in the queue.
pub const QUEUE_SIZE: u16 = 16;
/// The serial that GET_ID returns.
pub const SERIAL: &[u8; 20] = b"a-serial-of-20-bytes";

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

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

/// The part of a guest's memory that one descriptor names.
#[derive(Clone, Copy)]
struct Segment {
    address: u64,
    len: u64,
}

/// A disk, and the memory of its guest, which begins at address 0.
pub struct Model {
    pub disk: Vec<u8>,
    pub read_only: bool,
    pub memory: Vec<u8>,
    /// Ranges (start, length) of memory whose contents are undefined: buffers of reads that failed half-way.
    pub any: Vec<(usize, usize)>,
}

impl Model {
    /// Carries out the chain at `head` of the table at `table`.
    pub fn execute(&mut self, table: u64, head: u16) -> Verdict {
        let Some((readable, writable)) = self.walk(table, head) else {
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
                if self.scatter(&writable, &data) {
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

    /// Device-readable and device-writable segments, or `None` for a chain that breaks a rule.
    fn walk(&self, table: u64, head: u16) -> Option<(Vec<Segment>, Vec<Segment>)> {
        let (mut table, mut entries, mut index) = (table, u64::from(QUEUE_SIZE), head);
        let (mut steps, mut indirect, mut total) = (0, false, 0);
        let (mut readable, mut writable) = (Vec::new(), Vec::new());
        loop {
            if steps == entries || u64::from(index) >= entries {
                return None;
            }
            let at = table.checked_add(u64::from(index) * 16)?;
            let bytes = self.read(at, 16)?;
            let address = u64::from_le_bytes(bytes[..8].try_into().ok()?);
            let len = u64::from(u32::from_le_bytes(bytes[8..12].try_into().ok()?));
            let flags = u16::from_le_bytes(bytes[12..14].try_into().ok()?);
            if flags & INDIRECT != 0 {
                if indirect || len % 16 != 0 || len / 16 > u64::from(u16::MAX) {
                    return None;
                }
                (table, entries, index, steps, indirect) = (address, len / 16, 0, 0, true);
                continue;
            }
            steps += 1;
            total += len;
            if readable.len() + writable.len() == usize::from(QUEUE_SIZE)
                || total > u64::from(u32::MAX)
            {
                return None;
            }
            let segment = Segment { address, len };
            if flags & WRITE != 0 {
                writable.push(segment);
            } else if writable.iter().any(|before: &Segment| before.len > 0) {
                return None;
            } else {
                readable.push(segment);
            }
            if flags & NEXT == 0 {
                return Some((readable, writable));
            }
            index = u16::from_le_bytes(bytes[14..].try_into().ok()?);
        }
    }

    /// Carries out a request and returns the data for the driver. `room`: bytes that the chain has for data.
    fn request(&mut self, readable: &[Segment], room: u64) -> Result<Option<Vec<u8>>, u8> {
        let header = self.gather(readable, 0, 16).ok_or(IOERR)?;
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
                let data = self.gather(readable, 16, len).ok_or(IOERR)?;
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
                let segment = self.gather(readable, 16, 16).ok_or(IOERR)?;
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

    fn read(&self, address: u64, len: u64) -> Option<&[u8]> {
        let end = address.checked_add(len)?;
        self.memory
            .get(usize::try_from(address).ok()?..usize::try_from(end).ok()?)
    }

    /// `len` bytes of a stream of segments, from its byte `from` on.
    fn gather(&self, segments: &[Segment], from: u64, len: u64) -> Option<Vec<u8>> {
        let (mut skip, mut bytes) = (from, Vec::new());
        for segment in segments {
            let left = len - bytes.len() as u64;
            let before = skip.min(segment.len);
            let now = left.min(segment.len - before);
            skip -= before;
            if now > 0 {
                bytes.extend_from_slice(self.read(segment.address.checked_add(before)?, now)?);
            }
        }
        (bytes.len() as u64 == len).then_some(bytes)
    }

    /// Writes `data` into `segments` from the first on; `false`: a part of it lies outside the memory.
    fn scatter(&mut self, segments: &[Segment], data: &[u8]) -> bool {
        let mut rest = data;
        let mut touched = Vec::new();
        let mut whole = true;
        for segment in segments {
            let (now, later) = rest.split_at(rest.len().min(segment.len as usize));
            let end = segment.address.checked_add(now.len() as u64);
            let inside = (self.memory.len() as u64).saturating_sub(segment.address);
            let start = segment.address.min(self.memory.len() as u64) as usize;
            let len = now.len().min(inside as usize);
            self.memory[start..start + len].copy_from_slice(&now[..len]);
            touched.push((start, len));
            if !now.is_empty() && end.is_none_or(|end| end > self.memory.len() as u64) {
                whole = false;
            }
            rest = later;
        }
        if !whole {
            self.any = touched;
        }
        whole
    }
}

/// A little-endian number of up to 8 bytes.
fn number(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .rev()
        .fold(0, |n, &byte| n << 8 | u64::from(byte))
}
