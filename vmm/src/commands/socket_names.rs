//! The names of sockets are removed by a child process that does nothing else.
//!
//! Landlock has a right to remove files in a directory, but no right to remove one name only. A process that
//! had to remove its socket at its end could also remove every image beside it. So the process forks a child
//! that removes the name, before it gives up its own rights. The only message from
//! parent to child is the closed pipe:
//!
//! ```text
//!   process ── bind ── fork ── restrict ── serve ── drop, or any other end ──▶ pipe closed
//!                       └────▶ child: waits for that ──▶ removes the names ──▶ ends
//! ```

use std::ffi::c_uint;
use std::io::{self, PipeReader, PipeWriter, pipe};
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;

use rustix::io::Errno;

use super::socket_file::{Name, SocketFile};

/// The names of this process's sockets. Dropping it removes them, once no server listens there any more.
#[derive(Debug, Default)]
pub struct SocketNames {
    /// Names that this process itself removes.
    own: Vec<SocketFile>,
    /// The child that removes the other names.
    child: Option<Child>,
}

impl SocketNames {
    /// Adds the name of a socket.
    pub fn add(&mut self, file: SocketFile) {
        self.own.push(file);
    }

    /// Hands all names added so far to a child. The child removes them however this process ends, so this
    /// process may give up the right to remove anything. To be called once, while the process has one thread.
    ///
    /// # Errors
    /// If the system refuses a pipe or a process.
    pub fn entrust(&mut self) -> io::Result<()> {
        if self.own.is_empty() {
            return Ok(());
        }
        let (kept, keep) = pipe()?;
        let (gone, going) = pipe()?;
        let names = self.own.drain(..).filter_map(SocketFile::into_name);
        let names: Vec<Name> = names.collect();
        let directories = names.iter().map(|name| name.directory().as_raw_fd());
        let mut needed: Vec<_> = directories.collect();
        needed.extend([kept.as_raw_fd(), going.as_raw_fd()]);
        needed.sort_unstable();
        // A signal that is sent to the process group or by the terminal must not end the child, so the child
        // starts with all signals blocked.
        let before = block_signals();
        // SAFETY: this process has one thread, so the child finds everything as it is here.
        let child = unsafe { libc::fork() };
        let error = io::Error::last_os_error();
        if child == 0 {
            wait_and_remove(&names, &needed, &kept);
        }
        restore_signals(&before);
        if child == -1 {
            for name in &names {
                let _ = name.remove();
            }
            return Err(error);
        }
        let keep = Some(keep);
        let gone = Some(gone);
        self.child = Some(Child { keep, gone });
        Ok(())
    }

    /// As [`entrust`](Self::entrust), but the child removes the names once all copies of the returned descriptor are closed,
    /// which other processes may have too.
    ///
    /// # Errors
    /// As [`entrust`](Self::entrust).
    pub fn give_away(mut self) -> io::Result<Option<PipeWriter>> {
        self.entrust()?;
        Ok(self.child.as_mut().and_then(|child| {
            child.gone = None;
            child.keep.take()
        }))
    }
}

/// A child that keeps names. Dropping it makes the child remove them, and waits until it has.
#[derive(Debug)]
struct Child {
    /// The child removes the names when this end is closed.
    keep: Option<PipeWriter>,
    /// Reaches its end when the child has ended; `None`: nobody waits for that.
    gone: Option<PipeReader>,
}

impl Drop for Child {
    fn drop(&mut self) {
        self.keep = None;
        // The child never writes: the end of the pipe, or an error, means that the child has ended.
        if let Some(gone) = &self.gone {
            while let Err(Errno::INTR) = rustix::io::read(gone, &mut [0; 1]) {}
        }
    }
}

/// The body of the child. It has a copy of the parent's memory, and closes every descriptor that it does not
/// need.
fn wait_and_remove(names: &[Name], needed: &[i32], kept: &PipeReader) -> ! {
    let close = |first: c_uint, last: c_uint| {
        if first <= last {
            // SAFETY: this process uses no descriptor that is closed here, and it ends without returning. Where
            // the kernel has no such call (before Linux 5.9) the descriptors stay open until the end.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        }
    };
    let mut next: c_uint = 0;
    for fd in needed {
        let fd = *fd as c_uint;
        if fd > next {
            close(next, fd - 1);
        }
        next = fd + 1;
    }
    close(next, c_uint::MAX);
    // SAFETY: the name is a zero-terminated string of at most 15 bytes.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"walvisor-names".as_ptr()) };
    while let Err(Errno::INTR) = rustix::io::read(kept, &mut [0; 1]) {}
    for name in names {
        // The child has no one to report an error to. A name that stays is replaced by the next server that
        // binds it.
        let _ = name.remove();
    }
    // SAFETY: `_exit` is always sound.
    unsafe { libc::_exit(0) }
}

fn block_signals() -> libc::sigset_t {
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: both sets are valid for writes; the first is filled before it is read, and the call writes the
    // second.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    }
}

fn restore_signals(before: &libc::sigset_t) {
    // SAFETY: the set is valid, and a null pointer means that the previous set is not returned.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
}
