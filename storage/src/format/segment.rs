//! Segments: their header, batches and summary.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::sealed::{
    BLOCK, CRC_AT, DecodeResult, Uuid, VERSION, counted, crc_without, seal, seal_at,
};
use crate::{Buffer, MAX_REQUEST_BYTES};

/// Most descriptors of one batch. Bounds the header's size and the write's iovec count (IOV_MAX is
/// 1024).
pub(crate) const MAX_DESCRIPTORS: usize = 896;
/// Most checksums of one batch: those of the longest request. Bounds the header's size too.
pub(crate) const MAX_CHECKSUMS: usize = MAX_REQUEST_BYTES / BLOCK;

pub(crate) const SEGMENT_MAGIC: [u8; 8] = *b"WALVSEGM";
pub(crate) const BATCH_MAGIC: [u8; 8] = *b"WALVBATC";
pub(crate) const SUMMARY_MAGIC: [u8; 8] = *b"WALVSUMM";

/// First block of a segment. Written together with the segment's first batch; until then, it is
/// [blank](Self::blank).
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
    /// Sequence of the segment before this one, so that a missing segment is noticed. 0: none.
    pub previous_sequence: U64,
    /// LSN of the last record before this segment. Later records in the previous segment are void.
    pub previous_lsn: U64,
    /// Random, new with every sequence; repeated in each batch header.
    pub salt: U64,
}

/// First bytes of a batch; `descriptor_count` [`Descriptor`]s and `checksum_count` checksums
/// follow, padded to a block.
///
/// The fixed part comes first so that a reader can bound the rest before trusting it. The CRC
/// covers the header, the descriptors and the checksums. Each [`BLOCK`] of each payload has one
/// checksum, a CRC-32C, in the order of the payloads, so that a reader of a part of a payload can
/// verify that part.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct BatchHeader {
    pub magic: [u8; 8],
    pub version: U32,
    /// CRC-32C of header, descriptors and checksums (padding excluded) with this field zero.
    pub crc: U32,
    pub log: Uuid,
    pub sequence: U64,
    pub salt: U64,
    /// The commit group of the batch: batches with the same cid became durable in one sync.
    pub cid: U64,
    /// LSN of the first descriptor; the others follow without gaps.
    pub first_lsn: U64,
    /// Durable LSN when the batch was built: records up to it may have been acknowledged, so they
    /// can't be a torn tail.
    pub durable_lsn: U64,
    /// Wall clock, microseconds since 1970. For people only; nothing is ordered by it. Usually not
    /// below the previous batch's, see [`clock`](crate::log::clock).
    pub unix_us: U64,
    /// CRC of the previous batch's header in this segment (of the segment header for the first).
    pub previous_crc: U32,
    pub descriptor_count: U16,
    pub checksum_count: U16,
    /// Bytes of all payloads, without the padding.
    pub payload_bytes: U64,
}

/// Last bytes of a sealed segment, which takes no more batches. The summary repeats the headers of
/// all its batches, with descriptors and checksums, so that a log can be opened without reading its
/// payloads.
///
/// The footer is at a fixed place, the end of the segment, so that a reader can find it. The
/// headers come right before it, back to back and exactly as in the segment, so each has its own
/// CRC and its predecessor's. The summary is an optimisation: nothing is lost if it is missing or
/// torn.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct SummaryFooter {
    pub magic: [u8; 8],
    pub version: U32,
    /// CRC-32C of the headers and the footer with this field zero.
    pub crc: U32,
    pub log: Uuid,
    pub sequence: U64,
    pub salt: U64,
    /// Bytes of the headers before the footer.
    pub headers_len: U64,
}

/// One record: see [`DescriptorKind`]. Payloads follow the header, in the order of the descriptors.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct Descriptor {
    /// [`NO_DISK`](Self::NO_DISK) in a mark.
    pub disk_id: U32,
    /// A [`DescriptorKind`].
    pub kind: U32,
    /// First sector; 0 in a mark. In a rewind, the LSN to which its disk goes back.
    pub sector: U64,
    /// At least 1; 1 in a mark. 0 in a rewind.
    pub sectors: U32,
}

/// A restore in place: at LSN `at`, and until records follow, the disk is what it was at LSN `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rewind {
    /// The disk's number.
    pub disk_id: u32,
    pub to: u64,
    /// The LSN of the rewind's record.
    pub at: u64,
}

/// Kind of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub(crate) enum DescriptorKind {
    /// `sectors * 512` payload bytes follow.
    Write = 1,
    /// Zeroes; space may be kept allocated.
    WriteZeroes = 2,
    /// Zeroes; space is given back.
    Discard = 3,
    /// A text, in one sector of payload. It changes no disk.
    Mark = 4,
    /// The disk goes back to an earlier LSN, see [`Rewind`].
    Rewind = 5,
}

impl DescriptorKind {
    pub(crate) fn from_raw(raw: u32) -> Option<Self> {
        use DescriptorKind::{Discard, Mark, Rewind, Write, WriteZeroes};
        [Write, WriteZeroes, Discard, Mark, Rewind]
            .into_iter()
            .find(|kind| *kind as u32 == raw)
    }
}

impl Descriptor {
    /// Not a disk's number; those start at 1.
    pub(crate) const NO_DISK: u32 = 0;

    /// Bytes of this record's payload.
    pub(crate) fn payload_len(&self) -> u64 {
        match self.kind() {
            Some(DescriptorKind::Write | DescriptorKind::Mark) => {
                u64::from(self.sectors.get()) * 512
            }
            _ => 0,
        }
    }

    /// The record's kind; `None`: one that this program does not know, in a batch of another
    /// version.
    pub(crate) fn kind(&self) -> Option<DescriptorKind> {
        DescriptorKind::from_raw(self.kind.get())
    }

    /// Whether the record changes sectors of its disk.
    pub(crate) fn changes_sectors(&self) -> bool {
        use DescriptorKind::{Discard, Write, WriteZeroes};
        matches!(self.kind(), Some(Write | WriteZeroes | Discard))
    }

    /// Checksums of the payload.
    pub(crate) fn checksums(&self) -> usize {
        self.payload_len().div_ceil(BLOCK as u64) as usize
    }
}

/// Bytes of a batch header with its descriptors and checksums, without padding.
pub(crate) const fn header_len(descriptors: usize, checksums: usize) -> usize {
    size_of::<BatchHeader>() + descriptors * size_of::<Descriptor>() + checksums * size_of::<U32>()
}

/// The same length, padded to blocks.
pub(crate) const fn batch_header_len(descriptors: usize, checksums: usize) -> usize {
    header_len(descriptors, checksums).next_multiple_of(BLOCK)
}

/// Bytes of the summary for `headers_len` bytes of batch headers, in a segment of `segment_size`
/// bytes. `None`: too many; with so many headers, there is little payload that readers could skip.
pub(crate) fn summary_len(headers_len: usize, segment_size: u64) -> Option<usize> {
    let len = headers_len.checked_add(size_of::<SummaryFooter>())?;
    let len = len.checked_next_multiple_of(BLOCK)?;
    (len as u64 <= segment_size / SUMMARY_SHARE).then_some(len)
}

/// A summary takes at most one part in this many of a segment.
const SUMMARY_SHARE: u64 = 16;

impl SegmentHeader {
    /// The first block of an empty segment: a header with no log and sequence 0. Plain zeroes would
    /// not do, because a lost write also leaves zeroes.
    pub(crate) fn blank() -> Buffer {
        let mut header = Self::new_zeroed();
        header.magic = SEGMENT_MAGIC;
        header.version = U32::new(VERSION);
        let mut block = Buffer::zeroed(BLOCK);
        header.encode(&mut block);
        block
    }

    /// Writes the sealed header into `block` and returns its CRC.
    pub(crate) fn encode(&self, block: &mut [u8]) -> u32 {
        block[..size_of::<Self>()].copy_from_slice(self.as_bytes());
        seal(&mut block[..size_of::<Self>()])
    }

    pub(crate) fn decode(block: &[u8]) -> DecodeResult<Self> {
        let Ok((header, _)) = Self::read_from_prefix(block) else {
            return DecodeResult::Invalid;
        };
        if header.magic != SEGMENT_MAGIC
            || header.crc.get() != crc_without(&block[..size_of::<Self>()], CRC_AT)
        {
            return DecodeResult::Invalid;
        }
        match header.version.get() {
            VERSION
                if counted(&[
                    header.sequence,
                    header.previous_sequence,
                    header.previous_lsn,
                ]) =>
            {
                DecodeResult::Valid(header)
            }
            VERSION => DecodeResult::Invalid,
            other => DecodeResult::Version(other),
        }
    }
}

impl BatchHeader {
    /// Whether this program knows the batch's version.
    pub(crate) fn is_known(&self) -> bool {
        self.version.get() == VERSION
    }

    /// Writes header, descriptors and checksums, sealed, into `block` and returns the CRC.
    ///
    /// # Panics
    /// If `block` is shorter than [`batch_header_len`].
    pub(crate) fn encode(
        &self,
        descriptors: impl Iterator<Item = Descriptor>,
        checksums: impl Iterator<Item = u32>,
        block: &mut [u8],
    ) -> u32 {
        let mut end = 0;
        let mut put = |bytes: &[u8]| {
            block[end..end + bytes.len()].copy_from_slice(bytes);
            end += bytes.len();
        };
        put(self.as_bytes());
        descriptors.for_each(|descriptor| put(descriptor.as_bytes()));
        checksums.for_each(|checksum| put(&checksum.to_le_bytes()));
        seal(&mut block[..end])
    }

    /// Reads the fixed part and returns it with the length of header, descriptors and checksums in
    /// bytes. The CRC is not verified yet.
    pub(crate) fn peek(block: &[u8]) -> Option<(Self, usize)> {
        let (header, _) = Self::read_from_prefix(block).ok()?;
        let descriptors = usize::from(header.descriptor_count.get());
        let checksums = usize::from(header.checksum_count.get());
        (header.magic == BATCH_MAGIC
            && (1..=MAX_DESCRIPTORS).contains(&descriptors)
            && checksums <= MAX_CHECKSUMS)
            .then(|| (header, header_len(descriptors, checksums)))
    }

    /// Reads a header's descriptors and checksums from `bytes`, which has the length that
    /// [`peek`](Self::peek) returned. `None` if the CRC, a kind, the payload length or the number
    /// of checksums is wrong. If the version is unknown, only the CRC is checked.
    pub(crate) fn records(&self, bytes: &[u8]) -> Option<(Vec<Descriptor>, Vec<u32>)> {
        if self.crc.get() != crc_without(bytes, CRC_AT) {
            return None;
        }
        let rest = bytes.get(size_of::<Self>()..)?;
        let count = usize::from(self.descriptor_count.get());
        let (descriptors, rest) = <[Descriptor]>::ref_from_prefix_with_elems(rest, count).ok()?;
        let checksums = <[U32]>::ref_from_bytes(rest).ok()?;
        let payload: u64 = descriptors.iter().map(Descriptor::payload_len).sum();
        let needed: usize = descriptors.iter().map(Descriptor::checksums).sum();
        let known = descriptors
            .iter()
            .all(|descriptor| descriptor.kind().is_some());
        let right = known && payload == self.payload_bytes.get() && needed == checksums.len();
        (right || !self.is_known()).then(|| {
            let checksums = checksums.iter().map(|checksum| checksum.get()).collect();
            (descriptors.to_vec(), checksums)
        })
    }
}

impl SummaryFooter {
    /// The footer of the summary of a segment.
    pub(crate) fn new(log: Uuid, sequence: u64, salt: u64) -> Self {
        Self {
            magic: SUMMARY_MAGIC,
            version: U32::new(VERSION),
            crc: U32::new(0),
            log,
            sequence: U64::new(sequence),
            salt: U64::new(salt),
            headers_len: U64::new(0),
        }
    }

    /// The summary of a segment with these batch headers, to be written at the segment's end;
    /// `None` if they are too long for it.
    pub(crate) fn encode(mut self, headers: &[u8], segment_size: u64) -> Option<Buffer> {
        let mut summary = Buffer::zeroed(summary_len(headers.len(), segment_size)?);
        self.headers_len = U64::new(headers.len() as u64);
        let footer = summary.len() - size_of::<Self>();
        let first = footer - headers.len();
        summary[first..footer].copy_from_slice(headers);
        summary[footer..].copy_from_slice(self.as_bytes());
        seal_at(&mut summary[first..], headers.len() + CRC_AT);
        Some(summary)
    }

    /// Reads the footer at the end of `block`, the last of a segment, and returns it with the
    /// length of the whole summary in bytes. The CRC is not verified yet.
    pub(crate) fn peek(block: &[u8], segment_size: u64) -> Option<(Self, usize)> {
        let (_, footer) = Self::read_from_suffix(block).ok()?;
        let headers_len = usize::try_from(footer.headers_len.get()).ok()?;
        let known = footer.magic == SUMMARY_MAGIC && footer.version.get() == VERSION;
        Some((footer, summary_len(headers_len, segment_size)?)).filter(|_| known)
    }

    /// The batch headers in `summary`, which has the length that [`peek`](Self::peek) returned.
    /// `None` if the CRC is wrong.
    pub(crate) fn headers<'a>(&self, summary: &'a [u8]) -> Option<&'a [u8]> {
        let footer = summary.len().checked_sub(size_of::<Self>())?;
        let headers_len = self.headers_len.get() as usize;
        let first = footer.checked_sub(headers_len)?;
        let right = self.crc.get() == crc_without(&summary[first..], headers_len + CRC_AT);
        right.then(|| &summary[first..footer])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn structures_have_no_hidden_padding_and_the_documented_sizes() {
        assert_eq!(size_of::<SegmentHeader>(), 64);
        assert_eq!(size_of::<BatchHeader>(), 96);
        assert_eq!(size_of::<Descriptor>(), 20);
        assert_eq!(size_of::<SummaryFooter>(), 56);
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
            descriptor_count: U16::new(1),
            checksum_count: U16::new(1),
            payload_bytes: U64::new(1024),
        };
        let descriptor = Descriptor {
            disk_id: U32::new(1),
            kind: U32::new(DescriptorKind::Write as u32),
            sector: U64::new(8),
            sectors: U32::new(2),
        };
        let mut block = vec![0; batch_header_len(MAX_DESCRIPTORS, MAX_CHECKSUMS)];
        header.encode([descriptor].into_iter(), [77].into_iter(), &mut block);
        let (read, len) = BatchHeader::peek(&block).unwrap();
        let (descriptors, checksums) = read.records(&block[..len]).unwrap();
        assert_eq!((descriptors.len(), &checksums[..]), (1, &[77][..]));
        for bit in 0..len * 8 {
            let mut bad = block.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let noticed = BatchHeader::peek(&bad)
                .is_none_or(|(header, len)| header.records(&bad[..len]).is_none());
            assert!(noticed, "bit {bit}");
        }
    }

    #[test]
    fn every_flipped_bit_of_a_summary_is_noticed() {
        const SIZE: u64 = 1 << 20;
        for len in [0, 1, 200, BLOCK - 56, BLOCK - 55, 3 * BLOCK] {
            let headers: Vec<u8> = (0..len).map(|at| at as u8).collect();
            let summary = SummaryFooter::new([7; 16], 3, 9).encode(&headers, SIZE);
            let summary = summary.unwrap().to_vec();
            assert_eq!(summary.len(), (len + 56).next_multiple_of(BLOCK));
            let read = |summary: &[u8]| {
                let (footer, len) = SummaryFooter::peek(&summary[summary.len() - BLOCK..], SIZE)?;
                let bytes = summary.get(summary.len().checked_sub(len)?..)?;
                footer.headers(bytes).map(<[u8]>::to_vec)
            };
            assert_eq!(read(&summary).unwrap(), headers);
            for bit in (summary.len() - 56 - len) * 8..summary.len() * 8 {
                let mut bad = summary.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                assert!(read(&bad).is_none(), "{len}: bit {bit}");
            }
        }
        let most = SIZE as usize / 16 - 56;
        assert_eq!(summary_len(most, SIZE), Some(SIZE as usize / 16));
        assert_eq!(summary_len(most + 1, SIZE), None);
        assert_eq!(summary_len(usize::MAX, SIZE), None);
    }
}
