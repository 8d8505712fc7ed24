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
/// for the segment. Steps are long only if writers may have to wait for the segment: with long
/// steps, the slowest syncs of a new log took three to four times as long.
const PAUSE_FACTOR: u32 = 2;
const LONGEST_PAUSE: Duration = Duration::from_millis(10);
/// The share of what is ready that the log may use before the file has to keep up with it.
const HEAD_START: f64 = 0.125;

/// How much of a segment file is made, beside how far the log has grown meanwhile.
struct FileProgress {
    /// Bytes of the file, and those of them that are zeroed.
    size: u64,
    zeroed: u64,
    /// The log's end when the file was begun, and how many bytes it could grow then without it.
    began: u64,
    ready: u64,
}

impl FileProgress {
    /// How far the log may grow for now; `None`: nothing was ready. Fast writers get half of what
    /// is ready at once, and the rest in step with the file, a long step ahead. Otherwise they
    /// would use it up, then stall until the file is done.
    fn allowed_end(&self) -> Option<u64> {
        let ahead = self.zeroed + StepSize::Long.bytes();
        let share = ahead.min(self.size) as f64 / self.size as f64;
        (self.ready > 0).then_some(self.began + (self.ready as f64 * (1.0 + share) / 2.0) as u64)
    }

    /// Whether the log, which ends at `end`, grows so fast that its writers may have to wait for
    /// the file.
    fn is_late(&self, end: u64) -> bool {
        let used = (end - self.began) as f64 / self.ready as f64;
        let share = self.zeroed as f64 / self.size as f64;
        used > share / 2.0 + HEAD_START
    }
}

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
        let mut progress = FileProgress {
            size: self.segment_size,
            zeroed: 0,
            began: state.ring.end(),
            ready: state.ring.ready_bytes(),
        };
        let mut log_activity = ActivityMeter::of_log(progress.began);
        state.ring.make_progress(progress.allowed_end());
        drop(state);
        let mut give_way = |ZeroingStep { bytes, took }: ZeroingStep| {
            progress.zeroed += bytes;
            let mut state = self.lock();
            let (end, needed) = (state.ring.end(), state.ring.has_none_free());
            let late = progress.is_late(end) || state.ring.outruns_files();
            let pressing = state.is_pressing() || needed || late;
            let disturbing = log_activity.is_active(end);
            let waited = state.ring.make_progress(progress.allowed_end());
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
        let made = self
            .medium
            .create_segment(slot, self.segment_size, &mut give_way);
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

#[cfg(test)]
#[cfg(not(feature = "shuttle"))]
mod tests {
    use super::*;

    /// A file is late before its writers have to wait, whatever part of it is made.
    #[test]
    fn a_file_is_late_before_writers_wait_for_it() {
        const SIZE: u64 = 64 << 20;
        for zeroed in (0..=SIZE).step_by(SIZE as usize / 8) {
            let progress = FileProgress {
                size: SIZE,
                zeroed,
                began: 5 << 20,
                ready: 3 * SIZE,
            };
            let allowed = progress.allowed_end().unwrap();
            assert!(!progress.is_late(progress.began), "a quiet log");
            assert!(!progress.is_late(progress.began + 3 * zeroed / 2));
            assert!(progress.is_late(allowed - (32 << 20)), "{zeroed}");
        }
    }
}
