//! A benchmark: its matrices, as a file in `matrices/` declares them, and the run that measures and
//! reports them.
//!
//! ```text
//!   matrices/commit.toml ─▶ spec.rs ─▶ matrix.rs: rows, sides, turns ─▶ show.rs ─▶ report
//!                                          ▲ a turn: what the benchmark does for a side
//! ```

mod formula;
mod matrix;
mod show;
mod spec;

use clap::builder::{PossibleValue, PossibleValuesParser};
use serde_json::Value;
use walvisor::commands::CommandError;

pub use formula::{Settings, fill};
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
    /// The benchmark of a file. `only` has the names of sections; all, if it is empty. `given` are
    /// the settings of the command line: they replace those of the file, also where it has a list
    /// of them.
    ///
    /// # Panics
    /// If the file has a mistake: a test reads all files.
    pub fn new(file: &str, output: &'a Output, only: &[String], given: &Settings) -> Self {
        let bench = read(file);
        let mut matrices = matrices(&bench, output.quick, given);
        matrices.retain(|matrix| only.is_empty() || only.contains(&matrix.spec.name));
        for matrix in &mut matrices {
            matrix.spec.rounds = output.rounds(matrix.spec.rounds);
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

    /// Writes the report in all the formats that the user asked for, and returns the error of the
    /// run. What was measured before a failure is still reported. An interrupt is no failure: it
    /// also ends other programs on the terminal.
    ///
    /// # Errors
    /// That of the run, or if a file can't be written.
    pub fn finish(
        mut self,
        session: Session,
        run: Result<(), CommandError>,
    ) -> Result<(), CommandError> {
        let interrupted = session.interrupted();
        // Of the matrices that one section was split into the first has its notes.
        for section in self
            .matrices
            .chunk_by_mut(|one, next| one.spec.name == next.spec.name)
        {
            section[1..]
                .iter_mut()
                .for_each(|matrix| matrix.spec.notes.clear());
        }
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

/// The matrices of a file. `given` settings replace those of a section, and lists of its axes.
fn matrices(bench: &BenchSpec, quick: bool, given: &Settings) -> Vec<Matrix> {
    let mut specs = spec::sections(&bench.sections, quick);
    for spec in &mut specs {
        for (name, value) in given {
            let axes = spec.axes.iter_mut().chain(&mut spec.split);
            let mut known = axes.filter_map(|axis| axis.get_mut(name)).peekable();
            if known.peek().is_none() {
                spec.plan.insert(name.clone(), value.clone());
            }
            known.for_each(|known| *known = value.clone());
        }
    }
    specs.iter().flat_map(Matrix::of).collect()
}

/// The matrices of a file, for tests.
#[cfg(test)]
pub fn matrices_of(file: &str, given: &Settings) -> Vec<Matrix> {
    matrices(&read(file), false, given)
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::report::Cell;
    use crate::report::plot::PlotKind;

    const FILES: [&str; 12] = [
        include_str!("../../matrices/archive.toml"),
        include_str!("../../matrices/commit.toml"),
        include_str!("../../matrices/database.toml"),
        include_str!("../../matrices/drbd.toml"),
        include_str!("../../matrices/fsync.toml"),
        include_str!("../../matrices/neighbours.toml"),
        include_str!("../../matrices/notify.toml"),
        include_str!("../../matrices/peers.toml"),
        include_str!("../../matrices/start.toml"),
        include_str!("../../matrices/store.toml"),
        include_str!("../../matrices/sustained.toml"),
        include_str!("../../matrices/tcmu.toml"),
    ];

    /// Gives each side of a matrix two turns, in which all figures of its columns are 1 and 3.
    fn measure(matrix: &mut Matrix, figures: &show::Figures) {
        let columns = matrix.spec.columns.iter();
        let keys = columns.filter_map(|column| show::full(column, figures).figure);
        let keys: Vec<String> = keys.collect();
        for side in matrix.sides_mut() {
            let turn = |value: u8| Turn(keys.iter().map(|key| (key.clone(), value)).collect());
            side.turns = [1, 3].map(turn).into();
        }
    }

    #[test]
    fn every_file_has_tables_and_plots_in_full_and_quickly() {
        // Some settings come from the command line.
        let given = json!({ "bytes": 4096, "door": ["nbd"], "attack": ["garbage"] });
        let given = settings(given);
        for (file, quick) in FILES.iter().flat_map(|file| [(file, false), (file, true)]) {
            let bench = read(file);
            for mut matrix in matrices(&bench, quick, &given) {
                measure(&mut matrix, &bench.figures);
                let section = matrix.section(&bench.figures);
                let mut cells = section.table.rows.iter().flatten();
                let measured = cells
                    .any(|cell| matches!(cell, Cell::Spread(spread, _) if spread.median == 2.0));
                assert!(measured && !section.title.is_empty(), "{section:?}");
                for plot in &section.plots {
                    plot.draw(false).unwrap();
                }
            }
        }
    }

    const SMALL: &str = r#"
        title = "Small"
        [figures]
        per_s = ["a second", 1]
        [[section]]
        name = "one"
        title = "{{ clients }} and more"
        rounds = 2
        plan = { commits = "=10 * clients", slow = false }
        axes = [{ clients = [1, 8] }]
        row = "{{ clients }} clients"
        sides = [
            { side = "off" },
            { side = "on", name = "on, {{ commits }}" },
            { side = "more", where = "clients > 1", slow = true },
        ]
        columns = [
            "=clients",
            "on.per_s",
            { key = "gain", figure = "per_s", side = "on", beside = "off" },
            { key = "sum", side = "more", figure = "per_s", show = "sum" },
        ]
        [[section.plots]]
        name = "lines"
        title = "Lines"
        figure = "per_s"
        where = "not slow"
        x = "clients"
        y_label = "a second"
        ideal = [{ name = "ideal", is = "2 * x", at = "off" }]
        [[section]]
        name = "other"
        like = "one"
        table = "beside"
        columns = [
            { key = "side", is = "name" },
            { key = "per_s", timed = true },
            { key = "ratio", side = "off", beside = "this", figure = "per_s", where = "not slow" },
        ]
        plots = []
    "#;

    #[test]
    fn figures_of_sides_become_rows_and_lines() {
        let bench = read(SMALL);
        let mut all = matrices(&bench, false, &Settings::new());
        for matrix in &mut all {
            for (at, side) in matrix.sides_mut().enumerate() {
                let turn = |round| Turn(json!({ "per_s": 10 * at + round }));
                side.turns = [2, 4].map(turn).into();
                side.emulated = side.side == "more";
            }
        }
        let text = |at: usize| {
            let section = all[at].section(&bench.figures);
            let rows = section.table.to_string();
            let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
            rows.lines().map(words).collect::<Vec<_>>()
        };
        assert_eq!(
            text(0),
            [
                "clients on: a second gain more: a second",
                "1 13.0 (12.0 to 14.0) 4.33 -",
                "8 33.0 (32.0 to 34.0) 1.43 86.0",
            ]
        );
        assert_eq!(
            text(1),
            [
                "side a second ratio",
                "on, 10 13.0 (12.0 to 14.0) 0.23",
                "on, 80 33.0 (32.0 to 34.0) 0.70",
                "more [43.0 (42.0 to 44.0)] -",
            ]
        );
        let section = all[0].section(&bench.figures);
        assert_eq!(section.title, "1 and more");
        let PlotKind::Lines { series, .. } = &section.plots[0].kind else {
            panic!("no lines");
        };
        let lines = series
            .iter()
            .map(|line| (line.name.as_str(), &line.points[..]));
        let expected = [
            ("off", &[(1.0, 3.0), (8.0, 23.0)][..]),
            ("on, 10", &[(1.0, 13.0)]),
            ("on, 80", &[(8.0, 33.0)]),
            ("ideal", &[(1.0, 2.0), (8.0, 16.0)]),
        ];
        assert_eq!(lines.collect::<Vec<_>>(), expected);
    }
}
