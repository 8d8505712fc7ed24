//! Plots as SVG: lines on linear or logarithmic axes, and bars. Their colours are for white paper. [`on_page`]
//! replaces them by those of the page, which has a light and a dark set.

use std::ops::Range;

use plotters::coord::Shift;
use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

use walvisor::commands::CommandError;

use super::spread::{Spread, figure};

/// A plot of some measurements.
#[derive(Clone, Debug)]
pub struct Plot {
    /// The name of its file, without `.svg`.
    pub name: String,
    /// Its title.
    pub title: String,
    /// Its kind and data.
    pub kind: Kind,
}

/// The kind of a plot, with its data.
#[derive(Clone, Debug)]
pub enum Kind {
    /// Lines over an axis.
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
    /// A linear axis from zero, or from the least value if that is below zero.
    pub fn linear(label: &str) -> Self {
        Self {
            label: label.to_owned(),
            log: false,
        }
    }

    /// A logarithmic axis.
    pub fn log(label: &str) -> Self {
        Self {
            label: label.to_owned(),
            log: true,
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
    /// Whether it is computed, not measured: then it is dashed, without dots.
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

    /// A computed line.
    pub fn ideal(name: impl Into<String>, points: Vec<(f64, f64)>) -> Self {
        Self {
            name: name.into(),
            points,
            ideal: true,
        }
    }
}

const WIDTH: u32 = 860;
const HEIGHT: u32 = 440;
/// Pixels on the right for the names of lines.
const LEGEND: u32 = 210;
const FONT: &str = "sans-serif";

const PAPER: RGBColor = RGBColor(0xff, 0xff, 0xff);
const INK: RGBColor = RGBColor(0x1f, 0x23, 0x28);
const MUTED: RGBColor = RGBColor(0x59, 0x63, 0x6e);
const GRID: RGBColor = RGBColor(0xd1, 0xd9, 0xe0);
/// Colours that colour-blind readers can distinguish too, as far as possible in order of lightness.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0x09, 0x69, 0xda),
    RGBColor(0xcf, 0x5c, 0x00),
    RGBColor(0x1a, 0x7f, 0x37),
    RGBColor(0x82, 0x50, 0xdf),
    RGBColor(0xbf, 0x39, 0x89),
    RGBColor(0x0e, 0x84, 0x8a),
    RGBColor(0x8a, 0x6d, 0x00),
    RGBColor(0x6b, 0x72, 0x7a),
];

/// Each colour, and the name of the page's variable that replaces it.
const NAMED: [(RGBColor, &str); 12] = [
    (PAPER, "var(--paper)"),
    (INK, "var(--ink)"),
    (MUTED, "var(--muted)"),
    (GRID, "var(--grid)"),
    (COLOURS[0], "var(--c0)"),
    (COLOURS[1], "var(--c1)"),
    (COLOURS[2], "var(--c2)"),
    (COLOURS[3], "var(--c3)"),
    (COLOURS[4], "var(--c4)"),
    (COLOURS[5], "var(--c5)"),
    (COLOURS[6], "var(--c6)"),
    (COLOURS[7], "var(--c7)"),
];

/// The plot with the colours of the page that contains it.
pub fn on_page(svg: &str) -> String {
    let mut svg = svg.to_owned();
    for (RGBColor(red, green, blue), name) in NAMED {
        svg = svg.replace(
            &format!("\"#{red:02X}{green:02X}{blue:02X}\""),
            &format!("\"{name}\""),
        );
    }
    svg
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

impl Plot {
    /// The plot as a file of its own.
    ///
    /// # Errors
    /// If the library refuses to draw it.
    pub fn svg(&self) -> Result<String, CommandError> {
        let mut svg = String::new();
        let drawn = match &self.kind {
            Kind::Lines { x, y, series } => {
                let root = SVGBackend::with_string(&mut svg, (WIDTH, HEIGHT)).into_drawing_area();
                self.lines(&root, x, y, series)
            }
            Kind::Bars { unit, groups, rows } => {
                let height = bars_height(groups.len(), rows.len());
                let root = SVGBackend::with_string(&mut svg, (WIDTH, height)).into_drawing_area();
                self.bars(&root, unit, groups, rows)
            }
        };
        drawn.map_err(|error| {
            CommandError::Failed(format!("the plot {} cannot be drawn: {error}", self.name))
        })?;
        Ok(svg)
    }

    fn lines(
        &self,
        root: &Area<'_>,
        x: &Axis,
        y: &Axis,
        series: &[Series],
    ) -> Result<(), Box<dyn std::error::Error>> {
        root.fill(&PAPER)?;
        let seen = |line: &Series| -> Vec<(f64, f64)> {
            let points = line.points.iter().copied();
            points
                .filter(|&(at, value)| x.has_place_for(at) && y.has_place_for(value))
                .collect()
        };
        let all: Vec<(f64, f64)> = series.iter().flat_map(seen).collect();
        let (area, legend) = root.split_horizontally(WIDTH - LEGEND);
        let mut chart = ChartBuilder::on(&area)
            .caption(&self.title, text(18, INK))
            .margin(10)
            .x_label_area_size(46)
            .y_label_area_size(76)
            .build_cartesian_2d(
                Scale::new(x.log, all.iter().map(|point| point.0)).ticked_at_values(),
                Scale::new(y.log, all.iter().map(|point| point.1)),
            )?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(GRID)
            .axis_style(MUTED)
            .x_desc(&x.label)
            .y_desc(&y.label)
            .axis_desc_style(text(14, INK))
            .label_style(text(13, MUTED))
            .draw()?;
        for (at, line) in series.iter().enumerate() {
            let colour = COLOURS[at % COLOURS.len()];
            let points = seen(line);
            let height = 40 + 22 * at as i32;
            if line.ideal {
                let dashes = DashedLineSeries::new(points, 5, 4, colour.stroke_width(2));
                chart.draw_series(dashes)?;
                for dash in 0..3 {
                    let from = 4 + dash * 8;
                    let stroke = vec![(from, height), (from + 5, height)];
                    legend.draw(&PathElement::new(stroke, colour.stroke_width(2)))?;
                }
            } else {
                chart.draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)))?;
                let dots = points.into_iter();
                chart.draw_series(dots.map(|at| Circle::new(at, 3, colour.filled())))?;
                let stroke = vec![(4, height), (26, height)];
                legend.draw(&PathElement::new(stroke, colour.stroke_width(2)))?;
                legend.draw(&Circle::new((15, height), 3, colour.filled()))?;
            }
            let name = text(13, INK).pos(Pos::new(HPos::Left, VPos::Center));
            legend.draw(&Text::new(line.name.clone(), (32, height), name))?;
        }
        root.present()?;
        Ok(())
    }

    fn bars(
        &self,
        root: &Area<'_>,
        unit: &str,
        groups: &[String],
        rows: &[(String, Vec<Option<Spread>>)],
    ) -> Result<(), Box<dyn std::error::Error>> {
        root.fill(&PAPER)?;
        let begin = bars_begin(rows);
        let at =
            |horizontal, size, colour| text(size, colour).pos(Pos::new(horizontal, VPos::Center));
        let left = at(HPos::Left, 18, INK);
        root.draw(&Text::new(self.title.clone(), (12, 20), left))?;
        root.draw(&Text::new(
            unit.to_owned(),
            (12, 42),
            at(HPos::Left, 13, MUTED),
        ))?;
        let most = rows.iter().flat_map(|row| row.1.iter().flatten());
        let most = most
            .map(|spread| spread.high)
            .fold(f64::MIN_POSITIVE, f64::max);
        // The longest bar leaves room for its number.
        let length = |value: f64| (value / most * f64::from(WIDTH as i32 - begin - 90)) as i32;
        let mut top = HEAD;
        if groups.len() > 1 {
            let mut from = begin;
            for (group, name) in groups.iter().enumerate() {
                let colour = COLOURS[group % COLOURS.len()];
                let corners = [(from, 36), (from + 12, 48)];
                root.draw(&Rectangle::new(corners, colour.filled()))?;
                let style = at(HPos::Left, 13, INK);
                root.draw(&Text::new(name.clone(), (from + 18, 42), style))?;
                from += 40 + 8 * name.chars().count() as i32;
            }
        }
        for (label, bars) in rows {
            let middle = top + BAR * bars.len() as i32 / 2;
            let style = at(HPos::Right, 13, INK);
            root.draw(&Text::new(label.clone(), (begin - 8, middle), style))?;
            for (group, spread) in bars.iter().enumerate() {
                let (from, middle) = (top + 1, top + BAR / 2);
                top += BAR;
                let Some(spread) = spread else { continue };
                let colour = COLOURS[group % COLOURS.len()];
                let end = begin + length(spread.median);
                let corners = [(begin, from), (end.max(begin + 1), from + BAR - 2)];
                root.draw(&Rectangle::new(corners, colour.filled()))?;
                let ends = [spread.low, spread.high].map(|value| begin + length(value));
                if ends[1] > ends[0] {
                    let whisker = ends.map(|end| (end, middle)).to_vec();
                    root.draw(&PathElement::new(whisker, MUTED.stroke_width(2)))?;
                }
                let (place, style) = ((end.max(ends[1]) + 6, middle), at(HPos::Left, 13, INK));
                root.draw(&Text::new(short(spread.median), place, style))?;
            }
            top += GAP;
        }
        let axis = vec![(begin, HEAD - 4), (begin, top)];
        root.draw(&PathElement::new(axis, MUTED.stroke_width(1)))?;
        root.present()?;
        Ok(())
    }
}

/// Pixels: average width of a label's letter, at most; height of a bar; gap between labels; space above all bars.
const LETTER: f64 = 6.6;
const BAR: i32 = 18;
const GAP: i32 = 10;
const HEAD: i32 = 62;

/// Pixels: the left end of the bars, right of the longest label.
fn bars_begin(rows: &[(String, Vec<Option<Spread>>)]) -> i32 {
    let longest = rows.iter().map(|(label, _)| label.chars().count()).max();
    ((longest.unwrap_or(0) as f64 * LETTER) as i32 + 20).clamp(160, WIDTH as i32 * 2 / 3)
}

fn bars_height(groups: usize, rows: usize) -> u32 {
    (HEAD + rows as i32 * (groups as i32 * BAR + GAP) + GAP) as u32
}

fn text(size: u32, colour: RGBColor) -> TextStyle<'static> {
    (FONT, size).into_font().color(&colour)
}

/// An axis: its range, and the values of its grid lines. Positions are values, or their logarithms.
struct Scale {
    log: bool,
    /// The range of positions.
    places: Range<f64>,
    /// The values shown, in order.
    values: Vec<f64>,
    ticks: Vec<f64>,
}

impl Scale {
    fn new(log: bool, values: impl Iterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        values.dedup_by(|one, other| (*one - *other).abs() <= 1e-6 * other.abs());
        let place = |value: &f64| if log { value.log10() } else { *value };
        let places = match (values.first().map(place), values.last().map(place)) {
            (Some(low), Some(high)) if log => {
                let room = ((high - low) * 0.04).max(0.02);
                low - room..high + room
            }
            (Some(low), Some(high)) if high > 0.0 => low.min(0.0)..high * 1.05,
            // There are no values, so any range works.
            _ => 0.0..1.0,
        };
        let ticks = match log {
            true => log_ticks(&places),
            false => linear_ticks(&places),
        };
        Self {
            log,
            places,
            values,
            ticks,
        }
    }

    /// Puts the ticks at the values themselves if they are few, such as numbers of clients.
    fn ticked_at_values(self) -> Self {
        match self.log && self.values.len() <= 10 {
            true => Self {
                ticks: self.values.clone(),
                ..self
            },
            false => self,
        }
    }
}

impl Ranged for Scale {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, (from, to): (i32, i32)) -> i32 {
        let place = if self.log { value.log10() } else { *value };
        let part = (place - self.places.start) / (self.places.end - self.places.start);
        from + (part * f64::from(to - from)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        match hint.weight().allow_light_points() {
            true => Vec::new(),
            false => self.ticks.clone(),
        }
    }

    fn range(&self) -> Range<f64> {
        let value = |place: f64| if self.log { 10f64.powf(place) } else { place };
        value(self.places.start)..value(self.places.end)
    }
}

impl ValueFormatter<f64> for Scale {
    fn format(value: &f64) -> String {
        short(*value)
    }
}

/// About six round numbers.
fn linear_ticks(range: &Range<f64>) -> Vec<f64> {
    let rough = (range.end - range.start) / 6.0;
    let power = 10f64.powf(rough.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|times| times * power);
    let step = steps.into_iter().find(|&step| step >= rough);
    let step = step.unwrap_or(10.0 * power);
    let (first, last) = ((range.start / step).ceil(), (range.end / step).floor());
    let numbers = first as i64..=last as i64;
    numbers.map(|number| number as f64 * step).collect()
}

/// Powers of ten. If there are few, also 2 and 5 times these.
fn log_ticks(places: &Range<f64>) -> Vec<f64> {
    let times: &[f64] = match places.end - places.start {
        ..2.5 => &[1.0, 2.0, 5.0],
        _ => &[1.0],
    };
    let decades = places.start.floor() as i32..=places.end.ceil() as i32;
    let all = decades.flat_map(|power| times.iter().map(move |times| times * 10f64.powi(power)));
    all.filter(|value| places.contains(&value.log10()))
        .collect()
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

    fn lines(points: Vec<(f64, f64)>) -> Plot {
        Plot {
            name: "a".to_owned(),
            title: "A < B".to_owned(),
            kind: Kind::Lines {
                x: Axis::log("clients"),
                y: Axis::log("a second"),
                series: vec![
                    Series::measured("on", points),
                    Series::ideal("ideal", vec![(1.0, 1.0), (64.0, 0.01)]),
                ],
            },
        }
    }

    #[test]
    fn a_plot_has_its_words_and_no_colour_of_its_own_on_a_page() {
        let svg = lines(vec![(1.0, 1.0), (64.0, 0.05)]).svg().unwrap();
        for word in ["A &lt; B", "clients", "a second", "ideal", "64", "0.010"] {
            assert!(svg.contains(word), "{word}: {svg}");
        }
        assert!(svg.contains("viewBox"), "it scales");
        let page = on_page(&svg);
        assert!(page.contains("var(--c0)") && page.contains("var(--paper)"));
        assert!(!page.contains("\"#"), "{page}");
    }

    #[test]
    fn bars_begin_behind_the_longest_label() {
        let label = "vhost-user: write + flush, 16 clients, 4 queues (qemu-storage-daemon)";
        let plot = Plot {
            name: "bars".to_owned(),
            title: "bars".to_owned(),
            kind: Kind::Bars {
                unit: "times".to_owned(),
                groups: vec!["ratio".to_owned()],
                rows: vec![(label.to_owned(), vec![Spread::of(&[1.5])])],
            },
        };
        let svg = plot.svg().unwrap();
        // The x coordinate of the right end of the label.
        let before = svg.split(label).next().unwrap();
        let text = &before[before.rfind("<text").unwrap()..];
        let end = text.split("x=\"").nth(1).unwrap().split('"').next();
        let end: usize = end.unwrap().parse().unwrap();
        assert!(end >= 6 * label.len(), "{end}");
    }

    #[test]
    fn values_without_a_place_and_empty_plots_are_drawn() {
        for points in [vec![], vec![(0.0, -1.0), (f64::NAN, 1.0)], vec![(3.0, 3.0)]] {
            lines(points).svg().unwrap();
        }
        let spread = Spread::of(&[1.0, 3.0]);
        let plot = Plot {
            name: "b".to_owned(),
            title: "B".to_owned(),
            kind: Kind::Bars {
                unit: "us".to_owned(),
                groups: vec!["one".to_owned(), "two".to_owned()],
                rows: vec![("mmio".to_owned(), vec![spread, None])],
            },
        };
        let svg = plot.svg().unwrap();
        assert!(svg.contains("mmio") && svg.contains(">\n2\n<"), "{svg}");
    }

    #[test]
    fn ticks_are_round_numbers() {
        let linear = Scale::new(false, [3.0, 10.5].into_iter());
        assert_eq!(linear.ticks, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        let log = Scale::new(true, [1.0, 11.0].into_iter());
        assert_eq!(log.ticks, [1.0, 2.0, 5.0, 10.0]);
        let values = log.ticked_at_values().ticks;
        assert_eq!(values, [1.0, 11.0]);
    }
}
