//! The matrices as the files in `matrices/` write them.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::formula::Settings;

/// A file: a benchmark.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BenchSpec {
    /// The title of its report.
    pub title: String,
    /// What its turns measure: each figure's title and decimals.
    pub figures: BTreeMap<String, (String, usize)>,
    /// The tables of its report.
    #[serde(rename = "section")]
    pub sections: Vec<Settings>,
}

/// A section, after its `quick` settings have replaced the others in a quick run.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SectionSpec {
    /// Its name on the command line.
    pub name: String,
    /// Its name in JSON and in file names; otherwise the name.
    #[serde(default)]
    pub key: String,
    /// What it measures, for the help.
    #[serde(default)]
    pub about: String,
    pub title: String,
    /// The paragraphs between title and table.
    #[serde(default)]
    pub notes: Vec<String>,
    /// The number of rounds.
    #[serde(default = "one")]
    pub rounds: usize,
    /// Whether a round that does not count comes first, which creates files and allocates blocks.
    #[serde(default)]
    pub warm_up: bool,
    /// The time of a turn in seconds: an expression.
    #[serde(default = "second")]
    pub takes: String,
    /// A section for each combination, with these settings.
    #[serde(default)]
    pub split: Vec<Settings>,
    /// Settings of all sides. A text that begins with `=` is an expression over the other settings.
    #[serde(default)]
    pub plan: Settings,
    /// The rows, each with its settings, combined with `axes`.
    #[serde(default)]
    pub rows: Vec<Settings>,
    /// Each axis: settings, each with a list. The lists of one axis go together, and a row is made
    /// for each combination of the axes.
    #[serde(default)]
    pub axes: Vec<Settings>,
    /// The name of a row: a template.
    #[serde(default)]
    pub row: String,
    /// The sides of a row, which take turns.
    pub sides: Vec<SideSpec>,
    #[serde(default)]
    pub table: Layout,
    pub columns: Vec<ColumnSpec>,
    #[serde(default)]
    pub plots: Vec<PlotSpec>,
}

fn one() -> usize {
    1
}

fn second() -> String {
    "1".to_owned()
}

/// A side of a row.
#[derive(Clone, Debug, Deserialize)]
pub struct SideSpec {
    /// Its name in columns and on the command line.
    pub side: String,
    /// Its name in tables: a template; otherwise `side`.
    pub name: Option<String>,
    /// In which rows it is: an expression; otherwise in all.
    #[serde(rename = "where")]
    pub only: Option<String>,
    /// Its settings.
    #[serde(flatten)]
    pub settings: Settings,
}

/// Which rows a table has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Layout {
    /// One for each row, of the first side unless a column names another.
    #[default]
    Wide,
    /// One for each side of each row.
    Long,
    /// One for each side but the first of each row.
    Beside,
}

/// A column.
#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
pub enum ColumnSpec {
    /// `=SETTING`, `FIGURE` or `SIDE.FIGURE`.
    Short(String),
    /// Any other.
    Full(Column),
}

/// A column in full.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Column {
    /// Its key in JSON, with its unit.
    pub key: String,
    /// Its title; otherwise that of its figure, or the key.
    #[serde(default)]
    pub title: String,
    /// What is known before any turn: an expression over the settings, `row` and `name`.
    pub is: Option<String>,
    /// The figure; otherwise the one with the column's key.
    pub figure: Option<String>,
    /// The side, if it is not that of the table's row.
    pub side: Option<String>,
    /// How many times the figure of this side it is; `this` is that of the table's row.
    pub beside: Option<String>,
    /// In which rows of the table it is: an expression; otherwise in all.
    #[serde(rename = "where")]
    pub only: Option<String>,
    /// Whether less is better.
    #[serde(default)]
    pub less: bool,
    #[serde(default)]
    pub show: Statistic,
    /// Decimals; otherwise those of the figure.
    pub decimals: Option<usize>,
    /// Grey where times mean nothing.
    #[serde(default)]
    pub timed: bool,
}

/// What a column shows of a figure's rounds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Statistic {
    /// Median, lowest and highest.
    #[default]
    Spread,
    /// The median, to keep a table narrow.
    Median,
    /// The list of the first round.
    List,
    /// The sum.
    Sum,
    /// The number of rounds.
    Rounds,
}

/// A plot of figures. Without `x` it has bars.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlotSpec {
    /// The name of its file: a template.
    pub name: String,
    /// A template.
    pub title: String,
    #[serde(default)]
    pub caption: String,
    /// The figures, each with its name as `figure` in the templates.
    #[serde(default)]
    pub figures: Vec<(String, String)>,
    /// The one figure.
    #[serde(default)]
    pub figure: String,
    /// Only these sides; otherwise all.
    #[serde(default)]
    pub sides: Vec<String>,
    /// Only the sides for which this expression is true.
    #[serde(rename = "where")]
    pub only: Option<String>,
    /// The name of the line, or of the bar beside others: a template.
    #[serde(default = "by_side")]
    pub by: String,
    /// The label of the bars: a template.
    #[serde(default = "by_row")]
    pub label: String,
    /// The place of a point: an expression.
    pub x: Option<String>,
    /// What the axes show.
    #[serde(default)]
    pub x_label: String,
    pub y_label: String,
    /// The logarithmic axes.
    #[serde(default)]
    pub log: String,
    /// Lines computed from `x`, at the places of the first line whose name begins with `at`.
    #[serde(default)]
    pub ideal: Vec<IdealSpec>,
    /// Sides that are horizontal lines.
    #[serde(default)]
    pub flat: Vec<String>,
    /// Times the figure of a side: how many times it is that of the bar's side.
    pub over: Option<String>,
    /// A plot for each row, of a list by its places.
    #[serde(default)]
    pub list: bool,
    /// Whether it shows times, which mean nothing on an emulated machine.
    #[serde(default)]
    pub timed: bool,
}

/// A computed line.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IdealSpec {
    pub name: String,
    /// An expression over `x`.
    pub is: String,
    #[serde(default)]
    pub at: String,
}

fn by_side() -> String {
    "{{ name }}".to_owned()
}

fn by_row() -> String {
    "{{ row }}".to_owned()
}

/// The sections of a file, in full or quickly. A section begins with all settings of the one that
/// it is `like`, and a quick run continues with those in `quick`.
///
/// # Panics
/// If the file has a mistake: a test reads all files.
pub fn sections(tables: &[Settings], quick: bool) -> Vec<SectionSpec> {
    let section = |at| {
        let mut table = whole(tables, at);
        if let (Some(Value::Object(instead)), true) = (table.remove("quick"), quick) {
            replace(&mut table, instead);
        }
        let name = table["name"].clone();
        let section = serde_json::from_value(Value::Object(table));
        section.unwrap_or_else(|error| panic!("the section {name}: {error}"))
    };
    (0..tables.len()).map(section).collect()
}

/// A section with the settings that it has from another.
fn whole(tables: &[Settings], at: usize) -> Settings {
    let mut own = tables[at].clone();
    let Some(other) = own.remove("like") else {
        return own;
    };
    let other = tables.iter().position(|table| table["name"] == other);
    let mut table = whole(tables, other.expect("a section that is there"));
    replace(&mut table, own);
    table
}

/// Replaces settings and adds those that are not there.
fn replace(table: &mut Settings, by: Settings) {
    for (name, value) in by {
        match (table.get_mut(&name), value) {
            (Some(Value::Object(old)), Value::Object(new)) => old.extend(new),
            (_, value) => drop(table.insert(name, value)),
        }
    }
}
