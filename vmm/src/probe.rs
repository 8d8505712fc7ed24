//! Finds out whether this machine has KVM, and whether KVM runs ring 0 on the processor or
//! interprets it.
//!
//! ```text
//!   /dev/kvm ──▶ throwaway VM, one vCPU in ring 0 ──▶ POPCNT, CMPXCHG16B, then OUT
//!                   reached OUT: native    ·    emulation failure before: interpreted
//! ```
//!
//! A stock kernel needs ring 0 on the processor. A machine without VMX or SVM may still have a
//! `/dev/kvm` that keeps page tables, runs ring 3 natively and interprets ring 0. The embedded
//! guest runs there, but a Linux kernel does not.

use std::io;

use kvm_bindings::{KVM_API_VERSION, KVM_MAX_CPUID_ENTRIES, kvm_userspace_memory_region};
pub use kvm_ioctls::Kvm;
use kvm_ioctls::VcpuExit;
use vm_memory::{
    Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryError, GuestMemoryMmap, GuestMemoryRegion,
};

use crate::arch::x86_64::long_mode::{self, PrivilegeLevel};

/// How this KVM executes ring 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ring0 {
    /// On the processor (VMX or SVM): a stock kernel can boot.
    Native,
    /// Interpreted, with a subset of the instructions: no stock kernel boots, but ring 3 runs
    /// natively.
    Interpreted,
}

/// Why KVM cannot be used here.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// There is no `/dev/kvm`.
    #[error(
        "/dev/kvm does not exist: load the driver with `modprobe kvm-intel` or `modprobe kvm-amd`; \
         if that fails, switch on VT-x or AMD-V in the firmware or, inside a virtual machine, \
         nested virtualisation on its host"
    )]
    Missing,
    /// This user may not open `/dev/kvm`.
    #[error(
        "/dev/kvm: permission denied: join its group with `usermod -aG kvm $USER` and log in \
         again, or run as root"
    )]
    Denied,
    /// `/dev/kvm` exists but cannot be opened.
    #[error(
        "/dev/kvm cannot be opened: {0}: load the driver with `modprobe kvm-intel` or `modprobe \
         kvm-amd`, or pass the device into this container"
    )]
    Open(io::Error),
    /// `/dev/kvm` has another API version.
    #[error("/dev/kvm has API version {0}, not 12: update the host's kernel")]
    Version(i32),
    /// A step of the throwaway VM failed.
    #[error("/dev/kvm: cannot {0}: {1}")]
    Step(&'static str, io::Error),
    /// The probe's guest memory could not be filled.
    #[error("the probe's guest memory: {0}")]
    Memory(#[from] GuestMemoryError),
    /// The probe's guest stopped in a way that says nothing about ring 0.
    #[error("/dev/kvm: the probe's guest stopped unexpectedly: {0}")]
    Exit(String),
}

/// Opens `/dev/kvm` and checks its API version.
///
/// # Errors
/// If there is no usable KVM; the text names the remedy.
pub fn open() -> Result<Kvm, ProbeError> {
    let kvm = Kvm::new().map_err(|error| {
        let error = io::Error::from(error);
        match error.kind() {
            io::ErrorKind::NotFound => ProbeError::Missing,
            io::ErrorKind::PermissionDenied => ProbeError::Denied,
            _ => ProbeError::Open(error),
        }
    })?;
    match kvm.get_api_version() {
        version if version == KVM_API_VERSION as i32 => Ok(kvm),
        version => Err(ProbeError::Version(version)),
    }
}

const CODE: u64 = 0x10000;
const DATA: u64 = 0x11000;
const MEMORY: usize = 0x20000;
const PORT: u16 = 0x80;

/// `out 0x80, al; hlt`: every KVM executes this.
const PLAIN: [u8; 3] = [0xe6, PORT as u8, 0xf4];
/// `popcnt rax, rax; cmpxchg16b [rdi]; out 0x80, al; hlt`: a kernel uses the first two instructions
/// from its first second on, and KVM's instruction emulator knows neither.
const KERNEL: [u8; 12] = [
    0xf3, 0x48, 0x0f, 0xb8, 0xc0, 0x48, 0x0f, 0xc7, 0x0f, 0xe6, PORT as u8, 0xf4,
];

/// Runs a few ring-0 instructions in a throwaway VM and returns how this KVM executes them. Takes
/// some milliseconds and leaves nothing behind.
///
/// # Errors
/// If there is no usable KVM (the text names the remedy), or a step of the throwaway VM fails.
pub fn ring0() -> Result<Ring0, ProbeError> {
    let kvm = open()?;
    if !reaches_out(&kvm, &PLAIN)? {
        return Err(ProbeError::Exit(
            "emulation failure on a plain OUT".to_owned(),
        ));
    }
    if reaches_out(&kvm, &KERNEL)? {
        Ok(Ring0::Native)
    } else {
        Ok(Ring0::Interpreted)
    }
}

/// Whether `program` reaches its OUT in ring 0; `false` if KVM cannot emulate an instruction before
/// it.
fn reaches_out(kvm: &Kvm, program: &[u8]) -> Result<bool, ProbeError> {
    let step = |what| move |error: kvm_ioctls::Error| ProbeError::Step(what, error.into());
    let vm = kvm.create_vm().map_err(step("create a VM"))?;
    let memory = GuestMemoryMmap::<()>::from_ranges(&[(GuestAddress(0), MEMORY)])
        .map_err(|error| ProbeError::Step("map guest memory", io::Error::other(error)))?;
    for (slot, region) in (0u32..).zip(memory.iter()) {
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: memory.get_host_address(region.start_addr())? as u64,
        };
        // SAFETY: the region is mapped, writable and used by nothing else, and the vCPU below runs
        // only inside this function, where `memory` lives.
        unsafe { vm.set_user_memory_region(region) }.map_err(step("give memory to a VM"))?;
    }
    long_mode::write_tables(&memory)?;
    memory.write_slice(program, GuestAddress(CODE))?;

    let mut vcpu = vm.create_vcpu(0).map_err(step("create a vCPU"))?;
    let cpuid = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(step("read the CPUID"))?;
    vcpu.set_cpuid2(&cpuid).map_err(step("set the CPUID"))?;
    long_mode::set_registers(
        &vcpu,
        PrivilegeLevel::Kernel,
        CODE,
        long_mode::RING0_STACK_TOP,
        DATA,
    )
    .map_err(step("set a vCPU's registers"))?;
    loop {
        return match vcpu.run() {
            Ok(VcpuExit::IoOut(PORT, _)) => Ok(true),
            Ok(VcpuExit::InternalError) => Ok(false),
            Ok(exit) => Err(ProbeError::Exit(format!("{exit:?}"))),
            Err(error) if error.errno() == libc::EINTR => continue,
            Err(error) => Err(ProbeError::Step("run a vCPU", error.into())),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_probe_agrees_with_the_processor_flags() {
        let ring0 = match ring0() {
            Ok(ring0) => ring0,
            Err(error @ (ProbeError::Missing | ProbeError::Denied | ProbeError::Open(_))) => {
                return println!("skipped: {error}");
            }
            Err(error) => panic!("{error}"),
        };
        let flags = std::fs::read_to_string("/proc/cpuinfo").expect("cpuinfo");
        let has = |name| {
            flags
                .lines()
                .filter(|line| line.starts_with("flags"))
                .any(|line| line.split_whitespace().any(|flag| flag == name))
        };
        // KVM runs ring 0 on the processor exactly if the processor has VMX or SVM.
        let hardware = has("vmx") || has("svm");
        assert_eq!(
            ring0 == Ring0::Native,
            hardware,
            "{ring0:?}, hardware virtualisation: {hardware}"
        );
    }
}
