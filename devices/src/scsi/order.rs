//! Which commands wait for which: a command that reads blocks and then relies on them has these
//! blocks to itself.
//!
//! COMPARE AND WRITE is atomic (SBC-4, 5.3): no other command may change its blocks between its
//! read and its write. So a command that changes blocks is listed from its check until its end. A
//! command with exclusive access waits for every overlapping command listed before it, and later
//! overlapping commands wait for it. No command waits for a later one, so there is no deadlock. On
//! a disk with WRITE ATOMIC reads are listed too: they see all of such a write or nothing (SBC-4,
//! 4.29).

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::control::GateWatcher;

/// The commands of a unit that change blocks, or read them on a disk with WRITE ATOMIC.
#[derive(Default)]
pub(super) struct CommandOrder {
    list: Mutex<CommandList>,
}

#[derive(Default)]
struct CommandList {
    /// In order of arrival.
    commands: Vec<ListedCommand>,
    next: u64,
    /// Number of commands with exclusive access.
    exclusive: usize,
    /// Whether a command was told to wait since the watchers were last woken.
    waited: bool,
    /// Workers to wake when a command ends and others wait.
    watchers: Vec<Weak<dyn GateWatcher>>,
}

struct ListedCommand {
    number: u64,
    /// The first block; `end` is the block after the last.
    start: u64,
    end: u64,
    exclusive: bool,
}

impl CommandOrder {
    fn lock(&self) -> MutexGuard<'_, CommandList> {
        // A panic leaves no partial change in the list.
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes `watcher` whenever a command ends while others wait.
    pub(super) fn watch(&self, watcher: Weak<dyn GateWatcher>) {
        let watchers = &mut self.lock().watchers;
        watchers.retain(|watcher| watcher.strong_count() > 0);
        watchers.push(watcher);
    }

    /// Lists a command that changes blocks from `start` to `end`.
    pub(super) fn enter(self: &Arc<Self>, start: u64, end: u64, exclusive: bool) -> OrderTicket {
        let mut list = self.lock();
        let number = list.next;
        list.next += 1;
        list.exclusive += usize::from(exclusive);
        list.commands.push(ListedCommand {
            number,
            start,
            end,
            exclusive,
        });
        OrderTicket {
            order: Arc::clone(self),
            number,
        }
    }
}

/// A command's place in the list, until this is dropped.
pub(super) struct OrderTicket {
    order: Arc<CommandOrder>,
    number: u64,
}

impl OrderTicket {
    /// Whether the command may begin.
    pub(super) fn may_begin(&self) -> bool {
        let mut list = self.order.lock();
        if list.exclusive == 0 {
            return true;
        }
        let Ok(at) = list.find(self.number) else {
            return true;
        };
        let own = &list.commands[at];
        let waits = list.commands[..at].iter().any(|entry| {
            (entry.exclusive || own.exclusive) && entry.start < own.end && own.start < entry.end
        });
        list.waited |= waits;
        !waits
    }
}

impl CommandList {
    fn find(&self, number: u64) -> Result<usize, usize> {
        self.commands
            .binary_search_by_key(&number, |entry| entry.number)
    }
}

impl Drop for OrderTicket {
    fn drop(&mut self) {
        let mut list = self.order.lock();
        if let Ok(at) = list.find(self.number) {
            let entry = list.commands.remove(at);
            list.exclusive -= usize::from(entry.exclusive);
        }
        if std::mem::take(&mut list.waited) {
            let watchers = list.watchers.iter().filter_map(Weak::upgrade);
            let watchers: Vec<_> = watchers.collect();
            drop(list);
            watchers.iter().for_each(|watcher| watcher.wake());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exclusive_access_waits_for_earlier_commands_and_blocks_later_ones() {
        let order = Arc::<CommandOrder>::default();
        let early = order.enter(0, 8, false);
        let alone = order.enter(7, 9, true);
        let (beside, behind) = (order.enter(9, 20, false), order.enter(8, 10, false));
        let second = order.enter(0, 20, true);
        assert!(early.may_begin() && beside.may_begin());
        assert!(!alone.may_begin() && !behind.may_begin() && !second.may_begin());
        drop(early);
        assert!(alone.may_begin() && !behind.may_begin());
        drop(alone);
        assert!(behind.may_begin() && !second.may_begin());
        drop((beside, behind));
        assert!(second.may_begin());
        drop(second);
        assert!(order.lock().commands.is_empty() && order.lock().exclusive == 0);
    }
}
