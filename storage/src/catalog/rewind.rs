//! Disks that were restored in place, and which records count since then.
//!
//! ```text
//!   LSN   1 .. 5 ......... 9  10  11 ...... 15        rewind: to 5, at 10
//!         └────┤ └─ void ──┘   │  └─ newer records
//!              └───────────────┘ the disk as of 10 is the disk as of 5
//! ```
//! A rewind is a record: it says that the disk at its own LSN *at* is what it was at LSN *to*, and
//! moves no bytes. So the state at a point is that of the newest rewind up to it, plus the records
//! after that. States between *to* and *at* can still be seen, and a rewind to one of them undoes
//! this one.
//!
//! The base images never stop between the *to* and the *at* of any disk, see
//! [`Control::splits_rewind`]. So the records in the base images are always a prefix of those in
//! the present state, and a copy only needs to know which records count now. Once the base images
//! are at *at*, the rewind is forgotten.

use std::collections::HashMap;
use std::ops::RangeInclusive;

use zerocopy::little_endian::U64;

use crate::format::{Control, Rewind};
use crate::mutant::{Mutant, planted};

/// The timeline of a disk: the records that make up a state of it, over its base image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Timeline {
    /// LSN ranges of those records, disjoint, newest first.
    ranges: Vec<RangeInclusive<u64>>,
}

impl Timeline {
    /// The timeline of a disk up to LSN `until`. Its records up to `applied` are in the base image
    /// or were discarded.
    pub(crate) fn new<'a>(
        rewinds: impl DoubleEndedIterator<Item = &'a Rewind>,
        applied: u64,
        until: u64,
    ) -> Self {
        let (mut ranges, mut end) = (Vec::new(), until);
        for rewind in rewinds.rev().filter(|_| !planted(Mutant::RewindForgotten)) {
            if rewind.at <= end {
                ranges.push(rewind.at.max(applied) + 1..=end);
                end = rewind.to;
            }
        }
        ranges.push(applied + 1..=end);
        ranges.retain(|range| !range.is_empty());
        Self { ranges }
    }

    /// Whether the record with this LSN counts.
    pub(crate) fn has(&self, lsn: u64) -> bool {
        let later = self.ranges.partition_point(|range| *range.start() > lsn);
        let range = self.ranges.get(later);
        range.is_some_and(|range| range.contains(&lsn))
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
    pub(crate) fn rewinds_of(&self, disk_id: u32) -> impl DoubleEndedIterator<Item = &Rewind> {
        let rewinds = self.rewinds.iter();
        rewinds.filter(move |rewind| rewind.disk_id == disk_id)
    }

    /// The LSN of a disk's newest rewind that the base images have not passed.
    pub(crate) fn rewound(&self, disk_id: u32) -> Option<u64> {
        self.rewinds_of(disk_id).next_back().map(|rewind| rewind.at)
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

    /// Whether this LSN is between the two points of a rewind. The base images must not stop there.
    pub(crate) fn splits_rewind(&self, lsn: u64) -> bool {
        let between = |rewind: &Rewind| rewind.to < lsn && lsn < rewind.at;
        self.rewinds.iter().any(between) && !planted(Mutant::FoldSplitsRewind)
    }

    /// The base images are now at this LSN.
    pub(crate) fn set_checkpoint(&mut self, lsn: u64) {
        self.header.checkpoint_lsn = U64::new(lsn);
        self.rewinds.retain(|rewind| rewind.at > lsn);
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;
    use zerocopy::little_endian::U32;

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
        control.rewinds = rewinds.iter().map(|&(to, at)| rewind(1, to, at)).collect();
        control
    }

    fn rewind(disk_id: u32, to: u64, at: u64) -> Rewind {
        Rewind { disk_id, to, at }
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
}
