//! The names of sockets in the file system, of which each is one socket's.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FlockOperation, Stat, flock, statat, unlinkat};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

/// How long another server's change of a directory is waited for.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long a server that ends may take to close its sockets.
const CLOSING: Duration = Duration::from_secs(1);

/// How long to rest before looking again.
const REST: Duration = Duration::from_millis(5);

/// A name that a socket can have.
#[derive(Debug)]
pub(super) struct Place {
    directory: File,
    name: OsString,
    address: SocketAddrUnix,
}

impl Place {
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

    /// Keeps others who lock from changing the directory, until the guard is dropped.
    pub(super) fn lock(&self) -> Result<Locked<'_>, Errno> {
        let began = Instant::now();
        loop {
            match flock(&self.directory, FlockOperation::NonBlockingLockExclusive) {
                Ok(()) => return Ok(Locked(&self.directory)),
                Err(Errno::AGAIN | Errno::INTR) if began.elapsed() < PATIENCE => {
                    thread::sleep(REST)
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// What stands there.
    pub(super) fn stat(&self) -> Result<Stat, Errno> {
        statat(&self.directory, &self.name, AtFlags::SYMLINK_NOFOLLOW)
    }

    /// Whether somebody listens at the socket that stands there.
    pub(super) fn is_alive(&self) -> Result<bool, Errno> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        match connect(&socket, &self.address) {
            // One who does not come to accept is there all the same.
            Ok(()) | Err(Errno::AGAIN) => Ok(true),
            Err(Errno::CONNREFUSED) => Ok(false),
            Err(error) => Err(error),
        }
    }

    pub(super) fn remove(&self) -> Result<(), Errno> {
        unlinkat(&self.directory, &self.name, AtFlags::empty())
    }
}

/// A directory that is locked.
pub(super) struct Locked<'a>(&'a File);

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        // It goes with the descriptor at the latest.
        let _ = flock(self.0, FlockOperation::Unlock);
    }
}

/// The name of a socket in the file system.
#[derive(Debug)]
pub(super) struct Name {
    pub(super) place: Place,
    /// Device and inode of the socket: another one may stand there later.
    pub(super) id: (u64, u64),
}

impl Name {
    /// The directory, which [`remove`](Self::remove) needs open.
    pub(super) fn directory(&self) -> &File {
        &self.place.directory
    }

    /// Removes the name, if it is still this socket's, and once nobody listens there.
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

/// The name of a socket in the file system; dropping it removes the name.
#[derive(Debug)]
pub struct SocketFile {
    /// There until somebody else sees to it.
    pub(super) name: Option<Name>,
}

impl SocketFile {
    /// The name, which is not removed then.
    pub(super) fn into_name(mut self) -> Option<Name> {
        self.name.take()
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // Gone already is as good.
            let _ = name.remove();
        }
    }
}
