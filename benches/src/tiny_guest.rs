//! The smallest guest: a PVH ELF kernel that only resets the machine. It shows what starting costs,
//! and runs on every KVM, even one that interprets ring 0.

/// `mov al, 0xfe; out 0x64, al; hlt; jmp $-1`: the keyboard controller's reset line. PVH starts in
/// 32-bit protected mode.
const CODE: [u8; 7] = [0xb0, 0xfe, 0xe6, 0x64, 0xf4, 0xeb, 0xfd];
/// Load address and entry point of the code.
const ENTRY: u32 = 0x10_0000;
/// Xen's note type `XEN_ELFNOTE_PHYS32_ENTRY`: the 32-bit entry point.
const PHYS32_ENTRY: u32 = 18;

const ELF_HEADER: u64 = 64;
const PROGRAM_HEADER: u64 = 56;
const CODE_AT: u64 = ELF_HEADER + 2 * PROGRAM_HEADER;
const NOTE_AT: u64 = CODE_AT + 8;

/// The guest as an ELF file.
#[must_use]
pub fn image() -> Vec<u8> {
    let mut note = Vec::new();
    for word in [4, 4, PHYS32_ENTRY] {
        note.extend_from_slice(&word.to_le_bytes());
    }
    note.extend_from_slice(b"Xen\0");
    note.extend_from_slice(&ENTRY.to_le_bytes());

    let mut file = b"\x7fELF\x02\x01\x01".to_vec();
    file.resize(16, 0);
    // Executable, x86-64, version 1.
    file.extend_from_slice(&2u16.to_le_bytes());
    file.extend_from_slice(&62u16.to_le_bytes());
    file.extend_from_slice(&1u32.to_le_bytes());
    // Entry, program headers, no section headers.
    for word in [u64::from(ENTRY), ELF_HEADER, 0] {
        file.extend_from_slice(&word.to_le_bytes());
    }
    file.extend_from_slice(&0u32.to_le_bytes());
    for half in [ELF_HEADER as u16, PROGRAM_HEADER as u16, 2, 64, 0, 0] {
        file.extend_from_slice(&half.to_le_bytes());
    }
    program_header(&mut file, 1, 5, CODE_AT, CODE.len() as u64);
    program_header(&mut file, 4, 4, NOTE_AT, note.len() as u64);
    file.extend_from_slice(&CODE);
    file.resize(NOTE_AT as usize, 0);
    file.extend_from_slice(&note);
    file
}

/// Adds an Elf64_Phdr: type 1 is PT_LOAD, 4 is PT_NOTE.
fn program_header(file: &mut Vec<u8>, kind: u32, flags: u32, offset: u64, size: u64) {
    file.extend_from_slice(&kind.to_le_bytes());
    file.extend_from_slice(&flags.to_le_bytes());
    let address = u64::from(ENTRY);
    for word in [offset, address, address, size, size, 4] {
        file.extend_from_slice(&word.to_le_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_point_at_the_code_and_the_note() {
        let file = image();
        let at = |offset: u64, length: usize| &file[offset as usize..][..length];
        assert_eq!(at(CODE_AT, CODE.len()), CODE);
        assert_eq!(at(NOTE_AT + 12, 4), b"Xen\0");
        assert_eq!(at(NOTE_AT + 16, 4), ENTRY.to_le_bytes());
        assert_eq!(file.len() as u64, NOTE_AT + 20);
    }
}
