//! Signals that ask the process to end. They are read from a descriptor, so no code runs in a
//! signal handler.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd};

use vmm_sys_util::signal::{Error, block_signal, create_sigset};

/// The signals that end a run.
const SIGNALS: [i32; 4] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT];

/// The signals as a descriptor.
pub struct TerminationSignals {
    file: File,
}

/// Blocks the signals that ask the process to end, in this thread and in those that it starts
/// later, for good: no signal may interrupt the closing of the disks. Call it before starting
/// threads that outlive the building of the VM, such as a log's. A second call does nothing.
///
/// # Errors
/// If the system refuses.
pub fn block_termination_signals() -> io::Result<()> {
    SIGNALS
        .into_iter()
        .try_for_each(|signal| match block_signal(signal) {
            Ok(()) | Err(Error::SignalAlreadyBlocked(_)) => Ok(()),
            Err(error) => Err(io::Error::other(error.to_string())),
        })
}

impl TerminationSignals {
    /// Blocks the signals, and opens a descriptor for them.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn block() -> io::Result<Self> {
        block_termination_signals()?;
        let set = create_sigset(&SIGNALS)?;
        // SAFETY: `set` is a valid signal set; -1 asks for a new descriptor.
        let fd = unsafe { libc::signalfd(-1, &raw const set, libc::SFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: signalfd has just returned this descriptor, and nothing else owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self {
            file: File::from(fd),
        })
    }

    /// The number of a pending signal. Blocks until there is one.
    ///
    /// # Errors
    /// If the descriptor cannot be read.
    pub fn take(&mut self) -> io::Result<i32> {
        // struct signalfd_siginfo: 128 bytes, the number first (signalfd(2)).
        let mut info = [0; size_of::<libc::signalfd_siginfo>()];
        self.file.read_exact(&mut info)?;
        Ok(i32::from_ne_bytes([info[0], info[1], info[2], info[3]]))
    }
}

impl AsFd for TerminationSignals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}
