//! The cases that `walvisor demo --conformance` runs inside a virtual machine, here without one:
//! the guest's own drivers find the device, and their register accesses are calls.

use std::cell::{Cell, RefCell};
use std::fmt;

use vm_memory::{GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::block::{BlockConfig, VirtioBlock};
use walvisor_guest::conformance;
use walvisor_guest::contract::{BootInfo, GuestMessage, MMIO_SLOTS, Task};
use walvisor_guest::error::Error;
use walvisor_guest::memory::Arena;
use walvisor_guest::mmio::Mmio;
use walvisor_guest::pci::Pci;
use walvisor_guest::register::{Bus, Registers};
use walvisor_guest::transport::{Interrupts, Transport};

use crate::driver::{Memory, MmioDriver, PciDriver, config};

const MEMORY: usize = 16 << 20;
/// Addresses below those of the memory, which are the process's own.
const MMIO: u64 = 0xd000_0000;
const ECAM: u64 = 0xe000_0000;
const QUEUES: u16 = 2;

/// The device, and its VMM.
enum Machine {
    Mmio(Box<MmioDriver>),
    Pci(Box<PciDriver>),
}

/// What the guest's code takes for hardware.
struct Hardware {
    machine: RefCell<Machine>,
    interrupts: Cell<u64>,
}

impl fmt::Debug for Hardware {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Hardware")
    }
}

/// The BAR of the function at `address`, and the offset in it.
fn bar(device: &PciDriver, address: u64) -> Option<(usize, u64)> {
    let mut bars = device.transport.bars().into_iter();
    bars.find_map(|bar| {
        let offset = address.checked_sub(bar.address)?;
        (bar.enabled && offset < bar.size).then_some((bar.index, offset))
    })
}

impl Bus for Hardware {
    fn read(&self, address: u64, bytes: &mut [u8]) {
        match &mut *self.machine.borrow_mut() {
            Machine::Mmio(device) => device.transport.read(address - MMIO, bytes),
            Machine::Pci(device) => match bar(device, address) {
                Some((index, offset)) => device.transport.bar_read(index, offset, bytes),
                None => device.transport.config_read((address - ECAM) as u16, bytes),
            },
        }
    }

    fn write(&self, address: u64, bytes: &[u8]) {
        match &mut *self.machine.borrow_mut() {
            Machine::Mmio(device) => device.transport.write(address - MMIO, bytes),
            Machine::Pci(device) => match bar(device, address) {
                Some((index, offset)) => device.transport.bar_write(index, offset, bytes),
                None => device
                    .transport
                    .config_write((address - ECAM) as u16, bytes),
            },
        }
    }
}

/// The processor's side of [`Hardware`].
struct Processor(&'static Hardware);

impl Interrupts for Processor {
    fn count(&self) -> u64 {
        let came = match &mut *self.0.machine.borrow_mut() {
            Machine::Mmio(device) => device.take_edges(),
            Machine::Pci(device) => (0..=QUEUES).map(|vector| device.router.take(vector)).sum(),
        };
        self.0.interrupts.set(self.0.interrupts.get() + came);
        self.0.interrupts.get()
    }

    fn wait(&self, seen: u64) {
        while self.count() <= seen {
            std::thread::yield_now();
        }
    }

    fn connect_line(&mut self, _gsi: u32) {}

    fn message(&mut self, number: u16) -> Result<(u64, u32), Error> {
        let message = <PciDriver>::message(number);
        Ok((message.address, message.data))
    }
}

/// Guest memory at the addresses that it has in this process, as the guest's code expects, and all
/// of it as an arena.
fn memory() -> (Memory, Arena, u64) {
    let region = MmapRegion::new(MEMORY).expect("memory");
    let start = region.as_ptr();
    let address = start.expose_provenance() as u64;
    let region = GuestRegionMmap::new(region, GuestAddress(address)).expect("a region");
    let memory = GuestMemoryMmap::from_regions(vec![region]).expect("guest memory");
    // SAFETY: the device gets the memory and is never dropped. Nothing else uses it.
    let arena = unsafe { Arena::new(start, MEMORY) };
    (Memory::new(memory), arena, address + MEMORY as u64)
}

/// Runs every case on the device of the machine that `attach` makes, through the driver that `find`
/// finds.
fn run<T: Transport>(
    attach: impl FnOnce(VirtioBlock, Memory) -> Machine,
    find: impl FnOnce(&BootInfo, &dyn Fn(u64) -> Registers, &mut dyn Interrupts) -> Result<T, Error>,
) {
    let (memory, mut arena, end) = memory();
    let disk = RamDisk::new((MEMORY / 512) as u64);
    let trial = BlockConfig {
        queue_size: 1024,
        in_order: true,
        ..config(QUEUES)
    };
    let device = VirtioBlock::new(std::sync::Arc::new(disk), trial).expect("a device");
    let hardware: &'static Hardware = Box::leak(Box::new(Hardware {
        machine: RefCell::new(attach(device, memory)),
        interrupts: Cell::default(),
    }));
    let mut mmio_lines = [0; MMIO_SLOTS];
    mmio_lines[0] = 5;
    let info = BootInfo {
        memory_end: end,
        idt: 0,
        mmio_base: MMIO,
        mmio_lines,
        ecam: ECAM,
        off_port: 0,
        off_value: 0,
        reset_port: 0,
        reset_value: 0,
        task: Task::Conformance,
    };
    let mut processor = Processor(hardware);
    let registers = |address| Registers::on(hardware, address);
    let mut transport = find(&info, &registers, &mut processor).expect("the device");
    let mut report = String::new();
    let count = conformance::run(&mut transport, &processor, &mut arena, end, &mut report);
    let count = count.expect("memory and a disk that is large enough");
    let lines = report
        .lines()
        .map(|line| GuestMessage::parse(line).expect("a line of a case"));
    let failed = lines.filter(|line| !matches!(line, GuestMessage::Case(_, _, None)));
    assert_eq!(
        failed.map(|line| line.to_string()).collect::<Vec<_>>(),
        [""; 0]
    );
    assert!(
        count > 60 && report.lines().count() == count as usize,
        "{count} cases"
    );
}

#[test]
fn every_case_of_the_guest_passes_over_mmio() {
    run(
        |device, memory| Machine::Mmio(Box::new(MmioDriver::new(device, memory))),
        |info, registers, interrupts| Mmio::find(info, registers, interrupts),
    );
}

#[test]
fn every_case_of_the_guest_passes_over_pci() {
    run(
        |device, memory| Machine::Pci(Box::new(PciDriver::discover(device, memory))),
        |info, registers, interrupts| Pci::find(info, registers, interrupts),
    );
}
