//! `walvisor bench matrix`: `bench commit` over numbers of clients and sync latencies, group commit off and on.

use std::fmt;
use std::io::IsTerminal;
use std::time::Duration;

use clap::Args;
use indicatif::ProgressBar;
use serde::Serialize;

use super::commit::{CommitReport, Medium, Mode, Plan, Switch, WaitArguments, measure};
use super::{CommandError, Output};

/// Arguments of `walvisor bench matrix`.
#[derive(Debug, Args)]
pub struct MatrixArguments {
    /// Numbers of clients, with commas between
    #[arg(long, value_name = "N,N..", value_delimiter = ',', default_value = "1,2,4,8,16,32,64",
          value_parser = clap::value_parser!(u16).range(1..=1024))]
    clients: Vec<u16>,
    /// Microseconds added to each sync, with commas between
    #[arg(long, value_name = "L,L..", value_delimiter = ',', default_value = "0,1000,2000,4000,10000,20000",
          value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    sync_latency_us: Vec<u32>,
    /// Commits of a cell; with group commit on at least 40 for each client
    #[arg(long, value_name = "M", default_value_t = 200, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    commits: u64,
    #[command(flatten)]
    wait: WaitArguments,
    #[command(flatten)]
    output: Output,
}

/// All cells.
#[derive(Debug, Serialize)]
struct Matrix {
    cells: Vec<CommitReport>,
}

/// Carries out `walvisor bench matrix`.
///
/// # Errors
/// See [`super::run`].
pub fn run(arguments: &MatrixArguments) -> Result<(), CommandError> {
    let count = 2 * arguments.clients.len() * arguments.sync_latency_us.len();
    let progress = match std::io::stderr().is_terminal() {
        true => ProgressBar::new(count as u64),
        false => ProgressBar::hidden(),
    };
    let mut cells = Vec::with_capacity(count);
    for &latency in &arguments.sync_latency_us {
        for &clients in &arguments.clients {
            for group in [Switch::Off, Switch::On] {
                // Without groups a commit takes a sync, however many clients there are.
                let least = match group {
                    Switch::Off => 1,
                    Switch::On => 40,
                };
                let plan = Plan {
                    clients,
                    medium: Medium {
                        sync_latency: Duration::from_micros(latency.into()),
                        ..Medium::default()
                    },
                    commits: arguments.commits.max(least * u64::from(clients)),
                    group,
                    write_per_waiter: false,
                    wait: arguments.wait.into(),
                    mode: Mode::Writeback,
                    disks: 1,
                    logs: 1,
                    baseline: true,
                };
                cells.push(measure(&plan, &arguments.output.dir)?);
                progress.inc(1);
            }
        }
    }
    progress.finish_and_clear();
    arguments.output.print(&Matrix { cells })
}

/// A row for each latency and number of clients, in Markdown.
impl fmt::Display for Matrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "| added to a sync, us | clients | off: syncs/commit | off: commits/s | on: syncs/commit | on: commits/s | on/off |"
        )?;
        writeln!(f, "|--:|--:|--:|--:|--:|--:|--:|")?;
        for pair in self.cells.chunks_exact(2) {
            let (off, on) = (&pair[0], &pair[1]);
            writeln!(
                f,
                "| {} | {} | {:.2} | {:.0} | {:.2} | {:.0} | {:.1} |",
                off.sync_latency_us,
                off.clients,
                off.syncs_per_commit,
                off.commits_per_s,
                on.syncs_per_commit,
                on.commits_per_s,
                on.commits_per_s / off.commits_per_s
            )?;
        }
        Ok(())
    }
}
