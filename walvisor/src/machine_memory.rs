//! The memory of this machine, of this process, and of guests.

use std::fs;
use std::sync::LazyLock;

use walvisor_vmm::arch::x86_64::layout::{LEAST_MEMORY, MOST_MEMORY};

/// The memory of this process that is in the machine's memory now, in bytes; `None` if the kernel
/// does not say.
pub fn resident() -> Option<u64> {
    // proc_pid_statm(5): the second field is in pages.
    let text = fs::read_to_string("/proc/self/statm").ok()?;
    let pages: u64 = text.split_whitespace().nth(1)?.parse().ok()?;
    Some(pages * rustix::param::page_size() as u64)
}

/// This machine's memory and swap together, in bytes, as they were at the first call: later the
/// process may have given up the right to ask.
pub fn machine_memory() -> u64 {
    static MEMORY: LazyLock<u64> = LazyLock::new(|| {
        let memory = rustix::system::sysinfo();
        let unit = u64::from(memory.mem_unit);
        (memory.totalram + memory.totalswap).saturating_mul(unit)
    });
    *MEMORY
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
