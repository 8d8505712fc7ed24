//! The axes of a plot: their ranges, and the values at their grid lines.

use std::ops::Range;

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};

use super::spread::figure;

/// An axis: its range, and the values of its grid lines. Positions are values, or their logarithms.
pub(super) struct Scale {
    log: bool,
    /// The range of positions.
    places: Range<f64>,
    /// The values shown, in order.
    values: Vec<f64>,
    ticks: Vec<f64>,
}

impl Scale {
    /// The axis that shows `values`; a logarithmic one if `log`.
    pub(super) fn new(log: bool, values: impl Iterator<Item = f64>) -> Self {
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
        let ticks = if log {
            log_ticks(&places)
        } else {
            linear_ticks(&places)
        };
        Self {
            log,
            places,
            values,
            ticks,
        }
    }

    /// Puts the ticks at the values themselves if they are few, such as numbers of clients.
    pub(super) fn ticked_at_values(self) -> Self {
        if self.log && self.values.len() <= 10 {
            let ticks = self.values.clone();
            return Self { ticks, ..self };
        }
        self
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
        if hint.weight().allow_light_points() {
            Vec::new()
        } else {
            self.ticks.clone()
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

/// Powers of ten. If there are few, also 2 and 5 times these; if those are fewer than three, round numbers.
fn log_ticks(places: &Range<f64>) -> Vec<f64> {
    let times: &[f64] = match places.end - places.start {
        ..2.5 => &[1.0, 2.0, 5.0],
        _ => &[1.0],
    };
    let decades = places.start.floor() as i32..=places.end.ceil() as i32;
    let all = decades.flat_map(|power| times.iter().map(move |times| times * 10f64.powi(power)));
    let ticks: Vec<f64> = all
        .filter(|value| places.contains(&value.log10()))
        .collect();
    match ticks.len() {
        ..3 => linear_ticks(&(10f64.powf(places.start)..10f64.powf(places.end))),
        _ => ticks,
    }
}

/// A number as text, for an axis or a bar.
pub(super) fn short(value: f64) -> String {
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

    #[test]
    fn ticks_are_round_numbers() {
        let linear = Scale::new(false, [3.0, 10.5].into_iter());
        assert_eq!(linear.ticks, [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]);
        let log = Scale::new(true, [1.0, 11.0].into_iter());
        assert_eq!(log.ticks, [1.0, 2.0, 5.0, 10.0]);
        let narrow = Scale::new(true, [300.0, 480.0].into_iter());
        assert_eq!(narrow.ticks, [300.0, 350.0, 400.0, 450.0, 500.0]);
        let values = log.ticked_at_values().ticks;
        assert_eq!(values, [1.0, 11.0]);
    }
}
