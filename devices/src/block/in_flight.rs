//! The requests of a queue that its disk has, by token.

use std::time::Instant;

use slab::Slab;

use super::request::PendingChain;
use crate::latency::OperationKind;

/// Payload bytes that one queue may have in flight before it leaves further chains in the ring. One
/// request may overshoot it.
pub(super) const MAX_BYTES_IN_FLIGHT: usize = 32 << 20;

/// A request that was handed to the backend.
pub(super) struct Flying {
    pub(super) pending: PendingChain,
    pub(super) kind: OperationKind,
    pub(super) unasked: bool,
    /// When the batch that the request belongs to was taken.
    pub(super) since: Instant,
}

/// Requests handed to the backend, by token.
pub(super) struct InFlight {
    requests: Slab<Flying>,
    /// The most requests.
    most: usize,
    bytes: usize,
}

impl InFlight {
    pub(super) fn new(most: u16) -> Self {
        Self {
            requests: Slab::new(),
            most: most.into(),
            bytes: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    pub(super) fn has_room(&self) -> bool {
        self.len() < self.most && self.bytes < MAX_BYTES_IN_FLIGHT
    }

    /// Adds a request, and returns its token.
    pub(super) fn insert(&mut self, flying: Flying) -> u64 {
        self.bytes += flying.pending.bytes as usize;
        self.requests.insert(flying) as u64
    }

    /// Whether the request still needs a flush before it is answered; returns `true` once.
    pub(super) fn take_flush_after(&mut self, token: u64) -> bool {
        let flying = self.requests.get_mut(token as usize);
        flying.is_some_and(|flying| std::mem::take(&mut flying.pending.flush_after))
    }

    /// Whether the request has changed the disk and `notify_written` was not yet called for it; returns `true` once.
    pub(super) fn take_unasked(&mut self, token: u64) -> bool {
        let flying = self.requests.get_mut(token as usize);
        flying.is_some_and(|flying| std::mem::take(&mut flying.unasked))
    }

    pub(super) fn remove(&mut self, token: u64) -> Option<Flying> {
        let flying = self.requests.try_remove(token as usize)?;
        self.bytes -= flying.pending.bytes as usize;
        Some(flying)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        for flying in self.requests.drain() {
            flying.pending.abandon();
        }
    }
}
