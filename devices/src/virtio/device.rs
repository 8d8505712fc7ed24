//! What a transport needs of a device, whatever its type.

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use super::features::Features;
use super::pool::QueueHandle;
use super::tracker::Tracker;
use super::virtqueue::QueueSetup;
use crate::memory::DeviceMemory;
use crate::metrics::InterruptCounter;
use crate::status::DeviceStatus;

/// What the type of a device decides.
#[derive(Debug)]
pub struct DeviceType {
    /// In messages: `virtio-blk`.
    pub(crate) name: &'static str,
    /// Device ID (virtio 1.2, 5).
    pub(crate) id: u16,
    /// Class of the PCI function: base class, sub-class and programming interface, 24 bits.
    pub(crate) pci_class: u32,
    /// Length of the configuration space in bytes.
    pub(crate) config_len: usize,
}

/// A queue that the driver has started.
pub struct QueueStart {
    /// Its index, from 0.
    pub(crate) index: u16,
    /// Its rings.
    pub(crate) setup: QueueSetup,
    /// The eventfd that the driver signals.
    pub(crate) doorbell: EventFd,
    /// Records the chains in flight, if the front-end outlives this process.
    pub(crate) tracker: Option<Tracker>,
}

/// A device as a transport calls it. Only the devices of this crate are: the trait has no name
/// outside.
pub trait VirtioDevice: Send {
    /// The device's type.
    const TYPE: DeviceType;

    /// The doorbell of each queue, one for each.
    fn doorbells(&self) -> &[EventFd];

    /// The largest queue size that the driver may choose.
    fn queue_size(&self) -> u16;

    /// The features that the device offers.
    fn offered_features(&self) -> Features;

    /// Counts the interrupts that the driver gets.
    fn interrupt_counter(&self) -> Arc<dyn InterruptCounter>;

    /// FEATURES_OK: the driver's choice is final.
    fn accept_features(&self, features: Features);

    /// Reset. No worker may be running.
    fn reset(&self);

    /// How often the device itself has changed its configuration.
    fn config_changes(&self) -> u32 {
        0
    }

    /// Takes over what the disk behind the device has changed. `true`: the configuration space has
    /// changed, so the driver has to be notified.
    fn refresh_config(&self) -> bool {
        false
    }

    /// Reads the configuration space; zero bytes beyond its end.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Writes the configuration space. `features`: the driver's choice.
    fn write_config(&self, offset: u64, data: &[u8], features: Features);

    /// Starts serving a queue.
    fn start_queue<M: DeviceMemory>(
        &self,
        queue: QueueStart,
        features: Features,
        memory: M,
        status: Arc<DeviceStatus>,
    ) -> io::Result<QueueHandle>;

    /// Number of queues.
    fn queues(&self) -> u16 {
        self.doorbells().len() as u16
    }

    /// A copy of the doorbell of queue `index`.
    fn doorbell(&self, index: u16) -> io::Result<EventFd> {
        self.doorbells()
            .get(usize::from(index))
            .ok_or_else(|| io::Error::from(io::ErrorKind::NotFound))?
            .try_clone()
    }
}

/// Copies the part of a configuration space that a driver reads at `offset`; zero bytes beyond its
/// end.
pub(crate) fn read_space(space: &[u8], offset: u64, data: &mut [u8]) {
    let from = usize::try_from(offset).unwrap_or(usize::MAX);
    for (index, byte) in data.iter_mut().enumerate() {
        *byte = from
            .checked_add(index)
            .and_then(|at| space.get(at))
            .copied()
            .unwrap_or(0);
    }
}
