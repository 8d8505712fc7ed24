//! Records which chains of a queue are in flight, in memory that outlives the process (the vhost-user protocol's
//! "Inflight I/O tracking", split virtqueues).
//!
//! ```text
//!   0 features u64 │ 8 version u16 │ 10 descriptors u16 │ 12 head of the last batch u16 │ 14 used index u16
//!  16 for each descriptor: in flight u8 │ 5 unused │ 6 next of the batch u16 │ 8 counter u64
//! ```
//! A kill can come between any two stores and leaves those before it, so only their order matters. The worker marks a
//! chain before it works on it. It links a batch, publishes the used index, clears the marks, and then notes the index.
//! If the noted index differs from the published one, marks of the last batch may be left over.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use vm_memory::{AtomicAccess, Bytes, MmapRegion, VolatileMemory};

const VERSION: u16 = 1;
const VERSION_AT: usize = 8;
const DESCRIPTORS_AT: usize = 10;
const BATCH_HEAD_AT: usize = 12;
const USED_AT: usize = 14;
const HEADER: usize = 16;

const IN_FLIGHT: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;
const ENTRY: usize = 16;

/// The record of each queue begins at a multiple of this.
const ALIGNMENT: usize = 64;

/// The record of one queue.
pub(crate) struct Tracker {
    area: Arc<MmapRegion>,
    at: usize,
    entries: u16,
    counter: u64,
}

impl Tracker {
    /// Bytes that a queue of `entries` descriptors takes.
    pub(crate) const fn bytes(entries: u16) -> usize {
        (HEADER + entries as usize * ENTRY).next_multiple_of(ALIGNMENT)
    }

    /// The record of queue `index`, one of several of `entries` descriptors each. `None` if `area` is too small.
    pub(crate) fn new(area: Arc<MmapRegion>, index: u16, entries: u16) -> Option<Self> {
        let at = usize::from(index) * Self::bytes(entries);
        (at + Self::bytes(entries) <= area.size()).then_some(Self {
            area,
            at,
            entries,
            counter: 0,
        })
    }

    /// Resumes the record of a queue whose used ring is at index `used`. Returns the chains in flight, in the order in
    /// which they were taken; `None` if the record is new.
    pub(super) fn resume(&mut self, used: u16) -> Option<Vec<u16>> {
        let fresh = self.load::<u16>(VERSION_AT) == 0;
        if fresh {
            self.store(DESCRIPTORS_AT, self.entries);
            self.store(USED_AT, used);
            self.store(VERSION_AT, VERSION);
            return None;
        }
        let batch = used.wrapping_sub(self.load(USED_AT));
        let mut head: u16 = self.load(BATCH_HEAD_AT);
        for _ in 0..batch.min(self.entries) {
            let Some(entry) = self.entry(head) else { break };
            self.store(entry + IN_FLIGHT, 0_u8);
            head = self.load(entry + NEXT);
        }
        self.store(USED_AT, used);
        let mut marked: Vec<(u64, u16)> = (0..self.entries)
            .filter_map(|head| {
                let entry = self.entry(head)?;
                let marked = self.load::<u8>(entry + IN_FLIGHT) != 0;
                marked.then(|| (self.load(entry + COUNTER), head))
            })
            .collect();
        marked.sort_unstable();
        self.counter = marked
            .last()
            .map_or(0, |(counter, _)| counter.wrapping_add(1));
        Some(marked.into_iter().map(|(_, head)| head).collect())
    }

    /// Marks a chain that is taken from the available ring.
    pub(super) fn take(&mut self, head: u16) {
        if let Some(entry) = self.entry(head) {
            self.store(entry + COUNTER, self.counter);
            self.counter = self.counter.wrapping_add(1);
            self.store(entry + IN_FLIGHT, 1_u8);
        }
    }

    /// Links a batch, before its used index is published.
    pub(super) fn link(&mut self, batch: &[Used]) {
        for used in batch {
            if let Some(entry) = self.entry(used.head) {
                self.store(entry + NEXT, self.load::<u16>(BATCH_HEAD_AT));
                self.store(BATCH_HEAD_AT, used.head);
            }
        }
    }

    /// Forgets a batch, after its used index was published.
    pub(super) fn forget(&mut self, batch: &[Used], index: u16) {
        for used in batch {
            if let Some(entry) = self.entry(used.head) {
                self.store(entry + IN_FLIGHT, 0_u8);
            }
        }
        self.store(USED_AT, index);
    }

    /// Where the record of a descriptor begins; `None` if there is none.
    fn entry(&self, head: u16) -> Option<usize> {
        (head < self.entries).then(|| HEADER + usize::from(head) * ENTRY)
    }

    fn load<T: AtomicAccess + Default>(&self, at: usize) -> T {
        // `new` has checked that the area holds the field, and every field is aligned.
        let value = self
            .area
            .as_volatile_slice()
            .load(self.at + at, Ordering::Acquire);
        value.unwrap_or_default()
    }

    /// Stores with Release: no store becomes visible before an earlier one.
    fn store<T: AtomicAccess>(&self, at: usize, value: T) {
        let stored = self
            .area
            .as_volatile_slice()
            .store(value, self.at + at, Ordering::Release);
        debug_assert!(stored.is_ok(), "offset {at} of an inflight record");
    }
}

/// One element of the used ring (virtio 1.2, 2.7.8).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Used {
    /// Head of the chain that has been used.
    pub(crate) head: u16,
    /// Bytes written into its device-writable part, from the start of that part and without a gap.
    pub(crate) written: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area() -> Arc<MmapRegion> {
        Arc::new(MmapRegion::new(4096).unwrap())
    }

    fn batch(heads: &[u16]) -> Vec<Used> {
        heads
            .iter()
            .map(|&head| Used { head, written: 1 })
            .collect()
    }

    #[test]
    fn what_is_in_flight_comes_back_in_its_order() {
        let area = area();
        let mut before = Tracker::new(Arc::clone(&area), 1, 8).unwrap();
        assert_eq!(before.resume(0), None);
        [5, 2, 7, 0].into_iter().for_each(|head| before.take(head));
        before.link(&batch(&[2]));
        before.forget(&batch(&[2]), 1);
        let mut after = Tracker::new(area, 1, 8).unwrap();
        assert_eq!(after.resume(1), Some(vec![5, 7, 0]));
        // A chain taken by the new one comes behind those of the old one.
        after.take(2);
        assert_eq!(after.resume(1), Some(vec![5, 7, 0, 2]));
    }

    /// A kill after each of the stores with which a batch ends.
    #[test]
    fn a_batch_counts_from_the_moment_that_its_index_is_published() {
        for (stores, used, expected) in [
            (0, 3, &[1_u16, 3, 4][..]),
            // Linked, but not published.
            (1, 3, &[1, 3, 4]),
            // Published: the marks are left over.
            (1, 5, &[4]),
            // One mark is gone, the index is not noted.
            (2, 5, &[4]),
            (3, 5, &[4]),
        ] {
            let mut tracker = Tracker::new(area(), 0, 8).unwrap();
            tracker.resume(0);
            [0, 1, 2, 3].into_iter().for_each(|head| tracker.take(head));
            let first = batch(&[0, 2]);
            tracker.link(&first);
            tracker.forget(&first, 2);
            // Slot 2 again: the list of the last batch goes over it.
            tracker.take(2);
            tracker.link(&batch(&[2]));
            tracker.forget(&batch(&[2]), 3);
            tracker.take(4);
            let last = batch(&[3, 1]);
            if stores > 0 {
                tracker.link(&last);
            }
            if stores == 2 {
                let entry = tracker.entry(3).unwrap();
                tracker.store(entry + IN_FLIGHT, 0_u8);
            }
            if stores == 3 {
                tracker.forget(&last, 5);
            }
            assert_eq!(
                tracker.resume(used),
                Some(expected.to_vec()),
                "{stores} stores, used index {used}"
            );
        }
    }

    #[test]
    fn nonsense_in_the_record_ends() {
        let area = area();
        let slice = area.as_volatile_slice();
        slice.write_slice(&[0xff; 4096], 0).unwrap();
        let mut tracker = Tracker::new(area, 0, 8).unwrap();
        assert!(tracker.resume(7).unwrap().len() <= 8);
        tracker.take(0xffff);
        tracker.link(&batch(&[0xffff]));
    }

    #[test]
    fn a_record_lies_within_its_area() {
        assert_eq!(Tracker::bytes(128), 2112);
        assert!(Tracker::new(area(), 0, 128).is_some());
        assert!(Tracker::new(area(), 1, 128).is_none());
    }
}
