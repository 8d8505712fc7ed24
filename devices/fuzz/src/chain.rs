//! What a descriptor chain means (virtio 1.2, 2.7.5), in a copy of the guest's memory, which begins
//! at address 0. Shares no code with the device.

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// The part of a guest's memory that one descriptor names.
#[derive(Clone, Copy)]
pub struct Segment {
    /// Where it begins.
    pub address: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// Device-readable and device-writable segments, or `None` for a chain that breaks a rule.
pub fn walk(
    memory: &[u8],
    table: u64,
    head: u16,
    queue_size: u16,
) -> Option<(Vec<Segment>, Vec<Segment>)> {
    let (mut table, mut entries, mut index) = (table, u64::from(queue_size), head);
    let (mut steps, mut indirect, mut total) = (0, false, 0);
    let (mut readable, mut writable) = (Vec::new(), Vec::new());
    loop {
        if steps == entries || u64::from(index) >= entries {
            return None;
        }
        let at = table.checked_add(u64::from(index) * 16)?;
        let bytes = read(memory, at, 16)?;
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
        if readable.len() + writable.len() == usize::from(queue_size) || total > u64::from(u32::MAX)
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

fn read(memory: &[u8], address: u64, len: u64) -> Option<&[u8]> {
    let end = address.checked_add(len)?;
    memory.get(usize::try_from(address).ok()?..usize::try_from(end).ok()?)
}

/// `len` bytes of a stream of segments, from its byte `from` on.
pub fn gather(memory: &[u8], segments: &[Segment], from: u64, len: u64) -> Option<Vec<u8>> {
    let (mut skip, mut bytes) = (from, Vec::new());
    for segment in segments {
        let left = len - bytes.len() as u64;
        let before = skip.min(segment.len);
        let now = left.min(segment.len - before);
        skip -= before;
        if now > 0 {
            bytes.extend_from_slice(read(memory, segment.address.checked_add(before)?, now)?);
        }
    }
    (bytes.len() as u64 == len).then_some(bytes)
}

/// Writes `data` into `segments` from the first on; `false`: a part of it lies outside the memory.
/// Then the contents of the ranges (start, length) in `any` are undefined.
pub fn scatter(
    memory: &mut [u8],
    any: &mut Vec<(usize, usize)>,
    segments: &[Segment],
    data: &[u8],
) -> bool {
    let mut rest = data;
    let mut touched = Vec::new();
    let mut whole = true;
    for segment in segments {
        let (now, later) = rest.split_at(rest.len().min(segment.len as usize));
        let end = segment.address.checked_add(now.len() as u64);
        let inside = (memory.len() as u64).saturating_sub(segment.address);
        let start = segment.address.min(memory.len() as u64) as usize;
        let len = now.len().min(inside as usize);
        memory[start..start + len].copy_from_slice(&now[..len]);
        touched.push((start, len));
        if !now.is_empty() && end.is_none_or(|end| end > memory.len() as u64) {
            whole = false;
        }
        rest = later;
    }
    if !whole {
        *any = touched;
    }
    whole
}
