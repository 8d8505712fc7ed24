//! Long work cut into parts that several threads do, as if one did them in order.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
// Not `crate::sync`: no thread of a running store is in here.
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

/// Parts that each thread may be ahead of what has been taken.
const AHEAD: usize = 2;

/// So many threads, or as many as there are processors.
pub(crate) fn thread_count(threads: Option<NonZeroUsize>) -> usize {
    let threads = threads.map_or_else(thread::available_parallelism, Ok);
    threads.map_or(1, usize::from)
}

/// Does `work` for each of `parts` on up to so many threads, and hands what comes of it to `take` in the order of the
/// parts, in the calling thread: whatever the number of threads, `take` sees the same. It ends all with `Ok(false)`, or
/// with an error; some parts behind that may have been begun for nothing, but with one thread none is.
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
    let shared = Shared {
        state: Mutex::new(State {
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
        let _ending = Ending(&shared);
        let help = |_: &usize| {
            let worker = thread::Builder::new().name("walvisor-part".to_owned());
            worker
                .spawn_scoped(scope, || shared.help(&work))
                .inspect_err(|error| tracing::warn!("no more threads can be had: {error}"))
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

/// What the threads share.
struct Shared<'a, T, R> {
    state: Mutex<State<'a, T, R>>,
    changed: Condvar,
    /// Parts begun and not taken.
    most: usize,
}

struct State<'a, T, R> {
    parts: &'a mut (dyn Iterator<Item = T> + Send),
    begun: usize,
    taken: usize,
    /// What came of parts that are not taken yet.
    done: BTreeMap<usize, R>,
    /// No part is begun any more.
    ended: bool,
}

impl<'a, T, R> Shared<'a, T, R> {
    fn lock(&self) -> MutexGuard<'_, State<'a, T, R>> {
        // A thread that panicked in here ends the others; its panic is handed on by the scope.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins the next part.
    fn begin(&self, state: &mut State<'a, T, R>) -> Option<(usize, T)> {
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

    /// A thread's share.
    fn help(&self, work: impl Fn(T) -> R) {
        // A panic leaves a gap that nobody could pass: so all end.
        let ending = Ending(self);
        loop {
            let busy = |state: &mut State<'a, T, R>| {
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

    /// What came of the next part, in order; `alone`: nobody else does it. `None` after the last.
    fn next(&self, alone: Option<impl Fn(T) -> R>) -> Option<R> {
        let mut state = self.lock();
        loop {
            let next = state.taken;
            if let Some(result) = state.done.remove(&next) {
                state.taken += 1;
                self.changed.notify_all();
                return Some(result);
            }
            // Looked at before any wait: it may have been while nobody waited.
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

/// Ends the work of all when it is dropped.
struct Ending<'a, 'b, T, R>(&'b Shared<'a, T, R>);

impl<T, R> Drop for Ending<'_, '_, T, R> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.ended = true;
        if thread::panicking() {
            // Nothing is in order any more: see `next`.
            state.begun = usize::MAX;
        }
        self.0.changed.notify_all();
    }
}

/// Is told, as long work goes on, how many bytes are behind it, and how many there are: of the disk in a transfer (holes
/// included), of the log's segments in a recovery.
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
                // The first stays until another thread has come, however late that is.
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
    fn the_first_error_in_order_ends_all_and_few_parts_are_begun_for_nothing() {
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
    fn a_panic_of_one_ends_all() {
        for threads in [1, 4] {
            let ran = std::panic::catch_unwind(|| {
                let work = |part: usize| assert!(part != 5, "planted");
                in_order::<_, _, ()>(threads, 0.., work, |()| Ok(true))
            });
            assert!(ran.is_err());
        }
    }
}
