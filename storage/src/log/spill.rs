//! Spill files: what a disk's image could not take.
//!
//! ```text
//!   a read   =   log ─ gaps ─▶ spill file ─ gaps ─▶ image
//! ```
//! If one of several images can't be written, checkpoints write its disk's bytes to a sparse file
//! beside the log instead, at the same offsets as on the disk. So the log's segments become free
//! for the other disks. A map says which sectors are there. It is replaced as a whole before the
//! control file says that the log no longer has them. Once the image can be written again, the
//! keeper copies everything back ([`keeper::copy_back`](crate::keeper::copy_back)) and removes both
//! files.

use std::ffi::OsStr;
use std::io;
use std::ops::Range;
use std::path::{Path, PathBuf};

use zerocopy::little_endian::U64;

use crate::SECTOR_SIZE;
use crate::catalog::control::ControlFile;
use crate::error::{Error, ErrorKind, Result};
use crate::format::{DecodeResult, SpillRange, Uuid, decode_spill_map, encode_spill_map};
use crate::index::{IndexMemory, SectorSet};
use crate::medium::file::DataFile;
use crate::medium::filesystem::{FileSystem, OWNER, OpenMode, files, parent, remove_leftover};
use crate::medium::mark::hex;
use crate::mutant::{Mutant, planted};
use crate::sync::{Arc, Mutex, MutexGuard, RwLock};

/// A disk's spill file, and what is in it.
#[derive(Debug)]
pub(crate) struct Spill {
    paths: SpillPaths,
    log: Uuid,
    disk: Uuid,
    /// The bytes, where they are on the disk.
    data: Arc<dyn DataFile>,
    /// The sectors that are here.
    sectors: RwLock<SectorSet>,
    /// Those that were written since [`take_written`](Self::take_written).
    written: Mutex<SectorSet>,
}

/// The paths of a disk's two files.
#[derive(Debug)]
pub(crate) struct SpillPaths {
    dir: PathBuf,
    pub data: PathBuf,
    map: PathBuf,
}

impl SpillPaths {
    /// The files of this disk on the log in `dir`.
    pub(crate) fn new(dir: &Path, disk: &Uuid) -> Self {
        let name = format!("spill-{}", hex(disk));
        Self {
            dir: dir.to_owned(),
            map: dir.join(format!("{name}.map")),
            data: dir.join(name),
        }
    }

    /// Where the next map is written.
    fn next_map(&self) -> PathBuf {
        self.map.with_extension("new")
    }

    /// Whether this is the name of one of the files.
    pub(crate) fn has(&self, name: &OsStr) -> bool {
        let path = self.dir.join(name);
        [&self.data, &self.map, &self.next_map()].contains(&&path)
    }

    /// Removes the files. What is left is removed when the log is next opened.
    pub(crate) fn remove(&self, files: &dyn FileSystem) {
        for path in [&self.map, &self.next_map(), &self.data] {
            remove_leftover(files, path);
        }
    }
}

/// Whether a file of this name belongs to a spill file.
pub(crate) fn is_spill(name: &OsStr) -> bool {
    name.as_encoded_bytes().starts_with(b"spill-")
}

impl Spill {
    /// Makes an empty spill file for a disk of `bytes` bytes.
    ///
    /// # Errors
    /// If the files can't be made.
    pub(crate) fn create(
        files: &dyn FileSystem,
        paths: SpillPaths,
        (log, disk): (Uuid, Uuid),
        bytes: u64,
    ) -> Result<Self> {
        // A read may still use what an earlier one left.
        paths.remove(files);
        let how = OpenMode::Kept { mode: OWNER };
        let data = files.open(&paths.data, how).and_then(|data| {
            data.set_len(bytes)?;
            data.sync_all()?;
            Ok(data)
        });
        let data = data.map_err(|error| Error::io("make the spill file", &paths.data, error))?;
        let spill = Self::over(paths, (log, disk), data);
        spill.commit(files)?;
        Ok(spill)
    }

    /// Opens the spill file of a disk of a log, if it has one; `how`: [`OpenMode::Existing`] or
    /// [`OpenMode::Read`].
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(crate) fn of(
        control: &ControlFile,
        disk_id: u32,
        how: OpenMode,
    ) -> Result<Option<Arc<Self>>> {
        let (known, dir) = (&control.control, parent(&control.path));
        let Some(entry) = known.disk(disk_id).filter(|_| known.is_spilled(disk_id)) else {
            return Ok(None);
        };
        let paths = SpillPaths::new(dir, &entry.disk);
        let ids = (known.header.log, entry.disk);
        let spill = Self::open(&*files(), paths, ids, how)?;
        Ok(Some(Arc::new(spill)))
    }

    /// Opens a disk's spill file; `how`: [`OpenMode::Existing`] or [`OpenMode::Read`].
    ///
    /// # Errors
    /// [`ErrorKind::Damaged`] if a file is missing, or the map is not one of this disk.
    pub(crate) fn open(
        files: &dyn FileSystem,
        paths: SpillPaths,
        (log, disk): (Uuid, Uuid),
        how: OpenMode,
    ) -> Result<Self> {
        let damaged = |path: &Path, what: &str| {
            let message = format!(
                "{}: {what}, so bytes of a disk that its image lacks are lost; restore the file \
                 from a copy, or give them up with 'walvisor disk discard'",
                path.display()
            );
            Error::new(ErrorKind::Damaged, message)
        };
        let open = |path: &Path| {
            files.open(path, how).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => damaged(path, "the spill file is missing"),
                _ => Error::io("open the spill file", path, error),
            })
        };
        let map = open(&paths.map)?;
        let read = map.len().and_then(|len| {
            let mut bytes = vec![0; len as usize];
            map.read_exact_at(&mut bytes, 0)?;
            Ok(bytes)
        });
        let read = read.map_err(|error| Error::io("read the spill map", &paths.map, error))?;
        let ranges = match decode_spill_map(&log, &disk, &read) {
            DecodeResult::Valid(ranges) => ranges,
            DecodeResult::Version(version) => {
                let path = paths.map.display();
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    format!("{path}: version {version} is unknown; use a newer walvisor"),
                ));
            }
            DecodeResult::Invalid => return Err(damaged(&paths.map, "the spill map is damaged")),
        };
        let data = open(&paths.data)?;
        let spill = Self::over(paths, (log, disk), data);
        for range in ranges {
            spill.note(range.sector.get()..range.sector.get() + range.sectors.get());
        }
        Ok(spill)
    }

    fn over(paths: SpillPaths, (log, disk): (Uuid, Uuid), data: Box<dyn DataFile>) -> Self {
        Self {
            paths,
            log,
            disk,
            data: data.into(),
            sectors: RwLock::default(),
            written: Mutex::default(),
        }
    }

    fn written(&self) -> MutexGuard<'_, SectorSet> {
        self.written.lock().expect("spill lock")
    }

    /// The file that has the bytes, where they are on the disk.
    pub(crate) fn data(&self) -> &Arc<dyn DataFile> {
        &self.data
    }

    /// The paths of the files.
    pub(crate) fn paths(&self) -> &SpillPaths {
        &self.paths
    }

    /// Makes the file as long as the disk.
    pub(crate) fn grow(&self, bytes: u64) -> Result<()> {
        let grown = self.data.len().and_then(|len| {
            if len < bytes {
                self.data.set_len(bytes)?;
            }
            Ok(())
        });
        grown.map_err(|error| Error::io("grow the spill file", &self.paths.data, error))
    }

    /// These sectors are here from now on.
    pub(crate) fn note(&self, sectors: Range<u64>) {
        let mut known = self.sectors.write().expect("spill lock");
        known.insert(sectors.clone());
        self.written().insert(sectors);
    }

    /// Calls `each` with the parts of a range of sectors, in order, and whether they are here.
    pub(crate) fn visit(&self, sectors: Range<u64>, mut each: impl FnMut(Range<u64>, bool)) {
        let map = self.sectors.read().expect("spill lock");
        map.visit(sectors, &mut |part, here| each(part, here.is_some()));
    }

    /// What was written since the last call, or since the file was opened. Sectors, in order.
    pub(crate) fn take_written(&self) -> Vec<Range<u64>> {
        self.written().take()
    }

    /// Whether anything was written since the last call of [`take_written`](Self::take_written).
    pub(crate) fn has_written(&self) -> bool {
        !self.written().is_empty()
    }

    /// Counts everything here as written since: what was copied from here may be lost.
    pub(crate) fn count_all_as_written(&self) {
        let all = self.sectors.read().expect("spill lock");
        let mut written = self.written();
        all.iter().for_each(|range| written.insert(range));
    }

    /// Counts the memory of the maps in `memory` from now on.
    pub(crate) fn count_in(&self, memory: &IndexMemory) {
        let mut known = self.sectors.write().expect("spill lock");
        known.count_in(memory);
        self.written().count_in(memory);
    }

    /// Bytes of memory that the maps take.
    pub(crate) fn map_bytes(&self) -> u64 {
        let known = self.sectors.read().expect("spill lock");
        known.bytes() + self.written().bytes()
    }

    /// Bytes free in the file's file system.
    pub(crate) fn free_space(&self) -> Result<u64> {
        let Some(file) = self.data.host() else {
            return Ok(u64::MAX);
        };
        let found = rustix::fs::fstatvfs(file);
        let found = found.map_err(|error| {
            Error::io("ask for the space beside", &self.paths.data, error.into())
        })?;
        Ok(found.f_bavail.saturating_mul(found.f_frsize))
    }

    /// Bytes of the disk that are here.
    pub(crate) fn bytes(&self) -> u64 {
        let map = self.sectors.read().expect("spill lock");
        let sectors: u64 = map.iter().map(|range| range.end - range.start).sum();
        sectors * SECTOR_SIZE
    }

    /// Makes everything here durable, the map included.
    pub(crate) fn commit(&self, files: &dyn FileSystem) -> Result<()> {
        if planted(Mutant::SpillUncommitted) && files.exists(&self.paths.map).unwrap_or(false) {
            return Ok(());
        }
        let synced = self.data.sync_data();
        synced.map_err(|error| Error::io("sync the spill file", &self.paths.data, error))?;
        let map = self.sectors.read().expect("spill lock");
        let range = |range: Range<u64>| SpillRange {
            sector: U64::new(range.start),
            sectors: U64::new(range.end - range.start),
        };
        let ranges: Vec<_> = map.iter().map(range).collect();
        drop(map);
        let bytes = encode_spill_map(&self.log, &self.disk, &ranges);
        let next = self.paths.next_map();
        let replaced = files.open(&next, OpenMode::Emptied).and_then(|file| {
            file.allocate(bytes.len() as u64)?;
            file.write_all_at(&bytes, 0)?;
            file.sync_all()?;
            files.rename(&next, &self.paths.map)?;
            files.sync_dir(&self.paths.dir)
        });
        replaced.map_err(|error| Error::io("write the spill map", &self.paths.map, error))
    }
}
