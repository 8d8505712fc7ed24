//! The requests of a queue that the backend is working on, by token.

use std::time::Instant;

use slab::Slab;
use vm_memory::GuestMemory;

use super::request::PendingChain;
use crate::backend::{MemoryCharge, Operation, SECTOR_SIZE};
use crate::latency::OperationKind;
use crate::reactor::LEAST_IN_FLIGHT;

/// Cap on the payload bytes that a queue has in flight; above it, chains stay in the ring. One
/// request may exceed it.
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
    /// Bytes of the payload that move now: a part of a long read, else all.
    pub(super) moving: u32,
    /// Of a long read, the sectors that follow. None may be read before the driver has those before
    /// them.
    pub(super) rest: Sectors,
}

/// Sectors of a read, at most as many as a request may have.
#[derive(Clone, Copy, Default)]
pub(super) struct Sectors {
    pub(super) first: u64,
    pub(super) sectors: u32,
}

impl Sectors {
    /// Takes those at the front, of `most` bytes at most. `most` has a sector at least.
    pub(super) fn take(&mut self, most: usize) -> Self {
        let most = u32::try_from(most / SECTOR_SIZE as usize).unwrap_or(u32::MAX);
        let taken = Self {
            first: self.first,
            sectors: self.sectors.min(most),
        };
        self.first += u64::from(taken.sectors);
        self.sectors -= taken.sectors;
        taken
    }

    pub(super) fn bytes(self) -> u32 {
        self.sectors * SECTOR_SIZE as u32
    }

    pub(super) fn read(self) -> Operation {
        Operation::Read {
            sector: self.first,
            sectors: self.sectors,
        }
    }
}

impl InFlightRequest {
    /// What it counts for, of the bytes in flight.
    fn weight(&self) -> usize {
        match self.moving {
            0 => 0,
            bytes => (bytes as usize).max(LEAST_IN_FLIGHT),
        }
    }
}

/// Requests handed to the backend, by token.
pub(super) struct RequestTable {
    requests: Slab<InFlightRequest>,
    max_requests: usize,
    bytes: usize,
    moving: usize,
}

impl RequestTable {
    pub(super) fn new(max_requests: u16) -> Self {
        Self {
            requests: Slab::new(),
            max_requests: max_requests.into(),
            bytes: 0,
            moving: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.requests.len()
    }

    /// Payload bytes that move now, see
    /// [`Source::bytes_in_flight`](crate::reactor::Source::bytes_in_flight).
    pub(super) fn moving(&self) -> usize {
        self.moving
    }

    pub(super) fn has_room(&self) -> bool {
        self.len() < self.max_requests && self.bytes < MAX_BYTES_IN_FLIGHT
    }

    /// Adds a request, and returns its token.
    pub(super) fn insert(&mut self, request: InFlightRequest) -> u64 {
        self.bytes += request.pending.bytes as usize;
        self.moving += request.weight();
        self.requests.insert(request) as u64
    }

    /// Whether the request needs a flush before it is answered; returns `true` only once.
    pub(super) fn take_flush_after(&mut self, token: u64) -> bool {
        let request = self.requests.get_mut(token as usize);
        request.is_some_and(|request| std::mem::take(&mut request.pending.flush_after))
    }

    /// Whether the caller still has to call `notify_written` for the request; returns `true` only
    /// once.
    pub(super) fn take_await_written(&mut self, token: u64) -> bool {
        let request = self.requests.get_mut(token as usize);
        request.is_some_and(|request| std::mem::take(&mut request.await_written))
    }

    /// Of a long read, whose part in flight has read `data`: writes it to the driver, and returns
    /// the next part, of `most` bytes at most. `None`: it was the last, or it has failed.
    pub(super) fn next_part<G: GuestMemory>(
        &mut self,
        memory: &G,
        token: u64,
        data: &[u8],
        most: usize,
    ) -> Option<Operation> {
        let request = self.requests.get_mut(token as usize)?;
        let failed = data.len() != request.moving as usize;
        if request.rest.sectors == 0 || failed || request.pending.write(memory, data).is_err() {
            return None;
        }
        self.moving -= request.weight();
        let part = request.rest.take(most);
        request.moving = part.bytes();
        self.moving += request.weight();
        Some(part.read())
    }

    pub(super) fn remove(&mut self, token: u64) -> Option<InFlightRequest> {
        let request = self.requests.try_remove(token as usize)?;
        self.bytes -= request.pending.bytes as usize;
        self.moving -= request.weight();
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
