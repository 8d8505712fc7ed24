//! virtio over PCI (virtio 1.2, 4.1): a modern function with MSI-X and a notify BAR of its own.
//!
//! ```text
//!   BAR 0  16 KiB   0x0000 common configuration │ 0x1000 ISR │ 0x2000 device configuration
//!   BAR 2   4 KiB   notifications: queue i at 4 * i, nothing else, so ioeventfds can serve the whole page
//!   BAR 4           MSI-X vector table, pending bits on the page after it
//! ```

use std::io;
use std::sync::Arc;

use vmm_sys_util::eventfd::EventFd;

use super::Device;
use super::device_state::{DeviceState, QueueArea, RegisterHalf};
use super::msix::{
    CONTROL_ENABLE, CONTROL_FUNCTION_MASK, ENTRY_LEN, Msix, NO_VECTOR, PciInterrupt,
};
use super::offsets::pci::{
    COMMON, CONFIG_BAR, DEVICE, ISR, MSIX_BAR, NOTIFY_BAR, NOTIFY_OFF_MULTIPLIER, common,
};
use super::pci_config::{Identity, PciConfig};
use super::registers::Registers;
use crate::block::VirtioBlock;
use crate::interrupt::MsiRouter;
use crate::memory::DeviceMemory;

const VENDOR_VIRTIO: u16 = 0x1af4;
/// A modern device's PCI ID is 0x1040 plus its virtio device ID (4.1.2).
const DEVICE_BASE: u16 = 0x1040;
/// 0x40 or higher distinguishes a modern device from a transitional one (4.1.2.1).
const SUBSYSTEM: u16 = 0x1100;

const PAGE: u32 = 0x1000;
const CONFIG_BAR_LEN: u32 = 4 * PAGE;
const NOTIFY_BAR_LEN: u32 = PAGE;

/// Length up to and including `queue_reset`. The field before it, `queue_notify_data`, belongs to a
/// feature that is not offered, and is zero.
const COMMON_LEN: u64 = 0x3c;

// The upper halves of the common configuration's 64-bit fields (4.1.3.1).
const QUEUE_DESC_HIGH: u64 = common::QUEUE_DESC + 4;
const QUEUE_DRIVER_HIGH: u64 = common::QUEUE_DRIVER + 4;
const QUEUE_DEVICE_HIGH: u64 = common::QUEUE_DEVICE + 4;

const CAPABILITY_VENDOR: u8 = 0x09;
const CAPABILITY_MSIX: u8 = 0x11;
// cfg_type of the virtio capabilities (4.1.4).
const CFG_COMMON: u8 = 1;
const CFG_NOTIFY: u8 = 2;
const CFG_ISR: u8 = 3;
const CFG_DEVICE: u8 = 4;
const CFG_PCI: u8 = 5;
/// Offset of `pci_cfg_data` in the PCI configuration access capability.
const PCI_CFG_DATA: usize = 16;

/// A base address register of the function, with its current address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bar {
    /// Index of the register, 0 to 5.
    pub index: usize,
    /// Guest physical address; 0 until firmware or the driver sets it.
    pub address: u64,
    /// Size in bytes, a power of two.
    pub size: u64,
    /// Whether memory decoding is on. While it is off, the BAR has no address.
    pub enabled: bool,
}

/// The notification address of a queue.
#[derive(Debug)]
pub struct PciDoorbell {
    /// Index of the BAR.
    pub bar: usize,
    /// Offset in the BAR. Each queue has its own address, to which drivers write 2 bytes, the
    /// queue's index.
    pub offset: u64,
    /// The eventfd that a notification signals.
    pub event: EventFd,
}

/// A virtio device as a PCI function with MSI-X: one vector per queue and one for the
/// configuration.
pub struct PciTransport<M: DeviceMemory, D: Device = VirtioBlock> {
    state: DeviceState<M, D>,
    config: PciConfig,
    interrupt: Arc<PciInterrupt>,
    msix_capability: usize,
    pci_cfg_capability: usize,
    /// Offset of the pending bits in the MSI-X BAR.
    pending_offset: u64,
}

impl<M: DeviceMemory, D: Device> PciTransport<M, D> {
    /// Presents `device`, with a vector per queue and one for the configuration. No BAR has an
    /// address yet.
    pub fn new(device: D, memory: M, msi: Arc<dyn MsiRouter>) -> Self {
        let queues = device.queues();
        // At most 257.
        let vectors = queues + 1;
        let mut config = PciConfig::new(&Identity {
            vendor: VENDOR_VIRTIO,
            device: DEVICE_BASE + D::TYPE.id,
            revision: 1,
            class: D::TYPE.pci_class,
            subsystem_vendor: VENDOR_VIRTIO,
            subsystem: SUBSYSTEM,
        });
        let pending_offset = (u32::from(vectors) * ENTRY_LEN as u32).next_multiple_of(PAGE);
        config.add_bar(CONFIG_BAR, CONFIG_BAR_LEN);
        config.add_bar(NOTIFY_BAR, NOTIFY_BAR_LEN);
        config.add_bar(MSIX_BAR, (pending_offset + PAGE).next_power_of_two());

        let device_len = D::TYPE.config_len as u32;
        let mut add = |cfg_type, bar, offset: u64, len, extra: &[u8], writable: &[u8]| {
            let body = virtio_capability(cfg_type, bar, offset as u32, len, extra);
            config.add_capability(CAPABILITY_VENDOR, &body, writable)
        };
        add(CFG_COMMON, CONFIG_BAR, COMMON, COMMON_LEN as u32, &[], &[]);
        add(CFG_ISR, CONFIG_BAR, ISR, 1, &[], &[]);
        add(CFG_DEVICE, CONFIG_BAR, DEVICE, device_len, &[], &[]);
        let multiplier = NOTIFY_OFF_MULTIPLIER.to_le_bytes();
        let notify_len = u32::from(queues) * NOTIFY_OFF_MULTIPLIER;
        add(CFG_NOTIFY, NOTIFY_BAR, 0, notify_len, &multiplier, &[]);
        // The driver may write bar, offset, length and pci_cfg_data (4.1.4.9). The body starts two
        // bytes into the capability.
        let mut writable = [0; PCI_CFG_DATA + 4 - 2];
        writable[2] = 0xff;
        writable[6..].fill(0xff);
        let pci_cfg_capability = add(CFG_PCI, 0, 0, 0, &[0; 4], &writable);

        let mut msix = [0; 10];
        msix[..2].copy_from_slice(&(vectors - 1).to_le_bytes());
        msix[2..6].copy_from_slice(&(MSIX_BAR as u32).to_le_bytes());
        msix[6..].copy_from_slice(&(pending_offset | MSIX_BAR as u32).to_le_bytes());
        let control = (CONTROL_ENABLE | CONTROL_FUNCTION_MASK).to_le_bytes();
        let msix_capability = config.add_capability(CAPABILITY_MSIX, &msix, &control);

        let msix = Msix::new(vectors, msi, device.interrupt_counter());
        let interrupt = Arc::new(PciInterrupt::new(queues, msix));
        Self {
            state: DeviceState::new(device, memory, Arc::clone(&interrupt) as _),
            config,
            interrupt,
            msix_capability,
            pci_cfg_capability,
            pending_offset: pending_offset.into(),
        }
    }

    /// The notification address and doorbell of each queue, in order. The addresses follow the BAR.
    ///
    /// # Errors
    /// If the system has no more descriptors.
    pub fn doorbells(&self) -> io::Result<Vec<PciDoorbell>> {
        let doorbells = self.state.doorbells()?.into_iter().zip(0..);
        Ok(doorbells
            .map(|(event, queue)| PciDoorbell {
                bar: NOTIFY_BAR,
                offset: queue * u64::from(NOTIFY_OFF_MULTIPLIER),
                event,
            })
            .collect())
    }

    /// Drains the requests in flight, stops the workers and returns the device to its initial
    /// state. The PCI configuration stays. Dropping the transport also drains and stops.
    pub fn reset(&mut self) {
        self.state.reset();
    }

    /// The function's BARs with their current addresses, which any
    /// [`config_write`](Self::config_write) may change.
    pub fn bars(&self) -> Vec<Bar> {
        [CONFIG_BAR, NOTIFY_BAR, MSIX_BAR]
            .into_iter()
            .map(|index| Bar {
                index,
                address: self.config.bar_address(index).into(),
                size: self.config.bar_size(index).into(),
                enabled: self.config.memory_enabled(),
            })
            .collect()
    }

    /// Gives a BAR its address, as firmware would. Memory decoding stays as it is.
    ///
    /// # Panics
    /// If the BAR does not exist, or `address` is above 4 GiB or not aligned to the BAR's size. A
    /// guest cannot cause this.
    pub fn set_bar(&mut self, index: usize, address: u64) {
        let size = self.config.bar_size(index);
        assert!(size != 0, "BAR {index} does not exist");
        assert!(
            address.is_multiple_of(size.into()),
            "BAR {index}: {address:#x} is not aligned"
        );
        self.config
            .set_bar(index, u32::try_from(address).expect("a 32-bit BAR"));
    }

    /// Reads the configuration space in any width. The extended space, above 256 bytes, is empty
    /// and reads as zeroes.
    pub fn config_read(&mut self, offset: u16, data: &mut [u8]) {
        if self.touches_pci_cfg_data(offset, data.len())
            && let Some((bar, at, len)) = self.pci_cfg_window()
        {
            let mut bytes = [0; 4];
            self.bar_read(bar, at, &mut bytes[..len]);
            self.config
                .set(self.pci_cfg_capability + PCI_CFG_DATA, &bytes[..len]);
        }
        // 4.1.4.5.1: the state that an interrupt pin would have.
        self.config
            .set_interrupt_status(self.interrupt.intx_asserted());
        self.config.read(offset, data);
    }

    /// Writes the configuration space in any width.
    pub fn config_write(&mut self, offset: u16, data: &[u8]) {
        self.config.write(offset, data);
        let control = self.msix_capability + 2;
        if overlaps(offset, data.len(), control, 2) {
            self.interrupt.msix.set_control(self.config.u16_at(control));
        }
        if self.touches_pci_cfg_data(offset, data.len())
            && let Some((bar, at, len)) = self.pci_cfg_window()
        {
            let value = self
                .config
                .u32_at(self.pci_cfg_capability + PCI_CFG_DATA)
                .to_le_bytes();
            self.bar_write(bar, at, &value[..len]);
        }
    }

    fn touches_pci_cfg_data(&self, offset: u16, len: usize) -> bool {
        overlaps(offset, len, self.pci_cfg_capability + PCI_CFG_DATA, 4)
    }

    /// Where the PCI configuration access capability points to: BAR, offset, length. `None` if
    /// 4.1.4.9.1 does not allow the driver's values.
    fn pci_cfg_window(&self) -> Option<(usize, u64, usize)> {
        let at = self.pci_cfg_capability;
        let bar = usize::from(self.config.u16_at(at + 4) as u8);
        let offset = self.config.u32_at(at + 8);
        let len = self.config.u32_at(at + 12);
        let inside = offset.checked_add(len)? <= self.config.bar_size(bar);
        (matches!(len, 1 | 2 | 4) && offset.is_multiple_of(len) && inside).then_some((
            bar,
            offset.into(),
            len as usize,
        ))
    }

    /// Reads at `offset` in a BAR. Unimplemented registers read as zeroes.
    pub fn bar_read(&mut self, bar: usize, offset: u64, data: &mut [u8]) {
        data.fill(0);
        match bar {
            CONFIG_BAR if offset >= DEVICE => {
                self.state.read_config(offset - DEVICE, data);
            }
            CONFIG_BAR if offset == ISR => {
                if let Some(first) = data.first_mut() {
                    *first = self.interrupt.take_isr();
                }
            }
            CONFIG_BAR if offset < COMMON_LEN => self.read_common(offset as usize, data),
            MSIX_BAR if offset >= self.pending_offset => {
                self.interrupt
                    .msix
                    .read_pending(offset - self.pending_offset, data);
            }
            MSIX_BAR => self.interrupt.msix.read_table(offset, data),
            _ => {}
        }
    }

    /// Writes at `offset` in a BAR. Read-only and unimplemented registers do not change.
    pub fn bar_write(&mut self, bar: usize, offset: u64, data: &[u8]) {
        match bar {
            CONFIG_BAR if offset >= DEVICE => {
                self.state.write_config(offset - DEVICE, data);
            }
            CONFIG_BAR if offset < COMMON_LEN => self.write_common(offset, data),
            // The address identifies the queue; the index that the driver writes is redundant
            // (4.1.5.2).
            NOTIFY_BAR if offset.is_multiple_of(NOTIFY_OFF_MULTIPLIER.into()) => {
                let queue = offset / u64::from(NOTIFY_OFF_MULTIPLIER);
                self.state.notify(u32::try_from(queue).unwrap_or(u32::MAX));
            }
            MSIX_BAR if offset < self.pending_offset => {
                self.interrupt.msix.write_table(offset, data);
            }
            _ => tracing::debug!("virtio-pci: write to BAR {bar} at {offset:#x}: ignored"),
        }
    }

    /// struct virtio_pci_common_cfg (4.1.4.3). A read of any width has no side effect, but that a
    /// reset may end.
    fn read_common(&mut self, offset: usize, data: &mut [u8]) {
        self.state.finish_reset();
        let resetting = self.state.queue_resetting();
        let state = &self.state;
        let select = state.queue_select();
        let queue = state.queue_setup();
        let exists = state.queue_max_size() != 0;
        let mut space = [0; COMMON_LEN as usize];
        let mut put =
            |at: u64, bytes: &[u8]| space[at as usize..][..bytes.len()].copy_from_slice(bytes);
        put(
            common::DEVICE_FEATURE_SELECT,
            &state.device_features_select().to_le_bytes(),
        );
        put(
            common::DEVICE_FEATURE,
            &state.device_features().to_le_bytes(),
        );
        put(
            common::DRIVER_FEATURE_SELECT,
            &state.driver_features_select().to_le_bytes(),
        );
        put(
            common::DRIVER_FEATURE,
            &state.driver_features().to_le_bytes(),
        );
        put(
            common::CONFIG_MSIX_VECTOR,
            &self.interrupt.config_vector().to_le_bytes(),
        );
        put(common::NUM_QUEUES, &state.queue_count().to_le_bytes());
        put(common::DEVICE_STATUS, &[state.status()]);
        put(common::CONFIG_GENERATION, &[state.generation() as u8]);
        put(common::QUEUE_SELECT, &(select as u16).to_le_bytes());
        put(common::QUEUE_SIZE, &queue.size.to_le_bytes());
        put(
            common::QUEUE_MSIX_VECTOR,
            &self.interrupt.queue_vector(select).to_le_bytes(),
        );
        put(common::QUEUE_ENABLE, &u16::from(queue.ready).to_le_bytes());
        // queue_notify_off, in units of the multiplier: the queue's index.
        put(
            common::QUEUE_NOTIFY_OFF,
            &(if exists { select as u16 } else { 0 }).to_le_bytes(),
        );
        put(common::QUEUE_DESC, &queue.descriptors.to_le_bytes());
        put(common::QUEUE_DRIVER, &queue.driver.to_le_bytes());
        put(common::QUEUE_DEVICE, &queue.device.to_le_bytes());
        put(common::QUEUE_RESET, &u16::from(resetting).to_le_bytes());
        for (byte, &value) in data.iter_mut().zip(&space[offset..]) {
            *byte = value;
        }
    }

    /// Each field has to be written in its own width; a 64-bit field may also be written as two
    /// halves (4.1.3.1).
    fn write_common(&mut self, offset: u64, data: &[u8]) {
        match *data {
            [value] => self.write_common_8(offset, value),
            [a, b] => self.write_common_16(offset, u16::from_le_bytes([a, b])),
            [a, b, c, d] => self.write_common_32(offset, u32::from_le_bytes([a, b, c, d])),
            [a, b, c, d, e, f, g, h]
                if matches!(
                    offset,
                    common::QUEUE_DESC | common::QUEUE_DRIVER | common::QUEUE_DEVICE
                ) =>
            {
                self.write_common_32(offset, u32::from_le_bytes([a, b, c, d]));
                self.write_common_32(offset + 4, u32::from_le_bytes([e, f, g, h]));
            }
            _ => tracing::debug!(
                "virtio-pci: {} bytes written at {offset:#x}: ignored",
                data.len()
            ),
        }
    }

    fn write_common_8(&mut self, offset: u64, value: u8) {
        if offset == common::DEVICE_STATUS {
            match value {
                0 => self.state.begin_reset(),
                bits => self.state.write_status(bits),
            }
        }
    }

    fn write_common_16(&mut self, offset: u64, value: u16) {
        match offset {
            common::CONFIG_MSIX_VECTOR => self.interrupt.set_config_vector(value),
            common::QUEUE_SELECT => self.state.select_queue(value.into()),
            common::QUEUE_SIZE => self.state.set_queue_size(value),
            common::QUEUE_MSIX_VECTOR => self
                .interrupt
                .set_queue_vector(self.state.queue_select(), value),
            // 4.1.4.3.2: the driver MUST NOT write 0.
            common::QUEUE_ENABLE if value == 1 => self.state.enable_queue(),
            // 4.1.4.3.2: the driver MUST NOT write anything but 1 here either.
            common::QUEUE_RESET if value == 1 => {
                if self.state.reset_queue() {
                    let queue = self.state.queue_select();
                    self.interrupt.set_queue_vector(queue, NO_VECTOR);
                }
            }
            _ => tracing::debug!("virtio-pci: write of {value:#x} to {offset:#x}: ignored"),
        }
    }

    fn write_common_32(&mut self, offset: u64, value: u32) {
        let half = if offset & 4 == 0 {
            RegisterHalf::Low
        } else {
            RegisterHalf::High
        };
        let state = &mut self.state;
        match offset {
            common::DEVICE_FEATURE_SELECT => state.select_device_features(value),
            common::DRIVER_FEATURE_SELECT => state.select_driver_features(value),
            common::DRIVER_FEATURE => state.set_driver_features(value),
            common::QUEUE_DESC | QUEUE_DESC_HIGH => {
                state.set_queue_address(QueueArea::Descriptors, half, value)
            }
            common::QUEUE_DRIVER | QUEUE_DRIVER_HIGH => {
                state.set_queue_address(QueueArea::Driver, half, value)
            }
            common::QUEUE_DEVICE | QUEUE_DEVICE_HIGH => {
                state.set_queue_address(QueueArea::Device, half, value)
            }
            _ => tracing::debug!("virtio-pci: write of {value:#x} to {offset:#x}: ignored"),
        }
    }
}

impl<M: DeviceMemory, D: Device> Registers for PciTransport<M, D> {
    type Memory = M;
    type Device = D;

    fn state(&mut self) -> &mut DeviceState<M, D> {
        &mut self.state
    }
}

/// Whether an access of `len` bytes at `offset` touches the register of `size` bytes at `register`.
fn overlaps(offset: u16, len: usize, register: usize, size: usize) -> bool {
    let start = usize::from(offset);
    start < register + size && register < start.saturating_add(len)
}

/// struct virtio_pci_cap (4.1.4) after its first two bytes.
fn virtio_capability(cfg_type: u8, bar: usize, offset: u32, len: u32, extra: &[u8]) -> Vec<u8> {
    let mut body = vec![(16 + extra.len()) as u8, cfg_type, bar as u8, 0, 0, 0];
    body.extend_from_slice(&offset.to_le_bytes());
    body.extend_from_slice(&len.to_le_bytes());
    body.extend_from_slice(extra);
    body
}
