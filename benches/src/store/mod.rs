//! `walvisor-bench store`: the store alone, each figure compared with a raw baseline from the same
//! run.
//!
//! ```text
//!   commit   closed-loop clients: write 4 KiB, FLUSH     beside  write + fdatasync by as many threads
//!   append   sequential writes                           beside  sequential O_DIRECT writes of a file
//!   read     random reads, of the image and of the log   beside  random reads of a file
//!   recover  opening a log that a crash left             beside  reading as many bytes of it
//!   checkpoint  copying the log to the base image     beside  reading a file in order, then writing it
//!   load     import, export, check, recovery by all threads   beside  the same by one
//! ```
//! Store and baseline take turns, so that both see the machine in the same states.

mod append;
mod checkpoint;
mod client;
pub mod commit;
mod failover;
mod load;
mod raw;
mod read;
mod recover;
mod site;
mod timing;

use std::time::Duration;

use clap::{Args, Subcommand};
use serde_json::{Value, json};
use walvisor::commands::CommandError;

use crate::bench::{Bench, Side, TakeTurns, Turn, settings};
use crate::output::Output;

/// The matrices of all of them.
const STORE: &str = include_str!("../../matrices/store.toml");
/// One in this many blocks is verified.
const VERIFY_EACH: usize = 61;

/// Arguments of `walvisor-bench store`.
#[derive(Debug, Args)]
pub struct StoreArguments {
    #[command(subcommand)]
    action: StoreAction,
}

/// What to measure.
#[derive(Debug, Subcommand)]
enum StoreAction {
    /// Clients that write 4 KiB and FLUSH in a loop
    Commit(commit::StoreCommitArguments),
    /// Sequential writes through the log
    Append(append::AppendArguments),
    /// Random 4 KiB reads, of checkpointed and of logged data
    Read(read::ReadArguments),
    /// Opening a log that a crash left full
    Recover(recover::RecoverArguments),
    /// Copying a full log to the base image
    Checkpoint(checkpoint::CheckpointArguments),
    /// Import, export, check and recovery with all threads and with one
    Load(load::LoadArguments),
    /// For `recover`: fills a log and dies
    #[command(hide = true)]
    Fill(recover::FillArguments),
    /// For `recover`: opens a log, prints how long that took, and dies
    #[command(hide = true)]
    Open(recover::OpenArguments),
    /// For `drbd`: clients that print each acknowledged commit, without end
    #[command(hide = true)]
    Acknowledge(failover::FailoverArguments),
    /// For `drbd`: prints which of those commits are there
    #[command(hide = true)]
    Survivors(failover::FailoverArguments),
}

/// Runs `walvisor-bench store`.
///
/// # Errors
/// If the arguments are invalid, the medium fails, or an acknowledged write does not read back.
pub fn run(arguments: &StoreArguments) -> Result<(), CommandError> {
    match &arguments.action {
        StoreAction::Commit(arguments) => commit::run(arguments),
        StoreAction::Append(arguments) => append::run(arguments),
        StoreAction::Read(arguments) => read::run(arguments),
        StoreAction::Recover(arguments) => recover::run(arguments),
        StoreAction::Checkpoint(arguments) => checkpoint::run(arguments),
        StoreAction::Load(arguments) => load::run(arguments),
        StoreAction::Fill(arguments) => recover::fill(arguments),
        StoreAction::Open(arguments) => recover::open(arguments),
        StoreAction::Acknowledge(arguments) => failover::acknowledge(arguments),
        StoreAction::Survivors(arguments) => failover::survivors(arguments),
    }
}

/// Measures the section of this name, whose settings are `given`, and reports it.
///
/// # Errors
/// If a turn fails, or a file can't be written.
fn measure(
    section: &str,
    given: Value,
    output: &Output,
    turns: &mut impl TakeTurns,
) -> Result<(), CommandError> {
    let mut bench = Bench::new(STORE, output, &[section.to_owned()], &settings(given));
    let session = bench.start()?;
    let run = bench.matrices[0].measure_rows(&session, turns);
    bench.finish(session, run)
}

/// Turns of the raw file and of the log, which gets the number of its turn, from 1.
fn raw_or_log(
    raw: impl Fn() -> Result<Turn, CommandError>,
    log: impl Fn(u64) -> Result<Turn, CommandError>,
) -> impl FnMut(&Side) -> Result<Turn, CommandError> {
    let mut round = 0;
    move |side| match side.side.as_str() {
        "raw" => raw(),
        _ => {
            round += 1;
            log(round)
        }
    }
}

/// A turn that moved `bytes` bytes in the time `took`.
fn rate(bytes: u64, took: Duration) -> Turn {
    let mib_per_s = bytes as f64 / f64::from(1 << 20) / took.as_secs_f64();
    Turn(json!({ "mib_per_s": mib_per_s }))
}

/// Checks a number of bytes: a multiple of `unit` up to 64 GiB, at least 1 MiB.
///
/// # Errors
/// If it is not; the error names the option and the unit.
fn check_bytes(bytes: u64, unit: u64, name: &str) -> Result<(), CommandError> {
    if (1 << 20..=64 << 30).contains(&bytes) && bytes.is_multiple_of(unit) {
        return Ok(());
    }
    Err(CommandError::Usage(format!(
        "--bytes {bytes}: give a multiple of {name} from 1M to 64G"
    )))
}
