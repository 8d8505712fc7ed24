//! The CPUID of a guest: the features that KVM supports on this machine, with each vCPU's own APIC
//! id and topology (one package, one thread per core).

use kvm_bindings::{CpuId, kvm_cpuid_entry2};

/// Leaf 1 ECX: the TSC-deadline mode of the local APIC. KVM always emulates it, but does not list
/// it.
const TSC_DEADLINE: u32 = 1 << 24;
/// Leaf 1 ECX: a hypervisor is present, and its leaves start at 0x4000_0000.
const HYPERVISOR: u32 = 1 << 31;
/// Leaf 1 EDX: leaf 1's count of logical processors is valid.
const MULTI_THREADING: u32 = 1 << 28;
/// Leaf 0x8000_0001 ECX: the package has several cores (AMD).
const AMD_COMPATIBILITY_LEGACY: u32 = 1 << 1;

/// Bits of the APIC id that number the cores of a package with `cpus` cores.
fn core_bits(cpus: u8) -> u32 {
    u32::from(cpus).next_power_of_two().trailing_zeros()
}

/// The CPUID of vCPU `id` of `cpus`, made from `supported` (KVM_GET_SUPPORTED_CPUID).
/// `tsc_deadline` is whether KVM has KVM_CAP_TSC_DEADLINE_TIMER.
pub fn of_vcpu(supported: &CpuId, id: u8, cpus: u8, tsc_deadline: bool) -> CpuId {
    let mut cpuid = supported.clone();
    for entry in cpuid.as_mut_slice() {
        set_topology(entry, id, cpus);
        if entry.function == 1 && tsc_deadline {
            entry.ecx |= TSC_DEADLINE;
        }
    }
    cpuid
}

/// Sets the fields that identify the vCPU or count its neighbours (Intel SDM volume 2, CPUID; AMD
/// APM volume 3, appendix E).
fn set_topology(entry: &mut kvm_cpuid_entry2, id: u8, cpus: u8) {
    let (id, count, bits) = (u32::from(id), u32::from(cpus), core_bits(cpus));
    match entry.function {
        1 => {
            entry.ebx = entry.ebx & 0xffff | count << 16 | id << 24;
            entry.ecx |= HYPERVISOR;
            entry.edx = if cpus > 1 {
                entry.edx | MULTI_THREADING
            } else {
                entry.edx & !MULTI_THREADING
            };
        }
        // Caches: only the last level is shared by all cores (Intel).
        4 if entry.eax & 0x1f != 0 => {
            let level = entry.eax >> 5 & 7;
            let sharing = if level >= 3 { count - 1 } else { 0 };
            entry.eax = entry.eax & 0x3fff | sharing << 14 | (count - 1) << 26;
        }
        // Extended topology: level 0 is threads (one per core), level 1 cores.
        0xb | 0x1f => {
            let (shift, number, kind) = match entry.index {
                0 => (0, 1, 1),
                1 => (bits, count, 2),
                _ => (0, 0, 0),
            };
            entry.eax = shift;
            entry.ebx = number;
            entry.ecx = entry.index | kind << 8;
            entry.edx = id;
        }
        0x8000_0001 => {
            entry.ecx = if cpus > 1 {
                entry.ecx | AMD_COMPATIBILITY_LEGACY
            } else {
                entry.ecx & !AMD_COMPATIBILITY_LEGACY
            };
        }
        0x8000_0008 => entry.ecx = entry.ecx & !0xf0ff | bits << 12 | (count - 1),
        // Caches (AMD).
        0x8000_001d if entry.eax & 0x1f != 0 => {
            let level = entry.eax >> 5 & 7;
            let sharing = if level >= 3 { count - 1 } else { 0 };
            entry.eax = entry.eax & !(0xfff << 14) | sharing << 14;
        }
        // Extended APIC id, core id, node id (AMD).
        0x8000_001e => {
            entry.eax = id;
            entry.ebx = id;
            entry.ecx = 0;
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(function: u32, index: u32) -> kvm_cpuid_entry2 {
        kvm_cpuid_entry2 {
            function,
            index,
            eax: 0x121,
            ebx: u32::MAX,
            ecx: 0,
            edx: 0,
            ..Default::default()
        }
    }

    fn leaf(cpuid: &CpuId, function: u32, index: u32) -> kvm_cpuid_entry2 {
        *cpuid
            .as_slice()
            .iter()
            .find(|entry| entry.function == function && entry.index == index)
            .expect("leaf")
    }

    #[test]
    fn every_vcpu_shows_its_own_apic_id_and_the_same_topology() {
        let entries = [
            entry(1, 0),
            entry(0xb, 0),
            entry(0xb, 1),
            entry(0x8000_0008, 0),
            entry(0x8000_001e, 0),
        ];
        let supported = CpuId::from_entries(&entries).unwrap();
        for id in 0..3 {
            let cpuid = of_vcpu(&supported, id, 3, true);
            let one = leaf(&cpuid, 1, 0);
            assert_eq!((one.ebx >> 24, one.ebx >> 16 & 0xff), (u32::from(id), 3));
            assert_ne!(one.ecx & TSC_DEADLINE, 0);
            assert_ne!(one.edx & MULTI_THREADING, 0);
            let cores = leaf(&cpuid, 0xb, 1);
            assert_eq!(
                (cores.eax, cores.ebx, cores.ecx, cores.edx),
                (2, 3, 0x201, u32::from(id))
            );
            assert_eq!(leaf(&cpuid, 0xb, 0).ecx, 0x100);
            assert_eq!(leaf(&cpuid, 0x8000_0008, 0).ecx, 2 << 12 | 2);
            assert_eq!(leaf(&cpuid, 0x8000_001e, 0).eax, u32::from(id));
        }
    }

    #[test]
    fn a_single_vcpu_reports_no_other_processors() {
        let supported = CpuId::from_entries(&[entry(1, 0), entry(0xb, 1)]).unwrap();
        let cpuid = of_vcpu(&supported, 0, 1, false);
        assert_eq!(leaf(&cpuid, 1, 0).edx & MULTI_THREADING, 0);
        assert_eq!(leaf(&cpuid, 1, 0).ecx & TSC_DEADLINE, 0);
        assert_eq!(leaf(&cpuid, 0xb, 1).eax, 0);
    }
}
