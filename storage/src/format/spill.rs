//! The map of a spill file: which bytes of a disk are there.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::sealed::{CRC_AT, DecodeResult, Uuid, crc_without, seal};

/// A map is whole sectors.
const SECTOR: usize = 512;
const SPILL_MAGIC: [u8; 8] = *b"WALVSPIL";
/// The format version of spill maps.
const SPILL_VERSION: u32 = 1;

/// Start of a map. It is followed by `count` [`SpillRange`]s, and zeroes up to a multiple of 512
/// bytes.
///
/// A map is written to another file, synced, and renamed: the one with the name is always whole.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct SpillHeader {
    magic: [u8; 8],
    version: U32,
    /// CRC-32C of the whole file with this field zero.
    crc: U32,
    log: Uuid,
    disk: Uuid,
    count: U64,
}

/// Sectors of the disk that are in the spill file, at the same offset as on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct SpillRange {
    pub sector: U64,
    pub sectors: U64,
}

/// A map, sealed.
pub(crate) fn encode_spill_map(log: &Uuid, disk: &Uuid, ranges: &[SpillRange]) -> Vec<u8> {
    let header = SpillHeader {
        magic: SPILL_MAGIC,
        version: U32::new(SPILL_VERSION),
        crc: U32::new(0),
        log: *log,
        disk: *disk,
        count: U64::new(ranges.len() as u64),
    };
    let mut map = [header.as_bytes(), ranges.as_bytes()].concat();
    map.resize(map.len().next_multiple_of(SECTOR), 0);
    seal(&mut map);
    map
}

/// The ranges of a map; [`DecodeResult::Invalid`] if it is not one of this disk on this log.
pub(crate) fn decode_spill_map(
    log: &Uuid,
    disk: &Uuid,
    map: &[u8],
) -> DecodeResult<Vec<SpillRange>> {
    let Ok((header, rest)) = SpillHeader::read_from_prefix(map) else {
        return DecodeResult::Invalid;
    };
    if header.magic != SPILL_MAGIC || header.crc.get() != crc_without(map, CRC_AT) {
        return DecodeResult::Invalid;
    }
    if header.version.get() != SPILL_VERSION {
        return DecodeResult::Version(header.version.get());
    }
    let count = usize::try_from(header.count.get()).ok();
    let table =
        count.and_then(|count| <[SpillRange]>::ref_from_prefix_with_elems(rest, count).ok());
    let Some((ranges, _)) = table.filter(|_| (header.log, header.disk) == (*log, *disk)) else {
        return DecodeResult::Invalid;
    };
    let mut end = 0;
    // In order, not empty, disjoint, and nothing wraps.
    let sound = ranges.iter().all(|range| {
        let (first, next) = (
            range.sector.get(),
            range.sector.get().checked_add(range.sectors.get()),
        );
        let follows = first >= end && next.is_some_and(|next| next > first && next <= 1 << 55);
        end = next.unwrap_or(u64::MAX);
        follows
    });
    if sound {
        DecodeResult::Valid(ranges.to_vec())
    } else {
        DecodeResult::Invalid
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(sector: u64, sectors: u64) -> SpillRange {
        SpillRange {
            sector: U64::new(sector),
            sectors: U64::new(sectors),
        }
    }

    #[test]
    fn a_map_is_read_as_it_was_written_and_no_flipped_bit_is_believed() {
        let (log, disk) = ([1; 16], [2; 16]);
        let ranges = [range(0, 8), range(8, 1), range(1 << 40, 1 << 30)];
        let map = encode_spill_map(&log, &disk, &ranges);
        let read = |map: &[u8]| match decode_spill_map(&log, &disk, map) {
            DecodeResult::Valid(ranges) => Some(ranges),
            _ => None,
        };
        assert_eq!(read(&map).unwrap(), ranges);
        for bit in 0..map.len() * 8 {
            let mut bad = map.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(read(&bad).is_none(), "bit {bit}");
        }
        assert!(read(&map[..map.len() - 1]).is_none());
        assert!(matches!(
            decode_spill_map(&disk, &log, &map),
            DecodeResult::Invalid
        ));
    }

    #[test]
    fn ranges_that_overlap_or_wrap_are_refused() {
        let ids = [3; 16];
        for ranges in [
            vec![range(8, 8), range(15, 1)],
            vec![range(8, 0)],
            vec![range(u64::MAX, 2)],
            vec![range(8, 8), range(0, 8)],
        ] {
            let map = encode_spill_map(&ids, &ids, &ranges);
            assert!(matches!(
                decode_spill_map(&ids, &ids, &map),
                DecodeResult::Invalid
            ));
        }
    }
}
