//! The content of a report: sections, each a table with its plots. The same report is printed,
//! written as JSON, and drawn on a page.

use std::fmt::{self, Display, Write as _};

use serde::ser::{Serialize, SerializeMap, Serializer};

use super::machine::MachineInfo;
use super::plot::Plot;
use super::spread::{Spread, figure, round_figure};

/// A whole comparison.
#[derive(Debug, serde::Serialize)]
pub struct Report {
    /// What was compared, as a title.
    pub title: String,
    /// The machine that it was measured on.
    pub machine: MachineInfo,
    /// Whether the user interrupted it, so that some measurements are missing.
    pub interrupted: bool,
    /// Whether the user asked for fewer and shorter jobs.
    pub quick: bool,
    /// Duration in seconds.
    pub elapsed_s: f64,
    /// The results.
    pub sections: Vec<Section>,
}

/// One experiment.
#[derive(Debug, serde::Serialize)]
pub struct Section {
    /// Its name in JSON and in file names.
    pub key: String,
    /// Its title.
    pub title: String,
    /// Paragraphs: the setting, the results that its source reports, and the meaning of the
    /// figures.
    pub notes: Vec<String>,
    /// The results.
    #[serde(rename = "rows")]
    pub table: Table,
    /// The plots of the results.
    #[serde(skip)]
    pub plots: Vec<Plot>,
}

impl Section {
    /// A section without any rows yet.
    pub fn new(key: &str, title: &str, notes: &[&str], columns: &[(&str, &str)]) -> Self {
        Self {
            key: key.to_owned(),
            title: title.to_owned(),
            notes: notes.iter().map(|&note| note.to_owned()).collect(),
            table: Table {
                columns: columns
                    .iter()
                    .map(|&(key, title)| Column {
                        key: key.to_owned(),
                        title: title.to_owned(),
                    })
                    .collect(),
                rows: Vec::new(),
            },
            plots: Vec::new(),
        }
    }

    /// The section with these plots.
    #[must_use]
    pub fn with_plots(self, plots: Vec<Plot>) -> Self {
        Self { plots, ..self }
    }
}

/// Rows of cells under columns.
#[derive(Debug)]
pub struct Table {
    /// The columns.
    pub columns: Vec<Column>,
    /// The rows, a cell for each column.
    pub rows: Vec<Vec<Cell>>,
}

/// A column.
#[derive(Clone, Debug)]
pub struct Column {
    /// Its key in JSON, with its unit.
    pub key: String,
    /// Its title.
    pub title: String,
}

/// The content of a table's cell.
#[derive(Clone, Debug, PartialEq)]
pub enum Cell {
    /// Empty: the figure does not apply, or was not measured.
    None,
    /// Text.
    Text(String),
    /// A number, shown with this many decimals.
    Number(f64, usize),
    /// The median, the lowest and the highest of several rounds, shown with this many decimals.
    Spread(Spread, usize),
    /// The figures of consecutive equal parts of a turn; shown as a row of bars.
    Series(Vec<f64>),
    /// A figure that means nothing where it was measured, such as a time in an emulated machine.
    Grey(Box<Cell>),
    /// A figure with a verdict: better or worse than what it is compared with.
    Judged(Box<Cell>, Verdict),
}

/// How a figure compares with another one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Better.
    Good,
    /// Worse.
    Bad,
}

impl Verdict {
    /// Its class on a page.
    pub fn name(self) -> &'static str {
        match self {
            Self::Good => "good",
            Self::Bad => "bad",
        }
    }

    /// Its sign before a figure.
    pub fn sign(self) -> char {
        match self {
            Self::Good => '▲',
            Self::Bad => '▼',
        }
    }
}

/// Which of two figures is the better one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preference {
    /// The larger one, for instance of rates.
    More,
    /// The smaller one, for instance of times and syncs.
    Less,
}

/// How far from 1 a ratio must be to be judged: less may be scatter between rounds.
pub const SCATTER: f64 = 0.05;

impl Cell {
    /// A text cell.
    pub fn text(text: impl Display) -> Self {
        Self::Text(text.to_string())
    }

    /// A whole number.
    pub fn count(count: u64) -> Self {
        Self::Number(count as f64, 0)
    }

    /// The cell in grey, which is neither good nor bad.
    #[must_use]
    pub fn grey(self) -> Self {
        match self {
            Self::Judged(cell, _) => cell.grey(),
            cell => Self::Grey(Box::new(cell)),
        }
    }

    /// The ratio of a figure to the one that it is compared with, judged if it is more than a few
    /// per cent from 1.
    pub fn ratio(ratio: f64, better: Preference) -> Self {
        let number = Self::Number(ratio, 2);
        let (more, less) = (ratio >= 1.0 + SCATTER, ratio <= 1.0 - SCATTER);
        let verdict = match better {
            _ if !more && !less => return number,
            Preference::More if more => Verdict::Good,
            Preference::Less if less => Verdict::Good,
            _ => Verdict::Bad,
        };
        Self::Judged(Box::new(number), verdict)
    }

    /// The spread of rounds; an empty cell if there are none.
    pub fn of(rounds: &[f64], decimals: usize) -> Self {
        Spread::of(rounds).map_or(Self::None, |spread| Self::Spread(spread, decimals))
    }

    /// The ratio of two figures, if both are there.
    pub fn ratio_of(this: Option<f64>, other: Option<f64>, better: Preference) -> Self {
        match (this, other) {
            (Some(this), Some(other)) if other > 0.0 => Self::ratio(this / other, better),
            _ => Self::None,
        }
    }

    /// Whether the cell is a figure, which is aligned to the right of its column.
    pub fn is_figure(&self) -> bool {
        match self {
            Self::None | Self::Number(..) | Self::Spread(..) => true,
            Self::Text(_) | Self::Series(_) => false,
            Self::Grey(cell) | Self::Judged(cell, _) => cell.is_figure(),
        }
    }
}

/// The most bars of a series.
const BARS: usize = 30;

/// A bar for each value. If there are many, a bar stands for several of them and shows the lowest.
fn bars(values: &[f64]) -> String {
    let most = values.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
    let parts = values.chunks(values.len().div_ceil(BARS).max(1));
    let lowest = parts.map(|part| part.iter().copied().fold(f64::INFINITY, f64::min));
    let bar = |value: f64| ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'][(value / most * 7.0) as usize];
    lowest.map(bar).collect()
}

impl Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::None => f.write_char('-'),
            Self::Text(text) => f.write_str(text),
            Self::Number(value, decimals) => f.write_str(&figure(*value, *decimals)),
            Self::Spread(spread, decimals) => {
                let [median, low, high] =
                    [spread.median, spread.low, spread.high].map(|value| figure(value, *decimals));
                if low == high {
                    f.write_str(&median)
                } else {
                    write!(f, "{median} ({low} to {high})")
                }
            }
            Self::Series(values) => f.write_str(&bars(values)),
            Self::Grey(cell) => write!(f, "[{cell}]"),
            Self::Judged(cell, _) => cell.fmt(f),
        }
    }
}

impl Serialize for Cell {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => serializer.serialize_none(),
            Self::Text(text) => serializer.serialize_str(text),
            Self::Number(value, 0) => serializer.serialize_i64(value.round() as i64),
            Self::Number(value, _) => serializer.serialize_f64(round_figure(*value)),
            Self::Spread(spread, _) => spread.serialize(serializer),
            Self::Series(values) => values
                .iter()
                .map(|value| round_figure(*value))
                .collect::<Vec<_>>()
                .serialize(serializer),
            Self::Grey(cell) | Self::Judged(cell, _) => cell.serialize(serializer),
        }
    }
}

/// Each row is an object whose keys are those of the columns.
impl Serialize for Table {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        struct Row<'a>(&'a [Column], &'a [Cell]);
        impl Serialize for Row<'_> {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                let mut map = serializer.serialize_map(Some(self.0.len()))?;
                for (column, cell) in self.0.iter().zip(self.1) {
                    map.serialize_entry(&column.key, cell)?;
                }
                map.end()
            }
        }
        serializer.collect_seq(self.rows.iter().map(|row| Row(&self.columns, row)))
    }
}

/// The report as text for a terminal.
impl Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}\n{}", self.title, self.machine)?;
        for section in &self.sections {
            writeln!(f, "\n{}", section.title)?;
            for note in &section.notes {
                writeln!(f, "{note}")?;
            }
            write!(f, "\n{}", section.table)?;
        }
        let length = figure(self.elapsed_s, 0);
        if self.interrupted {
            writeln!(
                f,
                "\ncut short after {length} s: what is missing was not measured"
            )
        } else {
            writeln!(f, "\nmeasured in {length} s")
        }
    }
}

impl Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut lines = vec![self.columns.iter().map(|c| c.title.clone()).collect()];
        for row in &self.rows {
            lines.push(row.iter().map(Cell::to_string).collect::<Vec<_>>());
        }
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|at| lines.iter().map(|line| line[at].chars().count()).max())
            .map(Option::unwrap_or_default)
            .collect();
        for line in &lines {
            let mut text = String::new();
            for (at, cell) in line.iter().enumerate() {
                let width = widths[at];
                if self.is_figures(at) {
                    write!(text, "  {cell:>width$}")?;
                } else {
                    write!(text, "  {cell:<width$}")?;
                }
            }
            writeln!(f, "{}", text.trim_end())?;
        }
        Ok(())
    }
}

impl Table {
    /// Whether all cells of the column at `at` are figures.
    pub fn is_figures(&self, at: usize) -> bool {
        self.rows.iter().all(|row| row[at].is_figure())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let mut section =
            Section::new("a", "A", &[], &[("who", "who"), ("rate_per_s", "a second")]);
        section.table.rows = vec![
            vec![Cell::text("one"), Cell::of(&[3.0, 1.0, 20_000.0, 2.0], 1)],
            vec![Cell::text("another"), Cell::Number(0.25, 2).grey()],
            vec![Cell::text("none"), Cell::None],
        ];
        section.table
    }

    #[test]
    fn figures_are_right_aligned_and_text_is_left_aligned() {
        let text = "  who                   a second\n\
                    \x20 one      2.5 (1.0 to 20,000.0)\n\
                    \x20 another                 [0.25]\n\
                    \x20 none                         -\n";
        assert_eq!(table().to_string(), text);
    }

    #[test]
    fn ratios_are_judged_by_which_is_better() {
        use Preference::{Less, More};
        let verdict = |ratio, better| match Cell::ratio(ratio, better) {
            Cell::Judged(_, verdict) => Some(verdict),
            _ => None,
        };
        for (ratio, more) in [
            (6.1, Some(Verdict::Good)),
            (1.03, None),
            (0.97, None),
            (0.5, Some(Verdict::Bad)),
            (f64::NAN, None),
        ] {
            assert_eq!(verdict(ratio, More), more, "{ratio}");
            let less = more.map(|more| match more {
                Verdict::Good => Verdict::Bad,
                Verdict::Bad => Verdict::Good,
            });
            assert_eq!(verdict(ratio, Less), less, "{ratio}");
        }
        let cell = Cell::ratio(6.1, More);
        assert_eq!(cell.to_string(), "6.10");
        assert_eq!(serde_json::to_string(&cell).unwrap(), "6.1");
    }

    #[test]
    fn a_series_shows_its_lowest_values() {
        let stalled: Vec<f64> = (0..60).map(|at| if at == 7 { 0.0 } else { 8.0 }).collect();
        assert_eq!(bars(&stalled), format!("███▁{}", "█".repeat(26)));
        assert_eq!(bars(&[]), "");
        assert_eq!(bars(&[0.0]), "▁");
        let json = serde_json::to_string(&Cell::Series(vec![1.0, 2.5])).unwrap();
        assert_eq!(json, "[1.0,2.5]");
    }

    #[test]
    fn rows_are_objects() {
        assert_eq!(
            serde_json::to_string(&table()).unwrap(),
            r#"[{"who":"one","rate_per_s":{"median":2.5,"low":1.0,"high":20000.0}},"#.to_owned()
                + r#"{"who":"another","rate_per_s":0.25},{"who":"none","rate_per_s":null}]"#
        );
    }

    #[test]
    fn figures_have_separated_thousands() {
        assert_eq!(figure(1234.0, 0), "1234");
        assert_eq!(figure(-0.0, 0), "0");
        assert_eq!(figure(-1_234_567.89, 1), "-1,234,567.9");
        assert_eq!(figure(0.5, 2), "0.50");
        assert_eq!(Cell::of(&[], 0), Cell::None);
        assert_eq!(Cell::of(&[2.0, 2.0], 0).to_string(), "2");
    }
}
