//! Splits a stream of bytes into lines of bounded length, and measures how deep a line is nested.

/// Longest line in bytes, without its line end.
pub const MAX_LINE: usize = 64 << 10;

/// Deepest nesting of the arrays and objects of a line. A command needs two levels; the others are
/// for what a client makes of its `id`. Each level takes stack while the line is parsed and while
/// its values are copied, written and dropped, most of it where nothing is optimised.
pub const MAX_DEPTH: usize = 16;

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

/// How deep the arrays and objects of a line of JSON are nested. It takes no stack for that. In a
/// line that is no JSON it is no less than what a parser gets to before it sees that.
pub(super) fn depth(line: &[u8]) -> usize {
    let (mut open, mut deepest) = (0_usize, 0);
    let mut bytes = line.iter();
    let mut in_string = false;
    while let Some(byte) = bytes.next() {
        match byte {
            b'"' => in_string = !in_string,
            // The byte after it does not end the string.
            b'\\' if in_string => drop(bytes.next()),
            _ if in_string => {}
            b'[' | b'{' => {
                open += 1;
                deepest = deepest.max(open);
            }
            b']' | b'}' => open = open.saturating_sub(1),
            _ => {}
        }
    }
    deepest
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
    fn brackets_outside_of_strings_nest() {
        for (line, deep) in [
            ("", 0),
            ("7", 0),
            ("[[], {}]", 2),
            ("{\"a\": [{\"b\": 1}]}, [", 3),
            ("\"[[[\"", 0),
            ("[\"\\\"[[\"]", 1),
            ("[\"\\\\\", [\"\\\\\\\"[\"", 2),
            ("[\"]\", [", 2),
            ("]]]}[[", 2),
            ("[[ \\\" [[", 2),
            ("[\"\\", 1),
        ] {
            assert_eq!(depth(line.as_bytes()), deep, "{line}");
        }
        let longest = vec![b'['; MAX_LINE];
        assert_eq!(depth(&longest), MAX_LINE);
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
