//! Reports a vCPU that could not go on: its state and the likely cause.

use std::fmt;
use std::fmt::Write as _;

use kvm_bindings::KVM_INTERNAL_ERROR_EMULATION;
use kvm_ioctls::VcpuFd;
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Longest x86 instruction in bytes.
const MOST_INSTRUCTION_BYTES: usize = 15;
const CR0_PROTECTED: u64 = 1;
const EFER_LONG_MODE_ACTIVE: u64 = 1 << 10;
const CR0_PAGING: u64 = 1 << 31;
const PAGE: u64 = 4096;

/// Why a vCPU could not go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum CrashReason {
    /// KVM could not emulate an instruction.
    Emulation,
    /// KVM failed in another way, with this sub-error.
    Internal(u32),
    /// The processor refused the guest's state, with this hardware reason.
    Entry(u64),
    /// A triple fault: an exception during the delivery of a double fault.
    TripleFault,
    /// An exit that this VMM does not know.
    Exit(String),
    /// KVM_RUN returned this error.
    Run(String),
    /// The thread of the vCPU panicked.
    Panic,
}

/// Registers and code of the vCPU when it crashed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CpuPosition {
    /// Instruction pointer, relative to CS.
    pub rip: u64,
    /// Start of the code segment.
    pub code_base: u64,
    /// Stack pointer.
    pub rsp: u64,
    /// Control register 0.
    pub cr0: u64,
    /// Root of the page tables.
    pub cr3: u64,
    /// Extended features: whether long mode is active.
    pub efer: u64,
    /// Privilege level.
    pub ring: u8,
    /// The bytes at `rip`, as far as they could be read.
    pub bytes: Vec<u8>,
}

/// A vCPU that cannot go on. Its text is one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Crash {
    /// Number of the vCPU.
    pub vcpu: u8,
    /// Why it could not go on.
    pub reason: CrashReason,
    /// Its registers and code, if the registers could be read.
    pub position: Option<CpuPosition>,
    /// Whether this processor has VMX or SVM. Without them KVM interprets ring 0.
    pub hardware_virtualisation: bool,
}

impl Crash {
    /// A crash of vCPU `id` for `reason`, with its registers and the bytes it was about to execute.
    pub fn capture(
        id: u8,
        reason: CrashReason,
        vcpu: &mut VcpuFd,
        memory: &GuestMemoryMmap,
    ) -> Self {
        let emulated = match reason {
            CrashReason::Emulation => emulation_bytes(vcpu),
            _ => Vec::new(),
        };
        Self {
            vcpu: id,
            reason,
            position: position(vcpu, memory, emulated),
            hardware_virtualisation: hardware_virtualisation(),
        }
    }

    /// The likely cause and the remedy.
    fn cause(&self) -> &'static str {
        let ring = self.position.as_ref().map(|position| position.ring);
        match &self.reason {
            CrashReason::Emulation
            | CrashReason::Entry(_)
            | CrashReason::TripleFault
            | CrashReason::Internal(_)
                if !self.hardware_virtualisation && ring != Some(3) =>
            {
                "this KVM has no VMX or SVM: it interprets ring 0 and cannot run a stock Linux \
                 kernel; run the guest nested in QEMU's emulation ('walvisor-guest-images boot \
                 IMAGE'), or on a machine with VT-x or AMD-V"
            }
            CrashReason::Emulation => {
                "the guest executed code outside its memory, or accessed a device with an \
                 instruction that KVM does not emulate; check the kernel image and --memory"
            }
            CrashReason::Entry(_) => {
                "the processor refused the guest's registers: a kernel for another processor, or \
                 damaged"
            }
            CrashReason::TripleFault => {
                "the guest faulted before its kernel had set up: a kernel for another processor, a \
                 damaged one, or too little --memory"
            }
            CrashReason::Internal(_) | CrashReason::Exit(_) => {
                "an event that KVM could not deliver to the guest; see the host's kernel log"
            }
            CrashReason::Run(_) => "KVM itself failed; see the host's kernel log",
            CrashReason::Panic => "a bug in walvisor: please report it with the text above",
        }
    }
}

impl fmt::Display for Crash {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "vCPU {}: ", self.vcpu)?;
        match &self.reason {
            CrashReason::Emulation => {
                write!(formatter, "KVM cannot emulate the guest's instruction")?
            }
            CrashReason::Internal(error) => write!(formatter, "KVM internal error {error}")?,
            CrashReason::Entry(reason) => write!(
                formatter,
                "the processor refused to enter the guest ({reason:#x})"
            )?,
            CrashReason::TripleFault => write!(
                formatter,
                "triple fault before the guest touched any device"
            )?,
            CrashReason::Exit(exit) => write!(formatter, "unexpected exit {exit}")?,
            CrashReason::Run(error) => write!(formatter, "KVM_RUN failed: {error}")?,
            CrashReason::Panic => write!(formatter, "its thread panicked")?,
        }
        if let Some(position) = &self.position {
            write!(formatter, " at {position}")?;
        }
        write!(formatter, ": {}", self.cause())
    }
}

impl fmt::Display for CpuPosition {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mode = if self.efer & EFER_LONG_MODE_ACTIVE != 0 {
            "long mode"
        } else if self.cr0 & CR0_PROTECTED != 0 {
            "protected mode"
        } else {
            "real mode"
        };
        let mut bytes = String::new();
        for byte in &self.bytes {
            let _ = write!(bytes, "{byte:02x} ");
        }
        let bytes = if bytes.is_empty() {
            "not readable"
        } else {
            bytes.trim_end()
        };
        write!(formatter, "RIP {:#x}", self.rip)?;
        if self.code_base != 0 {
            write!(formatter, " (CS base {:#x})", self.code_base)?;
        }
        write!(
            formatter,
            ", instruction bytes {bytes}, ring {}, {mode}, RSP {:#x}, CR0 {:#x}, CR3 {:#x}",
            self.ring, self.rsp, self.cr0, self.cr3
        )
    }
}

/// The crash reason of an internal error of KVM.
pub fn internal_error(vcpu: &mut VcpuFd) -> CrashReason {
    // SAFETY: KVM_RUN has just returned KVM_EXIT_INTERNAL_ERROR, for which `internal` is the valid
    // member.
    let suberror = unsafe { vcpu.get_kvm_run().__bindgen_anon_1.internal.suberror };
    if suberror == KVM_INTERNAL_ERROR_EMULATION {
        CrashReason::Emulation
    } else {
        CrashReason::Internal(suberror)
    }
}

/// The bytes of the instruction that KVM could not emulate, if KVM reports them.
fn emulation_bytes(vcpu: &mut VcpuFd) -> Vec<u8> {
    const WORDS_WITH_BYTES: u32 = 3;
    // SAFETY: as in `internal_error`; with sub-error 1 `emulation_failure` overlays it. All fields
    // are plain numbers, and `ndata` and `flags` say whether KVM filled them.
    let (words, flags, instruction) = unsafe {
        let failure = vcpu.get_kvm_run().__bindgen_anon_1.emulation_failure;
        (
            failure.ndata,
            failure.flags,
            failure.__bindgen_anon_1.__bindgen_anon_1,
        )
    };
    if words < WORDS_WITH_BYTES
        || flags & u64::from(kvm_bindings::KVM_INTERNAL_ERROR_EMULATION_FLAG_INSTRUCTION_BYTES) == 0
    {
        return Vec::new();
    }
    let length = usize::from(instruction.insn_size).min(MOST_INSTRUCTION_BYTES);
    instruction.insn_bytes[..length].to_vec()
}

/// Reads the registers, and guest memory at RIP if `bytes` are not known yet.
fn position(vcpu: &VcpuFd, memory: &GuestMemoryMmap, bytes: Vec<u8>) -> Option<CpuPosition> {
    let regs = vcpu.get_regs().ok()?;
    let sregs = vcpu.get_sregs().ok()?;
    let linear = sregs.cs.base.wrapping_add(regs.rip);
    let bytes = if bytes.is_empty() {
        let paging = sregs.cr0 & CR0_PAGING != 0;
        read_code(linear, memory, |address| {
            if !paging {
                return Some(address);
            }
            vcpu.translate_gva(address)
                .ok()
                .filter(|translation| translation.valid != 0)
                .map(|translation| translation.physical_address)
        })
    } else {
        bytes
    };
    Some(CpuPosition {
        rip: regs.rip,
        code_base: sregs.cs.base,
        rsp: regs.rsp,
        cr0: sregs.cr0,
        cr3: sregs.cr3,
        efer: sregs.efer,
        ring: sregs.ss.dpl,
        bytes,
    })
}

/// The bytes at `linear`, up to the first that cannot be read. `translate` maps the linear address
/// of a page to its physical address.
fn read_code(
    linear: u64,
    memory: &GuestMemoryMmap,
    translate: impl Fn(u64) -> Option<u64>,
) -> Vec<u8> {
    let mut bytes = Vec::new();
    let mut page: Option<(u64, u64)> = None;
    for offset in 0..MOST_INSTRUCTION_BYTES as u64 {
        let address = linear.wrapping_add(offset);
        let (from, to) = match page {
            Some((from, to)) if from == address & !(PAGE - 1) => (from, to),
            _ => {
                let from = address & !(PAGE - 1);
                match translate(from) {
                    Some(to) => (from, to),
                    None => break,
                }
            }
        };
        page = Some((from, to));
        match memory.read_obj::<u8>(GuestAddress(to.wrapping_add(address - from))) {
            Ok(byte) => bytes.push(byte),
            Err(_) => break,
        }
    }
    bytes
}

/// Whether this processor offers VMX (Intel) or SVM (AMD).
pub fn hardware_virtualisation() -> bool {
    const VMX: u32 = 1 << 5;
    const SVM: u32 = 1 << 2;
    let vmx = std::arch::x86_64::__cpuid(1).ecx & VMX != 0;
    let extended = std::arch::x86_64::__cpuid(0x8000_0000).eax >= 0x8000_0001;
    vmx || extended && std::arch::x86_64::__cpuid(0x8000_0001).ecx & SVM != 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_crash_is_one_line_with_rip_bytes_and_cause() {
        let crash = Crash {
            vcpu: 1,
            reason: CrashReason::Emulation,
            position: Some(CpuPosition {
                rip: 0x100_0200,
                efer: EFER_LONG_MODE_ACTIVE,
                bytes: vec![0xf3, 0x48],
                ..CpuPosition::default()
            }),
            hardware_virtualisation: false,
        };
        let text = crash.to_string();
        for part in [
            "vCPU 1",
            "RIP 0x1000200",
            "f3 48",
            "long mode",
            "no VMX or SVM",
            "nested",
        ] {
            assert!(text.contains(part), "{part} is missing: {text}");
        }
        assert!(!text.contains('\n'));
        let other = Crash {
            hardware_virtualisation: true,
            ..crash
        };
        assert!(!other.to_string().contains("no VMX"));
    }

    #[test]
    fn code_is_read_across_pages_up_to_the_first_unmapped_one() {
        let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), 0x3000)]).unwrap();
        memory.write_slice(&[1, 2], GuestAddress(0x0ffe)).unwrap();
        memory.write_slice(&[3, 4], GuestAddress(0x2000)).unwrap();
        // Page 0xa000 maps to 0, page 0xb000 to 0x2000, and page 0xc000 is not mapped.
        let translate = |page| match page {
            0xa000 => Some(0),
            0xb000 => Some(0x2000),
            _ => None,
        };
        assert_eq!(read_code(0xaffe, &memory, translate)[..4], [1, 2, 3, 4]);
        assert_eq!(read_code(0xbffe, &memory, translate), [0, 0]);
        assert_eq!(read_code(0xc000, &memory, translate), [0; 0]);
        assert_eq!(read_code(u64::MAX, &memory, Some), [0; 0]);
    }
}
