//! Plots as SVG: lines on linear or logarithmic axes, and bars. The text is readable even if a plot is shown 500 pixels
//! wide, so names are above what they name and not beside it.

use std::borrow::Cow;

use plotters::prelude::*;

use walvisor::commands::CommandError;

use super::picture::{
    Area, BAD, COLOURS, DrawResult, GOOD, GRID, Head, INK, LegendSign, MARGIN, MUTED, PAPER, SMALL,
    WIDTH, line_height, style, text, text_width, wrap,
};
use super::scale::{Scale, short};
use super::spread::Spread;

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
        /// The length that is neither good nor bad, shown as a line. Longer bars are good, shorter ones bad.
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
    /// Whether it is a reference for the others: computed, or independent of the axis. It is dashed, without dots.
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
            name: name.into(),
            points,
            ideal: true,
        }
    }
}

/// Pixels: the height of the part with axes, a bar, and the gap below the bars of a label.
const HEIGHT: i32 = 340;
const BAR: i32 = 18;
const GAP: i32 = 10;

type Rows = [(String, Vec<Option<Spread>>)];

impl Plot {
    /// The plot with a caption.
    #[must_use]
    pub fn captioned(self, caption: &str) -> Self {
        Self {
            caption: caption.to_owned(),
            ..self
        }
    }

    /// The plot as a file of its own.
    ///
    /// # Errors
    /// If the library refuses to draw it.
    pub fn svg(&self) -> Result<String, CommandError> {
        let mut svg = String::new();
        self.draw(&mut svg).map_err(|error| {
            CommandError::Failed(format!("the plot {} cannot be drawn: {error}", self.name))
        })?;
        Ok(svg)
    }

    fn draw(&self, svg: &mut String) -> DrawResult {
        let kind = self.kind.as_drawn();
        let unit = match &*kind {
            PlotKind::Bars { unit, .. } => unit,
            PlotKind::Lines { .. } => "",
        };
        let head = Head::new(&self.title, &[unit, &self.caption], &kind.names());
        let height = head.height
            + match &*kind {
                PlotKind::Lines { .. } => HEIGHT,
                PlotKind::Bars { rows, .. } => bars_height(rows),
            };
        let root = SVGBackend::with_string(svg, (WIDTH as u32, height as u32)).into_drawing_area();
        root.fill(&PAPER)?;
        head.draw(&root)?;
        let (_, area) = root.split_vertically(head.height);
        match &*kind {
            PlotKind::Lines { x, y, series } => lines(&area, x, y, series)?,
            PlotKind::Bars { even, rows, .. } => bars(&area, *even, rows)?,
        }
        root.present()?;
        Ok(())
    }
}

impl PlotKind {
    /// The kind that is drawn: bars, if every line would be a single dot.
    fn as_drawn(&self) -> Cow<'_, Self> {
        let Self::Lines { x, y, series } = self else {
            return Cow::Borrowed(self);
        };
        let place = |line: &Series| visible_points(line, x, y).first().copied();
        let all: Vec<f64> = series
            .iter()
            .flat_map(|line| visible_points(line, x, y))
            .map(|point| point.0)
            .collect();
        let Some(&only) = all
            .first()
            .filter(|first| all.iter().all(|at| at == *first))
        else {
            return Cow::Borrowed(self);
        };
        let row = |line: &Series| {
            let spread = Spread::of(&[place(line)?.1]);
            Some((line.name.clone(), vec![spread]))
        };
        Cow::Owned(Self::Bars {
            unit: format!("{}; {}: {}", y.label, x.label, short(only)),
            groups: vec![y.label.clone()],
            even: None,
            rows: series.iter().filter_map(row).collect(),
        })
    }

    /// The legend: each name with its colour, and whether its line is dashed.
    fn names(&self) -> Vec<(&str, RGBColor, LegendSign)> {
        let coloured = |(at, name)| {
            let (name, sign): (&str, LegendSign) = name;
            (name, COLOURS[at % COLOURS.len()], sign)
        };
        match self {
            Self::Lines { series, .. } => {
                let sign = |line: &Series| {
                    if line.ideal {
                        LegendSign::Dashes
                    } else {
                        LegendSign::Line
                    }
                };
                let names = series.iter().map(|line| (line.name.as_str(), sign(line)));
                names.enumerate().map(coloured).collect()
            }
            Self::Bars { groups, .. } if groups.len() == 1 => Vec::new(),
            Self::Bars { groups, .. } => {
                let names = groups.iter().map(|name| (name.as_str(), LegendSign::Bar));
                names.enumerate().map(coloured).collect()
            }
        }
    }
}

/// The points that have a place on both axes.
fn visible_points(line: &Series, x: &Axis, y: &Axis) -> Vec<(f64, f64)> {
    let points = line.points.iter().copied();
    points
        .filter(|&(at, value)| x.has_place_for(at) && y.has_place_for(value))
        .collect()
}

fn lines(area: &Area<'_>, x: &Axis, y: &Axis, series: &[Series]) -> DrawResult {
    let all: Vec<(f64, f64)> = series
        .iter()
        .flat_map(|line| visible_points(line, x, y))
        .collect();
    if all.is_empty() {
        let style = style(SMALL, MUTED);
        area.draw(&Text::new("nothing was measured", (MARGIN, MARGIN), style))?;
        return Ok(());
    }
    let mut chart = ChartBuilder::on(area)
        .margin(MARGIN)
        .margin_top(4)
        .x_label_area_size(52)
        .y_label_area_size(80)
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
        .axis_desc_style(text(SMALL, INK))
        .label_style(text(SMALL, MUTED))
        .draw()?;
    for (at, line) in series.iter().enumerate() {
        let colour = COLOURS[at % COLOURS.len()];
        let points = visible_points(line, x, y);
        if line.ideal {
            let dashes = DashedLineSeries::new(points, 5, 4, colour.stroke_width(2));
            chart.draw_series(dashes)?;
        } else {
            chart.draw_series(LineSeries::new(points.clone(), colour.stroke_width(2)))?;
            let dots = points.into_iter();
            chart.draw_series(dots.map(|at| Circle::new(at, 3, colour.filled())))?;
        }
    }
    Ok(())
}

fn bars(area: &Area<'_>, even: Option<f64>, rows: &Rows) -> DrawResult {
    let most = rows.iter().flat_map(|row| row.1.iter().flatten());
    let most = most
        .map(|spread| spread.high)
        .chain(even)
        .fold(f64::MIN_POSITIVE, f64::max);
    // The longest bar leaves room for its number.
    let room = WIDTH - 2 * MARGIN - text_width("1,000,000", SMALL);
    let end = |value: f64| MARGIN + (value / most * f64::from(room)) as i32;
    let mut top = 0;
    for (label, bars) in rows {
        for line in wrap(label, SMALL) {
            let place = (MARGIN, top + line_height(SMALL) / 2);
            area.draw(&Text::new(line, place, style(SMALL, INK)))?;
            top += line_height(SMALL);
        }
        for (group, spread) in bars.iter().enumerate() {
            let (from, middle) = (top + 1, top + BAR / 2);
            top += BAR;
            let Some(spread) = spread else { continue };
            let colour = match even {
                Some(even) if spread.median < even => BAD,
                Some(_) => GOOD,
                None => COLOURS[group % COLOURS.len()],
            };
            let right = end(spread.median).max(MARGIN + 1);
            let corners = [(MARGIN, from), (right, from + BAR - 2)];
            area.draw(&Rectangle::new(corners, colour.filled()))?;
            let ends = [spread.low, spread.high].map(end);
            if ends[1] > ends[0] {
                let whisker = ends.map(|end| (end, middle)).to_vec();
                area.draw(&PathElement::new(whisker, MUTED.stroke_width(2)))?;
            }
            let place = (right.max(ends[1]) + 6, middle);
            let style = style(SMALL, INK);
            area.draw(&Text::new(short(spread.median), place, style))?;
        }
        top += GAP;
    }
    if let Some(even) = even {
        let line = vec![(end(even), 0), (end(even), top - GAP)];
        area.draw(&PathElement::new(line, MUTED.stroke_width(1)))?;
    }
    Ok(())
}

fn bars_height(rows: &Rows) -> i32 {
    let row = |(label, bars): &(String, Vec<Option<Spread>>)| {
        let lines = wrap(label, SMALL).len() as i32;
        lines * line_height(SMALL) + bars.len() as i32 * BAR + GAP
    };
    rows.iter().map(row).sum::<i32>() + GAP
}

#[cfg(test)]
mod tests {
    use super::super::picture::on_page;
    use super::*;

    fn plot(kind: PlotKind) -> Plot {
        Plot {
            name: "a".to_owned(),
            title: "A < B".to_owned(),
            caption: String::new(),
            kind,
        }
    }

    fn lines(points: Vec<(f64, f64)>) -> Plot {
        let end = points.last().map_or(64.0, |point| point.0);
        plot(PlotKind::Lines {
            x: Axis::log("clients"),
            y: Axis::log("a second"),
            series: vec![
                Series::measured("on", points.clone()),
                Series::ideal(
                    "ideal",
                    vec![(points.first().map_or(1.0, |at| at.0), 1.0), (end, 0.01)],
                ),
            ],
        })
    }

    fn bars(unit: &str, groups: &[&str], rows: Vec<(String, Vec<Option<Spread>>)>) -> Plot {
        plot(PlotKind::Bars {
            unit: unit.to_owned(),
            groups: groups.iter().map(|&name| name.to_owned()).collect(),
            even: None,
            rows,
        })
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
        let plot = lines(vec![(1.0, 1.0), (64.0, 0.05)]).captioned("on: & off");
        let svg = plot.svg().unwrap();
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
        assert!(svg.contains("viewBox"), "it scales");
        let page = on_page(&svg);
        assert!(page.contains("var(--c0)") && page.contains("var(--paper)"));
        assert!(!page.contains("\"#"), "{page}");
    }

    #[test]
    fn texts_of_any_length_stay_in_the_picture() {
        let long = "vhost-user: write + flush, 16 clients, 4 queues (qemu-storage-daemon), and still more words";
        let row = (
            long.to_owned(),
            vec![Spread::of(&[1.5]), Spread::of(&[2.5])],
        );
        let plot = Plot {
            title: long.to_owned(),
            ..bars(long, &[&long[..40], &long[..60]], vec![row])
        };
        let plot = plot.captioned(long);
        let svg = plot.svg().unwrap();
        let found = texts(&svg);
        for (left, text) in &found {
            let right = left + text_width(text, SMALL);
            assert!((0..=WIDTH).contains(&right), "{text}: {left} to {right}");
        }
        let words = |text: &str| {
            text.split_whitespace()
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        let all: Vec<_> = found.iter().flat_map(|(_, text)| words(text)).collect();
        for word in words(long) {
            // In the title, the unit, the caption and the label.
            assert!(
                all.iter().filter(|found| **found == word).count() >= 4,
                "{word}"
            );
        }
    }

    #[test]
    fn lines_of_single_points_become_bars() {
        let svg = lines(vec![(8.0, 3.0)]).svg().unwrap();
        let words: Vec<_> = texts(&svg).into_iter().map(|(_, text)| text).collect();
        assert_eq!(
            words,
            ["A &lt; B", "a second; clients: 8", "on", "3", "ideal", "1"]
        );
        assert!(svg.contains("<rect") && !svg.contains("<circle"));
        // The same line with a second place is a line.
        let svg = lines(vec![(8.0, 3.0), (9.0, 3.0)]).svg().unwrap();
        assert!(svg.contains("<circle"), "{svg}");
    }

    #[test]
    fn bars_longer_than_even_are_good_and_shorter_ones_bad() {
        let rows = [0.8, 1.0, 3.0].map(|value| (value.to_string(), vec![Spread::of(&[value])]));
        let mut plot = bars("times", &["ratio"], rows.to_vec());
        if let PlotKind::Bars { even, .. } = &mut plot.kind {
            *even = Some(1.0);
        }
        let page = on_page(&plot.svg().unwrap());
        let of = |name: &str| page.matches(&format!("fill=\"{name}\"")).count();
        assert_eq!(
            (of("var(--c2)"), of("var(--c1)"), of("var(--c0)")),
            (2, 1, 0)
        );
    }

    #[test]
    fn values_without_a_place_and_empty_plots_are_drawn() {
        for points in [vec![], vec![(0.0, -1.0), (f64::NAN, 1.0)], vec![(3.0, 3.0)]] {
            lines(points).svg().unwrap();
        }
        let empty = plot(PlotKind::Lines {
            x: Axis::log("x"),
            y: Axis::linear("y"),
            series: vec![Series::measured("none", vec![])],
        });
        assert!(empty.svg().unwrap().contains("nothing was measured"));
        let spread = Spread::of(&[1.0, 3.0]);
        let rows = vec![("mmio".to_owned(), vec![spread, None])];
        let svg = bars("us", &["one", "two"], rows).svg().unwrap();
        assert!(svg.contains("mmio") && svg.contains(">\n2\n<"), "{svg}");
    }
}
