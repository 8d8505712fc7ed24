//! The receive queue's traffic: frames of the link go into the driver's buffers (virtio 1.2,
//! 5.1.6.4).

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_memory::GuestMemory;

use super::link::{FrameReceiver, ReceiveOutcome};
use super::worker::{NetQueue, Traffic};
use super::{HEADER_LEN, SharedState};
use crate::event_loop::EventSet;
use crate::latency::add;
use crate::reactor::Turn;
use crate::virtio::{QueueError, UsedElement, split_chain, write_to_driver};

/// Offset of `num_buffers` in the header.
const NUM_BUFFERS: usize = 10;

pub(super) struct InboundTraffic {
    receiver: Arc<Mutex<FrameReceiver>>,
    /// Whether the link may have something to read.
    readable: bool,
    /// A header and a frame.
    scratch: Vec<u8>,
}

impl InboundTraffic {
    pub(super) fn new(receiver: Arc<Mutex<FrameReceiver>>) -> Self {
        let mut scratch = vec![0; HEADER_LEN];
        // Flags and gso_type are 0: no offload was negotiated. Without MRG_RXBUF a frame has one
        // buffer (5.1.6.4.1).
        scratch[NUM_BUFFERS..].copy_from_slice(&1_u16.to_le_bytes());
        Self {
            receiver,
            readable: true,
            scratch,
        }
    }
}

impl Traffic for InboundTraffic {
    fn watch(&self, turn: &mut Turn<'_>, event: usize) -> io::Result<()> {
        // Edge-triggered: while the driver has no buffer, the link stays unread and must not keep
        // the thread awake.
        let edges = EventSet::IN | EventSet::EDGE_TRIGGERED;
        turn.watch(lock(&self.receiver).descriptor(), event, edges)
    }

    fn wake(&mut self) {
        self.readable = true;
    }

    fn takes_chains(&self) -> bool {
        true
    }

    fn can_move(&self, shared: &SharedState) -> bool {
        self.readable && shared.is_up()
    }

    fn move_frames<G: GuestMemory>(
        &mut self,
        queue: &mut NetQueue,
        memory: &G,
        turn: &mut Turn<'_>,
    ) -> Result<bool, QueueError> {
        let shared = &queue.shared;
        let mut receiver = lock(&self.receiver);
        let mut available = queue.active.ring.available(memory)?;
        while self.readable && shared.is_up() && !turn.is_over() {
            let frame = match receiver.peek() {
                Ok(ReceiveOutcome::Frame(frame)) => frame,
                Ok(ReceiveOutcome::TooLong) => {
                    receiver.consume();
                    turn.charge_request(0);
                    add(&shared.metrics.receive_drops, 1);
                    continue;
                }
                Ok(ReceiveOutcome::Nothing) => {
                    self.readable = false;
                    break;
                }
                Err(end) => {
                    self.readable = false;
                    shared.take_down(&end, &queue.status);
                    break;
                }
            };
            let Some(chain) = available.next() else {
                return Ok(true);
            };
            let head = chain.head();
            let (_, writable) = split_chain(chain, queue.max_descriptors)
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
            queue.batch.push(UsedElement { head, written });
        }
        Ok(false)
    }
}

/// A worker that panicked has left a frame at most, so the next one goes on.
fn lock(receiver: &Mutex<FrameReceiver>) -> MutexGuard<'_, FrameReceiver> {
    receiver.lock().unwrap_or_else(PoisonError::into_inner)
}
