//! The memory of this machine, and of guests.

use walvisor_vmm::arch::x86_64::layout::{LEAST_MEMORY, MOST_MEMORY};

/// This machine's memory and swap together, in bytes.
pub fn machine_memory() -> u64 {
    let memory = rustix::system::sysinfo();
    let unit = u64::from(memory.mem_unit);
    (memory.totalram + memory.totalswap).saturating_mul(unit)
}

/// Checks that a guest can have this many bytes of memory, whatever this machine has.
///
/// # Errors
/// What to give instead.
pub fn check_guest_memory(bytes: u64) -> Result<(), &'static str> {
    if (LEAST_MEMORY..=MOST_MEMORY).contains(&bytes) && bytes.is_multiple_of(4096) {
        Ok(())
    } else {
        Err("give a multiple of 4K from 1M to 1T, such as 512M")
    }
}
