//! Errors of opening, creating and checking disks: a stable kind, a sentence for people, a source.

use std::fmt;
use std::io;
use std::path::Path;

/// The kind of an error. Stable, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A required file or directory is missing.
    NotFound,
    /// A file or directory to be created already exists.
    AlreadyExists,
    /// Another process, or another disk of this process, has the file open.
    Locked,
    /// The log belongs to another disk, or the disk to another log.
    WrongLog,
    /// Bytes below the durable LSN are damaged (promise 4): acknowledged data may be lost.
    Damaged,
    /// The file has a format version unknown to this program.
    UnsupportedVersion,
    /// A size, count or option out of its range.
    InvalidInput,
    /// The system refused an operation; the source says why.
    Io,
}

/// An error of the store. Its `Display` is one line: what, where, what to do.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    source: Option<io::Error>,
    /// What to do about the source.
    advice: Option<String>,
    owner: Option<u32>,
}

/// The store's result type.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            source: None,
            advice: None,
            owner: None,
        }
    }

    /// The same error, with the process that has the file open.
    pub(crate) fn of_owner(self, owner: Option<u32>) -> Self {
        Self { owner, ..self }
    }

    /// The same error, with the file that it is about.
    pub(crate) fn of_file(self, path: &Path) -> Self {
        let message = format!("{}: {}", path.display(), self.message);
        Self { message, ..self }
    }

    /// An I/O error, with the operation that failed and its file.
    pub(crate) fn io(doing: &str, path: &Path, source: io::Error) -> Self {
        let kind = match source.kind() {
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            io::ErrorKind::AlreadyExists => ErrorKind::AlreadyExists,
            _ => ErrorKind::Io,
        };
        Self {
            kind,
            message: format!("{}: can't {doing}", path.display()),
            source: Some(source),
            advice: None,
            owner: None,
        }
    }

    /// An error because something is full, other than a file system.
    pub(crate) fn full(message: String) -> Self {
        Self {
            source: Some(io::ErrorKind::StorageFull.into()),
            ..Self::new(ErrorKind::Io, message)
        }
    }

    /// The same error, with advice for the case that a file or directory is missing.
    pub(crate) fn if_missing(self, advice: impl FnOnce() -> String) -> Self {
        match self.kind {
            ErrorKind::NotFound => Self {
                advice: Some(advice()),
                ..self
            },
            _ => self,
        }
    }

    /// Whether a file system, or this user's quota, was full.
    pub(crate) fn is_no_space(&self) -> bool {
        let kind = self.source.as_ref().map(io::Error::kind);
        matches!(
            kind,
            Some(io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
        )
    }

    /// For [`ErrorKind::Locked`]: the process that has the file open, if known.
    pub fn owner(&self) -> Option<u32> {
        self.owner
    }

    /// The stable kind.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        if let Some(source) = &self.source {
            write!(f, ": {source}")?;
        }
        match &self.advice {
            Some(advice) => write!(f, "; {advice}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Error {}

impl From<Error> for io::Error {
    fn from(error: Error) -> Self {
        Self::other(error)
    }
}

pub(crate) fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidInput, message)
}
