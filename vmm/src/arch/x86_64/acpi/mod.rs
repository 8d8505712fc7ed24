//! ACPI tables, which describe the processors, interrupt controllers and devices to the guest.
//!
//! ```text
//!   RSDP ─▶ XSDT ─▶ FADT ─▶ DSDT (serial line, panic port, virtio-mmio devices, PCI host bridge, S5)
//!                │       └▶ FACS
//!                ├▶ MADT (local APICs, I/O APIC)
//!                └▶ MCFG (ECAM)
//! ```

mod dsdt;

use acpi_tables::facs::FACS;
use acpi_tables::fadt::{FADTBuilder, Flags, PmProfile};
use acpi_tables::gas::{AccessSize, AddressSpace, GAS};
use acpi_tables::madt::{
    EnabledStatus, IoApic, LocalInterruptController, MADT, ProcessorLocalApic,
};
use acpi_tables::mcfg::MCFG;
use acpi_tables::rsdp::Rsdp;
use acpi_tables::xsdt::XSDT;
use acpi_tables::{Aml, AmlSink};
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};
use zerocopy::{Immutable, IntoBytes};

pub use dsdt::MmioSlot;

use super::layout;
use dsdt::{OEM, REVISION, TABLE};

// IA-PC boot architecture flags (ACPI 6.5, 5.2.9.3).
const BOOT_LEGACY_DEVICES: u16 = 1;
const BOOT_NO_VGA: u16 = 1 << 2;
const BOOT_NO_CMOS_CLOCK: u16 = 1 << 5;

/// Why the tables could not be written.
#[derive(Debug, thiserror::Error)]
pub enum AcpiError {
    /// The tables are larger than the space reserved for them.
    #[error("the ACPI tables do not fit {0} bytes: use fewer disks")]
    TooLarge(u64),
    /// Guest memory ends below the tables' address.
    #[error("the ACPI tables do not fit guest memory: {0}")]
    Memory(#[from] GuestMemoryError),
}

/// Interrupt source override: the SCI is level-triggered (ACPI 6.5, 5.2.12.5). acpi_tables has no
/// such structure.
#[repr(C, packed)]
#[derive(Clone, Copy, IntoBytes, Immutable)]
struct InterruptOverride {
    kind: u8,
    length: u8,
    bus: u8,
    source: u8,
    gsi: u32,
    flags: u16,
}

const ACTIVE_HIGH_LEVEL: u16 = 0b1101;

impl Aml for InterruptOverride {
    fn to_aml_bytes(&self, sink: &mut dyn AmlSink) {
        sink.vec(self.as_bytes());
    }
}

/// Writes tables one after the other, aligned to 16 bytes, from [`layout::ACPI_TABLES`] on.
struct Placer<'a> {
    memory: &'a GuestMemoryMmap,
    next: u64,
}

impl Placer<'_> {
    /// Writes a table and returns its address.
    fn place(&mut self, table: &dyn Aml) -> Result<u64, AcpiError> {
        let mut bytes = Vec::new();
        table.to_aml_bytes(&mut bytes);
        let address = self.next;
        let end = address + bytes.len() as u64;
        if end > layout::HIGH_MEMORY {
            return Err(AcpiError::TooLarge(
                layout::HIGH_MEMORY - layout::ACPI_TABLES,
            ));
        }
        self.memory.write_slice(&bytes, GuestAddress(address))?;
        self.next = end.next_multiple_of(16);
        Ok(address)
    }
}

/// Writes the tables of a guest with `cpus` vCPUs and these devices. The RSDP is at
/// [`layout::ACPI_TABLES`].
///
/// # Errors
/// If the tables do not fit their space or guest memory.
pub fn write_tables(
    memory: &GuestMemoryMmap,
    cpus: u8,
    slots: &[MmioSlot],
) -> Result<(), AcpiError> {
    let rsdp_end = layout::ACPI_TABLES + Rsdp::len() as u64;
    let mut placer = Placer {
        memory,
        next: rsdp_end.next_multiple_of(64),
    };
    // ACPI requires a FACS aligned to 64 bytes.
    let facs = placer.place(&FACS::new())?;
    let dsdt = placer.place(&dsdt::build(slots))?;
    let fadt = placer.place(&fadt(facs, dsdt))?;
    let madt = placer.place(&madt(cpus))?;
    let mut mcfg = MCFG::new(OEM, TABLE, REVISION);
    mcfg.add_ecam(layout::ECAM, 0, 0, 0);
    let mcfg = placer.place(&mcfg)?;
    let mut xsdt = XSDT::new(OEM, TABLE, REVISION);
    for table in [fadt, madt, mcfg] {
        xsdt.add_entry(table);
    }
    let xsdt = placer.place(&xsdt)?;
    placer.next = layout::ACPI_TABLES;
    placer.place(&Rsdp::new(OEM, xsdt))?;
    Ok(())
}

/// A register block of ACPI fixed hardware.
fn port(offset: u64, bytes: u8, access: AccessSize) -> GAS {
    let address = u64::from(layout::ACPI_PM) + offset;
    GAS::new(AddressSpace::SystemIo, bytes * 8, 0, access, address)
}

/// Fixed hardware: PM1 events, PM1 control, timer; reset through the chip set's reset control
/// register.
fn fadt(facs: u64, dsdt: u64) -> impl Aml {
    let base = u32::from(layout::ACPI_PM);
    let mut fadt = FADTBuilder::new(OEM, TABLE, REVISION)
        .firmware_ctrl_32(facs as u32)
        .dsdt_32(dsdt as u32)
        .preferred_pm_profile(PmProfile::EnterpriseServer)
        .flag(Flags::Wbinvd)
        // The flag for the power button stays clear, because the power button is fixed hardware
        // too.
        .flag(Flags::SlpButton)
        .flag(Flags::TmrValExt)
        .flag(Flags::ResetRegSup);
    fadt.x_dsdt = dsdt.into();
    fadt.sci_int = layout::SCI.into();
    fadt.pm1a_evt_blk = base.into();
    fadt.pm1_evt_len = 4;
    fadt.x_pm1a_evt_blk = port(0, 4, AccessSize::WordAccess);
    fadt.pm1a_cnt_blk = (base + layout::ACPI_PM_CONTROL as u32).into();
    fadt.pm1_cnt_len = 2;
    fadt.x_pm1a_cnt_blk = port(layout::ACPI_PM_CONTROL, 2, AccessSize::WordAccess);
    fadt.pm_tmr_blk = (base + layout::ACPI_PM_TIMER as u32).into();
    fadt.pm_tmr_len = 4;
    fadt.x_pm_tmr_blk = port(layout::ACPI_PM_TIMER, 4, AccessSize::DwordAccess);
    // C2 and C3 are not supported (5.2.9: more than 100 and 1000 microseconds).
    fadt.p_lvl2_lat = 101.into();
    fadt.p_lvl3_lat = 1001.into();
    fadt.iapc_boot_arch = (BOOT_LEGACY_DEVICES | BOOT_NO_VGA | BOOT_NO_CMOS_CLOCK).into();
    fadt.reset_reg = GAS::new(
        AddressSpace::SystemIo,
        8,
        0,
        AccessSize::ByteAccess,
        u64::from(layout::RESET_PORT),
    );
    fadt.reset_value = layout::RESET_VALUE;
    fadt.finalize()
}

/// Local APICs of all vCPUs, and the I/O APIC.
fn madt(cpus: u8) -> MADT {
    let mut madt = MADT::new(
        OEM,
        TABLE,
        REVISION,
        LocalInterruptController::Address(layout::LOCAL_APIC as u32),
    );
    for cpu in 0..cpus {
        madt.add_structure(ProcessorLocalApic::new(cpu, cpu, EnabledStatus::Enabled));
    }
    madt.add_structure(IoApic::new(cpus, layout::IO_APIC as u32, 0));
    madt.add_structure(InterruptOverride {
        kind: 2,
        length: size_of::<InterruptOverride>() as u8,
        bus: 0,
        source: layout::SCI as u8,
        gsi: u32::from(layout::SCI),
        flags: ACTIVE_HIGH_LEVEL,
    });
    madt
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<const N: usize>(memory: &GuestMemoryMmap, address: u64) -> [u8; N] {
        let mut bytes = [0; N];
        memory
            .read_slice(&mut bytes, GuestAddress(address))
            .unwrap();
        bytes
    }

    /// The table at `address`, its checksum verified.
    fn table(memory: &GuestMemoryMmap, address: u64) -> Vec<u8> {
        let length = u32::from_le_bytes(read(memory, address + 4)) as usize;
        let mut bytes = vec![0; length];
        memory
            .read_slice(&mut bytes, GuestAddress(address))
            .unwrap();
        let sum = bytes.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte));
        assert_eq!(
            sum,
            0,
            "checksum of {:?}",
            String::from_utf8_lossy(&bytes[..4])
        );
        bytes
    }

    #[test]
    fn every_table_is_reachable_from_the_rsdp_and_its_checksum_is_right() {
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), 2 << 20)]).unwrap();
        let slots: Vec<MmioSlot> = (0u64..)
            .zip(layout::MMIO_GSIS)
            .map(|(slot, gsi)| MmioSlot {
                base: layout::MMIO_DEVICES + slot * 0x1000,
                gsi,
            })
            .collect();
        write_tables(&memory, 64, &slots).unwrap();

        let rsdp: [u8; 36] = read(&memory, layout::ACPI_TABLES);
        assert_eq!(&rsdp[..8], b"RSD PTR ");
        for part in [&rsdp[..20], &rsdp[..]] {
            assert_eq!(
                part.iter().fold(0u8, |sum, byte| sum.wrapping_add(*byte)),
                0
            );
        }
        let xsdt = table(
            &memory,
            u64::from_le_bytes(rsdp[24..32].try_into().unwrap()),
        );
        assert_eq!(&xsdt[..4], b"XSDT");
        let mut signatures = Vec::new();
        for entry in xsdt[36..].chunks_exact(8) {
            let bytes = table(&memory, u64::from_le_bytes(entry.try_into().unwrap()));
            signatures.push(String::from_utf8_lossy(&bytes[..4]).into_owned());
            match &bytes[..4] {
                b"FACP" => {
                    let dsdt = table(
                        &memory,
                        u64::from_le_bytes(bytes[140..148].try_into().unwrap()),
                    );
                    assert_eq!(&dsdt[..4], b"DSDT");
                    // The resource template of each slot contains its address.
                    for slot in &slots {
                        let base = (slot.base as u32).to_le_bytes();
                        assert!(dsdt.windows(4).any(|window| window == base));
                    }
                    let facs = u32::from_le_bytes(bytes[36..40].try_into().unwrap());
                    assert_eq!(facs % 64, 0);
                    assert_eq!(&read::<4>(&memory, u64::from(facs)), b"FACS");
                    assert_eq!(
                        bytes[116..129],
                        [1, 8, 0, 1, 0xf9, 0xc, 0, 0, 0, 0, 0, 0, 6]
                    );
                }
                b"APIC" => {
                    let mut kinds = [0; 3];
                    let mut rest = &bytes[44..];
                    while let [kind, length, ..] = *rest {
                        kinds[usize::from(kind)] += 1;
                        rest = &rest[usize::from(length)..];
                    }
                    assert_eq!(kinds, [64, 1, 1]);
                }
                _ => {}
            }
        }
        assert_eq!(signatures, ["FACP", "APIC", "MCFG"]);
    }
}
