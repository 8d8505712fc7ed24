//! Long work split into parts for several threads, with results as if one thread did them in order.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
// Not `crate::sync`: a running store's threads do not use this module, and a simulated medium is
// read on one thread.
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Parts per thread that may be started ahead of the results taken.
const AHEAD: usize = 2;

/// The given number of threads, or the number of processors.
pub(crate) fn thread_count(threads: Option<NonZeroUsize>) -> usize {
    let threads = threads.map_or_else(thread::available_parallelism, Ok);
    threads.map_or(1, usize::from)
}

/// Runs `work` on each of `parts` with up to `threads` threads, and hands the results to `take`, in
/// order and in the calling thread, so that `take` sees the same whatever the number of threads.
/// When `take` returns `Ok(false)` or an error, all work ends. Some later parts may then have been
/// started for nothing; with one thread, none.
///
/// # Errors
/// Those of `take`.
///
/// # Panics
/// If `work` does.
pub(crate) fn in_order<T: Send, R: Send, E>(
    threads: usize,
    mut parts: impl Iterator<Item = T> + Send,
    work: impl Fn(T) -> R + Sync,
    mut take: impl FnMut(R) -> Result<bool, E>,
) -> Result<(), E> {
    if threads <= 1 {
        for part in parts {
            if !take(work(part))? {
                break;
            }
        }
        return Ok(());
    }
    let shared = SharedWork {
        state: Mutex::new(WorkState {
            parts: &mut parts,
            begun: 0,
            taken: 0,
            done: BTreeMap::new(),
            ended: false,
        }),
        changed: Condvar::new(),
        most: threads * AHEAD,
    };
    thread::scope(|scope| {
        let _ending = StopGuard(&shared);
        let help = |_: &usize| {
            let worker = thread::Builder::new().name("walvisor-part".to_owned());
            worker
                .spawn_scoped(scope, || shared.help(&work))
                .inspect_err(|error| tracing::warn!("can't start another thread: {error}"))
                .is_ok()
        };
        let alone = (0..threads).take_while(help).count() == 0;
        while let Some(result) = shared.next(alone.then_some(&work)) {
            if !take(result)? {
                break;
            }
        }
        Ok(())
    })
}

/// The data that the threads share.
struct SharedWork<'a, T, R> {
    state: Mutex<WorkState<'a, T, R>>,
    changed: Condvar,
    /// Most parts that may be started but not taken.
    most: usize,
}

struct WorkState<'a, T, R> {
    parts: &'a mut (dyn Iterator<Item = T> + Send),
    begun: usize,
    taken: usize,
    /// Results not taken yet, by part number.
    done: BTreeMap<usize, R>,
    /// No more parts are started.
    ended: bool,
}

impl<'a, T, R> SharedWork<'a, T, R> {
    fn lock(&self) -> MutexGuard<'_, WorkState<'a, T, R>> {
        // A thread that panics here ends the others, and the scope propagates its panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the next part.
    fn begin(&self, state: &mut WorkState<'a, T, R>) -> Option<(usize, T)> {
        let part = state.parts.next();
        match part {
            Some(part) => {
                state.begun += 1;
                Some((state.begun - 1, part))
            }
            None => {
                state.ended = true;
                self.changed.notify_all();
                None
            }
        }
    }

    /// The loop of a helping thread.
    fn help(&self, work: impl Fn(T) -> R) {
        // A panic leaves a part without a result, for which `next` would wait for ever; so end all
        // work.
        let ending = StopGuard(self);
        loop {
            let busy = |state: &mut WorkState<'a, T, R>| {
                !state.ended && state.begun >= state.taken + self.most
            };
            let waited = self.changed.wait_while(self.lock(), busy);
            let mut state = waited.unwrap_or_else(PoisonError::into_inner);
            if state.ended {
                break;
            }
            let Some((number, part)) = self.begin(&mut state) else {
                break;
            };
            drop(state);
            let result = work(part);
            self.lock().done.insert(number, result);
            self.changed.notify_all();
        }
        std::mem::forget(ending);
    }

    /// The next part's result, in order; `None` after the last. `alone`: the work to do here, if
    /// there are no helping threads.
    fn next(&self, alone: Option<impl Fn(T) -> R>) -> Option<R> {
        let mut state = self.lock();
        loop {
            let next = state.taken;
            if let Some(result) = state.done.remove(&next) {
                state.taken += 1;
                self.changed.notify_all();
                return Some(result);
            }
            // Check for a panic before any wait: it may have happened while this thread was not
            // waiting.
            assert!(state.begun != usize::MAX, "a thread that helped panicked");
            if state.ended && state.begun == state.taken {
                return None;
            }
            if let Some(work) = &alone {
                let (number, part) = self.begin(&mut state)?;
                state.done.insert(number, work(part));
                continue;
            }
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Ends the work of all threads when it is dropped.
struct StopGuard<'a, 'b, T, R>(&'b SharedWork<'a, T, R>);

impl<T, R> Drop for StopGuard<'_, '_, T, R> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.ended = true;
        if thread::panicking() {
            // The part that panicked has no result: `next` panics when it sees this number.
            state.begun = usize::MAX;
        }
        self.0.changed.notify_all();
    }
}

/// A progress callback: bytes done so far, and in total. In a transfer, bytes of the disk, holes
/// included; in a recovery, bytes of the log's segments.
pub type Progress<'a> = &'a mut dyn FnMut(u64, u64);

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn the_order_is_that_of_the_parts_however_long_each_takes() {
        for threads in [1, 2, 3, 8, 100] {
            let (open, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
            let mut taken = Vec::new();
            let work = |part: usize| {
                let now = open.fetch_add(1, Ordering::Relaxed) + 1;
                most.fetch_max(now, Ordering::Relaxed);
                // The first part lasts until another thread has started one, however late.
                let began = Instant::now();
                while threads > 1
                    && part == 0
                    && most.load(Ordering::Relaxed) == 1
                    && began.elapsed() < Duration::from_secs(20)
                {
                    thread::sleep(Duration::from_millis(1));
                }
                thread::sleep(Duration::from_micros(part as u64 * 7919 % 300));
                open.fetch_sub(1, Ordering::Relaxed);
                part * 2
            };
            let ended: Result<(), ()> = in_order(threads, 0..200, work, |result| {
                taken.push(result);
                Ok(true)
            });
            assert!(ended.is_ok() && taken.into_iter().eq((0..200).map(|part| part * 2)));
            let most = most.into_inner();
            assert!(most <= threads && (threads == 1) == (most == 1), "{most}");
        }
    }

    #[test]
    fn the_first_error_in_order_ends_all_and_few_parts_are_started_for_nothing() {
        for threads in [1, 2, 8] {
            let begun = AtomicUsize::new(0);
            let work = |part: usize| {
                begun.fetch_add(1, Ordering::Relaxed);
                // A later part fails sooner.
                thread::sleep(Duration::from_millis(u64::from(part == 20) * 20));
                if part >= 20 { Err(part) } else { Ok(part) }
            };
            let mut taken = 0;
            let ended = in_order(threads, 0.., work, |result| {
                result.map(|part| {
                    taken = part;
                    true
                })
            });
            assert_eq!((ended, taken), (Err(20), 19));
            let begun = begun.into_inner();
            assert!(begun <= 20 + threads * (AHEAD + 1), "{threads}: {begun}");
            // The same without an error.
            let mut sum = 0;
            let ended: Result<(), ()> = in_order(
                threads,
                0..,
                |part: usize| part,
                |part| {
                    sum += part;
                    Ok(part < 50)
                },
            );
            assert!(ended.is_ok() && sum == 50 * 51 / 2);
        }
    }

    #[test]
    fn a_panic_in_one_thread_ends_all() {
        for threads in [1, 4] {
            let ran = std::panic::catch_unwind(|| {
                let work = |part: usize| assert!(part != 5, "planted");
                in_order::<_, _, ()>(threads, 0.., work, |()| Ok(true))
            });
            assert!(ran.is_err());
        }
    }
}
