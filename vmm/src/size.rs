//! Sizes as the command line takes them: a number of bytes with an optional K, M, G, T, P or E (powers of 1024).

/// Why a size was not understood.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "'{text}' is not a size: give a number of bytes, or one with K, M, G, T, P or E, such as 512M"
)]
pub struct SizeError {
    text: String,
}

/// Parses `text` into bytes.
///
/// # Errors
/// If `text` is no number with an optional unit, or does not fit 64 bits.
pub fn parse_size(text: &str) -> Result<u64, SizeError> {
    let error = || SizeError {
        text: text.to_owned(),
    };
    let (digits, shift) = match text.chars().last() {
        Some('K' | 'k') => (&text[..text.len() - 1], 10),
        Some('M' | 'm') => (&text[..text.len() - 1], 20),
        Some('G' | 'g') => (&text[..text.len() - 1], 30),
        Some('T' | 't') => (&text[..text.len() - 1], 40),
        Some('P' | 'p') => (&text[..text.len() - 1], 50),
        Some('E' | 'e') => (&text[..text.len() - 1], 60),
        _ => (text, 0),
    };
    if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(error());
    }
    let number: u64 = digits.parse().map_err(|_| error())?;
    number.checked_mul(1 << shift).ok_or_else(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_and_units() {
        assert_eq!(parse_size("512"), Ok(512));
        assert_eq!(parse_size("4k"), Ok(4096));
        assert_eq!(parse_size("512M"), Ok(512 << 20));
        assert_eq!(parse_size("3G"), Ok(3 << 30));
        assert_eq!(parse_size("1T"), Ok(1 << 40));
        assert_eq!(parse_size("2P"), Ok(2 << 50));
        assert_eq!(parse_size("15E"), Ok(15 << 60));
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in [
            "",
            "M",
            "-1",
            "+1",
            "1.5G",
            "12Q",
            "1 G",
            "0x10",
            "99999999999999999999",
            "17179869184G",
            "16E",
            "é",
        ] {
            assert!(parse_size(text).is_err(), "{text:?} was taken");
        }
    }
}
