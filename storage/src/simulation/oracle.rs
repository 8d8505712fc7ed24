//! The promises of the store so far, and whether what is left keeps them.
//!
//! The oracle knows requests, their ends and the order in which modifications got their LSNs, but
//! nothing of how the store works.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::{Completion, MarkText, Operation};

/// Why a history failed.
pub(super) type Violation = String;

/// The value of each sector of each disk.
pub(super) type DiskContents = Vec<Vec<u32>>;

/// As [`DiskContents`]; sectors that can't be read are `None`.
pub(super) type ReadableContents = Vec<Vec<Option<u32>>>;

/// What the disks are after a restore in place.
pub(super) struct RestoredState {
    /// One of these, whatever the log had.
    pub may_be: Vec<DiskContents>,
    /// The restore has succeeded; otherwise it may have.
    pub certain: bool,
}

/// One modification: every sector of a range becomes `value` (0: zeroes). A mark has no sectors,
/// and as `value` its number, or 0 if the log itself made it.
#[derive(Clone, Debug)]
struct Effect {
    disk: usize,
    sector: u64,
    sectors: u64,
    value: u32,
    completed: bool,
    /// It is the mark of a restore in place.
    restore: Option<PendingRestore>,
}

/// A restore in place of a disk in use.
#[derive(Clone, Debug)]
struct PendingRestore {
    contents: Arc<[u32]>,
    /// Otherwise a mark is in its place.
    counts: bool,
}

impl Effect {
    /// A mark in the order of a disk's records, perhaps that of a restore in place.
    fn mark(disk: usize, number: u32, restore: Option<PendingRestore>) -> Self {
        Self {
            disk,
            sector: 0,
            sectors: 0,
            value: number,
            completed: false,
            restore,
        }
    }

    fn apply(&self, contents: &mut DiskContents) {
        if let Some(restore) = &self.restore {
            if restore.counts {
                contents[self.disk].copy_from_slice(&restore.contents);
            }
            return;
        }
        let range = self.sector as usize..(self.sector + self.sectors) as usize;
        contents[self.disk][range].fill(self.value);
    }
}

/// A request that has not ended.
#[derive(Clone)]
enum OpenRequest {
    /// Its place in the order once it has an LSN, and whether it must be durable when it ends.
    Change { index: Option<usize>, through: bool },
    /// How much of the order must survive if it succeeds.
    Flush { floor: usize },
    /// The range, and its contents when it was submitted at this length of the order.
    Read {
        disk: usize,
        sector: u64,
        then: Vec<u32>,
        order: usize,
    },
}

/// The oracle's record of a history.
#[derive(Clone)]
pub(super) struct Oracle {
    /// The disks before the first change of `order`.
    start: DiskContents,
    /// All modifications, in the order of their LSNs.
    order: Vec<Effect>,
    /// How much of the order must survive.
    floor: usize,
    /// How much of the order must survive if only the process ends.
    kill_floor: usize,
    /// Whether a change that succeeds survives the end of the process.
    pub written: bool,
    /// The requests that have not ended, each with its client and its disk.
    open: HashMap<u64, (usize, usize, OpenRequest)>,
    /// By client: the changes submitted that have no LSN yet, with their tokens, in order.
    unplaced: HashMap<usize, VecDeque<(u64, Effect)>>,
    /// A change or FLUSH up to this token came when there was no space, and may fail.
    pub excused: u64,
    /// How many of those failed.
    pub refused: u64,
    /// The index of a restore of a disk in use that nobody sees while the process lives, because the
    /// log failed. If its record is durable, it counts from then on.
    doubtful: Option<usize>,
}

impl Oracle {
    /// Begins with the disks as they are now.
    pub(super) fn new(start: DiskContents) -> Self {
        Self {
            start,
            order: Vec::new(),
            floor: 0,
            kill_floor: 0,
            written: false,
            open: HashMap::new(),
            unplaced: HashMap::new(),
            excused: 0,
            refused: 0,
            doubtful: None,
        }
    }

    /// Records that `client` is about to write a mark by way of a disk. It is durable when it ends.
    pub(super) fn submit_mark(&mut self, client: usize, token: u64, disk: usize, number: u32) {
        let mark = Effect::mark(disk, number, None);
        let unplaced = self.unplaced.entry(client).or_default();
        unplaced.push_back((token, mark));
        let (index, through) = (None, true);
        let open = OpenRequest::Change { index, through };
        self.open.insert(token, (client, disk, open));
    }

    /// The marks, in order: the index of each, its text, and whether it must survive.
    pub(super) fn marks(&self) -> impl Iterator<Item = (usize, MarkText, bool)> {
        let marks = self.order.iter().enumerate();
        let restores = |change: &Effect| change.restore.as_ref().is_some_and(|one| one.counts);
        let marks = marks.filter(move |(_, change)| change.sectors == 0 && !restores(change));
        marks.map(|(index, mark)| {
            let text = match &mark.restore {
                Some(_) => "a restore in place was given up".to_owned(),
                None if mark.value == 0 => "a disk has another image".to_owned(),
                None => format!("mark {}", mark.value),
            };
            let text = text.parse().expect("a short line");
            (index, text, index < self.floor)
        })
    }

    /// Records a restore in place of a disk in use, which has an LSN. It is durable if it counts.
    /// `counts` is `None` if its record may be durable, but the log failed.
    pub(super) fn restored(&mut self, disk: usize, contents: &[u32], counts: Option<bool>) {
        let index = self.order.len();
        let restore = PendingRestore {
            contents: contents.into(),
            counts: counts.unwrap_or(false),
        };
        self.order.push(Effect::mark(disk, 0, Some(restore)));
        match counts {
            Some(true) => self.floor = index + 1,
            Some(false) => {}
            None => self.doubtful = Some(index),
        }
    }

    /// Records the mark of a disk that has come to a log in use with another image.
    pub(super) fn came(&mut self, disk: usize) {
        self.order.push(Effect::mark(disk, 0, None));
    }

    /// The process has ended: a restore whose record is durable counts from now on.
    pub(super) fn settle(&mut self) {
        if let Some(index) = self.doubtful.take()
            && let Some(restore) = &mut self.order[index].restore
        {
            restore.counts = true;
        }
    }

    /// All changes of a disk so far are durable, and so are all that came before the last of them.
    /// `marks`: also a mark that nobody has an answer for.
    pub(super) fn drained(&mut self, disk: usize, marks: bool) {
        let counts = |change: &Effect| change.disk == disk && (marks || change.sectors > 0);
        let last = self.order.iter().rposition(counts);
        self.floor = self.floor.max(last.map_or(0, |last| last + 1));
    }

    /// Whether a read has not ended.
    pub(super) fn reads(&self) -> bool {
        let mut open = self.open.values();
        open.any(|(_, _, open)| matches!(open, OpenRequest::Read { .. }))
    }

    /// Whether a request to this disk has not ended.
    pub(super) fn uses(&self, disk: usize) -> bool {
        self.open.values().any(|(_, of, _)| *of == disk)
    }

    /// Records that `client` is about to submit an operation to `disk`; `through`: in writethrough
    /// mode.
    pub(super) fn submit(
        &mut self,
        client: usize,
        token: u64,
        disk: usize,
        operation: &Operation,
        through: bool,
    ) {
        let change = |sector, sectors, value| Effect {
            disk,
            sector,
            sectors,
            value,
            completed: false,
            restore: None,
        };
        let change = match operation {
            Operation::Write { sector, data } => {
                change(*sector, data.len() as u64 / 512, value_of(&data[..512]))
            }
            Operation::Discard { sector, sectors }
            | Operation::WriteZeroes {
                sector, sectors, ..
            } => change(*sector, u64::from(*sectors), 0),
            Operation::Flush => {
                let completed = |change: &Effect| change.completed && change.disk == disk;
                let floor = self.order.iter().rposition(completed).map_or(0, |i| i + 1);
                let open = OpenRequest::Flush { floor };
                self.open.insert(token, (client, disk, open));
                return;
            }
            Operation::Read { sector, sectors } => {
                let range = *sector as usize..*sector as usize + *sectors as usize;
                let open = OpenRequest::Read {
                    disk,
                    sector: *sector,
                    then: self.newest()[disk][range].to_vec(),
                    order: self.order.len(),
                };
                self.open.insert(token, (client, disk, open));
                return;
            }
        };
        let unplaced = self.unplaced.entry(client).or_default();
        unplaced.push_back((token, change));
        let index = None;
        let open = OpenRequest::Change { index, through };
        self.open.insert(token, (client, disk, open));
    }

    /// Places the oldest `count` changes of `client` that had no LSN: they have one now.
    pub(super) fn place(&mut self, client: usize, count: u64) {
        for _ in 0..count {
            let unplaced = self.unplaced.get_mut(&client);
            let Some((token, change)) = unplaced.and_then(VecDeque::pop_front) else {
                return;
            };
            if let Some((_, _, OpenRequest::Change { index, .. })) = self.open.get_mut(&token) {
                *index = Some(self.order.len());
            }
            self.order.push(change);
        }
    }

    /// Whether every request has completed.
    pub(super) fn idle(&self) -> bool {
        self.open.is_empty()
    }

    /// How many requests of a client have not ended.
    pub(super) fn owed(&self, client: usize) -> usize {
        let open = self.open.values();
        open.filter(|(by, ..)| *by == client).count()
    }

    /// Whether every request of all other clients has completed.
    pub(super) fn is_idle_without(&self, client: usize) -> bool {
        self.open.values().all(|(by, ..)| *by == client)
    }

    /// Nobody will ask how a client's requests have ended: its changes may or may not have
    /// happened.
    pub(super) fn forget(&mut self, client: usize) {
        self.open.retain(|_, (by, ..)| *by != client);
        self.unplaced.remove(&client);
    }

    /// Records the end of a request. `good`: nothing has happened that excuses a failure.
    /// `good_read`: nor that of a read.
    pub(super) fn complete(
        &mut self,
        client: usize,
        completion: Completion,
        good: bool,
        good_read: bool,
    ) -> Result<(), Violation> {
        let Completion { token, result } = completion;
        let open = self.open.remove(&token);
        let (_, _, open) = open.ok_or("a request was answered twice")?;
        let failed = result.is_err();
        let read = matches!(open, OpenRequest::Read { .. });
        let excused = if read {
            !good_read
        } else {
            token <= self.excused
        };
        self.refused += u64::from(failed && good && !read);
        if failed && good && !excused {
            return Err(format!("a good request failed: {result:?}"));
        }
        match open {
            OpenRequest::Change { index, through } => {
                if let Some(unplaced) = self.unplaced.get_mut(&client) {
                    unplaced.retain(|(other, _)| *other != token);
                }
                match index {
                    Some(index) if !failed => {
                        self.order[index].completed = true;
                        if through {
                            self.floor = self.floor.max(index + 1);
                        }
                        if self.written {
                            self.kill_floor = self.kill_floor.max(index + 1);
                        }
                    }
                    None if !failed => {
                        return Err("a change was acknowledged without an LSN".into());
                    }
                    _ => {}
                }
            }
            OpenRequest::Flush { floor } if !failed => self.floor = self.floor.max(floor),
            OpenRequest::Flush { .. } => {}
            OpenRequest::Read {
                disk,
                sector,
                then,
                order,
            } => {
                let Ok(Some(data)) = result else {
                    return Ok(());
                };
                for (i, (found, &then)) in data.chunks(512).map(value_of).zip(&then).enumerate() {
                    let at = sector + i as u64;
                    // The sector is as it was when the read came, or as any write made it since.
                    let since = self.order[order..].iter().any(|change| {
                        let made = match &change.restore {
                            Some(restore) => {
                                restore.counts && restore.contents[at as usize] == found
                            }
                            None => {
                                let sectors = change.sector..change.sector + change.sectors;
                                sectors.contains(&at) && change.value == found
                            }
                        };
                        change.disk == disk && made
                    });
                    if found != then && !since {
                        return Err(format!(
                            "read of disk {disk} sector {at} gave {found} instead of {then}"
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// The disks after all changes.
    pub(super) fn newest(&self) -> DiskContents {
        self.after(self.order.len())
    }

    /// The disks after the first `count` changes.
    pub(super) fn after(&self, count: usize) -> DiskContents {
        let mut contents = self.start.clone();
        let changes = self.order.iter().take(count);
        changes.for_each(|change| change.apply(&mut contents));
        contents
    }

    /// Judges a clean close: everything is in the base images.
    pub(super) fn closed(&mut self, bases: &DiskContents) -> Result<(), Violation> {
        let all = self.newest();
        if *bases != all {
            return Err(format!(
                "after a clean close the base images differ: {}",
                difference(&readable(bases), &all)
            ));
        }
        self.floor = self.order.len();
        Ok(())
    }

    /// After a close that left changes in the log, all of them must survive.
    pub(super) fn left(&mut self) {
        self.floor = self.order.len();
    }

    /// Only the process has ended: its written changes are still there, and durable once recovered.
    pub(super) fn killed(&mut self) {
        self.floor = self.floor.max(self.kill_floor);
    }

    /// After damage, the last acknowledged records may be gone if nothing that is left proves them
    /// durable. All changes up to `durable`, an LSN of a log that began with 1, must survive.
    pub(super) fn damaged(&mut self, durable: u64) {
        self.floor = self.floor.min(durable as usize);
    }

    /// Judges the disks after a crash: they must be exactly what some prefix of the order made, not
    /// below the floor. Returns how many changes were lost.
    pub(super) fn judge(&self, found: &DiskContents) -> Result<usize, Violation> {
        self.judge_readable(&readable(found))
    }

    /// As [`judge`](Self::judge), after a kill: changes that were completed as written must be
    /// there too.
    pub(super) fn judge_killed(&self, found: &DiskContents) -> Result<usize, Violation> {
        self.judge_from(self.floor.max(self.kill_floor), &readable(found))
    }

    /// As [`judge`](Self::judge), of the sectors that can be read.
    pub(super) fn judge_readable(&self, found: &ReadableContents) -> Result<usize, Violation> {
        self.judge_from(self.floor, found)
    }

    fn judge_from(&self, floor: usize, found: &ReadableContents) -> Result<usize, Violation> {
        let mut contents = self.start.clone();
        let (must, may) = self.order.split_at(floor);
        must.iter().for_each(|change| change.apply(&mut contents));
        let at_floor = contents.clone();
        let mut lost = agrees(&contents, found).then_some(may.len());
        for (i, change) in may.iter().enumerate() {
            change.apply(&mut contents);
            if agrees(&contents, found) {
                // The longest prefix counts: prefixes with equal contents are one state.
                lost = Some(may.len() - i - 1);
            }
        }
        lost.ok_or_else(|| {
            format!(
                "what is left is no prefix of {} changes from {} on; against the shortest legal \
                 one: {}",
                self.order.len(),
                floor,
                difference(found, &at_floor)
            )
        })
    }
}

/// Whether all sectors that can be read agree.
pub(super) fn agrees(contents: &DiskContents, found: &ReadableContents) -> bool {
    let disks = contents.iter().zip(found);
    let mut sectors = disks.flat_map(|(contents, found)| contents.iter().zip(found));
    sectors.all(|(value, found)| found.is_none_or(|found| found == *value))
}

/// The value that fills a sector; `u32::MAX`, which no write uses, if the sector is mixed.
pub(super) fn value_of(sector: &[u8]) -> u32 {
    let value = u32::from_le_bytes(sector[..4].try_into().expect("a sector"));
    let pure = sector[4..] == sector[..sector.len() - 4];
    if pure { value } else { u32::MAX }
}

pub(super) fn readable(contents: &DiskContents) -> ReadableContents {
    let all = |disk: &Vec<u32>| disk.iter().map(|&value| Some(value)).collect();
    contents.iter().map(all).collect()
}

pub(super) fn difference(found: &ReadableContents, wanted: &DiskContents) -> String {
    let mut text = String::new();
    for (disk, (found, wanted)) in found.iter().zip(wanted).enumerate() {
        for (sector, (found, wanted)) in found.iter().zip(wanted).enumerate() {
            if let Some(found) = found
                && found != wanted
            {
                text += &format!("disk {disk} sector {sector}: {found} for {wanted}; ");
            }
        }
    }
    text
}
