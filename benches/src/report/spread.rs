//! The spread of rounds, and numbers for human readers.

use serde::ser::Serializer;

/// The median of several rounds, and their range.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Spread {
    /// The median; of an even number of rounds, the mean of the two in the middle.
    #[serde(serialize_with = "serialize_rounded")]
    pub median: f64,
    /// The lowest.
    #[serde(serialize_with = "serialize_rounded")]
    pub low: f64,
    /// The highest.
    #[serde(serialize_with = "serialize_rounded")]
    pub high: f64,
}

impl Spread {
    /// The spread of rounds in any order; `None` if there are none.
    pub fn of(rounds: &[f64]) -> Option<Self> {
        let mut sorted = rounds.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (low, high) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = match sorted.len() % 2 {
            0 => f64::midpoint(sorted[middle - 1], sorted[middle]),
            _ => sorted[middle],
        };
        Some(Self { median, low, high })
    }
}

fn serialize_rounded<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(round_figure(*value))
}

/// Rounds to four decimals, which is more than the precision of any measurement here.
pub fn round_figure(value: f64) -> f64 {
    (value * 10_000.0).round() / 10_000.0
}

/// A number for human readers, with separated thousands.
pub fn figure(value: f64, decimals: usize) -> String {
    // The sum of no numbers is -0.
    let text = format!("{:.decimals$}", value + 0.0);
    let (sign, digits) = match text.strip_prefix('-') {
        Some(digits) => ("-", digits),
        None => ("", text.as_str()),
    };
    let (whole, rest) = digits.split_at(digits.find('.').unwrap_or(digits.len()));
    let mut grouped = String::new();
    for (at, digit) in whole.chars().enumerate() {
        if at > 0 && (whole.len() - at) % 3 == 0 && whole.len() > 4 {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    format!("{sign}{grouped}{rest}")
}
