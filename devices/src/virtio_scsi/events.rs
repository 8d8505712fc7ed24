//! The event queue: tells the driver that a unit has another capacity (virtio 1.2, 5.6.6.3).

use super::worker::{Role, ScsiQueue};
use crate::memory::DeviceMemory;
use crate::reactor::Turn;
use crate::virtio::{MemoryFault, QueueError, UsedElement, split_chain, write_to_driver};

/// Length of `struct virtio_scsi_event` in bytes.
pub(super) const EVENT: usize = 16;
/// VIRTIO_SCSI_T_NO_EVENT: the buffer is too short for an event.
const NO_EVENT: u32 = 0;
/// VIRTIO_SCSI_T_PARAM_CHANGE.
const PARAM_CHANGE: u32 = 3;
/// CAPACITY DATA HAS CHANGED: the additional sense code, and the qualifier above it.
const CAPACITY_CHANGED: u32 = 0x2a | 0x09 << 8;

/// See the module's documentation. None is ever missed: until there is a buffer, the target keeps
/// the units that have changed.
pub(super) struct Events {
    /// Whether the driver knows CHANGE.
    pub(super) wanted: bool,
}

impl<M: DeviceMemory> Role<M> for Events {
    fn takes_chains(&self, queue: &ScsiQueue<M>) -> bool {
        self.wanted && queue.target.links.has_resized()
    }

    fn take(
        &mut self,
        queue: &mut ScsiQueue<M>,
        guest: &M::M,
        turn: &mut Turn<'_>,
    ) -> Result<bool, QueueError> {
        while !turn.is_over() && Role::<M>::takes_chains(self, queue) {
            let next = queue.active.ring.available(guest)?.next();
            let Some(chain) = next else {
                return Ok(true);
            };
            turn.charge_request(0);
            let head = chain.head();
            let broken = |reason| QueueError::Chain { head, reason };
            let (_, writable) = split_chain(chain, queue.max_descriptors).map_err(broken)?;
            let room: u64 = writable.iter().map(|range| u64::from(range.len)).sum();
            let mut event = [0; EVENT];
            let kind = if room < EVENT as u64 {
                NO_EVENT
            } else {
                let unit = queue.target.links.next_resized().unwrap_or(0);
                event[4..8].copy_from_slice(&[1, 0, 0, unit as u8]);
                event[12..].copy_from_slice(&CAPACITY_CHANGED.to_le_bytes());
                PARAM_CHANGE
            };
            event[..4].copy_from_slice(&kind.to_le_bytes());
            let written = write_to_driver(guest, &writable, &event);
            let written =
                written.map_err(|MemoryFault| broken("its buffer lies outside guest memory"))?;
            queue.batch.push(UsedElement { head, written });
        }
        Ok(false)
    }

    fn answer(
        &mut self,
        queue: &mut ScsiQueue<M>,
        _guest: &M::M,
        _turn: &mut Turn<'_>,
        _broken: bool,
    ) -> Result<(), QueueError> {
        if !self.wanted {
            queue.target.links.forget_resized();
        }
        Ok(())
    }
}
