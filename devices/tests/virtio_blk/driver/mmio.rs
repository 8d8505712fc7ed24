//! Registers over virtio-mmio.

use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use walvisor_devices::block::VirtioBlock;
use walvisor_devices::control::ControlTransport;
use walvisor_devices::transport::{Device, MmioTransport};

use super::{Memory, Registers};

/// What the VMM does with a device over MMIO.
pub trait OwnedTransport {
    fn control(&mut self) -> &mut dyn ControlTransport;
}

impl OwnedTransport for MmioTransport<Memory, VirtioBlock> {
    fn control(&mut self) -> &mut dyn ControlTransport {
        self
    }
}

/// A virtio-mmio driver.
pub struct MmioDriver<D: Device = VirtioBlock> {
    pub transport: MmioTransport<Memory, D>,
    irq: EventFd,
    config_interrupts: u64,
    queue_interrupts: u64,
}

impl<D: Device> MmioDriver<D> {
    pub fn new(device: D, memory: Memory) -> Self {
        let irq = EventFd::new(EFD_NONBLOCK).expect("an eventfd");
        let transport = MmioTransport::new(device, memory, irq.try_clone().expect("an eventfd"));
        let mut driver = Self {
            transport,
            irq,
            config_interrupts: 0,
            queue_interrupts: 0,
        };
        assert_eq!(driver.get(0x000), u32::from_le_bytes(*b"virt"));
        assert_eq!(driver.get(0x004), 2);
        assert!(
            matches!(driver.get(0x008), 1 | 2 | 8),
            "a network device, a disk, or a SCSI target"
        );
        driver
    }

    pub fn get(&mut self, register: u64) -> u32 {
        let mut bytes = [0; 4];
        self.transport.read(register, &mut bytes);
        u32::from_le_bytes(bytes)
    }

    pub fn set(&mut self, register: u64, value: u32) {
        self.transport.write(register, &value.to_le_bytes());
    }

    /// Edges of the interrupt line since the last call.
    pub fn take_edges(&mut self) -> u64 {
        self.irq.read().unwrap_or(0)
    }

    /// Acts as the interrupt handler: one edge may stand for both causes.
    fn handle_interrupts(&mut self) {
        let edges = self.take_edges();
        if edges == 0 {
            return;
        }
        let causes = self.get(0x60);
        self.set(0x64, causes);
        let config = u64::from(causes & 2 != 0);
        self.config_interrupts += config;
        self.queue_interrupts += if causes & 1 != 0 { edges - config } else { 0 };
    }
}

impl<D: Device> Registers for MmioDriver<D>
where
    MmioTransport<Memory, D>: OwnedTransport,
{
    fn device_features(&mut self) -> u64 {
        self.set(0x14, 1);
        let high = self.get(0x10);
        self.set(0x14, 0);
        u64::from(high) << 32 | u64::from(self.get(0x10))
    }

    fn set_driver_features(&mut self, features: u64) {
        self.set(0x24, 1);
        self.set(0x20, (features >> 32) as u32);
        self.set(0x24, 0);
        self.set(0x20, features as u32);
    }

    fn status(&mut self) -> u8 {
        self.get(0x70) as u8
    }

    fn set_status(&mut self, status: u8) {
        self.set(0x70, status.into());
    }

    fn generation(&mut self) -> u32 {
        self.get(0xfc)
    }

    fn read_config(&mut self, offset: u64, data: &mut [u8]) {
        self.transport.read(0x100 + offset, data);
    }

    fn write_config(&mut self, offset: u64, data: &[u8]) {
        self.transport.write(0x100 + offset, data);
    }

    fn queue_max(&mut self, queue: u16) -> u16 {
        self.set(0x30, queue.into());
        self.get(0x34) as u16
    }

    fn set_queue(&mut self, queue: u16, size: u16, addresses: [u64; 3]) {
        self.set(0x30, queue.into());
        assert_eq!(self.get(0x44), 0, "queue {queue} is in use");
        self.set(0x38, size.into());
        for (register, address) in [0x80, 0x90, 0xa0].into_iter().zip(addresses) {
            self.set(register, address as u32);
            self.set(register + 4, (address >> 32) as u32);
        }
        self.set(0x44, 1);
        assert_eq!(self.get(0x44), 1);
    }

    fn reset_queue(&mut self, queue: u16) {
        self.set(0x30, queue.into());
        self.set(0xc0, 1);
    }

    fn queue_resetting(&mut self, queue: u16) -> bool {
        self.set(0x30, queue.into());
        self.get(0xc0) != 0
    }

    fn enable_queue(&mut self, queue: u16) {
        self.set(0x30, queue.into());
        self.set(0x44, 1);
    }

    fn disable_queue(&mut self, queue: u16) {
        self.set(0x30, queue.into());
        self.set(0x44, 0);
        assert_eq!(self.get(0x44), 0);
    }

    fn queue_enabled(&mut self, queue: u16) -> bool {
        self.set(0x30, queue.into());
        self.get(0x44) != 0
    }

    fn notify(&mut self, queue: u16) {
        self.set(0x50, queue.into());
    }

    fn doorbells(&self) -> Vec<EventFd> {
        self.transport.doorbells().expect("doorbells")
    }

    fn take_queue_interrupts(&mut self, _queue: u16) -> u64 {
        self.handle_interrupts();
        std::mem::take(&mut self.queue_interrupts)
    }

    fn take_config_interrupts(&mut self) -> u64 {
        self.handle_interrupts();
        std::mem::take(&mut self.config_interrupts)
    }

    fn capacity_changed(&mut self) {
        self.transport.control().capacity_changed();
    }

    fn pause(&mut self) {
        self.transport.control().pause();
    }

    fn resume(&mut self) {
        self.transport.control().resume();
    }

    fn set_write_cache(&mut self, on: bool) -> bool {
        self.transport.control().set_write_cache(on)
    }
}
