//! The log of dm-log-writes, in the format of the kernel's documentation
//! (`device-mapper/log-writes`): a super block, then the entries. An entry is a sector that
//! describes it, followed by its data.
//!
//! The entries are in the order in which the writes became durable. A write with FUA has its place
//! where it ended, a plain write before the first FLUSH that was submitted after the write had
//! ended.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

const MAGIC: u64 = 0x6a_7366_7773_6872;
/// Size in bytes of the log's units.
pub const SECTOR: usize = 512;

const FLUSH: u64 = 1;
const FUA: u64 = 2;
const DISCARD: u64 = 4;
const MARK: u64 = 8;
const METADATA: u64 = 16;

/// One write, or a mark.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Offset of the write on the device, in bytes.
    pub offset: u64,
    /// Length of the write in bytes.
    pub len: usize,
    /// Offset of its data in the log, in bytes.
    data_at: u64,
    flags: u64,
    /// The text of a mark; empty for writes.
    pub mark: String,
}

impl Entry {
    /// Whether it is a FLUSH, which makes all writes durable that had ended before it.
    pub fn is_flush(&self) -> bool {
        self.flags & FLUSH != 0
    }

    /// Whether it was durable when it ended: a FLUSH or a write with FUA.
    pub fn is_durable(&self) -> bool {
        self.flags & (FLUSH | FUA) != 0
    }

    /// Whether it is a mark.
    pub fn is_mark(&self) -> bool {
        self.flags & MARK != 0
    }

    /// Whether it is metadata of a file system, which may rely on the write not to tear.
    pub fn is_metadata(&self) -> bool {
        self.flags & METADATA != 0
    }
}

/// A complete log.
pub struct Log {
    file: File,
    /// All entries, in order.
    pub entries: Vec<Entry>,
}

impl Log {
    /// Reads the entries without their data.
    pub fn read(file: File) -> io::Result<Self> {
        let mut sector = [0; SECTOR];
        file.read_exact_at(&mut sector, 0)?;
        let number = |at: usize, sector: &[u8]| {
            u64::from_le_bytes(sector[at..at + 8].try_into().expect("eight bytes"))
        };
        let unit = u32::from_le_bytes(sector[24..28].try_into().expect("four bytes"));
        if (number(0, &sector), number(8, &sector), unit) != (MAGIC, 1, SECTOR as u32) {
            return Err(io::Error::other(
                "no log of dm-log-writes in 512-byte sectors",
            ));
        }
        let (count, mut at) = (number(16, &sector), SECTOR as u64);
        let mut entries = Vec::new();
        for entry in 0..count {
            file.read_exact_at(&mut sector, at).map_err(|error| {
                let what = format!("entry {entry} of {count} of the recording: {error}");
                io::Error::new(error.kind(), what)
            })?;
            let (flags, text) = (number(16, &sector), number(24, &sector) as usize);
            let len = number(8, &sector) as usize * SECTOR;
            at += SECTOR as u64;
            let mark = if flags & MARK != 0 {
                sector[32..][..text.min(SECTOR - 32)].to_vec()
            } else {
                Vec::new()
            };
            entries.push(Entry {
                offset: number(0, &sector) * SECTOR as u64,
                len,
                data_at: at,
                flags,
                mark: String::from_utf8(mark).map_err(io::Error::other)?,
            });
            if flags & DISCARD == 0 {
                at += len as u64;
            }
        }
        Ok(Self { file, entries })
    }

    /// The data of an entry; zeroes for a discard.
    pub fn data(&self, entry: &Entry) -> io::Result<Vec<u8>> {
        let mut data = vec![0; entry.len];
        if entry.flags & DISCARD == 0 {
            self.file.read_exact_at(&mut data, entry.data_at)?;
        }
        Ok(data)
    }
}
