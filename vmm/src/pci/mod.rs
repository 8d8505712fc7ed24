//! PCI: one bus with a host bridge, reached through ECAM and through configuration mechanism 1.
//!
//! ```text
//!   ECAM 0xe000_0000 ───────┐
//!   ports 0xcf8/0xcfc ──────┴▶ PciBus ─▶ function: configuration space ──▶ BARs moved? new map, new ioeventfds
//!   memory access ───────────▶ map of the functions' current BARs ─▶ function: BAR access
//! ```
//!
//! There are no interrupt pins: functions use MSI-X.

mod config_ports;
mod host_bridge;
#[cfg(test)]
mod tests;

use std::io;
use std::sync::{Arc, Mutex, RwLock};

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vmm_sys_util::eventfd::EventFd;

pub use config_ports::ConfigPorts;
pub use host_bridge::HostBridge;

use walvisor_devices::transport::{Bar, PciDoorbell};

use crate::arch::x86_64::layout;
use crate::bus::BusDevice;
use crate::disk::Notifications;

/// Devices on a bus.
pub const DEVICES: usize = 32;
/// End of the part of the configuration space that holds the command register and the BARs (PCI
/// 3.0, 6.1).
const HEADER_END: u16 = 0x40;

/// A PCI function.
pub trait PciFunction: Send {
    /// Reads the configuration space (4096 bytes) at `offset`, at most 8 bytes within it.
    fn config_read(&mut self, offset: u16, data: &mut [u8]);
    /// Writes the configuration space.
    fn config_write(&mut self, offset: u16, data: &[u8]);
    /// The memory BARs with their current addresses.
    fn bars(&self) -> Vec<Bar>;
    /// Sets the address of a BAR.
    fn set_bar(&mut self, index: usize, address: u64);
    /// Reads at `offset` of BAR `bar`.
    fn bar_read(&mut self, bar: usize, offset: u64, data: &mut [u8]);
    /// Writes at `offset` of BAR `bar`.
    fn bar_write(&mut self, bar: usize, offset: u64, data: &[u8]);
    /// The registers whose writes only signal an eventfd.
    ///
    /// # Errors
    /// If the system refuses a descriptor.
    fn doorbells(&self) -> io::Result<Vec<PciDoorbell>>;
}

/// A function, shared by the vCPU threads and its owner.
pub type SharedFunction = Arc<Mutex<dyn PciFunction>>;

/// Why a function could not be added.
#[derive(Debug, thiserror::Error)]
pub enum PciError {
    /// All 32 devices are taken.
    #[error("too many PCI devices: the bus holds {DEVICES}, host bridge included; use fewer disks")]
    Full,
    /// The BARs do not fit the window.
    #[error("the PCI memory window is full: use fewer disks")]
    WindowFull,
    /// An eventfd or its registration failed.
    #[error("a PCI doorbell cannot be registered: {0}")]
    Doorbell(#[from] io::Error),
}

/// A function on the bus, and its state in KVM.
struct Slot {
    function: SharedFunction,
    doorbells: Vec<PciDoorbell>,
    /// The BARs as the map and the ioeventfds have them. Locked throughout a change.
    applied: Mutex<Vec<Bar>>,
}

/// A range of memory addresses that a BAR decodes.
struct Mapping {
    address: u64,
    size: u64,
    slot: usize,
    bar: usize,
}

/// The one PCI bus.
pub struct PciBus {
    vm: Arc<VmFd>,
    slots: RwLock<Vec<Slot>>,
    map: RwLock<Vec<Mapping>>,
    next_address: Mutex<u64>,
}

impl PciBus {
    /// A bus with a host bridge as device 0.
    pub fn new(vm: Arc<VmFd>) -> Self {
        let bridge = Slot {
            function: Arc::new(Mutex::new(HostBridge)),
            doorbells: Vec::new(),
            applied: Mutex::new(Vec::new()),
        };
        Self {
            vm,
            slots: RwLock::new(vec![bridge]),
            map: RwLock::new(Vec::new()),
            next_address: Mutex::new(layout::PCI_WINDOW),
        }
    }

    /// Adds `function` as the next device, gives its BARs addresses, and returns its device number.
    /// Without eventfds no doorbell is registered with KVM, and each doorbell exits to
    /// [`memory_write`](Self::memory_write).
    ///
    /// # Errors
    /// If the bus or the memory window is full, or a doorbell cannot be registered.
    pub fn add(
        &self,
        function: SharedFunction,
        notifications: Notifications,
    ) -> Result<u8, PciError> {
        let mut slots = self.slots.write().expect("a thread panicked in PciBus");
        if slots.len() == DEVICES {
            return Err(PciError::Full);
        }
        let doorbells = {
            let mut function = function.lock().expect("a device panicked");
            for bar in function.bars() {
                function.set_bar(bar.index, self.allocate(bar.size)?);
            }
            match notifications {
                Notifications::Eventfds => function.doorbells()?,
                Notifications::Exits => Vec::new(),
            }
        };
        let number = slots.len();
        slots.push(Slot {
            function,
            doorbells,
            applied: Mutex::new(Vec::new()),
        });
        self.apply(number, &slots[number]);
        Ok(number as u8)
    }

    /// Allocates the next naturally aligned `size` bytes of the window; `size` is a power of two
    /// (PCI 3.0, 6.2.5.1).
    fn allocate(&self, size: u64) -> Result<u64, PciError> {
        let mut next = self
            .next_address
            .lock()
            .expect("a thread panicked in PciBus");
        let address = next.next_multiple_of(size.max(0x1000));
        let end = address.checked_add(size).ok_or(PciError::WindowFull)?;
        if end > layout::PCI_WINDOW + layout::PCI_WINDOW_SIZE {
            return Err(PciError::WindowFull);
        }
        *next = end;
        Ok(address)
    }

    /// Reads the configuration space of device `device`, function 0. Reads all ones if there is no
    /// such device.
    pub fn config_read(&self, device: usize, offset: u16, data: &mut [u8]) {
        let slots = self.slots.read().expect("a thread panicked in PciBus");
        match slots.get(device) {
            Some(slot) => {
                slot.function
                    .lock()
                    .expect("a device panicked")
                    .config_read(offset, data);
            }
            None => data.fill(0xff),
        }
    }

    /// Writes the configuration space of device `device`, function 0, and applies changes of its
    /// BARs.
    pub fn config_write(&self, device: usize, offset: u16, data: &[u8]) {
        let slots = self.slots.read().expect("a thread panicked in PciBus");
        let Some(slot) = slots.get(device) else {
            return;
        };
        slot.function
            .lock()
            .expect("a device panicked")
            .config_write(offset, data);
        if offset < HEADER_END {
            self.apply(device, slot);
        }
    }

    /// Makes the map and the ioeventfds match the BARs of a function.
    fn apply(&self, number: usize, slot: &Slot) {
        let mut applied = slot.applied.lock().expect("a thread panicked in PciBus");
        let bars = slot.function.lock().expect("a device panicked").bars();
        if bars == *applied {
            return;
        }
        for old in applied
            .iter()
            .filter(|old| old.enabled && !bars.contains(old))
        {
            self.each_doorbell(slot, old, |event, address| {
                self.vm.unregister_ioevent(event, address, NoDatamatch)
            });
        }
        {
            let mut map = self.map.write().expect("a thread panicked in PciBus");
            map.retain(|mapping| mapping.slot != number);
            map.extend(bars.iter().filter(|bar| bar.enabled).map(|bar| Mapping {
                address: bar.address,
                size: bar.size,
                slot: number,
                bar: bar.index,
            }));
        }
        for new in bars
            .iter()
            .filter(|new| new.enabled && !applied.contains(new))
        {
            self.each_doorbell(slot, new, |event, address| {
                self.vm.register_ioevent(event, address, NoDatamatch)
            });
        }
        *applied = bars;
    }

    /// Calls `change` for each doorbell in `bar`. If KVM refuses one, the only loss is speed: its
    /// accesses exit to user space.
    fn each_doorbell(
        &self,
        slot: &Slot,
        bar: &Bar,
        change: impl Fn(&EventFd, &IoEventAddress) -> Result<(), kvm_ioctls::Error>,
    ) {
        for doorbell in slot
            .doorbells
            .iter()
            .filter(|doorbell| doorbell.bar == bar.index)
        {
            let Some(address) = bar.address.checked_add(doorbell.offset) else {
                continue;
            };
            if let Err(error) = change(&doorbell.event, &IoEventAddress::Mmio(address)) {
                tracing::debug!(address, %error, "KVM refused a change of a PCI doorbell");
            }
        }
    }

    /// Finds the function and BAR that decode all of the `length` bytes at `address`, and the
    /// offset in the BAR.
    fn decode(&self, address: u64, length: usize) -> Option<(SharedFunction, usize, u64)> {
        let map = self.map.read().expect("a thread panicked in PciBus");
        let found = map.iter().find_map(|mapping| {
            let offset = address.checked_sub(mapping.address)?;
            let end = offset.checked_add(length as u64)?;
            (end <= mapping.size).then_some((mapping.slot, mapping.bar, offset))
        });
        drop(map);
        let (slot, bar, offset) = found?;
        let slots = self.slots.read().expect("a thread panicked in PciBus");
        Some((slots.get(slot)?.function.clone(), bar, offset))
    }

    /// Reads memory at `address`. Returns `false` if no BAR decodes it.
    pub fn memory_read(&self, address: u64, data: &mut [u8]) -> bool {
        let Some((function, bar, offset)) = self.decode(address, data.len()) else {
            return false;
        };
        function
            .lock()
            .expect("a device panicked")
            .bar_read(bar, offset, data);
        true
    }

    /// Writes memory at `address`. Returns `false` if no BAR decodes it.
    pub fn memory_write(&self, address: u64, data: &[u8]) -> bool {
        let Some((function, bar, offset)) = self.decode(address, data.len()) else {
            return false;
        };
        function
            .lock()
            .expect("a device panicked")
            .bar_write(bar, offset, data);
        // An access through PCI_CFG (virtio 1.2, 4.1.4.9) reaches BARs only, so no write here moves
        // a BAR.
        true
    }
}

/// The ECAM: configuration space of bus 0 as memory (PCI Express 5.0, 7.2.2).
pub struct Ecam(pub Arc<PciBus>);

impl Ecam {
    /// Device and register at an offset into the ECAM; `None` for a function other than 0, or an
    /// access that crosses into the next function.
    fn decode(offset: u64, length: usize) -> Option<(usize, u16)> {
        let register = offset & 0xfff;
        let function = offset >> 12 & 7;
        let device = (offset >> 15) as usize;
        (function == 0 && register + length as u64 <= 0x1000).then_some((device, register as u16))
    }
}

impl BusDevice for Ecam {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        match Self::decode(offset, data.len()) {
            Some((device, register)) => self.0.config_read(device, register, data),
            None => data.fill(0xff),
        }
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        if let Some((device, register)) = Self::decode(offset, data.len()) {
            self.0.config_write(device, register, data);
        }
    }
}
