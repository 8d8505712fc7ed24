//! Dumping a log by record or by commit group, for people and programs.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use crate::SECTOR_SIZE;
use crate::catalog::control::existing_log;
use crate::catalog::mark_text::MarkText;
use crate::catalog::readable::ReadableLog;
use crate::error::Result;
use crate::format::DescriptorKind;
use crate::medium::checksum;
use crate::medium::directory::directory_to_read;
use crate::medium::segment::LogRead;
use crate::recovery::contents::VerifyScope;
use crate::recovery::scan::{self, FoundRecord, learn_rewinds};

/// A record's effect on its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// Bytes were written.
    Write,
    /// Zeroes were written; the sectors stay allocated.
    WriteZeroes,
    /// The sectors were discarded; they read as zeroes.
    Discard,
    /// A [mark](crate::Disk::mark): no disk was changed.
    Mark,
    /// The disk was restored in place: it is again what it was after the record with this LSN.
    Rewind(u64),
}

/// One record of the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogRecord<'a> {
    /// Log sequence number: the record's position in the log.
    pub lsn: u64,
    /// ID of the record's commit group.
    pub cid: u64,
    /// When the record's batch was built, in microseconds since 1970 by the wall clock. Never
    /// before the preceding record, even if the clock was set back.
    pub unix_us: u64,
    /// The disk's number in the log; 0 for a mark.
    pub disk_id: u32,
    /// Where the disk's base image was when last open; empty if the log has no such disk.
    pub disk: &'a Path,
    /// The record's effect.
    pub kind: RecordKind,
    /// The text of a mark; `None` for other records, or if it is damaged.
    pub text: Option<&'a MarkText>,
    /// First sector, of 512 bytes.
    pub sector: u64,
    /// Number of sectors.
    pub sectors: u32,
    /// Bytes of payload: 512 a sector for a write, otherwise 0.
    pub payload_bytes: u64,
    /// CRC-32C of the payload as it was written; 0 if there is no payload.
    pub payload_crc: u32,
    /// The segment file.
    pub segment: &'a Path,
    /// Byte offset of the payload in the segment file.
    pub offset: u64,
    /// Whether the record is already in the base image.
    pub in_base: bool,
    /// Whether a restore in place has undone the record, so that it no longer counts.
    pub undone: bool,
    /// Whether the payload is damaged.
    pub damaged: bool,
}

impl<'a> LogRecord<'a> {
    /// A record that was found, of the disk whose base image is at `disk`. `text`: that of a mark.
    pub(crate) fn new(found: &FoundRecord<'a>, disk: &'a Path, text: Option<&'a MarkText>) -> Self {
        let descriptor = found.descriptor;
        let sector = descriptor.sector.get();
        let kind = match descriptor.kind() {
            Some(DescriptorKind::Write) | None => RecordKind::Write,
            Some(DescriptorKind::WriteZeroes) => RecordKind::WriteZeroes,
            Some(DescriptorKind::Discard) => RecordKind::Discard,
            Some(DescriptorKind::Mark) => RecordKind::Mark,
            Some(DescriptorKind::Rewind) => RecordKind::Rewind(sector),
        };
        // In a rewind it is the LSN.
        let sector = match kind {
            RecordKind::Rewind(_) => 0,
            _ => sector,
        };
        Self {
            lsn: found.lsn,
            cid: found.batch.cid.get(),
            unix_us: found.batch.unix_us.get(),
            disk_id: descriptor.disk_id.get(),
            disk,
            kind,
            text,
            sector,
            sectors: descriptor.sectors.get(),
            payload_bytes: descriptor.payload_len(),
            payload_crc: checksum::combine(found.checksums, descriptor.payload_len()),
            segment: &found.segment.path,
            offset: found.offset,
            in_base: found.in_base,
            undone: descriptor.changes_sectors() && !found.in_base && !found.counts,
            damaged: found.damaged,
        }
    }
}

/// The records that one sync made durable.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogGroup {
    /// ID of the group.
    pub cid: u64,
    /// LSN of its first record.
    pub first_lsn: u64,
    /// LSN of its last record.
    pub last_lsn: u64,
    /// The base images of the disks that it changes, in the order of their first records.
    pub disks: Vec<PathBuf>,
    /// Number of records.
    pub records: u64,
    /// Bytes of their payloads.
    pub payload_bytes: u64,
    /// When its last batch was built, in microseconds since 1970, by the wall clock.
    pub unix_us: u64,
    /// The marks among the records, in LSN order, except damaged ones.
    pub marks: Vec<LogMark>,
}

/// A mark in the log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogMark {
    /// Its log sequence number.
    pub lsn: u64,
    /// Its text.
    pub text: MarkText,
}

/// The text of a mark whose payload has the right checksums.
pub(crate) fn text_of(found: &FoundRecord<'_>) -> Result<Option<MarkText>> {
    let len = found.descriptor.payload_len();
    if len != SECTOR_SIZE {
        return Ok(None);
    }
    let read = LogRead::new(found.segment.clone(), found.offset, len as usize).read()?;
    Ok(MarkText::read(&read))
}

/// Reads the log in `log_dir`, verifies every checksum and calls `visit` for each record in
/// segments in use, in LSN order. Changes nothing.
///
/// # Errors
/// As [`inspect`](crate::inspect). If acknowledged records are missing
/// ([`ErrorKind::Damaged`](crate::ErrorKind::Damaged)), `visit` has been called for the records
/// before them.
pub fn dump_records<'a>(
    log: impl Into<ReadableLog<'a>>,
    visit: &mut dyn FnMut(&LogRecord<'_>),
) -> Result<()> {
    let log: ReadableLog<'_> = log.into();
    let (log_dir, access) = (log.dir(), log.access());
    let mut control = existing_log(log_dir, access)?;
    let disks = control.control.disks.iter();
    let paths: HashMap<u32, PathBuf> = disks.map(|d| (d.id.get(), d.path(&control.home))).collect();
    let medium = directory_to_read(log_dir, access, None);
    // If this fails, so does the scan below, after all records before the damage.
    let _ = learn_rewinds(&medium, log_dir, &mut control.control);
    let mut failed = None;
    let mut each = |found: FoundRecord<'_>| {
        let disk_id = found.descriptor.disk_id.get();
        let mut text = None;
        if found.is_mark() && !found.damaged {
            match text_of(&found) {
                Ok(found) => text = found,
                Err(error) => drop(failed.get_or_insert(error)),
            }
        }
        let disk = paths.get(&disk_id).map_or(Path::new(""), PathBuf::as_path);
        visit(&LogRecord::new(&found, disk, text.as_ref()));
    };
    scan::scan(
        &medium,
        log_dir,
        &control.control,
        VerifyScope::All,
        &mut each,
        &mut |_, _| {},
    )
    .and_then(|_| failed.map_or(Ok(()), Err))
}

/// As [`dump_records`], but calls `visit` once per commit group, that is, for all batches with the
/// same cid.
///
/// # Errors
/// As [`dump_records`].
pub fn dump_groups<'a>(
    log: impl Into<ReadableLog<'a>>,
    visit: &mut dyn FnMut(&LogGroup),
) -> Result<()> {
    let mut groups = Groups::default();
    let dumped = dump_records(log, &mut |record| {
        if let Some(ended) = groups.take(record) {
            visit(&ended);
        }
    });
    if let Some(last) = groups.end() {
        visit(&last);
    }
    dumped
}

/// Puts records together to groups.
#[derive(Default)]
pub(crate) struct Groups {
    open: Option<LogGroup>,
}

impl Groups {
    /// Takes the next record. Returns the group before it, if the record is the first of another
    /// one.
    pub(crate) fn take(&mut self, record: &LogRecord<'_>) -> Option<LogGroup> {
        let ended = self.open.take_if(|group| group.cid != record.cid);
        let group = self.open.get_or_insert_with(|| LogGroup {
            cid: record.cid,
            first_lsn: record.lsn,
            last_lsn: record.lsn,
            disks: Vec::new(),
            records: 0,
            payload_bytes: 0,
            unix_us: record.unix_us,
            marks: Vec::new(),
        });
        group.last_lsn = record.lsn;
        group.records += 1;
        group.payload_bytes += record.payload_bytes;
        group.unix_us = record.unix_us;
        if let Some(text) = record.text.cloned() {
            let lsn = record.lsn;
            group.marks.push(LogMark { lsn, text });
        }
        let marks = record.kind == RecordKind::Mark;
        if !marks && !group.disks.iter().any(|disk| disk == record.disk) {
            group.disks.push(record.disk.to_path_buf());
        }
        ended
    }

    /// The last group.
    pub(crate) fn end(self) -> Option<LogGroup> {
        self.open
    }
}
