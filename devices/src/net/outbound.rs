//! The transmit queue's traffic: frames of the driver go to the link (virtio 1.2, 5.1.6.2).

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use virtio_bindings::virtio_net::{VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_NONE};
use vm_memory::GuestMemory;

use super::link::{FlushOutcome, FrameSender};
use super::worker::{NetQueue, Traffic};
use super::{HEADER_LEN, LEAST_FRAME, SharedState};
use crate::event_loop::EventSet;
use crate::latency::add;
use crate::reactor::Turn;
use crate::virtio::{QueueError, ReadableBytes, UsedElement, split_chain};

pub(super) struct OutboundTraffic {
    sender: Arc<Mutex<FrameSender>>,
    /// Whether the link had no room. Then chains stay in the ring.
    blocked: bool,
}

impl OutboundTraffic {
    pub(super) fn new(sender: Arc<Mutex<FrameSender>>) -> Self {
        Self {
            sender,
            blocked: false,
        }
    }
}

impl Traffic for OutboundTraffic {
    fn watch(&self, turn: &mut Turn<'_>, event: usize) -> io::Result<()> {
        // Edge-triggered: a link that has room most of the time must not keep the thread awake.
        let edges = EventSet::OUT | EventSet::EDGE_TRIGGERED;
        turn.watch(lock(&self.sender).descriptor(), event, edges)
    }

    fn wake(&mut self) {
        self.blocked = false;
    }

    fn takes_chains(&self) -> bool {
        !self.blocked
    }

    fn can_move(&self, _: &SharedState) -> bool {
        !self.blocked
    }

    fn move_frames<G: GuestMemory>(
        &mut self,
        queue: &mut NetQueue,
        memory: &G,
        turn: &mut Turn<'_>,
    ) -> Result<bool, QueueError> {
        let mut sender = lock(&self.sender);
        // What an earlier worker left comes first, or a stream would be out of step.
        self.blocked = flush(&mut sender, queue);
        let mut emptied = false;
        while !self.blocked && !emptied && !turn.is_over() {
            emptied = fill(&mut sender, queue, memory, turn)?;
            self.blocked = flush(&mut sender, queue);
        }
        Ok(emptied)
    }
}

/// Takes frames while the sender has room and the turn is not over. Returns whether the ring had no
/// more chains.
fn fill<G: GuestMemory>(
    sender: &mut FrameSender,
    queue: &mut NetQueue,
    memory: &G,
    turn: &mut Turn<'_>,
) -> Result<bool, QueueError> {
    let shared = &queue.shared;
    let frame_lengths = LEAST_FRAME..=shared.max_frame;
    let mut available = queue.active.ring.available(memory)?;
    while sender.has_room() && !turn.is_over() {
        let Some(chain) = available.next() else {
            return Ok(true);
        };
        let head = chain.head();
        let (mut readable, _) = split_chain(chain, queue.max_descriptors)
            .map_err(|reason| QueueError::Chain { head, reason })?;
        queue.batch.push(UsedElement { head, written: 0 });
        let len = usize::try_from(readable.len()).unwrap_or(usize::MAX);
        let len = len.saturating_sub(HEADER_LEN);
        let good = shared.is_up()
            && frame_lengths.contains(&len)
            && asks_for_nothing(&mut readable, memory)
            && sender
                .add(len, |frame| readable.take(memory, frame))
                .is_ok();
        if good {
            turn.charge_request(len);
            add(&shared.metrics.frames_sent, 1);
            add(&shared.metrics.bytes_sent, len as u64);
        } else {
            turn.charge_request(0);
            add(&shared.metrics.send_drops, 1);
        }
    }
    Ok(false)
}

/// Passes on what the sender has. Returns whether the link had no room for all of it.
fn flush(sender: &mut FrameSender, queue: &NetQueue) -> bool {
    let shared = &queue.shared;
    match sender.flush() {
        Ok(FlushOutcome::All) => {}
        Ok(FlushOutcome::Blocked) => return true,
        Ok(FlushOutcome::Lost) => add(&shared.metrics.send_drops, 1),
        Err(end) => shared.take_down(&end, &queue.status),
    }
    false
}

/// Takes the header off a chain. `true`: it asks for no offload, since none was negotiated. Other
/// flags are ignored (5.1.6.2.2).
fn asks_for_nothing<G: GuestMemory>(readable: &mut ReadableBytes, memory: &G) -> bool {
    let mut header = [0; HEADER_LEN];
    let read = readable.take(memory, &mut header);
    let [flags, gso_type, ..] = header;
    let checksum = flags & VIRTIO_NET_HDR_F_NEEDS_CSUM as u8 != 0;
    read.is_ok() && !checksum && gso_type == VIRTIO_NET_HDR_GSO_NONE as u8
}

/// A worker that panicked has left whole frames, so the next one goes on.
fn lock(sender: &Mutex<FrameSender>) -> MutexGuard<'_, FrameSender> {
    sender.lock().unwrap_or_else(PoisonError::into_inner)
}
