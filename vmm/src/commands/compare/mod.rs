//! `walvisor compare`: what a notification and a flush cost on each path, beside what others report and do.
//!
//! ```text
//!   commit     group commit on a disk of its own: the experiments of its sources      commit/
//!   notify     one disk through every path: what a notification and a flush cost      notify/
//!   database   MariaDB and SQLite, which wait for the disk at each commit             database/
//!   peers      the disk beside those of others: the same client and file system       peers/
//!   tcmu       TCMU against NBD in Linux kernels                                      tcmu.rs, linux/
//! ```
//! Each gives a `Report`: printed as tables, as JSON, as a page with plots, and as plots alone. What is compared
//! takes turns, so that all see the machine in the same moods.

mod commit;
mod database;
mod guests;
mod linux;
mod machine;
pub mod notify;
mod page;
mod peers;
mod plot;
mod report;
mod session;
mod tcmu;

use std::path::{Path, PathBuf};
use std::time::Duration;
use std::{fs, io};

use clap::{Args, Subcommand};

use super::CommandError;
use machine::Machine;
use report::{Report, Section};
use session::Session;

/// Arguments of `walvisor compare`.
#[derive(Debug, Args)]
pub struct CompareArguments {
    #[command(subcommand)]
    action: Action,
}

/// What to compare.
#[derive(Debug, Subcommand)]
enum Action {
    /// Group commit: clients, sync latencies, waits, disks, media, each beside what its source reports
    Commit(commit::CommitArguments),
    /// One disk through virtio-mmio, virtio-pci, vhost-user and NBD: what a notification and a flush cost
    Notify(notify::NotifyArguments),
    /// MariaDB and SQLite: what a commit costs on a raw image and on the log, with a doublewrite buffer and without
    Database(database::DatabaseArguments),
    /// The disk beside those of QEMU, qemu-storage-daemon, qemu-nbd and tcmu-runner
    Peers(peers::PeersArguments),
    /// TCMU against NBD: 2, 4 and 8 fio threads in Linux kernels, beside what the source reports
    Tcmu(tcmu::TcmuArguments),
}

/// How to measure and to report.
#[derive(Debug, Args)]
struct Output {
    /// Fewer and shorter jobs: under a minute
    #[arg(long)]
    quick: bool,
    /// How often each job takes its turn [default: as many as the comparison needs to show how it scatters]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(1..=100))]
    rounds: Option<u8>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Write a page with plots and tables that needs nothing else
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Write the plots, an SVG file each
    #[arg(long, value_name = "DIR")]
    svg: Option<PathBuf>,
    /// Where to make disks and logs, for as long as it takes
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
}

impl Output {
    /// Begins a comparison that is expected to take `expected` in all. What it is to write is tried first: nobody waits for
    /// minutes to be told of a directory that is not there.
    ///
    /// # Errors
    /// If a file can't be written, or the system refuses a signal handler.
    fn start(&self, expected: Duration) -> Result<Session, CommandError> {
        if let Some(path) = &self.html {
            fs::write(path, "").map_err(failed("write the page", path))?;
        }
        if let Some(directory) = &self.svg {
            fs::create_dir_all(directory).map_err(failed("make the directory", directory))?;
        }
        Session::start(expected)
    }

    /// The rounds that were asked for, else so many in full, and so many quickly.
    fn rounds(&self, full: u8, quick: u8) -> usize {
        let otherwise = if self.quick { quick } else { full };
        self.rounds.unwrap_or(otherwise).into()
    }

    /// Gives the report in all the ways that were asked for.
    ///
    /// # Errors
    /// If a file can't be written.
    fn give(
        &self,
        title: &str,
        session: Session,
        sections: Vec<Section>,
    ) -> Result<(), CommandError> {
        use std::io::Write;
        let report = Report {
            title: title.to_owned(),
            machine: Machine::this(&self.dir),
            interrupted: session.interrupted(),
            quick: self.quick,
            elapsed_s: session.elapsed().as_secs_f64().round(),
            sections,
        };
        drop(session);
        let text = match self.json {
            true => serde_json::to_string(&report).map_err(CommandError::failed)? + "\n",
            false => report.to_string(),
        };
        // A reader that closed the pipe early has what it wanted.
        let _ = std::io::stdout().write_all(text.as_bytes());
        if let Some(path) = &self.html {
            fs::write(path, page::page(&report)?).map_err(failed("write the page", path))?;
        }
        if let Some(directory) = &self.svg {
            for plot in report.sections.iter().flat_map(|section| &section.plots) {
                let path = directory.join(format!("{}.svg", plot.name));
                fs::write(&path, plot.svg()?).map_err(failed("write the plot", &path))?;
            }
        }
        Ok(())
    }
}

fn failed(what: &str, path: &Path) -> impl Fn(io::Error) -> CommandError {
    let text = format!("{}: cannot {what}", path.display());
    move |error| CommandError::Failed(format!("{text}: {error}"))
}

/// Carries out `walvisor compare`.
///
/// # Errors
/// If the arguments make no sense, what is to be compared is missing or fails, or a file can't be written.
pub fn run(arguments: &CompareArguments) -> Result<(), CommandError> {
    match &arguments.action {
        Action::Commit(arguments) => commit::run(arguments),
        Action::Notify(arguments) => notify::run(arguments),
        Action::Database(arguments) => database::run(arguments),
        Action::Peers(arguments) => peers::run(arguments),
        Action::Tcmu(arguments) => tcmu::run(arguments),
    }
}
