//! The keeper as a state machine: what it is doing, what happens, and which orders it serves
//! meanwhile.
//!
//! ```text
//!            all orders                                 quick orders                quick orders
//!             ┌──▶──┐                                     ┌──▶──┐                     ┌──▶──┐
//!             │     ▼                                     │     ▼                     │     ▼
//!   wake ─▶   Idle ──Begun──▶ Draining ──Drained──▶ Saving ──Saved──▶ Announcing ──Announced──▶ Copying
//!              ▲                                    │    ▲                                       │
//!              │                                    └─▶──┘ SnapshotDeleted                     Copied
//!              │                                                                                 ▼
//!              └───────────────────────────── Ended: settled, failed, or out of time ──────── Settling
//! ```
//! Any state but Idle ends with `Ended`. While it is idle, the keeper decides what to copy: the
//! oldest segments ([`fold`](crate::keeper::fold)), everything, or the records of a disk that
//! leaves. While it saves or copies, which may take minutes, orders that take no longer than a sync
//! are served between two parts. None of them begins a copy, so this is not entered twice. One of
//! them may delete the snapshot that is being saved for: then saving begins again, for an older
//! one.

use crate::log::orders::KeeperTask;

/// What the keeper is doing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum CopyPhase {
    /// It copies nothing. It may be waiting for work, serving orders, or deciding what to copy.
    #[default]
    Idle,
    /// It makes the records durable that it is going to copy, and finds out what they are.
    Draining,
    /// It saves what snapshots need from the base images.
    Saving,
    /// It notes in the control file that the base images may from now on be ahead.
    Announcing,
    /// It writes to the base images.
    Copying,
    /// It notes in the control file that the base images hold the copy, and frees what was copied.
    Settling,
}

/// What happens to a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyEvent {
    Begun,
    /// The records are durable and known.
    Drained,
    /// Everything is saved that snapshots need.
    Saved,
    /// The snapshot that was being saved for is gone.
    SnapshotDeleted,
    Announced,
    /// The base images are written and synced.
    Copied,
    /// The copy is settled, has failed, or has run out of time.
    Ended,
}

impl CopyPhase {
    /// What the keeper does after this event.
    ///
    /// # Panics
    /// If the event can't happen in this phase.
    #[must_use]
    pub(crate) fn next(self, event: CopyEvent) -> Self {
        match (self, event) {
            (Self::Idle, CopyEvent::Begun) => Self::Draining,
            (Self::Draining, CopyEvent::Drained) | (Self::Saving, CopyEvent::SnapshotDeleted) => {
                Self::Saving
            }
            (Self::Saving, CopyEvent::Saved) => Self::Announcing,
            (Self::Announcing, CopyEvent::Announced) => Self::Copying,
            (Self::Copying, CopyEvent::Copied) => Self::Settling,
            (_, CopyEvent::Ended) => Self::Idle,
            (phase, event) => panic!("the keeper can't go on from {phase:?} by {event:?}"),
        }
    }

    /// Whether the keeper may carry out this order now.
    pub(crate) fn admits(self, task: &KeeperTask) -> bool {
        match self {
            Self::Idle => true,
            Self::Saving | Self::Copying => task.is_quick(),
            Self::Draining | Self::Announcing | Self::Settling => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    const PHASES: [CopyPhase; 6] = [
        CopyPhase::Idle,
        CopyPhase::Draining,
        CopyPhase::Saving,
        CopyPhase::Announcing,
        CopyPhase::Copying,
        CopyPhase::Settling,
    ];

    #[test]
    fn a_copy_passes_each_phase_and_can_end_in_any() {
        let events = [
            CopyEvent::Begun,
            CopyEvent::Drained,
            CopyEvent::Saved,
            CopyEvent::Announced,
            CopyEvent::Copied,
        ];
        let mut phase = CopyPhase::Idle;
        for (event, expected) in events.into_iter().zip(&PHASES[1..]) {
            phase = phase.next(event);
            assert_eq!(phase, *expected);
            assert_eq!(phase.next(CopyEvent::Ended), CopyPhase::Idle);
        }
        let again = CopyPhase::Saving.next(CopyEvent::SnapshotDeleted);
        assert_eq!(again, CopyPhase::Saving);
    }

    #[test]
    fn no_copy_begins_while_another_is_under_way() {
        for phase in &PHASES[1..] {
            assert!(catch_unwind(|| phase.next(CopyEvent::Begun)).is_err());
        }
    }

    #[test]
    fn only_quick_orders_interrupt_a_copy() {
        let (quick, slow) = (
            KeeperTask::DeleteSnapshot("a".parse().unwrap()),
            KeeperTask::Checkpoint(1),
        );
        let admitted = |task: &KeeperTask| PHASES.map(|phase| phase.admits(task));
        assert_eq!(admitted(&quick), [true, false, true, false, true, false]);
        assert_eq!(admitted(&slow), [true, false, false, false, false, false]);
    }
}
