//! Segments that a checkpoint reads through the kernel's page cache.
//!
//! A checkpoint walks the base image in sector order, but the bytes are scattered over the log.
//! Read one by one, each block would cost the medium a request and delay other threads' syncs. So a
//! segment with many small parts to copy is read once from front to back, and its parts then come
//! from memory. If the kernel needs the memory, it drops pages and rereads a part when it is
//! needed. Much of a segment may be cached already, from when it was written. The pages are freed
//! when the segment is recycled.

use std::collections::{HashMap, VecDeque};

use crate::index::{Location, Piece};
use crate::log::state::Log;
use crate::medium::file::Segment;
use crate::sync::Arc;

/// One request for a part takes the medium as long as this many consecutive bytes.
const WORTH: u64 = 64 << 10;
/// Reads in flight when in a hurry: enough to keep the medium busy, and all that a guest's request
/// has to wait for.
const STEPS_IN_HASTE: usize = 4;

/// See the module's documentation.
#[derive(Default)]
pub(crate) struct Readahead {
    segments: Vec<Arc<Segment>>,
    segment_size: u64,
}

impl Readahead {
    /// Picks the segments that are faster to read whole than piece by piece.
    pub(crate) fn of(log: &Log, pieces: impl Iterator<Item = Piece>) -> Self {
        let mut parts: HashMap<*const Segment, (Arc<Segment>, u64)> = HashMap::new();
        for piece in pieces {
            if let Some(Location::Log { segment, .. }) = piece.place {
                let entry = parts.entry(Arc::as_ptr(&segment));
                entry.or_insert_with(|| (segment, 0)).1 += 1;
            }
        }
        let worth = parts.into_values();
        let worth = worth.filter(|(_, parts)| parts * WORTH >= log.segment_size);
        // A segment that can't be opened is read part by part.
        let worth = worth.filter(|(segment, _)| segment.use_cache().is_some());
        let mut segments: Vec<_> = worth.map(|(segment, _)| segment).collect();
        segments.sort_by(|one, other| one.path.cmp(&other.path));
        Self {
            segments,
            segment_size: log.segment_size,
        }
    }

    /// Total bytes of the segments to read.
    pub(crate) fn bytes(&self) -> u64 {
        self.segments.len() as u64 * self.segment_size
    }

    /// Reads the segments in steps of `step` bytes. Calls `next` before each, with the number of
    /// bytes read so far. On `Some(true)` one step is in flight at a time, on `Some(false)` a few;
    /// `None` ends the reading.
    pub(crate) fn read(&self, step: u64, mut next: impl FnMut(u64) -> Option<bool>) {
        let (mut done, mut under_way) = (0, VecDeque::new());
        for file in self
            .segments
            .iter()
            .filter_map(|segment| segment.use_cache())
        {
            for offset in (0..self.segment_size).step_by(step as usize) {
                let Some(gently) = next(done) else {
                    return;
                };
                let len = step.min(self.segment_size - offset);
                file.read_ahead(offset, len);
                under_way.push_back((file, offset + len - 1));
                let most = if gently { 0 } else { STEPS_IN_HASTE };
                while under_way.len() > most
                    && let Some((file, last)) = under_way.pop_front()
                {
                    // If this fails, the part is read when it is needed.
                    let _ = file.read_exact_at(&mut [0], last);
                }
                done += len;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::medium::cost::MediumCost;
    use crate::medium::segment::take_short_steps;
    use crate::{Buffer, DiskOptions, Operation, Store, StoreOptions, create_disk};

    const STEP: u64 = MediumCost::USUAL.largest;

    /// Bytes written past the page cache are seen by the next read through it.
    #[test]
    fn readahead_sees_the_newest_bytes_of_a_segment() {
        let dir = tempfile::tempdir().unwrap();
        let (disk, log) = (dir.path().join("disk.img"), dir.path().join("log"));
        let options = StoreOptions {
            segment_size: 1 << 20,
            max_segments: 4,
            ..StoreOptions::default()
        };
        create_disk(&disk, 1 << 20, &log, &options).unwrap();
        let store = Store::open(&log, &[DiskOptions::new(&disk)], &options).unwrap();
        let log = &store.disks()[0].log;
        let segment = Arc::new(
            log.medium
                .create_segment(9, 1 << 20, &mut take_short_steps)
                .unwrap(),
        );
        let pieces = |count: u64| {
            let segment = segment.clone();
            (0..count).map(move |at| Piece {
                sector: at * 8,
                sectors: 8,
                place: Some(Location::Log {
                    segment: segment.clone(),
                    offset: at * 4096,
                }),
            })
        };
        for byte in 1..20_u8 {
            let bytes = Buffer::from(&vec![byte; 1 << 20][..]);
            segment.file.write_all_at(&bytes, 0).unwrap();
            assert_eq!(Readahead::of(log, pieces(15)).bytes(), 0);
            let readahead = Readahead::of(log, pieces(16));
            assert_eq!(readahead.bytes(), 1 << 20);
            let mut steps = Vec::new();
            readahead.read(STEP, |done| {
                steps.push(done);
                Some(byte % 2 == 0)
            });
            assert_eq!(steps, [0, STEP, 2 * STEP, 3 * STEP]);
            let mut cut = 0;
            readahead.read(STEP, |_| {
                cut += 1;
                (cut < 2).then_some(true)
            });
            assert_eq!(cut, 2);
            let mut read = Buffer::zeroed(1 << 20);
            segment.source().read_exact_at(&mut read, 0).unwrap();
            assert!(read.iter().all(|&found| found == byte));
        }
    }

    /// More blocks than are read one by one, scattered and some written twice: the base image gets
    /// the newest version of each.
    #[test]
    fn a_checkpoint_of_many_small_writes_copies_each() {
        checkpoint_many_small_writes(Duration::ZERO, |_| {});
    }

    /// The page cache may differ from the medium. Here it is another file, of zeroes.
    #[test]
    fn a_checkpoint_reads_the_medium_where_the_page_cache_is_wrong() {
        // With any added latency, nothing is written through the page cache.
        checkpoint_many_small_writes(Duration::from_nanos(1), |log| {
            for segment in log.lock().ring.live() {
                let zeroes = tempfile::tempfile().unwrap();
                zeroes.set_len(1 << 20).unwrap();
                segment.set_cache(zeroes);
            }
        });
    }

    fn checkpoint_many_small_writes(operation_latency: Duration, before: impl Fn(&Log)) {
        let dir = tempfile::tempdir().unwrap();
        let (disk, log) = (dir.path().join("disk.img"), dir.path().join("log"));
        let options = StoreOptions {
            segment_size: 1 << 20,
            operation_latency,
            ..StoreOptions::default()
        };
        create_disk(&disk, 4 << 20, &log, &options).unwrap();
        let store = Store::open(&log, &[DiskOptions::new(&disk)], &options).unwrap();
        let mut port = store.disks()[0].open_port().unwrap();
        let mut expected = vec![0; 4 << 20];
        for i in 0..1500_usize {
            let at = i * 7919 % 1024 * 4096;
            let block = [(i % 251) as u8; 4096];
            expected[at..at + 4096].copy_from_slice(&block);
            let sector = at as u64 / 512;
            let data = Buffer::from(&block[..]);
            port.end_for_test(Operation::Write { sector, data })
                .unwrap();
        }
        port.end_for_test(Operation::Flush).unwrap();
        drop(port);
        before(&store.disks()[0].log);
        store.disks()[0].checkpoint().unwrap();
        store.close().unwrap();
        assert!(std::fs::read(&disk).unwrap() == expected);
    }
}
