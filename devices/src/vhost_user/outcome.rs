//! The result of handling a front-end's message, and why a connection ends.

/// Why a connection ends.
#[derive(Debug)]
pub(super) enum SessionEnd {
    /// The front-end has left, or the server is stopping.
    Gone,
    /// The front-end broke the protocol, in this way.
    Refused(String),
    /// A system call failed.
    System(std::io::Error),
}

impl From<std::io::Error> for SessionEnd {
    fn from(error: std::io::Error) -> Self {
        Self::System(error)
    }
}

impl From<rustix::io::Errno> for SessionEnd {
    fn from(error: rustix::io::Errno) -> Self {
        Self::System(error.into())
    }
}

/// The result of handling a front-end's message.
pub(super) type Outcome<T> = Result<T, SessionEnd>;

/// An error that is the front-end's fault.
pub(super) fn refuse(what: impl Into<String>) -> SessionEnd {
    SessionEnd::Refused(what.into())
}
