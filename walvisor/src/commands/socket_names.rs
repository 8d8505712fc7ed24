//! A child process removes the names of sockets, and does nothing else.
//!
//! Landlock can allow removing any file of a directory, but not one name only: a process with the
//! right to remove its socket could also remove every image beside it. So the process forks a child
//! for that before it gives up its own rights. The only message from parent to child is the closed
//! pipe:
//!
//! ```text
//!   process ── bind ── fork ── restrict ── serve ── drop, or any other end ──▶ pipe closed
//!                       └────▶ child: waits for that ──▶ removes the names ──▶ ends
//! ```

use std::io::{self, PipeReader, PipeWriter, pipe};
use std::os::fd::AsRawFd;

use rustix::io::Errno;

use super::socket_file::{Name, SocketFile};
use crate::child;

/// The names of this process's sockets. Dropping it removes them once no server listens there.
#[derive(Debug, Default)]
pub struct SocketNames {
    /// Names that this process itself removes.
    own: Vec<SocketFile>,
    /// The child that removes the other names.
    child: Option<NameRemover>,
}

impl SocketNames {
    /// Adds the name of a socket.
    pub fn add(&mut self, file: SocketFile) {
        self.own.push(file);
    }

    /// Gives the sockets that have been added to another user.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn give_to(&self, (uid, gid): (u32, u32)) -> io::Result<()> {
        let mut names = self.own.iter();
        names.try_for_each(|file| file.give_to(uid, gid))
    }

    /// Hands all names that have been added to a child, which removes them however this process
    /// ends. So this process may give up the right to remove files. Call it once, while the process
    /// has one thread.
    ///
    /// # Errors
    /// If the system refuses a pipe or a process.
    pub fn hand_over(&mut self) -> io::Result<()> {
        if self.own.is_empty() {
            return Ok(());
        }
        assert!(self.child.is_none(), "one child removes all names");
        let (kept, keep) = pipe()?;
        let (gone, going) = pipe()?;
        let names = self.own.drain(..).filter_map(SocketFile::into_name);
        let names: Vec<Name> = names.collect();
        let directories = names.iter().map(|name| name.directory().as_raw_fd());
        let mut needed: Vec<_> = directories.collect();
        needed.extend([kept.as_raw_fd(), going.as_raw_fd()]);
        let started = child::start(c"walvisor-names", &mut needed, || {
            wait_and_remove(&names, &kept);
        });
        if started.is_err() {
            for name in &names {
                let _ = name.remove();
            }
        }
        started?;
        let keep = Some(keep);
        let gone = Some(gone);
        self.child = Some(NameRemover { keep, gone });
        Ok(())
    }

    /// As [`hand_over`](Self::hand_over), but the child removes the names once all copies of the
    /// returned descriptor are closed, in any process.
    ///
    /// # Errors
    /// As [`hand_over`](Self::hand_over).
    pub fn give_away(mut self) -> io::Result<Option<PipeWriter>> {
        self.hand_over()?;
        Ok(self.child.as_mut().and_then(|child| {
            child.gone = None;
            child.keep.take()
        }))
    }
}

/// A child that will remove names. Dropping it makes the child do so, and waits until it has.
#[derive(Debug)]
struct NameRemover {
    /// The child removes the names when this end of the pipe is closed.
    keep: Option<PipeWriter>,
    /// At end of file once the child has ended; `None`: nobody waits for that.
    gone: Option<PipeReader>,
}

impl Drop for NameRemover {
    fn drop(&mut self) {
        self.keep = None;
        // The child never writes: the end of the pipe, or an error, means that the child has ended.
        if let Some(gone) = &self.gone {
            while let Err(Errno::INTR) = rustix::io::read(gone, &mut [0; 1]) {}
        }
    }
}

/// The work of the child.
fn wait_and_remove(names: &[Name], kept: &PipeReader) {
    while let Err(Errno::INTR) = rustix::io::read(kept, &mut [0; 1]) {}
    for name in names {
        // There is nobody to report an error to. The next server that binds a name replaces it if
        // it stays.
        let _ = name.remove();
    }
}
