//! The two halves of a descriptor chain, as streams of bytes: what the device may read, then what
//! it may write (virtio 1.2, 2.7.4.2). Descriptor boundaries have no meaning.

use vm_memory::{Bytes, GuestAddress, GuestMemory};

use super::virtqueue::Chain;

/// The guest memory that one descriptor names. Never empty; it may not exist.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GuestRange {
    pub(crate) address: GuestAddress,
    pub(crate) len: u32,
}

/// Guest memory that a request names does not exist.
pub(crate) struct MemoryFault;

/// Splits a chain into its device-readable half and its device-writable half (2.7.4.2: in this
/// order).
pub(crate) fn split_chain<G: GuestMemory>(
    chain: Chain<'_, G>,
    max_descriptors: usize,
) -> Result<(ReadableBytes, Vec<GuestRange>), &'static str> {
    let mut readable = Vec::new();
    let mut writable = Vec::new();
    // The iterator stops after as many steps as the table has entries, and at a nested indirect
    // table. After such an early stop the last descriptor still names a next one.
    let mut complete = false;
    for (count, descriptor) in chain.enumerate() {
        if count == max_descriptors {
            return Err("it is longer than the queue");
        }
        complete = !descriptor.has_next();
        let segment = GuestRange {
            address: descriptor.addr(),
            len: descriptor.len(),
        };
        if descriptor.is_write_only() {
            if segment.len > 0 {
                writable.push(segment);
            }
        } else if !writable.is_empty() {
            return Err("a device-readable descriptor follows a device-writable one");
        } else if segment.len > 0 {
            readable.push(segment);
        }
    }
    if !complete {
        return Err("it loops, or a descriptor is not valid");
    }
    Ok((ReadableBytes { segments: readable }, writable))
}

/// The device-readable half of a chain, as a stream of bytes.
pub(crate) struct ReadableBytes {
    segments: Vec<GuestRange>,
}

impl ReadableBytes {
    pub(crate) fn len(&self) -> u64 {
        self.segments
            .iter()
            .map(|segment| u64::from(segment.len))
            .sum()
    }

    /// The ranges that are left.
    pub(crate) fn into_ranges(self) -> Vec<GuestRange> {
        self.segments
    }

    /// Fills `bytes` from the front of the stream, and removes what was read.
    pub(crate) fn take<G: GuestMemory>(
        &mut self,
        memory: &G,
        bytes: &mut [u8],
    ) -> Result<(), MemoryFault> {
        let mut done = 0;
        let mut used_up = 0;
        for segment in &mut self.segments {
            if done == bytes.len() {
                break;
            }
            let len = (bytes.len() - done).min(segment.len as usize);
            memory
                .read_slice(&mut bytes[done..done + len], segment.address)
                .map_err(|_| MemoryFault)?;
            done += len;
            // If the address wraps, the read above has failed. `len` is at most `segment.len`.
            segment.address = GuestAddress(segment.address.0.wrapping_add(len as u64));
            segment.len -= len as u32;
            if segment.len == 0 {
                used_up += 1;
            }
        }
        self.segments.drain(..used_up);
        if done == bytes.len() {
            Ok(())
        } else {
            Err(MemoryFault)
        }
    }
}

/// Splits a half after `len` bytes. `None`: it is shorter.
pub(crate) fn split_ranges(
    ranges: Vec<GuestRange>,
    len: u32,
) -> Option<(Vec<GuestRange>, Vec<GuestRange>)> {
    let (mut front, mut back, mut left) = (Vec::new(), Vec::new(), len);
    for GuestRange { address, len } in ranges {
        let now = len.min(left);
        left -= now;
        if now > 0 {
            front.push(GuestRange { address, len: now });
        }
        if now < len {
            // An address that wraps lies outside every memory, before and after.
            let address = GuestAddress(address.0.wrapping_add(now.into()));
            back.push(GuestRange {
                address,
                len: len - now,
            });
        }
    }
    (left == 0).then_some((front, back))
}

/// Writes `bytes` to the front of a device-writable half. Returns how many were written: fewer if
/// the half is shorter.
pub(crate) fn write_to_driver<G: GuestMemory>(
    memory: &G,
    writable: &[GuestRange],
    bytes: &[u8],
) -> Result<u32, MemoryFault> {
    let mut rest = bytes;
    for segment in writable {
        let (now, later) = rest.split_at(rest.len().min(segment.len as usize));
        memory
            .write_slice(now, segment.address)
            .map_err(|_| MemoryFault)?;
        rest = later;
        if rest.is_empty() {
            break;
        }
    }
    u32::try_from(bytes.len() - rest.len()).map_err(|_| MemoryFault)
}
