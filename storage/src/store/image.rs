//! Images used without a log, for serving raw disks.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;

use crate::catalog::identity::Identity;
use crate::catalog::options::ImageFormat;
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::index::allocation::{ExtentLookUp, LIMIT};
use crate::medium::fetch_map::FetchMap;
use crate::medium::file::DataFile;
use crate::medium::filesystem::{OpenMode, PathKind, files, is_simulated};
use crate::medium::host;
use crate::medium::lock::{self, Access, Holder};
use crate::medium::mark::{ImageMark, hex};
use crate::medium::partial_file::PartialFile;
use crate::store::other_format::refuse_other_format;
use crate::sync::Arc;
use crate::{Extent, SECTOR_SIZE};

/// A raw image, open for I/O without a log. It is locked like a disk with a log, so that no other
/// process of this program, and none of QEMU's programs, can open it at the same time; several
/// readers can.
#[derive(Debug)]
pub struct Image {
    path: PathBuf,
    file: Arc<File>,
    bytes: u64,
    read_only: bool,
}

impl Image {
    /// Opens the image at `path`, a file or a block device: with O_DIRECT if that works for single
    /// sectors, otherwise through the page cache. A block device must not be in use, for instance
    /// by a mounted file system; a writer keeps it that way (O_EXCL).
    ///
    /// # Errors
    /// If it is neither, its size is not a positive multiple of 512 bytes, it seems to be in
    /// another format than raw ([`ImageFormat::Unknown`]), another process has it open
    /// ([`ErrorKind::Locked`]), or its newest bytes may be in a log ([`ErrorKind::WrongLog`]).
    pub fn open(path: &Path, read_only: bool) -> Result<Self> {
        Self::open_as(path, read_only, ImageFormat::Unknown)
    }

    /// As [`open`](Self::open), for an image whose format may be known.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_as(path: &Path, read_only: bool, format: ImageFormat) -> Result<Self> {
        let file = open_file(path, !read_only)?;
        FetchMap::refuse(path)?;
        let mark = Identity::of(&file, path)?.mark;
        if let Some(ImageMark {
            open: true, disk, ..
        }) = mark
        {
            return Err(Error::new(
                ErrorKind::WrongLog,
                format!(
                    "{}: disk {} was not closed: its newest bytes may be in its log; use \
                     backend=wal, or copy them to the image first with: walvisor disk checkpoint \
                     {0}",
                    path.display(),
                    hex(&disk),
                ),
            ));
        }
        refuse_other_format(path, mark.as_ref(), format)?;
        Ok(Self {
            path: path.to_owned(),
            bytes: disk_len(&file, path)?,
            file: Arc::new(file),
            read_only,
        })
    }

    /// The image's path.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The file. I/O must use offsets and lengths that are multiples of 512, and memory aligned
    /// like a [`Buffer`](crate::Buffer).
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The file, for engines.
    pub(crate) fn shared_file(&self) -> Arc<File> {
        self.file.clone()
    }

    /// Whether the image is open for reading only.
    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// The image's length in bytes when it was opened, a positive multiple of 512.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// How the file is allocated from `sector` on: between 1 and `most` adjacent extents, `sectors`
    /// sectors in all or fewer. The range must be in the file and not empty. On a file system
    /// without holes, everything is data.
    ///
    /// # Errors
    /// If the file system can't report the file's holes.
    pub fn extents(&self, sector: u64, sectors: u64, most: usize) -> Result<Vec<Extent>> {
        let mut extents = Vec::new();
        let sectors = sectors.min(LIMIT);
        let mut look_up = ExtentLookUp::new(&*self.file, &self.path, most);
        look_up.push_file(sector, sectors, &mut extents)?;
        extents.truncate(most.max(1));
        Ok(extents)
    }

    /// Sets the file's length to `bytes`, durably. New space reads as zeroes.
    ///
    /// # Errors
    /// The system's error.
    pub fn grow(&self, bytes: u64) -> io::Result<()> {
        self.file.set_len(bytes)?;
        self.file.sync_all()
    }
}

/// The failed action, in errors.
const OPEN: &str = "open the disk";

/// Opens and locks the file or block device of an image without a log.
fn open_file(path: &Path, write: bool) -> Result<File> {
    let claim = match image_kind(path)? {
        PathKind::BlockDevice => OFlags::EXCL,
        _ => OFlags::empty(),
    };
    let open = || {
        let claimed = host::open_direct_with(path, write, claim)?;
        if write || claim.is_empty() {
            Ok(claimed)
        } else {
            // It is enough that the device could be claimed; other readers may come.
            host::open_direct_with(path, write, OFlags::empty())
        }
    };
    let access = if write { Access::Write } else { Access::Read };
    lock::open_locked(path, OPEN, open, |file| file, access, |_| Holder::User)
}

/// Opens and locks a base image. `in_log`: see
/// [`OpenBase::open`](crate::store::attach::OpenBase::open). `builds`: this process makes the
/// image, and nobody else may use it yet.
pub(crate) fn open_base(
    path: &Path,
    access: Access,
    in_log: bool,
    builds: bool,
) -> Result<Box<dyn DataFile>> {
    if image_kind(path)? == PathKind::BlockDevice {
        // A log marks its images, and a device has no attributes.
        return Err(invalid(format!(
            "{}: a block device; name a raw image file, or use backend=raw, which takes block \
             devices",
            path.display()
        )));
    }
    let holder = |file: &dyn DataFile| {
        let open = matches!(file.read_mark(), Ok(Some(mark)) if mark.open);
        if in_log && open {
            Holder::Writes
        } else {
            Holder::User
        }
    };
    let how = access.open_mode(OpenMode::Direct);
    let file = lock::open_store_file(path, OPEN, how, access, holder)?;
    if is_simulated() {
        return Ok(file);
    }
    PartialFile::over(file, path, builds)
}

/// What is at an image's path. Refuses what can't be an image.
fn image_kind(path: &Path) -> Result<PathKind> {
    let kind = files().kind(path);
    let missing = || {
        let path = path.display();
        format!(
            "name a raw image that exists, or make a disk: 'walvisor disk create {path} --size 1G'"
        )
    };
    match kind.map_err(|error| Error::io(OPEN, path, error).if_missing(missing))? {
        PathKind::Other => Err(invalid(format!(
            "{}: not a regular file; name a raw image file",
            path.display()
        ))),
        kind => Ok(kind),
    }
}

/// An image's length in bytes. Refuses a length that no disk can have. Under the lock, no other
/// process changes it.
pub(crate) fn disk_len(file: &dyn DataFile, path: &Path) -> Result<u64> {
    let size = file.len();
    let size = size.map_err(|error| Error::io("read its length", path, error))?;
    let path = path.display();
    if size == 0 {
        return Err(invalid(format!(
            "{path}: empty, and a disk has a positive multiple of 512 bytes; give it a size with \
             'truncate -s SIZE {path}'"
        )));
    }
    if !size.is_multiple_of(SECTOR_SIZE) {
        return Err(invalid(format!(
            "{path}: the size of {size} bytes is not a multiple of 512; round it up with \
             'truncate -s %512 {path}', which keeps all bytes"
        )));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Allocation, DiskOptions, Store, StoreOptions, create_disk};

    #[test]
    fn an_image_is_opened_once_and_reports_its_holes() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        assert_eq!(
            Image::open(&path, true).unwrap_err().kind(),
            ErrorKind::NotFound
        );
        for len in [0, 513] {
            std::fs::write(&path, vec![1; len]).unwrap();
            let error = Image::open(&path, false).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput);
        }
        let file = File::create(&path).unwrap();
        file.set_len(8 << 20).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&file, &[7; 1 << 20], 2 << 20).unwrap();
        file.sync_all().unwrap();
        let image = Image::open(&path, false).unwrap();
        assert_eq!(image.bytes(), 8 << 20);
        let told = image.extents(0, 16384, 8).unwrap();
        let extent = |sectors, allocation| Extent {
            sectors,
            allocation,
        };
        let holes = [
            extent(4096, Allocation::Hole),
            extent(2048, Allocation::Data),
            extent(10240, Allocation::Hole),
        ];
        // A file system without holes reports everything as data.
        assert!(told == holes || told == [extent(16384, Allocation::Data)]);
        assert_eq!(image.extents(5000, 8, 1).unwrap().len(), 1);
        let error = Image::open(&path, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Locked);
        image.grow(9 << 20).unwrap();
        drop(image);
        assert_eq!(Image::open(&path, true).unwrap().bytes(), 9 << 20);
    }

    /// Its open would wait until another process opens the other end.
    #[test]
    fn a_fifo_is_refused_at_once() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};

        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk.img");
        let (log, other) = (
            directory.path().join("log"),
            directory.path().join("other.img"),
        );
        mknodat(CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        let options = StoreOptions::default();
        let plain = &mut |_, _| {};
        let tries = [
            Image::open(&path, true).map(drop),
            Store::open(&log, &[DiskOptions::new(&path)], &options).map(drop),
            crate::inspect(&path, &log).map(drop),
            crate::resize_disk(&path, 4096, &log, false, &[]).map(drop),
            crate::export_disk(&path, &log, &other, false, None, plain).map(drop),
            crate::import_disk(&other, &path, &log, &options, plain).map(drop),
            crate::discard_log(&path, &log).map(drop),
        ];
        for (number, told) in tries.into_iter().enumerate() {
            let told = told.unwrap_err();
            assert!(
                told.to_string().contains("regular file"),
                "{number}: {told}"
            );
        }
        std::fs::write(&other, [1; 4096]).unwrap();
        crate::export_disk(&other, &log, &path, true, None, plain).unwrap_err();
    }

    #[test]
    fn an_image_with_newer_bytes_in_a_log_is_refused() {
        let directory = tempfile::tempdir().unwrap();
        let (path, log) = (
            directory.path().join("disk.img"),
            directory.path().join("log"),
        );
        let options = StoreOptions {
            segment_size: 1 << 20,
            ..StoreOptions::default()
        };
        create_disk(&path, 1 << 20, &log, &options).unwrap();
        let marked = rustix::fs::setxattr(
            &path,
            "user.walvisor.disk",
            b"0123456789abcdef0123456789abcdef",
            rustix::fs::XattrFlags::empty(),
        );
        if let Err(error) = marked {
            return println!("skipped: no attributes here: {error}");
        }
        let error = Image::open(&path, true).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WrongLog);
        let text = error.to_string();
        assert!(
            text.contains("backend=wal") && text.contains("disk checkpoint"),
            "{text}"
        );
        rustix::fs::removexattr(&path, "user.walvisor.disk").unwrap();
        // After a clean close the newest bytes are all in the image.
        let store = Store::open(&log, &[DiskOptions::new(&path)], &options).unwrap();
        assert_eq!(
            Image::open(&path, true).unwrap_err().kind(),
            ErrorKind::Locked
        );
        store.close().unwrap();
        Image::open(&path, false).unwrap();
    }
}
