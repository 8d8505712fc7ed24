//! virtio over PCI (virtio 1.2, 4.1): the function, its BARs, MSI-X.
//!
//! ```text
//!   ECAM ─▶ function 1af4:1042 ─▶ capabilities ─▶ BAR + offset of common, notify, isr, device config
//!                                              └▶ MSI-X table: one vector a queue
//! ```

pub mod capability;

use crate::contract::BootInfo;
use crate::error::Error;
use crate::pci::capability::{Capabilities, ConfigSpace, Location};
use crate::register::Registers;
use crate::transport::status::ACKNOWLEDGE;
use crate::transport::{Interrupts, Transport};

// Configuration space header, PCI 3.0, 6.1.
const VENDOR: u64 = 0x00;
const DEVICE: u64 = 0x02;
const COMMAND: u64 = 0x04;
const BAR0: u64 = 0x10;
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_BUS_MASTER: u16 = 1 << 2;
const COMMAND_NO_INTX: u16 = 1 << 10;
const BAR_IO: u32 = 1;
const BAR_64: u32 = 0b100;
const BAR_FLAGS: u32 = 0xf;

const VIRTIO: u16 = 0x1af4;
const BLOCK_DEVICE: u16 = 0x1042;
const ABSENT: u16 = 0xffff;

const DEVICES: u64 = 32;
const DEVICE_STRIDE: u64 = 1 << 15;

// Common configuration, 4.1.4.3.
const DEVICE_FEATURE_SELECT: u64 = 0x00;
const DEVICE_FEATURE: u64 = 0x04;
const DRIVER_FEATURE_SELECT: u64 = 0x08;
const DRIVER_FEATURE: u64 = 0x0c;
const CONFIG_VECTOR: u64 = 0x10;
const STATUS: u64 = 0x14;
const GENERATION: u64 = 0x15;
const QUEUE_SELECT: u64 = 0x16;
const QUEUE_SIZE: u64 = 0x18;
const QUEUE_VECTOR: u64 = 0x1a;
const QUEUE_ENABLE: u64 = 0x1c;
const QUEUE_NOTIFY_OFF: u64 = 0x1e;
const QUEUE_DESCRIPTORS: u64 = 0x20;
const QUEUE_DRIVER: u64 = 0x28;
const QUEUE_DEVICE: u64 = 0x30;
const QUEUE_RESET: u64 = 0x3a;
const NO_VECTOR: u16 = 0xffff;

// MSI-X, PCI 3.0, 6.8.2: a table entry is address, data, control.
const MSIX_CONTROL: u64 = 2;
const MSIX_ENABLE: u16 = 1 << 15;
const MSIX_ENTRY: u64 = 16;
const MSIX_MASK: u64 = 12;

/// Most queues whose doorbells this driver remembers.
const MAX_QUEUES: usize = 16;

/// A block device on PCI bus 0.
#[derive(Debug)]
pub struct Pci {
    /// Its device number.
    pub device: u64,
    /// Vectors of its MSI-X table.
    pub vectors: u16,
    common: Registers,
    config: Registers,
    notify: Registers,
    table: Registers,
    pending: Registers,
    notify_multiplier: u32,
    doorbells: [u64; MAX_QUEUES],
}

impl ConfigSpace for Registers {
    fn read8(&self, offset: u8) -> u8 {
        Registers::read8(self, u64::from(offset))
    }

    fn read32(&self, offset: u8) -> u32 {
        Registers::read32(self, u64::from(offset))
    }
}

impl Pci {
    /// Looks for a block device on bus 0, enables its memory BARs and its MSI-X, and gives each
    /// vector a message of its own. `registers` gives the registers at an address.
    ///
    /// # Errors
    /// [`Error::NoDevice`] if there is no block device, [`Error::Pci`] if it is not a complete
    /// virtio function.
    pub fn find(
        info: &BootInfo,
        registers: impl Fn(u64) -> Registers,
        interrupts: &mut dyn Interrupts,
    ) -> Result<Self, Error> {
        let bus = registers(info.ecam);
        let (device, function) = (0..DEVICES)
            .map(|device| (device, bus.at(device * DEVICE_STRIDE)))
            .find(|(_, function)| {
                let vendor = function.read16(VENDOR);
                vendor != ABSENT && vendor == VIRTIO && function.read16(DEVICE) == BLOCK_DEVICE
            })
            .ok_or(Error::NoDevice)?;
        let capabilities = Capabilities::read(&function)?;

        let command = COMMAND_MEMORY | COMMAND_BUS_MASTER | COMMAND_NO_INTX;
        function.write16(COMMAND, function.read16(COMMAND) | command);
        let map = |location: Location| {
            let address = bar_address(&function, location.bar)?;
            Ok(registers(address + u64::from(location.offset)))
        };

        let table = map(capabilities.msix_table)?;
        let vectors = capabilities.msix_vectors;
        for vector in 0..vectors.min(MAX_QUEUES as u16 + 1) {
            let (address, data) = interrupts.message(vector)?;
            let entry = table.at(u64::from(vector) * MSIX_ENTRY);
            entry.write64(0, address);
            entry.write32(8, data);
            entry.write32(MSIX_MASK, 0);
        }
        let msix = function.at(u64::from(capabilities.msix));
        msix.write16(MSIX_CONTROL, MSIX_ENABLE);

        let common = map(capabilities.common)?;
        common.write16(CONFIG_VECTOR, 0);
        if common.read16(CONFIG_VECTOR) == NO_VECTOR {
            return Err(Error::Pci("no vector for configuration changes"));
        }
        Ok(Self {
            device,
            vectors,
            common,
            config: map(capabilities.device)?,
            table,
            pending: map(capabilities.msix_pending)?,
            notify: map(capabilities.notify)?,
            notify_multiplier: capabilities.notify_multiplier,
            doorbells: [0; MAX_QUEUES],
        })
    }
}

/// Where BAR number `index` lies.
fn bar_address(function: &Registers, index: u8) -> Result<u64, Error> {
    let bar = function.at(BAR0 + u64::from(index) * 4);
    let low = bar.read32(0);
    if low & BAR_IO != 0 {
        return Err(Error::Pci("a structure lies in an I/O BAR"));
    }
    // A 64-bit BAR takes two slots, so it cannot begin in the last slot.
    let high = match low & BAR_64 {
        0 => 0,
        _ if index < 5 => bar.read32(4),
        _ => return Err(Error::Pci("a 64-bit BAR in the last slot")),
    };
    match u64::from(low & !BAR_FLAGS) | u64::from(high) << 32 {
        0 => Err(Error::Pci("a BAR has no address")),
        address => Ok(address),
    }
}

/// The interrupt vector of queue `index`. Vector 0 is for configuration changes. With too few
/// vectors, queues share the last one.
fn vector_of(index: u16, vectors: u16) -> u16 {
    (index + 1).min(vectors.saturating_sub(1))
}

impl Transport for Pci {
    fn name(&self) -> &'static str {
        "pci"
    }

    fn offered(&mut self, word: u32) -> u32 {
        self.common.write32(DEVICE_FEATURE_SELECT, word);
        self.common.read32(DEVICE_FEATURE)
    }

    fn accept(&mut self, word: u32, bits: u32) {
        self.common.write32(DRIVER_FEATURE_SELECT, word);
        self.common.write32(DRIVER_FEATURE, bits);
    }

    fn status(&mut self) -> u8 {
        self.common.read8(STATUS)
    }

    fn set_status(&mut self, status: u8) {
        self.common.write8(STATUS, status);
        if status == ACKNOWLEDGE {
            // The reset cleared the vector of configuration changes.
            self.common.write16(CONFIG_VECTOR, 0);
        }
        // 4.1.4.3.2: after a reset the driver waits until the status reads 0.
        while status == 0 && self.common.read8(STATUS) != 0 {}
    }

    fn queue_max(&mut self, index: u16) -> u16 {
        self.common.write16(QUEUE_SELECT, index);
        self.common.read16(QUEUE_SIZE)
    }

    fn set_queue(&mut self, index: u16, size: u16, areas: [u64; 3]) -> Result<bool, Error> {
        let doorbell = self.doorbells.get_mut(usize::from(index));
        let doorbell = doorbell.ok_or(Error::Queue {
            index,
            what: "more queues than expected",
        })?;
        let common = &self.common;
        common.write16(QUEUE_SELECT, index);
        common.write16(QUEUE_SIZE, size);
        let vector = vector_of(index, self.vectors);
        common.write16(QUEUE_VECTOR, vector);
        if common.read16(QUEUE_VECTOR) == NO_VECTOR {
            return Err(Error::Queue {
                index,
                what: "no vector",
            });
        }
        let [descriptors, available, used] = areas;
        common.write64(QUEUE_DESCRIPTORS, descriptors);
        common.write64(QUEUE_DRIVER, available);
        common.write64(QUEUE_DEVICE, used);
        let offset = common.read16(QUEUE_NOTIFY_OFF);
        *doorbell = u64::from(offset) * u64::from(self.notify_multiplier);
        common.write16(QUEUE_ENABLE, 1);
        Ok(common.read16(QUEUE_ENABLE) == 1)
    }

    fn queue_enabled(&mut self, index: u16) -> bool {
        self.common.write16(QUEUE_SELECT, index);
        self.common.read16(QUEUE_ENABLE) != 0
    }

    fn reset_queue(&mut self, index: u16) {
        self.common.write16(QUEUE_SELECT, index);
        self.common.write16(QUEUE_RESET, 1);
    }

    fn queue_resetting(&mut self, index: u16) -> bool {
        self.common.write16(QUEUE_SELECT, index);
        self.common.read16(QUEUE_RESET) != 0
    }

    fn mask_queue(&mut self, index: u16, masked: bool) -> bool {
        let entry = u64::from(vector_of(index, self.vectors)) * MSIX_ENTRY;
        self.table.write32(entry + MSIX_MASK, u32::from(masked));
        true
    }

    fn queue_pending(&mut self, index: u16) -> bool {
        let vector = u64::from(vector_of(index, self.vectors));
        self.pending.read32(vector / 32 * 4) >> (vector % 32) & 1 != 0
    }

    fn control(&self) -> Registers {
        self.common
    }

    fn space(&self) -> Registers {
        self.config
    }

    fn notify(&mut self, index: u16) {
        if let Some(&offset) = self.doorbells.get(usize::from(index)) {
            self.notify.write16(offset, index);
        }
    }

    fn acknowledge(&mut self) {
        // MSI-X has no interrupt status to read or to acknowledge.
    }

    fn generation(&mut self) -> u32 {
        u32::from(self.common.read8(GENERATION))
    }
}
