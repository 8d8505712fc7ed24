//! Mapped memory whose file may be truncated by another process.
//!
//! The length of a file is checked when it is mapped, but any process that shares the file can truncate it later. The
//! next access is then a SIGBUS, which would end the process, and with it every other disk. So mappings are registered
//! here, and the signal handler replaces a whole mapping that has lost its file with zeroes. Its rings are then broken
//! and reported as such. A SIGBUS anywhere else ends the process as usual.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use vm_memory::{GuestMemoryRegion, GuestRegionMmap, MmapRegion};
use vmm_sys_util::signal::register_signal_handler;

/// Most mappings in this process.
const SLOTS: usize = 4096;

/// An entry of the table of mappings; its length is 0 while it is free.
struct Slot {
    start: AtomicUsize,
    /// The mapping's length in bytes; [`TAKEN`] while the entry is being filled.
    len: AtomicUsize,
}

/// Marks an entry that is being filled; the handler skips it.
const TAKEN: usize = usize::MAX;

static TABLE: [Slot; SLOTS] = [const {
    Slot {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
    }
}; SLOTS];

/// A memory mapping.
pub(super) trait Mapped {
    /// Its start address, and its length in bytes.
    fn extent(&self) -> (usize, usize);
}

impl Mapped for MmapRegion {
    fn extent(&self) -> (usize, usize) {
        (self.as_ptr() as usize, self.size())
    }
}

impl Mapped for GuestRegionMmap {
    fn extent(&self) -> (usize, usize) {
        // Offset 0 lies in every region, so there is an address.
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
    /// Guards a mapping for as long as the value lives.
    ///
    /// # Errors
    /// If the table is full, or the handler cannot be installed.
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

    /// Whether the mapping has other users.
    pub(super) fn in_use(&self) -> bool {
        Arc::strong_count(&self.mapping) > 1
    }
}

impl<T: Mapped> Drop for Guarded<T> {
    fn drop(&mut self) {
        // The entry is freed before the mapping, since another mapping may soon have the same addresses.
        self.slot.len.store(0, Ordering::Release);
    }
}

/// The SIGBUS handler. It uses only what is safe in a signal handler: atomics and system calls.
extern "C" fn on_bus_error(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives a valid siginfo_t with the address of the fault.
    let address = unsafe { (*info).si_addr() } as usize;
    for slot in &TABLE {
        let len = slot.len.load(Ordering::Acquire);
        let start = slot.start.load(Ordering::Relaxed);
        if len == 0 || len == TAKEN || address.wrapping_sub(start) >= len {
            continue;
        }
        // SAFETY: the range is a mapping of this process for as long as it is in the table, and only the access that
        // has faulted depends on what it maps. All access is volatile and accepts any bytes.
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
    // The address is in no guarded mapping: the access is repeated on return, and ends the process.
    // SAFETY: signal(2) is safe in a handler.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
}
