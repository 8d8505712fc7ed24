//! Helper processes: forked before the process gives up its rights, they keep one of these.

use std::ffi::{CStr, c_uint};
use std::io;
use std::mem::MaybeUninit;

/// Forks a child that does `work` and ends. It is named `name`, cut to 15 bytes. All its signals
/// are blocked, so that one to the process group or from the terminal does not end it. It has a
/// copy of this process's memory, and only the descriptors in `needed`.
///
/// Call it while this process has one thread.
///
/// # Errors
/// If the system refuses a process.
pub fn start(name: &CStr, needed: &mut [i32], work: impl FnOnce()) -> io::Result<()> {
    let before = block_signals();
    // SAFETY: this process has one thread, so the child finds everything as it is here.
    let child = unsafe { libc::fork() };
    let error = io::Error::last_os_error();
    if child == 0 {
        close_all_but(needed);
        // SAFETY: the name is a zero-terminated string, of which the kernel takes 15 bytes.
        unsafe { libc::prctl(libc::PR_SET_NAME, name.as_ptr()) };
        work();
        // SAFETY: `_exit` is always sound.
        unsafe { libc::_exit(0) }
    }
    restore_signals(&before);
    match child {
        -1 => Err(error),
        _ => Ok(()),
    }
}

/// Closes every descriptor that is not in `needed`.
fn close_all_but(needed: &mut [i32]) {
    let close = |first: c_uint, last: c_uint| {
        if first <= last {
            // SAFETY: the child uses no descriptor that is closed here, and it ends without
            // returning. Before Linux 5.9 there is no such call, and the descriptors stay open
            // until the end.
            unsafe { libc::syscall(libc::SYS_close_range, first, last, 0) };
        }
    };
    needed.sort_unstable();
    let mut next: c_uint = 0;
    for fd in needed {
        let fd = *fd as c_uint;
        if fd > next {
            close(next, fd - 1);
        }
        next = fd + 1;
    }
    close(next, c_uint::MAX);
}

fn block_signals() -> libc::sigset_t {
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: both sets are valid for writes; the first is filled before it is read, and the call
    // writes the second.
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
