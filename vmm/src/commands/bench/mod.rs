//! `walvisor bench`: the store alone, each figure beside a raw baseline that was measured in the same run.
//!
//! ```text
//!   commit   closed-loop clients: write 4 KiB, FLUSH     beside  write + fdatasync by as many threads
//!   append   sequential writes                           beside  sequential O_DIRECT writes of a file
//!   read     random reads, of the image and of the log   beside  random reads of a file
//!   recover  opening a log that a crash left             beside  reading as many bytes of it
//!   checkpoint  copying the log to the base image     beside  reading a file in order, then writing it
//!   load     import, export, check, recovery by all threads   beside  the same by one
//! ```
//! Store and baseline take turns, so that both see the machine in the same moods.

mod append;
mod checkpoint;
mod client;
pub(super) mod commit;
mod load;
mod raw;
mod read;
mod recover;
mod site;
mod timing;

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::CommandError;

/// Bytes of a commit's write and of a random read.
const BLOCK: usize = 4096;

/// Arguments of `walvisor bench`.
#[derive(Debug, Args)]
pub struct BenchArguments {
    #[command(subcommand)]
    action: Action,
}

/// What to measure.
#[derive(Debug, Subcommand)]
enum Action {
    /// Clients that write 4 KiB and FLUSH, over and over
    Commit(commit::CommitArguments),
    /// Sequential writes through the log
    Append(append::AppendArguments),
    /// Random 4 KiB reads, of checkpointed and of logged data
    Read(read::ReadArguments),
    /// Opening a log that a crash left full
    Recover(recover::RecoverArguments),
    /// Copying a full log to the base image
    Checkpoint(checkpoint::CheckpointArguments),
    /// Import, export, check and recovery by all threads and by one
    Load(load::LoadArguments),
    /// For `recover`: fills a log and dies
    #[command(hide = true)]
    Fill(recover::FillArguments),
    /// For `recover`: opens a log, says how long that took, and dies
    #[command(hide = true)]
    Open(recover::OpenArguments),
}

/// Where to work and how to report.
#[derive(Debug, Args)]
struct Output {
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Where to make the log and the files, for as long as it takes
    #[arg(long, value_name = "DIR", default_value = ".")]
    dir: PathBuf,
}

impl Output {
    /// Prints a report as it was asked for.
    fn print(
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

/// Carries out `walvisor bench`.
///
/// # Errors
/// If the arguments make no sense, the medium fails, or what was acknowledged does not read back.
pub fn run(arguments: &BenchArguments) -> Result<(), CommandError> {
    match &arguments.action {
        Action::Commit(arguments) => commit::run(arguments),
        Action::Append(arguments) => append::run(arguments),
        Action::Read(arguments) => read::run(arguments),
        Action::Recover(arguments) => recover::run(arguments),
        Action::Checkpoint(arguments) => checkpoint::run(arguments),
        Action::Load(arguments) => load::run(arguments),
        Action::Fill(arguments) => recover::fill(arguments),
        Action::Open(arguments) => recover::open(arguments),
    }
}

/// The block that record number `record` of `blocks` writes: each block once, in a scattered order.
fn scattered(record: u64, blocks: u64) -> u64 {
    // A prime larger than any number of blocks here, so that no two records meet.
    const STEP: u64 = 2_654_435_761;
    (record * STEP) % blocks
}

/// A number with one decimal.
fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// A number with three decimals.
fn thousandths(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_fill_every_block_once() {
        for blocks in [256, 257, 1000, 4096] {
            let mut seen: Vec<u64> = (0..blocks)
                .map(|record| scattered(record, blocks))
                .collect();
            seen.sort_unstable();
            assert!(seen.into_iter().eq(0..blocks));
        }
    }
}
