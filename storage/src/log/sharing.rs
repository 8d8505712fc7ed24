//! How the disks of a log share its syncs.

use std::collections::BTreeMap;
use std::mem;

use smallvec::SmallVec;

use crate::log::waiters::Waiter;
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU64, Ordering};

/// Of a group with more disks, this many are noted as each other's partners.
const MOST_PARTNERS: usize = 8;
/// Parts of a sync are counted in millionths.
const MILLION: u64 = 1_000_000;

/// How the FLUSHes of a disk, and its writes that had to be durable, have shared the syncs of the
/// log since the disk was opened.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SyncSharing {
    /// How many of them a sync has ended.
    pub flushes: u64,
    /// Their part of these syncs: of a sync that ended `n` requests of any disks, each has an
    /// `n`th.
    pub syncs: f64,
    /// The commit groups that they were in.
    pub groups: u64,
    /// The other disks in these groups, by number. Of a group with more than eight disks, eight
    /// count.
    pub partners: Vec<SyncPartner>,
}

/// A disk that was in commit groups of another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncPartner {
    /// Its [number](crate::Disk::id).
    pub disk_id: u32,
    /// How many groups.
    pub groups: u64,
}

/// The live counters behind [`SyncSharing`].
#[derive(Debug, Default)]
pub(crate) struct SharingCounters {
    /// 0 for the keeper, which is not a disk.
    disk_id: u32,
    /// Groups that ended one request alone, which was the disk's.
    alone: AtomicU64,
    /// Of the other groups.
    shared: Mutex<SharedSyncs>,
}

#[derive(Debug, Default)]
struct SharedSyncs {
    flushes: u64,
    millionths: u64,
    groups: u64,
    /// The number of the last of these groups.
    last_group: u64,
    /// Groups in common with other disks, by their numbers.
    partners: BTreeMap<u32, u64>,
}

impl SharingCounters {
    pub(crate) fn new(disk_id: u32) -> Self {
        Self {
            disk_id,
            ..Self::default()
        }
    }

    /// The counters now.
    pub(crate) fn snapshot(&self) -> SyncSharing {
        let alone = self.alone.load(Ordering::Relaxed);
        let shared = self.shared.lock().expect("sharing lock");
        let partners = shared.partners.iter();
        let partner = |(&disk_id, &groups)| SyncPartner { disk_id, groups };
        SyncSharing {
            flushes: alone + shared.flushes,
            syncs: alone as f64 + shared.millionths as f64 / MILLION as f64,
            groups: alone + shared.groups,
            partners: partners.map(partner).collect(),
        }
    }
}

/// Counts the requests that the sync of a group has ended. `group`: its number, which no other
/// group of the log has; not
/// 0. Without the log's lock.
pub(crate) fn count_sync(ended: &[Waiter], group: u64) {
    if let [alone] = ended {
        let counters = &alone.mailbox.sharing;
        counters.alone.fetch_add(1, Ordering::Relaxed);
        return;
    }
    let mut disks: SmallVec<[&SharingCounters; MOST_PARTNERS]> = SmallVec::new();
    for waiter in ended {
        let counters = &*waiter.mailbox.sharing;
        let mut shared = counters.shared.lock().expect("sharing lock");
        shared.flushes += 1;
        shared.millionths += MILLION / ended.len() as u64;
        if mem::replace(&mut shared.last_group, group) != group {
            shared.groups += 1;
            if disks.len() < MOST_PARTNERS && counters.disk_id != 0 {
                disks.push(counters);
            }
        }
    }
    for one in &disks {
        let mut shared = one.shared.lock().expect("sharing lock");
        for other in disks.iter().filter(|other| other.disk_id != one.disk_id) {
            *shared.partners.entry(other.disk_id).or_default() += 1;
        }
    }
}

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;
    use crate::log::waiters::Mailbox;
    use crate::sync::{Arc, Event};

    #[test]
    fn each_disk_has_its_part_of_a_sync_and_its_partners() {
        let port = |disk_id| {
            let sharing = Arc::new(SharingCounters::new(disk_id));
            Arc::new(Mailbox::new(Event::new().unwrap(), sharing))
        };
        // The keeper's comes last.
        let ports: Vec<_> = (1..=10).chain([0]).map(port).collect();
        let group = |number, disks: &[usize]| {
            let waiter = |disk: &usize| Waiter {
                lsn: 1,
                token: 1,
                mailbox: ports[*disk].clone(),
            };
            let ended: Vec<_> = disks.iter().map(waiter).collect();
            count_sync(&ended, number);
        };
        group(1, &[]);
        group(2, &[0]);
        group(3, &[0, 0, 1, 0]);
        group(4, &[0, 2, 10, 10]);
        group(5, &[1, 1]);
        let of = |disk: usize| ports[disk].sharing.snapshot();
        let partner = |disk_id, groups| SyncPartner { disk_id, groups };
        assert_eq!(
            of(0),
            SyncSharing {
                flushes: 5,
                syncs: 1.0 + 0.75 + 0.25,
                groups: 3,
                partners: vec![partner(2, 1), partner(3, 1)],
            }
        );
        let second = of(1);
        assert_eq!((second.flushes, second.syncs, second.groups), (3, 1.25, 2));
        assert_eq!(second.partners, [partner(1, 1)]);
        // A group of many disks.
        group(6, &[9, 8, 7, 6, 5, 4, 3, 2, 1, 0]);
        assert_eq!((of(9).partners.len(), of(0).groups), (7, 4));
        assert_eq!(of(0).partners.len(), 2);
    }
}
