//! Which commands wait for which: a command that reads blocks and then relies on them has these blocks to itself.
//!
//! A COMPARE AND WRITE is one action for all other commands (SBC-4, 5.3): no change to its blocks may come between its
//! read and its write. So a command that changes blocks is listed from its check until it is over. A command that
//! needs its blocks alone waits for every overlapping command listed before it, and later overlapping commands wait
//! for it. No command waits for a later one, so there is no deadlock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The changing commands of a unit.
#[derive(Default)]
pub(super) struct Order {
    list: Mutex<List>,
}

#[derive(Default)]
struct List {
    /// In order of arrival.
    entries: Vec<Entry>,
    next: u64,
    /// Number of entries that need their blocks alone.
    alone: usize,
}

struct Entry {
    number: u64,
    /// First block; `end` is the block after the last.
    start: u64,
    end: u64,
    alone: bool,
}

impl Order {
    fn lock(&self) -> MutexGuard<'_, List> {
        // A panic leaves no partial change in the list.
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lists a command that changes blocks from `start` to `end`.
    pub(super) fn enter(self: &Arc<Self>, start: u64, end: u64, alone: bool) -> OrderTicket {
        let mut list = self.lock();
        let number = list.next;
        list.next += 1;
        list.alone += usize::from(alone);
        list.entries.push(Entry {
            number,
            start,
            end,
            alone,
        });
        OrderTicket {
            order: Arc::clone(self),
            number,
        }
    }
}

/// A place in the list; it is dropped when the command is over.
pub(super) struct OrderTicket {
    order: Arc<Order>,
    number: u64,
}

impl OrderTicket {
    /// Whether the command may begin.
    pub(super) fn admitted(&self) -> bool {
        let list = self.order.lock();
        if list.alone == 0 {
            return true;
        }
        let Ok(at) = list.find(self.number) else {
            return true;
        };
        let own = &list.entries[at];
        !list.entries[..at].iter().any(|entry| {
            (entry.alone || own.alone) && entry.start < own.end && own.start < entry.end
        })
    }
}

impl List {
    fn find(&self, number: u64) -> Result<usize, usize> {
        self.entries
            .binary_search_by_key(&number, |entry| entry.number)
    }
}

impl Drop for OrderTicket {
    fn drop(&mut self) {
        let mut list = self.order.lock();
        if let Ok(at) = list.find(self.number) {
            let entry = list.entries.remove(at);
            list.alone -= usize::from(entry.alone);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_stands_alone_waits_for_those_before_and_holds_up_those_behind() {
        let order = Arc::<Order>::default();
        let early = order.enter(0, 8, false);
        let alone = order.enter(7, 9, true);
        let (beside, behind) = (order.enter(9, 20, false), order.enter(8, 10, false));
        let second = order.enter(0, 20, true);
        assert!(early.admitted() && beside.admitted());
        assert!(!alone.admitted() && !behind.admitted() && !second.admitted());
        drop(early);
        assert!(alone.admitted() && !behind.admitted());
        drop(alone);
        assert!(behind.admitted() && !second.admitted());
        drop((beside, behind));
        assert!(second.admitted());
        drop(second);
        assert!(order.lock().entries.is_empty() && order.lock().alone == 0);
    }
}
