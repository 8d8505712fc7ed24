//! The options and the report that all these benchmarks have, and their arithmetic.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::Value;
use walvisor::commands::CommandError;

use crate::report::{Cell, Section};

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

/// The results of a benchmark.
pub struct StoreReport {
    /// The figures, under keys with their units.
    pub json: Value,
    /// For people: what was measured, the titles of the columns, the rows, and remarks below them.
    pub head: String,
    /// The titles of the columns; the first is that of the rows' names.
    pub columns: &'static [&'static str],
    /// The rows.
    pub rows: Vec<Vec<Cell>>,
    /// Remarks below the table.
    pub notes: Vec<String>,
}

impl StoreReport {
    /// A rate in MiB a second beside that of the raw file. `json` has the other figures.
    pub fn of_rates(
        name: &str,
        [rate, raw]: [f64; 2],
        mut json: Value,
        head: String,
        notes: Vec<String>,
    ) -> Self {
        json["mib_per_s"] = tenths(rate).into();
        json["raw_mib_per_s"] = tenths(raw).into();
        json["ratio"] = thousandths(rate / raw).into();
        Self {
            json,
            head,
            columns: &["", "MiB/s"],
            rows: vec![
                row(name, 1, &[rate]),
                row("raw file", 1, &[raw]),
                row("ratio", 3, &[rate / raw]),
            ],
            notes,
        }
    }
}

/// Lets the log and the raw file take turns at moving `bytes` bytes. Both return the time that they took. Returns the
/// medians of their rates in MiB a second. Round 0 does not count, because it creates the segment files and allocates the blocks.
///
/// # Errors
/// The errors of both.
pub fn take_turns(
    rounds: u64,
    bytes: u64,
    mut log: impl FnMut(u64) -> Result<Duration, CommandError>,
    mut raw: impl FnMut(u64) -> Result<Duration, CommandError>,
) -> Result<[f64; 2], CommandError> {
    let mib = |took: Duration| bytes as f64 / f64::from(1 << 20) / took.as_secs_f64();
    let mut rates = [Vec::new(), Vec::new()];
    for round in 0..=rounds {
        let turns = [mib(raw(round)?), mib(log(round)?)];
        if round > 0 {
            rates[0].push(turns[1]);
            rates[1].push(turns[0]);
        }
    }
    Ok(rates.map(median))
}

impl StoreOutput {
    /// Prints a report in the format that the user asked for.
    ///
    /// # Errors
    /// If text cannot be formatted.
    pub fn print(&self, report: StoreReport) -> Result<(), CommandError> {
        use std::io::Write;
        let text = if self.json {
            report.json.to_string() + "\n"
        } else {
            let columns: Vec<_> = report.columns.iter().map(|&title| ("", title)).collect();
            let mut section = Section::new("", "", &[], &columns);
            section.table.rows = report.rows;
            let mut text = format!("{}\n\n{}", report.head, section.table);
            for note in report.notes {
                write!(text, "\n{note}\n").map_err(CommandError::failed)?;
            }
            text
        };
        // Fails if the reader has closed the pipe, which is fine.
        let _ = std::io::stdout().write_all(text.as_bytes());
        Ok(())
    }
}

/// A row: its name, and numbers with as many decimals each.
pub fn row(name: &str, decimals: usize, numbers: &[f64]) -> Vec<Cell> {
    let numbers = numbers.iter().map(|&number| Cell::Number(number, decimals));
    std::iter::once(Cell::text(name)).chain(numbers).collect()
}

/// A number with one decimal.
pub fn tenths(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

/// A number with three decimals.
pub fn thousandths(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// The median of some rounds.
pub fn median(mut rounds: Vec<f64>) -> f64 {
    rounds.sort_by(f64::total_cmp);
    rounds.get(rounds.len() / 2).copied().unwrap_or(0.0)
}

/// Checks a number of bytes: a multiple of `unit` up to 64 GiB, at least 1 MiB.
///
/// # Errors
/// If it is not; the error names the option and the unit.
pub fn check_bytes(bytes: u64, unit: u64, name: &str) -> Result<(), CommandError> {
    if (1 << 20..=64 << 30).contains(&bytes) && bytes.is_multiple_of(unit) {
        return Ok(());
    }
    Err(CommandError::Usage(format!(
        "--bytes {bytes}: give a multiple of {name} from 1M to 64G"
    )))
}
