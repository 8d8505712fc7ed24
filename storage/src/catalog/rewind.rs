//! Disks that were restored in place, and which records count since then.
//!
//! ```text
//!   LSN   1 .. 5 ......... 9  10  11 ...... 15        rewind: to 5, at 10
//!         └────┤ └─ void ──┘   │  └─ newer records
//!              └───────────────┘ the disk as of 10 is the disk as of 5
//! ```
//! A rewind moves no bytes and writes no record: an entry in the control file says that the disk at
//! LSN *at* is what it was at LSN *to*. So the state at a point is that of the newest rewind up to
//! it, plus the records after that. States between *to* and *at* can still be seen, and a rewind to
//! one of them undoes this one.
//!
//! The base images never stop between the *to* and the *at* of any disk, see
//! [`Control::splits_rewind`]. So the records in the base images are always a prefix of those in
//! the present state, and a copy only needs to know which records count now. Once the base images
//! are at *at*, the entry is dropped.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use zerocopy::little_endian::{U32, U64};

use crate::error::{Result, invalid};
use crate::format::{Control, RewindEntry};
use crate::mutant::{Mutant, planted};

/// The timeline of a disk: the records that make up a state of it, over its base image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Timeline {
    /// LSN ranges of those records, newest first.
    ranges: Vec<RangeInclusive<u64>>,
}

impl Timeline {
    /// The timeline of a disk up to LSN `until`. Its records up to `applied` are in the base image
    /// or were discarded.
    pub(crate) fn new<'a>(
        rewinds: impl DoubleEndedIterator<Item = &'a RewindEntry>,
        applied: u64,
        until: u64,
    ) -> Self {
        let (mut ranges, mut end) = (Vec::new(), until);
        for rewind in rewinds.rev().filter(|_| !planted(Mutant::RewindForgotten)) {
            if rewind.at.get() <= end {
                ranges.push(rewind.at.get().max(applied) + 1..=end);
                end = rewind.to.get();
            }
        }
        ranges.push(applied + 1..=end);
        ranges.retain(|range| !range.is_empty());
        Self { ranges }
    }

    /// Whether the record with this LSN counts.
    pub(crate) fn has(&self, lsn: u64) -> bool {
        self.ranges.iter().any(|range| range.contains(&lsn))
    }

    /// Whether the later state is this one, which ends at `lsn`, plus records after `lsn`.
    pub(crate) fn leads_to(&self, later: &Self, lsn: u64) -> bool {
        let until = |range: &RangeInclusive<u64>| *range.start()..=*range.end().min(&lsn);
        let older = later.ranges.iter().map(until);
        older
            .filter(|range| !range.is_empty())
            .eq(self.ranges.iter().cloned())
    }
}

/// The timelines of all disks of a log up to one LSN.
pub(crate) struct Timelines {
    /// The timelines of disks with an entry, by number; and one for all others.
    disks: HashMap<u32, Timeline>,
    others: Timeline,
}

impl Timelines {
    /// The timeline of a disk.
    pub(crate) fn of(&self, disk_id: u32) -> &Timeline {
        self.disks.get(&disk_id).unwrap_or(&self.others)
    }
}

impl Control {
    /// The rewinds of a disk, oldest first.
    pub(crate) fn rewinds_of(&self, disk_id: u32) -> impl DoubleEndedIterator<Item = &RewindEntry> {
        let rewinds = self.rewinds.iter();
        rewinds.filter(move |rewind| rewind.disk_id.get() == disk_id)
    }

    /// The LSN of a disk's newest rewind that the base images have not passed.
    pub(crate) fn rewound(&self, disk_id: u32) -> Option<u64> {
        let newest = self.rewinds_of(disk_id).next_back();
        newest.map(|rewind| rewind.at.get())
    }

    /// A disk's timeline up to LSN `until`.
    pub(crate) fn timeline(&self, disk_id: u32, until: u64) -> Timeline {
        Timeline::new(self.rewinds_of(disk_id), self.applied_lsn(disk_id), until)
    }

    /// All disks' timelines up to LSN `until`.
    pub(crate) fn timelines(&self, until: u64) -> Timelines {
        let ids = self.disks.iter().map(|disk| disk.id.get());
        let applied = self.header.checkpoint_lsn.get();
        Timelines {
            disks: ids.map(|id| (id, self.timeline(id, until))).collect(),
            others: Timeline::new([].iter(), applied, until),
        }
    }

    /// True if no rewind leads from `to` to before `from`: the disk at `to` is the disk at `from`
    /// plus the records between.
    pub(crate) fn is_continuous(&self, disk_id: u32, from: u64, to: u64) -> bool {
        let timeline = |until| self.timeline(disk_id, until);
        self.since(disk_id) <= from && from <= to && timeline(from).leads_to(&timeline(to), from)
    }

    /// The LSN of the last rewind that directly follows the record with this LSN, or the LSN itself
    /// if none does. The record is the last one up to the checkpoint LSN, or a newer one: rewinds
    /// that the base images have passed count too.
    pub(crate) fn with_rewinds(&self, lsn: u64) -> u64 {
        self.with_rewinds_until(lsn.max(self.header.checkpoint_lsn.get()), u64::MAX)
    }

    /// As [`with_rewinds`](Self::with_rewinds), but ends where no other rewind is split. One to the
    /// same LSN is, by those that directly follow that LSN.
    pub(crate) fn with_whole_rewinds(&self, lsn: u64) -> u64 {
        let mut reached = (lsn..=self.with_rewinds(lsn)).rev();
        reached.find(|&lsn| !self.splits_rewind(lsn)).unwrap_or(lsn)
    }

    /// As [`with_rewinds`](Self::with_rewinds), for rewinds up to a time, in microseconds
    /// since 1970.
    pub(crate) fn with_rewinds_until(&self, lsn: u64, unix_us: u64) -> u64 {
        let next = |lsn: u64, rewind: &RewindEntry| match rewind.at.get() == lsn + 1 {
            true if rewind.unix_us.get() <= unix_us => lsn + 1,
            _ => lsn,
        };
        self.rewinds.iter().fold(lsn, next)
    }

    /// The newest LSN up to this one that is not a rewind's.
    pub(crate) fn without_rewinds(&self, lsn: u64) -> u64 {
        let before =
            |lsn: u64, rewind: &RewindEntry| if rewind.at.get() == lsn { lsn - 1 } else { lsn };
        self.rewinds.iter().rev().fold(lsn, before)
    }

    /// Whether this LSN is a rewind's.
    pub(crate) fn is_rewind(&self, lsn: u64) -> bool {
        self.rewinds.iter().any(|rewind| rewind.at.get() == lsn)
    }

    /// Whether this LSN is between the two points of a rewind. The base images must not stop there.
    pub(crate) fn splits_rewind(&self, lsn: u64) -> bool {
        let between = |rewind: &RewindEntry| rewind.to.get() < lsn && lsn < rewind.at.get();
        self.rewinds.iter().any(between) && !planted(Mutant::FoldSplitsRewind)
    }

    /// The base images are now at this LSN.
    pub(crate) fn set_checkpoint(&mut self, lsn: u64) {
        self.header.checkpoint_lsn = U64::new(lsn);
        self.rewinds.retain(|rewind| rewind.at.get() > lsn);
    }

    /// Takes an LSN for an event of a disk that is not a record, by a rewind to the disk's present
    /// state. `last`: the newest LSN of a record or rewind. Returns the LSN.
    ///
    /// # Errors
    /// If there is no room for another.
    pub(crate) fn take_lsn(&mut self, disk_id: u32, last: u64, unix_us: u64) -> Result<u64> {
        let before = self.rewinds.last().map_or(0, |last| last.unix_us.get());
        self.rewind(disk_id, last, last, unix_us.max(before))
    }

    /// Adds a rewind of a disk to LSN `to`. `last`: the newest LSN of a record or rewind. Returns
    /// the rewind's own LSN.
    ///
    /// # Errors
    /// If there is no room for another.
    pub(crate) fn rewind(&mut self, disk_id: u32, to: u64, last: u64, unix_us: u64) -> Result<u64> {
        let at = last + 1;
        self.rewinds.push(RewindEntry {
            disk_id: U32::new(disk_id),
            reserved: U32::new(0),
            to: U64::new(to),
            at: U64::new(at),
            unix_us: U64::new(unix_us),
        });
        if !self.fits() {
            self.rewinds.pop();
            return Err(invalid(format!(
                "it has {} restores in place that the images have not passed, and no room for \
                 another; 'walvisor disk checkpoint DISK' makes room: it copies the log to the \
                 images, which ends the history",
                self.rewinds.len()
            )));
        }
        let next_lsn = self.header.next_lsn.get().max(at + 1);
        self.header.next_lsn = U64::new(next_lsn);
        Ok(at)
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;
    use crate::format::{ControlHeader, DiskEntry};

    /// A log of the disks 1 and 2, with these rewinds of disk 1.
    fn control(checkpoint: u64, rewinds: &[(u64, u64)]) -> Control {
        let mut header = ControlHeader::new_zeroed();
        header.checkpoint_lsn = U64::new(checkpoint);
        let disks = [1, 2].map(|id| DiskEntry {
            id: U32::new(id),
            ..DiskEntry::new_zeroed()
        });
        let mut control = Control::new(header);
        control.disks = disks.to_vec();
        for &(to, at) in rewinds {
            assert_eq!(control.rewind(1, to, at - 1, at * 100).unwrap(), at);
        }
        control
    }

    fn records(control: &Control, disk_id: u32, until: u64) -> Vec<u64> {
        let timeline = control.timeline(disk_id, until);
        (0..40).filter(|&lsn| timeline.has(lsn)).collect()
    }

    #[test]
    fn a_state_is_made_of_the_records_on_its_timeline() {
        // To 5; then back to before that; then into what followed the first rewind.
        let control = control(2, &[(5, 10), (9, 13), (12, 20)]);
        for (until, wanted) in [
            (2, vec![]),
            (5, vec![3, 4, 5]),
            (9, vec![3, 4, 5, 6, 7, 8, 9]),
            (10, vec![3, 4, 5]),
            (12, vec![3, 4, 5, 11, 12]),
            (13, vec![3, 4, 5, 6, 7, 8, 9]),
            (15, vec![3, 4, 5, 6, 7, 8, 9, 14, 15]),
            (20, vec![3, 4, 5, 11, 12]),
            (21, vec![3, 4, 5, 11, 12, 21]),
        ] {
            assert_eq!(records(&control, 1, until), wanted, "{until}");
            let all: Vec<u64> = (3..=until).collect();
            assert_eq!(records(&control, 2, until), all, "{until}");
        }
        assert_eq!(records(&control, 3, 7), [3, 4, 5, 6, 7]);
    }

    #[test]
    fn a_state_leads_to_another_if_no_rewind_is_between() {
        let control = control(2, &[(5, 10), (9, 13)]);
        let leads = |from, to| control.is_continuous(1, from, to);
        assert!(leads(2, 4) && leads(2, 12) && leads(5, 12) && leads(10, 12));
        assert!(!leads(6, 12) && !leads(4, 3) && leads(6, 9));
        // The undo brought it back as it was.
        assert!(leads(6, 14) && leads(9, 14) && !leads(12, 14));
        assert!(control.is_continuous(2, 6, 12));
    }

    /// Discarded by `discard_log`, or copied when the disk left the log in use.
    #[test]
    fn discarded_records_do_not_come_back() {
        let mut control = control(2, &[(5, 10)]);
        control.disks[0].void_lsn = U64::new(12);
        assert!(records(&control, 1, 12).is_empty());
        assert_eq!(records(&control, 1, 14), [13, 14]);
        assert_eq!(records(&control, 2, 4), [3, 4]);
    }

    #[test]
    fn the_lsns_of_rewinds_follow_those_of_records() {
        let control = control(2, &[(5, 10), (9, 11), (12, 20)]);
        for (lsn, with, without) in [
            (8, 8, 8),
            (9, 11, 9),
            (10, 11, 9),
            (11, 11, 9),
            (19, 20, 19),
        ] {
            assert_eq!(control.with_rewinds(lsn), with);
            assert_eq!(control.without_rewinds(lsn), without);
        }
        assert_eq!(control.with_rewinds_until(9, 1050), 10);
        assert_eq!(control.with_rewinds_until(9, 999), 9);
        let rewinds = (0..40).filter(|&lsn| control.is_rewind(lsn));
        assert!(rewinds.eq([10, 11, 20]));
    }

    #[test]
    fn the_base_images_pass_a_rewind_as_a_whole() {
        let mut control = control(2, &[(5, 10), (9, 11), (12, 20)]);
        let may = |lsn: &u64| !control.splits_rewind(*lsn);
        let may: Vec<u64> = (2..23).filter(may).collect();
        assert_eq!(may, [2, 3, 4, 5, 11, 12, 20, 21, 22]);
        control.set_checkpoint(11);
        assert_eq!((control.rewinds.len(), control.rewound(1)), (1, Some(20)));
        control.set_checkpoint(20);
        assert_eq!(control.rewound(1), None);
    }

    /// Disk 2 is rewound right after LSN 9, and disk 1 to LSN 9 later.
    #[test]
    fn the_base_images_stop_at_an_lsn_to_which_another_rewind_goes() {
        let mut control = control(2, &[]);
        control.rewind(2, 9, 9, 0).unwrap();
        control.rewind(1, 9, 18, 0).unwrap();
        assert_eq!(control.with_rewinds(9), 10);
        assert_eq!(control.with_whole_rewinds(9), 9);
        assert_eq!(control.with_whole_rewinds(18), 19);
        control.set_checkpoint(control.with_whole_rewinds(9));
        control.header.next_lsn = U64::new(20);
        assert!(control.counted());
    }

    #[test]
    fn rewinds_beyond_the_limit_are_refused() {
        let mut control = control(0, &[]);
        let mut last = 1;
        let error = loop {
            match control.rewind(1, 0, last, 0) {
                Ok(at) => last = at,
                Err(error) => break error.to_string(),
            }
        };
        assert_eq!(
            control.rewinds.len(),
            (65536 - 96 - 16 - 3 * 8 - 2 * 624) / 32
        );
        assert!(
            error.contains("2004 restores in place") && error.contains("disk checkpoint"),
            "{error}"
        );
        control.header.next_lsn = U64::new(last + 1);
        control.encode();
    }
}
