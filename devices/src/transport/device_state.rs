//! The state that both transports share: the device as its driver drives it.
//!
//! ```text
//!   0 ─ACKNOWLEDGE─▶ ─DRIVER─▶ ─FEATURES_OK─▶ ─DRIVER_OK─▶ queues run
//!   ▲                                                          │
//!   └───────────── write 0: drain, stop, reset ◀─── NEEDS_RESET┘        (virtio 1.2, 2.1 and 3.1)
//! ```

use std::io;
use std::sync::Arc;

use virtio_bindings::virtio_config::VIRTIO_F_RING_RESET;
use vmm_sys_util::eventfd::EventFd;

use crate::block::VirtioBlock;
use crate::interrupt::Interrupt;
use crate::memory::DeviceMemory;
use crate::status::{
    ACKNOWLEDGE, DRIVER, DRIVER_OK, DeviceStatus, FAILED, FEATURES_OK, NEEDS_RESET,
};
use crate::virtio::{Features, QueueHandle, QueueSetup, QueueStart, VirtioDevice};

/// One of the three addresses of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QueueArea {
    /// Descriptor table.
    Descriptors,
    /// Driver area, the available ring.
    Driver,
    /// Device area, the used ring.
    Device,
}

/// One half of a 64-bit address register.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RegisterHalf {
    Low,
    High,
}

struct QueueState {
    setup: QueueSetup,
    worker: Option<QueueHandle>,
    /// After a reset of the queue: its former worker, until that has drained.
    draining: Option<QueueHandle>,
    /// Whether the queue met an error. Pausing and resuming the device does not clear this.
    broken: bool,
}

impl QueueState {
    fn workers(&self) -> impl Iterator<Item = &QueueHandle> {
        self.worker.iter().chain(&self.draining)
    }
}

/// The state that a driver reads and changes through the registers of either transport.
pub(super) struct DeviceState<M, D> {
    device: D,
    memory: M,
    status: Arc<DeviceStatus>,
    device_features_select: u32,
    driver_features_select: u32,
    driver_features: Features,
    queue_select: u32,
    queues: Vec<QueueState>,
    generation: u32,
    /// Whether the driver has read any of the configuration since the generation changed.
    config_read: bool,
    /// Whether the owner has paused the device: then no queue runs until [`resume`](Self::resume).
    paused: bool,
    /// Whether the driver waits for the end of a reset.
    resetting: bool,
}

impl<M: DeviceMemory, D: VirtioDevice> DeviceState<M, D> {
    pub(super) fn new(device: D, memory: M, interrupt: Arc<dyn Interrupt>) -> Self {
        let queues = (0..device.queues())
            .map(|_| QueueState {
                setup: initial_setup(&device),
                worker: None,
                draining: None,
                broken: false,
            })
            .collect();
        Self {
            device,
            memory,
            status: Arc::new(DeviceStatus::new(interrupt)),
            device_features_select: 0,
            driver_features_select: 0,
            driver_features: Features::default(),
            queue_select: 0,
            queues,
            generation: 0,
            config_read: false,
            paused: false,
            resetting: false,
        }
    }

    /// Copies of the queues' doorbells.
    pub(super) fn doorbells(&self) -> io::Result<Vec<EventFd>> {
        self.device
            .doorbells()
            .iter()
            .map(EventFd::try_clone)
            .collect()
    }

    // Features (2.2).

    /// The device's features, and RING_RESET, which the transport adds: the reset of a single queue
    /// (2.6.1).
    fn offered_features(&self) -> Features {
        let mut features = self.device.offered_features();
        features.insert(VIRTIO_F_RING_RESET);
        features
    }

    pub(super) fn device_features_select(&self) -> u32 {
        self.device_features_select
    }

    pub(super) fn select_device_features(&mut self, select: u32) {
        self.device_features_select = select;
    }

    /// The selected 32 bits of the offered features. There are none above bit 63.
    pub(super) fn device_features(&self) -> u32 {
        match self.device_features_select {
            0 => self.offered_features().0 as u32,
            1 => (self.offered_features().0 >> 32) as u32,
            _ => 0,
        }
    }

    pub(super) fn driver_features_select(&self) -> u32 {
        self.driver_features_select
    }

    pub(super) fn select_driver_features(&mut self, select: u32) {
        self.driver_features_select = select;
    }

    /// The selected 32 bits of the driver's choice.
    pub(super) fn driver_features(&self) -> u32 {
        match self.driver_features_select {
            0 => self.driver_features.0 as u32,
            1 => (self.driver_features.0 >> 32) as u32,
            _ => 0,
        }
    }

    /// Sets the selected 32 bits of the driver's choice. The choice is fixed once FEATURES_OK is
    /// set (3.1.1).
    pub(super) fn set_driver_features(&mut self, value: u32) {
        if self.status.has(FEATURES_OK) {
            tracing::debug!("driver features written after FEATURES_OK: ignored");
            return;
        }
        let (low, high) = (
            self.driver_features.0 as u32,
            (self.driver_features.0 >> 32) as u32,
        );
        let (low, high) = match self.driver_features_select {
            0 => (value, high),
            1 => (low, value),
            // There are no feature bits above 63.
            _ => return,
        };
        self.driver_features = Features(u64::from(high) << 32 | u64::from(low));
    }

    // Status (2.1).

    pub(super) fn status(&self) -> u8 {
        self.status.get()
    }

    /// The driver writes a status that is not 0: it adds bits. A driver that has not waited for the
    /// end of a reset waits here.
    pub(super) fn write_status(&mut self, value: u8) {
        if self.resetting {
            self.reset();
        }
        let known = ACKNOWLEDGE | DRIVER | DRIVER_OK | FEATURES_OK | FAILED;
        // 2.1.1: the driver must not clear a bit; only the device sets DEVICE_NEEDS_RESET.
        let new = value & known & !self.status.get();
        self.status.insert(new & (ACKNOWLEDGE | DRIVER | FAILED));
        if new & FEATURES_OK != 0 {
            self.accept_features();
        }
        if new & DRIVER_OK != 0 {
            self.driver_ok();
        }
    }

    /// Sets FEATURES_OK only if the choice is acceptable; the driver reads the status back to find
    /// out (3.1.1, step 6).
    fn accept_features(&mut self) {
        if !self.status.has(ACKNOWLEDGE | DRIVER) {
            tracing::debug!("FEATURES_OK before ACKNOWLEDGE and DRIVER: ignored");
        } else if self.driver_features.is_acceptable(self.offered_features()) {
            self.device.accept_features(self.driver_features);
            self.status.insert(FEATURES_OK);
        } else {
            let (chosen, offered) = (self.driver_features.0, self.offered_features().0);
            self.status.warn(format_args!(
                "{}: refused features {chosen:#x}, chosen by the driver: {offered:#x} are offered",
                D::TYPE.name
            ));
        }
    }

    fn driver_ok(&mut self) {
        // 3.1.1: DRIVER_OK is the last step. If the driver skips the negotiation, no queue starts.
        if !self.status.has(FEATURES_OK) || self.status.has(NEEDS_RESET) {
            tracing::debug!("DRIVER_OK before FEATURES_OK, or while a reset is needed: ignored");
            return;
        }
        self.status.insert(DRIVER_OK);
        for index in 0..self.device.queues() {
            self.start_queue(index);
        }
    }

    /// Starts the worker of a queue if the queue is enabled and the device is live.
    fn start_queue(&mut self, index: u16) {
        let Some(queue) = self.queues.get_mut(usize::from(index)) else {
            return;
        };
        let must_not_run =
            !queue.setup.ready || queue.worker.is_some() || queue.broken || self.paused;
        if self.resetting || must_not_run || !self.status.has(DRIVER_OK) {
            return;
        }
        let worker = self.device.doorbell(index).and_then(|doorbell| {
            let start = QueueStart {
                index,
                setup: queue.setup,
                doorbell,
                tracker: None,
            };
            let status = Arc::clone(&self.status);
            self.device
                .start_queue(start, self.driver_features, self.memory.clone(), status)
        });
        match worker {
            Ok(worker) => queue.worker = Some(worker),
            Err(error) => {
                tracing::error!(%error, "cannot start the worker of {} queue {index}", D::TYPE.name);
                self.status.set_needs_reset();
            }
        }
    }

    /// Drains the queues. New requests of the driver wait in the rings.
    pub(super) fn pause(&mut self) {
        self.paused = true;
        let workers = self.queues.iter().flat_map(QueueState::workers);
        workers.for_each(QueueHandle::request_stop);
        for queue in &mut self.queues {
            queue.draining = None;
            if let Some(drained) = queue.worker.take().map(QueueHandle::stop) {
                queue.broken |= drained.broken;
                queue.setup.resume_at = drained.next_avail.or(queue.setup.resume_at);
            }
        }
    }

    /// Starts the queues again. They take the requests that wait in the rings.
    pub(super) fn resume(&mut self) {
        if !std::mem::take(&mut self.paused) {
            return;
        }
        for index in 0..self.device.queues() {
            self.start_queue(index);
            let queue = &self.queues[usize::from(index)];
            if queue.worker.is_some() {
                // The queue published used chains without an interrupt while it drained.
                self.status.interrupt().queue(index);
            }
        }
    }

    /// Device reset (2.4): drains the queues, stops the workers, and clears the driver's settings.
    ///
    /// Requests in flight complete first, so nothing touches guest memory or the disk afterwards.
    pub(super) fn reset(&mut self) {
        self.stop_workers();
        for queue in &mut self.queues {
            queue.setup = initial_setup(&self.device);
        }
        self.device.reset();
        self.device_features_select = 0;
        self.driver_features_select = 0;
        self.driver_features = Features::default();
        self.queue_select = 0;
        self.resetting = false;
        self.status.reset();
    }

    /// Begins a device reset, for a driver that then reads the status until it is 0 (2.4.2). No
    /// register access waits for the disk, which may take long, for instance if its log is full:
    /// the vCPU goes on, and so does whoever else needs the transport.
    pub(super) fn begin_reset(&mut self) {
        let workers = self.queues.iter().flat_map(QueueState::workers);
        workers.for_each(QueueHandle::request_stop);
        self.resetting = true;
        self.finish_reset();
    }

    /// Ends a device reset once the requests in flight have completed.
    pub(super) fn finish_reset(&mut self) {
        let drained = |queue: &QueueState| queue.workers().all(QueueHandle::is_drained);
        if self.resetting && self.queues.iter().all(drained) {
            self.reset();
        }
    }

    fn stop_workers(&mut self) {
        let workers = self.queues.iter().flat_map(QueueState::workers);
        workers.for_each(QueueHandle::request_stop);
        for queue in &mut self.queues {
            (queue.worker, queue.draining) = (None, None);
            queue.broken = false;
        }
    }

    // Queues (4.2.3.2, 4.1.5.1.3).

    pub(super) fn queue_count(&self) -> u16 {
        self.device.queues()
    }

    pub(super) fn queue_select(&self) -> u32 {
        self.queue_select
    }

    pub(super) fn select_queue(&mut self, select: u32) {
        self.queue_select = select;
    }

    /// Largest size of the selected queue; 0 if there is no such queue.
    pub(super) fn queue_max_size(&self) -> u16 {
        if self.selected().is_some() {
            self.device.queue_size()
        } else {
            0
        }
    }

    /// The selected queue's registers; all zero if there is no such queue.
    pub(super) fn queue_setup(&self) -> QueueSetup {
        self.selected().map(|queue| queue.setup).unwrap_or_default()
    }

    fn selected(&self) -> Option<&QueueState> {
        self.queues.get(self.queue_select as usize)
    }

    /// The selected queue's registers for writing; `None` if the queue is enabled, because then
    /// they are read-only.
    fn writable_setup(&mut self) -> Option<&mut QueueSetup> {
        let queue = self.queues.get_mut(self.queue_select as usize)?;
        if queue.setup.ready {
            tracing::debug!("a register of an enabled queue was written: ignored");
            return None;
        }
        Some(&mut queue.setup)
    }

    /// Sets the selected queue's size, which is checked when the queue starts. A size that is not a
    /// power of two becomes 0, because it MUST NOT be presented (4.1.4.3.1).
    pub(super) fn set_queue_size(&mut self, size: u16) {
        if let Some(setup) = self.writable_setup() {
            setup.size = if size.is_power_of_two() { size } else { 0 };
        }
    }

    /// Sets one half of an address of the selected queue. The address is checked when the queue
    /// starts.
    pub(super) fn set_queue_address(&mut self, ring: QueueArea, half: RegisterHalf, value: u32) {
        let Some(setup) = self.writable_setup() else {
            return;
        };
        let address = match ring {
            QueueArea::Descriptors => &mut setup.descriptors,
            QueueArea::Driver => &mut setup.driver,
            QueueArea::Device => &mut setup.device,
        };
        *address = match half {
            RegisterHalf::Low => *address & !0xffff_ffff | u64::from(value),
            RegisterHalf::High => *address & 0xffff_ffff | u64::from(value) << 32,
        };
    }

    /// Enables the selected queue, unless it is still being reset: the driver has to wait for that
    /// (2.6.1).
    pub(super) fn enable_queue(&mut self) {
        if self.queue_resetting() {
            tracing::debug!("a queue was enabled while it was being reset: ignored");
            return;
        }
        if let Some(setup) = self.writable_setup() {
            setup.ready = true;
        }
        if let Ok(index) = u16::try_from(self.queue_select) {
            self.start_queue(index);
        }
    }

    /// Disables the selected queue: drains it and stops its worker.
    pub(super) fn disable_queue(&mut self) {
        if let Some(queue) = self.queues.get_mut(self.queue_select as usize) {
            queue.worker = None;
            queue.setup.ready = false;
            queue.setup.resume_at = None;
            queue.broken = false;
        }
    }

    /// Resets the selected queue alone (2.6.1), if RING_RESET was negotiated; returns whether it
    /// did. The registers are then as after a reset of the device, and the queue takes no more
    /// requests and sends no more interrupts. No register access waits for the disk:
    /// [`queue_resetting`](Self::queue_resetting) is true until the requests in flight have
    /// completed.
    pub(super) fn reset_queue(&mut self) -> bool {
        if !self.status.has(FEATURES_OK) || !self.driver_features.has(VIRTIO_F_RING_RESET) {
            tracing::debug!("a queue reset without VIRTIO_F_RING_RESET: ignored");
            return false;
        }
        let initial = initial_setup(&self.device);
        let Some(queue) = self.queues.get_mut(self.queue_select as usize) else {
            return false;
        };
        queue.setup = initial;
        queue.broken = false;
        if let Some(worker) = queue.worker.take() {
            worker.request_stop();
            queue.draining = Some(worker);
        }
        true
    }

    /// Whether the selected queue is still being reset.
    pub(super) fn queue_resetting(&mut self) -> bool {
        let Some(queue) = self.queues.get_mut(self.queue_select as usize) else {
            return false;
        };
        if queue.draining.as_ref().is_some_and(QueueHandle::is_drained) {
            queue.draining = None;
        }
        queue.draining.is_some()
    }

    /// Handles an available buffer notification that arrived as a VM exit instead of through an
    /// ioeventfd.
    pub(super) fn notify(&self, queue: u32) {
        match self.device.doorbells().get(queue as usize) {
            // A full counter means that the doorbell has rung already.
            Some(doorbell) => drop(doorbell.write(1)),
            None => tracing::debug!("notification of queue {queue}, which does not exist: ignored"),
        }
    }

    // Configuration space (2.5).

    /// The generation. It changes if the configuration has changed since the driver last read any
    /// of it (2.5.2).
    pub(super) fn generation(&self) -> u32 {
        self.generation.wrapping_add(self.device.config_changes())
    }

    pub(super) fn read_config(&mut self, offset: u64, data: &mut [u8]) {
        self.config_read = true;
        self.device.read_config(offset, data);
    }

    pub(super) fn write_config(&mut self, offset: u64, data: &[u8]) {
        if self.status.has(FEATURES_OK) {
            self.device.write_config(offset, data, self.driver_features);
        }
    }
}

impl<M: DeviceMemory> DeviceState<M, VirtioBlock> {
    /// See [`DeviceControl::set_write_cache`](crate::control::DeviceControl::set_write_cache).
    pub(super) fn set_write_cache(&self, on: bool) -> bool {
        self.device.cache().set_for_owner(on)
    }

    /// Takes over the backend's capacity. If it has changed, the generation changes too and an
    /// interrupt is sent (5.2.6).
    pub(super) fn capacity_changed(&mut self) {
        if self.device.refresh_capacity() {
            // Changes between two reads of the driver count once. Over PCI the counter has 8 bits,
            // and must not wrap to the value that the driver saw (4.1.4.3.1).
            if std::mem::take(&mut self.config_read) {
                self.generation = self.generation.wrapping_add(1);
            }
            if self.status.has(DRIVER_OK) {
                self.status.interrupt().config();
            }
        }
    }
}

impl<M, D> Drop for DeviceState<M, D> {
    fn drop(&mut self) {
        // Stop all at once; otherwise each worker would start draining only after the previous one.
        let workers = self.queues.iter().flat_map(QueueState::workers);
        workers.for_each(QueueHandle::request_stop);
    }
}

fn initial_setup(device: &impl VirtioDevice) -> QueueSetup {
    QueueSetup {
        size: device.queue_size(),
        ..QueueSetup::default()
    }
}
