//! How what a front-end wants ends.

/// Why a connection ends.
#[derive(Debug)]
pub(super) enum Ended {
    /// The front-end has left, or the server stops.
    Gone,
    /// The front-end does what it must not: told in one line.
    Refused(String),
    /// The system refuses.
    System(std::io::Error),
}

impl From<std::io::Error> for Ended {
    fn from(error: std::io::Error) -> Self {
        Self::System(error)
    }
}

impl From<rustix::io::Errno> for Ended {
    fn from(error: rustix::io::Errno) -> Self {
        Self::System(error.into())
    }
}

/// The outcome of something that a front-end wants.
pub(super) type Outcome<T> = Result<T, Ended>;

/// The front-end's fault.
pub(super) fn refused(what: impl Into<String>) -> Ended {
    Ended::Refused(what.into())
}
