//! The DSDT: devices that cannot be discovered, in AML.

use acpi_tables::aml::{
    AddressSpace, AddressSpaceCacheable, Device, EISAName, IO, Interrupt, Memory32Fixed, Name,
    Package, Path, ResourceTemplate, Scope, ZERO,
};
use acpi_tables::sdt::Sdt;
use acpi_tables::{Aml, AmlSink};

use crate::arch::x86_64::layout;

const HEADER: u32 = 36;
const DSDT_REVISION: u8 = 6;

/// The DSDT of a guest with these virtio-mmio devices.
pub(super) fn build(slots: &[MmioSlot]) -> Sdt {
    let mut body = Vec::new();
    let sleep: &dyn Aml = &layout::SLEEP_TYPE_S5;
    Name::new(
        "_S5_".into(),
        &Package::new(vec![sleep, sleep, &ZERO, &ZERO]),
    )
    .to_aml_bytes(&mut body);
    serial(&mut body);
    panic(&mut body);
    for (index, slot) in (0u32..).zip(slots) {
        virtio_mmio(&mut body, index, *slot);
    }
    host_bridge(&mut body);

    let mut dsdt = Sdt::new(*b"DSDT", HEADER, DSDT_REVISION, OEM, TABLE, REVISION);
    dsdt.append_slice(&body);
    dsdt
}

/// COM1.
fn serial(body: &mut dyn AmlSink) {
    let hid = Name::new("_HID".into(), &EISAName::new("PNP0501"));
    let uid = Name::new("_UID".into(), &ZERO);
    let io = IO::new(layout::COM1, layout::COM1, 0, 8);
    let interrupt = Interrupt::new(true, true, false, false, layout::COM1_GSI);
    let resources = Name::new("_CRS".into(), &ResourceTemplate::new(vec![&io, &interrupt]));
    let device = Device::new("COM1".into(), vec![&hid, &uid, &resources]);
    Scope::new("_SB_".into(), vec![&device]).to_aml_bytes(body);
}

/// The panic port. Linux's driver binds to QEMU0001.
fn panic(body: &mut dyn AmlSink) {
    let hid = Name::new("_HID".into(), &"QEMU0001");
    let io = IO::new(layout::PANIC, layout::PANIC, 1, layout::PANIC_SIZE as u8);
    let resources = Name::new("_CRS".into(), &ResourceTemplate::new(vec![&io]));
    let device = Device::new("PEVT".into(), vec![&hid, &resources]);
    Scope::new("_SB_".into(), vec![&device]).to_aml_bytes(body);
}

/// A virtio-mmio device. Linux's driver binds to LNRO0005.
fn virtio_mmio(body: &mut dyn AmlSink, index: u32, slot: MmioSlot) {
    let hid = Name::new("_HID".into(), &"LNRO0005");
    let uid = Name::new("_UID".into(), &index);
    let coherent = Name::new("_CCA".into(), &acpi_tables::aml::ONE);
    let memory = Memory32Fixed::new(true, slot.base as u32, 0x1000);
    let interrupt = Interrupt::new(true, true, false, false, slot.gsi);
    let resources = Name::new(
        "_CRS".into(),
        &ResourceTemplate::new(vec![&memory, &interrupt]),
    );
    let name = format!("VR{index:02}");
    let device = Device::new(Path::new(&name), vec![&hid, &uid, &coherent, &resources]);
    Scope::new("_SB_".into(), vec![&device]).to_aml_bytes(body);
}

/// The PCI host bridge, its windows, and the ECAM as a motherboard resource (PCI firmware
/// specification, 4.1.2).
fn host_bridge(body: &mut dyn AmlSink) {
    let hid = Name::new("_HID".into(), &EISAName::new("PNP0A08"));
    let cid = Name::new("_CID".into(), &EISAName::new("PNP0A03"));
    let uid = Name::new("_UID".into(), &ZERO);
    let segment = Name::new("_SEG".into(), &ZERO);
    let bus = Name::new("_BBN".into(), &ZERO);
    let coherent = Name::new("_CCA".into(), &acpi_tables::aml::ONE);
    let buses = AddressSpace::new_bus_number(0u16, 0);
    let ports = IO::new(layout::PCI_PORTS, layout::PCI_PORTS, 1, 8);
    let window = AddressSpace::new_memory(
        AddressSpaceCacheable::NotCacheable,
        true,
        layout::PCI_WINDOW as u32,
        (layout::PCI_WINDOW + layout::PCI_WINDOW_SIZE - 1) as u32,
        None,
    );
    let resources = Name::new(
        "_CRS".into(),
        &ResourceTemplate::new(vec![&buses, &ports, &window]),
    );
    let bridge = Device::new(
        "PCI0".into(),
        vec![&hid, &cid, &uid, &segment, &bus, &coherent, &resources],
    );

    let board_hid = Name::new("_HID".into(), &EISAName::new("PNP0C02"));
    let board_uid = Name::new("_UID".into(), &ZERO);
    let ecam = Memory32Fixed::new(true, layout::ECAM as u32, layout::ECAM_SIZE as u32);
    let board_resources = Name::new("_CRS".into(), &ResourceTemplate::new(vec![&ecam]));
    let board = Device::new(
        "MBRD".into(),
        vec![&board_hid, &board_uid, &board_resources],
    );

    Scope::new("_SB_".into(), vec![&board, &bridge]).to_aml_bytes(body);
}

pub(super) const OEM: [u8; 6] = *b"WALVIS";

pub(super) const TABLE: [u8; 8] = *b"WALVISOR";

pub(super) const REVISION: u32 = 1;

/// A virtio-mmio device as the DSDT describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MmioSlot {
    /// Guest physical address of its registers.
    pub base: u64,
    /// Number of its interrupt (GSI).
    pub gsi: u32,
}
