//! How an open disk is stored, log over base image: which ranges are data, zeroes or holes.

use std::fs::File;
use std::path::Path;

use crate::error::Result;
use crate::index::{Location, Piece};
use crate::medium::file::ReadFile;
use crate::medium::holes::DataRanges;
use crate::{Allocation, Extent, SECTOR_SIZE};

/// Sectors looked up at once, which bounds the pieces kept in memory.
const STEP: u64 = 1 << 18;
/// Most sectors reported at once: 8 GiB.
pub(crate) const LIMIT: u64 = 1 << 24;

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
/// of sectors.
pub(crate) fn disk_extents<T>(
    sector: u64,
    sectors: u64,
    capacity: u64,
    most: usize,
    mut append: impl FnMut(u64, u64, &mut Vec<T>) -> Result<()>,
) -> Result<Vec<T>> {
    let end = sector.saturating_add(sectors.min(LIMIT)).min(capacity);
    let mut extents = Vec::new();
    let mut at = sector;
    // Look up one extent more than asked for, so that the last one is reported in full.
    while at < end && extents.len() <= most {
        let step = STEP.min(end - at);
        append(at, step, &mut extents)?;
        at += step;
    }
    extents.truncate(most.max(1));
    Ok(extents)
}

/// Appends the extents of a piece of an index over the base image at `path`.
pub(crate) fn push_piece(
    extents: &mut Vec<Extent>,
    piece: &Piece,
    base: &dyn ReadFile,
    path: &Path,
) -> Result<()> {
    let allocation = match &piece.place {
        Some(Location::Memory { .. } | Location::Log { .. }) => Allocation::Data,
        Some(Location::Zero { unmap: false, .. }) => Allocation::Zero,
        Some(Location::Zero { unmap: true, .. }) => Allocation::Hole,
        None => return file_extents(base.host(), path, piece.sector, piece.sectors, extents),
    };
    push(extents, piece.sectors, allocation);
    Ok(())
}

/// Appends a file's extents for `sectors` sectors from `sector` on. A file that is not the host's
/// is all data.
pub(crate) fn file_extents(
    file: Option<&File>,
    path: &Path,
    sector: u64,
    sectors: u64,
    extents: &mut Vec<Extent>,
) -> Result<()> {
    let end = sector + sectors;
    let mut at = sector;
    let bytes = sector * SECTOR_SIZE..end * SECTOR_SIZE;
    for data in DataRanges::new(file, path, bytes, u64::MAX) {
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
    push(extents, end - at, Allocation::Hole);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        BackendQueue, Buffer, Disk, DiskOptions, Mapped, Operation, Store, StoreOptions,
        create_disk,
    };

    #[test]
    fn the_log_and_the_base_image_are_reported_as_one() {
        let directory = tempfile::tempdir().unwrap();
        let (path, log) = (
            directory.path().join("disk.img"),
            directory.path().join("log"),
        );
        let options = StoreOptions {
            segment_size: 4 << 20,
            ..StoreOptions::default()
        };
        create_disk(&path, 64 << 20, &log, &options).unwrap();
        let open = || Store::open(&log, &[DiskOptions::new(&path)], &options).unwrap();
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
}
