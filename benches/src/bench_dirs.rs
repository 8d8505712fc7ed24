//! Where a comparison works: temporary directories, and raw images whose blocks all hold data,
//! because holes would be read and written faster.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

use tempfile::TempDir;
use walvisor::commands::CommandError;
use walvisor_storage::{Buffer, StoreOptions, import_disk};

use crate::blocks::{BLOCK, damage_error, is_stamped, stamp};

/// Bytes of each write that fills an image.
const FILL_BYTES: usize = 1 << 20;

/// An error that names the file and the failed operation.
pub fn failed(what: &str, path: &Path) -> impl Fn(io::Error) -> CommandError {
    let text = format!("{}: cannot {what}", path.display());
    move |error| CommandError::Failed(format!("{text}: {error}"))
}

/// Makes a temporary directory in `parent`, which is on the measured medium.
///
/// # Errors
/// If it can't be made there.
pub fn directory(parent: &Path) -> Result<TempDir, CommandError> {
    let place = parent.canonicalize().unwrap_or_else(|_| parent.to_owned());
    let made = tempfile::Builder::new()
        .prefix("walvisor-bench-")
        .tempdir_in(place);
    made.map_err(|error| {
        CommandError::Failed(format!(
            "{}: can't work there ({error}): name a directory that can be written with --dir",
            parent.display()
        ))
    })
}

/// Two directories: one for images, on the measured medium, and one for sockets, whose paths must
/// be short. Dropping it removes both.
pub struct BenchDirs {
    images: TempDir,
    sockets: TempDir,
}

impl BenchDirs {
    /// Makes both, the one for images in `parent`.
    ///
    /// # Errors
    /// If a directory can't be made.
    pub fn new(parent: &Path) -> Result<Self, CommandError> {
        Ok(Self {
            images: directory(parent)?,
            sockets: directory(&std::env::temp_dir())?,
        })
    }

    /// The directory of the images.
    pub fn images(&self) -> &Path {
        self.images.path()
    }

    /// The directory of the sockets.
    pub fn sockets(&self) -> &Path {
        self.sockets.path()
    }
}

/// Creates `disks` raw images `raw-N.img` in `images`, and with their content the disks
/// `SIDE-N.img` on one log in `log`, unless they exist. All their blocks hold data.
///
/// # Errors
/// If one can't be made.
pub fn make_disks(
    images: &Path,
    disks: usize,
    bytes: u64,
    (side, log): (&str, &str),
    options: &StoreOptions,
) -> Result<(), CommandError> {
    for disk in 0..disks {
        let (raw, image) = (format!("raw-{disk}.img"), format!("{side}-{disk}.img"));
        if !images.join(&image).exists() {
            make_disk(images, &raw, bytes, (&image, log), options)?;
        }
    }
    Ok(())
}

/// The disks of most comparisons, and their log.
pub const LOGGED: (&str, &str) = ("wal", "log");

/// Creates the raw image `raw` in `images` unless it exists, and with its content the disk `image`
/// on the log `log`.
///
/// # Errors
/// If one can't be made.
pub fn make_disk(
    images: &Path,
    raw: &str,
    bytes: u64,
    (image, log): (&str, &str),
    options: &StoreOptions,
) -> Result<(), CommandError> {
    let [raw, image, log] = [raw, image, log].map(|name| images.join(name));
    if !raw.exists() {
        make_raw(&raw, bytes, BLOCK)?;
    }
    import_disk(&image, &raw, &log, options, &mut |_, _| ())
        .map(drop)
        .map_err(CommandError::failed)
}

/// Creates a raw image of `bytes` bytes, with every block written and stamped with writer 0 and its
/// number.
///
/// # Errors
/// If the file can't be written.
pub fn make_raw(path: &Path, bytes: u64, block: usize) -> Result<File, CommandError> {
    let fill = || {
        let file = File::create_new(path)?;
        let mut buffer = Buffer::zeroed(FILL_BYTES.max(block));
        let mut at = 0;
        while at < bytes {
            let part = (bytes - at).min(buffer.len() as u64) as usize;
            for (i, chunk) in buffer[..part].chunks_mut(block).enumerate() {
                stamp(chunk, 0, at / block as u64 + i as u64);
            }
            file.write_all_at(&buffer[..part], at)?;
            at += part as u64;
        }
        file.sync_all()
    };
    fill().map_err(failed("fill", path))?;
    open_direct(path)
}

/// Opens a file with O_DIRECT, or through the page cache if the file system does not support
/// O_DIRECT.
///
/// # Errors
/// If the file can't be opened.
pub fn open_direct(path: &Path) -> Result<File, CommandError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    let direct = options
        .clone()
        .custom_flags(libc::O_DIRECT)
        .open(path)
        .ok()
        .filter(|file| file.read_at(&mut Buffer::zeroed(BLOCK), 0).is_ok());
    match direct {
        Some(file) => Ok(file),
        None => options.open(path).map_err(failed("open", path)),
    }
}

/// Checks that blocks of a file, which `writer` stamped, read back as written. `blocks` are their
/// numbers in the file, each with the number of the write.
///
/// # Errors
/// If one does not.
pub fn verify(
    path: &Path,
    block: usize,
    writer: u64,
    blocks: impl Iterator<Item = (u64, u64)>,
) -> Result<(), CommandError> {
    let file = File::open(path).map_err(failed("open", path))?;
    let mut buffer = Buffer::zeroed(block);
    for (at, number) in blocks {
        file.read_exact_at(&mut buffer, at * block as u64)
            .map_err(failed("read", path))?;
        if !is_stamped(&buffer, writer, number) {
            return Err(damage_error(&path.display().to_string(), at));
        }
    }
    Ok(())
}
