//! Which base image belongs to which disk of a log.
//!
//! ```text
//!   base image ── attribute user.walvisor.disk: UUID, generation, open or closed ──┐
//!              └─ device, inode, time of birth (where there are no attributes) ────┤ must be what
//!              └─ samples of its bytes ────────────────────────────────────────────┤ the disk's entry
//!   control file ── entry: UUID, generation, next generation, inode, samples ──────┘ says
//! ```
//! The *generation* rises whenever a disk is opened and with each checkpoint that writes to its image, so an image
//! that is older or newer than the log expects has another one. The entry gets the next generation first, then the
//! mark gets it, then the entry drops the old one: wherever a crash cuts that, the image is recognized. When a disk
//! is opened, the generation rises by a random step, so that two copies of one disk that were both used never have
//! the same.
//!
//! A disk with records in the log accepts only its own image. A disk without records accepts any image of its size
//! at its path, since other programs may write to a closed image, or replace it.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use zerocopy::FromZeros;
use zerocopy::little_endian::{U16, U32, U64};

use crate::format::{BLOCK, DiskEntry, SAMPLES, Sample};
use crate::index::{ExtentMap, Piece, Place};
use crate::medium::file::DataFile;
use crate::medium::mark::{Inode, Mark};
use crate::{Buffer, Error, Result, SECTOR_SIZE};

/// What identifies an image: its mark and its inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub mark: Option<Mark>,
    pub inode: Inode,
}

impl Identity {
    pub(crate) fn of(file: &dyn DataFile, path: &Path) -> Result<Self> {
        let inode = file
            .inode()
            .map_err(|error| Error::io("read its metadata", path, error))?;
        let mark = file
            .read_mark()
            .map_err(|error| Error::io("read its mark", path, error))?;
        Ok(Self { mark, inode })
    }
}

impl DiskEntry {
    /// Whether the image with this identity is the disk's own, at the generation that the log expects. `at_path`:
    /// the image is at the path that the entry has.
    pub(crate) fn is_image(&self, image: &Identity, at_path: bool) -> bool {
        match &image.mark {
            Some(mark) => {
                let generations = [self.generation.get(), self.next_generation.get()];
                mark.disk == self.disk && generations.contains(&mark.generation)
            }
            // The device number may change when the machine starts, so a match of the path counts as well.
            None => {
                let Inode {
                    device,
                    number,
                    born,
                } = image.inode;
                self.marked == 0
                    && self.inode.get() != 0
                    && (self.inode.get(), self.born.get()) == (number, born)
                    && (self.device.get() == device || at_path)
            }
        }
    }

    /// Stores which file the image is.
    pub(crate) fn set_inode(&mut self, inode: &Inode) {
        self.device = U64::new(inode.device);
        self.inode = U64::new(inode.number);
        self.born = U64::new(inode.born);
    }

    /// Announces another generation, `step` above the highest so far. The mark may have the old or the new one
    /// until [`settle`](Self::settle).
    pub(crate) fn announce(&mut self, step: u64) {
        let newest = self.generation.get().max(self.next_generation.get());
        self.next_generation = U64::new(newest + step);
    }

    /// The mark now has the generation that was announced.
    pub(crate) fn settle(&mut self) {
        self.generation = self.next_generation;
    }

    /// Takes samples of the image as it is now: its first and its last block, and two parts that were just written
    /// (byte offset and length). A part that can't be read gets no sample.
    pub(crate) fn take_samples(&mut self, base: &dyn DataFile, written: [Option<(u64, u64)>; 2]) {
        let (size, block) = (self.size.get(), BLOCK as u64);
        let last = size.saturating_sub(block);
        let parts = [Some((0, size)), Some((last, block)), written[0], written[1]];
        for (part, sample) in parts.into_iter().zip(&mut self.samples) {
            let taken = part.and_then(|(offset, len)| {
                let len = len.min(block).min(size.checked_sub(offset)?);
                let crc = crc_at(base, offset, len as usize).ok()?;
                Some(Sample {
                    offset: U64::new(offset),
                    len: U32::new(len as u32),
                    crc: U32::new(crc),
                })
            });
            *sample = taken.unwrap_or(Sample::new_zeroed());
        }
    }

    /// Takes the same samples again, of an image that other programs may have changed since.
    pub(crate) fn renew_samples(&mut self, base: &dyn DataFile) {
        let old = self.samples;
        let part = |i: usize| {
            let sample: &Sample = &old[i];
            (sample.len.get() > 0).then(|| (sample.offset.get(), u64::from(sample.len.get())))
        };
        self.take_samples(base, [part(2), part(SAMPLES - 1)]);
    }

    /// Drops the samples of blocks that the extents of a layer are about to change.
    pub(crate) fn forget_samples(&mut self, changing: &ExtentMap) {
        for sample in &mut self.samples {
            let first = sample.offset.get() / SECTOR_SIZE;
            let sectors = u64::from(sample.len.get()).div_ceil(SECTOR_SIZE);
            let mut changes = false;
            changing.visit(first, sectors, &mut |piece| {
                changes |= piece.place.is_some()
            });
            if changes {
                *sample = Sample::new_zeroed();
            }
        }
    }

    /// Drops the samples that reach behind `size`.
    pub(crate) fn cut_samples(&mut self, size: u64) {
        for sample in &mut self.samples {
            let end = sample.offset.get().checked_add(sample.len.get().into());
            if end.is_none_or(|end| end > size) {
                *sample = Sample::new_zeroed();
            }
        }
    }

    /// Whether the image still has the bytes of all samples.
    pub(crate) fn samples_fit(&self, base: &dyn DataFile, path: &Path) -> Result<bool> {
        for sample in &self.samples {
            let (offset, len) = (sample.offset.get(), sample.len.get() as usize);
            if len == 0 || len > BLOCK {
                continue;
            }
            let crc = crc_at(base, offset, len)
                .map_err(|error| Error::io("read the base image", path, error))?;
            if crc != sample.crc.get() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The image's path, empty if it has none. `home` is the directory that contains the log directory.
    pub(crate) fn path(&self, home: &Path) -> PathBuf {
        let len = usize::from(self.path_len.get()).min(self.path.len());
        match len {
            0 => PathBuf::new(),
            _ => home.join(std::ffi::OsStr::from_bytes(&self.path[..len])),
        }
    }

    /// Stores the image's path.
    ///
    /// # Errors
    /// If the path is too long.
    pub(crate) fn set_path(&mut self, path: &Path, home: &Path) -> Result<()> {
        let kept = path.strip_prefix(home).unwrap_or(path);
        let bytes = kept.as_os_str().as_bytes();
        let Some(into) = self.path.get_mut(..bytes.len()) else {
            return Err(crate::error::invalid(format!(
                "{}: the path is longer than 480 bytes; use a shorter one",
                path.display()
            )));
        };
        into.copy_from_slice(bytes);
        self.path_len = U16::new(bytes.len() as u16);
        Ok(())
    }
}

fn crc_at(base: &dyn DataFile, offset: u64, len: usize) -> std::io::Result<u32> {
    let mut buffer = Buffer::zeroed(len);
    base.read_exact_at(&mut buffer, offset)?;
    Ok(crc32c::crc32c(&buffer[..len]))
}

/// Two parts of a layer, by byte offset and length, to take samples of. Written bytes are preferred to zeroes,
/// which the image may have had before.
pub(crate) fn written_parts(layer: &ExtentMap) -> [Option<(u64, u64)>; 2] {
    let part = |piece: Piece| (piece.sector * SECTOR_SIZE, piece.sectors * SECTOR_SIZE);
    let bytes = |piece: &Piece| !matches!(piece.place, Some(Place::Zero { .. }));
    let mut found = layer.iter().filter(bytes);
    match found.next() {
        Some(first) => [Some(part(first)), found.last().map(part)],
        None => [layer.iter().next().map(part), None],
    }
}
