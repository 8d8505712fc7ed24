//! What the keeper reports about failed attempts: each trouble once.

use crate::Condition;
use crate::error::{ErrorKind, Result};
use crate::log::state::Log;

/// What has been reported about failed attempts. Each trouble is reported once.
#[derive(Default)]
pub(super) struct Troubles {
    failing: bool,
    stuck: bool,
}

impl Troubles {
    /// Returns the message to log after an attempt, if any. `partly`: the attempt did not cover
    /// everything that failed before.
    pub(super) fn report(&mut self, log: &Log, done: &Result<()>, partly: bool) -> Option<String> {
        let Err(error) = done else {
            if !partly && std::mem::take(self).failing {
                log.lock().keeper.trouble = Condition::Ok;
                tracing::warn!(
                    "{}: the log can be copied to the base images again",
                    log.dir.display()
                );
            }
            return None;
        };
        let mut state = log.lock();
        state.keeper.note(error);
        let stuck = state.is_stuck();
        let waiting = state.keeper.pauses && error.is_no_space() && state.ring.is_starved();
        drop(state);
        let damaged = error.kind() == ErrorKind::Damaged;
        if stuck && !std::mem::replace(&mut self.stuck, true) {
            self.failing = true;
            let lost = if damaged { "else " } else { "" };
            return Some(format!(
                "{error}; the log in {} is full: writes and flushes fail until that works again \
                 (retried every second); nothing {lost}acknowledged is lost",
                log.dir.display()
            ));
        }
        if waiting && !std::mem::replace(&mut self.stuck, true) {
            self.failing = true;
            return Some(format!(
                "{error}; the log in {} is full: writes and flushes wait until there is space \
                 (on-full=pause; retried every second)",
                log.dir.display()
            ));
        }
        let new = !std::mem::replace(&mut self.failing, true);
        let remedy = if damaged { "" } else { "make space, " };
        new.then(|| {
            format!(
                "{error}; the log in {} keeps everything and takes writes while it has room; \
                 {remedy}it retries every second",
                log.dir.display()
            )
        })
    }
}
