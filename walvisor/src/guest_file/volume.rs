//! Which part of a disk has a file system: the whole disk, or one of its partitions (MBR with
//! logical partitions, GPT).

use std::fmt::Write;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use walvisor_devices::backend::SECTOR_SIZE;

use crate::size::human_size;

/// A file system that a file can be taken out of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileSystem {
    /// ext4, and ext2 and ext3, which the same code reads.
    Ext4,
    /// xfs.
    Xfs,
}

impl FileSystem {
    /// As mount(8) names it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        }
    }
}

/// A file system, and where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Volume {
    /// What it is.
    pub file_system: FileSystem,
    /// The number of its partition; `None`: the whole disk.
    pub partition: Option<u32>,
    /// Its bytes on the disk.
    pub bytes: Range<u64>,
}

/// What may be in a partition: where it has these bytes, and its name.
const SIGNATURES: [(u64, &[u8], &str); 6] = [
    (1024 + 56, &[0x53, 0xef], "ext4"),
    (0, b"XFSB", "xfs"),
    (0x10040, b"_BHRfS_M", "btrfs"),
    (0, b"LUKS\xba\xbe", "LUKS"),
    (512 + 24, b"LVM2 001", "LVM"),
    (4086, b"SWAPSPACE2", "swap"),
];

/// Reads a range of the disk, of whole sectors.
pub type ReadDisk = Arc<dyn Fn(&mut [u8], u64) -> io::Result<()> + Send + Sync>;

struct Partition {
    number: u32,
    bytes: Range<u64>,
}

impl Volume {
    /// Finds the file system of a disk of `bytes` bytes: that of partition number `partition`; else
    /// that of the whole disk, or of the only partition that has one.
    ///
    /// # Errors
    /// One line: what the disk has in place of one such file system; or it can't be read.
    pub fn find(read: &ReadDisk, bytes: u64, partition: Option<u32>) -> Result<Self, String> {
        let failed = |error: io::Error| format!("can't look for a file system: {error}");
        let whole = content(read, &(0..bytes)).map_err(failed)?;
        if let (None, Some(file_system)) = (partition, whole.and_then(known)) {
            return Ok(Self {
                file_system,
                partition: None,
                bytes: 0..bytes,
            });
        }
        let mut candidates = Vec::new();
        let mut told = String::new();
        for Partition { number, bytes } in partitions(read, bytes).map_err(failed)? {
            let content = content(read, &bytes).map_err(failed)?;
            let size = human_size(bytes.end - bytes.start);
            let gap = if told.is_empty() { "" } else { ", " };
            let name = content.unwrap_or("nothing known");
            let _ = write!(told, "{gap}{number} ({name}, {size})");
            if let Some(file_system) = content.and_then(known) {
                candidates.push(Self {
                    file_system,
                    partition: Some(number),
                    bytes,
                });
            }
        }
        let told = match (told.as_str(), whole) {
            ("", Some(other)) => format!("the disk has {other}"),
            ("", None) => "the disk has neither a file system nor partitions".to_owned(),
            (partitions, _) => format!("the disk has these partitions: {partitions}"),
        };
        if partition.is_some() {
            candidates.retain(|candidate| candidate.partition == partition);
        }
        match (candidates.len(), partition) {
            (1, _) => Ok(candidates.remove(0)),
            (0, None) => Err(format!(
                "no ext4 or xfs: {told}; 'disk restore' without --file makes an image of all of it"
            )),
            (0, Some(number)) => Err(format!("no ext4 or xfs in partition {number}: {told}")),
            (_, _) => Err(format!("which file system? Give --partition N: {told}")),
        }
    }
}

fn known(name: &str) -> Option<FileSystem> {
    let all = [FileSystem::Ext4, FileSystem::Xfs];
    all.into_iter().find(|known| known.name() == name)
}

/// The name of what is in a range of the disk, if its signature is known.
fn content(read: &ReadDisk, bytes: &Range<u64>) -> io::Result<Option<&'static str>> {
    for (at, magic, name) in SIGNATURES {
        let first = at / SECTOR_SIZE * SECTOR_SIZE;
        let mut sectors = [0; 2 * SECTOR_SIZE as usize];
        if bytes.end.saturating_sub(bytes.start) < first + sectors.len() as u64 {
            continue;
        }
        read(&mut sectors, bytes.start + first)?;
        if sectors[(at - first) as usize..].starts_with(magic) {
            return Ok(Some(name));
        }
    }
    Ok(None)
}

fn le(bytes: &[u8], at: usize, len: usize) -> u64 {
    let mut number = [0; 8];
    number[..len].copy_from_slice(&bytes[at..at + len]);
    u64::from_le_bytes(number)
}

/// A range in bytes, if it is on the disk.
fn on_disk(first: u64, sectors: u64, bytes: u64) -> Option<Range<u64>> {
    let start = first.checked_mul(SECTOR_SIZE)?;
    let end = start.checked_add(sectors.checked_mul(SECTOR_SIZE)?)?;
    (sectors > 0 && first > 0 && end <= bytes).then_some(start..end)
}

/// The partitions of a disk that end on it. An unknown or damaged table has none.
fn partitions(read: &ReadDisk, bytes: u64) -> io::Result<Vec<Partition>> {
    let mut sector = [0; SECTOR_SIZE as usize];
    if bytes < 2 * SECTOR_SIZE {
        return Ok(Vec::new());
    }
    read(&mut sector, 0)?;
    if !has_table(&sector) {
        return Ok(Vec::new());
    }
    let mut found = Vec::new();
    for (number, (kind, first, sectors)) in (1..).zip(entries(&sector)) {
        match kind {
            0xee => return gpt(read, bytes),
            0x05 | 0x0f | 0x85 => logical(read, bytes, first, &mut found)?,
            _ => found
                .extend(on_disk(first, sectors, bytes).map(|bytes| Partition { number, bytes })),
        }
    }
    found.sort_by_key(|partition| partition.number);
    Ok(found)
}

fn has_table(sector: &[u8]) -> bool {
    sector[510..] == [0x55, 0xaa]
}

/// The four entries of an MBR: type, first sector, sectors.
fn entries(sector: &[u8]) -> impl Iterator<Item = (u8, u64, u64)> {
    let entries = sector[446..510].chunks(16);
    entries.map(|entry| (entry[4], le(entry, 8, 4), le(entry, 12, 4)))
}

/// The logical partitions of an extended one: a list of tables, each with one partition and the
/// next table.
fn logical(
    read: &ReadDisk,
    bytes: u64,
    extended: u64,
    found: &mut Vec<Partition>,
) -> io::Result<()> {
    let (mut table, mut sector) = (extended, [0; SECTOR_SIZE as usize]);
    // A damaged list may be a circle.
    for number in 5..5 + 128 {
        let Some(place) = on_disk(table, 1, bytes) else {
            break;
        };
        read(&mut sector, place.start)?;
        if !has_table(&sector) {
            break;
        }
        let mut entries = entries(&sector);
        let (_, first, sectors) = entries.next().unwrap_or_default();
        let place = on_disk(table + first, sectors, bytes);
        found.extend(place.map(|bytes| Partition { number, bytes }));
        match entries.next() {
            Some((0x05 | 0x0f | 0x85, next, _)) if next > 0 => table = extended + next,
            _ => break,
        }
    }
    Ok(())
}

/// The partitions of a GUID partition table (UEFI 2.10, 5.3).
fn gpt(read: &ReadDisk, bytes: u64) -> io::Result<Vec<Partition>> {
    let mut header = [0; SECTOR_SIZE as usize];
    // The one at the end is a copy.
    for at in [SECTOR_SIZE, bytes / SECTOR_SIZE * SECTOR_SIZE - SECTOR_SIZE] {
        read(&mut header, at)?;
        if header.starts_with(b"EFI PART") {
            break;
        }
    }
    let (table, count, size) = (le(&header, 72, 8), le(&header, 80, 4), le(&header, 84, 4));
    if !header.starts_with(b"EFI PART") || !(128..=4096).contains(&size) || count > 1024 {
        return Ok(Vec::new());
    }
    let Some(place) = on_disk(table, (count * size).div_ceil(SECTOR_SIZE), bytes) else {
        return Ok(Vec::new());
    };
    let mut entries = vec![0; (place.end - place.start) as usize];
    read(&mut entries, place.start)?;
    let entries = entries.chunks_exact(size as usize).take(count as usize);
    let partition = |(number, entry): (u32, &[u8])| {
        let (first, last) = (le(entry, 32, 8), le(entry, 40, 8));
        let sectors = last.checked_sub(first)?.checked_add(1)?;
        let used = entry[..16].iter().any(|&byte| byte != 0);
        let bytes = on_disk(first, sectors, bytes).filter(|_| used)?;
        Some(Partition { number, bytes })
    };
    Ok((1..).zip(entries).filter_map(partition).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECTORS: usize = 4096;

    struct Disk(Vec<u8>);

    impl Disk {
        fn new() -> Self {
            Self(vec![0; SECTORS * 512])
        }

        fn put(&mut self, at: usize, bytes: &[u8]) {
            self.0[at..at + bytes.len()].copy_from_slice(bytes);
        }

        fn ext4(mut self, sector: usize) -> Self {
            self.put(sector * 512 + 1080, &[0x53, 0xef]);
            self
        }

        /// Entry `index` of the table in a sector.
        fn entry(mut self, table: usize, index: usize, kind: u8, first: u32, count: u32) -> Self {
            let at = table * 512 + 446 + 16 * index;
            self.put(at + 4, &[kind]);
            self.put(at + 8, &first.to_le_bytes());
            self.put(at + 12, &count.to_le_bytes());
            self.put(table * 512 + 510, &[0x55, 0xaa]);
            self
        }

        fn gpt(mut self, header: usize, table: u64, partitions: &[(u64, u64)]) -> Self {
            self = self.entry(0, 0, 0xee, 1, u32::MAX);
            self.put(header * 512, b"EFI PART");
            self.put(header * 512 + 72, &table.to_le_bytes());
            self.put(header * 512 + 80, &128_u32.to_le_bytes());
            self.put(header * 512 + 84, &128_u32.to_le_bytes());
            for (index, (first, last)) in partitions.iter().enumerate() {
                let at = table as usize * 512 + index * 128;
                self.put(at, &[1; 16]);
                self.put(at + 32, &first.to_le_bytes());
                self.put(at + 40, &last.to_le_bytes());
            }
            self
        }

        fn find(&self, partition: Option<u32>) -> Result<Volume, String> {
            let disk = self.0.clone();
            let read: ReadDisk = Arc::new(move |bytes: &mut [u8], at: u64| {
                assert!(at.is_multiple_of(512) && bytes.len().is_multiple_of(512));
                bytes.copy_from_slice(&disk[at as usize..at as usize + bytes.len()]);
                Ok(())
            });
            Volume::find(&read, self.0.len() as u64, partition)
        }

        #[track_caller]
        fn has(&self, partition: Option<u32>, number: u32, sectors: Range<u64>) {
            let found = self.find(partition).unwrap();
            assert_eq!(found.partition, Some(number));
            assert_eq!(found.bytes, sectors.start * 512..sectors.end * 512);
        }

        #[track_caller]
        fn refused(&self, partition: Option<u32>, why: &str) {
            let error = self.find(partition).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }

    #[test]
    fn a_file_system_may_be_the_whole_disk() {
        let found = Disk::new().ext4(0).find(None).unwrap();
        assert_eq!((found.partition, found.bytes.end), (None, 4096 * 512));
        let mut xfs = Disk::new();
        xfs.put(0, b"XFSB");
        assert_eq!(xfs.find(None).unwrap().file_system, FileSystem::Xfs);
        Disk::new().refused(None, "neither a file system nor partitions");
        let mut luks = Disk::new();
        luks.put(0, b"LUKS\xba\xbe");
        luks.refused(None, "the disk has LUKS; 'disk restore' without --file");
    }

    #[test]
    fn the_partition_with_the_file_system_is_found_among_primary_and_logical_ones() {
        let disk = Disk::new()
            .entry(0, 0, 0x83, 8, 100)
            .entry(0, 1, 0x05, 1000, 3000)
            .entry(1000, 0, 0x83, 8, 92)
            .entry(1000, 1, 0x05, 100, 100)
            .entry(1100, 0, 0x83, 8, 92)
            .ext4(1108);
        disk.has(None, 6, 1108..1200);
        let disk = disk.ext4(8);
        disk.refused(
            None,
            "--partition N: the disk has these partitions: 1 (ext4, 50 KiB), 5 (nothing known, 46 \
             KiB), 6 (ext4",
        );
        disk.has(Some(1), 1, 8..108);
        disk.has(Some(6), 6, 1108..1200);
        disk.refused(Some(5), "no ext4 or xfs in partition 5: the disk has");
        disk.refused(Some(2), "no ext4 or xfs in partition 2");
    }

    #[test]
    fn a_gpt_and_its_copy_at_the_end_have_partitions() {
        for header in [1, SECTORS - 1] {
            let disk = Disk::new().gpt(header, 4000, &[(64, 127), (128, 255)]);
            disk.ext4(128).has(None, 2, 128..256);
        }
    }

    #[test]
    fn damaged_tables_have_no_partitions_beyond_the_disk_and_come_to_an_end() {
        // A circle.
        let disk = Disk::new()
            .entry(0, 0, 0x05, 1000, 3000)
            .entry(1000, 1, 0x05, u32::MAX, 1);
        disk.refused(None, "neither");
        let circle = Disk::new()
            .entry(0, 0, 0x0f, 100, 3000)
            .entry(100, 0, 0x83, 8, 92)
            .entry(100, 1, 0x05, 100, 100)
            .entry(200, 1, 0x05, 100, 100);
        circle.refused(None, "nothing known");
        for (first, last) in [
            (0, u64::MAX),
            (u64::MAX, 0),
            (4000, 4096),
            (u64::MAX >> 9, u64::MAX),
        ] {
            Disk::new()
                .gpt(1, 2, &[(first, last)])
                .refused(None, "neither");
        }
        Disk::new().gpt(1, u64::MAX, &[]).refused(None, "neither");
        let mut random = 1_u64;
        for _ in 0..2000 {
            let mut disk = Disk::new().gpt(1, 2, &[(64, 127)]).entry(0, 1, 5, 300, 500);
            for _ in 0..64 {
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1);
                let at = (random >> 33) as usize % 2048;
                disk.0[at] = (random >> 20) as u8;
            }
            if let Ok(found) = disk.find(None) {
                assert!(found.bytes.start < found.bytes.end && found.bytes.end <= 4096 * 512);
            }
        }
    }

    #[test]
    fn a_tiny_disk_is_no_fault() {
        for sectors in 1..10 {
            let mut disk = Disk(vec![0; sectors * 512]);
            disk.put(510, &[0x55, 0xaa]);
            disk.put(446 + 4, &[0xee]);
            disk.refused(None, "neither");
        }
    }
}
