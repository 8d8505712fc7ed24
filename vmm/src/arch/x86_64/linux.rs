//! Loads a Linux kernel, its initrd and its command line, and writes the structures of the boot
//! protocol.
//!
//! A kernel is one of two kinds of file: a bzImage (64-bit boot protocol, with a zero page), or an
//! ELF vmlinux with a PVH entry.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use linux_loader::loader::bootparam::{boot_params, setup_header};
use linux_loader::loader::elf::start_info::{
    hvm_memmap_table_entry, hvm_modlist_entry, hvm_start_info,
};
use linux_loader::loader::elf::{Elf, PvhBootCapability};
use linux_loader::loader::{BzImage, KernelLoader};
use vm_memory::{
    ByteValued, Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap,
    GuestMemoryRegion,
};

use super::layout::{self, RangeKind};
use super::start_state::LinuxEntry;

/// Offset of the setup header's magic in a bzImage (boot protocol, "The Real-Mode Kernel Header").
const SETUP_MAGIC_OFFSET: usize = 0x202;
const SETUP_MAGIC: &[u8] = b"HdrS";
const ELF_MAGIC: &[u8] = b"\x7fELF";
/// How many bytes at the start of a file tell its kind.
const HEAD: usize = 0x270;
/// First boot protocol version with a 64-bit entry (2.12).
const LEAST_PROTOCOL: u16 = 0x020c;
/// Set if the kernel has a 64-bit entry, 512 bytes behind its start.
const XLF_KERNEL_64: u16 = 1;
const ENTRY_64_OFFSET: u64 = 0x200;
/// Type of a boot loader that has no registered number.
const LOADER_UNDEFINED: u8 = 0xff;
const E820_RAM: u32 = 1;
const E820_RESERVED: u32 = 2;
const PVH_MAGIC: u32 = 0x336e_c578;
const PAGE: u64 = 4096;

/// The files and the command line of a Linux guest.
#[derive(Clone, Debug)]
pub struct LinuxImage {
    /// A bzImage or a vmlinux.
    pub kernel: PathBuf,
    /// Initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Kernel command line.
    pub command_line: String,
}

/// Why a kernel could not be loaded. Its text is one line: what, where, what to do.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file cannot be opened or read.
    #[error("{what} '{}': {error}: give the path of a readable file", path.display())]
    Open {
        /// `kernel` or `initrd`.
        what: &'static str,
        /// The file's path.
        path: PathBuf,
        /// The system's reason.
        error: std::io::Error,
    },
    /// The file is neither a bzImage nor an ELF file.
    #[error("kernel '{}' is neither a bzImage nor an ELF vmlinux: give one of the two, \
        uncompressed", .0.display())]
    NotAKernel(PathBuf),
    /// The file ends too early.
    #[error("kernel '{}' is truncated: {have} bytes instead of {need}; copy it again", path.display())]
    Truncated {
        /// The kernel's path.
        path: PathBuf,
        /// The file's size in bytes.
        have: u64,
        /// The size in bytes that its headers ask for.
        need: u64,
    },
    /// The file is damaged.
    #[error("kernel '{}' cannot be loaded: {reason}; it may be damaged, copy or build it \
        again", path.display())]
    Damaged {
        /// The kernel's path.
        path: PathBuf,
        /// The damage that was found.
        reason: String,
    },
    /// The kernel has no entry that this VMM can use.
    #[error("kernel '{}' {missing}", path.display())]
    NoEntry {
        /// The kernel's path.
        path: PathBuf,
        /// The missing entry, and the remedy.
        missing: &'static str,
    },
    /// Guest memory is too small.
    #[error("{what} '{}' needs {need} MiB of guest memory, but the guest has {have}: give more \
        with --memory", path.display())]
    Memory {
        /// `kernel` or `initrd`.
        what: &'static str,
        /// The file's path.
        path: PathBuf,
        /// Mebibytes needed.
        need: u64,
        /// Mebibytes of guest memory.
        have: u64,
    },
    /// The command line is too long.
    #[error("the command line is {0} bytes, more than the kernel's limit of {most}: shorten \
        --cmdline", most = layout::COMMAND_LINE_BYTES - 1)]
    CommandLine(usize),
    /// Boot structures do not fit guest memory.
    #[error("the boot structures do not fit guest memory ({0}): give more with --memory")]
    Structures(#[from] GuestMemoryError),
}

/// Address and size of the initrd in guest memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Initrd {
    address: u64,
    size: u64,
}

/// A kernel file that was checked to be complete.
struct Kernel {
    file: File,
    size: u64,
    format: Format,
}

/// The format of a kernel file.
enum Format {
    BzImage(Box<setup_header>),
    Vmlinux,
}

/// Checks what can be checked without a VM: the files are readable, and the kernel is complete.
///
/// # Errors
/// If a file is missing, truncated or not a kernel, or the command line is too long.
pub fn check(image: &LinuxImage) -> Result<(), LoadError> {
    if image.command_line.len() >= layout::COMMAND_LINE_BYTES {
        return Err(LoadError::CommandLine(image.command_line.len()));
    }
    open_kernel(&image.kernel)?;
    if let Some(path) = &image.initrd {
        open_initrd(path)?;
    }
    Ok(())
}

/// Loads `image` into `memory` and returns its entry point.
///
/// # Errors
/// If a file is missing, truncated, damaged, not a kernel, or too large for the memory.
pub fn load(memory: &GuestMemoryMmap, image: &LinuxImage) -> Result<LinuxEntry, LoadError> {
    // The files may have changed since the first check.
    check(image)?;
    let mut command_line = image.command_line.clone().into_bytes();
    command_line.push(0);
    memory.write_slice(&command_line, GuestAddress(layout::COMMAND_LINE))?;
    let Kernel {
        mut file,
        size,
        format,
    } = open_kernel(&image.kernel)?;
    match format {
        Format::BzImage(header) => load_bzimage(memory, image, &mut file, size, &header),
        Format::Vmlinux => load_vmlinux(memory, image, &mut file),
    }
}

/// Opens the kernel at `path`.
fn open_kernel(path: &Path) -> Result<Kernel, LoadError> {
    let open_error = |error| LoadError::Open {
        what: "kernel",
        path: path.to_owned(),
        error,
    };
    let mut file = File::open(path).map_err(open_error)?;
    let mut head = Vec::new();
    file.by_ref()
        .take(HEAD as u64)
        .read_to_end(&mut head)
        .map_err(open_error)?;
    let size = file.seek(SeekFrom::End(0)).map_err(open_error)?;
    let truncated = |need| LoadError::Truncated {
        path: path.to_owned(),
        have: size,
        need,
    };
    let magic = SETUP_MAGIC_OFFSET..SETUP_MAGIC_OFFSET + SETUP_MAGIC.len();
    let format = if head.get(magic) == Some(SETUP_MAGIC) {
        if head.len() < HEAD {
            return Err(truncated(HEAD as u64));
        }
        let mut header = Box::new(setup_header::default());
        file.seek(SeekFrom::Start(0x1f1))
            .and_then(|_| file.read_exact(header.as_mut_slice()))
            .map_err(open_error)?;
        let (version, flags) = (header.version, header.xloadflags);
        if version < LEAST_PROTOCOL || flags & XLF_KERNEL_64 == 0 {
            return Err(LoadError::NoEntry {
                path: path.to_owned(),
                missing: "is not a 64-bit kernel (boot protocol 2.12 with a 64-bit entry): give an \
                    x86-64 kernel",
            });
        }
        let need = setup_size(&header) + u64::from(header.syssize) * 16;
        // The header gives the payload's length rounded up to 16 bytes.
        if size + 15 < need {
            return Err(truncated(need));
        }
        Format::BzImage(header)
    } else if head.starts_with(ELF_MAGIC) {
        if let Some(need) = elf_size(&head).filter(|need| *need > size) {
            return Err(truncated(need));
        }
        Format::Vmlinux
    } else {
        return Err(LoadError::NotAKernel(path.to_owned()));
    };
    Ok(Kernel { file, size, format })
}

/// Bytes of a bzImage before its payload.
fn setup_size(header: &setup_header) -> u64 {
    let sectors = match header.setup_sects {
        0 => 4,
        sectors => u64::from(sectors),
    };
    (sectors + 1) * 512
}

/// Opens the initrd at `path`, and returns its size in bytes.
fn open_initrd(path: &Path) -> Result<(File, u64), LoadError> {
    let open_error = |error| LoadError::Open {
        what: "initrd",
        path: path.to_owned(),
        error,
    };
    let mut file = File::open(path).map_err(open_error)?;
    // Opening a directory succeeds, but reading it fails.
    let _ = file.read(&mut [0]).map_err(open_error)?;
    let size = file.seek(SeekFrom::End(0)).map_err(open_error)?;
    file.rewind().map_err(open_error)?;
    Ok((file, size))
}

/// End of the memory below the hole.
fn low_end(memory: &GuestMemoryMmap) -> u64 {
    memory.iter().next().map_or(0, |region| region.len())
}

/// Bytes of guest memory.
fn total(memory: &GuestMemoryMmap) -> u64 {
    memory.iter().map(|region| region.len()).sum()
}

/// The error for a file `what` that would end at address `end`, beyond guest memory.
fn too_small(memory: &GuestMemoryMmap, what: &'static str, path: &Path, end: u64) -> LoadError {
    LoadError::Memory {
        what,
        path: path.to_owned(),
        need: end.div_ceil(1 << 20),
        have: total(memory) >> 20,
    }
}

/// Loads a bzImage at its preferred address, for entry by the 64-bit boot protocol.
fn load_bzimage(
    memory: &GuestMemoryMmap,
    image: &LinuxImage,
    file: &mut File,
    size: u64,
    header: &setup_header,
) -> Result<LinuxEntry, LoadError> {
    let path = &image.kernel;
    let damaged = |reason: String| LoadError::Damaged {
        path: path.clone(),
        reason,
    };
    let (start, run) = (
        header.pref_address,
        u64::from(header.init_size).max(size.saturating_sub(setup_size(header))),
    );
    let end = start
        .checked_add(run)
        .ok_or_else(|| damaged("its addresses wrap around".to_owned()))?;
    if end > low_end(memory) {
        return Err(too_small(memory, "kernel", path, end));
    }
    let loaded = BzImage::load(
        memory,
        Some(GuestAddress(start)),
        file,
        Some(GuestAddress(layout::HIGH_MEMORY)),
    )
    .map_err(|error| damaged(error.to_string()))?;
    let limit = if header.initrd_addr_max == 0 {
        u32::MAX
    } else {
        header.initrd_addr_max
    };
    let initrd = load_initrd(memory, image, end, u64::from(limit) + 1)?;

    let mut params = boot_params {
        hdr: loaded.setup_header.unwrap_or(*header),
        ..Default::default()
    };
    params.hdr.type_of_loader = LOADER_UNDEFINED;
    params.hdr.cmd_line_ptr = layout::COMMAND_LINE as u32;
    params.hdr.ramdisk_image = initrd.address as u32;
    params.hdr.ramdisk_size = initrd.size as u32;
    params.acpi_rsdp_addr = layout::ACPI_TABLES;
    let map = layout::memory_map(total(memory));
    params.e820_entries = map.len() as u8;
    for (index, (address, size, kind)) in map.into_iter().enumerate() {
        let entry = &mut params.e820_table[index];
        entry.addr = address;
        entry.size = size;
        entry.r#type = e820(kind);
    }
    memory.write_obj(params, GuestAddress(layout::ZERO_PAGE))?;
    Ok(LinuxEntry::Long {
        address: start + ENTRY_64_OFFSET,
    })
}

/// Loads a vmlinux at the addresses of its segments, for entry at the address in its PVH note.
fn load_vmlinux(
    memory: &GuestMemoryMmap,
    image: &LinuxImage,
    file: &mut File,
) -> Result<LinuxEntry, LoadError> {
    let path = &image.kernel;
    let loaded = Elf::load(memory, None, file, Some(GuestAddress(layout::HIGH_MEMORY))).map_err(
        |error| {
            let reason = format!("{error} (or it needs more than --memory)");
            LoadError::Damaged {
                path: path.clone(),
                reason,
            }
        },
    )?;
    let PvhBootCapability::PvhEntryPresent(entry) = loaded.pvh_boot_cap else {
        return Err(LoadError::NoEntry {
            path: path.clone(),
            missing: "has no PVH entry: build it with CONFIG_PVH=y, or give its bzImage",
        });
    };
    if loaded.kernel_end > low_end(memory) {
        return Err(too_small(memory, "kernel", path, loaded.kernel_end));
    }
    let initrd = load_initrd(memory, image, loaded.kernel_end, layout::LOW_MEMORY_END)?;

    let map = layout::memory_map(total(memory));
    let info = hvm_start_info {
        magic: PVH_MAGIC,
        version: 1,
        nr_modules: u32::from(initrd.size > 0),
        modlist_paddr: layout::PVH_MODULES,
        cmdline_paddr: layout::COMMAND_LINE,
        rsdp_paddr: layout::ACPI_TABLES,
        memmap_paddr: layout::PVH_MEMORY_MAP,
        memmap_entries: map.len() as u32,
        ..Default::default()
    };
    let module = hvm_modlist_entry {
        paddr: initrd.address,
        size: initrd.size,
        ..Default::default()
    };
    memory.write_obj(info, GuestAddress(layout::PVH_START_INFO))?;
    memory.write_obj(module, GuestAddress(layout::PVH_MODULES))?;
    for (index, (addr, size, kind)) in (0u64..).zip(map) {
        let entry = hvm_memmap_table_entry {
            addr,
            size,
            type_: e820(kind),
            reserved: 0,
        };
        let place = layout::PVH_MEMORY_MAP + index * size_of::<hvm_memmap_table_entry>() as u64;
        memory.write_obj(entry, GuestAddress(place))?;
    }
    Ok(LinuxEntry::Pvh { address: entry.0 })
}

/// The type of a range in E820 and in PVH's memory map.
fn e820(kind: RangeKind) -> u32 {
    match kind {
        RangeKind::Memory => E820_RAM,
        RangeKind::Reserved => E820_RESERVED,
    }
}

/// End of an ELF file's section headers, which linkers put at the end of the file.
fn elf_size(head: &[u8]) -> Option<u64> {
    let start = u64::from_le_bytes(head.get(0x28..0x30)?.try_into().ok()?);
    let size = u16::from_le_bytes(head.get(0x3a..0x3c)?.try_into().ok()?);
    let count = u16::from_le_bytes(head.get(0x3c..0x3e)?.try_into().ok()?);
    start.checked_add(u64::from(size) * u64::from(count))
}

/// Loads the initrd at the highest address below `limit`, behind the kernel, which ends at
/// `kernel_end`.
fn load_initrd(
    memory: &GuestMemoryMmap,
    image: &LinuxImage,
    kernel_end: u64,
    limit: u64,
) -> Result<Initrd, LoadError> {
    let Some(path) = &image.initrd else {
        return Ok(Initrd::default());
    };
    let (mut file, size) = open_initrd(path)?;
    let address = place_initrd(size, kernel_end, low_end(memory).min(limit)).ok_or_else(|| {
        too_small(
            memory,
            "initrd",
            path,
            kernel_end.next_multiple_of(PAGE).saturating_add(size),
        )
    })?;
    memory
        .read_exact_volatile_from(GuestAddress(address), &mut file, size as usize)
        .map_err(|error| LoadError::Open {
            what: "initrd",
            path: path.clone(),
            error: std::io::Error::other(error),
        })?;
    Ok(Initrd { address, size })
}

/// The highest page-aligned place for `size` bytes between `from` and `to`.
fn place_initrd(size: u64, from: u64, to: u64) -> Option<u64> {
    let address = to.checked_sub(size)? & !(PAGE - 1);
    (address >= from).then_some(address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_initrd_lies_high_aligned_and_behind_the_kernel() {
        assert_eq!(place_initrd(5000, 0x100_0000, 0x200_0000), Some(0x1ff_e000));
        assert_eq!(
            place_initrd(0x1000, 0x1ff_f000, 0x200_0000),
            Some(0x1ff_f000)
        );
        assert_eq!(place_initrd(0x1001, 0x1ff_f000, 0x200_0000), None);
        assert_eq!(place_initrd(u64::MAX, 0, 0x200_0000), None);
    }

    #[test]
    fn an_elf_header_tells_the_size_of_its_file() {
        let mut head = vec![0; 64];
        head[0x28..0x30].copy_from_slice(&1000u64.to_le_bytes());
        head[0x3a..0x3c].copy_from_slice(&64u16.to_le_bytes());
        head[0x3c..0x3e].copy_from_slice(&10u16.to_le_bytes());
        assert_eq!(elf_size(&head), Some(1640));
        assert_eq!(elf_size(&head[..50]), None);
    }
}
