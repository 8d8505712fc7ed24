//! The registers a Linux kernel expects in its first vCPU, for both boot protocols.

use kvm_bindings::{Msrs, kvm_dtable, kvm_msr_entry, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryError, GuestMemoryMmap};

use super::{layout, long_mode};

/// Selector of the code segment, fixed by the boot protocol (`__BOOT_CS`).
const CODE_SELECTOR: u16 = 0x10;
/// Selector of the data segment, fixed by the boot protocol (`__BOOT_DS`).
const DATA_SELECTOR: u16 = 0x18;
const TASK_SELECTOR: u16 = 0x20;
/// The descriptors: null, unused, flat 4 GiB code (64 or 32 bits, patched in), flat 4 GiB data,
/// task.
const GDT: [u64; 5] = [
    0,
    0,
    0x00cf_9b00_0000_ffff,
    0x00cf_9300_0000_ffff,
    0x008f_8b00_0000_ffff,
];
/// A 64-bit code descriptor: the `L` bit is set in place of `D/B`.
const LONG_CODE: u64 = 0x00af_9b00_0000_ffff;

const CR0_PE: u64 = 1;
const CR0_ET: u64 = 1 << 4;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;
const RFLAGS_RESERVED: u64 = 1 << 1;

const MSR_MISC_ENABLE: u32 = 0x1a0;
const MISC_ENABLE_FAST_STRING: u64 = 1;
const MSR_MTRR_DEFAULT_TYPE: u32 = 0x2ff;
/// MTRRs on, all memory write-back.
const MTRR_WRITE_BACK: u64 = 1 << 11 | 6;

/// Offsets of the local vector table entries in the local APIC's page.
const LAPIC_LINT0: usize = 0x350;
const LAPIC_LINT1: usize = 0x360;
const DELIVERY_NMI: i8 = 0x4;
const DELIVERY_EXTERNAL: i8 = 0x7;

/// The entry of a loaded kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinuxEntry {
    /// 64-bit boot protocol: long mode, RSI points at the zero page.
    Long {
        /// Address of the first instruction.
        address: u64,
    },
    /// PVH: 32-bit protected mode without paging, EBX points at the start info.
    Pvh {
        /// Address of the first instruction.
        address: u64,
    },
}

/// Why a start state could not be set.
#[derive(Debug, thiserror::Error)]
pub enum StartStateError {
    /// KVM refused registers.
    #[error("KVM refused the first vCPU's registers: {0}")]
    Kvm(#[from] kvm_ioctls::Error),
    /// The tables do not fit guest memory.
    #[error("the boot tables do not fit guest memory: {0}")]
    Memory(#[from] GuestMemoryError),
}

/// Sets the first vCPU's registers for `entry`, and writes the tables that they refer to.
///
/// # Errors
/// If KVM refuses the registers, or the tables do not fit guest memory.
pub fn set(
    vcpu: &VcpuFd,
    memory: &GuestMemoryMmap,
    entry: LinuxEntry,
) -> Result<(), StartStateError> {
    let long = matches!(entry, LinuxEntry::Long { .. });
    let mut gdt = GDT;
    if long {
        long_mode::write_tables(memory)?;
        gdt[usize::from(CODE_SELECTOR / 8)] = LONG_CODE;
    }
    for (index, descriptor) in (0u64..).zip(gdt) {
        memory.write_obj(descriptor, GuestAddress(layout::BOOT_GDT + index * 8))?;
    }

    let flat = kvm_segment {
        limit: u32::MAX,
        present: 1,
        s: 1,
        g: 1,
        ..Default::default()
    };
    let data = kvm_segment {
        selector: DATA_SELECTOR,
        type_: 0x3,
        db: 1,
        ..flat
    };
    let mut sregs = vcpu.get_sregs()?;
    sregs.cs = kvm_segment {
        selector: CODE_SELECTOR,
        type_: 0xb,
        db: u8::from(!long),
        l: u8::from(long),
        ..flat
    };
    sregs.ds = data;
    sregs.es = data;
    sregs.fs = data;
    sregs.gs = data;
    sregs.ss = data;
    sregs.tr = kvm_segment {
        selector: TASK_SELECTOR,
        type_: 0xb,
        s: 0,
        ..flat
    };
    sregs.gdt = kvm_dtable {
        base: layout::BOOT_GDT,
        limit: (GDT.len() * 8 - 1) as u16,
        ..Default::default()
    };
    sregs.idt = kvm_dtable::default();
    sregs.cr0 = CR0_PE | CR0_ET;
    if long {
        sregs.cr3 = long_mode::PML4;
        sregs.cr4 = CR4_PAE;
        sregs.cr0 |= CR0_PG;
        sregs.efer = EFER_LME | EFER_LMA;
    }
    vcpu.set_sregs(&sregs)?;

    let mut regs = kvm_regs {
        rflags: RFLAGS_RESERVED,
        ..Default::default()
    };
    match entry {
        LinuxEntry::Long { address } => {
            regs.rip = address;
            regs.rsi = layout::ZERO_PAGE;
        }
        LinuxEntry::Pvh { address } => {
            regs.rip = address;
            regs.rbx = layout::PVH_START_INFO;
        }
    }
    vcpu.set_regs(&regs)?;
    set_msrs(vcpu)?;
    set_local_interrupts(vcpu)?;
    Ok(())
}

/// Sets the MSRs that firmware would have set. An MSR that this KVM does not know keeps its reset
/// value.
fn set_msrs(vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
    let entry = |index, data| kvm_msr_entry {
        index,
        data,
        ..Default::default()
    };
    let msrs = [
        entry(MSR_MISC_ENABLE, MISC_ENABLE_FAST_STRING),
        entry(MSR_MTRR_DEFAULT_TYPE, MTRR_WRITE_BACK),
    ];
    for msr in msrs {
        let list = Msrs::from_entries(&[msr]).expect("one entry fits");
        vcpu.set_msrs(&list)?;
    }
    Ok(())
}

/// Routes the PIC's interrupts to LINT0 and NMIs to LINT1: the virtual wire mode that firmware
/// leaves behind (MP specification, 3.6.2).
fn set_local_interrupts(vcpu: &VcpuFd) -> Result<(), kvm_ioctls::Error> {
    let mut lapic = vcpu.get_lapic()?;
    for (offset, delivery) in [
        (LAPIC_LINT0, DELIVERY_EXTERNAL),
        (LAPIC_LINT1, DELIVERY_NMI),
    ] {
        // Byte 1 of the entry holds the delivery mode in its low 3 bits.
        lapic.regs[offset + 1] = lapic.regs[offset + 1] & !0x7 | delivery;
        // Bit 0 of byte 2 masks the entry.
        lapic.regs[offset + 2] &= !1;
    }
    vcpu.set_lapic(&lapic)
}
