//! Sizes as text for people, and as the command line takes them.

pub use walvisor_storage::{SIZE, parse_size, show_size};

/// A size for people, such as `2 GiB` or `1.5 MiB`: rounded to a tenth of its largest unit.
pub fn human_size(bytes: u64) -> String {
    let (mut number, mut unit) = (bytes as f64, 0);
    // 1023.95 would be shown as 1024.0.
    while number >= 1023.95 && unit < UNITS.len() {
        number /= 1024.0;
        unit += 1;
    }
    let digits = usize::from((number * 10.0).round() % 10.0 != 0.0);
    match unit.checked_sub(1) {
        None => format!("{bytes} B"),
        Some(unit) => format!("{number:.digits$} {}iB", char::from(UNITS[unit])),
    }
}

/// The units, by their power of 1024.
const UNITS: &[u8] = b"KMGTPE";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn people_read_sizes_in_tenths_of_a_unit() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (4096, "4 KiB"),
            (1_048_575, "1 MiB"),
            (3 << 29, "1.5 GiB"),
            (2_147_483_648, "2 GiB"),
            (2_147_483_649, "2 GiB"),
            (1_073_741_824 * 103 / 10, "10.3 GiB"),
            (1000 << 20, "1000 MiB"),
            (u64::MAX, "16 EiB"),
        ] {
            assert_eq!(human_size(bytes), text);
        }
    }
}
