//! Tests of the bus with a real virtio function and a real KVM.

use std::sync::{Arc, Mutex};

use kvm_ioctls::{IoEventAddress, NoDatamatch, VmFd};
use vm_memory::{GuestAddress, GuestMemoryMmap};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::block::{BlockConfig, VirtioBlock};
use walvisor_devices::transport::{Bar, PciTransport};

use super::*;
use crate::bus::BusDevice;
use crate::control::{RunControl, RunEnd};
use crate::vm::interrupts::{FunctionVectors, GsiRouter};

const COMMAND: u16 = 4;
const MEMORY_SPACE: [u8; 2] = [2, 0];
const FIRST_BAR: u16 = 0x10;

/// A bus with one virtio-blk function as device 1, or `None` (with a printed reason) if there is no
/// KVM.
fn bus() -> Option<(Arc<PciBus>, Arc<VmFd>, SharedFunction)> {
    let vm = match crate::probe::open() {
        Ok(kvm) => Arc::new(kvm.create_vm().unwrap()),
        Err(error) => {
            println!("skipped: {error}");
            return None;
        }
    };
    vm.create_irq_chip().unwrap();
    let bus = Arc::new(PciBus::new(vm.clone()));
    let function = function(&vm);
    assert_eq!(
        bus.add(function.clone(), Notifications::Eventfds).unwrap(),
        1
    );
    Some((bus, vm, function))
}

fn function(vm: &Arc<VmFd>) -> SharedFunction {
    let memory = Arc::new(GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 1 << 20)]).unwrap());
    let config = BlockConfig {
        queues: 2,
        ..BlockConfig::default()
    };
    let device = VirtioBlock::new(Arc::new(RamDisk::new(64)), config).unwrap();
    let vectors = Arc::new(FunctionVectors::new(
        Arc::new(GsiRouter::new(vm.clone())),
        Notifications::Eventfds,
    ));
    Arc::new(Mutex::new(PciTransport::new(device, memory, vectors)))
}

fn bars(function: &SharedFunction) -> Vec<Bar> {
    function.lock().unwrap().bars()
}

/// The address of the first doorbell.
fn doorbell(function: &SharedFunction) -> u64 {
    let doorbell = function.lock().unwrap().doorbells().unwrap().remove(0);
    let bar = bars(function)
        .into_iter()
        .find(|bar| bar.index == doorbell.bar)
        .unwrap();
    bar.address + doorbell.offset
}

/// Whether KVM has an ioeventfd at `address`; if so, it refuses a second one.
fn has_ioeventfd(vm: &VmFd, address: u64) -> bool {
    let event = EventFd::new(EFD_NONBLOCK).unwrap();
    let address = IoEventAddress::Mmio(address);
    match vm.register_ioevent(&event, &address, NoDatamatch) {
        Ok(()) => {
            vm.unregister_ioevent(&event, &address, NoDatamatch)
                .unwrap();
            false
        }
        Err(error) => {
            assert_eq!(error.errno(), libc::EEXIST);
            true
        }
    }
}

#[test]
fn bars_are_placed_apart_in_the_window() {
    let Some((bus, vm, first)) = bus() else {
        return;
    };
    let second = function(&vm);
    bus.add(second.clone(), Notifications::Eventfds).unwrap();
    let mut all: Vec<Bar> = [bars(&first), bars(&second)].concat();
    all.sort_by_key(|bar| bar.address);
    for bar in &all {
        assert!(bar.address.is_multiple_of(bar.size), "{bar:x?}");
        assert!(bar.address >= layout::PCI_WINDOW);
        assert!(bar.address + bar.size <= layout::PCI_WINDOW + layout::PCI_WINDOW_SIZE);
    }
    for pair in all.windows(2) {
        assert!(
            pair[0].address + pair[0].size <= pair[1].address,
            "{pair:x?}"
        );
    }
}

#[test]
fn a_bar_decodes_and_its_doorbells_are_registered_only_while_memory_space_is_on() {
    let Some((bus, vm, function)) = bus() else {
        return;
    };
    let (bar, doorbell) = (bars(&function)[0], doorbell(&function));
    let mut data = [0; 4];
    assert!(!bus.memory_read(bar.address, &mut data));
    assert!(!has_ioeventfd(&vm, doorbell));
    bus.config_write(1, COMMAND, &MEMORY_SPACE);
    assert!(bus.memory_read(bar.address, &mut data));
    assert!(bus.memory_write(bar.address, &data));
    assert!(
        !bus.memory_read(bar.address + bar.size - 2, &mut data),
        "across the end"
    );
    assert!(has_ioeventfd(&vm, doorbell));
    bus.config_write(1, COMMAND, &[0, 0]);
    assert!(!bus.memory_read(bar.address, &mut data));
    assert!(!has_ioeventfd(&vm, doorbell));
}

#[test]
fn a_moved_bar_decodes_at_its_new_address_only() {
    let Some((bus, vm, function)) = bus() else {
        return;
    };
    bus.config_write(1, COMMAND, &MEMORY_SPACE);
    let before = doorbell(&function);
    let old = bars(&function);
    // Every BAR moves by 1 MiB while memory decoding is on, as a hostile or careless driver may do.
    for bar in &old {
        let register = FIRST_BAR + 4 * bar.index as u16;
        bus.config_write(
            1,
            register,
            &((bar.address + (1 << 20)) as u32).to_le_bytes(),
        );
    }
    let after = doorbell(&function);
    assert_eq!(after, before + (1 << 20));
    assert!(has_ioeventfd(&vm, after) && !has_ioeventfd(&vm, before));
    let mut data = [0; 4];
    for bar in old {
        assert!(!bus.memory_read(bar.address, &mut data), "{bar:x?}");
        assert!(
            bus.memory_read(bar.address + (1 << 20), &mut data),
            "{bar:x?}"
        );
    }
}

#[test]
fn overlapping_bars_and_bars_at_the_end_of_the_address_space_are_harmless() {
    let Some((bus, _vm, function)) = bus() else {
        return;
    };
    bus.config_write(1, COMMAND, &MEMORY_SPACE);
    for address in [u32::MAX, 0, 0xffff_f000, layout::ECAM as u32] {
        for bar in bars(&function) {
            bus.config_write(1, FIRST_BAR + 4 * bar.index as u16, &address.to_le_bytes());
        }
        let mut data = [0; 8];
        for probe in [0, 0xffff_fff8, u64::from(address), u64::MAX - 7] {
            bus.memory_read(probe, &mut data);
            bus.memory_write(probe, &data);
        }
    }
}

#[test]
fn ecam_and_ports_reach_the_same_configuration_space() {
    let Some((bus, _vm, _function)) = bus() else {
        return;
    };
    let control = Arc::new(RunControl::new().unwrap());
    let mut ports = ConfigPorts::new(bus.clone(), control.clone());
    let mut ecam = Ecam(bus);
    for (device, identity) in [
        (0u32, 0x0008_1b36u32),
        (1, 0x1042_1af4),
        (2, u32::MAX),
        (31, u32::MAX),
    ] {
        let mut data = [0; 4];
        ecam.read(u64::from(device) << 15, &mut data);
        assert_eq!(u32::from_le_bytes(data), identity, "ECAM, device {device}");
        ports.write(0, &(1 << 31 | device << 11).to_le_bytes());
        ports.read(4, &mut data);
        assert_eq!(u32::from_le_bytes(data), identity, "ports, device {device}");
        let mut half = [0; 2];
        ports.read(6, &mut half);
        assert_eq!(half, data[2..]);
    }
    // Reads of another function, of another bus and with a disabled address register find no
    // device.
    for address in [1 << 31 | 1 << 8, 1 << 31 | 1 << 16, 1u32 << 11] {
        ports.write(0, &address.to_le_bytes());
        let mut data = [0; 4];
        ports.read(4, &mut data);
        assert_eq!(data, [0xff; 4], "{address:#x}");
        ports.write(4, &data);
    }
    let mut data = [0; 4];
    ecam.read(1 << 12, &mut data);
    assert_eq!(data, [0xff; 4]);
    ecam.read(0xffe, &mut data);
    assert_eq!(data, [0xff; 4], "across the end of a function");
    assert!(control.end_reason().is_none());
    ports.write(1, &[6]);
    assert!(matches!(control.end_reason(), Some(RunEnd::Reset)));
}

#[test]
fn the_bus_is_full_at_32_devices() {
    let Some((bus, vm, _function)) = bus() else {
        return;
    };
    for number in 2..32 {
        assert_eq!(
            bus.add(function(&vm), Notifications::Eventfds).unwrap(),
            number
        );
    }
    assert!(matches!(
        bus.add(function(&vm), Notifications::Eventfds),
        Err(PciError::Full)
    ));
}
