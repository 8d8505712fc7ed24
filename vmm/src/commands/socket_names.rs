//! Who removes the names of sockets: a child process that does nothing else.
//!
//! Landlock knows the right to remove what is in a directory, and not the right to remove one name. A process that had to
//! remove its socket in the end could also remove every image beside it. So it leaves that to a child that it forks before it
//! gives its own rights up, and that hears nothing from it but its end:
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

/// The names of this process's sockets. Dropping it removes them, once nobody listens there any more.
#[derive(Debug, Default)]
pub struct SocketNames {
    /// Names that are this process's to remove.
    own: Vec<SocketFile>,
    /// Who removes the others.
    child: Option<Child>,
}

impl SocketNames {
    /// Adds the name of a socket.
    pub fn add(&mut self, file: SocketFile) {
        self.own.push(file);
    }

    /// Leaves all names so far to a child. It removes them however this process ends, which may from now on give up the
    /// right to remove anything. To be called once, while the process has one thread.
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
        // Whoever ends this process by a signal to its group, or its terminal, does not end the child.
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
        self.child = Some(Child { keep, gone });
        Ok(())
    }
}

/// A child that keeps names. Dropping it makes it remove them, and waits for that.
#[derive(Debug)]
struct Child {
    /// Closed once the names are to go.
    keep: Option<PipeWriter>,
    /// At its end once they have gone.
    gone: PipeReader,
}

impl Drop for Child {
    fn drop(&mut self) {
        self.keep = None;
        // Nobody writes: the end of the pipe, or an error, is the end of the child.
        while let Err(Errno::INTR) = rustix::io::read(&self.gone, &mut [0; 1]) {}
    }
}

/// The child. It has the parent's memory, and nothing open but what it needs.
fn wait_and_remove(names: &[Name], needed: &[i32], kept: &PipeReader) -> ! {
    let close = |first: c_uint, last: c_uint| {
        if first <= last {
            // SAFETY: nothing in this process uses what is closed: the child ends without coming back. Where the kernel has
            // no such call (before Linux 5.9) files stay open until the end.
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
    // SAFETY: the name is a string of at most 15 bytes with its end.
    unsafe { libc::prctl(libc::PR_SET_NAME, c"walvisor-names".as_ptr()) };
    while let Err(Errno::INTR) = rustix::io::read(kept, &mut [0; 1]) {}
    for name in names {
        // There is nobody to tell. A name that stays is replaced by the next who wants it.
        let _ = name.remove();
    }
    // SAFETY: always sound.
    unsafe { libc::_exit(0) }
}

fn block_signals() -> libc::sigset_t {
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: both are room for a set: the first is filled before it is read, the second is written.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr());
        before.assume_init()
    }
}

fn restore_signals(before: &libc::sigset_t) {
    // SAFETY: the set is valid, and the earlier one is not asked for.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, before, std::ptr::null_mut()) };
}
