//! Errors of building images and running jobs. Each message is one line that says what failed and
//! what to do.

use std::io;
use std::path::PathBuf;

/// Why an image could not be built or a job could not be run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A program that this crate drives failed.
    #[error("{command} failed ({status}): {message}")]
    Program {
        /// The command line.
        command: String,
        /// Its exit status, in the system's words.
        status: String,
        /// The last non-blank line of its standard error.
        message: String,
    },
    /// A program that this crate drives could not be started.
    #[error("{command} cannot be started: {source}; install the package that contains it")]
    Start {
        /// The command line.
        command: String,
        /// The reason.
        source: io::Error,
    },
    /// A file or directory could not be read or written.
    #[error("{action} {path}: {source}")]
    File {
        /// The operation that failed, for instance `read`.
        action: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The reason.
        source: io::Error,
    },
    /// A file, a value or a machine is not usable as it is.
    #[error("{0}")]
    Unusable(String),
    /// A machine hung or crashed in every attempt.
    #[error(
        "{what} hung or crashed in each of {attempts} attempts: the console output shows how far \
         it got"
    )]
    Hung {
        /// The machine that hung.
        what: &'static str,
        /// The number of attempts.
        attempts: u32,
    },
    /// A guest of another monitor did not behave as expected.
    #[error("the guest {what}; its last line: {}", .console.lines().last().unwrap_or("none"))]
    Guest {
        /// What the guest did or failed to do.
        what: String,
        /// The end of its console.
        console: String,
    },
    /// A signal asked this process to end.
    #[error("ended by signal {signal}")]
    Stopped {
        /// Its number.
        signal: i32,
    },
    /// A job took too long.
    #[error("the job did not end within {seconds} s: the console output shows what it was doing")]
    TimedOut {
        /// The limit, in seconds.
        seconds: u64,
    },
}

/// The result type of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Adds the action and the path to an I/O error.
pub(crate) trait FileContext<T> {
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T>;
}

impl<T> FileContext<T> for io::Result<T> {
    fn at(self, action: &'static str, path: impl Into<PathBuf>) -> Result<T> {
        self.map_err(|source| Error::File {
            action,
            path: path.into(),
            source,
        })
    }
}
