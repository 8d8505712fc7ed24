//! Which base image belongs to which disk of a log.
//!
//! ```text
//!   base image ── attribute user.walvisor.disk: UUID, generation, open or closed ──┐
//!              └─ device, inode, time of birth (where there are no attributes) ────┤ must be what
//!              └─ samples of its bytes ────────────────────────────────────────────┤ the disk's entry
//!   control file ── entry: UUID, generation, next generation, inode, samples ──────┘ says
//! ```
//! The *generation* rises whenever a disk is opened and with each checkpoint that writes to its
//! image, so an image older or newer than the log expects has a different one. The entry gets the
//! next generation first, then the mark gets it, then the entry drops the old one; wherever a crash
//! cuts this, the image is recognized. When a disk is opened, the generation rises by a random
//! step, so that two copies of a disk that were both used never have the same one.
//!
//! A disk with records in the log accepts only its own image. A disk without records accepts any
//! image of its size at its path, since other programs may write to a closed image, or replace it.
//!
//! A disk's past depends on its image too: snapshots read from it whatever is not in their saved
//! files. So an image that is not the disk's own, or that others have written to, ends the past,
//! see [`Control::end_past`]. Samples and the time of the last write reveal such a write. Not
//! noticed are a write that misses the samples and restores the time, and a write into a copy with
//! the image's mark, because a copy may have any time.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use zerocopy::FromZeros;
use zerocopy::little_endian::{U16, U32, U64};

use crate::catalog::snapshot::{Snapshot, SnapshotName};
use crate::error::invalid;
use crate::format::{BLOCK, Control, DiskEntry, ImageEntry, SAMPLES, Sample};
use crate::index::{ExtentMap, Location, Piece};
use crate::medium::file::DataFile;
use crate::medium::mark::{ImageMark, Inode};
use crate::{Buffer, Error, Result, SECTOR_SIZE};

/// What identifies an image: its mark and its inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub mark: Option<ImageMark>,
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
    /// Whether the image with this identity is the disk's own, at the generation that the log
    /// expects. `at_path`: the image is at the path in the entry.
    pub(crate) fn is_image(&self, image: &Identity, at_path: bool) -> bool {
        match &image.mark {
            Some(mark) => {
                let generations = [self.generation.get(), self.next_generation.get()];
                mark.disk == self.disk && generations.contains(&mark.generation)
            }
            None => self.marked == 0 && self.is_file(&image.inode, at_path),
        }
    }

    /// Whether this is the file that was the disk's image. `at_path`: the file is at the path in
    /// the entry.
    pub(crate) fn is_file(&self, inode: &Inode, at_path: bool) -> bool {
        // The device number may change at boot, so a matching path counts as well.
        self.inode.get() != 0
            && (self.inode.get(), self.born.get()) == (inode.number, inode.born)
            && (self.device.get() == inode.device || at_path)
    }

    /// Records which file the image is.
    pub(crate) fn set_inode(&mut self, inode: &Inode) {
        self.device = U64::new(inode.device);
        self.inode = U64::new(inode.number);
        self.born = U64::new(inode.born);
    }

    /// Announces a new generation, `step` above the highest so far. Until [`settle`](Self::settle),
    /// the mark may have the old or the new one.
    pub(crate) fn announce(&mut self, step: u64) {
        let newest = self.generation.get().max(self.next_generation.get());
        self.next_generation = U64::new(newest + step);
    }

    /// The mark now has the announced generation.
    pub(crate) fn settle(&mut self) {
        self.generation = self.next_generation;
    }

    /// Samples the image as it is now: its first and last block, and two parts that were just
    /// written (byte offset and length). A part that can't be read gets no sample.
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

    /// Takes the same samples again, from an image that other programs may have changed.
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

    /// Drops samples that reach beyond `size`.
    pub(crate) fn cut_samples(&mut self, size: u64) {
        for sample in &mut self.samples {
            let end = sample.offset.get().checked_add(sample.len.get().into());
            if end.is_none_or(|end| end > size) {
                *sample = Sample::new_zeroed();
            }
        }
    }

    /// Whether all samples still match the image.
    pub(crate) fn samples_fit(&self, base: &dyn DataFile, path: &Path) -> Result<bool> {
        for sample in &self.samples {
            let (offset, len) = (sample.offset.get(), sample.len.get() as usize);
            if len == 0 || len > BLOCK {
                continue;
            }
            let crc = match crc_at(base, offset, len) {
                // It can't be read yet.
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => continue,
                crc => crc.map_err(|error| Error::io("read the base image", path, error))?,
            };
            if crc != sample.crc.get() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The image's path, empty if it has none. `home` is the directory that contains the log
    /// directory.
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

impl Control {
    fn image(&self, disk_id: u32) -> Option<&ImageEntry> {
        self.images
            .iter()
            .find(|image| image.disk_id.get() == disk_id)
    }

    /// The disk's image entry, created if necessary; `None`: there is no room for it.
    fn image_mut(&mut self, disk_id: u32) -> Option<&mut ImageEntry> {
        let is_of = |image: &ImageEntry| image.disk_id.get() == disk_id;
        let known = self.images.iter().position(is_of);
        let place = known.unwrap_or(self.images.len());
        if known.is_none() {
            self.images.push(ImageEntry {
                disk_id: U32::new(disk_id),
                ..ImageEntry::new_zeroed()
            });
            if !self.fits() {
                self.images.pop();
            }
        }
        self.images.get_mut(place)
    }

    /// A disk has no past before this LSN.
    pub(crate) fn since(&self, disk_id: u32) -> u64 {
        self.image(disk_id).map_or(0, |image| image.since_lsn.get())
    }

    /// The newest LSN that the state of a disk got when its records were discarded or its image was
    /// replaced. No record has it until one is appended to a log that was opened since.
    pub(crate) fn newest_change(&self) -> u64 {
        let voided = self.disks.iter().map(|disk| disk.void_lsn.get());
        let replaced = self.images.iter().map(|image| image.since_lsn.get());
        voided.chain(replaced).max().unwrap_or(0)
    }

    /// Records when the log last wrote to a disk's image. If there is no room, the time is unknown,
    /// as in the slot of an older program.
    pub(crate) fn set_written(&mut self, disk_id: u32, written: u64) {
        if let Some(image) = self.image_mut(disk_id) {
            image.written = U64::new(written);
        }
    }

    /// When the log last wrote to a disk's image; 0: unknown.
    pub(crate) fn written(&self, disk_id: u32) -> u64 {
        self.image(disk_id).map_or(0, |image| image.written.get())
    }

    /// Whether an image last written to at this time may still be as the log left it.
    pub(crate) fn written_fits(&self, disk_id: u32, found: u64) -> bool {
        let noted = self.written(disk_id);
        // Some file systems only keep seconds once the file is no longer in memory.
        let seconds = noted - noted % 1_000_000_000;
        noted == 0 || found == 0 || [noted, seconds].contains(&found)
    }

    /// Whether a disk's image lacks bytes that are in its spill file.
    pub(crate) fn is_spilled(&self, disk_id: u32) -> bool {
        self.image(disk_id)
            .is_some_and(|image| image.spilled.get() != 0)
    }

    /// Records whether a disk's image lacks bytes that are in its spill file.
    ///
    /// # Errors
    /// If there is no room for the entry.
    pub(crate) fn set_spilled(&mut self, disk_id: u32, spilled: bool) -> Result<()> {
        if !spilled && !self.is_spilled(disk_id) {
            return Ok(());
        }
        let image = self.image_mut(disk_id).ok_or_else(|| {
            invalid(
                "the log's control file has no room to record that an image is failing".to_owned(),
            )
        })?;
        image.spilled = U16::new(u16::from(spilled));
        Ok(())
    }

    /// How often a disk was cut to a smaller size.
    pub(crate) fn cuts(&self, disk_id: u32) -> u16 {
        self.image(disk_id).map_or(0, |image| image.cuts.get())
    }

    /// Records that a disk is cut to a smaller size, for whoever copies the log and the image.
    ///
    /// # Errors
    /// If there is no room for the entry.
    pub(crate) fn note_cut(&mut self, disk_id: u32) -> Result<()> {
        let image = self.image_mut(disk_id).ok_or_else(|| {
            invalid("the log's control file has no room to record that a disk is cut".to_owned())
        })?;
        image.cuts = U16::new(image.cuts.get().wrapping_add(1));
        Ok(())
    }

    /// A disk joins the log at LSN `newest`.
    ///
    /// # Errors
    /// If there is no room for the entry.
    pub(crate) fn begin_past(&mut self, disk_id: u32, newest: u64) -> Result<()> {
        match newest {
            0 => Ok(()),
            newest => self.set_since(disk_id, newest),
        }
    }

    /// The disk's image is no longer the one of its past up to LSN `newest`. Returns the snapshots
    /// that are lost for this disk. The new state needs an LSN of its own, so that a snapshot of it
    /// is not taken for one of the past.
    ///
    /// # Errors
    /// If there is no room for the entry.
    pub(crate) fn end_past(&mut self, disk_id: u32, newest: u64) -> Result<Vec<SnapshotName>> {
        let since = self.since(disk_id);
        let mut lost = Snapshot::all(self);
        lost.retain(|snapshot| snapshot.has(disk_id) && snapshot.lsn >= since);
        self.set_since(disk_id, newest + 1)?;
        Ok(lost.iter().map(|snapshot| snapshot.name).collect())
    }

    fn set_since(&mut self, disk_id: u32, since: u64) -> Result<()> {
        let snapshots = self.snapshots.len();
        let image = self.image_mut(disk_id).ok_or_else(|| {
            invalid(format!(
                "the log has {snapshots} snapshots, and no room to record that a disk has another \
                 image; delete one with 'snapshot-delete NAME'"
            ))
        })?;
        image.since_lsn = U64::new(since);
        Ok(())
    }

    /// Forgets the images of disks that are not on the log.
    pub(crate) fn forget_images(&mut self) {
        let ids: Vec<_> = self.disks.iter().map(|disk| disk.id).collect();
        self.images.retain(|image| ids.contains(&image.disk_id));
    }
}

/// When an image was last written to; 0 if unknown.
pub(crate) fn written(base: &dyn DataFile) -> u64 {
    base.inode().map_or(0, |inode| inode.written)
}

fn crc_at(base: &dyn DataFile, offset: u64, len: usize) -> std::io::Result<u32> {
    // A disk can be opened while its restore waits for the store.
    if base
        .chunk_gate()
        .is_some_and(|gate| !gate.has(offset, len as u64))
    {
        return Err(std::io::ErrorKind::WouldBlock.into());
    }
    let mut buffer = Buffer::zeroed(len);
    base.read_exact_at(&mut buffer, offset)?;
    Ok(crc32c::crc32c(&buffer[..len]))
}

/// Two parts of a layer to sample, by byte offset and length. Prefers written bytes to zeroes,
/// which the image may have had before.
pub(crate) fn written_parts(layer: &ExtentMap) -> [Option<(u64, u64)>; 2] {
    let part = |piece: Piece| (piece.sector * SECTOR_SIZE, piece.sectors * SECTOR_SIZE);
    let bytes = |piece: &Piece| !matches!(piece.place, Some(Location::Zero { .. }));
    let mut found = layer.iter().filter(bytes);
    match found.next() {
        Some(first) => [Some(part(first)), found.last().map(part)],
        None => [layer.iter().next().map(part), None],
    }
}
