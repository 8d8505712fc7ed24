//! Starts a vCPU directly in 64-bit long mode, at privilege level 0 or 3.
//!
//! Freestanding guests (the embedded one of `walvisor demo`, the probe's few instructions) need no
//! boot protocol: the tables below are written to low guest memory and the registers point at them.
//!
//! ```text
//!   0x1000  GDT: null, code 0, data 0, code 3, data 3, TSS
//!   0x2000  IDT: 256 gates, not present; the guest fills them in (its pages are writable in ring 3)
//!   0x3000  PML4, PDPT, 4 page directories: the first 4 GiB mapped one to one in 2 MiB pages
//!   0x9000  TSS: the stack of ring 0, and an I/O bitmap that allows every port
//!   0xc000  stack of ring 0, 4 KiB, grows down from 0xd000
//! ```
//!
//! Why ring 3: a KVM without hardware virtualisation (page-table KVM) interprets ring 0 instruction
//! by instruction, and only a subset of them, while ring 3 runs natively. With every page
//! user-accessible and every port allowed, a driver can live in ring 3, and runs in the same way on
//! every KVM. Both IOPL 3 and the I/O bitmap allow the ports: a page-table KVM loses IOPL 3 once
//! ring 3 runs, and the SVM that QEMU emulates does not find the I/O bitmap.

use kvm_bindings::{kvm_dtable, kvm_regs, kvm_segment};
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError};

/// Guest address of the global descriptor table.
pub const GDT: u64 = 0x1000;
/// Guest address of the interrupt descriptor table (256 gates of 16 bytes).
pub const IDT: u64 = 0x2000;
/// Guest address of the top-level page table.
pub const PML4: u64 = 0x3000;
/// Guest address of the task state segment.
pub const TSS: u64 = 0x9000;
/// Top of the stack that interrupts from ring 3 switch to; it grows down.
pub const RING0_STACK_TOP: u64 = 0xd000;
/// First byte behind the tables.
pub const TABLES_END: u64 = RING0_STACK_TOP;

const PAGE: u64 = 0x1000;
const PDPT: u64 = PML4 + PAGE;
const PAGE_DIRECTORIES: u64 = PDPT + PAGE;
const MAPPED_GIB: u64 = 4;

// Page-table entry bits, Intel SDM volume 3, 5.5.
const PRESENT: u64 = 1;
const WRITABLE: u64 = 1 << 1;
const USER: u64 = 1 << 2;
const LARGE: u64 = 1 << 7;

// Control registers and EFER, Intel SDM volume 3, 2.5 and 2.2.1.
const CR0_PE: u64 = 1;
const CR0_MP: u64 = 1 << 1;
const CR0_ET: u64 = 1 << 4;
const CR0_NE: u64 = 1 << 5;
const CR0_PG: u64 = 1 << 31;
const CR4_PAE: u64 = 1 << 5;
const CR4_OSFXSR: u64 = 1 << 9;
const CR4_OSXMMEXCPT: u64 = 1 << 10;
const EFER_LME: u64 = 1 << 8;
const EFER_LMA: u64 = 1 << 10;

const RFLAGS_RESERVED: u64 = 1 << 1;
const RFLAGS_IOPL_3: u64 = 3 << 12;

/// The descriptors, in the order the selectors below use.
const GDT_ENTRIES: [u64; 5] = [
    0,
    0x00af_9b00_0000_ffff, // 0x08 code, ring 0, 64 bit
    0x00cf_9300_0000_ffff, // 0x10 data, ring 0
    0x00af_fb00_0000_ffff, // 0x18 code, ring 3, 64 bit
    0x00cf_f300_0000_ffff, // 0x20 data, ring 3
];
const TSS_SELECTOR: u16 = 0x28;
/// The TSS itself; behind it lies the I/O permission bitmap: a clear bit for each port, then a byte
/// of ones (Intel SDM volume 1, 19.5.2).
const TSS_SIZE: usize = 0x68;
const IO_BITMAP_SIZE: usize = 0x2000;
const TSS_LIMIT: u32 = (TSS_SIZE + IO_BITMAP_SIZE) as u32;

/// The privilege level a vCPU starts at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrivilegeLevel {
    /// Ring 0: everything is allowed.
    Kernel,
    /// Ring 3, with access to all memory and every port. CLI, STI and HLT must not be used: they do
    /// not work on every KVM.
    User,
}

/// Writes the GDT, the TSS, an empty IDT and the page tables to guest memory.
///
/// # Errors
/// If guest memory does not reach to [`TABLES_END`].
pub fn write_tables<M: GuestMemoryBackend>(memory: &M) -> Result<(), GuestMemoryError> {
    let put = |address: u64, value: u64| memory.write_obj(value, GuestAddress(address));
    for (index, entry) in (0u64..).zip(GDT_ENTRIES) {
        put(GDT + index * 8, entry)?;
    }
    // An available 64-bit TSS, Intel SDM volume 3, 8.2.3: two slots, the base below 64 KiB.
    put(
        GDT + u64::from(TSS_SELECTOR),
        0x0000_8900_0000_0000 | TSS << 16 | u64::from(TSS_LIMIT),
    )?;
    put(GDT + u64::from(TSS_SELECTOR) + 8, 0)?;

    memory.write_slice(&[0; TSS_SIZE + IO_BITMAP_SIZE], GuestAddress(TSS))?;
    memory.write_obj(0xffu8, GuestAddress(TSS + u64::from(TSS_LIMIT)))?;
    memory.write_obj(RING0_STACK_TOP, GuestAddress(TSS + 4))?;
    memory.write_obj(TSS_SIZE as u16, GuestAddress(TSS + 0x66))?;

    memory.write_slice(&[0; PAGE as usize], GuestAddress(IDT))?;

    for table in 0..2 + MAPPED_GIB {
        memory.write_slice(&[0; PAGE as usize], GuestAddress(PML4 + table * PAGE))?;
    }
    put(PML4, PDPT | PRESENT | WRITABLE | USER)?;
    for gib in 0..MAPPED_GIB {
        let directory = PAGE_DIRECTORIES + gib * PAGE;
        put(PDPT + gib * 8, directory | PRESENT | WRITABLE | USER)?;
        for slot in 0..512 {
            let page = (gib << 30) + (slot << 21);
            put(
                directory + slot * 8,
                page | PRESENT | WRITABLE | USER | LARGE,
            )?;
        }
    }
    Ok(())
}

/// Sets the vCPU's registers: `entry` in RIP, `stack` in RSP and `argument` in RDI (the first
/// argument of the System V calling convention), with interrupts off. The vCPU uses the tables that
/// [`write_tables`] wrote.
///
/// # Errors
/// If KVM refuses the registers.
pub fn set_registers(
    vcpu: &VcpuFd,
    ring: PrivilegeLevel,
    entry: u64,
    stack: u64,
    argument: u64,
) -> Result<(), kvm_ioctls::Error> {
    let (dpl, code, data) = match ring {
        PrivilegeLevel::Kernel => (0, 0x08, 0x10),
        PrivilegeLevel::User => (3, 0x18 | 3, 0x20 | 3),
    };
    let flat = kvm_segment {
        limit: u32::MAX,
        present: 1,
        dpl,
        s: 1,
        g: 1,
        ..Default::default()
    };
    let data = kvm_segment {
        selector: data,
        type_: 0x3,
        db: 1,
        ..flat
    };
    let mut sregs = vcpu.get_sregs()?;
    sregs.cs = kvm_segment {
        selector: code,
        type_: 0xb,
        l: 1,
        ..flat
    };
    sregs.ss = data;
    sregs.ds = data;
    sregs.es = data;
    sregs.fs = data;
    sregs.gs = data;
    sregs.tr = kvm_segment {
        base: TSS,
        limit: TSS_LIMIT,
        selector: TSS_SELECTOR,
        type_: 0xb, // busy, as LTR would have left it
        present: 1,
        ..Default::default()
    };
    sregs.gdt = kvm_dtable {
        base: GDT,
        limit: TSS_SELECTOR + 15,
        ..Default::default()
    };
    sregs.idt = kvm_dtable {
        base: IDT,
        limit: PAGE as u16 - 1,
        ..Default::default()
    };
    sregs.cr3 = PML4;
    sregs.cr0 = CR0_PE | CR0_MP | CR0_ET | CR0_NE | CR0_PG;
    // SMEP and SMAP stay off, because the ring-0 stubs of a ring-3 guest lie in its user pages.
    sregs.cr4 = CR4_PAE | CR4_OSFXSR | CR4_OSXMMEXCPT;
    sregs.efer = EFER_LME | EFER_LMA;
    vcpu.set_sregs(&sregs)?;

    let iopl = if ring == PrivilegeLevel::User {
        RFLAGS_IOPL_3
    } else {
        0
    };
    vcpu.set_regs(&kvm_regs {
        rip: entry,
        rsp: stack,
        rdi: argument,
        rflags: RFLAGS_RESERVED | iopl,
        ..Default::default()
    })
}
