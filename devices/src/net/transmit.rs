//! Serves the transmit queue: frames of the driver go to the link (virtio 1.2, 5.1.6.2).

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use virtio_bindings::virtio_net::{VIRTIO_NET_HDR_F_NEEDS_CSUM, VIRTIO_NET_HDR_GSO_NONE};
use vm_memory::GuestMemory;

use super::link::{Flushed, FrameSender};
use super::{HEADER_LEN, LEAST_FRAME, Served};
use crate::event_loop::EventSet;
use crate::latency::add;
use crate::memory::DeviceMemory;
use crate::reactor::{FIRST_OWN_EVENT, Next, Source, Turn};
use crate::throttle::Throttle;
use crate::virtio::{QueueError, ReadableBytes, UsedElement, split_chain};

/// The driver has rung the queue's doorbell: it has frames.
const DOORBELL: usize = FIRST_OWN_EVENT;
/// The link has room.
const WRITABLE: usize = FIRST_OWN_EVENT + 1;

pub(super) struct TransmitWorker<M> {
    queue: Served<M>,
    sender: Arc<Mutex<FrameSender>>,
    /// Whether the link had no room. Then chains stay in the ring.
    blocked: bool,
    /// Whether the ring was empty after the last chains were taken.
    ring_emptied: bool,
    /// The number of chains taken so far, if the ring then reported another available chain.
    seen_available: Option<u16>,
    /// Chains to publish next.
    batch: Vec<UsedElement>,
}

impl<M: DeviceMemory> TransmitWorker<M> {
    pub(super) fn new(queue: Served<M>, sender: Arc<Mutex<FrameSender>>) -> Self {
        Self {
            queue,
            sender,
            blocked: false,
            ring_emptied: false,
            seen_available: None,
            batch: Vec::new(),
        }
    }

    fn take_frames<G: GuestMemory>(
        &mut self,
        memory: &G,
        turn: &mut Turn<'_>,
    ) -> Result<(), QueueError> {
        self.ring_emptied = false;
        self.queue.ring.disable_doorbell(memory)?;
        let sender = Arc::clone(&self.sender);
        let mut sender = lock(&sender);
        // What an earlier worker left comes first, or a stream would be out of step.
        self.flush(&mut sender);
        while !self.blocked && !self.ring_emptied && !turn.is_over() {
            self.fill(&mut sender, memory, turn)?;
            self.flush(&mut sender);
        }
        // Without this check the worker would retry an unreadable ring forever.
        let taken = self.queue.ring.chains_taken();
        match self.seen_available.take() {
            Some(before) if self.ring_emptied && taken == before => Err(QueueError::Unreadable),
            _ => Ok(()),
        }
    }

    /// Takes frames while the sender has room and the turn is not over.
    fn fill<G: GuestMemory>(
        &mut self,
        sender: &mut FrameSender,
        memory: &G,
        turn: &mut Turn<'_>,
    ) -> Result<(), QueueError> {
        let shared = &self.queue.shared;
        let frame_lengths = LEAST_FRAME..=shared.max_frame;
        let mut available = self.queue.ring.available(memory)?;
        while sender.has_room() && !turn.is_over() {
            let Some(chain) = available.next() else {
                self.ring_emptied = true;
                break;
            };
            let head = chain.head();
            let (mut readable, _) = split_chain(chain, self.queue.max_descriptors)
                .map_err(|reason| QueueError::Chain { head, reason })?;
            self.batch.push(UsedElement { head, written: 0 });
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
        Ok(())
    }

    fn flush(&mut self, sender: &mut FrameSender) {
        self.blocked = false;
        match sender.flush() {
            Ok(Flushed::All) => {}
            Ok(Flushed::Blocked) => self.blocked = true,
            Ok(Flushed::Lost) => add(&self.queue.shared.metrics.send_drops, 1),
            Err(end) => self.queue.shared.take_down(&end, &self.queue.status),
        }
    }

    /// Gives the driver its buffers back; `true`: there is more to take.
    fn publish<G: GuestMemory>(&mut self, memory: &G, turn: &Turn<'_>) -> Result<bool, QueueError> {
        let wanted = self.queue.ring.publish(memory, &self.batch)?;
        if wanted && !turn.is_stopping() {
            self.queue.driver.interrupt();
        }
        self.batch.clear();
        if !self.ring_emptied {
            return Ok(!self.blocked);
        }
        let available = self.queue.ring.enable_doorbell(memory)?;
        self.seen_available = available.then(|| self.queue.ring.chains_taken());
        Ok(available && !self.blocked)
    }

    fn fail(&mut self, error: &dyn std::fmt::Display) {
        self.queue.driver.fail(error);
        self.batch.clear();
    }
}

/// Takes the header off a chain. `true`: it asks for no offload, since none was negotiated. Other flags are ignored
/// (5.1.6.2.2).
fn asks_for_nothing<G: GuestMemory>(readable: &mut ReadableBytes, memory: &G) -> bool {
    let mut header = [0; HEADER_LEN];
    let read = readable.take(memory, &mut header);
    let [flags, gso_type, ..] = header;
    let checksum = flags & VIRTIO_NET_HDR_F_NEEDS_CSUM as u8 != 0;
    read.is_ok() && !checksum && gso_type == VIRTIO_NET_HDR_GSO_NONE as u8
}

impl<M: DeviceMemory> Source for TransmitWorker<M> {
    fn throttle(&self) -> &Arc<Throttle> {
        &self.queue.shared.throttle
    }

    fn is_disk(&self) -> bool {
        false
    }

    fn begin(&mut self, turn: &mut Turn<'_>) -> io::Result<()> {
        self.queue.driver.watch(turn, DOORBELL)?;
        // Edge-triggered: a link that has room most of the time must not keep the thread awake.
        let edges = EventSet::OUT | EventSet::EDGE_TRIGGERED;
        turn.watch(lock(&self.sender).descriptor(), WRITABLE, edges)
    }

    fn ready(&mut self, event: usize, _: EventSet, _: bool) {
        if event == DOORBELL {
            let rung = self.queue.driver.take_rings();
            add(&self.queue.shared.metrics.doorbells, rung);
        } else {
            self.blocked = false;
        }
    }

    fn take(&mut self, turn: &mut Turn<'_>) {
        if self.blocked || self.queue.driver.is_broken() || turn.is_stopping() {
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

/// A worker that panicked has left whole frames, so the next one goes on.
fn lock(sender: &Mutex<FrameSender>) -> MutexGuard<'_, FrameSender> {
    sender.lock().unwrap_or_else(PoisonError::into_inner)
}
