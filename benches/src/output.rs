//! The options that all comparisons have: how to measure and to report.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use walvisor::commands::CommandError;

use crate::bench_dirs::failed;
use crate::report::machine::MachineInfo;
use crate::report::{Report, Section, page};
use crate::session::Session;

/// How to measure and to report.
#[derive(Debug, Args)]
pub struct Output {
    /// Fewer and shorter jobs: under a minute
    #[arg(long)]
    pub quick: bool,
    /// Number of rounds of each job [default: depends on the comparison]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=100))]
    rounds: Option<u8>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Write a self-contained page with plots and tables
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write each plot to an SVG file
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,
    /// Directory for the temporary disks and logs
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub dir: PathBuf,
}

impl Output {
    /// Starts a comparison that should take `expected` in all. First tries to write the output
    /// files, so that a missing directory is reported at once and not after minutes.
    ///
    /// # Errors
    /// If a file can't be written, or the system refuses a signal handler.
    pub fn start(&self, expected: Duration) -> Result<Session, CommandError> {
        if let Some(path) = &self.html {
            fs::write(path, "").map_err(failed("write the page", path))?;
        }
        if let Some(directory) = &self.svg {
            fs::create_dir_all(directory).map_err(failed("make the directory", directory))?;
        }
        Session::start(expected)
    }

    /// The number of rounds that the user asked for, otherwise this one.
    pub fn rounds(&self, otherwise: usize) -> usize {
        self.rounds.map_or(otherwise, usize::from)
    }

    /// Writes the report in all the formats that the user asked for.
    ///
    /// # Errors
    /// If a file can't be written.
    pub fn write(
        &self,
        title: &str,
        session: Session,
        sections: Vec<Section>,
    ) -> Result<(), CommandError> {
        use std::io::Write;
        let report = Report {
            title: title.to_owned(),
            machine: MachineInfo::current(&self.dir),
            interrupted: session.interrupted(),
            quick: self.quick,
            elapsed_s: session.elapsed().as_secs_f64().round(),
            sections,
        };
        drop(session);
        let text = if self.json {
            serde_json::to_string(&report).map_err(CommandError::failed)? + "\n"
        } else {
            report.to_string()
        };
        // Fails if the reader has closed the pipe, which is fine.
        let _ = std::io::stdout().write_all(text.as_bytes());
        if let Some(path) = &self.html {
            fs::write(path, page::page(&report)?).map_err(failed("write the page", path))?;
        }
        if let Some(directory) = &self.svg {
            for plot in report.sections.iter().flat_map(|section| &section.plots) {
                let path = directory.join(format!("{}.svg", plot.name));
                fs::write(&path, plot.draw(false)?).map_err(failed("write the plot", &path))?;
            }
        }
        Ok(())
    }
}
