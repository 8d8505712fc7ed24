//! Named points in the history of a log.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use zerocopy::FromZeros;
use zerocopy::little_endian::{U32, U64};

use crate::PastPoint;
use crate::error::{Error, ErrorKind, Result, invalid};
use crate::format::{Control, SnapshotEntry, Uuid};
use crate::mutant::{Mutant, planted};

/// The name of a snapshot: 1 to 64 of the characters A-Z, a-z, 0-9, '.', '_' and '-'.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct SnapshotName([u8; 64]);

/// How the names of snapshots begin that hold a point for an export. Nobody can give such a name:
/// it has a colon.
const EXPORT: &[u8] = b"export:";

impl SnapshotName {
    /// A new name for the snapshot that holds a point while it is exported. Such a snapshot lasts
    /// no longer than the process, and is shown to nobody.
    pub(crate) fn of_export(number: u64) -> Self {
        let mut name = [0; 64];
        name[..EXPORT.len()].copy_from_slice(EXPORT);
        let digits = format!("{number:016x}");
        name[EXPORT.len()..][..digits.len()].copy_from_slice(digits.as_bytes());
        Self(name)
    }

    /// Whether the snapshot holds a point for an export.
    pub(crate) fn is_of_export(&self) -> bool {
        self.0.starts_with(EXPORT)
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        let len = self.0.iter().position(|&byte| byte == 0);
        std::str::from_utf8(&self.0[..len.unwrap_or(self.0.len())]).unwrap_or_default()
    }
}

impl FromStr for SnapshotName {
    type Err = Error;

    /// # Errors
    /// [`ErrorKind::InvalidInput`] if no snapshot can have this name.
    fn from_str(text: &str) -> Result<Self> {
        let allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
        if !(1..=64).contains(&text.len()) || !text.bytes().all(allowed) {
            return Err(invalid(format!(
                "'{text}' is not a valid name for a snapshot: give 1 to 64 of the characters A-Z, \
                 a-z, 0-9, '.', '_' and '-'"
            )));
        }
        let mut name = [0; 64];
        name[..text.len()].copy_from_slice(text.as_bytes());
        Ok(Self(name))
    }
}

impl fmt::Display for SnapshotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Debug for SnapshotName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.as_str())
    }
}

/// A named state of all disks of a log, or of one. The log keeps whatever it takes to see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its name, unique in the log.
    pub name: SnapshotName,
    /// The last record it includes.
    pub lsn: u64,
    /// The newest commit group when it was made.
    pub cid: u64,
    /// When it was made, in microseconds since 1970.
    pub unix_us: u64,
    /// The number of its only disk, as in `log dump`; `None`: all disks of the log.
    pub disk_id: Option<u32>,
    /// Bytes of its saved files, which hold what the base images had at the snapshot and no longer
    /// have. 0: they have not moved past it.
    pub saved_bytes: u64,
}

/// By name and LSN.
impl From<Snapshot> for PastPoint {
    fn from(snapshot: Snapshot) -> Self {
        Self {
            name: snapshot.name.to_string(),
            number: snapshot.lsn,
        }
    }
}

impl Snapshot {
    /// The snapshots of a log, oldest first.
    pub(crate) fn all(control: &Control) -> Vec<Self> {
        let named = control.snapshots.iter().filter(|entry| entry.is_named());
        let snapshots = named.map(|entry| Self {
            name: SnapshotName(entry.name),
            lsn: entry.lsn.get(),
            cid: entry.cid.get(),
            unix_us: entry.unix_us.get(),
            disk_id: Some(entry.disk_id.get()).filter(|id| *id > 0),
            saved_bytes: 0,
        });
        snapshots.collect()
    }

    /// Whether an entry holds a point for an export.
    pub(crate) fn is_of_export(entry: &SnapshotEntry) -> bool {
        SnapshotName(entry.name).is_of_export()
    }

    /// Whether it includes this disk.
    pub(crate) fn has(&self, disk_id: u32) -> bool {
        self.disk_id.is_none_or(|id| id == disk_id)
    }

    /// Adds the snapshot to a log.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`] if there is one of this name; [`ErrorKind::InvalidInput`] if
    /// there is no room for another.
    pub(crate) fn add(&self, control: &mut Control) -> Result<()> {
        let name = self.name;
        if control.snapshots.iter().any(|entry| entry.name == name.0) {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!(
                    "a snapshot '{name}' exists already; give another name, or delete it with \
                     'snapshot-delete {name}'"
                ),
            ));
        }
        let mut entry = SnapshotEntry::new_zeroed();
        entry.name = name.0;
        entry.lsn = U64::new(self.lsn);
        entry.cid = U64::new(self.cid);
        entry.unix_us = U64::new(self.unix_us);
        entry.disk_id = U32::new(self.disk_id.unwrap_or(0));
        // Another snapshot at the same LSN may have saved files already, which list its disks only.
        let covers =
            |other: &&SnapshotEntry| other.lsn == entry.lsn && other.has(entry.disk_id.get());
        let same = control.snapshots.iter().filter(covers);
        entry.saved = same.map(|other| other.saved).max().unwrap_or_default();
        // The point of an export may be older than other snapshots.
        let snapshots = &mut control.snapshots;
        let place = snapshots.partition_point(|other| other.lsn.get() <= self.lsn);
        snapshots.insert(place, entry);
        if !control.fits() {
            control.snapshots.remove(place);
            let count = control.snapshots.len();
            return Err(invalid(format!(
                "the log has {count} snapshots, and no room for another; delete one with \
                 'snapshot-delete NAME'"
            )));
        }
        Ok(())
    }

    /// Removes the snapshot of this name from a log.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none.
    pub(crate) fn remove(name: SnapshotName, control: &mut Control) -> Result<()> {
        let mut entries = control.snapshots.iter_mut();
        let Some(entry) = entries.find(|entry| entry.name == name.0) else {
            return Err(Self::unknown(name, control));
        };
        entry.name = [0; 64];
        // Older snapshots need what was saved for this one.
        let named = control.snapshots.iter().filter(|entry| entry.is_named());
        let named: Vec<_> = named.map(|entry| (entry.lsn, entry.saved > 0)).collect();
        control.snapshots.retain(|entry| {
            let lsn = entry.lsn.get();
            let older = named.iter().any(|(named, _)| named.get() < lsn);
            let older = older && !planted(Mutant::DeletedForOlder);
            let alone = !named.contains(&(entry.lsn, true));
            entry.is_named() || entry.saved > 0 && older && alone
        });
        Ok(())
    }

    /// Removes the snapshots that hold points for exports: their process is gone, or closes the
    /// log.
    pub(crate) fn remove_exports(control: &mut Control) -> Result<()> {
        let all = Self::all(control).into_iter();
        let mut exports = all.filter(|snapshot| snapshot.name.is_of_export());
        exports.try_for_each(|snapshot| Self::remove(snapshot.name, control))
    }

    /// The snapshot of this name.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] if there is none; the error names the existing ones.
    pub(crate) fn find(name: SnapshotName, control: &Control) -> Result<Self> {
        let mut all = Self::all(control).into_iter();
        all.find(|snapshot| snapshot.name == name)
            .ok_or_else(|| Self::unknown(name, control))
    }

    /// Refuses a change that the log's snapshots would not survive. `what`: what it would do to the
    /// disk at `path`.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] if there are snapshots.
    pub(crate) fn refuse_loss(control: &Control, path: &Path, what: &str) -> Result<()> {
        let names = Self::names(control);
        if names.is_empty() {
            Ok(())
        } else {
            Err(invalid(format!(
                "{}: {what}, and snapshots of its log need it: {names}; delete them with 'walvisor \
                 disk snapshot-delete'",
                path.display()
            )))
        }
    }

    /// The names of all snapshots of a log.
    fn names(control: &Control) -> String {
        let all = Self::all(control);
        let names: Vec<_> = all.iter().map(|snapshot| snapshot.name.as_str()).collect();
        names.join(", ")
    }

    fn unknown(name: SnapshotName, control: &Control) -> Error {
        let names = Self::names(control);
        let others = if names.is_empty() {
            "the log has none".to_owned()
        } else {
            format!("the log has {names}")
        };
        Error::new(
            ErrorKind::NotFound,
            format!("no snapshot '{name}': {others}"),
        )
    }
}

impl Control {
    /// How many records are in the saved files of the snapshots at this LSN.
    pub(crate) fn saved(&self, lsn: u64) -> u32 {
        let snapshots = self.snapshots.iter().filter(|entry| entry.lsn == lsn);
        let counts = snapshots.map(|entry| entry.saved.get());
        counts.max().unwrap_or(0)
    }

    /// Whether there are saved files of a disk at this LSN. A snapshot of another disk only has
    /// none.
    pub(crate) fn has_saved(&self, lsn: u64, disk_id: u32) -> bool {
        let mut snapshots = self.snapshots.iter();
        snapshots.any(|entry| entry.lsn == lsn && entry.saved > 0 && entry.has(disk_id))
    }

    /// The saved files of the log, as far as they are durable.
    pub(crate) fn saved_files(&self) -> SavedFiles {
        let (mut counts, mut disks) = (Vec::new(), Vec::new());
        for entry in self.snapshots.iter().filter(|entry| entry.saved > 0) {
            counts.push((entry.lsn.get(), entry.saved.get()));
            disks.push((entry.lsn.get(), entry.disk_id.get()));
        }
        counts.dedup();
        SavedFiles {
            log: self.header.log,
            counts,
            disks,
        }
    }
}

/// The saved files of a log.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SavedFiles {
    log: Uuid,
    /// The LSNs of their snapshots, oldest first, and how many records they have.
    counts: Vec<(u64, u32)>,
    /// The LSN of each snapshot, and the number of its disk; 0: of all disks.
    disks: Vec<(u64, u32)>,
}

impl SavedFiles {
    /// The UUID of the log.
    pub(crate) fn log(&self) -> &Uuid {
        &self.log
    }

    /// The LSNs of their snapshots, oldest first, and how many records they have.
    pub(crate) fn counts(&self) -> &[(u64, u32)] {
        &self.counts
    }

    /// Whether there are saved files of a disk at this LSN. A snapshot of another disk only has
    /// none.
    pub(crate) fn has(&self, lsn: u64, disk_id: u32) -> bool {
        let mut disks = self.disks.iter();
        disks.any(|&(at, of)| at == lsn && [0, disk_id].contains(&of))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::ControlHeader;

    fn add(control: &mut Control, name: &str, lsn: u64, disk_id: u32) {
        let snapshot = Snapshot {
            name: name.parse().unwrap(),
            lsn,
            cid: lsn,
            unix_us: 0,
            disk_id: Some(disk_id),
            saved_bytes: 0,
        };
        snapshot.add(control).unwrap();
    }

    #[test]
    fn snapshots_of_two_disks_at_an_lsn_have_their_own_saved_records() {
        let mut control = Control::new(ControlHeader::new_zeroed());
        add(&mut control, "older", 5, 1);
        add(&mut control, "one", 7, 1);
        control.snapshots[1].saved = U32::new(9);
        add(&mut control, "two", 7, 2);
        assert!(control.has_saved(7, 1) && !control.has_saved(7, 2));
        add(&mut control, "again", 7, 1);
        assert_eq!(control.saved(7), 9);
        for name in ["one", "again", "two"] {
            // The older snapshot of disk 1 goes on in these files.
            Snapshot::remove(name.parse().unwrap(), &mut control).unwrap();
            assert_eq!(control.saved_files().counts(), [(7, 9)], "without '{name}'");
        }
        Snapshot::remove("older".parse().unwrap(), &mut control).unwrap();
        assert!(control.snapshots.is_empty());
    }
}
