//! Making segment files before they are needed.

use std::time::Duration;

use crate::checkpoint::pace::ActivityMeter;
use crate::error::Result;
use crate::log::state::Log;
use crate::medium::file::Segment;
use crate::medium::segment::{StepSize, ZeroingStep};
use crate::mutant::{Mutant, planted};
use crate::sync;

/// While the log grows and nothing is being copied, the keeper pauses after each step of making a
/// segment: this many times as long as the step took, at most `LONGEST_PAUSE`. Without pauses,
/// making a segment would delay the log's syncs. A copy delays them more anyway, and has to wait
/// for the segment. Steps are long only while somebody waits for the segment: with long ones, the
/// slowest syncs of a new log took five times as long.
const PAUSE_FACTOR: u32 = 2;
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

impl Log {
    /// Makes the next segment file if too few are ready. `copies`: a copy is running. `meanwhile`
    /// is called between the steps, unless no segment is ready: writers then wait, or soon will, so
    /// nothing else should use the medium.
    pub(crate) fn preallocate_segment(
        &self,
        copies: bool,
        mut meanwhile: impl FnMut(),
    ) -> Result<()> {
        self.prepare_caches();
        let mut state = self.lock();
        let Some(slot) = state.ring.next_file() else {
            return Ok(());
        };
        let (size, began, ready) = (
            self.segment_size,
            state.ring.end(),
            state.ring.ready_bytes(),
        );
        let mut log_activity = ActivityMeter::of_log(began);
        // Fast writers get half of what is ready at once, and the rest in step with the file.
        // Otherwise they would use it up, then stall until the file is done.
        let mut zeroed = 0;
        let mut progress = move |bytes: u64| {
            zeroed += bytes;
            // One long step ahead.
            let ahead = zeroed + StepSize::Long.bytes() as u64;
            let share = ahead.min(size) as f64 / size as f64;
            (ready > 0).then_some(began + (ready as f64 * (1.0 + share) / 2.0) as u64)
        };
        state.ring.make_progress(progress(0));
        drop(state);
        let mut give_way = |ZeroingStep { bytes, took }: ZeroingStep| {
            let mut state = self.lock();
            let needed = state.ring.has_none_free();
            let pressing = state.is_pressing() || needed || state.ring.outruns_files();
            let disturbing = log_activity.is_active(state.ring.end());
            let waited = state.ring.make_progress(progress(bytes));
            drop(state);
            if waited {
                self.wake_ports();
            }
            if disturbing && !pressing && !copies {
                sync::sleep((took * PAUSE_FACTOR).min(LONGEST_PAUSE));
            }
            if !needed {
                meanwhile();
            }
            if pressing {
                StepSize::Long
            } else {
                StepSize::Short
            }
        };
        let made = self.medium.create_segment(slot, size, &mut give_way);
        if let Ok(segment) = &made {
            self.prepare_cache(segment);
        }
        let mut state = self.lock();
        let waited = state.ring.make_progress(None);
        match made {
            Ok(segment) => state.ring.add(segment),
            Err(error) => {
                // Without this segment, the ring is smaller and a checkpoint is needed sooner.
                state.keeper.checkpoint |= state.ring.note_cannot_grow();
                drop(state);
                if waited {
                    self.wake_ports();
                }
                return Err(error);
            }
        }
        drop(state);
        self.wake_for_segments();
        Ok(())
    }

    /// Opens the page-cache descriptors of the segments that come next: the threads that write to
    /// them may not be allowed to open files.
    pub(crate) fn prepare_caches(&self) {
        let state = self.lock();
        let unprepared = state.ring.ready().filter(|segment| !segment.has_cache());
        let unprepared: Vec<_> = unprepared.cloned().collect();
        drop(state);
        unprepared
            .iter()
            .for_each(|segment| self.prepare_cache(segment));
    }

    fn prepare_cache(&self, segment: &Segment) {
        if !self.leader_alone && !segment.needs_sync {
            segment.prepare_cache();
        }
    }

    /// Wakes the ports that wait for a segment.
    pub(crate) fn wake_for_segments(&self) {
        if !planted(Mutant::SegmentFreedSilently) {
            self.wake_ports();
        }
    }
}
