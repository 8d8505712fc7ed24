//! Listening sockets of servers: inherited from a service manager, or bound here. Sets the
//! permissions of Unix sockets, and replaces sockets that a killed server left behind.
//!
//! A server locks (flock) the directory of a socket before it changes the name there. So of two
//! servers that start at once, one finds the other's socket, and neither removes a socket that a
//! server listens at.

use std::fs::{self};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use rustix::fs::Mode;
use rustix::io::Errno;

use super::activation::InheritedSockets;
use super::socket_file::{LateName, Name, SocketFile, SocketPlace};
use super::socket_names::SocketNames;
use crate::commands::CommandError;

/// Provides listening sockets: the service manager's if there is one for the address, else new
/// ones.
#[derive(Debug)]
pub struct Sockets {
    inherited: InheritedSockets,
    mode: u32,
}

impl Sockets {
    /// `mode`: permissions of new Unix sockets. Call it once, before the process opens anything.
    ///
    /// # Errors
    /// If the service manager passes anything but listening sockets.
    pub fn take(mode: u32) -> Result<Self, CommandError> {
        let inherited = InheritedSockets::take()?;
        Ok(Self { inherited, mode })
    }

    /// New sockets only, with the permissions `mode`.
    pub fn new(mode: u32) -> Self {
        let inherited = InheritedSockets::default();
        Self { inherited, mode }
    }

    /// A socket that listens at `path`. If this process has made it, its name is added to `names`,
    /// for removal.
    ///
    /// # Errors
    /// As [`bind`].
    pub fn unix(
        &mut self,
        path: &Path,
        names: &mut SocketNames,
    ) -> Result<UnixListener, CommandError> {
        if let Some(listener) = self.inherited.unix(path) {
            return Ok(listener);
        }
        let (listener, file) = bind(path, self.mode)?;
        names.add(file);
        Ok(listener)
    }

    /// A socket that listens at `address`.
    ///
    /// # Errors
    /// If the system refuses.
    pub fn tcp(&mut self, address: SocketAddr) -> Result<TcpListener, CommandError> {
        if let Some(listener) = self.inherited.tcp(address) {
            return Ok(listener);
        }
        TcpListener::bind(address)
            .map_err(|error| CommandError::Failed(format!("port {address}: {error}: name another")))
    }

    /// Checks that all sockets of the service manager are used. Call it last.
    ///
    /// # Errors
    /// If one is not, because its clients would wait for ever.
    pub fn finish(self) -> Result<(), CommandError> {
        self.inherited.finish()
    }
}

/// Makes a listening socket at `path` with the permissions `mode`. Replaces a socket that no server
/// listens at any more. Call it while the process has one thread, because it sets the permissions
/// through the umask.
///
/// # Errors
/// If a server listens at `path`, if `path` is not a socket, or if the system refuses.
pub fn bind(path: &Path, mode: u32) -> Result<(UnixListener, SocketFile), CommandError> {
    let failed = |what: &dyn std::fmt::Display| {
        CommandError::Failed(format!("socket '{}': {what}", path.display()))
    };
    let unusable = |error: io::Error| match Errno::from_io_error(&error) {
        Some(Errno::NAMETOOLONG) => {
            failed(&"the path is too long for a socket: give one of at most 107 bytes")
        }
        _ => failed(&format_args!("{error}: give a path that can be written")),
    };
    let place = SocketPlace::new(path).map_err(unusable)?;
    let locked = place.lock();
    let locked =
        locked.map_err(|error| failed(&format_args!("its directory cannot be locked: {error}")))?;
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(failed(&error)),
        Ok(found) if !found.file_type().is_socket() => {
            return Err(failed(
                &"the path exists and is not a socket: remove it, or name another path",
            ));
        }
        Ok(_) => match place.is_alive() {
            Ok(true) => {
                return Err(failed(
                    &"a server listens there: stop it, or name another path",
                ));
            }
            Ok(false) => place.remove().map_err(|error| failed(&error))?,
            Err(error) => return Err(failed(&error)),
        },
    }
    // Tests have several threads. With the lock, each finds the umask unchanged.
    static MASK: Mutex<()> = Mutex::new(());
    let alone = MASK.lock().unwrap_or_else(PoisonError::into_inner);
    let before = rustix::process::umask(Mode::from_raw_mode(0o777 & !mode));
    let listener = UnixListener::bind(path);
    rustix::process::umask(before);
    drop(alone);
    let listener = listener.map_err(unusable)?;
    let bound = fs::symlink_metadata(path).map_err(unusable)?;
    let id = (bound.dev(), bound.ino());
    drop(locked);
    let name = Some(Name { place, id });
    Ok((listener, SocketFile { name }))
}

/// As [`bind`], for a process that has several threads and lacks the right to connect. So it sets
/// the permissions without the umask, and refuses any path that exists. This process must
/// [remove](LateName) the name.
///
/// # Errors
/// If there is a file at `path`, or the system refuses.
pub fn bind_late(path: &Path, mode: u32) -> Result<(UnixListener, LateName), String> {
    let failed = |error: Errno| {
        let what = match error {
            Errno::ADDRINUSE => {
                "the path exists: remove it if nothing listens there, or name another path"
                    .to_owned()
            }
            error => format!(
                "{}: give a path that can be written",
                io::Error::from(error)
            ),
        };
        format!("socket '{}': {what}", path.display())
    };
    let place = SocketPlace::new(path);
    let place = place.map_err(|error| format!("socket '{}': {error}", path.display()))?;
    let locked = place.lock().map_err(failed)?;
    let listener = place.listen(Mode::from_raw_mode(mode)).map_err(failed)?;
    let bound = place.stat().map_err(failed)?;
    drop(locked);
    let id = (bound.st_dev, bound.st_ino);
    Ok((listener.into(), LateName(Name { place, id })))
}

/// Removes the sockets of [`bind_late`] beneath a directory that no server listens at any more: a
/// killed process has left them, and the next process cannot ask who listens once it serves. Other
/// programs' sockets stay, and so does what can't be told.
pub fn remove_dead(directory: &Path) {
    let Ok(entries) = fs::read_dir(directory) else {
        return;
    };
    for entry in entries.flatten() {
        let path = entry.path();
        match entry.file_type() {
            Ok(found) if found.is_dir() => remove_dead(&path),
            Ok(found) if found.is_socket() => {
                let Ok(place) = SocketPlace::new(&path) else {
                    continue;
                };
                // A server that starts beside this one has the lock while it binds.
                if place.is_marked() == Ok(true)
                    && let Ok(_locked) = place.lock()
                    && place.is_alive() == Ok(false)
                {
                    // If it stays, the disk of that socket is refused with a line.
                    let _ = place.remove();
                }
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;
    use std::os::unix::net::{UnixDatagram, UnixStream};
    use std::sync::Barrier;

    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn only_a_dead_socket_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        // Close the socket but leave its name, as a kill does.
        drop(UnixListener::bind(&path).unwrap());
        // A child process of another test may hold a copy of the socket until it runs its program.
        let began = Instant::now();
        while UnixStream::connect(&path).is_ok() {
            assert!(began.elapsed() < Duration::from_secs(60), "not closed");
            thread::sleep(Duration::from_millis(5));
        }
        let (listener, file) = bind(&path, 0o600).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let error = bind(&path, 0o600).unwrap_err().to_string();
        assert!(error.contains("a server listens there"), "{error}");
        drop((listener, file));
        assert!(!path.exists());

        // Another server has removed the name and bound it again.
        let (listener, file) = bind(&path, 0o600).unwrap();
        fs::remove_file(&path).unwrap();
        let (other, others) = bind(&path, 0o600).unwrap();
        drop((listener, file));
        assert!(UnixStream::connect(&path).is_ok());
        drop((other, others));
        assert!(!path.exists());

        fs::write(&path, "data").unwrap();
        let error = bind(&path, 0o600).unwrap_err().to_string();
        assert!(error.contains("not a socket"), "{error}");
        assert_eq!(fs::read(&path).unwrap(), b"data");
    }

    /// Any user may lock a directory that he can read.
    #[test]
    fn whoever_keeps_the_directory_locked_stops_no_server() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let locked = fs::File::open(directory.path()).unwrap();
        locked.lock().unwrap();
        let (listener, file) = bind(&path, 0o600).unwrap();
        assert!(UnixStream::connect(&path).is_ok());
        drop((listener, file));
        assert!(!path.exists());
    }

    #[test]
    fn one_of_several_servers_that_start_at_once_gets_the_name() {
        const STARTERS: usize = 4;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        for round in 0..100 {
            // Every other round starts with a dead socket.
            if round % 2 == 0 {
                drop(UnixListener::bind(&path).unwrap());
            }
            let begin = Barrier::new(STARTERS);
            let bound: Vec<_> = thread::scope(|scope| {
                let start = || {
                    begin.wait();
                    bind(&path, 0o600)
                };
                let starters: Vec<_> = (0..STARTERS).map(|_| scope.spawn(start)).collect();
                let ended = starters.into_iter().map(|starter| starter.join().unwrap());
                ended.collect()
            });
            let (won, lost): (Vec<_>, Vec<_>) = bound.into_iter().partition(Result::is_ok);
            assert_eq!(won.len(), 1, "round {round}: {won:?}");
            for error in lost {
                let error = error.unwrap_err().to_string();
                assert!(error.contains("a server listens there"), "{error}");
            }
            assert!(UnixStream::connect(&path).is_ok(), "round {round}");
            drop(won);
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn a_late_socket_has_its_mode_and_removes_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        for mode in [0o600, 0o666] {
            let (listener, name) = bind_late(&path, mode).unwrap();
            let found = fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(found & 0o777, mode);
            assert!(UnixStream::connect(&path).is_ok());
            let error = bind_late(&path, mode).unwrap_err();
            assert!(error.contains("the path exists"), "{error}");
            drop((listener, name));
            assert!(!path.exists());
        }
        let (listener, name) = bind_late(&path, 0o600).unwrap();
        fs::remove_file(&path).unwrap();
        fs::write(&path, "another").unwrap();
        drop((listener, name));
        assert!(path.exists());
        let error = bind_late(&directory.path().join("x/s"), 0o600).unwrap_err();
        assert!(error.contains("No such file"), "{error}");
    }

    #[test]
    fn only_dead_sockets_of_this_program_are_removed() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::create_dir_all(at("a/b")).unwrap();
        // A killed process drops no names.
        let bind_at = |name: &str| {
            let (listener, late) = bind_late(&at(name), 0o660).unwrap();
            std::mem::forget(late);
            listener
        };
        let alive = bind_at("alive");
        drop(UnixListener::bind(at("another's")).unwrap());
        let _datagrams = UnixDatagram::bind(at("datagrams")).unwrap();
        fs::write(at("file"), "x").unwrap();
        std::os::unix::fs::symlink("/", at("link")).unwrap();
        for dead in ["dead", "a/b/dead"] {
            drop(bind_at(dead));
        }
        // A child process of another test may hold a copy of a socket until it runs its program.
        let began = Instant::now();
        while at("dead").exists() || at("a/b/dead").exists() {
            assert!(began.elapsed() < Duration::from_secs(60), "not removed");
            remove_dead(directory.path());
        }
        assert!(UnixStream::connect(at("alive")).is_ok());
        drop(alive);
        for kept in ["another's", "datagrams", "file", "link"] {
            assert!(at(kept).symlink_metadata().is_ok(), "{kept}");
        }
    }

    #[test]
    fn impossible_socket_paths_are_clear_errors() {
        let directory = tempfile::tempdir().unwrap();
        for (name, part) in [
            ("x/s", "that can be written"),
            (&"x".repeat(120), "too long"),
        ] {
            let error = bind(&directory.path().join(name), 0o600).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
    }
}
