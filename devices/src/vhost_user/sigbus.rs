//! A SIGBUS handler for mapped files that another process truncates.
//!
//! The length of a file is checked when it is mapped, but any process that shares the file can truncate it later. The next
//! access then raises SIGBUS, which would end the process, and with it every other disk. So mappings are registered here,
//! and the handler replaces a mapping that has lost its file with zeroes. Rings in it are then broken, and reported as
//! such. A SIGBUS anywhere else ends the process as usual.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use vm_memory::{GuestMemoryRegion, GuestRegionMmap, MmapRegion};
use vmm_sys_util::signal::register_signal_handler;

/// The most registered mappings in this process.
const MAX_MAPPINGS: usize = 4096;

/// An entry of the table of mappings. It is free while its length is 0.
struct TableEntry {
    start: AtomicUsize,
    /// The mapping's length in bytes, or [`BEING_FILLED`].
    len: AtomicUsize,
}

/// The length of an entry that is being filled, which the handler skips.
const BEING_FILLED: usize = usize::MAX;

static TABLE: [TableEntry; MAX_MAPPINGS] = [const {
    TableEntry {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
    }
}; MAX_MAPPINGS];

/// A memory mapping.
pub(super) trait MappedRange {
    /// Its start address, and its length in bytes.
    fn range(&self) -> (usize, usize);
}

impl MappedRange for MmapRegion {
    fn range(&self) -> (usize, usize) {
        (self.as_ptr() as usize, self.size())
    }
}

impl MappedRange for GuestRegionMmap {
    fn range(&self) -> (usize, usize) {
        // Offset 0 lies in every region, so it has an address.
        let start = self.get_host_address(vm_memory::MemoryRegionAddress(0));
        (start.map_or(0, |start| start as usize), self.size())
    }
}

/// A registered mapping: truncating its file is survivable.
pub(super) struct GuardedMapping<T: MappedRange> {
    mapping: Arc<T>,
    entry: &'static TableEntry,
}

impl<T: MappedRange> GuardedMapping<T> {
    /// Registers a mapping until this value is dropped.
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
        let (start, len) = mapping.range();
        let free = |entry: &&TableEntry| {
            entry
                .len
                .compare_exchange(0, BEING_FILLED, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        };
        let entry = TABLE.iter().find(free);
        let entry = entry.ok_or_else(|| io::Error::other("too many mappings"))?;
        entry.start.store(start, Ordering::Relaxed);
        entry.len.store(len, Ordering::Release);
        Ok(Self { mapping, entry })
    }

    pub(super) fn mapping(&self) -> &Arc<T> {
        &self.mapping
    }

    /// Whether the mapping has other users.
    pub(super) fn in_use(&self) -> bool {
        Arc::strong_count(&self.mapping) > 1
    }
}

impl<T: MappedRange> Drop for GuardedMapping<T> {
    fn drop(&mut self) {
        // Frees the entry before the mapping goes, because another mapping may then get the same addresses.
        self.entry.len.store(0, Ordering::Release);
    }
}

/// The SIGBUS handler. It uses only what is safe in a signal handler: atomics and system calls.
extern "C" fn on_bus_error(_: i32, info: *mut libc::siginfo_t, _: *mut libc::c_void) {
    // SAFETY: the kernel gives a valid siginfo_t with the address of the fault.
    let address = unsafe { (*info).si_addr() } as usize;
    for entry in &TABLE {
        let len = entry.len.load(Ordering::Acquire);
        let start = entry.start.load(Ordering::Relaxed);
        if len == 0 || len == BEING_FILLED || address.wrapping_sub(start) >= len {
            continue;
        }
        // SAFETY: as long as it is in the table, the range is a mapping of this process, and only the access that has
        // faulted depends on what it maps. All access to it is volatile and accepts any bytes.
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
    // The address is in no registered mapping: the access is repeated on return, and ends the process.
    // SAFETY: signal(2) is safe in a handler.
    unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
}
