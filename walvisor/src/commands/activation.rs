//! Socket activation: listening sockets that a service manager such as systemd passes to the
//! process (`sd_listen_fds(3)`). The service manager keeps them open when the process ends, so
//! clients that connect during a restart wait instead of being refused.

use std::env;
use std::fmt;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::io::FdFlags;
use rustix::net::{AddressFamily, SocketType, sockopt};

use crate::commands::CommandError;
use crate::plan::real_path;

/// The first inherited descriptor (`SD_LISTEN_FDS_START`).
const FIRST: RawFd = 3;
/// Limit on inherited descriptors: more than a process may usually have.
const MOST: RawFd = 1 << 16;

/// The address at which a socket listens.
#[derive(Debug, PartialEq, Eq)]
enum InheritedAddress {
    Unix(PathBuf),
    Tcp(SocketAddr),
    /// An address that no disk can name.
    Unnamed,
}

/// A socket inherited from the service manager.
#[derive(Debug)]
struct InheritedSocket {
    fd: OwnedFd,
    place: InheritedAddress,
    /// The service manager's name for it; may be empty.
    name: String,
}

/// The inherited sockets that no disk has claimed yet.
#[derive(Debug, Default)]
pub struct InheritedSockets {
    sockets: Vec<InheritedSocket>,
}

impl InheritedSockets {
    /// Takes over the inherited sockets. Call it once, before the process opens anything.
    ///
    /// # Errors
    /// If the environment announces a descriptor that is not open, or that is not a listening
    /// stream socket.
    pub fn take() -> Result<Self, CommandError> {
        let variable = |name| env::var(name).unwrap_or_default();
        // Variables with another process's id were meant for that process, which passed its
        // environment on.
        if variable("LISTEN_PID") != std::process::id().to_string() {
            return Ok(Self::default());
        }
        let count = variable("LISTEN_FDS");
        let count: RawFd = count
            .parse()
            .ok()
            .filter(|count| (0..=MOST).contains(count))
            .ok_or_else(|| {
                CommandError::Failed(format!(
                    "LISTEN_FDS is '{count}': it must be the number of sockets that the service \
                     manager passes"
                ))
            })?;
        let names = variable("LISTEN_FDNAMES");
        let mut names = names.split(':');
        let sockets = (FIRST..FIRST + count)
            .map(|fd| adopt(fd, names.next().unwrap_or_default()))
            .collect::<Result<_, _>>()?;
        Ok(Self { sockets })
    }

    /// The inherited socket that listens at `path`, if there is one.
    pub fn unix(&mut self, path: &Path) -> Option<UnixListener> {
        self.claim(&InheritedAddress::Unix(real_path(path)))
            .map(UnixListener::from)
    }

    /// The inherited socket that listens at `address`, if there is one.
    pub fn tcp(&mut self, address: SocketAddr) -> Option<TcpListener> {
        self.claim(&InheritedAddress::Tcp(address))
            .map(TcpListener::from)
    }

    fn claim(&mut self, place: &InheritedAddress) -> Option<OwnedFd> {
        let at = self
            .sockets
            .iter()
            .position(|handed| handed.place == *place)?;
        Some(self.sockets.remove(at).fd)
    }

    /// Checks that all inherited sockets were claimed.
    ///
    /// # Errors
    /// If one was not, because its clients would wait for ever.
    pub fn finish(self) -> Result<(), CommandError> {
        let Some(InheritedSocket { place, name, .. }) = self.sockets.first() else {
            return Ok(());
        };
        let advice = match place {
            InheritedAddress::Unix(path) => {
                let path = path.display();
                format!("give one socket={path}, or give --metrics-listen unix:{path}")
            }
            InheritedAddress::Tcp(address) => {
                let (port, ip) = (address.port(), address.ip());
                format!("give one port={port},address={ip}, or give --metrics-listen {address}")
            }
            InheritedAddress::Unnamed => "make it listen at a path or a TCP port".to_owned(),
        };
        let name = match name.as_str() {
            "" => String::new(),
            name => format!(" '{name}'"),
        };
        Err(CommandError::Failed(format!(
            "the service manager's socket{name} listens at {place}, where no disk is served: \
             {advice}"
        )))
    }
}

impl fmt::Display for InheritedAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unix(path) => path.display().fmt(f),
            Self::Tcp(address) => address.fmt(f),
            Self::Unnamed => f.write_str("no path or port"),
        }
    }
}

/// Takes over descriptor `fd`, which was open when this process started.
fn adopt(fd: RawFd, name: &str) -> Result<InheritedSocket, CommandError> {
    let failed = |what: &dyn fmt::Display| {
        CommandError::Failed(format!(
            "descriptor {fd}, which LISTEN_FDS announces, {what}: pass listening stream sockets"
        ))
    };
    // SAFETY: the call only asks whether the descriptor is open, which is sound for any number.
    let open = rustix::io::fcntl_setfd(unsafe { BorrowedFd::borrow_raw(fd) }, FdFlags::CLOEXEC);
    open.map_err(|_| failed(&"is not open"))?;
    // SAFETY: the descriptor is open, and the environment says that this process may use it.
    // Nothing in this process has opened anything yet, so nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    let listens = sockopt::socket_type(&fd) == Ok(SocketType::STREAM)
        && sockopt::socket_acceptconn(&fd) == Ok(true);
    if !listens {
        return Err(failed(&"does not listen"));
    }
    let place = place(fd.as_fd()).map_err(|error| failed(&error))?;
    let name = name.to_owned();
    Ok(InheritedSocket { fd, place, name })
}

fn place(fd: BorrowedFd<'_>) -> std::io::Result<InheritedAddress> {
    let copy = fd.try_clone_to_owned()?;
    Ok(match sockopt::socket_domain(fd)? {
        AddressFamily::UNIX => UnixListener::from(copy)
            .local_addr()?
            .as_pathname()
            .map_or(InheritedAddress::Unnamed, |path| {
                InheritedAddress::Unix(real_path(path))
            }),
        AddressFamily::INET | AddressFamily::INET6 => {
            InheritedAddress::Tcp(TcpListener::from(copy).local_addr()?)
        }
        _ => InheritedAddress::Unnamed,
    })
}
