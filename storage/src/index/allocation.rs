//! How an open disk is stored, log over base image: which ranges are data, zeroes or holes.

use std::fs::File;
use std::path::Path;

use crate::error::Result;
use crate::index::{Location, Piece};
use crate::medium::file::ReadFile;
use crate::medium::holes::DataRanges;
use crate::{Allocation, Extent, SECTOR_SIZE};

/// Sectors looked up first, and at most at once, which bounds the pieces kept in memory: twice as
/// many each time, because a fragmented disk has enough extents in the first of them.
const FIRST_STEP: u64 = 1 << 11;
const STEP: u64 = 1 << 18;
/// Most sectors reported at once: 8 GiB.
pub(crate) const LIMIT: u64 = 1 << 24;

/// The most questions that one look-up asks a file system: each may be a round trip to another
/// machine.
const MAX_QUESTIONS: usize = 1024;

/// Appends to extents, joining neighbours of one kind.
pub(crate) fn push(extents: &mut Vec<Extent>, sectors: u64, allocation: Allocation) {
    match extents.last_mut() {
        _ if sectors == 0 => {}
        Some(last) if last.allocation == allocation => last.sectors += sectors,
        _ => extents.push(Extent {
            sectors,
            allocation,
        }),
    }
}

/// See [`Mapped::extents`](crate::Mapped::extents), for a disk of `capacity` sectors. `append`
/// appends the extents, or the changes, of a range that is given by its first sector and its number
/// of sectors, and returns whether the look-up goes on; `false`: those so far are the answer.
pub(crate) fn disk_extents<T>(
    sector: u64,
    sectors: u64,
    capacity: u64,
    most: usize,
    mut append: impl FnMut(u64, u64, &mut Vec<T>) -> Result<bool>,
) -> Result<Vec<T>> {
    let end = sector.saturating_add(sectors.min(LIMIT)).min(capacity);
    let mut extents = Vec::new();
    let (mut at, mut step) = (sector, FIRST_STEP);
    // Look up one extent more than asked for, so that the last one is reported in full.
    while at < end && extents.len() <= most {
        let sectors = step.min(end - at);
        if !append(at, sectors, &mut extents)? {
            break;
        }
        at += sectors;
        step = (2 * step).min(STEP);
    }
    extents.truncate(most.max(1));
    Ok(extents)
}

/// A look-up of extents over a base image. It ends once it has one extent more than asked for, or
/// has asked the file system [many times](MAX_QUESTIONS).
pub(crate) struct ExtentLookUp<'a> {
    /// `None` for a file that is not the host's: all of it is data.
    file: Option<&'a File>,
    path: &'a Path,
    most: usize,
    /// Questions that are left.
    questions: usize,
}

impl<'a> ExtentLookUp<'a> {
    pub(crate) fn new(base: &'a dyn ReadFile, path: &'a Path, most: usize) -> Self {
        Self {
            file: base.host(),
            path,
            most,
            questions: MAX_QUESTIONS,
        }
    }

    fn goes_on(&self, extents: &[Extent]) -> bool {
        extents.len() <= self.most && self.questions > 0
    }

    /// Appends the extents of a piece of an index over the base image. Returns whether the look-up
    /// goes on; `false`: those of the piece's end may be missing.
    pub(crate) fn push_piece(&mut self, piece: &Piece, extents: &mut Vec<Extent>) -> Result<bool> {
        let allocation = match &piece.place {
            Some(Location::Memory { .. } | Location::Log { .. }) => Allocation::Data,
            Some(Location::Zero { unmap: false, .. }) => Allocation::Zero,
            Some(Location::Zero { unmap: true, .. }) => Allocation::Hole,
            None => return self.push_file(piece.sector, piece.sectors, extents),
        };
        let goes_on = self.goes_on(extents);
        if goes_on {
            push(extents, piece.sectors, allocation);
        }
        Ok(goes_on)
    }

    /// As [`push_piece`](Self::push_piece), for `sectors` sectors of the file from `sector` on.
    pub(crate) fn push_file(
        &mut self,
        sector: u64,
        sectors: u64,
        extents: &mut Vec<Extent>,
    ) -> Result<bool> {
        let end = sector + sectors;
        let mut at = sector;
        let bytes = sector * SECTOR_SIZE..end * SECTOR_SIZE;
        let mut ranges = DataRanges::new(self.file, self.path, bytes, u64::MAX);
        while self.goes_on(extents) {
            // Where data begins, and where it ends.
            let asks = if self.file.is_some() { 2 } else { 0 };
            self.questions = self.questions.saturating_sub(asks);
            let Some(data) = ranges.next() else {
                push(extents, end - at, Allocation::Hole);
                return Ok(true);
            };
            let data = data?;
            // A sector with any data in it is data.
            let (start, stop) = (
                data.start / SECTOR_SIZE,
                data.end.div_ceil(SECTOR_SIZE).min(end),
            );
            push(extents, start.saturating_sub(at), Allocation::Hole);
            push(
                extents,
                stop.saturating_sub(start.max(at)),
                Allocation::Data,
            );
            at = at.max(stop);
        }
        Ok(false)
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::medium::holes::QUESTIONS;
    use crate::{
        BackendQueue, Buffer, Disk, DiskOptions, Mapped, Operation, Store, StoreOptions,
        create_disk,
    };

    /// A disk of 64 MiB, and its log.
    struct TestDisk {
        path: PathBuf,
        log: PathBuf,
        options: StoreOptions,
        _directory: tempfile::TempDir,
    }

    impl TestDisk {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            let [path, log] = ["disk.img", "log"].map(|name| directory.path().join(name));
            let options = StoreOptions {
                segment_size: 4 << 20,
                ..StoreOptions::default()
            };
            create_disk(&path, 64 << 20, &log, &options).unwrap();
            Self {
                path,
                log,
                options,
                _directory: directory,
            }
        }
    }

    #[test]
    fn the_log_and_the_base_image_are_reported_as_one() {
        let TestDisk {
            path, log, options, ..
        } = &TestDisk::new();
        let open = || Store::open(log, &[DiskOptions::new(path)], options).unwrap();
        let write = |disk: &Disk, operations: Vec<Operation>| {
            let mut port = disk.open_port().unwrap();
            let count = operations.len();
            for (token, operation) in operations.into_iter().enumerate() {
                port.submit(token as u64, operation);
            }
            port.kick();
            let mut done = Vec::new();
            while done.len() < count {
                port.completions(&mut done);
                std::thread::yield_now();
            }
            assert!(done.iter().all(|end| end.result.is_ok()));
        };
        let data = || Buffer::from(&[7; 1 << 20][..]);
        let told = |disk: &Disk, sector, sectors, most| {
            let extents = disk.extents(sector, sectors, most).unwrap();
            let short = |extent: &Extent| (extent.sectors >> 11, extent.allocation);
            extents.iter().map(short).collect::<Vec<_>>()
        };
        use Allocation::{Data, Hole, Zero};
        // In units of 1 MiB: 4..6 in the base image.
        let store = open();
        let at = |mib: u64| mib << 11;
        let both = [4, 5].map(|mib| Operation::Write {
            sector: at(mib),
            data: data(),
        });
        write(&store.disks()[0], both.into());
        store.close().unwrap();

        let store = open();
        let disk = &store.disks()[0];
        let base = [(4, Hole), (2, Data), (58, Hole)];
        assert_eq!(told(disk, 0, 1 << 30, 100), base);
        // 5..6 discarded, 6..8 zeroed in place, 10..11 written: all in the log.
        let (sectors, zero) = (1 << 11, 2 << 11);
        write(
            disk,
            vec![
                Operation::Discard {
                    sector: at(5),
                    sectors,
                },
                Operation::WriteZeroes {
                    sector: at(6),
                    sectors: zero,
                    unmap: false,
                },
                Operation::Write {
                    sector: at(10),
                    data: data(),
                },
            ],
        );
        let all = [
            (4, Hole),
            (1, Data),
            (1, Hole),
            (2, Zero),
            (2, Hole),
            (1, Data),
            (53, Hole),
        ];
        assert_eq!(told(disk, 0, at(64), 100), all);
        assert_eq!(told(disk, 0, at(64), 2), all[..2]);
        assert_eq!(told(disk, at(7), at(4), 1), [(1, Zero)]);
        assert_eq!(told(disk, at(10), at(1), 9), [(1, Data)]);
    }

    /// Runs `look_up`, and returns its extents and how many times it has asked the file system.
    fn count(look_up: impl FnOnce() -> std::io::Result<Vec<Extent>>) -> (Vec<Extent>, usize) {
        let before = QUESTIONS.get();
        let extents = look_up().unwrap();
        (extents, QUESTIONS.get() - before)
    }

    #[test]
    fn a_look_up_on_a_fragmented_image_asks_a_bounded_number_of_times() {
        let TestDisk {
            path, log, options, ..
        } = &TestDisk::new();
        // A block of data, and a hole of the same length, again and again.
        let image = File::options().write(true).open(path).unwrap();
        for block in 0..4096 {
            std::os::unix::fs::FileExt::write_all_at(&image, &[7; 4096], block * 8192).unwrap();
        }
        let store = Store::open(log, &[DiskOptions::new(path)], options).unwrap();
        let disk = &store.disks()[0];
        let (extents, asked) = count(|| disk.extents(0, 64 << 11, 1));
        assert_eq!(extents, [Extent::data(8)]);
        assert!(asked <= 4, "{asked} questions for one extent");
        let (extents, asked) = count(|| disk.extents(0, 64 << 11, 256));
        assert_eq!(extents.len(), 256);
        assert!(asked <= 260, "{asked} questions for 256 extents");
        // Discarded blocks between the holes: one hole, each part of which is a question.
        let mut port = disk.open_port().unwrap();
        for block in 0..4096 {
            let (sector, sectors) = (block * 16, 8);
            port.submit(block, Operation::Discard { sector, sectors });
        }
        port.kick();
        let mut done = Vec::new();
        while done.len() < 4096 {
            port.completions(&mut done);
            std::thread::yield_now();
        }
        let (extents, asked) = count(|| disk.extents(0, 64 << 11, 256));
        assert_eq!(
            (extents.len(), extents[0].allocation),
            (1, Allocation::Hole)
        );
        assert!(asked <= MAX_QUESTIONS, "{asked} questions for one hole");
        // A client that asks again gets to the end.
        let (mut at, end) = (0, 64 << 11);
        while at < end {
            let part = disk.extents(at, end - at, 256).unwrap();
            assert!(
                part.iter()
                    .all(|extent| extent.allocation == Allocation::Hole)
            );
            at += part.iter().map(|extent| extent.sectors).sum::<u64>();
        }
        assert_eq!(at, end);
    }
}
