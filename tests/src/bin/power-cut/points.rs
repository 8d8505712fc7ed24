//! The moments of power cuts, and the content of the medium after each.

use std::fmt;
use std::fs::File;
use std::io::{self, Seek, SeekFrom, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use walvisor_storage::Buffer;
use walvisor_testkit::Random;

use crate::log_writes::{Entry, Log, SECTOR};

/// Which writes that were not yet durable are on the medium.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// None: the power goes right after the entry, and the medium holds exactly the durable writes.
    After,
    /// Some sectors of the entry: the power goes during this write.
    Within,
    /// The power goes right before the entry, a FLUSH. The medium holds the writes with FUA, and
    /// some of the other writes that ended since the previous FLUSH.
    Window,
}

/// One power cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Point {
    pub kind: Kind,
    /// The number of the entry.
    pub entry: usize,
    /// The seed that selects the sectors on the medium.
    pub seed: u64,
}

impl fmt::Display for Point {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::After => "after",
            Kind::Within => "within",
            Kind::Window => "window",
        };
        write!(f, "{kind}-{}-{:x}", self.entry, self.seed)
    }
}

impl Point {
    /// Parses the output of `Display`.
    pub fn parse(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split('-').collect();
        let [kind, entry, seed] = words[..] else {
            return None;
        };
        Some(Self {
            kind: match kind {
                "after" => Kind::After,
                "within" => Kind::Within,
                "window" => Kind::Window,
                _ => return None,
            },
            entry: entry.parse().ok()?,
            seed: u64::from_str_radix(seed, 16).ok()?,
        })
    }

    /// The point right after an entry.
    pub fn after(entry: usize) -> Self {
        let (kind, seed) = (Kind::After, 0);
        Self { kind, entry, seed }
    }

    /// The sort key of the order in which [`Medium::present`] needs points.
    pub fn place(&self, entries: &[Entry]) -> (usize, usize) {
        (self.whole(entries), self.entry)
    }

    /// Number of the log's first entries that had happened. The promises that these entries made
    /// must hold.
    pub fn happened(&self) -> usize {
        match self.kind {
            Kind::After => self.entry + 1,
            Kind::Within | Kind::Window => self.entry,
        }
    }

    /// Number of the log's first entries that are on the medium as a whole.
    fn whole(&self, entries: &[Entry]) -> usize {
        match self.kind {
            Kind::After | Kind::Within => self.happened(),
            Kind::Window => {
                let before = entries[..self.entry].iter();
                let flush = before.rev().position(Entry::is_flush);
                flush.map_or(0, |back| self.entry - back)
            }
        }
    }
}

/// The entries of a recording at which power cuts differ, by kind.
pub struct CutPlaces {
    flushes: Vec<usize>,
    /// FLUSHes and FUAs.
    durable: Vec<usize>,
    marks: Vec<usize>,
    writes: Vec<usize>,
}

impl CutPlaces {
    /// The places after entry `begin`.
    pub fn find(entries: &[Entry], begin: usize) -> Self {
        let of = |wanted: fn(&Entry) -> bool| {
            let numbered = entries.iter().enumerate().skip(begin);
            let wanted = numbered.filter(|(_, entry)| wanted(entry));
            wanted.map(|(number, _)| number).collect()
        };
        Self {
            flushes: of(Entry::is_flush),
            durable: of(Entry::is_durable),
            marks: of(Entry::is_mark),
            writes: of(|entry| entry.len > 0),
        }
    }

    /// `count` power cuts. Of eight, three are windows, and three come right after a durable entry
    /// or a mark.
    pub fn some(&self, count: usize, random: &mut Random) -> Vec<Point> {
        let point = |number: usize| {
            let (kind, from) = match number % 8 {
                0 | 3 | 6 => (Kind::Window, &self.flushes),
                1 => (Kind::After, &self.durable),
                2 | 5 => (Kind::After, &self.marks),
                4 => (Kind::Within, &self.writes),
                _ => (Kind::After, &self.writes),
            };
            Point {
                kind,
                entry: from[random.below(from.len() as u64) as usize],
                seed: random.next(),
            }
        };
        (0..count).map(point).collect()
    }

    /// One power cut right after each FLUSH, FUA and mark, and one window before each FLUSH.
    pub fn each(&self, random: &mut Random) -> Vec<Point> {
        let after = self.durable.iter().chain(&self.marks);
        let after = after.map(|&entry| Point::after(entry));
        let windows = self.flushes.iter().map(|&entry| Point {
            kind: Kind::Window,
            entry,
            seed: random.next(),
        });
        after.chain(windows).collect()
    }
}

/// The content of the medium, from point to point.
pub struct Medium<'a> {
    log: &'a Log,
    image: Buffer,
    /// Number of entries applied to the image.
    at: usize,
}

impl<'a> Medium<'a> {
    /// A medium of `bytes` bytes, as it was before the log began.
    pub fn new(log: &'a Log, bytes: usize) -> Self {
        Self {
            log,
            image: Buffer::zeroed(bytes),
            at: 0,
        }
    }

    /// Writes the content after a power cut at `point` to `device`. Points must come in the order
    /// of [`Point::place`].
    pub fn present(&mut self, point: &Point, device: &Path) -> io::Result<()> {
        let entries = &self.log.entries;
        let whole = point.whole(entries);
        assert!(self.at <= whole, "points in order");
        for entry in &entries[self.at..whole] {
            let data = self.log.data(entry)?;
            self.put(entry.offset, &data);
        }
        self.at = whole;
        let partly = match point.kind {
            Kind::After => &[],
            Kind::Within => &entries[point.entry..point.entry + 1],
            Kind::Window => &entries[whole..point.entry],
        };
        let mut random = Random(point.seed);
        let mut undo = Vec::new();
        for entry in partly {
            let durable = entry.is_durable() && point.kind == Kind::Window;
            let data = self.log.data(entry)?;
            for (offset, data) in survivors(entry, &data, durable, &mut random) {
                let at = offset as usize;
                undo.push((offset, self.image[at..at + data.len()].to_vec()));
                self.put(offset, data);
            }
        }
        // Bypasses the page cache: the file system that is mounted from the device next has a cache
        // of its own.
        let mut options = File::options();
        options.write(true).custom_flags(libc::O_DIRECT);
        let mut file = options.open(device)?;
        file.seek(SeekFrom::Start(0))?;
        for chunk in self.image.chunks(1 << 20) {
            file.write_all(chunk)?;
        }
        for (offset, data) in undo.iter().rev() {
            self.put(*offset, data);
        }
        Ok(())
    }

    fn put(&mut self, offset: u64, data: &[u8]) {
        self.image[offset as usize..][..data.len()].copy_from_slice(data);
    }
}

/// The parts of a write that are on the medium: all of a `durable` write; all, none or some sectors
/// of another.
fn survivors<'a>(
    entry: &Entry,
    data: &'a [u8],
    durable: bool,
    random: &mut Random,
) -> Vec<(u64, &'a [u8])> {
    let tears = !entry.is_metadata();
    let fate = random.below(if tears { 3 } else { 2 });
    if durable || fate == 0 {
        return vec![(entry.offset, data)];
    }
    if fate == 1 {
        return Vec::new();
    }
    let sectors = (entry.offset..).step_by(SECTOR).zip(data.chunks(SECTOR));
    sectors.filter(|_| random.one_in(2)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_come_back_from_their_text() {
        for kind in [Kind::After, Kind::Within, Kind::Window] {
            let point = Point {
                kind,
                entry: 17,
                seed: u64::MAX,
            };
            assert_eq!(Point::parse(&point.to_string()), Some(point));
        }
        assert_eq!(Point::parse("after-17"), None);
    }
}
