//! The guest's physical address map.
//!
//! ```text
//!   0x0000_0000  low memory: boot structures (below), kernel from 1 MiB or 16 MiB on
//!   0xc000_0000  PCI memory window (BARs), 256 MiB          } no RAM
//!   0xd000_0000  virtio-mmio devices, 4 KiB each            } from 3 GiB
//!   0xe000_0000  ECAM: PCI configuration space of bus 0     } to 4 GiB
//!   0xfec0_0000  I/O APIC    0xfee0_0000  local APIC        }
//!   0xfffb_c000  KVM's identity map page and TSS            }
//!   0x1_0000_0000  the rest of memory
//!
//!   0x00500  GDT of a Linux start        0x20000  command line
//!   0x01000  tables of `long_mode`       0x9fc00  end of conventional memory
//!   0x10000  zero page (bzImage)         0xe0000  ACPI tables, 128 KiB
//!   0x11000  start info (PVH)
//! ```

/// GDT of a vCPU that starts a Linux kernel.
pub const BOOT_GDT: u64 = 0x500;
/// The zero page (`struct boot_params`) of the 64-bit boot protocol.
pub const ZERO_PAGE: u64 = 0x1_0000;
/// `hvm_start_info` of the PVH boot protocol; module list and memory map follow in the same page.
pub const PVH_START_INFO: u64 = 0x1_1000;
/// The PVH module list (one entry: the initrd).
pub const PVH_MODULES: u64 = 0x1_1100;
/// The PVH memory map.
pub const PVH_MEMORY_MAP: u64 = 0x1_1200;
/// The kernel command line.
pub const COMMAND_LINE: u64 = 0x2_0000;
/// Longest command line in bytes, its terminating zero included (COMMAND_LINE_SIZE of x86 Linux).
pub const COMMAND_LINE_BYTES: usize = 2048;
/// End of conventional memory: the extended BIOS data area would start here.
pub const CONVENTIONAL_END: u64 = 0x9_fc00;
/// ACPI tables, where a PC has its BIOS: a guest that scans for the RSDP finds it here too.
pub const ACPI_TABLES: u64 = 0xe_0000;
/// End of the ACPI tables' space, and start of high memory.
pub const HIGH_MEMORY: u64 = 0x10_0000;

/// End of the memory below the hole.
pub const LOW_MEMORY_END: u64 = 0xc000_0000;
/// First address above the hole.
pub const ABOVE_HOLE: u64 = 0x1_0000_0000;

/// First address of the window in which BARs are placed.
pub const PCI_WINDOW: u64 = 0xc000_0000;
/// Bytes of the BAR window.
pub const PCI_WINDOW_SIZE: u64 = 0x1000_0000;
/// First virtio-mmio device; the next ones follow without gaps.
pub const MMIO_DEVICES: u64 = 0xd000_0000;
/// ECAM of bus 0.
pub const ECAM: u64 = 0xe000_0000;
/// Bytes of the ECAM: 32 devices of 8 functions of 4 KiB.
pub const ECAM_SIZE: u64 = 0x10_0000;
/// The I/O APIC.
pub const IO_APIC: u64 = 0xfec0_0000;
/// The local APICs.
pub const LOCAL_APIC: u64 = 0xfee0_0000;
/// The page KVM needs to run real mode on old Intel processors.
pub const KVM_IDENTITY_MAP: u64 = 0xfffb_c000;
/// The three pages KVM needs for a TSS on Intel processors.
pub const KVM_TSS: u64 = 0xfffb_d000;

/// Port of the first serial line.
pub const COM1: u16 = 0x3f8;
/// Interrupt of the first serial line.
pub const COM1_GSI: u32 = 4;
/// The keyboard controller's ports, 0x60 to 0x64.
pub const I8042: u16 = 0x60;
/// PCI configuration mechanism 1: address and data, and the reset control register at 0xcf9 between
/// them.
pub const PCI_PORTS: u16 = 0xcf8;
/// Reset control register (as in Intel's chip sets).
pub const RESET_PORT: u16 = 0xcf9;
/// Value that resets when written to [`RESET_PORT`].
pub const RESET_VALUE: u8 = 0x06;
/// ACPI fixed hardware: PM1 events, PM1 control, the timer.
pub const ACPI_PM: u16 = 0x600;
/// The port where the guest reports a panic of its kernel (QEMU's pvpanic port).
pub const PANIC: u16 = 0x505;
/// The interrupt of ACPI events (never raised).
pub const SCI: u16 = 9;

/// Pins of the I/O APIC.
pub const IO_APIC_PINS: u32 = 24;
/// Pins that virtio-mmio devices use, in this order. The list leaves out the pins of the timer (0,
/// 2), keyboard (1), serial lines (3, 4), clock (8), ACPI (9) and coprocessor (13).
pub const MMIO_GSIS: [u32; 16] = [5, 6, 7, 10, 11, 12, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23];

/// Smallest guest memory in bytes: no kernel starts with less.
pub const LEAST_MEMORY: u64 = 1 << 20;
/// Largest guest memory in bytes.
pub const MOST_MEMORY: u64 = 1 << 40;

/// Address and length of each range of the memory of a guest with `size` bytes.
pub fn memory_ranges(size: u64) -> Vec<(u64, u64)> {
    if size <= LOW_MEMORY_END {
        vec![(0, size)]
    } else {
        vec![(0, LOW_MEMORY_END), (ABOVE_HOLE, size - LOW_MEMORY_END)]
    }
}

/// The kind of a range in the firmware's memory map (ACPI 6.5, 15).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeKind {
    /// Usable memory.
    Memory,
    /// Reserved: the guest must not use it.
    Reserved,
}

/// The memory map that the boot protocol passes to the kernel (E820, and PVH's): address, length
/// and kind, in ascending order.
pub fn memory_map(size: u64) -> Vec<(u64, u64, RangeKind)> {
    let mut map = vec![
        (0, CONVENTIONAL_END, RangeKind::Memory),
        (
            CONVENTIONAL_END,
            0xa_0000 - CONVENTIONAL_END,
            RangeKind::Reserved,
        ),
        (ACPI_TABLES, HIGH_MEMORY - ACPI_TABLES, RangeKind::Reserved),
    ];
    let low_end = size.min(LOW_MEMORY_END);
    if low_end > HIGH_MEMORY {
        map.push((HIGH_MEMORY, low_end - HIGH_MEMORY, RangeKind::Memory));
    }
    map.push((ECAM, ECAM_SIZE, RangeKind::Reserved));
    if size > LOW_MEMORY_END {
        map.push((ABOVE_HOLE, size - LOW_MEMORY_END, RangeKind::Memory));
    }
    map
}

/// Offset of the PM1 control register from [`ACPI_PM`].
pub const ACPI_PM_CONTROL: u64 = 4;

/// Offset of the power management timer from [`ACPI_PM`].
pub const ACPI_PM_TIMER: u64 = 8;

/// SLP_TYP of S5, as the DSDT's `\_S5` gives it.
pub const SLEEP_TYPE_S5: u8 = 5;

/// Bytes at [`PANIC`].
pub const PANIC_SIZE: u64 = 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_split_around_the_hole() {
        assert_eq!(memory_ranges(512 << 20), [(0, 512 << 20)]);
        assert_eq!(memory_ranges(3 << 30), [(0, 3 << 30)]);
        assert_eq!(memory_ranges(4 << 30), [(0, 3 << 30), (4 << 30, 1 << 30)]);
    }

    #[test]
    fn the_memory_map_is_sorted_and_covers_all_memory_above_the_first_mebibyte() {
        for size in [2 << 20, 512 << 20, 3 << 30, 5u64 << 30] {
            let map = memory_map(size);
            for pair in map.windows(2) {
                assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{map:x?}");
            }
            let usable: u64 = map
                .iter()
                .filter(|range| range.2 == RangeKind::Memory)
                .map(|range| range.1)
                .sum();
            assert_eq!(usable, size - (HIGH_MEMORY - CONVENTIONAL_END));
        }
    }
}
