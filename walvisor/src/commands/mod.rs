//! The subcommands, one module each: a struct of arguments for clap, and a function that carries
//! the command out.

mod activation;
pub mod archive;
pub mod config;
pub mod ctl;
pub mod demo;
pub mod disk;
pub mod log;
mod look;
mod metrics_file;
mod owner;
mod process;
pub mod run;
pub mod serve;
mod socket;
mod socket_file;
mod socket_names;
pub mod threads;
pub mod top;

/// Why a command failed. Its text is one line: what, where, what to do.
#[derive(Debug, thiserror::Error)]
pub enum CommandError {
    /// The command line makes no sense: exit status 2.
    #[error("{0}")]
    Usage(String),
    /// The command itself failed: exit status 1.
    #[error("{0}")]
    Failed(String),
}

impl CommandError {
    /// A failure (exit status 1) with the text of `error`.
    pub fn failed(error: impl std::fmt::Display) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<walvisor_storage::Error> for CommandError {
    fn from(error: walvisor_storage::Error) -> Self {
        Self::failed(error)
    }
}
