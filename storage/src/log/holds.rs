//! Who needs records of a log to stay: everything after the LSN of a hold does.
//!
//! | owner | from which LSN on | gives way |
//! |---|---|---|
//! | a look at a disk in use | that of the base images, which do not change meanwhile | never |
//! | the look of an export | the same | soon |
//! | another process that reads the log | the same | soon |
//! | a restore in place | the same | soon |
//! | a snapshot that the base images can stop at | its own | at once: its bytes are saved beside the log |
//! | one inside a rewind, at which they can't stop | its own | never |
//! | the point of an export | its own | as a snapshot; inside a rewind, soon |
//! | the replica, if its lag is limited | the newest that it has | never; a close does not wait |
//!
//! Retention is no hold: it lets the oldest segments go by their age or number.

use crate::catalog::snapshot::{Snapshot, SnapshotName};
use crate::format::Control;
use crate::log::admission::RoomNeed;
use crate::log::state::Log;
use crate::medium::file::Segment;
use crate::mutant::{Mutant, any_planted, planted};
use crate::sync::Arc;

/// Whom a log keeps records for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HoldOwner {
    /// The log's replica.
    Replica,
    /// The point of an export.
    KeptPoint(SnapshotName),
    /// A snapshot.
    Snapshot(SnapshotName),
    /// A look, until its user ends it.
    Look,
    /// The look of an export.
    Export,
    /// Another process, which reads the log.
    Reader,
    /// A restore in place, which replaces the index: an unfinished full checkpoint, which has a
    /// layer of it, is finished first.
    Rewind,
}

/// When a hold lets records go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GivesWay {
    /// Not before its owner ends it.
    Never,
    /// Once the log needs room, its owner ends it.
    Soon,
    /// As soon as the log needs room.
    AtOnce,
}

/// Everything after an LSN stays in the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hold {
    pub lsn: u64,
    pub owner: HoldOwner,
    pub gives_way: GivesWay,
}

/// What holds the records of a log in use.
#[derive(Debug, Default)]
pub(crate) struct Holds(Vec<Hold>);

impl Hold {
    /// One that an order opens, on base images at this LSN.
    fn opened(lsn: u64, owner: HoldOwner) -> Self {
        let gives_way = match owner {
            HoldOwner::Look => GivesWay::Never,
            _ => GivesWay::Soon,
        };
        Self {
            lsn,
            owner,
            gives_way,
        }
    }

    fn of_snapshot(snapshot: &Snapshot, control: &Control) -> Self {
        let export = snapshot.name.is_of_export();
        let gives_way = match (control.splits_rewind(snapshot.lsn), export) {
            (false, _) => GivesWay::AtOnce,
            (true, true) => GivesWay::Soon,
            (true, false) => GivesWay::Never,
        };
        let owner = if export {
            HoldOwner::KeptPoint(snapshot.name)
        } else {
            HoldOwner::Snapshot(snapshot.name)
        };
        Self {
            lsn: snapshot.lsn,
            owner,
            gives_way,
        }
    }

    fn is_of_replica(&self) -> bool {
        self.owner == HoldOwner::Replica
    }

    fn is_of_snapshot(&self) -> bool {
        matches!(self.owner, HoldOwner::Snapshot(_) | HoldOwner::KeptPoint(_))
    }

    /// Whether an order has opened it, so that the base images do not change.
    fn is_open(&self) -> bool {
        !self.is_of_snapshot() && !self.is_of_replica()
    }

    fn stays(&self) -> bool {
        self.gives_way != GivesWay::AtOnce
    }
}

impl Holds {
    /// Those of a log that nobody uses: of its snapshots.
    pub(crate) fn of(control: &Control) -> Self {
        let mut holds = Self::default();
        holds.set_snapshots(control);
        holds
    }

    /// The lowest LSN of the holds that count.
    fn floor(&self, counts: impl Fn(&Hold) -> bool) -> Option<u64> {
        let counted = self.0.iter().filter(|hold| counts(hold));
        counted.map(|hold| hold.lsn).min()
    }

    /// Everything after this LSN stays while there is room, for a snapshot or a look.
    pub(crate) fn kept(&self) -> Option<u64> {
        self.floor(|hold| !hold.is_of_replica())
    }

    /// Everything after this LSN must stay.
    pub(crate) fn held(&self) -> Option<u64> {
        self.floor(Hold::stays)
    }

    /// As [`held`](Self::held), without the replica.
    pub(crate) fn held_here(&self) -> Option<u64> {
        self.floor(|hold| hold.stays() && !hold.is_of_replica())
    }

    /// As [`held_here`](Self::held_here), without what ends soon.
    pub(crate) fn held_firmly(&self) -> Option<u64> {
        self.floor(|hold| hold.gives_way == GivesWay::Never && !hold.is_of_replica())
    }

    /// Everything after this LSN stays for the replica, which lacks some of it, and nobody here
    /// needs more. `newest`: the log's newest record.
    pub(crate) fn held_for_replica(&self, newest: u64) -> Option<u64> {
        let here = self.held_here();
        let first = |lsn: &u64| *lsn < newest && here.is_none_or(|here| *lsn < here);
        self.floor(Hold::is_of_replica).filter(first)
    }

    /// Whether all that keeps the log from making room ends soon, the replica aside.
    pub(crate) fn all_end_soon(&self) -> bool {
        self.held_here().is_some() && self.held_firmly().is_none()
    }

    /// Who needs everything after this LSN to stay, and does not give way at once.
    pub(crate) fn owner_of(&self, lsn: u64) -> Option<HoldOwner> {
        let rank = |owner: &HoldOwner| match owner {
            HoldOwner::Replica => 0,
            HoldOwner::KeptPoint(_) => 1,
            HoldOwner::Snapshot(_) => 2,
            HoldOwner::Look => 3,
            HoldOwner::Export | HoldOwner::Reader | HoldOwner::Rewind => 4,
        };
        let there = self.0.iter().filter(|hold| hold.lsn == lsn && hold.stays());
        there.map(|hold| hold.owner).min_by_key(rank)
    }

    /// Whether the base images must not change.
    pub(crate) fn has_open(&self) -> bool {
        self.0.iter().any(Hold::is_open)
    }

    /// Whether an export's look, or a reader, keeps the log from making room.
    pub(crate) fn has_yielding(&self) -> bool {
        let yields = |hold: &Hold| matches!(hold.owner, HoldOwner::Export | HoldOwner::Reader);
        self.0.iter().any(yields)
    }

    /// Whether the point of an export must stay, although the log needs room.
    pub(crate) fn has_stuck_point(&self, name: SnapshotName) -> bool {
        let stuck = |hold: &Hold| hold.owner == HoldOwner::KeptPoint(name) && hold.stays();
        self.0.iter().any(stuck)
    }

    /// The snapshots, and what the base images have of them, are those of the control file.
    pub(crate) fn set_snapshots(&mut self, control: &Control) {
        self.0.retain(|hold| !hold.is_of_snapshot());
        let snapshots = Snapshot::all(control).into_iter();
        self.0
            .extend(snapshots.map(|snapshot| Hold::of_snapshot(&snapshot, control)));
        self.pass(control.header.checkpoint_lsn.get());
    }

    /// The base images are at this LSN. What a snapshot before it needs has been saved.
    pub(crate) fn pass(&mut self, lsn: u64) {
        let stays = |hold: &Hold| hold.is_open() && hold.lsn < lsn;
        assert!(
            !self.0.iter().any(stays) || any_planted(),
            "the images do not change while they are held"
        );
        self.0
            .retain(|hold| !hold.is_of_snapshot() || hold.lsn >= lsn);
    }

    /// The log keeps everything after this LSN for its replica; `None`: nothing.
    pub(crate) fn set_replica(&mut self, lsn: Option<u64>) {
        self.0.retain(|hold| !hold.is_of_replica());
        self.0.extend(lsn.map(|lsn| Hold {
            lsn,
            owner: HoldOwner::Replica,
            gives_way: GivesWay::Never,
        }));
    }
}

/// What holds a log, and gives way: the look of an export, or a reader's hold.
pub(crate) trait YieldingHold: Send + Sync {
    /// Ends it if it should have ended a while ago.
    fn end_if_overdue(&self, need: RoomNeed);

    /// Ends it if it is a reader's, which reads again.
    fn end_if_reader(&self) {}
}

/// While this exists, the log's base images do not change, and all records after an LSN stay in the
/// log.
pub(crate) struct OpenHold {
    log: Arc<Log>,
    hold: Hold,
}

impl OpenHold {
    /// Holds the base images as they are. Only the keeper, which writes to them, may do that, and
    /// not while it copies.
    pub(crate) fn new(log: &Arc<Log>, owner: HoldOwner) -> Self {
        let mut state = log.lock();
        let hold = Hold::opened(state.pipeline.applied(), owner);
        assert!(hold.is_open(), "{owner:?} holds no images");
        if !planted(Mutant::LookUnheld) {
            state.keeper.holds.0.push(hold);
        }
        drop(state);
        let log = log.clone();
        Self { log, hold }
    }
}

impl Drop for OpenHold {
    fn drop(&mut self) {
        let mut state = self.log.lock();
        let holds = &mut state.keeper.holds.0;
        if let Some(place) = holds.iter().position(|hold| *hold == self.hold) {
            holds.swap_remove(place);
        }
        self.log.call_keeper(&mut state);
    }
}

/// The part of a log that a look reads: all records up to an LSN, all of them durable.
pub(crate) struct HeldLog {
    /// The segments with records that are not in the base images, oldest first, each with its last
    /// LSN so far. Declared before the hold, so that they are released before the keeper looks for
    /// free segments.
    pub segments: Vec<(Arc<Segment>, u64)>,
    /// The newest record.
    pub newest: u64,
    /// The control file: what the base images have, and which snapshots exist.
    pub control: Control,
    pub hold: OpenHold,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holds(held: &[(u64, HoldOwner)]) -> Holds {
        let holds = held.iter().map(|&(lsn, owner)| Hold::opened(lsn, owner));
        Holds(holds.collect())
    }

    #[test]
    fn a_floor_counts_those_who_do_not_give_way() {
        use HoldOwner::{Export, Look, Replica, Rewind};
        let mut all = holds(&[(7, Export), (7, Rewind), (9, Look)]);
        assert_eq!((all.held_here(), all.held_firmly()), (Some(7), Some(9)));
        assert!(!all.all_end_soon() && all.has_open());
        assert_eq!(all.owner_of(9), Some(Look));
        all.set_replica(Some(3));
        all.set_replica(Some(5));
        assert_eq!(
            (all.held(), all.kept(), all.held_here()),
            (Some(5), Some(7), Some(7))
        );
        assert_eq!((all.owner_of(5), all.owner_of(3)), (Some(Replica), None));
        // The replica has all, or somebody here needs more.
        assert_eq!(all.held_for_replica(6), Some(5));
        assert_eq!(all.held_for_replica(5), None);
        all.set_replica(Some(8));
        assert_eq!(all.held_for_replica(10), None);
        all.set_replica(None);
        assert_eq!(all.held(), Some(7));
        let brief = holds(&[(7, Export)]);
        assert!(brief.all_end_soon() && brief.has_yielding());
        assert_eq!(
            (Holds::default().held(), Holds::default().all_end_soon()),
            (None, false)
        );
    }

    #[test]
    fn a_snapshot_holds_until_the_images_pass_it() {
        let name = |text: &str| text.parse().unwrap();
        let hold = |lsn, gives_way| Hold {
            lsn,
            owner: HoldOwner::Snapshot(name("x")),
            gives_way,
        };
        let mut all = Holds(vec![hold(4, GivesWay::AtOnce), hold(6, GivesWay::Never)]);
        assert_eq!((all.kept(), all.held()), (Some(4), Some(6)));
        assert_eq!((all.owner_of(4), all.has_open()), (None, false));
        assert_eq!(all.owner_of(6), Some(HoldOwner::Snapshot(name("x"))));
        all.pass(5);
        assert_eq!(all.kept(), Some(6));
        let point = SnapshotName::of_export(1);
        all.0[0].owner = HoldOwner::KeptPoint(point);
        assert!(all.has_stuck_point(point));
    }
}
