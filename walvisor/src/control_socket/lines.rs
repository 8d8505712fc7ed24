//! Splits a stream of bytes into lines of bounded length.

/// Longest line in bytes, without its line end.
pub const MAX_LINE: usize = 64 << 10;

/// Most descriptors that come with a line; further ones are dropped.
pub(super) const MOST_FILES: usize = 4;

/// A complete line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Line {
    /// The line's bytes, without its line end.
    Whole(Vec<u8>),
    /// The line had more than [`MAX_LINE`] bytes, which were dropped.
    TooLong,
}

/// The part of a line that has arrived.
#[derive(Debug, Default)]
pub(super) struct Lines {
    part: Vec<u8>,
    /// The line has become too long, and the rest of it is dropped.
    skipping: bool,
}

impl Lines {
    /// Takes bytes that have arrived, and returns the lines that they complete. Blank lines are left out.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Vec<Line> {
        let mut ended = Vec::new();
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let (piece, end) = match piece.strip_suffix(b"\n") {
                Some(piece) => (piece, true),
                None => (piece, false),
            };
            if self.part.len() + piece.len() > MAX_LINE {
                self.skipping = true;
                self.part = Vec::new();
            }
            if !self.skipping {
                self.part.extend_from_slice(piece);
            }
            if end {
                let line = std::mem::take(&mut self.part);
                if std::mem::take(&mut self.skipping) {
                    ended.push(Line::TooLong);
                } else if !line.trim_ascii().is_empty() {
                    ended.push(Line::Whole(line));
                }
            }
        }
        ended
    }

    /// Whether an incomplete line has begun.
    pub(super) fn is_open(&self) -> bool {
        self.skipping || !self.part.trim_ascii().is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(text: &str) -> Line {
        Line::Whole(text.into())
    }

    #[test]
    fn lines_come_in_any_pieces() {
        let text = b"one\n\r\n  \ntwo\r\nthree";
        for size in 1..=text.len() {
            let mut lines = Lines::default();
            let ended: Vec<Line> = text
                .chunks(size)
                .flat_map(|piece| lines.push(piece))
                .collect();
            assert_eq!(ended, [whole("one"), whole("two\r")], "pieces of {size}");
            assert!(lines.is_open());
        }
        assert!(!Lines::default().is_open());
    }

    #[test]
    fn a_line_that_is_too_long_costs_no_memory_and_the_next_is_heard() {
        let mut lines = Lines::default();
        let longest = vec![b'x'; MAX_LINE];
        assert_eq!(lines.push(&longest), []);
        assert_eq!(lines.push(b"\n"), [Line::Whole(longest.clone())]);
        for _ in 0..100 {
            assert_eq!(lines.push(&longest), []);
            assert!(lines.part.capacity() <= 2 * MAX_LINE);
        }
        assert!(lines.is_open());
        assert_eq!(lines.push(b"y\nz\n"), [Line::TooLong, whole("z")]);
    }
}
