//! Resizing a disk that is not in use: a change to two files that a crash may cut anywhere.
//!
//! ```text
//!   1. control file: size = the smaller one, resizing = 1     "what is longer in the base image is void"
//!   2. base image:   its new length, synced
//!   3. control file: size = the new one, resizing = 0
//! ```
//! After a crash before step 1 or after step 3, the disk has its old or its new size. After one in
//! between, it has the smaller of the two, and the next open cuts the base image to it: growing
//! never happened, shrinking did. Each step is durable before the next begins, and no step needs
//! space.

use std::path::{Path, PathBuf};

use zerocopy::little_endian::U64;

use crate::catalog::identity::written;
use crate::catalog::options::{Resize, check_size};
use crate::catalog::snapshot::Snapshot;
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::medium::fetch_map::FetchMap;
use crate::medium::file::set_size;
use crate::medium::lock::Access;
use crate::mutant::{Mutant, planted};
use crate::store::open::copy_closed;
use crate::store::view::View;

/// Resizes the disk at `path`. New space reads as zeroes. Shrinks the disk only if everything cut
/// off is zero, or if `lose_data` is set. `detached`: images of other disks of the log, to which it
/// may have to be copied.
///
/// # Errors
/// As [`inspect`](crate::inspect); [`ErrorKind::InvalidInput`] if the size is not a positive
/// multiple of 512, or data would be lost. The disk is then unchanged.
pub fn resize_disk(
    path: &Path,
    size: u64,
    log_dir: &Path,
    lose_data: bool,
    detached: &[PathBuf],
) -> Result<Resize> {
    check_size(path, size)?;
    let view = View::open(path, log_dir, Access::Write, None)?;
    if size < view.size {
        // What it cuts off would be fetched again.
        FetchMap::refuse(path)?;
    }
    if let Some((control, _)) = view.log.as_ref().filter(|_| size < view.size) {
        let what = format!("everything after byte {size} would be cut off");
        Snapshot::refuse_loss(&control.control, path, &what)?;
    }
    let view = if size < view.size && holds_records(&view) {
        // No record may reach beyond the new end, so first copy all records to the base image.

        refuse_loss(&view, size, lose_data)?;
        drop(view);
        copy_closed(path, log_dir, detached)?;
        View::open(path, log_dir, Access::Write, None)?
    } else {
        view
    };
    refuse_loss(&view, size, lose_data)?;
    if size < view.size && holds_records(&view) {
        return Err(Error::new(
            ErrorKind::Locked,
            format!(
                "{}: another process used the disk in the meantime; close it there, then try again",
                path.display()
            ),
        ));
    }
    let old_size = view.size;
    let done = Resize { old_size, size };
    let Some((mut control, found)) = view.log else {
        set_size(view.base.file.as_ref(), path, size)?;
        return Ok(done);
    };
    let smaller = size.min(old_size);
    let entry = &mut control.control.disks[found];
    (entry.size, entry.resizing) = (U64::new(smaller), 1);
    entry.cut_samples(smaller);
    let disk_id = entry.id.get();
    if size < old_size {
        control.control.note_cut(disk_id)?;
    }
    // Changing the length counts as a write.
    control.control.set_written(disk_id, 0);
    if !planted(Mutant::ResizeUnannounced) {
        control.write()?;
    }
    if view.base.size > smaller {
        // Also cuts off what an earlier, interrupted resize left, which must not come back as new
        // space.
        set_size(view.base.file.as_ref(), path, smaller)?;
    }
    set_size(view.base.file.as_ref(), path, size)?;
    let entry = &mut control.control.disks[found];
    (entry.size, entry.resizing) = (U64::new(size), 0);
    let written = written(view.base.file.as_ref());
    control.control.set_written(disk_id, written);
    control.write()?;
    Ok(done)
}

/// Whether the log has records of the disk that are not in its image and that count, or may count
/// again; or a spill file has them.
fn holds_records(view: &View) -> bool {
    view.rewound || !view.extents.is_empty() || view.reader.is_spilled()
}

fn refuse_loss(view: &View, size: u64, lose_data: bool) -> Result<()> {
    if lose_data || size >= view.size || !view.holds_data_from(size)? {
        return Ok(());
    }
    Err(invalid(format!(
        "{}: holds data after byte {size}, which shrinking from {} bytes would lose; shrink the \
         file system first, or discard the data with --shrink",
        view.base.options.path.display(),
        view.size
    )))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::SECTOR_SIZE;
    use crate::inspect;
    use crate::{Backend, Buffer, Operation, Port, Store, create_disk, default_log_dir};
    use crate::{DiskOptions, StoreOptions};

    pub(crate) const MIB: u64 = 1 << 20;

    pub(crate) fn end(port: &mut Port, operation: Operation) -> Option<Buffer> {
        port.end_for_test(operation).unwrap()
    }

    pub(crate) fn fill(port: &mut Port, sector: u64, byte: u8) {
        let data = Buffer::from(&[byte; 4096][..]);
        end(port, Operation::Write { sector, data });
    }

    pub(crate) fn open(disk: &Path) -> Store {
        let options = [DiskOptions::new(disk)];
        Store::open(&default_log_dir(disk), &options, &StoreOptions::default()).unwrap()
    }

    /// A new disk of 1 MiB in a directory of its own, open.
    #[cfg(not(feature = "shuttle"))]
    pub(crate) fn new_disk() -> (tempfile::TempDir, Store) {
        let dir = tempfile::tempdir().unwrap();
        let disk = dir.path().join("disk.img");
        let options = StoreOptions::default();
        create_disk(&disk, MIB, &default_log_dir(&disk), &options).unwrap();
        let store = open(&disk);
        (dir, store)
    }

    /// A disk of 4 MiB as a crash leaves it, with data in its first page and `last` in its last,
    /// both only in the log.
    fn crashed(dir: &Path, last: u8) -> PathBuf {
        let (from, to) = (dir.join("from"), dir.join("to"));
        let (disk, copy) = (from.join("disk.img"), to.join("disk.img"));
        std::fs::create_dir(&from).unwrap();
        let (log, log_copy) = (default_log_dir(&disk), default_log_dir(&copy));
        std::fs::create_dir_all(&log_copy).unwrap();
        let options = StoreOptions {
            segment_size: MIB,
            ..StoreOptions::default()
        };
        create_disk(&disk, 4 * MIB, &log, &options).unwrap();
        let store = open(&disk);
        let mut port = store.disks()[0].open_port().unwrap();
        fill(&mut port, 0, 1);
        fill(&mut port, 4 * MIB / SECTOR_SIZE - 8, last);
        end(&mut port, Operation::Flush);
        for name in ["control", "segment-00000"] {
            std::fs::copy(log.join(name), log_copy.join(name)).unwrap();
        }
        copy_image(&disk, &copy);
        copy
    }

    /// Copies an image with its mark, as `cp -a` does.
    pub(crate) fn copy_image(from: &Path, to: &Path) {
        use crate::medium::file::DataFile;
        std::fs::copy(from, to).unwrap();
        let [from, to] = [from, to].map(|path| std::fs::File::open(path).unwrap());
        to.write_mark(from.read_mark().unwrap().as_ref()).unwrap();
    }

    /// Copies a directory with everything in it, marks included.
    pub(crate) fn copy_all(from: &Path, to: &Path) {
        std::fs::create_dir_all(to).unwrap();
        for entry in std::fs::read_dir(from).unwrap() {
            let entry = entry.unwrap();
            let to = to.join(entry.file_name());
            if entry.file_type().unwrap().is_dir() {
                copy_all(&entry.path(), &to)
            } else {
                copy_image(&entry.path(), &to)
            }
        }
    }

    fn page(port: &mut Port, sector: u64) -> u8 {
        let read = Operation::Read { sector, sectors: 8 };
        let data = end(port, read).unwrap();
        assert!(data.iter().all(|&byte| byte == data[0]));
        data[0]
    }

    #[test]
    fn data_is_never_lost_unasked() {
        let dir = tempfile::tempdir().unwrap();
        let disk = crashed(dir.path(), 2);
        let log = default_log_dir(&disk);
        let files = || {
            [log.join("control"), log.join("segment-00000"), disk.clone()]
                .map(|file| std::fs::read(file).unwrap())
        };
        let before = files();
        let error = resize_disk(&disk, 4 * MIB - 512, &log, false, &[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput);
        assert!(error.to_string().contains("--shrink"), "{error}");
        assert!(before == files(), "a refusal changes nothing");
        let done = resize_disk(&disk, 4 * MIB - 512, &log, true, &[]).unwrap();
        assert_eq!((done.old_size, done.size), (4 * MIB, 4 * MIB - 512));
        // The data is now in the base image, and still data.
        assert!(resize_disk(&disk, 3 * MIB, &log, false, &[]).is_err());
        assert_eq!(inspect(&disk, &log).unwrap().size, 4 * MIB - 512);

        let zeroes = tempfile::tempdir().unwrap();
        let disk = crashed(zeroes.path(), 0);
        let log = default_log_dir(&disk);
        resize_disk(&disk, 4096, &log, false, &[]).unwrap();
        assert!(resize_disk(&disk, 3584, &log, false, &[]).is_err());
        assert_eq!(disk.metadata().unwrap().len(), 4096);
        assert_eq!(page(&mut open(&disk).disks()[0].open_port().unwrap(), 0), 1);
    }

    #[test]
    fn a_disk_of_a_shared_log_is_resized_beside_another_and_a_plain_image_alone() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let options = StoreOptions {
            segment_size: MIB,
            ..StoreOptions::default()
        };
        for name in ["a", "b"] {
            create_disk(&at(name), MIB, &at("log"), &options).unwrap();
        }
        resize_disk(&at("b"), 2 * MIB, &at("log"), false, &[]).unwrap();
        let disks = ["a", "b"].map(|name| DiskOptions::new(at(name)));
        let store = Store::open(&at("log"), &disks, &options).unwrap();
        let sectors: Vec<_> = store.disks().iter().map(|disk| disk.sectors()).collect();
        assert_eq!(sectors, [2048, 4096]);
        let error = resize_disk(&at("b"), 4 * MIB, &at("log"), false, &[]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Locked);
        store.close().unwrap();

        std::fs::write(at("plain"), [[0; 512], [1; 512], [0; 512]].concat()).unwrap();
        let none = at("none");
        assert!(resize_disk(&at("plain"), 512, &none, false, &[]).is_err());
        resize_disk(&at("plain"), 1024, &none, false, &[]).unwrap();
        resize_disk(&at("plain"), 4096, &none, false, &[]).unwrap();
        assert_eq!(at("plain").metadata().unwrap().len(), 4096);
        for size in [0, 1000, u64::MAX - 511] {
            let error = resize_disk(&at("plain"), size, &none, true, &[]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
        }
        assert!(!none.exists());
    }
}
