//! A benchmark: its matrices, as a file in `matrices/` declares them, and the run that measures and reports them.
//!
//! ```text
//!   matrices/commit.toml ─▶ spec.rs ─▶ matrix.rs: rows, sides, turns ─▶ show.rs: tables and plots ─▶ report
//!                                          ▲ a turn: what the benchmark does for a side
//! ```

mod formula;
mod matrix;
mod show;
mod spec;

use clap::builder::{PossibleValue, PossibleValuesParser};
use serde_json::Value;
use walvisor::commands::CommandError;

pub use formula::Settings;
pub use matrix::{Matrix, Row, Side, TakeTurns, Turn, measure_together};
use spec::BenchSpec;

use crate::output::Output;
use crate::session::Session;

/// A benchmark that is about to run.
pub struct Bench<'a> {
    title: String,
    figures: show::Figures,
    output: &'a Output,
    /// What it measures: one or more for each section that was asked for.
    pub matrices: Vec<Matrix>,
}

impl<'a> Bench<'a> {
    /// The benchmark of a file. `only` has the names of sections; all, if it is empty. `given` are the settings of the
    /// command line: they replace those of the file, also where it has a list of them.
    ///
    /// # Panics
    /// If the file has a mistake: a test reads all files.
    pub fn new(file: &str, output: &'a Output, only: &[String], given: &Settings) -> Self {
        let bench = read(file);
        let mut matrices = Vec::new();
        for mut spec in spec::sections(&bench.sections, output.quick) {
            if !only.is_empty() && !only.contains(&spec.name) {
                continue;
            }
            spec.rounds = output.rounds(spec.rounds);
            for (name, value) in given {
                let axes = spec.axes.iter_mut().chain(&mut spec.split);
                let mut known = axes.filter_map(|axis| axis.get_mut(name)).peekable();
                if known.peek().is_none() {
                    spec.plan.insert(name.clone(), value.clone());
                }
                known.for_each(|known| *known = value.clone());
            }
            matrices.extend(Matrix::of(&spec));
        }
        Self {
            title: bench.title,
            figures: bench.figures,
            output,
            matrices,
        }
    }

    /// Starts the run: see [`Output::start`].
    ///
    /// # Errors
    /// If a file can't be written, or the system refuses a signal handler.
    pub fn start(&self) -> Result<Session, CommandError> {
        let matrices = self.matrices.iter();
        self.output.start(matrices.map(Matrix::expected).sum())
    }

    /// Writes the report in all the formats that the user asked for, and returns the error of the run. What was measured
    /// before a failure is still reported. An interrupt is no failure: it also ends other programs on the terminal.
    ///
    /// # Errors
    /// That of the run, or if a file can't be written.
    pub fn finish(
        self,
        session: Session,
        run: Result<(), CommandError>,
    ) -> Result<(), CommandError> {
        let interrupted = session.interrupted();
        let mut rows = self.matrices.iter().flat_map(|matrix| &matrix.rows);
        if run.is_ok() || interrupted || rows.any(Row::is_measured) {
            let matrices = self.matrices.iter();
            let sections = matrices.map(|matrix| matrix.section(&self.figures));
            self.output
                .write(&self.title, session, sections.collect())?;
        }
        if interrupted { Ok(()) } else { run }
    }
}

fn read(file: &str) -> BenchSpec {
    toml::from_str(file).unwrap_or_else(|error| panic!("a file of matrices: {error}"))
}

/// The names of the sections of a file, for `--only`.
pub fn sections(file: &str) -> PossibleValuesParser {
    let sections = spec::sections(&read(file).sections, false).into_iter();
    let names = sections.map(|section| PossibleValue::new(section.name).help(section.about));
    names.collect::<Vec<_>>().into()
}

/// The names of the sides of a file's first section, for the options that choose some.
pub fn sides(file: &str) -> PossibleValuesParser {
    let sections = spec::sections(&read(file).sections, false);
    let names = sections[0].sides.iter().map(|side| side.side.clone());
    names.collect::<Vec<_>>().into()
}

/// The values of a setting in the rows of a file's first section, for the options that choose some.
pub fn rows(file: &str, setting: &str) -> PossibleValuesParser {
    let sections = spec::sections(&read(file).sections, false);
    let rows = sections[0].rows.iter();
    let names = rows.filter_map(|row| Some(row.get(setting)?.as_str()?.to_owned()));
    names.collect::<Vec<_>>().into()
}

/// Settings from the fields of a value.
///
/// # Panics
/// If it is no object.
pub fn settings(value: Value) -> Settings {
    match value {
        Value::Object(settings) => settings,
        other => panic!("{other} has no fields"),
    }
}
