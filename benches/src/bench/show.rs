//! A matrix as a section of the report: its columns and its plots.

use std::collections::BTreeMap;

use serde_json::Value;

use super::formula::{Settings, evaluate, fill};
use super::matrix::{Matrix, Row, Side};
use super::spec::{Column, ColumnSpec, Layout, PlotSpec, Statistic};
use crate::report::plot::{Axis, Plot, PlotKind, Series};
use crate::report::{Cell, Preference, Section, Spread};

/// The title and the decimals of each figure.
pub type Figures = BTreeMap<String, (String, usize)>;

/// The most points of a line of a list.
const POINTS: usize = 300;

impl Matrix {
    /// The matrix as a section, without the rows that were not measured.
    pub fn section(&self, figures: &Figures) -> Section {
        let spec = &self.spec;
        let key = if spec.key.is_empty() {
            &spec.name
        } else {
            &spec.key
        };
        let columns: Vec<Column> = spec.columns.iter().map(|one| full(one, figures)).collect();
        let titles: Vec<_> = columns
            .iter()
            .map(|column| (column.key.as_str(), column.title.as_str()))
            .collect();
        let first = self.sides().next().map(|side| &side.plan);
        let settings = first.unwrap_or(&spec.plan);
        let notes = spec.notes.iter().map(|note| fill(note, settings));
        let mut notes: Vec<String> = notes.collect();
        let turns = self.sides().map(|side| side.turns.len()).max().unwrap_or(0);
        if turns > 1 {
            notes.push(format!(
                "Median of {turns} rounds (lowest to highest), in turns."
            ));
        }
        notes.extend(self.notes.iter().cloned());
        let notes: Vec<&str> = notes.iter().map(String::as_str).collect();
        let [key, title] = [key, &spec.title].map(|text| fill(text, settings));
        let mut section = Section::new(&key, &title, &notes, &titles);
        for row in self.rows.iter().filter(|row| row.is_measured()) {
            let (skipped, most) = match spec.table {
                Layout::Wide => (0, 1),
                Layout::Long => (0, usize::MAX),
                Layout::Beside => (1, usize::MAX),
            };
            for side in row.sides.iter().skip(skipped).take(most) {
                let cells = columns.iter().map(|column| column.cell(row, side));
                section.table.rows.push(cells.collect());
            }
        }
        let plots = spec.plots.iter().flat_map(|plot| self.plots(plot));
        section.with_plots(plots.collect())
    }

    fn plots(&self, spec: &PlotSpec) -> Vec<Plot> {
        if spec.list {
            return self.rows.iter().map(|row| list_plot(spec, row)).collect();
        }
        let kind = if let Some(x) = &spec.x {
            self.line_plot(spec, x)
        } else {
            self.bar_plot(spec)
        };
        // Nothing to draw if no side is there.
        let first = self.sides().next();
        let drawn = first.map(|side| plot(spec, &side.plan, kind));
        drawn.into_iter().collect()
    }

    /// The figures that a plot shows, each with the names for its templates.
    fn shown(&self, spec: &PlotSpec) -> Vec<(Settings, &Row, &Side, String)> {
        let mut figures = spec.figures.clone();
        if figures.is_empty() {
            figures.push((spec.figure.clone(), String::new()));
        }
        let mut shown = Vec::new();
        let sides = self
            .rows
            .iter()
            .flat_map(|row| row.sides.iter().map(move |side| (row, side)));
        for (row, side) in sides {
            let mut settings = names(row, side);
            let is_wanted = spec.sides.is_empty() || spec.sides.contains(&side.side);
            let is_true = |only: &String| evaluate(only, &settings).as_bool() == Some(true);
            if !is_wanted || !spec.only.as_ref().is_none_or(is_true) {
                continue;
            }
            if spec.timed && side.emulated {
                settings["name"] = format!("[{}]", side.name).into();
            }
            for (figure, name) in &figures {
                settings.insert("figure".to_owned(), name.clone().into());
                shown.push((settings.clone(), row, side, figure.clone()));
            }
        }
        shown
    }

    fn line_plot(&self, spec: &PlotSpec, x: &str) -> PlotKind {
        let mut series: Vec<Series> = Vec::new();
        let mut flat = Vec::new();
        for (settings, _, side, figure) in self.shown(spec) {
            let value = side.median(&figure);
            if spec.flat.contains(&side.side) {
                flat.extend(value.map(|value| (side.name.clone(), value)));
                continue;
            }
            let Some(at) = evaluate(x, &settings).as_f64() else {
                continue;
            };
            let (name, point) = (fill(&spec.by, &settings), value.map(|value| (at, value)));
            match series.iter_mut().find(|line| line.name == name) {
                Some(line) => line.points.extend(point),
                None => series.push(Series::measured(name, point.into_iter().collect())),
            }
        }
        let places = series.iter().flat_map(|line| &line.points).map(|at| at.0);
        let ends = [
            places.clone().fold(f64::INFINITY, f64::min),
            places.fold(0.0, f64::max),
        ];
        for ideal in &spec.ideal {
            let line = series.iter().find(|line| line.name.starts_with(&ideal.at));
            let Some(line) = line else { continue };
            let value = |at: f64| {
                let x = Settings::from_iter([("x".to_owned(), at.into())]);
                evaluate(&ideal.is, &x).as_f64().unwrap_or_default()
            };
            let points = line.points.iter().map(|&(at, _)| (at, value(at))).collect();
            series.push(Series::ideal(&ideal.name, points));
        }
        for (name, value) in flat {
            series.push(Series::ideal(name, ends.map(|at| (at, value)).to_vec()));
        }
        PlotKind::Lines {
            x: Axis::new(&spec.x_label, spec.log.contains('x')),
            y: Axis::new(&spec.y_label, spec.log.contains('y')),
            series,
        }
    }

    fn bar_plot(&self, spec: &PlotSpec) -> PlotKind {
        let (mut groups, mut rows): (Vec<String>, Vec<(String, Vec<_>)>) = Default::default();
        for (settings, row, side, figure) in self.shown(spec) {
            let [group, label] = [&spec.by, &spec.label].map(|name| fill(name, &settings));
            let group = groups
                .iter()
                .position(|known| *known == group)
                .unwrap_or_else(|| {
                    groups.push(group);
                    groups.len() - 1
                });
            let at = rows
                .iter()
                .position(|row| row.0 == label)
                .unwrap_or_else(|| {
                    rows.push((label, Vec::new()));
                    rows.len() - 1
                });
            let bars = &mut rows[at].1;
            bars.resize(bars.len().max(group + 1), None);
            let over = spec
                .over
                .as_ref()
                .map(|over| row.side(over)?.median(&figure));
            bars[group] = match over {
                None => side.spread(&figure),
                Some(over) => over
                    .zip(side.median(&figure))
                    .and_then(|(over, own)| Spread::of(&[over / own])),
            };
        }
        PlotKind::Bars {
            unit: spec.y_label.clone(),
            groups,
            even: spec.over.as_ref().map(|_| 1.0),
            rows,
        }
    }
}

/// A plot of the lists of a row's first round. If they are long, each point stands for several
/// places and shows the lowest.
fn list_plot(spec: &PlotSpec, row: &Row) -> Plot {
    let series = row.sides.iter().map(|side| {
        let first = side.turns.first();
        let list = first.map_or(Vec::new(), |turn| turn.list(&spec.figure));
        let each = list.len().div_ceil(POINTS).max(1);
        let points = list.chunks(each).enumerate().map(|(at, part)| {
            let lowest = part.iter().copied().fold(f64::INFINITY, f64::min);
            ((at * each) as f64, lowest)
        });
        Series::measured(&side.name, points.collect())
    });
    let kind = PlotKind::Lines {
        x: Axis::new(&spec.x_label, false),
        y: Axis::new(&spec.y_label, false),
        series: series.collect(),
    };
    plot(spec, &names(row, &row.sides[0]), kind)
}

fn plot(spec: &PlotSpec, settings: &Settings, kind: PlotKind) -> Plot {
    let [name, title, caption] =
        [&spec.name, &spec.title, &spec.caption].map(|text| fill(text, settings));
    Plot {
        name,
        title,
        caption,
        kind,
    }
}

/// What templates and expressions know of a side: its settings, `row` and `name`.
fn names(row: &Row, side: &Side) -> Settings {
    let mut names = side.plan.clone();
    names.insert("row".to_owned(), row.name.clone().into());
    names.insert("name".to_owned(), side.name.clone().into());
    names
}

/// A column with all that its figure adds.
pub fn full(spec: &ColumnSpec, figures: &Figures) -> Column {
    let mut column = match spec {
        ColumnSpec::Full(column) => column.clone(),
        ColumnSpec::Short(text) => match (text.strip_prefix('='), text.split_once('.')) {
            (Some(setting), _) => Column {
                key: setting.to_owned(),
                is: Some(setting.to_owned()),
                ..Column::default()
            },
            (None, Some((side, figure))) => Column {
                key: format!("{side}_{figure}"),
                figure: Some(figure.to_owned()),
                side: Some(side.to_owned()),
                ..Column::default()
            },
            (None, None) => Column {
                key: text.clone(),
                ..Column::default()
            },
        },
    };
    let figure = column.figure.clone().unwrap_or_else(|| column.key.clone());
    let known = figures.get(&figure);
    if column.title.is_empty() {
        let known = known.filter(|_| column.beside.is_none());
        let title = known
            .map_or(&column.key, |(title, _)| title)
            .replace('_', " ");
        column.title = match &column.side {
            Some(side) if column.beside.is_none() => format!("{}: {title}", side.replace('_', " ")),
            _ => title,
        };
    }
    column.decimals = column.decimals.or(known.map(|known| known.1));
    column.figure = Some(figure);
    column
}

impl Column {
    fn cell(&self, row: &Row, side: &Side) -> Cell {
        let cell = self.any_cell(row, side);
        if self.timed && side.emulated && cell != Cell::None {
            return cell.grey();
        }
        cell
    }

    fn any_cell(&self, row: &Row, side: &Side) -> Cell {
        let this = side;
        let side = match &self.side {
            Some(name) => row.side(name),
            None => Some(this),
        };
        let (Some(side), Some(figure)) = (side, &self.figure) else {
            return Cell::None;
        };
        let is_true = |only: &String| evaluate(only, &names(row, this)).as_bool() == Some(true);
        if !self.only.as_ref().is_none_or(is_true) {
            return Cell::None;
        }
        let decimals = self.decimals.unwrap_or(0);
        if let Some(known) = &self.is {
            return match evaluate(known, &names(row, side)) {
                Value::String(text) if text.is_empty() => Cell::None,
                Value::String(text) => Cell::text(text),
                value => value
                    .as_f64()
                    .map_or(Cell::None, |value| Cell::Number(value, decimals)),
            };
        }
        if let Some(other) = &self.beside {
            let better = if self.less {
                Preference::Less
            } else {
                Preference::More
            };
            let other = match other.as_str() {
                "this" => Some(this),
                other => row.side(other),
            };
            let other = other.and_then(|other| other.median(figure));
            return Cell::ratio_of(side.median(figure), other, better);
        }
        let rounds = side.of(figure);
        let first = side.turns.first();
        match self.show {
            Statistic::Spread => Cell::of(&rounds, decimals),
            Statistic::Median => Spread::of(&rounds)
                .map_or(Cell::None, |spread| Cell::Number(spread.median, decimals)),
            Statistic::List => first.map_or(Cell::None, |turn| Cell::Series(turn.list(figure))),
            Statistic::Sum if rounds.is_empty() => Cell::None,
            Statistic::Sum => Cell::Number(rounds.iter().sum(), decimals),
            Statistic::Rounds => Cell::count(rounds.len() as u64),
        }
    }
}
