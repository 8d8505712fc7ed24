//! Kernels of a few instructions, in the two formats that `walvisor run` boots. Every KVM runs
//! them, also one that interprets ring 0.
//!
//! ```text
//!   entry: ESI = the command line, as the boot protocol hands it over
//!          print it to COM1, then do one thing
//! ```

use std::path::{Path, PathBuf};

/// What the kernel does after it has printed its command line.
#[derive(Clone, Copy)]
pub enum KernelAction {
    /// Power off: S5 to PM1 control.
    PowerOff,
    /// Reset control register, 0xcf9.
    ResetRegister,
    /// Keyboard controller, command 0xfe to port 0x64.
    ResetKeyboard,
    /// Send back what the serial line receives, for ever.
    Echo,
    /// Enable the power button, print "L", and power off when it is pressed.
    AwaitButton,
    /// Enable the power button, print "L", and ignore it.
    IgnoreButton,
    /// Execute an undefined instruction without an exception handler: a triple fault.
    Fault,
    /// Start the other processors, each of which faults without an exception handler: a triple
    /// fault; halt.
    FaultElsewhere,
    /// Jump to an address without memory.
    JumpAstray,
}

impl KernelAction {
    /// The instructions; these bytes mean the same in 32-bit and in 64-bit mode.
    fn code(self) -> &'static [u8] {
        match self {
            // mov dx, 0x604; mov ax, 0x3400; out dx, ax
            Self::PowerOff => &[0x66, 0xba, 0x04, 0x06, 0x66, 0xb8, 0x00, 0x34, 0x66, 0xef],
            // mov dx, 0xcf9; mov al, 6; out dx, al
            Self::ResetRegister => &[0x66, 0xba, 0xf9, 0x0c, 0xb0, 0x06, 0xee],
            // mov al, 0xfe; out 0x64, al
            Self::ResetKeyboard => &[0xb0, 0xfe, 0xe6, 0x64],
            // again: mov dx, 0x3fd; in al, dx; test al, 1; jz again; mov dx, 0x3f8; in al, dx; out
            // dx, al; jmp again
            Self::Echo => &[
                0x66, 0xba, 0xfd, 0x03, 0xec, 0xa8, 0x01, 0x74, 0xf7, 0x66, 0xba, 0xf8, 0x03, 0xec,
                0xee, 0xeb, 0xef,
            ],
            // mov dx, 0x602; mov ax, 0x100; out dx, ax; mov dx, 0x3f8; mov al, 'L'; out dx, al
            // again: mov dx, 0x600; in ax, dx; test ax, 0x100; jz again; then as PowerOff
            Self::AwaitButton => &[
                0x66, 0xba, 0x02, 0x06, 0x66, 0xb8, 0x00, 0x01, 0x66, 0xef, 0x66, 0xba, 0xf8, 0x03,
                0xb0, 0x4c, 0xee, 0x66, 0xba, 0x00, 0x06, 0x66, 0xed, 0x66, 0xa9, 0x00, 0x01, 0x74,
                0xf4, 0x66, 0xba, 0x04, 0x06, 0x66, 0xb8, 0x00, 0x34, 0x66, 0xef,
            ],
            // The same up to the 'L'; again: jmp again
            Self::IgnoreButton => &[
                0x66, 0xba, 0x02, 0x06, 0x66, 0xb8, 0x00, 0x01, 0x66, 0xef, 0x66, 0xba, 0xf8, 0x03,
                0xb0, 0x4c, 0xee, 0xeb, 0xfe,
            ],
            // ud2
            Self::Fault => &[0x0f, 0x0b],
            // mov edi, 0x70000; there, code for the others: lidt cs:[0x20], where memory is zero;
            // mov eax, cr0; or al, 1; mov cr0, eax; mov ds, ax: an invalid selector mov edi,
            // 0xfee00300: the local APIC's ICR: INIT, then a start at 0x70000, to all but this one
            Self::FaultElsewhere => &[
                0xbf, 0x00, 0x00, 0x07, 0x00, 0xc7, 0x07, 0x2e, 0x0f, 0x01, 0x1e, 0xc7, 0x47, 0x04,
                0x20, 0x00, 0x0f, 0x20, 0xc7, 0x47, 0x08, 0xc0, 0x0c, 0x01, 0x0f, 0xc7, 0x47, 0x0c,
                0x22, 0xc0, 0x8e, 0xd8, 0xbf, 0x00, 0x03, 0xe0, 0xfe, 0xc7, 0x07, 0x00, 0x45, 0x0c,
                0x00, 0xc7, 0x07, 0x70, 0x46, 0x0c, 0x00,
            ],
            // mov eax, 0xb0000000; jmp rax (jmp eax)
            Self::JumpAstray => &[0xb8, 0x00, 0x00, 0x00, 0xb0, 0xff, 0xe0],
        }
    }
}

/// mov dx, 0x3f8; next: lodsb; test al, al; jz done; out dx, al; jmp next; done:
const PRINT: [u8; 12] = [
    0x66, 0xba, 0xf8, 0x03, 0xac, 0x84, 0xc0, 0x74, 0x03, 0xee, 0xeb, 0xf8,
];
/// hlt; jmp back
const HALT: [u8; 3] = [0xf4, 0xeb, 0xfd];

fn program(get_command_line: &[u8], then: KernelAction) -> Vec<u8> {
    [get_command_line, &PRINT, then.code(), &HALT].concat()
}

/// A bzImage with a 64-bit entry: one setup sector, then 512 bytes of zeroes, then the program.
pub fn bzimage(then: KernelAction) -> Vec<u8> {
    // mov esi, [rsi + 0x228]: cmd_line_ptr of the zero page.
    let code = program(&[0x8b, 0xb6, 0x28, 0x02, 0x00, 0x00], then);
    let mut payload = vec![0; 0x200];
    payload.extend(code);
    payload.resize(payload.len().next_multiple_of(16), 0);
    let mut image = vec![0; 1024];
    let mut put =
        |offset: usize, bytes: &[u8]| image[offset..offset + bytes.len()].copy_from_slice(bytes);
    put(0x1f1, &[1]);
    put(0x1f4, &(payload.len() as u32 / 16).to_le_bytes());
    put(0x1fe, &0xaa55u16.to_le_bytes());
    put(0x202, b"HdrS");
    put(0x206, &0x020fu16.to_le_bytes());
    put(0x211, &[1]);
    put(0x214, &0x10_0000u32.to_le_bytes());
    put(0x22c, &0x7fff_ffffu32.to_le_bytes());
    put(0x236, &1u16.to_le_bytes());
    put(0x258, &0x10_0000u64.to_le_bytes());
    put(0x260, &0x1_0000u32.to_le_bytes());
    image.extend(payload);
    image
}

/// An ELF file with a PVH entry, if `note` says so: a loaded segment at 1 MiB and a note that names
/// it.
pub fn vmlinux(then: KernelAction, note: bool) -> Vec<u8> {
    const ENTRY: u64 = 0x10_0000;
    const CODE_OFFSET: u64 = 0x1000;
    const NOTE_OFFSET: u64 = 0x800;
    // mov esi, [ebx + 24]: cmdline_paddr of the start info.
    let code = program(&[0x8b, 0x73, 0x18], then);
    let mut image = vec![0; CODE_OFFSET as usize];
    let mut put =
        |offset: usize, bytes: &[u8]| image[offset..offset + bytes.len()].copy_from_slice(bytes);
    put(0, b"\x7fELF\x02\x01\x01");
    put(16, &2u16.to_le_bytes());
    put(18, &62u16.to_le_bytes());
    put(20, &1u32.to_le_bytes());
    put(24, &ENTRY.to_le_bytes());
    put(32, &64u64.to_le_bytes());
    put(52, &64u16.to_le_bytes());
    put(54, &56u16.to_le_bytes());
    put(56, &2u16.to_le_bytes());
    // One empty section header at the end, by which a truncated file is detected.
    put(40, &(CODE_OFFSET + code.len() as u64).to_le_bytes());
    put(58, &64u16.to_le_bytes());
    put(60, &1u16.to_le_bytes());
    let mut segment = |index: usize, kind: u32, offset: u64, address: u64, size: u64| {
        let at = 64 + index * 56;
        put(at, &kind.to_le_bytes());
        for (field, value) in [
            (8, offset),
            (16, address),
            (24, address),
            (32, size),
            (40, size),
            (48, 4),
        ] {
            put(at + field, &value.to_le_bytes());
        }
    };
    segment(0, 1, CODE_OFFSET, ENTRY, code.len() as u64);
    segment(1, if note { 4 } else { 0 }, NOTE_OFFSET, 0, 20);
    // XEN_ELFNOTE_PHYS32_ENTRY: name size, descriptor size, type, "Xen", entry.
    for (offset, word) in [(0, 4u32), (4, 4), (8, 18), (16, ENTRY as u32)] {
        put(NOTE_OFFSET as usize + offset, &word.to_le_bytes());
    }
    put(NOTE_OFFSET as usize + 12, b"Xen\0");
    image.extend(code);
    image.extend([0; 64]);
    image
}

/// Writes `image` as `name` into `directory`.
pub fn save(directory: &Path, name: &str, image: &[u8]) -> PathBuf {
    let path = directory.join(name);
    std::fs::write(&path, image).expect("a kernel is written");
    path
}
