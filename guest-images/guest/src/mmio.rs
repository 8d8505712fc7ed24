//! virtio over memory-mapped registers, version 2 (virtio 1.2, 4.2).

use crate::contract::BootInfo;
use crate::error::Error;
use crate::register::Registers;
use crate::transport::{Interrupts, Transport};

// Register offsets, 4.2.2.
const MAGIC: u64 = 0x00;
const VERSION: u64 = 0x04;
const DEVICE_ID: u64 = 0x08;
const DEVICE_FEATURES: u64 = 0x10;
const DEVICE_FEATURES_SELECT: u64 = 0x14;
const DRIVER_FEATURES: u64 = 0x20;
const DRIVER_FEATURES_SELECT: u64 = 0x24;
const QUEUE_SELECT: u64 = 0x30;
const QUEUE_SIZE_MAX: u64 = 0x34;
const QUEUE_SIZE: u64 = 0x38;
const QUEUE_READY: u64 = 0x44;
const QUEUE_NOTIFY: u64 = 0x50;
const INTERRUPT_STATUS: u64 = 0x60;
const INTERRUPT_ACK: u64 = 0x64;
const STATUS: u64 = 0x70;
const QUEUE_DESCRIPTORS: u64 = 0x80;
const QUEUE_DRIVER: u64 = 0x90;
const QUEUE_DEVICE: u64 = 0xa0;
const QUEUE_RESET: u64 = 0xc0;
const CONFIG_GENERATION: u64 = 0xfc;
const CONFIG: u64 = 0x100;

const MAGIC_VALUE: u32 = u32::from_le_bytes(*b"virt");
const VERSION_2: u32 = 2;
const BLOCK_DEVICE: u32 = 2;
const SLOT: u64 = 0x1000;

/// A block device behind virtio-mmio registers.
#[derive(Debug)]
pub struct Mmio {
    registers: Registers,
    /// Address of the registers.
    pub address: u64,
    /// Its interrupt line.
    pub gsi: u32,
}

impl Mmio {
    /// Looks for a block device in the slots that `info` names, and connects its interrupt.
    /// `registers` gives the registers at an address.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is none.
    pub fn find(
        info: &BootInfo,
        registers: impl Fn(u64) -> Registers,
        interrupts: &mut dyn Interrupts,
    ) -> Result<Self, Error> {
        for (slot, line) in (0..).zip(info.mmio_lines).filter(|&(_, line)| line != 0) {
            let address = info.mmio_base + slot * SLOT;
            let registers = registers(address);
            if registers.read32(MAGIC) == MAGIC_VALUE
                && registers.read32(VERSION) == VERSION_2
                && registers.read32(DEVICE_ID) == BLOCK_DEVICE
            {
                let gsi = u32::from(line);
                interrupts.connect_line(gsi);
                return Ok(Self {
                    registers,
                    address,
                    gsi,
                });
            }
        }
        Err(Error::NoDevice)
    }
}

impl Transport for Mmio {
    fn name(&self) -> &'static str {
        "mmio"
    }

    fn offered(&mut self, word: u32) -> u32 {
        self.registers.write32(DEVICE_FEATURES_SELECT, word);
        self.registers.read32(DEVICE_FEATURES)
    }

    fn accept(&mut self, word: u32, bits: u32) {
        self.registers.write32(DRIVER_FEATURES_SELECT, word);
        self.registers.write32(DRIVER_FEATURES, bits);
    }

    fn status(&mut self) -> u8 {
        self.registers.read32(STATUS) as u8
    }

    fn set_status(&mut self, status: u8) {
        self.registers.write32(STATUS, u32::from(status));
    }

    fn queue_max(&mut self, index: u16) -> u16 {
        self.registers.write32(QUEUE_SELECT, u32::from(index));
        u16::try_from(self.registers.read32(QUEUE_SIZE_MAX)).unwrap_or(0)
    }

    fn set_queue(&mut self, index: u16, size: u16, areas: [u64; 3]) -> Result<bool, Error> {
        self.registers.write32(QUEUE_SELECT, u32::from(index));
        self.registers.write32(QUEUE_SIZE, u32::from(size));
        let [descriptors, available, used] = areas;
        self.registers.write64(QUEUE_DESCRIPTORS, descriptors);
        self.registers.write64(QUEUE_DRIVER, available);
        self.registers.write64(QUEUE_DEVICE, used);
        self.registers.write32(QUEUE_READY, 1);
        Ok(self.registers.read32(QUEUE_READY) == 1)
    }

    fn queue_enabled(&mut self, index: u16) -> bool {
        self.registers.write32(QUEUE_SELECT, u32::from(index));
        self.registers.read32(QUEUE_READY) != 0
    }

    fn reset_queue(&mut self, index: u16) {
        self.registers.write32(QUEUE_SELECT, u32::from(index));
        self.registers.write32(QUEUE_RESET, 1);
    }

    fn queue_resetting(&mut self, index: u16) -> bool {
        self.registers.write32(QUEUE_SELECT, u32::from(index));
        self.registers.read32(QUEUE_RESET) != 0
    }

    fn control(&self) -> Registers {
        self.registers
    }

    fn space(&self) -> Registers {
        self.registers.at(CONFIG)
    }

    fn notify(&mut self, index: u16) {
        self.registers.write32(QUEUE_NOTIFY, u32::from(index));
    }

    fn acknowledge(&mut self) {
        // 4.2.3.4.1: the driver writes back the events that it has handled, so that the device can
        // tell new ones apart.
        let events = self.registers.read32(INTERRUPT_STATUS);
        if events != 0 {
            self.registers.write32(INTERRUPT_ACK, events);
        }
    }

    fn generation(&mut self) -> u32 {
        self.registers.read32(CONFIG_GENERATION)
    }
}
