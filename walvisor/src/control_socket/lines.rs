//! Splits a stream of bytes into lines of bounded length.

/// Longest line in bytes, without its line end.
pub const MAX_LINE: usize = 64 << 10;

/// A complete line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum InputLine {
    /// The line's bytes, without its line end.
    Whole(Vec<u8>),
    /// The line had more than [`MAX_LINE`] bytes, which were dropped.
    TooLong,
}

/// Splits bytes into lines, and keeps the incomplete one.
#[derive(Debug, Default)]
pub(super) struct LineReader {
    part: Vec<u8>,
    /// The line is too long, so the rest of it will be dropped.
    skipping: bool,
}

impl LineReader {
    /// Adds bytes, and returns the lines that they complete, without blank ones.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Vec<InputLine> {
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
            assert!(self.part.len() <= MAX_LINE, "memory of a line is bounded");
            if end {
                let line = std::mem::take(&mut self.part);
                if std::mem::take(&mut self.skipping) {
                    ended.push(InputLine::TooLong);
                } else if !line.trim_ascii().is_empty() {
                    ended.push(InputLine::Whole(line));
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

    fn whole(text: &str) -> InputLine {
        InputLine::Whole(text.into())
    }

    #[test]
    fn lines_may_arrive_in_any_pieces() {
        let text = b"one\n\r\n  \ntwo\r\nthree";
        for size in 1..=text.len() {
            let mut lines = LineReader::default();
            let ended: Vec<InputLine> = text
                .chunks(size)
                .flat_map(|piece| lines.push(piece))
                .collect();
            assert_eq!(ended, [whole("one"), whole("two\r")], "pieces of {size}");
            assert!(lines.is_open());
        }
        assert!(!LineReader::default().is_open());
    }

    #[test]
    fn a_line_that_is_too_long_uses_bounded_memory_and_the_next_is_read() {
        let mut lines = LineReader::default();
        let longest = vec![b'x'; MAX_LINE];
        assert_eq!(lines.push(&longest), []);
        assert_eq!(lines.push(b"\n"), [InputLine::Whole(longest.clone())]);
        for _ in 0..100 {
            assert_eq!(lines.push(&longest), []);
            assert!(lines.part.capacity() <= 2 * MAX_LINE);
        }
        assert!(lines.is_open());
        assert_eq!(lines.push(b"y\nz\n"), [InputLine::TooLong, whole("z")]);
    }
}
