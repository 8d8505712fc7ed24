//! What all plots share: sizes, colours, fonts, and the head with the title and the legend.

use plotters::coord::Shift;
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Pixels: a picture, the space between its edge and what is in it.
pub(super) const WIDTH: i32 = 600;
pub(super) const MARGIN: i32 = 12;
/// Font sizes, in the library's unit, pixels times 1.24: of the title, and of everything else.
const TITLE: i32 = 22;
pub(super) const SMALL: i32 = 17;
/// Pixels: the sign before a name in the legend, and the space after the name.
const SIGN: i32 = 30;
const BEHIND: i32 = 16;
/// Pixels: the space below the head.
const BELOW: i32 = 10;
const FONT: &str = "sans-serif";

pub(super) const PAPER: RGBColor = RGBColor(0xff, 0xff, 0xff);
pub(super) const INK: RGBColor = RGBColor(0x1f, 0x23, 0x28);
pub(super) const MUTED: RGBColor = RGBColor(0x59, 0x63, 0x6e);
pub(super) const GRID: RGBColor = RGBColor(0xd1, 0xd9, 0xe0);
/// Colours that colour-blind readers can distinguish too, as far as possible ordered by lightness.
pub(super) const COLOURS: [RGBColor; 8] = [
    RGBColor(0x09, 0x69, 0xda),
    RGBColor(0xcf, 0x5c, 0x00),
    RGBColor(0x1a, 0x7f, 0x37),
    RGBColor(0x82, 0x50, 0xdf),
    RGBColor(0xbf, 0x39, 0x89),
    RGBColor(0x0e, 0x84, 0x8a),
    RGBColor(0x8a, 0x6d, 0x00),
    RGBColor(0x6b, 0x72, 0x7a),
];

pub(super) const GOOD: RGBColor = COLOURS[2];
pub(super) const BAD: RGBColor = COLOURS[1];

/// Each colour, with the page's variable that replaces it.
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
pub(super) fn on_page(svg: &str) -> String {
    let mut svg = svg.to_owned();
    for (RGBColor(red, green, blue), name) in NAMED {
        svg = svg.replace(
            &format!("\"#{red:02X}{green:02X}{blue:02X}\""),
            &format!("\"{name}\""),
        );
    }
    svg
}

pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
pub(super) type DrawResult = Result<(), Box<dyn std::error::Error>>;

/// The sign before a name in a legend.
#[derive(Clone, Copy)]
pub(super) enum LegendSign {
    Line,
    Dashes,
    Bar,
}

/// The part above a plot: its title, what it shows, and the legend.
pub(super) struct Head {
    /// Each text, with the position of the left end and the middle of its line.
    texts: Vec<(String, (i32, i32), TextStyle<'static>)>,
    signs: Vec<(LegendSign, RGBColor, (i32, i32))>,
    /// Its height in pixels.
    pub(super) height: i32,
}

impl Head {
    /// The head of a picture with this `title`, paragraphs of `notes`, and the names of the legend.
    pub(super) fn new(title: &str, notes: &[&str], names: &[(&str, RGBColor, LegendSign)]) -> Self {
        let mut head = Self {
            texts: Vec::new(),
            signs: Vec::new(),
            height: MARGIN,
        };
        head.paragraph(title, TITLE, INK);
        for note in notes {
            head.paragraph(note, SMALL, MUTED);
        }
        let (line, mut left) = (line_height(SMALL), MARGIN);
        for (name, colour, sign) in names {
            let needed = SIGN + text_width(name, SMALL);
            if left > MARGIN && left + needed > WIDTH - MARGIN {
                (left, head.height) = (MARGIN, head.height + line);
            }
            let middle = head.height + line / 2;
            head.signs.push((*sign, *colour, (left, middle)));
            let style = style(SMALL, INK);
            head.texts
                .push(((*name).to_owned(), (left + SIGN, middle), style));
            left += needed + BEHIND;
        }
        head.height += if names.is_empty() {
            BELOW
        } else {
            line + BELOW
        };
        head
    }

    /// Adds lines of text, wrapped between words.
    fn paragraph(&mut self, text: &str, size: i32, colour: RGBColor) {
        for line in wrap(text, size) {
            let place = (MARGIN, self.height + line_height(size) / 2);
            self.texts.push((line, place, style(size, colour)));
            self.height += line_height(size);
        }
    }

    pub(super) fn draw(&self, root: &Area<'_>) -> DrawResult {
        for (text, place, style) in &self.texts {
            root.draw(&Text::new(text.as_str(), *place, style.clone()))?;
        }
        for &(sign, colour, (left, middle)) in &self.signs {
            let stroke = |from: i32, to: i32| {
                let ends = vec![(left + from, middle), (left + to, middle)];
                PathElement::new(ends, colour.stroke_width(2))
            };
            match sign {
                LegendSign::Line => {
                    root.draw(&stroke(0, 22))?;
                    root.draw(&Circle::new((left + 11, middle), 3, colour.filled()))?;
                }
                LegendSign::Dashes => {
                    for from in [0, 8, 16] {
                        root.draw(&stroke(from, from + 5))?;
                    }
                }
                LegendSign::Bar => {
                    let corners = [(left + 10, middle - 6), (left + 22, middle + 6)];
                    root.draw(&Rectangle::new(corners, colour.filled()))?;
                }
            }
        }
        Ok(())
    }
}

/// Pixels between two lines of text.
pub(super) fn line_height(size: i32) -> i32 {
    size + size / 6
}

/// The approximate width of a text in pixels: viewers' fonts differ a little.
pub(super) fn text_width(text: &str, size: i32) -> i32 {
    (text.chars().count() as f64 * f64::from(size) * 0.47).ceil() as i32
}

/// The text as lines that fit the picture, wrapped between words.
pub(super) fn wrap(text: &str, size: i32) -> Vec<String> {
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

pub(super) fn text(size: i32, colour: RGBColor) -> TextStyle<'static> {
    (FONT, size).into_font().color(&colour)
}

/// The style of a text whose left end and middle are given.
pub(super) fn style(size: i32, colour: RGBColor) -> TextStyle<'static> {
    text(size, colour).pos(Pos::new(HPos::Left, VPos::Center))
}
