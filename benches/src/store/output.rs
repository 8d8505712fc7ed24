//! The options that all benchmarks have.

use std::path::PathBuf;

use clap::Args;
use walvisor::commands::CommandError;

/// Where to work and how to report.
#[derive(Debug, Args)]
pub struct StoreOutput {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Directory for the temporary log and files
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
}

impl StoreOutput {
    /// Prints a report in the format that the user asked for.
    ///
    /// # Errors
    /// If the report cannot be converted to JSON.
    pub fn print(
        &self,
        report: &(impl serde::Serialize + std::fmt::Display),
    ) -> Result<(), CommandError> {
        use std::io::Write;
        let text = if self.json {
            serde_json::to_string(report).map_err(CommandError::failed)? + "\n"
        } else {
            report.to_string()
        };
        // Fails if the reader has closed the pipe, which is fine.
        let _ = std::io::stdout().write_all(text.as_bytes());
        Ok(())
    }
}
