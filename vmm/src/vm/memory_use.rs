//! Guest memory on the host: mapped, kept out of core dumps, and its resident size.

use std::{fs, io};

use rustix::mm::{Advice, madvise};
use vm_memory::{GuestAddress, GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};

use crate::arch::x86_64::layout;

/// Resident memory in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// The whole process.
    pub resident: u64,
    /// Guest memory.
    pub guest: u64,
    /// The process's own data: pages that it has written, without guest memory. Programs and
    /// libraries are left out, because all processes that run them share them.
    pub own: u64,
}

/// Maps `size` bytes of guest memory, which take no space until touched. Core dumps leave the
/// mappings out, and because of that flag the kernel does not merge them with other mappings, so
/// [`measure`] can tell them apart.
///
/// # Errors
/// If the system refuses the mapping.
pub fn map(size: u64) -> io::Result<GuestMemoryMmap> {
    let ranges: Vec<(GuestAddress, usize)> = layout::memory_ranges(size)
        .into_iter()
        .map(|(base, length)| (GuestAddress(base), length as usize))
        .collect();
    let memory = GuestMemoryMmap::from_ranges(&ranges).map_err(io::Error::other)?;
    for region in memory.iter() {
        let address = memory
            .get_host_address(region.start_addr())
            .map_err(io::Error::other)?;
        // SAFETY: the range is a mapping of `memory`, and leaving it out of core dumps does not
        // change its contents.
        unsafe { madvise(address.cast(), region.len() as usize, Advice::LinuxDontDump)? };
    }
    Ok(memory)
}

/// Measures this process now. `None` if the kernel does not report it.
pub fn measure(memory: &GuestMemoryMmap) -> Option<MemoryUse> {
    // One pass over the mappings gives both values at the same moment.
    let ranges: Vec<(u64, u64)> = memory
        .iter()
        .filter_map(|region| {
            let start = memory.get_host_address(region.start_addr()).ok()? as u64;
            Some((start, start + region.len()))
        })
        .collect();
    let text = fs::read_to_string("/proc/self/smaps").ok()?;
    Some(sum(&text, &ranges))
}

/// Adds up the `Rss` of all mappings in `smaps`, the `Rss` of those in `ranges`, and the
/// `Anonymous` of all others.
fn sum(smaps: &str, ranges: &[(u64, u64)]) -> MemoryUse {
    let mut total = MemoryUse {
        resident: 0,
        guest: 0,
        own: 0,
    };
    let bytes = |field: &str| {
        let kilobytes = field.trim().trim_end_matches(" kB").parse().unwrap_or(0);
        1024u64.saturating_mul(kilobytes)
    };
    let mut in_guest = false;
    for line in smaps.lines() {
        if let Some((start, end)) = mapping(line) {
            in_guest = ranges.iter().any(|range| start < range.1 && range.0 < end);
        } else if let Some(rest) = line.strip_prefix("Rss:") {
            total.resident += bytes(rest);
            total.guest += if in_guest { bytes(rest) } else { 0 };
        } else if let Some(rest) = line.strip_prefix("Anonymous:") {
            total.own += if in_guest { 0 } else { bytes(rest) };
        }
    }
    total
}

/// The addresses in the first line of a mapping: `start-end permissions ...`.
fn mapping(line: &str) -> Option<(u64, u64)> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    Some((
        u64::from_str_radix(start, 16).ok()?,
        u64::from_str_radix(end, 16).ok()?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use vm_memory::Bytes;

    #[test]
    fn touched_guest_memory_is_counted_as_guest_memory() {
        let memory = map(64 << 20).unwrap();
        for page in 0..256u64 {
            memory.write_obj(1u8, GuestAddress(page * 4096)).unwrap();
        }
        let measured = measure(&memory).unwrap();
        // The kernel may count the memory of another test's guest with this one's if they are
        // adjacent, so the value may be too high, and may fall later.
        assert!(measured.guest >= 1 << 20, "{measured:?}");
        assert!(
            measured.guest < 64 << 20 && measured.resident > measured.guest,
            "{measured:?}"
        );
    }

    #[test]
    fn smaps_lines_of_mappings_and_fields_are_told_apart() {
        let smaps = "1000-3000 rw-p 0 00:00 0\nSize: 8 kB\nRss:  4 kB\nAnonymous: 4 kB\n\
                     3000-4000 rw-p 0 00:00 0\nRss:    12 kB\nAnonymous:  8 kB\n";
        assert_eq!(
            sum(smaps, &[(0x1000, 0x3000)]),
            MemoryUse {
                resident: 16384,
                guest: 4096,
                own: 8192,
            }
        );
    }
}
