//! Making segment files before they are needed.

use std::time::Duration;

use crate::checkpoint::pace::Growth;
use crate::error::Result;
use crate::log::state::Log;
use crate::mutant::{Mutant, planted};
use crate::sync;

/// While the log grows and nothing is copied, the keeper pauses after each step of making a segment: this many times as long as the step
/// took, and at most `LONGEST_WAY`. Made without pauses, a segment would delay the log's syncs. A copy delays them more, and has to
/// wait for the segment.
const GIVE_WAY: u32 = 2;
const LONGEST_WAY: Duration = Duration::from_millis(10);

impl Log {
    /// Makes the next segment file if too few are ready. `copies`: a copy is under way. `meanwhile` is called between its
    /// steps, unless none is ready: writers then wait, or soon do, and nothing else is to keep the medium from it.
    pub(crate) fn provide(&self, copies: bool, mut meanwhile: impl FnMut()) -> Result<()> {
        let state = self.lock();
        let Some(slot) = state.ring.next_file() else {
            return Ok(());
        };
        let mut growth = Growth::of_log(state.ring.end());
        drop(state);
        let mut give_way = |took: Duration| {
            let state = self.lock();
            let needed = state.ring.has_none_free();
            let pressing = state.is_pressing() || needed || copies;
            let disturbing = growth.is_under_way(state.ring.end());
            drop(state);
            if disturbing && !pressing {
                sync::sleep((took * GIVE_WAY).min(LONGEST_WAY));
            }
            if !needed {
                meanwhile();
            }
        };
        let size = self.segment_size;
        let made = self.medium.create_segment(slot, size, &mut give_way);
        let mut state = self.lock();
        match made {
            Ok(segment) => state.ring.add(segment),
            Err(error) => {
                // Without this segment the ring is smaller, so a checkpoint is needed sooner.
                state.keeper.checkpoint |= state.ring.cramp();
                return Err(error);
            }
        }
        drop(state);
        self.segments_freed();
        Ok(())
    }

    /// Wakes the ports that wait for a segment.
    pub(super) fn segments_freed(&self) {
        if !planted(Mutant::SegmentFreedSilently) {
            self.wake_ports();
        }
    }
}
