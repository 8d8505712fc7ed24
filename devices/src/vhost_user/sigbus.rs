//! A SIGBUS handler for mapped files that another process truncates.
//!
//! The length of a file is checked when it is mapped, but any process that shares the file can
//! truncate it later. The next access then raises SIGBUS, which would end the process, and with it
//! every other disk. So mappings are registered here, with the socket of the front-end that shares
//! the file:
//!
//! ```text
//!   access beyond the file's end ─▶ SIGBUS ─▶ the mapping is noted as lost, and its front-end's socket is shut down
//!                                        └──▶ the session's scrap file is mapped where the access was, which goes on
//! ```
//! The session's thread finds its socket closed, and ends the session. Until then all windows of a
//! truncated mapping show the same scrap file, so a session takes [`WINDOW`] bytes of this
//! process's memory at most, however much it has its disk read. A SIGBUS anywhere else goes to the
//! handler that was there before.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use vm_memory::{GuestMemoryRegion, GuestRegionMmap, MmapRegion};

use super::memory::MAX_REGIONS;

/// The most registered mappings of a session: its regions, those that it has removed and a worker
/// still uses, and the area of its chains in flight.
const MAX_MAPPINGS: usize = 4 * MAX_REGIONS;
/// How much of a truncated mapping is replaced at once, in bytes, and the size of a session's scrap
/// file.
const WINDOW: usize = 2 << 20;

/// An entry of the table of mappings. It is free while its length is 0.
struct TableEntry {
    start: AtomicUsize,
    /// The mapping's length in bytes, or [`BEING_FILLED`].
    len: AtomicUsize,
    /// Whether an access has met the end of the mapping's file.
    lost: AtomicBool,
}

/// The mappings of one session at a time, so that none takes the entries of another. The handler
/// reads the tables of all sessions: they are never freed, and there are as many as there were
/// sessions at the same time.
struct SessionTable {
    /// Whether a session has it.
    taken: AtomicBool,
    /// Descriptors of the session's socket and scrap file.
    socket: AtomicI32,
    scrap: AtomicI32,
    entries: [TableEntry; MAX_MAPPINGS],
    next: OnceLock<&'static Self>,
}

impl SessionTable {
    const fn new() -> Self {
        Self {
            taken: AtomicBool::new(false),
            socket: AtomicI32::new(-1),
            scrap: AtomicI32::new(-1),
            entries: [const {
                TableEntry {
                    start: AtomicUsize::new(0),
                    len: AtomicUsize::new(0),
                    lost: AtomicBool::new(false),
                }
            }; MAX_MAPPINGS],
            next: OnceLock::new(),
        }
    }

    /// Takes a table that no session has.
    fn take() -> &'static Self {
        let mut table = &FIRST;
        loop {
            let (free, taken) = (Ordering::Acquire, Ordering::Relaxed);
            if table
                .taken
                .compare_exchange(false, true, free, taken)
                .is_ok()
            {
                return table;
            }
            let new = || &*Box::leak(Box::new(Self::new()));
            table = table.next.get_or_init(new);
        }
    }
}

/// The length of an entry that is being filled, which the handler skips.
const BEING_FILLED: usize = usize::MAX;

static FIRST: SessionTable = SessionTable::new();

/// What the handler needs of a session.
pub(super) struct SessionGuard {
    table: &'static SessionTable,
    /// The descriptors in the table: the session's socket, and a file in memory, [`WINDOW`] bytes
    /// long.
    _descriptors: [OwnedFd; 2],
}

impl SessionGuard {
    /// The guard of the session on `socket`.
    ///
    /// # Errors
    /// If the system refuses a descriptor.
    pub(super) fn new(socket: BorrowedFd<'_>) -> io::Result<Arc<Self>> {
        let scrap = memfd_create("scrap", MemfdFlags::CLOEXEC)?;
        ftruncate(&scrap, WINDOW as u64)?;
        let socket = socket.try_clone_to_owned()?;
        let table = SessionTable::take();
        table.socket.store(socket.as_raw_fd(), Ordering::Relaxed);
        table.scrap.store(scrap.as_raw_fd(), Ordering::Relaxed);
        Ok(Arc::new(Self {
            table,
            _descriptors: [socket, scrap],
        }))
    }
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        // Each mapping keeps its session, so all entries are free.
        self.table.taken.store(false, Ordering::Release);
    }
}

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
    /// Keeps the table, and the descriptors in it.
    _session: Arc<SessionGuard>,
}

impl<T: MappedRange> GuardedMapping<T> {
    /// Registers a mapping of a session until this value is dropped.
    ///
    /// # Errors
    /// If the session has too many.
    pub(super) fn new(mapping: Arc<T>, session: &Arc<SessionGuard>) -> io::Result<Self> {
        let (start, len) = mapping.range();
        let free = |entry: &&TableEntry| {
            entry
                .len
                .compare_exchange(0, BEING_FILLED, Ordering::AcqRel, Ordering::Relaxed)
                .is_ok()
        };
        let entry = session.table.entries.iter().find(free);
        let entry = entry.ok_or_else(|| {
            io::Error::other(format!(
                "it has {MAX_MAPPINGS} mappings, with those of memory that it has removed while \
                 requests use it"
            ))
        })?;
        entry.start.store(start, Ordering::Relaxed);
        entry.lost.store(false, Ordering::Relaxed);
        entry.len.store(len, Ordering::Release);
        Ok(Self {
            mapping,
            entry,
            _session: Arc::clone(session),
        })
    }

    pub(super) fn mapping(&self) -> &Arc<T> {
        &self.mapping
    }

    /// Whether the mapping has other users.
    pub(super) fn in_use(&self) -> bool {
        Arc::strong_count(&self.mapping) > 1
    }

    /// Whether the mapping's file was truncated, and an access has met that.
    pub(super) fn is_lost(&self) -> bool {
        self.entry.lost.load(Ordering::Acquire)
    }
}

impl<T: MappedRange> Drop for GuardedMapping<T> {
    fn drop(&mut self) {
        // Frees the entry before the mapping goes, because another mapping may then get the same
        // addresses.
        self.entry.len.store(0, Ordering::Release);
    }
}

/// What SIGBUS did before the handler was installed.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// Has this process survive front-ends that truncate the memory that they share: installs a handler
/// for SIGBUS, which loses only the session of such a front-end. Any other SIGBUS goes to the
/// handler that was installed before. Without this call, a truncated memory ends the process.
///
/// # Errors
/// If the handler can't be installed.
pub fn survive_truncated_memory() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let install = || {
        let mut old = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: all fields are integers or optional pointers.
        let mut new: libc::sigaction = unsafe { std::mem::zeroed() };
        new.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: asks for the present handler, for which there is room.
        if unsafe { libc::sigaction(libc::SIGBUS, std::ptr::null(), old.as_mut_ptr()) } < 0 {
            return Err(io::Error::last_os_error().raw_os_error().unwrap_or(0));
        }
        // SAFETY: the call above has filled it.
        BEFORE.get_or_init(|| unsafe { old.assume_init() });
        new.sa_sigaction = on_bus_error as *const () as usize;
        // SAFETY: the handler has the signature that SA_SIGINFO asks for.
        match unsafe { libc::sigaction(libc::SIGBUS, &new, std::ptr::null_mut()) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error().raw_os_error().unwrap_or(0)),
        }
    };
    let installed = INSTALLED.get_or_init(install);
    installed.map_err(io::Error::from_raw_os_error)
}

/// Maps `len` bytes at `start` anew.
///
/// # Safety
/// The range is in a mapping of the table, and nothing depends on its bytes.
unsafe fn map_over(start: usize, len: usize, flags: i32, fd: i32) -> bool {
    let (start, prot) = (
        start as *mut libc::c_void,
        libc::PROT_READ | libc::PROT_WRITE,
    );
    // SAFETY: the caller's promise.
    let mapped = unsafe { libc::mmap(start, len, prot, flags | libc::MAP_FIXED, fd, 0) };
    mapped != libc::MAP_FAILED
}

/// The SIGBUS handler. It uses only what is safe in a signal handler: atomics and system calls.
/// [`OnceLock::get`] is a load.
extern "C" fn on_bus_error(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel gives a valid siginfo_t with the address of the fault.
    let address = unsafe { (*info).si_addr() } as usize;
    let tables = std::iter::successors(Some(&FIRST), |table| table.next.get().copied());
    let entries = tables.flat_map(|table| table.entries.iter().map(move |entry| (table, entry)));
    for (table, entry) in entries {
        let len = entry.len.load(Ordering::Acquire);
        let start = entry.start.load(Ordering::Relaxed);
        if len == 0 || len == BEING_FILLED || address.wrapping_sub(start) >= len {
            continue;
        }
        entry.lost.store(true, Ordering::Release);
        // SAFETY: the descriptor is open as long as the entry is in use.
        unsafe { libc::shutdown(table.socket.load(Ordering::Relaxed), libc::SHUT_RDWR) };
        let first = start.max(address & !(WINDOW - 1));
        let window = (start + len - first).min(WINDOW - first % WINDOW);
        let scrap = table.scrap.load(Ordering::Relaxed);
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // A part of a huge page can't be replaced alone, nor can a mapping be split for ever.
        // SAFETY: as long as it is in the table, the range is a mapping of this process, and only
        // the access that has faulted depends on what it maps. All access to it is volatile and
        // accepts any bytes.
        let replaced = unsafe {
            map_over(first, window, libc::MAP_SHARED, scrap) || map_over(start, len, anonymous, -1)
        };
        if replaced {
            return;
        }
    }
    // The address is in no registered mapping.
    let before = BEFORE.get();
    let handler = before.map_or(libc::SIG_DFL, |before| before.sa_sigaction);
    if handler == libc::SIG_DFL || handler == libc::SIG_IGN {
        // The access is repeated on return, and ends the process.
        // SAFETY: signal(2) is safe in a handler.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    } else if before.is_some_and(|before| before.sa_flags & libc::SA_SIGINFO != 0) {
        // SAFETY: whoever installed this handler said with SA_SIGINFO that it has this signature.
        let chained: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(handler) };
        chained(signal, info, context);
    } else {
        // SAFETY: without SA_SIGINFO a handler takes the signal's number alone.
        let chained: extern "C" fn(i32) = unsafe { std::mem::transmute(handler) };
        chained(signal);
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::os::unix::net::UnixStream;

    use super::*;

    fn session() -> (Arc<SessionGuard>, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (SessionGuard::new(ours.as_fd()).unwrap(), theirs)
    }

    #[test]
    fn a_session_takes_no_entry_of_another() {
        let mapping = Arc::new(MmapRegion::<()>::new(0x1000).unwrap());
        let guard = |session| GuardedMapping::new(Arc::clone(&mapping), session);
        let sessions = [session(), session(), session()];
        let taken = sessions.each_ref().map(|(session, _)| {
            let taken: Vec<_> = (0..5000).map_while(|_| guard(session).ok()).collect();
            assert!(guard(session).is_err());
            taken
        });
        let counts = taken.each_ref().map(Vec::len);
        assert!(counts.iter().all(|count| *count == counts[0]), "{counts:?}");
        assert!(counts[0] > 2 * MAX_REGIONS);
        drop(taken);
        guard(&sessions[0].0).unwrap();
    }
}
