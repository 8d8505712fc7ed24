//! The requests of a queue that the backend is working on, by token.

use std::time::Instant;

use slab::Slab;

use super::request::PendingChain;
use crate::backend::MemoryCharge;
use crate::latency::OperationKind;

/// Cap on the payload bytes that a queue has in flight; above it, chains stay in the ring. One request may exceed it.
pub(super) const MAX_BYTES_IN_FLIGHT: usize = 32 << 20;

/// A request that was handed to the backend.
pub(super) struct InFlightRequest {
    pub(super) pending: PendingChain,
    pub(super) kind: OperationKind,
    /// Whether the answer has to wait until the change is written.
    pub(super) await_written: bool,
    /// When the request's batch was taken.
    pub(super) since: Instant,
    /// The memory that it may take.
    pub(super) charge: MemoryCharge,
}

/// Requests handed to the backend, by token.
pub(super) struct RequestTable {
    requests: Slab<InFlightRequest>,
    max_requests: usize,
    bytes: usize,
}

impl RequestTable {
    pub(super) fn new(max_requests: u16) -> Self {
        Self {
            requests: Slab::new(),
            max_requests: max_requests.into(),
            bytes: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    /// Payload bytes of all requests.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(super) fn has_room(&self) -> bool {
        self.len() < self.max_requests && self.bytes < MAX_BYTES_IN_FLIGHT
    }

    /// Adds a request, and returns its token.
    pub(super) fn insert(&mut self, request: InFlightRequest) -> u64 {
        self.bytes += request.pending.bytes as usize;
        self.requests.insert(request) as u64
    }

    /// Whether the request needs a flush before it is answered; returns `true` only once.
    pub(super) fn take_flush_after(&mut self, token: u64) -> bool {
        let request = self.requests.get_mut(token as usize);
        request.is_some_and(|request| std::mem::take(&mut request.pending.flush_after))
    }

    /// Whether the caller still has to call `notify_written` for the request; returns `true` only once.
    pub(super) fn take_await_written(&mut self, token: u64) -> bool {
        let request = self.requests.get_mut(token as usize);
        request.is_some_and(|request| std::mem::take(&mut request.await_written))
    }

    pub(super) fn remove(&mut self, token: u64) -> Option<InFlightRequest> {
        let request = self.requests.try_remove(token as usize)?;
        self.bytes -= request.pending.bytes as usize;
        Some(request)
    }
}

impl Drop for RequestTable {
    fn drop(&mut self) {
        for request in self.requests.drain() {
            request.pending.abandon();
        }
    }
}
