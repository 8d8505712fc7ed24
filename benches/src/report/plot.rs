//! Plots: lines on linear or logarithmic axes, and bars. This lays them out, and the template
//! `plot.svg` draws them. The text is readable even if a plot is shown 500 pixels wide, so names
//! are above what they name and not beside it.

use minijinja::context;
use serde::Serialize;
use serde_json::{Value, json};
use walvisor::commands::CommandError;

use super::page::fill;
use super::spread::{Spread, figure};

/// A plot of some measurements.
#[derive(Clone, Debug)]
pub struct Plot {
    /// The name of its file, without `.svg`.
    pub name: String,
    /// Its title.
    pub title: String,
    /// What the names in it mean, and whether more is better; may be empty.
    pub caption: String,
    /// Its kind and data.
    pub kind: PlotKind,
}

/// The kind of a plot, with its data.
#[derive(Clone, Debug)]
pub enum PlotKind {
    /// Lines over an axis, or bars if all points are at the same place on it.
    Lines {
        /// The horizontal axis.
        x: Axis,
        /// The vertical axis.
        y: Axis,
        /// The lines.
        series: Vec<Series>,
    },
    /// One bar for each label, or several side by side.
    Bars {
        /// The meaning of a bar's length.
        unit: String,
        /// The names of a label's bars, in order. With only one name there is no legend.
        groups: Vec<String>,
        /// The length that is neither good nor bad, shown as a line. Longer bars are good, shorter
        /// ones bad.
        even: Option<f64>,
        /// Each label with its bars; `None` leaves a bar out.
        rows: Vec<(String, Vec<Option<Spread>>)>,
    },
}

/// An axis.
#[derive(Clone, Debug)]
pub struct Axis {
    /// Its meaning, with the unit.
    pub label: String,
    /// Whether the axis is logarithmic: then it shows only values above zero.
    pub log: bool,
}

impl Axis {
    /// An axis. If it is not logarithmic, it begins at zero, or at the least value if that is below
    /// zero.
    pub fn new(label: &str, log: bool) -> Self {
        Self {
            label: label.to_owned(),
            log,
        }
    }

    fn has_place_for(&self, value: f64) -> bool {
        value.is_finite() && (!self.log || value > 0.0)
    }
}

/// A line.
#[derive(Clone, Debug)]
pub struct Series {
    /// Its name in the legend.
    pub name: String,
    /// Its points, from left to right.
    pub points: Vec<(f64, f64)>,
    /// Whether it is a reference for the others: computed, or independent of the axis. It is
    /// dashed, without dots.
    pub ideal: bool,
}

impl Series {
    /// A measured line.
    pub fn measured(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self {
            name: name.into(),
            points,
            ideal: false,
        }
    }

    /// A line to compare the others with.
    pub fn ideal(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self {
            ideal: true,
            ..Self::measured(name, points)
        }
    }

    /// The points that have a place on both axes.
    fn visible(&self, x: &Axis, y: &Axis) -> Vec<(f64, f64)> {
        let points = self.points.iter().copied();
        points
            .filter(|&(at, value)| x.has_place_for(at) && y.has_place_for(value))
            .collect()
    }
}

/// Pixels: the width of a picture, and the space between its edge and what is in it.
const WIDTH: i32 = 600;
const MARGIN: i32 = 12;
/// Font sizes in pixels: of the title, and of everything else.
const TITLE: i32 = 18;
const SMALL: i32 = 14;
/// Pixels: the sign before a name in the legend, and the space after the name.
const SIGN: i32 = 30;
const BEHIND: i32 = 16;
/// Pixels: the part with axes, a bar, and the gap below the bars of a label.
const HEIGHT: i32 = 360;
const BAR: i32 = 18;
const GAP: i32 = 10;
/// Number of colours.
const COLOURS: usize = 8;

type Rows = [(String, Vec<Option<Spread>>)];
type BenchDirs = (i32, i32);

/// A laid out picture: its shapes, each with a class, which is its colour.
#[derive(Default, Serialize)]
struct Drawing {
    bars: Vec<Value>,
    lines: Vec<Value>,
    dots: Vec<Value>,
    texts: Vec<Value>,
    /// Pixels from the top that are in use.
    #[serde(skip)]
    top: i32,
}

fn colour(at: usize) -> String {
    format!("c{}", at % COLOURS)
}

impl Plot {
    /// The plot as SVG: on a page, whose colours it takes, or as a file of its own.
    ///
    /// # Errors
    /// If the template cannot be filled.
    pub fn draw(&self, on_page: bool) -> Result<String, CommandError> {
        let mut drawing = Drawing {
            top: MARGIN,
            ..Drawing::default()
        };
        drawing.paragraph(&self.title, "title");
        match &self.kind {
            PlotKind::Bars {
                unit,
                groups,
                even,
                rows,
            } => drawing.with_bars(&[unit, &self.caption], groups, *even, rows),
            PlotKind::Lines { x, y, series } => match only_place(x, y, series) {
                Some(only) => {
                    let unit = format!("{}; {}: {}", y.label, x.label, short(only));
                    let bar = |line: &Series| {
                        let at = line.visible(x, y).first().copied()?;
                        Some((line.name.clone(), vec![Spread::of(&[at.1])]))
                    };
                    let rows: Vec<_> = series.iter().filter_map(bar).collect();
                    drawing.with_bars(&[&unit, &self.caption], &[], None, &rows);
                }
                None => drawing.with_lines(&self.caption, x, y, series),
            },
        }
        fill(
            "plot",
            context! {
                width => WIDTH,
                height => drawing.top,
                title_size => TITLE,
                text_size => SMALL,
                on_page,
                drawing,
            },
        )
    }
}

/// The place on the horizontal axis of all points, if they share one: then a line would be a single
/// dot.
fn only_place(x: &Axis, y: &Axis, series: &[Series]) -> Option<f64> {
    let points = series.iter().flat_map(|line| line.visible(x, y));
    let mut places = points.map(|point| point.0);
    let first = places.next()?;
    places.all(|at| at == first).then_some(first)
}

impl Drawing {
    /// Adds a text whose middle line is at `at`, and which starts, ends or is centred there.
    fn text(&mut self, text: &str, at: BenchDirs, class: &str, anchor: &str) {
        self.texts
            .push(json!({ "text": text, "at": at, "class": class, "anchor": anchor }));
    }

    fn line(&mut self, class: &str, points: &[BenchDirs]) {
        self.lines.push(json!({ "class": class, "points": points }));
    }

    fn bar(&mut self, class: &str, (x, y): BenchDirs, (width, height): (i32, i32)) {
        self.bars
            .push(json!({ "class": class, "x": x, "y": y, "width": width, "height": height }));
    }

    fn dot(&mut self, class: &str, at: BenchDirs) {
        self.dots.push(json!({ "class": class, "at": at }));
    }

    /// Adds lines of text, wrapped between words.
    fn paragraph(&mut self, text: &str, class: &str) {
        let pixels = if class == "title" { TITLE } else { SMALL };
        for line in wrap(text, pixels) {
            let middle = self.top + line_height(pixels) / 2;
            self.text(&line, (MARGIN, middle), class, "start");
            self.top += line_height(pixels);
        }
    }

    /// Adds the names and what shows them: a bar, or a line, dashed if it is ideal.
    fn legend<'a>(&mut self, names: impl Iterator<Item = (&'a str, Option<bool>)>) {
        let mut left = MARGIN;
        for (at, (name, line)) in names.enumerate() {
            let needed = SIGN + text_width(name, SMALL);
            if left > MARGIN && left + needed > WIDTH - MARGIN {
                (left, self.top) = (MARGIN, self.top + line_height(SMALL));
            }
            let middle = self.top + line_height(SMALL) / 2;
            let ends = [(left, middle), (left + 22, middle)];
            match line {
                None => self.bar(&colour(at), (left + 10, middle - 6), (12, 12)),
                Some(true) => self.line(&(colour(at) + " dashed"), &ends),
                Some(false) => {
                    self.line(&colour(at), &ends);
                    self.dot(&colour(at), (left + 11, middle));
                }
            }
            self.text(name, (left + SIGN, middle), "ink", "start");
            left += needed + BEHIND;
        }
        if left > MARGIN {
            self.top += line_height(SMALL);
        }
        self.top += GAP;
    }

    fn with_lines(&mut self, caption: &str, x: &Axis, y: &Axis, series: &[Series]) {
        self.paragraph(caption, "muted");
        self.legend(
            series
                .iter()
                .map(|line| (line.name.as_str(), Some(line.ideal))),
        );
        let points = series.iter().flat_map(|line| line.visible(x, y));
        let points: Vec<(f64, f64)> = points.collect();
        // The name of the vertical axis is above it.
        let (top, left, right) = (self.top + 2 * line_height(SMALL), 80, WIDTH - MARGIN);
        self.top += HEIGHT;
        let bottom = self.top - 52;
        if points.is_empty() {
            self.text(
                "nothing was measured",
                (MARGIN, top + MARGIN),
                "muted",
                "start",
            );
            return;
        }
        let across = Scale::new(x.log, points.iter().map(|at| at.0), (left, right)).at_values();
        let up = Scale::new(y.log, points.iter().map(|at| at.1), (bottom, top));
        for &tick in &up.ticks {
            let at = up.place(tick);
            self.line("grid", &[(left, at), (right, at)]);
            self.text(&short(tick), (left - 6, at), "muted", "end");
        }
        for &tick in &across.ticks {
            let at = across.place(tick);
            self.line("grid", &[(at, top), (at, bottom)]);
            self.text(&short(tick), (at, bottom + 14), "muted", "middle");
        }
        self.line("muted", &[(left, top), (left, bottom), (right, bottom)]);
        let middle = i32::midpoint(left, right);
        self.text(&x.label, (middle, bottom + 38), "ink", "middle");
        let above = top - line_height(SMALL);
        self.text(&y.label, (MARGIN, above), "ink", "start");
        for (at, line) in series.iter().enumerate() {
            let points = line.visible(x, y).into_iter();
            let points = points.map(|(at, value)| (across.place(at), up.place(value)));
            let points: Vec<BenchDirs> = points.collect();
            if line.ideal {
                self.line(&(colour(at) + " dashed"), &points);
            } else {
                self.line(&colour(at), &points);
                for place in points {
                    self.dot(&colour(at), place);
                }
            }
        }
    }

    fn with_bars(&mut self, notes: &[&str], groups: &[String], even: Option<f64>, rows: &Rows) {
        for note in notes {
            self.paragraph(note, "muted");
        }
        let named = groups.iter().filter(|_| groups.len() > 1);
        self.legend(named.map(|name| (name.as_str(), None)));
        let highest = rows.iter().flat_map(|row| row.1.iter().flatten());
        let most = highest
            .map(|spread| spread.high)
            .chain(even)
            .fold(f64::MIN_POSITIVE, f64::max);
        // The longest bar leaves room for its number.
        let room = WIDTH - 2 * MARGIN - text_width("1,000,000", SMALL);
        let place = |value: f64| MARGIN + (value / most * f64::from(room)) as i32;
        let first = self.top;
        for (label, bars) in rows {
            self.paragraph(label, "ink");
            for (group, spread) in bars.iter().enumerate() {
                let (from, middle) = (self.top + 1, self.top + BAR / 2);
                self.top += BAR;
                let Some(spread) = spread else { continue };
                let class = match even {
                    Some(even) if spread.median < even => colour(1),
                    Some(_) => colour(2),
                    None => colour(group),
                };
                let right = place(spread.median).max(MARGIN + 1);
                self.bar(&class, (MARGIN, from), (right - MARGIN, BAR - 2));
                let [low, high] = [spread.low, spread.high].map(place);
                if high > low {
                    self.line("muted", &[(low, middle), (high, middle)]);
                }
                let end = right.max(high) + 6;
                self.text(&short(spread.median), (end, middle), "ink", "start");
            }
            self.top += GAP;
        }
        if let Some(even) = even {
            let at = place(even);
            self.line("muted", &[(at, first), (at, self.top - GAP)]);
        }
        self.top += GAP;
    }
}

/// Pixels between two lines of text.
fn line_height(size: i32) -> i32 {
    size + size / 3
}

/// The approximate width of a text in pixels: viewers' fonts differ a little.
fn text_width(text: &str, size: i32) -> i32 {
    (text.chars().count() as f64 * f64::from(size) * 0.58).ceil() as i32
}

/// The text as lines that fit the picture, wrapped between words.
fn wrap(text: &str, size: i32) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line)
                if text_width(line, size) + text_width(word, size) + size < WIDTH - 2 * MARGIN =>
            {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

/// The scale of an axis: it places values, or their logarithms, between two pixels.
struct Scale {
    log: bool,
    low: f64,
    high: f64,
    pixels: (i32, i32),
    /// The values shown, in order.
    values: Vec<f64>,
    /// The values at its grid lines.
    ticks: Vec<f64>,
}

impl Scale {
    /// The scale that shows `values`, of which there is at least one.
    fn new(log: bool, values: impl Iterator<Item = f64>, pixels: (i32, i32)) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        values.dedup_by(|one, other| (*one - *other).abs() <= 1e-6 * other.abs());
        let (first, last) = (values[0], values[values.len() - 1]);
        let (low, high) = if log {
            let (low, high) = (first.log10(), last.log10());
            let room = ((high - low) * 0.04).max(0.02);
            (low - room, high + room)
        } else {
            (first.min(0.0), if last > 0.0 { last * 1.05 } else { 1.0 })
        };
        let ticks = if log {
            log_ticks(low, high)
        } else {
            linear_ticks(low, high)
        };
        Self {
            log,
            low,
            high,
            pixels,
            values,
            ticks,
        }
    }

    /// Puts ticks at the values if a logarithmic axis has at most ten.
    fn at_values(mut self) -> Self {
        if self.log && self.values.len() <= 10 {
            self.ticks.clone_from(&self.values);
        }
        self
    }

    fn place(&self, value: f64) -> i32 {
        let value = if self.log { value.log10() } else { value };
        let part = (value - self.low) / (self.high - self.low);
        let (from, to) = self.pixels;
        from + (part * f64::from(to - from)).round() as i32
    }
}

/// About six round numbers.
fn linear_ticks(low: f64, high: f64) -> Vec<f64> {
    let rough = (high - low) / 6.0;
    let power = 10f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|times| times * power);
    let step = steps.into_iter().find(|&step| step >= rough);
    let step = step.unwrap_or(10.0 * power);
    let numbers = (low / step).ceil() as i64..=(high / step).floor() as i64;
    numbers.map(|number| number as f64 * step).collect()
}

/// Powers of ten. If there are few, also 2 and 5 times these; if those are fewer than three, round
/// numbers.
fn log_ticks(low: f64, high: f64) -> Vec<f64> {
    let times: &[f64] = match high - low {
        ..2.5 => &[1.0, 2.0, 5.0],
        _ => &[1.0],
    };
    let decades = low.floor() as i32..=high.ceil() as i32;
    let all = decades.flat_map(|power| times.iter().map(move |times| times * 10f64.powi(power)));
    let ticks: Vec<f64> = all
        .filter(|value| (low..high).contains(&value.log10()))
        .collect();
    match ticks.len() {
        ..3 => linear_ticks(10f64.powf(low), 10f64.powf(high)),
        _ => ticks,
    }
}

/// A number as text, for an axis or a bar.
fn short(value: f64) -> String {
    let size = value.abs();
    match size {
        _ if size >= 100.0 || (value - value.round()).abs() < 1e-9 => figure(value, 0),
        _ if size >= 10.0 => figure(value, 1),
        _ if size >= 0.1 => figure(value, 2),
        _ => figure(value, 3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(title: &str, caption: &str, kind: PlotKind) -> Plot {
        Plot {
            name: "a".to_owned(),
            title: title.to_owned(),
            caption: caption.to_owned(),
            kind,
        }
    }

    /// Bars of `groups`, and the length that is neither good nor bad.
    fn bars(unit: &str, groups: &[&str], even: Option<f64>, rows: &Rows) -> PlotKind {
        PlotKind::Bars {
            unit: unit.to_owned(),
            groups: groups.iter().map(|&name| name.to_owned()).collect(),
            even,
            rows: rows.to_vec(),
        }
    }

    fn lines(points: Vec<(f64, f64)>) -> String {
        let end = points.last().map_or(64.0, |point| point.0);
        let begin = points.first().map_or(1.0, |at| at.0);
        let series = vec![
            Series::measured("on", points),
            Series::ideal("ideal", vec![(begin, 1.0), (end, 0.01)]),
        ];
        let [x, y] = ["clients", "a second"].map(|label| Axis::new(label, true));
        let plot = plot("A < B", "on: & off", PlotKind::Lines { x, y, series });
        plot.draw(false).unwrap()
    }

    /// The texts of a picture, each with the x coordinate of its left end.
    fn texts(svg: &str) -> Vec<(i32, String)> {
        let parts = svg.split("<text ").skip(1).map(|part| {
            let (attributes, rest) = part.split_once('>').unwrap();
            let x = attributes.split("x=\"").nth(1).unwrap().split('"').next();
            let text = rest.split('<').next().unwrap().trim();
            (x.unwrap().parse().unwrap(), text.to_owned())
        });
        parts.collect()
    }

    #[test]
    fn a_plot_has_its_words_and_no_colour_of_its_own_on_a_page() {
        let svg = lines(vec![(1.0, 1.0), (64.0, 0.05)]);
        for word in [
            "A &lt; B",
            "on: &amp; off",
            "clients",
            "a second",
            "ideal",
            "64",
            "0.010",
        ] {
            assert!(svg.contains(word), "{word}: {svg}");
        }
        assert!(svg.contains("viewBox") && svg.contains("#0969da"), "{svg}");
        let bars = plot("A", "", bars("u", &[], None, &[])).draw(true).unwrap();
        assert!(!bars.contains('#'), "{bars}");
    }

    #[test]
    fn texts_of_any_length_stay_in_the_picture() {
        let long = "vhost-user: write + flush, 16 clients, 4 queues (qemu-storage-daemon), and \
                    still more words";
        let row = (
            long.to_owned(),
            vec![Spread::of(&[1.5]), Spread::of(&[2.5])],
        );
        let kind = bars(long, &[&long[..40], &long[..60]], None, &[row]);
        let found = texts(&plot(long, long, kind).draw(false).unwrap());
        for (left, text) in &found {
            let right = left + text_width(text, SMALL);
            assert!((0..=WIDTH).contains(&right), "{text}: {left} to {right}");
        }
        let all: Vec<&str> = found.iter().flat_map(|(_, text)| text.split(' ')).collect();
        for word in long.split(' ') {
            // In the title, the unit, the caption and the label.
            assert!(
                all.iter().filter(|found| **found == word).count() >= 4,
                "{word}"
            );
        }
    }

    #[test]
    fn lines_of_single_points_become_bars() {
        let svg = lines(vec![(8.0, 3.0)]);
        let words: Vec<_> = texts(&svg).into_iter().map(|(_, text)| text).collect();
        let expected = [
            "A &lt; B",
            "a second; clients: 8",
            "on: &amp; off",
            "on",
            "3",
            "ideal",
            "1",
        ];
        assert_eq!(words, expected);
        assert!(!svg.contains("<circle"));
        // The same line with a second place is a line.
        assert!(lines(vec![(8.0, 3.0), (9.0, 3.0)]).contains("<circle"));
    }

    #[test]
    fn bars_longer_than_even_are_good_and_shorter_ones_bad() {
        let rows = [0.8, 1.0, 3.0].map(|value| (value.to_string(), vec![Spread::of(&[value])]));
        let kind = bars("times", &["ratio"], Some(1.0), &rows);
        let svg = plot("A", "", kind).draw(true).unwrap();
        let of = |class: &str| svg.matches(&format!("class=\"{class}\"")).count();
        assert_eq!((of("c2"), of("c1"), of("c0")), (2, 1, 0));
    }

    #[test]
    fn values_without_a_place_and_empty_plots_are_drawn() {
        for points in [vec![], vec![(0.0, -1.0), (f64::NAN, 1.0)], vec![(3.0, 3.0)]] {
            lines(points);
        }
        let (x, y) = (Axis::new("x", true), Axis::new("y", false));
        let series = vec![Series::measured("none", vec![])];
        let empty = plot("A", "", PlotKind::Lines { x, y, series });
        assert!(empty.draw(false).unwrap().contains("nothing was measured"));
    }

    #[test]
    fn ticks_are_round_numbers() {
        let ticks = |log, values: [f64; 2]| Scale::new(log, values.into_iter(), (0, 1)).ticks;
        assert_eq!(ticks(false, [3.0, 10.5]), [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        assert_eq!(ticks(true, [1.0, 11.0]), [1.0, 2.0, 5.0, 10.0]);
        assert_eq!(
            ticks(true, [300.0, 480.0]),
            [300.0, 350.0, 400.0, 450.0, 500.0]
        );
        let log = Scale::new(true, [1.0, 11.0].into_iter(), (0, 1));
        assert_eq!(log.at_values().ticks, [1.0, 11.0]);
    }
}
