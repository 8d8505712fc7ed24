//! The options that all benchmarks have.

use std::path::PathBuf;

use clap::Args;
use walvisor::commands::CommandError;

/// Where to work and how to report.
#[derive(Debug, Args)]
pub struct Output {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Where to make the log and the files, for as long as it takes
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
}

impl Output {
    /// Prints a report as it was asked for.
    ///
    /// # Errors
    /// If it is no JSON.
    pub fn print(
        &self,
        report: &(impl serde::Serialize + std::fmt::Display),
    ) -> Result<(), CommandError> {
        use std::io::Write;
        let text = match self.json {
            true => serde_json::to_string(report).map_err(CommandError::failed)? + "\n",
            false => report.to_string(),
        };
        // A reader that closed the pipe early has what it wanted.
        let _ = std::io::stdout().write_all(text.as_bytes());
        Ok(())
    }
}
