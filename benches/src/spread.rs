//! The spread of a measurement over several runs.

/// Smallest, middle and largest value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Spread {
    /// The smallest value.
    pub min: f64,
    /// The middle value; of an even number of values, the mean of the two in the middle.
    pub median: f64,
    /// The largest value.
    pub max: f64,
}

impl Spread {
    /// The spread of `values`, in any order; `None` if there are none.
    #[must_use]
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        let middle = sorted.len() / 2;
        let median = match sorted.len() % 2 {
            0 => f64::midpoint(sorted[middle - 1], sorted[middle]),
            _ => sorted[middle],
        };
        Some(Self { min, median, max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_middle_of_even_and_odd_numbers_of_values() {
        assert_eq!(Spread::of(&[]), None);
        let odd = Spread {
            min: 1.0,
            median: 2.0,
            max: 9.0,
        };
        assert_eq!(Spread::of(&[9.0, 1.0, 2.0]), Some(odd));
        let even = Spread {
            min: 1.0,
            median: 3.0,
            max: 9.0,
        };
        assert_eq!(Spread::of(&[9.0, 1.0, 2.0, 4.0]), Some(even));
    }
}
