//! The configuration space of a type 0 PCI function (PCI Local Bus 3.0, 6.1, 6.2.5 and 6.7).
//!
//! Each byte has a mask of the bits that software may write. That also covers BAR sizing: the bits
//! of a BAR below its size are read-only zeroes, so after a write of all ones it reads as the size
//! mask.

/// Length of the conventional configuration space in bytes.
const SPACE_LEN: usize = 256;
/// Offset of the first capability.
const FIRST_CAPABILITY: usize = 0x40;
const COMMAND: usize = 0x04;
const STATUS: usize = 0x06;
const BAR_0: usize = 0x10;
const CAPABILITIES_POINTER: usize = 0x34;
const INTERRUPT_LINE: usize = 0x3c;
/// Command register: memory space enable.
const COMMAND_MEMORY: u8 = 1 << 1;
/// Status register: an INTx interrupt is pending.
const STATUS_INTERRUPT: u8 = 1 << 3;
/// Status register: the function has a capability list.
const STATUS_CAPABILITIES: u8 = 1 << 4;

/// The identifying registers of a function.
pub(super) struct Identity {
    pub(super) vendor: u16,
    pub(super) device: u16,
    pub(super) revision: u8,
    /// Base class, sub-class and programming interface, 24 bits.
    pub(super) class: u32,
    pub(super) subsystem_vendor: u16,
    pub(super) subsystem: u16,
}

/// The 256 bytes of registers.
pub(super) struct PciConfig {
    registers: [u8; SPACE_LEN],
    writable: [u8; SPACE_LEN],
    bar_sizes: [u32; 6],
    /// Where the pointer to the next capability goes.
    link: usize,
    next_capability: usize,
}

impl PciConfig {
    pub(super) fn new(identity: &Identity) -> Self {
        let mut config = Self {
            registers: [0; SPACE_LEN],
            writable: [0; SPACE_LEN],
            bar_sizes: [0; 6],
            link: CAPABILITIES_POINTER,
            next_capability: FIRST_CAPABILITY,
        };
        config.set(0x00, &identity.vendor.to_le_bytes());
        config.set(0x02, &identity.device.to_le_bytes());
        config.set(0x08, &[identity.revision]);
        config.set(0x09, &identity.class.to_le_bytes()[..3]);
        config.set(0x2c, &identity.subsystem_vendor.to_le_bytes());
        config.set(0x2e, &identity.subsystem.to_le_bytes());
        // Memory space, bus master, interrupt disable. There is no I/O space and no INTx.
        config.writable[COMMAND] = COMMAND_MEMORY | 1 << 2;
        config.writable[COMMAND + 1] = 1 << 2;
        config.writable[INTERRUPT_LINE] = 0xff;
        config
    }

    /// Adds a 32-bit memory BAR. `size` is a power of two, at least 16.
    pub(super) fn add_bar(&mut self, index: usize, size: u32) {
        debug_assert!(size.is_power_of_two() && size >= 16);
        self.bar_sizes[index] = size;
        let at = BAR_0 + index * 4;
        self.writable[at..at + 4].copy_from_slice(&(!(size - 1)).to_le_bytes());
    }

    /// Appends a capability: its ID, then `body`. `writable` masks the bits of the body that
    /// software may write; bytes beyond the mask are read-only. Returns the capability's offset.
    pub(super) fn add_capability(&mut self, id: u8, body: &[u8], writable: &[u8]) -> usize {
        let at = self.next_capability;
        self.set(self.link, &[at as u8]);
        self.set(STATUS, &[STATUS_CAPABILITIES]);
        self.set(at, &[id, 0]);
        self.set(at + 2, body);
        self.writable[at + 2..at + 2 + writable.len()].copy_from_slice(writable);
        self.link = at + 1;
        self.next_capability = (at + 2 + body.len()).next_multiple_of(4);
        at
    }

    /// Sets registers, even those that software may not write.
    pub(super) fn set(&mut self, offset: usize, bytes: &[u8]) {
        self.registers[offset..offset + bytes.len()].copy_from_slice(bytes);
    }

    /// Interrupt Status, bit 3 of the Status register.
    pub(super) fn set_interrupt_status(&mut self, asserted: bool) {
        let others = self.registers[STATUS] & !STATUS_INTERRUPT;
        self.registers[STATUS] = others | if asserted { STATUS_INTERRUPT } else { 0 };
    }

    /// The two bytes at `offset`.
    pub(super) fn u16_at(&self, offset: usize) -> u16 {
        u16::from_le_bytes([self.registers[offset], self.registers[offset + 1]])
    }

    /// The four bytes at `offset`.
    pub(super) fn u32_at(&self, offset: usize) -> u32 {
        u32::from(self.u16_at(offset)) | u32::from(self.u16_at(offset + 2)) << 16
    }

    /// A read by software. Zeroes beyond the end, because the function has no extended
    /// configuration space.
    pub(super) fn read(&self, offset: u16, data: &mut [u8]) {
        for (at, byte) in (usize::from(offset)..).zip(data) {
            *byte = self.registers.get(at).copied().unwrap_or(0);
        }
    }

    /// A write by software. Only writable bits change.
    pub(super) fn write(&mut self, offset: u16, data: &[u8]) {
        for (at, &byte) in (usize::from(offset)..).zip(data) {
            if let (Some(register), Some(&mask)) =
                (self.registers.get_mut(at), self.writable.get(at))
            {
                *register = *register & !mask | byte & mask;
            }
        }
    }

    /// Sets a BAR's address, as firmware does. Bits below its size are dropped.
    pub(super) fn set_bar(&mut self, index: usize, address: u32) {
        self.write((BAR_0 + index * 4) as u16, &address.to_le_bytes());
    }

    /// A BAR's address; the flags of a 32-bit, non-prefetchable memory BAR are all zero.
    pub(super) fn bar_address(&self, index: usize) -> u32 {
        self.u32_at(BAR_0 + index * 4)
    }

    /// A BAR's size in bytes; 0 if the BAR does not exist.
    pub(super) fn bar_size(&self, index: usize) -> u32 {
        self.bar_sizes.get(index).copied().unwrap_or(0)
    }

    /// Whether the function decodes its BARs' addresses.
    pub(super) fn memory_enabled(&self) -> bool {
        self.registers[COMMAND] & COMMAND_MEMORY != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn function() -> PciConfig {
        let mut config = PciConfig::new(&Identity {
            vendor: 0x1af4,
            device: 0x1042,
            revision: 1,
            class: 0x01_8000,
            subsystem_vendor: 0x1af4,
            subsystem: 0x1100,
        });
        config.add_bar(0, 0x4000);
        config
    }

    #[test]
    fn all_ones_in_a_bar_read_back_as_its_size() {
        let mut config = function();
        config.write(0x10, &u32::MAX.to_le_bytes());
        assert_eq!(config.u32_at(0x10), !(0x4000 - 1));
        config.write(0x14, &u32::MAX.to_le_bytes());
        assert_eq!(
            config.u32_at(0x14),
            0,
            "a BAR that does not exist reads as zero"
        );
        config.set_bar(0, 0xc000_4123);
        assert_eq!(config.bar_address(0), 0xc000_4000);
    }

    #[test]
    fn the_identity_is_read_only_and_any_width_works() {
        let mut config = function();
        config.write(0, &[0xff; SPACE_LEN]);
        assert_eq!(config.u32_at(0), 0x1042_1af4);
        assert_eq!(config.u32_at(8), 0x0180_0001);
        let mut bytes = [0xaa; 3];
        config.read(0x09, &mut bytes);
        assert_eq!(bytes, [0x00, 0x80, 0x01]);
        let mut end = [0xaa; 4];
        config.read(0xfe, &mut end);
        assert_eq!(end, [0; 4]);
        config.write(0xfffe, &[1; 8]);
    }

    #[test]
    fn capabilities_are_linked() {
        let mut config = function();
        assert_eq!(config.u16_at(STATUS) & 0x10, 0);
        let first = config.add_capability(0x09, &[1, 2, 3], &[]);
        let second = config.add_capability(0x11, &[4, 5], &[0, 0xff]);
        assert_eq!(config.u16_at(STATUS) & 0x10, 0x10);
        assert_eq!(usize::from(config.registers[CAPABILITIES_POINTER]), first);
        assert_eq!(usize::from(config.registers[first + 1]), second);
        assert_eq!(config.registers[second + 1], 0);
        config.write(second as u16, &[0; 4]);
        assert_eq!(config.registers[second..second + 4], [0x11, 0, 4, 0]);
    }
}
