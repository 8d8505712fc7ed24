//! The text of a mark in the log.

use std::fmt;
use std::str::FromStr;

use crate::error::{Error, Result, invalid};
use crate::{Buffer, SECTOR_SIZE};

/// The text of a mark: 1 to 256 bytes of UTF-8 in one line, without control characters.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MarkText(String);

impl MarkText {
    /// The longest text, in bytes.
    pub const MOST_BYTES: usize = 256;

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The text as stored in the log: a sector, padded with zeroes.
    pub(crate) fn to_sector(&self) -> Buffer {
        let mut sector = Buffer::zeroed(SECTOR_SIZE as usize);
        sector[..self.0.len()].copy_from_slice(self.0.as_bytes());
        sector
    }

    /// The text in a sector of the log; `None`: not a valid one.
    pub(crate) fn read(sector: &[u8]) -> Option<Self> {
        let len = sector.iter().rposition(|&byte| byte != 0)? + 1;
        std::str::from_utf8(&sector[..len]).ok()?.parse().ok()
    }
}

impl FromStr for MarkText {
    type Err = Error;

    /// # Errors
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind) if this is not a valid text for a mark.
    fn from_str(text: &str) -> Result<Self> {
        // These two separators end a line too.
        let refused = |c: char| c.is_control() || ['\u{2028}', '\u{2029}'].contains(&c);
        if !(1..=Self::MOST_BYTES).contains(&text.len()) || text.contains(refused) {
            return Err(invalid(format!(
                "{text:?} is not a valid text for a mark: give one line of 1 to {} bytes, without \
                 control characters",
                Self::MOST_BYTES
            )));
        }
        Ok(Self(text.to_owned()))
    }
}

impl fmt::Display for MarkText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_is_one_line_and_comes_back_from_its_sector() {
        let longest = "é".repeat(128);
        for text in ["a", "txn 17 acked", " ", "日本 \"x\" \\", &longest] {
            let mark: MarkText = text.parse().unwrap();
            assert_eq!(mark.as_str(), text);
            assert_eq!(MarkText::read(&mark.to_sector()), Some(mark));
        }
        let longer = longest + "x";
        for text in [
            "",
            "a\nb",
            "a\0",
            "\u{1b}[2J",
            "\u{85}",
            "a\u{2028}b",
            &longer,
        ] {
            let error = text.parse::<MarkText>().unwrap_err();
            assert_eq!(error.kind(), crate::ErrorKind::InvalidInput);
            assert!(!error.to_string().contains(char::is_control), "{error}");
        }
        for bytes in [&[0; 512][..], &[0xff; 512], b"a\0b", &[b'x'; 257]] {
            assert_eq!(MarkText::read(bytes), None);
        }
    }
}
