//! Ports 0xcf8 to 0xcff: PCI configuration mechanism 1 (PCI 3.0, 3.2.2.3.2), and the reset control
//! register at 0xcf9, within the address register's ports.

use std::sync::Arc;

use super::PciBus;
use crate::arch::x86_64::layout;
use crate::bus::BusDevice;
use crate::control::{RunControl, RunEnd};

/// Set if the address register is valid.
const ENABLE: u32 = 1 << 31;
const RESET: u64 = (layout::RESET_PORT - layout::PCI_PORTS) as u64;
/// Offset of the data register.
const DATA: u64 = 4;
/// Bit of the reset control register that causes a reset when it changes to 1.
const RESET_CPU: u8 = 1 << 2;

/// The address and data register, and the reset control register.
pub struct ConfigPorts {
    bus: Arc<PciBus>,
    control: Arc<RunControl>,
    address: u32,
}

impl ConfigPorts {
    /// The ports of `bus`; a reset ends the run of `control`.
    pub fn new(bus: Arc<PciBus>, control: Arc<RunControl>) -> Self {
        Self {
            bus,
            control,
            address: 0,
        }
    }

    /// Device and register that an access at byte `byte` of the data register reaches; only bus 0,
    /// function 0 exists.
    fn target(&self, byte: u64) -> Option<(usize, u16)> {
        let address = self.address;
        let (bus, device, function) =
            (address >> 16 & 0xff, address >> 11 & 0x1f, address >> 8 & 7);
        (address & ENABLE != 0 && bus == 0 && function == 0)
            .then_some((device as usize, (address & 0xfc) as u16 + byte as u16))
    }
}

impl BusDevice for ConfigPorts {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0xff);
        match offset {
            0 if data.len() == 4 => data.copy_from_slice(&self.address.to_le_bytes()),
            DATA.. => {
                if let Some((device, register)) = self.target(offset - DATA) {
                    self.bus.config_read(device, register, data);
                }
            }
            _ => {}
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        match (offset, data) {
            (0, &[a, b, c, d]) => self.address = u32::from_le_bytes([a, b, c, d]),
            (RESET, &[value]) if value & RESET_CPU != 0 => self.control.end(RunEnd::Reset),
            (DATA.., _) => {
                if let Some((device, register)) = self.target(offset - DATA) {
                    self.bus.config_write(device, register, data);
                }
            }
            _ => {}
        }
    }
}
