//! Mapped memory whose file is cut off by its owner.
//!
//! That a file is long enough is checked when it is mapped, but whoever shares it can make it shorter later, and the next
//! access is a SIGBUS: the end of the process, and of every other disk in it. So mappings are registered here, and the
//! handler puts zeroes in place of a whole mapping that has lost its file. Rings in it are broken then, and told so.
//! A SIGBUS anywhere else ends the process as ever.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use vm_memory::{GuestMemoryRegion, GuestRegionMmap, MmapRegion};
use vmm_sys_util::signal::register_signal_handler;

/// Most mappings in this process.
const SLOTS: usize = 4096;

/// A mapping; of length 0 while nobody has it.
struct Slot {
    start: AtomicUsize,
    /// [`TAKEN`] while it is being filled.
    len: AtomicUsize,
}

/// A length that no address is within.
const TAKEN: usize = usize::MAX;

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
    }
}; SLOTS];

/// Something mapped.
pub(super) trait Mapped {
    /// Where it begins, and its bytes.
    fn extent(&self) -> (usize, usize);
}

impl Mapped for MmapRegion {
    fn extent(&self) -> (usize, usize) {
        (self.as_ptr() as usize, self.size())
    }
}

impl Mapped for GuestRegionMmap {
    fn extent(&self) -> (usize, usize) {
        // The whole region is asked for, so there is such an address.
        let start = self.get_host_address(vm_memory::MemoryRegionAddress(0));
        (start.map_or(0, |start| start as usize), self.size())
    }
}

/// A mapping that may lose its file.
pub(super) struct Guarded<T: Mapped> {
    mapping: Arc<T>,
    slot: &'static Slot,
}

impl<T: Mapped> Guarded<T> {
    /// Guards a mapping as long as the value lives.
    ///
    /// # Errors
    /// If there are too many, or the handler cannot be installed.
    pub(super) fn new(mapping: Arc<T>) -> io::Result<Self> {
        static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
        INSTALLED
            .get_or_init(|| {
                register_signal_handler(libc::SIGBUS, on_bus_error).map_err(|error| error.errno())
            })
            .map_err(io::Error::from_raw_os_error)?;
        let (start, len) = mapping.extent();
        let free = |slot: &&Slot| {
            slot.len
                .compare_exchange(0, TAKEN, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        };
        let slot = TABLE.iter().find(free);
        let slot = slot.ok_or_else(|| io::Error::other("too many mappings"))?;
        slot.start.store(start, Ordering::Relaxed);
        slot.len.store(len, Ordering::Release);
        Ok(Self { mapping, slot })
    }

    pub(super) fn mapping(&self) -> &Arc<T> {
        &self.mapping
    }

    /// Whether somebody else uses the mapping.
    pub(super) fn in_use(&self) -> bool {
        Arc::strong_count(&self.mapping) > 1
    }
}

impl<T: Mapped> Drop for Guarded<T> {
    fn drop(&mut self) {
        // Before the mapping goes: its addresses may be another's soon.
        self.slot.len.store(0, Ordering::Release);
    }
}

/// Only what is safe in a signal handler: atomics and system calls.
extern "C" fn on_bus_error(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives a valid siginfo_t with the address of the fault.
    let address = unsafe { (*info).si_addr() } as usize;
    for slot in &TABLE {
        let len = slot.len.load(Ordering::Acquire);
        let start = slot.start.load(Ordering::Relaxed);
        if len == 0 || len == TAKEN || address.wrapping_sub(start) >= len {
            continue;
        }
        // SAFETY: the range is one of our mappings, as long as it is in the table, and nothing but the access to lost
        // memory that brought us here depends on what it maps. All access is volatile and expects any bytes.
        let zeroes = unsafe {
            libc::mmap(
                start as *mut libc::c_void,
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
                -1,
                0,
            )
        };
        if zeroes != libc::MAP_FAILED {
            return;
        }
    }
    // Nobody's: the access is repeated on return, and ends the process.
    // SAFETY: signal(2) is safe in a handler.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
}
