//! Serves the receive queue: frames of the link go into the driver's buffers (virtio 1.2, 5.1.6.4).

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_memory::GuestMemory;

use super::link::{FrameReceiver, Received};
use super::{HEADER_LEN, Served};
use crate::event_loop::EventSet;
use crate::latency::add;
use crate::memory::DeviceMemory;
use crate::reactor::{FIRST_OWN_EVENT, Next, Source, Turn};
use crate::throttle::Throttle;
use crate::virtio::{QueueError, UsedElement, split_chain, write_to_driver};

/// The driver has rung the queue's doorbell: it has added buffers.
const DOORBELL: usize = FIRST_OWN_EVENT;
/// The link has something to read.
const READABLE: usize = FIRST_OWN_EVENT + 1;

/// Offset of `num_buffers` in the header.
const NUM_BUFFERS: usize = 10;

pub(super) struct ReceiveWorker<M> {
    queue: Served<M>,
    receiver: Arc<Mutex<FrameReceiver>>,
    /// Whether the link may have something to read.
    readable: bool,
    /// Whether the ring had no buffer for a frame.
    ring_emptied: bool,
    /// The number of chains taken so far, if the ring then reported another available chain.
    seen_available: Option<u16>,
    /// Chains to publish next.
    batch: Vec<UsedElement>,
    /// A header and a frame.
    scratch: Vec<u8>,
}

impl<M: DeviceMemory> ReceiveWorker<M> {
    pub(super) fn new(queue: Served<M>, receiver: Arc<Mutex<FrameReceiver>>) -> Self {
        let mut scratch = vec![0; HEADER_LEN];
        // Flags and gso_type are 0: no offload was negotiated. Without MRG_RXBUF a frame has one buffer (5.1.6.4.1).
        scratch[NUM_BUFFERS..].copy_from_slice(&1_u16.to_le_bytes());
        Self {
            queue,
            receiver,
            readable: true,
            ring_emptied: false,
            seen_available: None,
            batch: Vec::new(),
            scratch,
        }
    }

    fn take_frames<G: GuestMemory>(
        &mut self,
        memory: &G,
        turn: &mut Turn<'_>,
    ) -> Result<(), QueueError> {
        self.ring_emptied = false;
        self.queue.ring.disable_doorbell(memory)?;
        let shared = &self.queue.shared;
        let receiver = Arc::clone(&self.receiver);
        let mut receiver = lock(&receiver);
        let mut available = self.queue.ring.available(memory)?;
        while self.readable && shared.is_up() && !turn.is_over() {
            let frame = match receiver.peek() {
                Ok(Received::Frame(frame)) => frame,
                Ok(Received::TooLong) => {
                    receiver.consume();
                    turn.charge_request(0);
                    add(&shared.metrics.receive_drops, 1);
                    continue;
                }
                Ok(Received::Nothing) => {
                    self.readable = false;
                    break;
                }
                Err(end) => {
                    self.readable = false;
                    shared.take_down(&end, &self.queue.status);
                    break;
                }
            };
            let Some(chain) = available.next() else {
                self.ring_emptied = true;
                break;
            };
            let head = chain.head();
            let (_, writable) = split_chain(chain, self.queue.max_descriptors)
                .map_err(|reason| QueueError::Chain { head, reason })?;
            let room: u64 = writable.iter().map(|range| u64::from(range.len)).sum();
            self.scratch.truncate(HEADER_LEN);
            self.scratch.extend_from_slice(frame);
            let fits = room >= self.scratch.len() as u64;
            let written = if fits {
                write_to_driver(memory, &writable, &self.scratch).unwrap_or(0)
            } else {
                0
            };
            let bytes = frame.len();
            receiver.consume();
            turn.charge_request(bytes);
            if written == 0 {
                add(&shared.metrics.receive_drops, 1);
            } else {
                add(&shared.metrics.frames_received, 1);
                add(&shared.metrics.bytes_received, bytes as u64);
            }
            self.batch.push(UsedElement { head, written });
        }
        // Without this check the worker would retry an unreadable ring forever.
        let taken = self.queue.ring.chains_taken();
        match self.seen_available.take() {
            Some(before) if self.ring_emptied && taken == before => Err(QueueError::Unreadable),
            _ => Ok(()),
        }
    }

    /// Publishes what was received; `true`: there is more to take.
    fn publish<G: GuestMemory>(&mut self, memory: &G, turn: &Turn<'_>) -> Result<bool, QueueError> {
        let wanted = self.queue.ring.publish(memory, &self.batch)?;
        if wanted && !turn.is_stopping() {
            self.queue.driver.interrupt();
        }
        self.batch.clear();
        if !self.ring_emptied {
            return Ok(self.readable && self.queue.shared.is_up());
        }
        let available = self.queue.ring.enable_doorbell(memory)?;
        self.seen_available = available.then(|| self.queue.ring.chains_taken());
        Ok(available)
    }

    fn fail(&mut self, error: &dyn std::fmt::Display) {
        self.queue.driver.fail(error);
        self.batch.clear();
    }
}

impl<M: DeviceMemory> Source for ReceiveWorker<M> {
    fn throttle(&self) -> &Arc<Throttle> {
        &self.queue.shared.throttle
    }

    fn is_disk(&self) -> bool {
        false
    }

    fn begin(&mut self, turn: &mut Turn<'_>) -> io::Result<()> {
        self.queue.driver.watch(turn, DOORBELL)?;
        // Edge-triggered: while the driver has no buffer, the link stays unread and must not keep the thread awake.
        let edges = EventSet::IN | EventSet::EDGE_TRIGGERED;
        turn.watch(lock(&self.receiver).descriptor(), READABLE, edges)
    }

    fn ready(&mut self, event: usize, _: EventSet, _: bool) {
        if event == DOORBELL {
            let rung = self.queue.driver.take_rings();
            add(&self.queue.shared.metrics.doorbells, rung);
        } else {
            self.readable = true;
        }
    }

    fn take(&mut self, turn: &mut Turn<'_>) {
        if self.queue.driver.is_broken() || turn.is_stopping() {
            return;
        }
        let memory = self.queue.memory.clone();
        if let Err(error) = self.take_frames(&*memory.memory(), turn) {
            self.fail(&error);
        }
    }

    fn kick(&mut self, _: bool) {}

    fn answer(&mut self, turn: &mut Turn<'_>) -> Next {
        let memory = self.queue.memory.clone();
        let more = if self.queue.driver.is_broken() {
            false
        } else {
            self.publish(&*memory.memory(), turn)
                .unwrap_or_else(|error| {
                    self.fail(&error);
                    false
                })
        };
        if turn.is_stopping() {
            Next::End
        } else if more {
            Next::Take
        } else {
            Next::Wait
        }
    }

    fn has_in_flight(&self) -> bool {
        false
    }

    fn bytes_in_flight(&self) -> usize {
        0
    }

    fn give_up(&mut self, reason: &str) {
        self.fail(&reason);
    }
}

/// A worker that panicked has left a frame at most, so the next one goes on.
fn lock(receiver: &Mutex<FrameReceiver>) -> MutexGuard<'_, FrameReceiver> {
    receiver.lock().unwrap_or_else(PoisonError::into_inner)
}
