//! The matrix of a comparison: rows, the sides that take turns in each, and what the turns measured. Every comparison
//! declares its rows and sides, says how a side takes a turn, and declares the columns of its table.
//!
//! ```text
//!   Matrix ─▶ Row: clients 8 ─▶ Side: group commit off ─▶ its plan, its turns
//!                            └▶ Side: group commit on  ─▶ its plan, its turns: {"commits_per_s": 480, ...}
//! ```

use std::time::Duration;

use walvisor::commands::CommandError;

use crate::report::plot::Series;
use crate::report::{Cell, Preference, Section, Spread};
use crate::session::Session;

pub use crate::bench::Turn;

/// A side of a row, with its turns.
#[derive(Clone, Debug)]
pub struct Side<P> {
    /// Its name, the same in all rows.
    pub name: String,
    /// What it does in a turn.
    pub plan: P,
    /// Its turns so far.
    pub turns: Vec<Turn>,
    /// Whether its times mean nothing, because it runs on an emulated machine.
    pub emulated: bool,
}

impl<P> Side<P> {
    /// A side without turns yet.
    pub fn new(name: impl Into<String>, plan: P) -> Self {
        Self {
            name: name.into(),
            plan,
            turns: Vec::new(),
            emulated: false,
        }
    }

    /// A figure of those turns that have it.
    pub fn of(&self, key: &str) -> Vec<f64> {
        self.turns.iter().filter_map(|turn| turn.get(key)).collect()
    }

    /// The spread of a figure.
    pub fn spread(&self, key: &str) -> Option<Spread> {
        Spread::of(&self.of(key))
    }

    /// The median of a figure.
    pub fn median(&self, key: &str) -> Option<f64> {
        self.spread(key).map(|spread| spread.median)
    }
}

/// The sides that do the same job.
#[derive(Clone, Debug)]
pub struct Row<P> {
    /// Its name.
    pub name: String,
    /// The sides, in the order of the table.
    pub sides: Vec<Side<P>>,
}

impl<P> Row<P> {
    /// The side with this name.
    pub fn side(&self, name: &str) -> Option<&Side<P>> {
        self.sides.iter().find(|side| side.name == name)
    }

    /// How many times the figure of `this` is that of the side `other`; an empty cell if one is missing.
    pub fn ratio(&self, this: &Side<P>, other: &str, key: &str, better: Preference) -> Cell {
        let other = self.side(other).and_then(|side| side.median(key));
        Cell::ratio_of(this.median(key), other, better)
    }

    /// Gives each side a turn. The first is another one in each round, so that no side is always first. Returns `false`
    /// if the session has to end.
    ///
    /// # Errors
    /// The errors of `turn`.
    pub fn measure(
        &mut self,
        (round, rounds): (usize, usize),
        session: &Session,
        expected: impl Fn(&P) -> Duration,
        mut turn: impl FnMut(&Side<P>) -> Result<Turn, CommandError>,
    ) -> Result<bool, CommandError> {
        let count = self.sides.len();
        for at in 0..count {
            let side = &mut self.sides[(round + at) % count];
            let what = format!(
                "{}: {}, round {} of {rounds}",
                self.name,
                side.name,
                round + 1
            );
            match session.step(&what, expected(&side.plan), || turn(side))? {
                Some(turn) => side.turns.push(turn),
                None => return Ok(false),
            }
        }
        Ok(true)
    }
}

/// All rows.
#[derive(Debug)]
pub struct Matrix<P> {
    /// The rows, in the order of the table.
    pub rows: Vec<Row<P>>,
}

impl<P> Default for Matrix<P> {
    fn default() -> Self {
        Self { rows: Vec::new() }
    }
}

impl<P> Matrix<P> {
    /// Adds a row with these sides.
    pub fn add(
        &mut self,
        name: impl Into<String>,
        sides: impl IntoIterator<Item = (impl Into<String>, P)>,
    ) {
        let sides = sides.into_iter();
        self.rows.push(Row {
            name: name.into(),
            sides: sides.map(|(name, plan)| Side::new(name, plan)).collect(),
        });
    }

    /// Adds a turn to the side `name` of the row `row`. Adds both at the end if they are new.
    pub fn push(&mut self, row: &str, name: &str, plan: P, turn: Turn) -> &mut Side<P> {
        let known = self.rows.iter().position(|known| known.name == row);
        let at = known.unwrap_or_else(|| {
            self.add(row, Vec::<(String, P)>::new());
            self.rows.len() - 1
        });
        let sides = &mut self.rows[at].sides;
        let known = sides.iter().position(|side| side.name == name);
        let at = known.unwrap_or_else(|| {
            sides.push(Side::new(name, plan));
            sides.len() - 1
        });
        sides[at].turns.push(turn);
        &mut sides[at]
    }

    /// All sides of all rows.
    pub fn sides(&self) -> impl Iterator<Item = &Side<P>> {
        self.rows.iter().flat_map(|row| &row.sides)
    }

    /// Whether any turn was measured.
    pub fn is_measured(&self) -> bool {
        self.sides().any(|side| !side.turns.is_empty())
    }

    /// The most turns that a side has taken.
    pub fn rounds(&self) -> usize {
        self.sides().map(|side| side.turns.len()).max().unwrap_or(0)
    }

    /// Estimated time of one round.
    pub fn expected(&self, of: impl Fn(&P) -> Duration) -> Duration {
        self.sides().map(|side| of(&side.plan)).sum()
    }

    /// Gives each side of each row a turn in every round, so that all see the machine in the same states, unless the
    /// session has to end.
    ///
    /// # Errors
    /// The errors of `turn`.
    pub fn measure(
        &mut self,
        rounds: usize,
        session: &Session,
        expected: impl Fn(&P) -> Duration,
        mut turn: impl FnMut(&Side<P>) -> Result<Turn, CommandError>,
    ) -> Result<(), CommandError> {
        for round in 0..rounds {
            for row in &mut self.rows {
                if !row.measure((round, rounds), session, &expected, &mut turn)? {
                    return Ok(());
                }
            }
        }
        Ok(())
    }

    /// A line of a plot: for each row that has the side `name`, `at` of its plan and the median of a figure.
    pub fn line(&self, name: &str, at: impl Fn(&P) -> f64, key: &str) -> Vec<(f64, f64)> {
        let sides = self.rows.iter().filter_map(|row| row.side(name));
        sides
            .filter_map(|side| Some((at(&side.plan), side.median(key)?)))
            .collect()
    }

    /// A line for each of the sides.
    pub fn lines(&self, names: &[&str], at: impl Fn(&P) -> f64, key: &str) -> Vec<Series> {
        let line = |name: &&str| Series::measured(*name, self.line(name, &at, key));
        names.iter().map(line).collect()
    }

    /// A line for each group of rows, whose name `group` returns: of the side `name` in them.
    pub fn lines_by(
        &self,
        name: &str,
        group: impl Fn(&P) -> String,
        at: impl Fn(&P) -> f64,
        key: &str,
    ) -> Vec<Series> {
        let mut lines: Vec<Series> = Vec::new();
        for side in self.rows.iter().filter_map(|row| row.side(name)) {
            let line = group(&side.plan);
            let point = side.median(key).map(|value| (at(&side.plan), value));
            match lines.iter_mut().find(|known| known.name == line) {
                Some(known) => known.points.extend(point),
                None => lines.push(Series::measured(line, point.into_iter().collect())),
            }
        }
        lines
    }

    /// The labels and the bars of a plot: for each row the figure of each of the sides.
    pub fn bars(&self, names: &[&str], key: &str) -> Vec<(String, Vec<Option<Spread>>)> {
        let bar = |row: &Row<P>, name: &str| row.side(name).and_then(|side| side.spread(key));
        let rows = self.rows.iter();
        rows.map(|row| {
            let bars = names.iter().map(|name| bar(row, name)).collect();
            (row.name.clone(), bars)
        })
        .collect()
    }

    /// A section whose table has a row for each row; its cells are of the first side unless they name another.
    pub fn wide(
        &self,
        key: &str,
        title: &str,
        notes: &[&str],
        columns: &[Column<'_, P>],
    ) -> Section {
        self.with_sides(1, section(key, title, notes, columns), columns)
    }

    /// A section whose table has a row for each side of each row.
    pub fn long(
        &self,
        key: &str,
        title: &str,
        notes: &[&str],
        columns: &[Column<'_, P>],
    ) -> Section {
        self.with_sides(usize::MAX, section(key, title, notes, columns), columns)
    }

    /// Adds the first `most` sides of each row to the section's table.
    fn with_sides(&self, most: usize, mut section: Section, columns: &[Column<'_, P>]) -> Section {
        for row in &self.rows {
            let sides = row.sides.iter().take(most);
            let cells = sides.map(|side| cells(columns, row, side));
            section.table.rows.extend(cells);
        }
        section
    }
}

fn section<P>(key: &str, title: &str, notes: &[&str], columns: &[Column<'_, P>]) -> Section {
    let titles: Vec<_> = columns
        .iter()
        .map(|column| (column.key.as_str(), column.title.as_str()))
        .collect();
    Section::new(key, title, notes, &titles)
}

fn cells<P>(columns: &[Column<'_, P>], row: &Row<P>, side: &Side<P>) -> Vec<Cell> {
    columns
        .iter()
        .map(|column| (column.cell)(row, side))
        .collect()
}

/// A column of a table.
pub struct Column<'a, P> {
    /// Its key in JSON, with its unit.
    key: String,
    /// Its title.
    title: String,
    cell: Box<ShowCell<'a, P>>,
}

/// Returns the cell of a row and its side.
type ShowCell<'a, P> = dyn Fn(&Row<P>, &Side<P>) -> Cell + 'a;

impl<'a, P: 'a> Column<'a, P> {
    /// A column with the cell that `cell` returns for a row and its side.
    pub fn new(key: &str, title: &str, cell: impl Fn(&Row<P>, &Side<P>) -> Cell + 'a) -> Self {
        Self {
            key: key.to_owned(),
            title: title.to_owned(),
            cell: Box::new(cell),
        }
    }

    /// What is known before any turn.
    pub fn plan(key: &str, title: &str, cell: impl Fn(&P) -> Cell + 'a) -> Self {
        Self::new(key, title, move |_, side| cell(&side.plan))
    }

    /// The spread of the figure whose key is that of the column.
    pub fn figure(key: &str, title: &str, decimals: usize) -> Self {
        let figure = key.to_owned();
        Self::new(key, title, move |_, side| {
            Cell::of(&side.of(&figure), decimals)
        })
    }

    /// The median of the figure whose key is that of the column, to keep a table narrow.
    pub fn median(key: &str, title: &str, decimals: usize) -> Self {
        let figure = key.to_owned();
        Self::new(key, title, move |_, side| {
            let median = side.median(&figure);
            median.map_or(Cell::None, |median| Cell::Number(median, decimals))
        })
    }

    /// The spread of a figure of the side `name`.
    pub fn of(
        name: &'static str,
        key: &str,
        title: &str,
        figure: &'static str,
        decimals: usize,
    ) -> Self {
        Self::new(key, title, move |row, _| {
            let side = row.side(name);
            side.map_or(Cell::None, |side| Cell::of(&side.of(figure), decimals))
        })
    }

    /// How many times a figure of the side `name` is that of the side `other`.
    pub fn ratio(
        key: &str,
        title: &str,
        (name, other): (&'static str, &'static str),
        figure: &'static str,
    ) -> Self {
        Self::new(key, title, move |row, _| {
            let side = row.side(name);
            side.map_or(Cell::None, |side| {
                row.ratio(side, other, figure, Preference::More)
            })
        })
    }

    /// How many times a figure of each side is that of the side `other`.
    pub fn beside(key: &str, title: &str, other: &'static str, figure: &'static str) -> Self {
        Self::new(key, title, move |row, side| {
            row.ratio(side, other, figure, Preference::More)
        })
    }

    /// The same column in grey where times mean nothing.
    #[must_use]
    pub fn timed(self) -> Self {
        let Self { key, title, cell } = self;
        Self::new(&key, &title, move |row, side| match cell(row, side) {
            Cell::None => Cell::None,
            cell if side.emulated => cell.grey(),
            cell => cell,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn figures_of_sides_become_rows_lines_and_bars() {
        let mut matrix = Matrix::default();
        for clients in [1.0, 8.0] {
            matrix.add(
                format!("{clients} clients"),
                [("off", clients), ("on", clients)],
            );
        }
        let on = &mut matrix.rows[1].sides;
        on[0].turns = vec![Turn(json!({ "rate": 2.0 }))];
        on[1].turns = [3.0, 4.0, 9.0]
            .map(|rate| Turn(json!({ "rate": rate })))
            .into();
        let columns = [
            Column::plan("clients", "clients", |&clients| Cell::Number(clients, 0)),
            Column::figure("rate", "a second", 1),
            Column::of("on", "on_rate", "on", "rate", 1),
            Column::ratio("gain", "on/off", ("on", "off"), "rate"),
        ];
        let wide = matrix.wide("a", "A", &[], &columns).table.to_string();
        let row = wide.lines().nth(2).unwrap();
        assert_eq!(
            row.split_whitespace().collect::<Vec<_>>().join(" "),
            "8 2.0 4.0 (3.0 to 9.0) 2.00"
        );
        assert_eq!(matrix.long("a", "A", &[], &columns).table.rows.len(), 4);
        assert_eq!(matrix.line("on", |at| *at, "rate"), [(8.0, 4.0)]);
        let bars = matrix.bars(&["on", "none"], "rate");
        assert_eq!(bars[1].1, [Spread::of(&[3.0, 4.0, 9.0]), None]);
        assert_eq!(matrix.rounds(), 3);
    }
}
