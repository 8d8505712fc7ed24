//! A bus: address ranges and the devices behind them, for ports and for memory-mapped registers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

/// A device that answers register accesses. An access is 1, 2, 4 or 8 bytes, little-endian.
pub trait BusDevice: Send {
    /// Answers a read at `offset` from the start of the range by filling `data`.
    fn read(&mut self, offset: u64, data: &mut [u8]);
    /// Carries out a write of `data` at `offset` from the start of the range.
    fn write(&mut self, offset: u64, data: &[u8]);
}

/// A device on a bus, shared by the vCPU threads.
pub type SharedDevice = Arc<Mutex<dyn BusDevice>>;

/// Two ranges overlap.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the range at {base:#x} overlaps another device or is empty")]
pub struct Overlap {
    base: u64,
}

/// Address ranges and the devices behind them. A bus does not change while the guest runs.
#[derive(Default)]
pub struct Bus {
    /// Length and device of each range, by first address.
    ranges: BTreeMap<u64, (u64, SharedDevice)>,
}

impl Bus {
    /// An empty bus.
    pub fn new() -> Self {
        Self::default()
    }

    /// Puts `device` at `length` bytes, starting at `base`.
    ///
    /// # Errors
    /// If the range is empty, wraps around or overlaps another one.
    pub fn insert(&mut self, base: u64, length: u64, device: SharedDevice) -> Result<(), Overlap> {
        let end = base
            .checked_add(length)
            .filter(|end| *end > base)
            .ok_or(Overlap { base })?;
        let below = self.ranges.range(..end).next_back();
        if below.is_some_and(|(start, (length, _))| start + length > base) {
            return Err(Overlap { base });
        }
        self.ranges.insert(base, (length, device));
        Ok(())
    }

    /// The device whose range holds all of the `length` bytes at `address`, and the offset into it.
    fn find(&self, address: u64, length: usize) -> Option<(u64, &SharedDevice)> {
        let (base, (size, device)) = self.ranges.range(..=address).next_back()?;
        let offset = address - base;
        let end = offset.checked_add(length as u64)?;
        (end <= *size).then_some((offset, device))
    }

    /// Reads at `address`. Returns `false`, and leaves `data` as it was, if there is no device.
    pub fn read(&self, address: u64, data: &mut [u8]) -> bool {
        let Some((offset, device)) = self.find(address, data.len()) else {
            return false;
        };
        device.lock().expect("a device panicked").read(offset, data);
        true
    }

    /// Writes at `address`. Returns `false` if there is no device.
    pub fn write(&self, address: u64, data: &[u8]) -> bool {
        let Some((offset, device)) = self.find(address, data.len()) else {
            return false;
        };
        device
            .lock()
            .expect("a device panicked")
            .write(offset, data);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A device that stores the bytes written to it.
    struct Registers([u8; 16]);

    impl BusDevice for Registers {
        fn read(&mut self, offset: u64, data: &mut [u8]) {
            let offset = offset as usize;
            data.copy_from_slice(&self.0[offset..offset + data.len()]);
        }
        fn write(&mut self, offset: u64, data: &[u8]) {
            let offset = offset as usize;
            self.0[offset..offset + data.len()].copy_from_slice(data);
        }
    }

    fn registers() -> SharedDevice {
        Arc::new(Mutex::new(Registers([0; 16])))
    }

    #[test]
    fn an_access_reaches_its_device_and_no_other() {
        let mut bus = Bus::new();
        bus.insert(0x1000, 16, registers()).unwrap();
        bus.insert(0x1010, 16, registers()).unwrap();
        assert!(bus.write(0x1014, &[1, 2]));
        let mut data = [9; 2];
        assert!(bus.read(0x1004, &mut data));
        assert_eq!(data, [0, 0]);
        assert!(bus.read(0x1014, &mut data));
        assert_eq!(data, [1, 2]);
    }

    #[test]
    fn an_access_outside_a_range_or_across_its_end_finds_no_device() {
        let mut bus = Bus::new();
        bus.insert(0x1000, 16, registers()).unwrap();
        let mut data = [9; 4];
        for address in [0, 0xfff, 0x100d, 0x1010, u64::MAX - 1] {
            assert!(!bus.read(address, &mut data), "{address:#x}");
            assert!(!bus.write(address, &data), "{address:#x}");
        }
        assert_eq!(data, [9; 4]);
    }

    #[test]
    fn overlapping_and_empty_ranges_are_refused() {
        let mut bus = Bus::new();
        bus.insert(0x1000, 16, registers()).unwrap();
        for (base, length) in [
            (0x1000, 16),
            (0xff8, 9),
            (0x100f, 1),
            (0x800, 0x2000),
            (0x2000, 0),
            (u64::MAX, 2),
        ] {
            assert!(bus.insert(base, length, registers()).is_err(), "{base:#x}");
        }
        bus.insert(0xff0, 16, registers()).unwrap();
        bus.insert(0x1010, 1, registers()).unwrap();
    }
}
