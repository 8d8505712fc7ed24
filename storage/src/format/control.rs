//! The control file: the log's root, its table of disks, and what it keeps of its history.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::sealed::{CRC_AT, DecodeResult, Uuid, VERSION, counted, crc_without, seal};
use super::segment::Rewind;
use crate::Buffer;
use crate::mutant::{Mutant, planted};

/// Bytes of one control slot.
pub(crate) const CONTROL_SLOT: usize = 64 << 10;
pub(crate) const CONTROL_MAGIC: [u8; 8] = *b"WALVCTRL";

/// Most disks on one log: as many as a control slot holds.
#[cfg(test)]
const MAX_DISKS: usize = (CONTROL_SLOT - size_of::<ControlHeader>() - size_of::<HistoryHeader>())
    / size_of::<DiskEntry>();

/// Start of a control slot. It is followed by `disk_count` [`DiskEntry`]s, a [`HistoryHeader`] with
/// its [`SnapshotEntry`]s, and `image_count` [`ImageEntry`]s.
///
/// The control file is the log's root: rewritten (other slot, next generation, then fdatasync) when
/// a checkpoint ends, before any segment that it frees is reused. A torn slot fails its CRC, and
/// then the other slot counts.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct ControlHeader {
    pub magic: [u8; 8],
    pub version: U32,
    /// CRC-32C of the whole slot with this field zero.
    pub crc: U32,
    /// Counts control writes; the slot is generation % 2.
    pub generation: U64,
    pub log: Uuid,
    /// Bytes of every segment file.
    pub segment_size: U64,
    /// Most segment files the ring may hold.
    pub max_segments: U32,
    pub disk_count: U32,
    /// Segments below this sequence are free: everything in them is in the base images.
    pub first_sequence: U64,
    /// Every record up to this LSN is in the base images.
    pub checkpoint_lsn: U64,
    /// No LSN below this is assigned again.
    pub next_lsn: U64,
    /// No commit ID below this is assigned again.
    pub next_cid: U64,
    /// The base images may hold records up to this LSN, copied by an unfinished checkpoint. A log
    /// that ends before this LSN is damaged, because older records would be replayed over newer
    /// ones.
    pub copying_lsn: U64,
    /// The log was durable up to this LSN, perhaps further. A log that ends before it is damaged.
    pub durable_lsn: U64,
    pub image_count: U32,
    pub reserved: U32,
}

impl ControlHeader {
    /// Whether all its numbers are below the limit, so that they can be genuine.
    pub(crate) fn counted(&self) -> bool {
        counted(&[
            self.generation,
            self.first_sequence,
            self.checkpoint_lsn,
            self.next_lsn,
            self.next_cid,
            self.copying_lsn,
            self.durable_lsn,
        ])
    }
}

/// A disk of the log.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct DiskEntry {
    pub disk: Uuid,
    /// The disk's number in descriptors; never given to another disk.
    pub id: U32,
    pub path_len: U16,
    /// 1 while the disk is being resized: the base image may then be longer than `size`, and its
    /// bytes beyond that are void. Otherwise 0.
    pub resizing: u8,
    /// 1 if the base image carries a mark; 0 if its file system has no attributes.
    pub marked: u8,
    /// Bytes of the disk.
    pub size: U64,
    /// The generation in the mark of the base image, until the mark has `next_generation`.
    pub generation: U64,
    /// The generation that the mark is being changed to; otherwise the same as `generation`.
    pub next_generation: U64,
    /// Records of this disk up to this LSN count as copied to its base image, whatever
    /// `checkpoint_lsn` says: they were discarded, or copied when the disk left the log.
    pub void_lsn: U64,
    /// Device and inode of the base image when the disk was last opened, which identify an image
    /// without a mark. All 0: unknown.
    pub device: U64,
    pub inode: U64,
    /// When the file was made, in nanoseconds since 1970; 0 if the file system does not report it.
    pub born: U64,
    /// Samples of the base image, as of the last checkpoint that wrote to it.
    pub samples: [Sample; SAMPLES],
    /// The path of the base image when the disk was last opened, not terminated. Relative to the
    /// parent of the log directory if the image is below that, otherwise absolute. Empty: another
    /// disk's image is there now.
    pub path: [u8; 480],
}

/// Number of [`Sample`]s of a disk.
pub(crate) const SAMPLES: usize = 4;

/// A few bytes of a base image.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct Sample {
    /// Byte offset in the base image.
    pub offset: U64,
    /// Length in bytes, at most [`BLOCK`](crate::format::BLOCK). 0: no sample.
    pub len: U32,
    /// The CRC-32C of these bytes.
    pub crc: U32,
}

impl DiskEntry {
    /// Whether all its numbers are below the limit, so that they can be genuine.
    fn counted(&self) -> bool {
        counted(&[self.generation, self.next_generation, self.void_lsn])
    }
}

/// The retention. All zero, as in the slot of an older program: nothing is kept.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct HistoryHeader {
    /// 0: nothing is kept; 1: what was written in a time; 2: a number of bytes; 3: as much as there
    /// is room for.
    pub retain_kind: U32,
    pub snapshot_count: U32,
    /// The time in microseconds, or the bytes.
    pub retain_value: U64,
}

/// A named state of the log's disks. The log keeps what is needed to see it.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct SnapshotEntry {
    /// ASCII, padded with zeroes. All zero: the snapshot was deleted, but older ones need its saved
    /// files.
    pub name: [u8; 64],
    /// The last record that the snapshot includes.
    pub lsn: U64,
    /// The commit group of that record.
    pub cid: U64,
    /// When the snapshot was made, in microseconds since 1970.
    pub unix_us: U64,
    /// How many records are in the snapshot's saved files, which hold what was overwritten in the
    /// base images since. 0: nothing was.
    pub saved: U32,
    /// The number of its only disk; 0: all disks.
    pub disk_id: U32,
}

impl SnapshotEntry {
    /// Whether the snapshot includes this disk.
    pub(crate) fn has(&self, disk_id: u32) -> bool {
        [0, disk_id].contains(&self.disk_id.get())
    }

    /// Whether the snapshot still exists. A deleted one whose saved files are needed by older ones
    /// has no name.
    pub(crate) fn is_named(&self) -> bool {
        self.name[0] != 0
    }
}

/// What else the log knows about a disk's base image: whether it is the one that the disk's past
/// needs. A missing entry is the same as one that is all zero.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub(crate) struct ImageEntry {
    /// The disk's number.
    pub disk_id: U32,
    /// 1 if the image lacks bytes that are in the disk's spill file, else 0.
    pub spilled: U16,
    /// How often the disk was cut to a smaller size, modulo 65,536: nothing that was behind has come
    /// back, whatever the size is now.
    pub cuts: U16,
    /// The disk has no past before this LSN: it was not on the log, or had another image. 0: no
    /// limit.
    pub since_lsn: U64,
    /// When the log last wrote to the image, in nanoseconds since 1970, by the image's file system.
    /// 0: unknown, or the image is being written to.
    pub written: U64,
}

/// The decoded contents of a control slot.
#[derive(Clone, Debug)]
pub(crate) struct Control {
    pub header: ControlHeader,
    pub disks: Vec<DiskEntry>,
    pub history: HistoryHeader,
    pub snapshots: Vec<SnapshotEntry>,
    /// At most one for each disk.
    pub images: Vec<ImageEntry>,
    /// The rewinds that the base images have not passed, in the order of their LSNs. No slot has
    /// them: whoever reads the log learns them from its records.
    pub rewinds: Vec<Rewind>,
}

impl Control {
    /// A log without disks and history.
    pub(crate) fn new(header: ControlHeader) -> Self {
        Self {
            header,
            disks: Vec::new(),
            history: HistoryHeader::default(),
            snapshots: Vec::new(),
            images: Vec::new(),
            rewinds: Vec::new(),
        }
    }

    /// Whether all its numbers can be genuine.
    pub(crate) fn counted(&self) -> bool {
        let mut snapshots = self.snapshots.iter();
        self.header.counted()
            && self.disks.iter().all(DiskEntry::counted)
            && snapshots.all(|snapshot| counted(&[snapshot.lsn, snapshot.cid]))
            && self.images.iter().all(|image| counted(&[image.since_lsn]))
    }

    /// Whether the log has had what the images have.
    pub(crate) fn is_ahead(&self) -> bool {
        self.header.checkpoint_lsn < self.header.next_lsn
    }

    /// Whether all disks, snapshots and images fit a slot.
    pub(crate) fn fits(&self) -> bool {
        let tables = size_of_val(&self.disks[..])
            + size_of_val(&self.snapshots[..])
            + size_of_val(&self.images[..]);
        let headers = size_of::<ControlHeader>() + size_of::<HistoryHeader>();
        headers + tables <= CONTROL_SLOT
    }

    /// The entry of a disk.
    pub(crate) fn disk(&self, id: u32) -> Option<&DiskEntry> {
        self.disks.iter().find(|disk| disk.id.get() == id)
    }

    /// The entry of a disk, for changes.
    pub(crate) fn disk_mut(&mut self, id: u32) -> Option<&mut DiskEntry> {
        self.disks.iter_mut().find(|disk| disk.id.get() == id)
    }

    /// The LSN up to which the records of a disk count as copied to its base image.
    pub(crate) fn applied_lsn(&self, disk_id: u32) -> u64 {
        let disk = self.disk(disk_id);
        let void_lsn = disk.map_or(0, |disk| disk.void_lsn.get());
        void_lsn.max(self.header.checkpoint_lsn.get())
    }

    /// Where the log's history begins: the base images may hold records up to this LSN, possibly
    /// from an unfinished checkpoint, so no disk can be restored to an earlier point.
    pub(crate) fn horizon(&self) -> u64 {
        let header = &self.header;
        header.checkpoint_lsn.get().max(header.copying_lsn.get())
    }

    /// As [`horizon`](Self::horizon), for one disk.
    pub(crate) fn horizon_of(&self, disk_id: u32) -> u64 {
        self.horizon().max(self.applied_lsn(disk_id))
    }

    /// The sealed slot, ready to be written at `(generation % 2) * CONTROL_SLOT`.
    ///
    /// # Panics
    /// If the disks, snapshots and images do not [fit](Self::fits).
    pub(crate) fn encode(&self) -> Buffer {
        assert!(self.fits(), "a control file has room for what it gets");
        let mut slot = Buffer::zeroed(CONTROL_SLOT);
        let (mut header, mut history) = (self.header, self.history);
        header.version = U32::new(VERSION);
        header.disk_count = U32::new(self.disks.len() as u32);
        header.image_count = U32::new(self.images.len() as u32);
        history.snapshot_count = U32::new(self.snapshots.len() as u32);
        let mut end = 0;
        for part in [
            header.as_bytes(),
            self.disks.as_bytes(),
            history.as_bytes(),
            self.snapshots.as_bytes(),
            self.images.as_bytes(),
        ] {
            slot[end..end + part.len()].copy_from_slice(part);
            end += part.len();
        }
        seal(&mut slot);
        slot
    }

    pub(crate) fn decode(slot: &[u8]) -> DecodeResult<Self> {
        let Ok((header, rest)) = ControlHeader::read_from_prefix(slot) else {
            return DecodeResult::Invalid;
        };
        let right = header.crc.get() == crc_without(slot, CRC_AT);
        if header.magic != CONTROL_MAGIC || !(right || planted(Mutant::ControlChecksumIgnored)) {
            return DecodeResult::Invalid;
        }
        if header.version.get() != VERSION {
            return DecodeResult::Version(header.version.get());
        }
        let tables = || {
            let (disks, rest) = table::<DiskEntry>(rest, header.disk_count)?;
            let (history, rest) = HistoryHeader::read_from_prefix(rest).ok()?;
            let (snapshots, rest) = table::<SnapshotEntry>(rest, history.snapshot_count)?;
            let (images, _) = table::<ImageEntry>(rest, header.image_count)?;
            Some(Self {
                disks,
                history,
                snapshots,
                images,
                ..Self::new(header)
            })
        };
        match tables().filter(Self::counted) {
            Some(control) => DecodeResult::Valid(control),
            None => DecodeResult::Invalid,
        }
    }
}

/// The first `count` entries in `bytes`, and the bytes after them.
fn table<T: FromBytes + KnownLayout + Immutable + Clone + 'static>(
    bytes: &[u8],
    count: U32,
) -> Option<(Vec<T>, &[u8])> {
    let (entries, rest) = <[T]>::ref_from_prefix_with_elems(bytes, count.get() as usize).ok()?;
    Some((entries.to_vec(), rest))
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;
    use crate::mutant::PLANTED;

    #[test]
    fn structures_have_no_hidden_padding_and_the_documented_sizes() {
        assert_eq!(size_of::<ControlHeader>(), 112);
        assert_eq!(size_of::<DiskEntry>(), 624);
        assert_eq!(size_of::<HistoryHeader>(), 16);
        assert_eq!(size_of::<SnapshotEntry>(), 96);
        assert_eq!(size_of::<ImageEntry>(), 24);
        const { assert!(MAX_DISKS >= 100) };
    }

    #[test]
    fn an_overfull_slot_is_damage() {
        let mut full = control(1);
        full.snapshots.clear();
        let mut entry = SnapshotEntry::new_zeroed();
        entry.name[0] = b'a';
        while full.fits() {
            full.snapshots.push(entry);
        }
        let count = full.snapshots.len() as u32;
        full.snapshots.pop();
        let mut slot = full.encode();
        assert!(matches!(Control::decode(&slot), DecodeResult::Valid(_)));
        let at = size_of::<ControlHeader>() + size_of::<DiskEntry>() + 4;
        slot[at..at + 4].copy_from_slice(&count.to_le_bytes());
        seal(&mut slot);
        assert!(matches!(Control::decode(&slot), DecodeResult::Invalid));
    }

    /// A log with so many disks, three snapshots and an image.
    fn control(disks: usize) -> Control {
        let mut header = ControlHeader::new_zeroed();
        header.magic = CONTROL_MAGIC;
        header.checkpoint_lsn = U64::new(3);
        header.next_lsn = U64::new(100);
        let mut entry = DiskEntry::new_zeroed();
        entry.path = [b'x'; 480];
        let mut snapshot = SnapshotEntry::new_zeroed();
        snapshot.name = [b'x'; 64];
        let mut image = ImageEntry::new_zeroed();
        image.since_lsn = U64::new(7);
        Control {
            disks: vec![entry; disks],
            snapshots: vec![snapshot; 3],
            images: vec![image],
            ..Control::new(header)
        }
    }

    #[test]
    fn a_slot_comes_back_as_it_was_written_and_other_versions_are_told() {
        let written = control(2);
        let mut slot = written.encode();
        let DecodeResult::Valid(read) = Control::decode(&slot) else {
            panic!("a valid slot");
        };
        assert_eq!(read.disks.as_bytes(), written.disks.as_bytes());
        assert_eq!(read.snapshots.as_bytes(), written.snapshots.as_bytes());
        assert_eq!(read.images.as_bytes(), written.images.as_bytes());
        for version in [VERSION - 1, VERSION + 1] {
            slot[8..12].copy_from_slice(&version.to_le_bytes());
            seal(&mut slot);
            assert!(
                matches!(Control::decode(&slot), DecodeResult::Version(read) if read == version)
            );
        }
    }

    /// No crash history can show why a control slot needs its checksum: all bytes that the
    /// history's store changes lie in one sector.
    #[test]
    fn every_flipped_bit_of_a_control_slot_is_noticed() {
        let control = control(2);
        assert!(control.fits());
        let slot = control.encode();
        let is_taken = |bit: usize| {
            let mut bad = slot.to_vec();
            bad[bit / 8] ^= 1 << (bit % 8);
            matches!(Control::decode(&bad), DecodeResult::Valid(_))
        };
        let tables = 2 * size_of::<DiskEntry>() + 16 + 3 * size_of::<SnapshotEntry>();
        let used = size_of::<ControlHeader>() + tables + size_of::<ImageEntry>();
        let mut bits = (0..used * 8).chain((used * 8..CONTROL_SLOT * 8).step_by(97));
        assert!(bits.all(|bit| !is_taken(bit)));
        // Without the checksum a changed path would be believed.
        PLANTED.set(Some(Mutant::ControlChecksumIgnored));
        let believed = is_taken((size_of::<ControlHeader>() + 200) * 8);
        PLANTED.set(None);
        assert!(believed);
    }
}
