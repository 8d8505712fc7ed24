//! Records which chains of a queue are in flight, in memory that outlives the process (the
//! vhost-user protocol's "Inflight I/O tracking", split virtqueues).
//!
//! ```text
//!   0 features u64 │ 8 version u16 │ 10 descriptors u16 │ 12 head of the last batch u16 │ 14 used index u16
//!  16 for each descriptor: in flight u8 │ 5 unused │ 6 next of the batch u16 │ 8 counter u64
//! ```
//! The process may be killed between any two stores, and the stores before the kill stay: so only
//! their order matters. The worker marks a chain before it works on it. It then links a batch,
//! publishes the used index, clears the marks, and records the index. If the recorded index differs
//! from the published one, the last batch may still have marks.

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

/// Each queue's record starts at a multiple of this.
const ALIGNMENT: usize = 64;

/// The in-flight record of one queue.
pub struct Tracker {
    area: Arc<MmapRegion>,
    at: usize,
    entries: u16,
    counter: u64,
}

impl Tracker {
    /// Bytes that the record of a queue with `entries` descriptors takes.
    pub(crate) const fn bytes(entries: u16) -> usize {
        (HEADER + entries as usize * ENTRY).next_multiple_of(ALIGNMENT)
    }

    /// The record of queue `index` in an area for queues of `entries` descriptors each. `None` if
    /// `area` is too small.
    pub(crate) fn new(area: Arc<MmapRegion>, index: u16, entries: u16) -> Option<Self> {
        let at = usize::from(index) * Self::bytes(entries);
        (at + Self::bytes(entries) <= area.size()).then_some(Self {
            area,
            at,
            entries,
            counter: 0,
        })
    }

    /// Continues the record of a queue whose used index is `used`. Returns the heads of the chains
    /// in flight, in the order in which they were taken; `None` if the record is new.
    pub(crate) fn resume(&mut self, used: u16) -> Option<Vec<u16>> {
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

    /// Marks a chain that was taken from the available ring.
    pub(crate) fn mark(&mut self, head: u16) {
        if let Some(entry) = self.entry(head) {
            self.store(entry + COUNTER, self.counter);
            self.counter = self.counter.wrapping_add(1);
            self.store(entry + IN_FLIGHT, 1_u8);
        }
    }

    /// Links the chains of a batch, before its used index is published.
    pub(crate) fn link(&mut self, batch: &[UsedElement]) {
        for used in batch {
            if let Some(entry) = self.entry(used.head) {
                self.store(entry + NEXT, self.load::<u16>(BATCH_HEAD_AT));
                self.store(BATCH_HEAD_AT, used.head);
            }
        }
    }

    /// Clears the marks of a batch, after its used index was published.
    pub(crate) fn clear(&mut self, batch: &[UsedElement], index: u16) {
        for used in batch {
            if let Some(entry) = self.entry(used.head) {
                self.store(entry + IN_FLIGHT, 0_u8);
            }
        }
        self.store(USED_AT, index);
    }

    /// Offset of a descriptor's entry; `None` if there is none.
    fn entry(&self, head: u16) -> Option<usize> {
        (head < self.entries).then(|| HEADER + usize::from(head) * ENTRY)
    }

    fn load<T: AtomicAccess + Default>(&self, at: usize) -> T {
        // The field lies in the area, as `new` has checked, and every field is aligned.
        let value = self
            .area
            .as_volatile_slice()
            .load(self.at + at, Ordering::Acquire);
        value.unwrap_or_default()
    }

    /// Stores with Release, so that no store becomes visible before an earlier one.
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
pub(crate) struct UsedElement {
    /// Head of the used chain.
    pub(crate) head: u16,
    /// Bytes written to its device-writable part, from its start and without gaps.
    pub(crate) written: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area() -> Arc<MmapRegion> {
        Arc::new(MmapRegion::new(4096).unwrap())
    }

    fn batch(heads: &[u16]) -> Vec<UsedElement> {
        heads
            .iter()
            .map(|&head| UsedElement { head, written: 1 })
            .collect()
    }

    #[test]
    fn chains_in_flight_are_resumed_in_order() {
        let area = area();
        let mut before = Tracker::new(Arc::clone(&area), 1, 8).unwrap();
        assert_eq!(before.resume(0), None);
        [5, 2, 7, 0].into_iter().for_each(|head| before.mark(head));
        before.link(&batch(&[2]));
        before.clear(&batch(&[2]), 1);
        let mut after = Tracker::new(area, 1, 8).unwrap();
        assert_eq!(after.resume(1), Some(vec![5, 7, 0]));
        // A chain that the new process takes comes after those of the old one.
        after.mark(2);
        assert_eq!(after.resume(1), Some(vec![5, 7, 0, 2]));
    }

    /// A kill after each of the stores that end a batch.
    #[test]
    fn a_batch_counts_once_its_index_is_published() {
        for (stores, used, expected) in [
            (0, 3, &[1_u16, 3, 4][..]),
            // Linked, but not published.
            (1, 3, &[1, 3, 4]),
            // Published: the marks are left over.
            (1, 5, &[4]),
            // One mark is cleared, the index is not recorded yet.
            (2, 5, &[4]),
            (3, 5, &[4]),
        ] {
            let mut tracker = Tracker::new(area(), 0, 8).unwrap();
            tracker.resume(0);
            [0, 1, 2, 3].into_iter().for_each(|head| tracker.mark(head));
            let first = batch(&[0, 2]);
            tracker.link(&first);
            tracker.clear(&first, 2);
            // Descriptor 2 again: the list of the last batch leads through its entry.
            tracker.mark(2);
            tracker.link(&batch(&[2]));
            tracker.clear(&batch(&[2]), 3);
            tracker.mark(4);
            let last = batch(&[3, 1]);
            if stores > 0 {
                tracker.link(&last);
            }
            if stores == 2 {
                let entry = tracker.entry(3).unwrap();
                tracker.store(entry + IN_FLIGHT, 0_u8);
            }
            if stores == 3 {
                tracker.clear(&last, 5);
            }
            assert_eq!(
                tracker.resume(used),
                Some(expected.to_vec()),
                "{stores} stores, used index {used}"
            );
        }
    }

    #[test]
    fn a_garbage_record_does_no_harm() {
        let area = area();
        let slice = area.as_volatile_slice();
        slice.write_slice(&[0xff; 4096], 0).unwrap();
        let mut tracker = Tracker::new(area, 0, 8).unwrap();
        assert!(tracker.resume(7).unwrap().len() <= 8);
        tracker.mark(0xffff);
        tracker.link(&batch(&[0xffff]));
    }

    #[test]
    fn a_record_lies_within_its_area() {
        assert_eq!(Tracker::bytes(128), 2112);
        assert!(Tracker::new(area(), 0, 128).is_some());
        assert!(Tracker::new(area(), 1, 128).is_none());
    }
}
