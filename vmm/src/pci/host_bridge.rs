//! The host bridge, device 0. It has only an identity; drivers expect to find one.

use std::io;

use walvisor_devices::transport::{Bar, PciDoorbell};

use super::PciFunction;

/// Vendor 0x1b36, device 0x0008: the generic PCI Express host bridge.
const IDENTITY: [u8; 4] = [0x36, 0x1b, 0x08, 0x00];
/// Class code at 0x08: revision 0, host bridge (base class 6, sub-class 0).
const CLASS: [u8; 4] = [0, 0, 0, 6];

/// The host bridge.
pub struct HostBridge;

impl PciFunction for HostBridge {
    fn config_read(&mut self, offset: u16, data: &mut [u8]) {
        for (index, byte) in (usize::from(offset)..).zip(data) {
            *byte = match index {
                0..4 => IDENTITY[index],
                8..12 => CLASS[index - 8],
                _ => 0,
            };
        }
    }

    fn config_write(&mut self, _offset: u16, _data: &[u8]) {}

    fn bars(&self) -> Vec<Bar> {
        Vec::new()
    }

    fn set_bar(&mut self, _index: usize, _address: u64) {}

    fn bar_read(&mut self, _bar: usize, _offset: u64, data: &mut [u8]) {
        data.fill(0xff);
    }

    fn bar_write(&mut self, _bar: usize, _offset: u64, _data: &[u8]) {}

    fn doorbells(&self) -> io::Result<Vec<PciDoorbell>> {
        Ok(Vec::new())
    }
}
