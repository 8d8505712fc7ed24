//! Sockets' names in the file system.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{
    AtFlags, FlockOperation, Gid, Mode, Stat, Uid, chmodat, chownat, fchmod, flock, statat,
    unlinkat,
};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, connect, listen, socket_with,
};

/// Longest wait for another server to unlock a directory. A server has it locked for milliseconds;
/// whoever keeps it longer is none, for any user may lock a directory that he can read.
const PATIENCE: Duration = Duration::from_secs(5);

/// Longest wait while it is known that somebody keeps a directory locked.
const SHORT_PATIENCE: Duration = Duration::from_millis(50);

/// When a directory was last found locked for so long.
static KEPT: Mutex<Option<Instant>> = Mutex::new(None);

/// Longest wait for a server that ends to close its sockets.
const CLOSING: Duration = Duration::from_secs(1);

/// How many clients may wait to be accepted.
const BACKLOG: i32 = 128;

/// Pause between two attempts.
const REST: Duration = Duration::from_millis(5);

/// What the mode of a socket has from the moment that it [listens](SocketPlace::listen) until its
/// name is removed: the sticky bit, which means nothing there, so that other programs don't set it.
const MARK: Mode = Mode::SVTX;

/// A place in the file system where a socket can be bound.
#[derive(Debug)]
pub(super) struct SocketPlace {
    directory: File,
    name: OsString,
    address: SocketAddrUnix,
}

impl SocketPlace {
    pub(super) fn new(path: &Path) -> io::Result<Self> {
        let no_name = || io::Error::from(io::ErrorKind::InvalidInput);
        let name = path.file_name().ok_or_else(no_name)?.to_owned();
        let parent = path.parent().filter(|parent| *parent != Path::new(""));
        Ok(Self {
            directory: File::open(parent.unwrap_or(Path::new(".")))?,
            name,
            address: SocketAddrUnix::new(path)?,
        })
    }

    /// Locks the directory against other servers until the guard is dropped. Goes on without the lock
    /// if somebody else keeps it.
    pub(super) fn lock(&self) -> Result<DirectoryLock<'_>, Errno> {
        let began = Instant::now();
        let kept = || KEPT.lock().unwrap_or_else(PoisonError::into_inner);
        // A start locks the directory for each of its sockets.
        let patience = match *kept() {
            Some(at) if at.elapsed() < PATIENCE => SHORT_PATIENCE,
            _ => PATIENCE,
        };
        loop {
            match flock(&self.directory, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(DirectoryLock(&self.directory)),
                Err(Errno::AGAIN | Errno::INTR) if began.elapsed() < patience => {
                    thread::sleep(REST)
                }
                // Without it, two servers that start at once might take each other's name.
                Err(Errno::AGAIN | Errno::INTR) => {
                    *kept() = Some(Instant::now());
                    return Ok(DirectoryLock(&self.directory));
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// The metadata of the file at this place.
    pub(super) fn stat(&self) -> Result<Stat, Errno> {
        statat(&self.directory, &self.name, AtFlags::SYMLINK_NOFOLLOW)
    }

    /// Whether a process of this program has made what is at this place, a socket, with
    /// [`listen`](Self::listen).
    pub(super) fn is_marked(&self) -> Result<bool, Errno> {
        Ok(Mode::from_raw_mode(self.stat()?.st_mode).contains(MARK))
    }

    /// Whether a server listens at the socket at this place.
    pub(super) fn is_alive(&self) -> Result<bool, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&socket, &self.address) {
            // A server whose backlog is full is alive all the same.
            Ok(()) | Err(Errno::AGAIN) => Ok(true),
            Err(Errno::CONNREFUSED) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Makes a socket at this place with these permissions and the mark, and listens there.
    pub(super) fn listen(&self, mode: Mode) -> Result<OwnedFd, Errno> {
        let mode = mode | MARK;
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        // The name takes the socket's mode, less the umask.
        fchmod(&socket, mode)?;
        bind(&socket, &self.address)?;
        let listening = chmodat(&self.directory, &self.name, mode, AtFlags::empty());
        let listening = listening.and_then(|()| listen(&socket, BACKLOG));
        listening.or_else(|error| self.remove().and(Err(error)))?;
        Ok(socket)
    }

    pub(super) fn remove(&self) -> Result<(), Errno> {
        unlinkat(&self.directory, &self.name, AtFlags::empty())
    }
}

/// A directory that is locked.
pub(super) struct DirectoryLock<'a>(&'a File);

impl Drop for DirectoryLock<'_> {
    fn drop(&mut self) {
        // If this fails, closing the descriptor unlocks the directory.
        let _ = flock(self.0, FlockOperation::Unlock);
    }
}

/// The name of a socket in the file system.
#[derive(Debug)]
pub(super) struct Name {
    pub(super) place: SocketPlace,
    /// Device and inode of the socket: another socket may get the same name later.
    pub(super) id: (u64, u64),
}

impl Name {
    /// The open directory, which [`remove`](Self::remove) needs.
    pub(super) fn directory(&self) -> &File {
        &self.place.directory
    }

    /// Removes the name once no server listens there, if it still belongs to this socket.
    pub(super) fn remove(&self) -> Result<(), Errno> {
        let began = Instant::now();
        loop {
            let locked = self.place.lock()?;
            let found = self.place.stat()?;
            if (found.st_dev, found.st_ino) != self.id {
                return Ok(());
            }
            if !self.place.is_alive()? {
                return self.place.remove();
            }
            if began.elapsed() >= CLOSING {
                return Ok(());
            }
            drop(locked);
            thread::sleep(REST);
        }
    }
}

/// The name of a socket in the file system. Dropping it removes the name.
#[derive(Debug)]
pub struct SocketFile {
    /// `None` once the name has another owner.
    pub(super) name: Option<Name>,
}

impl SocketFile {
    /// Makes another user the owner of the socket.
    pub(super) fn give_to(&self, uid: u32, gid: u32) -> io::Result<()> {
        let Some(Name { place, .. }) = &self.name else {
            return Ok(());
        };
        let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        chownat(&place.directory, &place.name, Some(uid), Some(gid), flags)?;
        Ok(())
    }

    /// Gives the name away, so that dropping this value does not remove it.
    pub(super) fn into_name(mut self) -> Option<Name> {
        self.name.take()
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // Fine if the name is already gone.
            let _ = name.remove();
        }
    }
}

/// The name of a socket that was made by a process with other sockets in use. Dropping it removes
/// the name; close the socket first.
#[derive(Debug)]
pub struct LateName(pub(super) Name);

impl Drop for LateName {
    fn drop(&mut self) {
        let Name { place, id } = &self.0;
        let Ok(_locked) = place.lock() else {
            return;
        };
        let ours = |found: Stat| (found.st_dev, found.st_ino) == *id;
        if place.stat().is_ok_and(ours) {
            // If the name stays, the next server that binds it replaces it.
            let _ = place.remove();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A daemon with many sockets in the directory starts all the same.
    #[test]
    fn whoever_keeps_a_directory_locked_is_waited_for_once() {
        let dir = tempfile::tempdir().unwrap();
        let stranger = File::open(dir.path()).unwrap();
        flock(&stranger, FlockOperation::LockExclusive).unwrap();
        let place = |name: &str| SocketPlace::new(&dir.path().join(name)).unwrap();
        drop(place("first").lock().unwrap());
        let began = Instant::now();
        for name in 1..20 {
            drop(place(&name.to_string()).lock().unwrap());
        }
        // Each for itself would take a minute and a half.
        assert!(began.elapsed() < 4 * PATIENCE);
    }
}
