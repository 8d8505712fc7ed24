//! Errors of building images and running jobs. Each message is one line that names the object and the remedy.

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
        /// Its exit status, as the system words it.
        status: String,
        /// The last line of its standard error that is not blank.
        message: String,
    },
    /// A program that this crate drives could not be started.
    #[error("{command} cannot be started: {source}; install the package that holds it")]
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
    /// A file, a value or a machine is not in the form or state that it must have.
    #[error("{0}")]
    Unusable(String),
    /// A machine hung or crashed in every attempt.
    #[error(
        "{what} hung or fell over in each of {attempts} attempts: the console output shows how far it came"
    )]
    Hung {
        /// The machine that hung.
        what: &'static str,
        /// The number of attempts.
        attempts: u32,
    },
    /// A guest of another monitor did not behave as it should.
    #[error("the guest {what}; its last line: {}", .console.lines().last().unwrap_or("none"))]
    Guest {
        /// What the guest did or failed to do.
        what: String,
        /// The end of its console.
        console: String,
    },
    /// A signal has asked this process to end.
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

/// Result of this crate.
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
