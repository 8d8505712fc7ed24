//! Sizes as text.

use crate::error::{Result, invalid};

/// What [`parse_size`] takes, for people.
pub const SIZE: &str =
    "a number of bytes, or one with K, M, G, T, P or E, such as 512M, 1.5G, 4GiB or 10GB";

/// A size with the largest unit that leaves a whole number, such as 5M; [`parse_size`] reads it.
pub fn show_size(bytes: u64) -> String {
    let power = (bytes.trailing_zeros() / 10).min(UNITS.len() as u32);
    match power.checked_sub(1) {
        Some(unit) if bytes > 0 => {
            format!(
                "{}{}",
                bytes >> (10 * power),
                char::from(UNITS[unit as usize])
            )
        }
        _ => format!("{bytes}B"),
    }
}

/// The units, by their power of 1024 or 1000.
const UNITS: &[u8] = b"KMGTPE";

/// Parses a size in bytes, as the command line takes it: a number of bytes, or one with a unit. K,
/// M, G, T, P and E, also written KiB and so on, are powers of 1024; KB and so on are powers of
/// 1000, as in GNU's programs. A fraction of a byte is rounded up to a multiple of 4096 bytes,
/// which fits sectors and pages.
///
/// # Errors
/// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) if `text` is no number with an
/// optional unit, or does not fit 64 bits.
pub fn parse_size(text: &str) -> Result<u64> {
    size(text).ok_or_else(|| invalid(format!("'{text}' is not a size: give {SIZE}")))
}

fn size(text: &str) -> Option<u64> {
    let digit = |character: char| character.is_ascii_digit();
    let end = text.find(|character| !digit(character) && character != '.');
    let (number, unit) = text.split_at(end.unwrap_or(text.len()));
    let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
    if whole.is_empty() || fraction.is_empty() || !fraction.chars().all(digit) {
        return None;
    }
    let parts = 10_u128.checked_pow(u32::try_from(fraction.len()).ok()?)?;
    let number = whole.parse::<u128>().ok()?.checked_mul(parts)?;
    let number = number.checked_add(fraction.parse().ok()?)?;
    let bytes = number.checked_mul(scale(unit)?)?;
    let bytes = if bytes.is_multiple_of(parts) {
        bytes / parts
    } else {
        (bytes / parts + 1).next_multiple_of(4096)
    };
    u64::try_from(bytes).ok()
}

/// The bytes of a unit.
fn scale(unit: &str) -> Option<u128> {
    let Some((letter, rest)) = unit.as_bytes().split_first() else {
        return Some(1);
    };
    let letter = letter.to_ascii_uppercase();
    if letter == b'B' && rest.is_empty() {
        return Some(1);
    }
    let power = UNITS.iter().position(|unit| *unit == letter)? as u32 + 1;
    match rest.to_ascii_uppercase().as_slice() {
        b"" | b"IB" => Some(1 << (10 * power)),
        b"B" => Some(1000_u128.pow(power)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_numbers_and_units() {
        for (text, bytes) in [
            ("512", 512),
            ("4k", 4096),
            ("512M", 512 << 20),
            ("3G", 3 << 30),
            ("1T", 1 << 40),
            ("2P", 2 << 50),
            ("15E", 15 << 60),
            ("4GiB", 4 << 30),
            ("4gib", 4 << 30),
            ("10GB", 10_000_000_000),
            ("1kB", 1000),
            ("1.5G", 3 << 29),
            ("0.5K", 512),
            ("1.5GiB", 3 << 29),
            ("2.50TB", 2_500_000_000_000),
            ("1.000", 1),
            ("15.5E", 31 << 59),
            ("24B", 24),
        ] {
            assert_eq!(parse_size(text).unwrap(), bytes, "{text}");
        }
    }

    #[test]
    fn a_size_is_shown_in_its_largest_whole_unit() {
        for (bytes, text) in [
            (0, "0B"),
            (24, "24B"),
            (1025, "1025B"),
            (1536 << 10, "1536K"),
            (5 << 20, "5M"),
            (50 << 30, "50G"),
            (1 << 63, "8E"),
        ] {
            assert_eq!(show_size(bytes), text);
            assert_eq!(parse_size(text).unwrap(), bytes);
        }
    }

    /// A size that is no whole number of bytes still fits sectors and pages.
    #[test]
    fn a_fraction_of_a_byte_is_rounded_up_to_a_page() {
        for (text, exact) in [("1.3G", 1.3 * f64::from(1 << 30)), ("0.1M", 104_857.6)] {
            let bytes = parse_size(text).unwrap();
            assert!(bytes.is_multiple_of(4096), "{text}: {bytes}");
            assert!(
                (0.0..4096.0).contains(&(bytes as f64 - exact)),
                "{text}: {bytes}"
            );
        }
    }

    #[test]
    fn texts_that_are_not_sizes_are_refused() {
        for text in [
            "",
            "M",
            "-1",
            "+1",
            ".5G",
            "1.G",
            "1.5.5G",
            "1,5G",
            "12Q",
            "12i",
            "12BB",
            "12iB",
            "1 G",
            "0x10",
            "99999999999999999999",
            "1.99999999999999999999999999999999999999999G",
            "17179869184G",
            "16E",
            "15.9999999999999999999E",
            "19EB",
            "é",
        ] {
            assert!(parse_size(text).is_err(), "{text:?} was taken");
        }
    }
}
