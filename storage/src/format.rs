//! The bytes on the medium. All integers are little-endian; every structure carries its own CRC-32C.
//!
//! ```text
//! DIR/control         slot A (64 KiB) | slot B (64 KiB)       written in turn, newest valid one counts
//! DIR/segment-00000   segment header (4 KiB) | batch | batch | ... | stale or zero bytes
//!                                              │
//!                     batch header + descriptors (n × 4 KiB) | payloads, in order | pad to 4 KiB
//! ```
//!
//! A segment file is recycled, not deleted: its header names the *sequence* it serves now and a random
//! *salt*, and every batch header repeats both, so that a batch left over from an earlier life never
//! passes for a new one. LSNs and sequences never restart in the life of a log.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::Buffer;

/// Unit of everything that starts a structure: one page, a multiple of any sector size in use.
pub(crate) const BLOCK: usize = 4096;
/// The one format version this code reads and writes.
pub(crate) const VERSION: u32 = 1;
/// Bytes of one control slot.
pub(crate) const CONTROL_SLOT: usize = 64 << 10;
/// Most disks on one log: what a control slot holds.
pub(crate) const MAX_DISKS: usize =
    (CONTROL_SLOT - size_of::<ControlHeader>()) / size_of::<DiskEntry>();
/// Most descriptors of one batch. Bounds the header's size and the write's iovec count (IOV_MAX is 1024).
pub(crate) const MAX_DESCRIPTORS: usize = 896;

/// LSNs, commit ids, sequences and generations stay below: none is reached by counting, and one more never overflows.
pub(crate) const NUMBER_LIMIT: u64 = 1 << 62;

pub(crate) const CONTROL_MAGIC: [u8; 8] = *b"WALVCTRL";
pub(crate) const SEGMENT_MAGIC: [u8; 8] = *b"WALVSEGM";
pub(crate) const BATCH_MAGIC: [u8; 8] = *b"WALVBATC";

/// 128 random bits that name a log or a disk.
pub(crate) type Uuid = [u8; 16];

/// Start of a control slot; `disk_count` [`DiskEntry`]s follow.
///
/// The control file is the log's root: rewritten (other slot, next generation, then fdatasync) when a
/// checkpoint ends, before anything it frees is reused. A torn slot fails its CRC and the other counts.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct ControlHeader {
    pub magic: [u8; 8],
    pub version: U32,
    /// CRC-32C of the whole slot with this field zero.
    pub crc: U32,
    /// Counts control writes; slot = generation % 2.
    pub generation: U64,
    pub log: Uuid,
    /// Bytes of every segment file.
    pub segment_size: U64,
    /// Most segment files the ring may hold.
    pub max_segments: U32,
    pub disk_count: U32,
    /// Segments below this sequence are free: all they hold is in the base images.
    pub first_sequence: U64,
    /// Every record up to this LSN is in the base images.
    pub checkpoint_lsn: U64,
    /// No LSN below this is given out again.
    pub next_lsn: U64,
    /// No commit id below this is given out again.
    pub next_cid: U64,
    /// The base images may hold records up to this LSN, copied by a checkpoint that has not ended: a log that ends
    /// before it is damaged, for its older records would be replayed over newer ones.
    pub copying_lsn: U64,
}

impl ControlHeader {
    /// Whether all its numbers can have been reached by counting.
    pub(crate) fn counted(&self) -> bool {
        counted(&[
            self.generation,
            self.first_sequence,
            self.checkpoint_lsn,
            self.next_lsn,
            self.next_cid,
            self.copying_lsn,
        ])
    }
}

/// A disk of the log.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct DiskEntry {
    pub disk: Uuid,
    /// The number that descriptors name the disk by; never given to another.
    pub id: U32,
    pub path_len: U16,
    /// 1 while the disk is being resized: the base image may be longer than `size`, and what is beyond is void.
    /// Else 0.
    pub resizing: U16,
    /// Bytes of the disk.
    pub size: U64,
    /// Where the base image was when the disk was last opened (absolute, not terminated).
    pub path: [u8; 480],
}

/// First block of a segment in use. Written together with the segment's first batch.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct SegmentHeader {
    pub magic: [u8; 8],
    pub version: U32,
    /// CRC-32C of the structure with this field zero.
    pub crc: U32,
    pub log: Uuid,
    /// Position in the log's order; grows by one or more with each segment taken into use.
    pub sequence: U64,
    /// The segment that the log came from, so that a missing one is noticed. 0: none.
    pub previous_sequence: U64,
    /// LSN of the last record before this segment. What follows it in the previous one is void.
    pub previous_lsn: U64,
    /// Random, new with every sequence; repeated in each batch header.
    pub salt: U64,
}

/// First bytes of a batch; `descriptor_count` [`Descriptor`]s follow, padded to a block.
///
/// The fixed part comes first so that a reader can bound the rest before trusting it; the CRC covers the
/// header and the descriptors; each payload has a CRC of its own in its descriptor.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct BatchHeader {
    pub magic: [u8; 8],
    pub version: U32,
    /// CRC-32C of header and descriptors (padding excluded) with this field zero.
    pub crc: U32,
    pub log: Uuid,
    pub sequence: U64,
    pub salt: U64,
    /// The commit group that the batch belongs to: batches of one cid became durable by one sync.
    pub cid: U64,
    /// LSN of the first descriptor; the others follow without gaps.
    pub first_lsn: U64,
    /// Durable LSN when the batch was built: what is at or below it was acknowledged, and can't be a torn tail.
    pub durable_lsn: U64,
    /// Wall clock, microseconds since 1970, not before the previous batch's however the clock was set. For people;
    /// nothing is ordered by it.
    pub unix_us: U64,
    /// CRC of the previous batch's header in this segment (of the segment header for the first).
    pub previous_crc: U32,
    pub descriptor_count: U32,
    /// Bytes of all payloads, without the padding.
    pub payload_bytes: U64,
}

/// One record: what was asked of a disk. Payloads lie behind the header in the order of descriptors.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct Descriptor {
    pub disk_id: U32,
    /// A [`Kind`].
    pub kind: U32,
    pub sector: U64,
    pub sectors: U32,
    /// CRC-32C of the payload; 0 where there is none.
    pub payload_crc: U32,
}

/// Kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum Kind {
    /// `sectors * 512` payload bytes follow.
    Write = 1,
    /// Zeroes; space may be kept allocated.
    WriteZeroes = 2,
    /// Zeroes; space is given back.
    Discard = 3,
}

impl Kind {
    pub(crate) fn from_raw(raw: u32) -> Option<Self> {
        [Self::Write, Self::WriteZeroes, Self::Discard]
            .into_iter()
            .find(|kind| *kind as u32 == raw)
    }
}

impl Descriptor {
    /// Payload bytes behind the header for this record.
    pub(crate) fn payload_len(&self) -> u64 {
        if self.kind.get() == Kind::Write as u32 {
            u64::from(self.sectors.get()) * 512
        } else {
            0
        }
    }
}

/// Bytes of a batch header with `descriptors` descriptors, padded to blocks.
pub(crate) const fn batch_header_len(descriptors: usize) -> usize {
    (size_of::<BatchHeader>() + descriptors * size_of::<Descriptor>()).next_multiple_of(BLOCK)
}

/// CRC-32C of `bytes` as if the four at `at` were zero: how every structure here is sealed.
pub(crate) fn crc_without(bytes: &[u8], at: usize) -> u32 {
    let crc = crc32c::crc32c_append(crc32c::crc32c(&bytes[..at]), &[0; 4]);
    crc32c::crc32c_append(crc, &bytes[at + 4..])
}

/// Offset of the `crc` field: the same in all sealed structures (magic, version, crc).
pub(crate) const CRC_AT: usize = 12;

pub(crate) fn seal(bytes: &mut [u8]) -> u32 {
    let crc = crc_without(bytes, CRC_AT);
    bytes[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    crc
}

/// Whether all can have been reached by counting.
pub(crate) fn counted(numbers: &[U64]) -> bool {
    numbers.iter().all(|number| number.get() < NUMBER_LIMIT)
}

/// What a block turns out to be when it is read as a structure.
#[derive(Debug)]
pub(crate) enum Decoded<T> {
    /// Magic, version and CRC are right.
    Valid(T),
    /// Right magic, another version.
    Version(u32),
    /// Anything else: zeroes, stale bytes, a torn write, rot.
    Invalid,
}

impl SegmentHeader {
    /// Writes the sealed header into `block` and returns its CRC.
    pub(crate) fn encode(&self, block: &mut [u8]) -> u32 {
        block[..size_of::<Self>()].copy_from_slice(self.as_bytes());
        seal(&mut block[..size_of::<Self>()])
    }

    pub(crate) fn decode(block: &[u8]) -> Decoded<Self> {
        let Ok((header, _)) = Self::read_from_prefix(block) else {
            return Decoded::Invalid;
        };
        if header.magic != SEGMENT_MAGIC
            || header.crc.get() != crc_without(&block[..size_of::<Self>()], CRC_AT)
        {
            return Decoded::Invalid;
        }
        match header.version.get() {
            VERSION
                if counted(&[
                    header.sequence,
                    header.previous_sequence,
                    header.previous_lsn,
                ]) =>
            {
                Decoded::Valid(header)
            }
            VERSION => Decoded::Invalid,
            other => Decoded::Version(other),
        }
    }
}

impl BatchHeader {
    /// Writes header and descriptors, sealed, into `block` and returns the CRC.
    ///
    /// # Panics
    /// If `block` is shorter than [`batch_header_len`].
    pub(crate) fn encode(
        &self,
        descriptors: impl Iterator<Item = Descriptor>,
        block: &mut [u8],
    ) -> u32 {
        block[..size_of::<Self>()].copy_from_slice(self.as_bytes());
        let mut end = size_of::<Self>();
        for descriptor in descriptors {
            block[end..end + size_of::<Descriptor>()].copy_from_slice(descriptor.as_bytes());
            end += size_of::<Descriptor>();
        }
        seal(&mut block[..end])
    }

    /// Reads the fixed part and says how many bytes header and descriptors take; nothing is trusted yet.
    pub(crate) fn peek(block: &[u8]) -> Option<(Self, usize)> {
        let (header, _) = Self::read_from_prefix(block).ok()?;
        let count = header.descriptor_count.get() as usize;
        (header.magic == BATCH_MAGIC && (1..=MAX_DESCRIPTORS).contains(&count))
            .then(|| (header, size_of::<Self>() + count * size_of::<Descriptor>()))
    }

    /// Reads the descriptors of a header whose bytes, as long as [`peek`](Self::peek) said, are `bytes`.
    /// `None` if the CRC, a kind or the payload length is not right.
    pub(crate) fn descriptors(&self, bytes: &[u8]) -> Option<Vec<Descriptor>> {
        if self.crc.get() != crc_without(bytes, CRC_AT) {
            return None;
        }
        let descriptors = <[Descriptor]>::ref_from_bytes(&bytes[size_of::<Self>()..]).ok()?;
        let payload: u64 = descriptors.iter().map(Descriptor::payload_len).sum();
        let known = descriptors
            .iter()
            .all(|d| Kind::from_raw(d.kind.get()).is_some());
        (known && payload == self.payload_bytes.get()).then(|| descriptors.to_vec())
    }
}

/// The control slot's contents, decoded.
#[derive(Clone, Debug)]
pub(crate) struct Control {
    pub header: ControlHeader,
    pub disks: Vec<DiskEntry>,
}

impl Control {
    /// The sealed slot, ready to be written at `(generation % 2) * CONTROL_SLOT`.
    pub(crate) fn encode(&self) -> Buffer {
        let mut slot = Buffer::zeroed(CONTROL_SLOT);
        let mut header = self.header;
        header.disk_count = U32::new(self.disks.len() as u32);
        let (head, rest) = slot.split_at_mut(size_of::<ControlHeader>());
        head.copy_from_slice(header.as_bytes());
        rest[..size_of_val(&self.disks[..])].copy_from_slice(self.disks.as_bytes());
        seal(&mut slot);
        slot
    }

    pub(crate) fn decode(slot: &[u8]) -> Decoded<Self> {
        let Ok((header, rest)) = ControlHeader::read_from_prefix(slot) else {
            return Decoded::Invalid;
        };
        if header.magic != CONTROL_MAGIC || header.crc.get() != crc_without(slot, CRC_AT) {
            return Decoded::Invalid;
        }
        if header.version.get() != VERSION {
            return Decoded::Version(header.version.get());
        }
        if !header.counted() {
            return Decoded::Invalid;
        }
        let bytes = (header.disk_count.get() as usize).checked_mul(size_of::<DiskEntry>());
        let disks = bytes
            .and_then(|len| rest.get(..len))
            .and_then(|b| <[DiskEntry]>::ref_from_bytes(b).ok());
        match disks {
            Some(disks) => Decoded::Valid(Self {
                header,
                disks: disks.to_vec(),
            }),
            None => Decoded::Invalid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_no_hidden_padding_and_the_documented_sizes() {
        assert_eq!(size_of::<ControlHeader>(), 96);
        assert_eq!(size_of::<DiskEntry>(), 512);
        assert_eq!(size_of::<SegmentHeader>(), 64);
        assert_eq!(size_of::<BatchHeader>(), 96);
        assert_eq!(size_of::<Descriptor>(), 24);
        const { assert!(MAX_DISKS >= 100) };
    }

    #[test]
    fn every_flipped_bit_of_a_batch_header_is_noticed() {
        let header = BatchHeader {
            magic: BATCH_MAGIC,
            version: U32::new(VERSION),
            crc: U32::new(0),
            log: [7; 16],
            sequence: U64::new(3),
            salt: U64::new(9),
            cid: U64::new(1),
            first_lsn: U64::new(5),
            durable_lsn: U64::new(4),
            unix_us: U64::new(0),
            previous_crc: U32::new(1),
            descriptor_count: U32::new(1),
            payload_bytes: U64::new(1024),
        };
        let descriptor = Descriptor {
            disk_id: U32::new(1),
            kind: U32::new(Kind::Write as u32),
            sector: U64::new(8),
            sectors: U32::new(2),
            payload_crc: U32::new(0),
        };
        let mut block = vec![0; batch_header_len(MAX_DESCRIPTORS)];
        header.encode([descriptor].into_iter(), &mut block);
        let (read, len) = BatchHeader::peek(&block).unwrap();
        assert_eq!(read.descriptors(&block[..len]).unwrap().len(), 1);
        for bit in 0..len * 8 {
            let mut bad = block.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let noticed = BatchHeader::peek(&bad)
                .is_none_or(|(header, len)| header.descriptors(&bad[..len]).is_none());
            assert!(noticed, "bit {bit}");
        }
    }
}
