//! Errors of the archive: a stable kind, and a sentence for people.

use std::fmt;

/// The kind of an error. Stable, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The archive, or what was asked of it, does not exist.
    NotFound,
    /// An address, option or directory that does not fit.
    InvalidInput,
    /// Another writer has the archive.
    Fenced,
    /// An object of the archive is missing or has other bytes than were written.
    Damaged,
    /// The object store did not answer, or refused. It may be tried again.
    Unavailable,
    /// Somebody uses the log here. It may be tried again.
    InUse,
    /// The log, an image or a file here can't be read or written.
    Local,
}

/// An error of the archive. Its `Display` is one line: what, where, what to do.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
}

/// The archive's result type.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: printable(&message.into()),
        }
    }

    pub(crate) fn damaged(name: &str, why: impl fmt::Display) -> Self {
        Self::new(ErrorKind::Damaged, format!("object {name}: {why}"))
    }

    pub(crate) fn local(doing: &str, path: &std::path::Path, error: std::io::Error) -> Self {
        let message = format!("{}: can't {doing}: {error}", path.display());
        Self::new(ErrorKind::Local, message)
    }

    /// An error of the storage, of which a lock that somebody has may be tried again.
    pub(crate) fn of_lock(error: walvisor_storage::Error) -> Self {
        match error.kind() {
            walvisor_storage::ErrorKind::Locked => Self::new(ErrorKind::InUse, error.to_string()),
            _ => error.into(),
        }
    }

    /// The stable kind.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }
}

/// A text that a terminal takes for nothing but text: an archive's objects are input.
pub(crate) fn printable(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for character in text.chars() {
        if character.is_control() {
            safe.extend(character.escape_default());
        } else {
            safe.push(character);
        }
    }
    safe
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<walvisor_storage::Error> for Error {
    fn from(error: walvisor_storage::Error) -> Self {
        Self::new(ErrorKind::Local, error.to_string())
    }
}
