//! virtio over MMIO, register layout version 2 (virtio 1.2, 4.2.2).

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use super::Device;
use super::device_state::{DeviceState, QueueArea, RegisterHalf};
use super::offsets::mmio as reg;
use super::registers::Registers;
use crate::block::VirtioBlock;
use crate::interrupt::{EdgeLine, LineInterrupt};
use crate::memory::DeviceMemory;

/// "virt", little-endian.
const MAGIC: u32 = 0x7472_6976;
/// The device version of virtio 1.x.
const VERSION: u32 = 2;
/// "WALV", little-endian; the specification leaves the vendor ID to the implementer.
const VENDOR: u32 = 0x564c_4157;
/// The length and base of a shared memory region that does not exist (4.2.2, SHMLenLow).
const NO_REGION: u32 = !0;

/// A virtio device as 4 KiB of memory-mapped registers, one doorbell register and one interrupt
/// line.
pub struct MmioTransport<M: DeviceMemory, D: Device = VirtioBlock> {
    state: DeviceState<M, D>,
    interrupt: Arc<LineInterrupt>,
}

impl<M: DeviceMemory, D: Device> MmioTransport<M, D> {
    /// Size of the register window in bytes.
    pub const SIZE: u64 = reg::SIZE;

    /// Offset of QueueNotify. See [`offsets::mmio`](super::offsets::mmio).
    pub const QUEUE_NOTIFY: u64 = reg::QUEUE_NOTIFY;

    /// Presents `device`. Each interrupt pulses `irq`, for instance an eventfd.
    pub fn new(device: D, memory: M, irq: impl EdgeLine + 'static) -> Self {
        let interrupt = Arc::new(LineInterrupt::new(irq, device.interrupt_counter()));
        let state = DeviceState::new(device, memory, Arc::clone(&interrupt) as _);
        Self { state, interrupt }
    }

    /// The doorbell of each queue, in order.
    ///
    /// # Errors
    /// If the system has no more descriptors.
    pub fn doorbells(&self) -> io::Result<Vec<EventFd>> {
        self.state.doorbells()
    }

    /// Drains the requests in flight, stops the workers and returns the device to its initial
    /// state. Dropping the transport drains and stops as well.
    pub fn reset(&mut self) {
        self.state.reset();
    }

    /// Reads `data.len()` bytes of registers at `offset`.
    ///
    /// Registers are 32 bits wide and aligned, and drivers must read them as such (4.2.2.2); any
    /// other access reads zeroes. The configuration space may be read in any width.
    pub fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(config) = offset.checked_sub(reg::CONFIG) {
            self.state.read_config(config, data);
        } else if let Ok(value) = <&mut [u8; 4]>::try_from(data) {
            *value = self.read_register(offset).to_le_bytes();
        } else {
            tracing::debug!("virtio-mmio: a register at {offset:#x} was not read as 32 bits");
        }
    }

    /// Writes registers at `offset`. An access that is not 32 bits wide and aligned does nothing,
    /// except in the configuration space.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some(config) = offset.checked_sub(reg::CONFIG) {
            self.state.write_config(config, data);
        } else if let Ok(value) = <[u8; 4]>::try_from(data) {
            self.write_register(offset, u32::from_le_bytes(value));
        } else {
            tracing::debug!("virtio-mmio: a register at {offset:#x} was not written as 32 bits");
        }
    }

    fn read_register(&mut self, register: u64) -> u32 {
        match register {
            reg::MAGIC_VALUE => MAGIC,
            reg::VERSION => VERSION,
            reg::DEVICE_ID => D::TYPE.id.into(),
            reg::VENDOR_ID => VENDOR,
            reg::DEVICE_FEATURES => self.state.device_features(),
            reg::QUEUE_NUM_MAX => self.state.queue_max_size().into(),
            reg::QUEUE_READY => self.state.queue_setup().ready.into(),
            reg::INTERRUPT_STATUS => self.interrupt.status(),
            reg::STATUS => self.state.status().into(),
            reg::SHM_LEN_LOW | reg::SHM_LEN_HIGH | reg::SHM_BASE_LOW | reg::SHM_BASE_HIGH => {
                NO_REGION
            }
            reg::CONFIG_GENERATION => self.state.generation(),
            reg::QUEUE_RESET => self.state.queue_resetting().into(),
            // Write-only or reserved.
            _ => 0,
        }
    }

    fn write_register(&mut self, register: u64, value: u32) {
        let state = &mut self.state;
        match register {
            reg::DEVICE_FEATURES_SEL => state.select_device_features(value),
            reg::DRIVER_FEATURES => state.set_driver_features(value),
            reg::DRIVER_FEATURES_SEL => state.select_driver_features(value),
            reg::QUEUE_SEL => state.select_queue(value),
            // A size that does not fit in 16 bits is as invalid as 0.
            reg::QUEUE_NUM => state.set_queue_size(value.try_into().unwrap_or(0)),
            reg::QUEUE_READY if value == 0 => state.disable_queue(),
            reg::QUEUE_READY => state.enable_queue(),
            reg::QUEUE_RESET if value == 1 => drop(state.reset_queue()),
            reg::QUEUE_NOTIFY => state.notify(value),
            reg::INTERRUPT_ACK => self.interrupt.acknowledge(value),
            // The field has 8 bits, but only a 32-bit zero resets. Drivers for MMIO, Linux's too,
            // don't wait for the status to become 0 (4.2 does not ask for it): the write waits.
            reg::STATUS if value == 0 => state.reset(),
            reg::STATUS if value as u8 != 0 => state.write_status(value as u8),
            reg::QUEUE_DESC_LOW => {
                state.set_queue_address(QueueArea::Descriptors, RegisterHalf::Low, value)
            }
            reg::QUEUE_DESC_HIGH => {
                state.set_queue_address(QueueArea::Descriptors, RegisterHalf::High, value)
            }
            reg::QUEUE_DRIVER_LOW => {
                state.set_queue_address(QueueArea::Driver, RegisterHalf::Low, value)
            }
            reg::QUEUE_DRIVER_HIGH => {
                state.set_queue_address(QueueArea::Driver, RegisterHalf::High, value)
            }
            reg::QUEUE_DEVICE_LOW => {
                state.set_queue_address(QueueArea::Device, RegisterHalf::Low, value)
            }
            reg::QUEUE_DEVICE_HIGH => {
                state.set_queue_address(QueueArea::Device, RegisterHalf::High, value)
            }
            _ => tracing::debug!("virtio-mmio: write of {value:#x} to {register:#x}: ignored"),
        }
    }
}

impl<M: DeviceMemory, D: Device> Registers for MmioTransport<M, D> {
    type Memory = M;
    type Device = D;

    fn state(&mut self) -> &mut DeviceState<M, D> {
        &mut self.state
    }
}
