//! Tables for people: aligned columns, or one block for each row where those would not fit the
//! terminal.

use std::io::{IsTerminal, stdout};

use rustix::termios::tcgetwinsize;

/// The width of a table that goes to no terminal.
const USUAL_WIDTH: usize = 120;

/// Rows of text under headings.
pub struct Table {
    headings: Vec<&'static str>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// A table without rows.
    pub fn new(headings: &[&'static str]) -> Self {
        Self {
            headings: headings.to_vec(),
            rows: Vec::new(),
        }
    }

    /// Adds a row. Control characters become question marks.
    ///
    /// # Panics
    /// If it has not one cell for each heading.
    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.headings.len(), "a cell for each heading");
        let visible = |cell: String| cell.replace(char::is_control, "?");
        self.rows.push(cells.into_iter().map(visible).collect());
    }

    /// The table as lines of at most `width` characters or, if it is wider, a block of lines for
    /// each row: a heading and its cell in each.
    pub fn lines(&self, width: usize) -> String {
        let widths: Vec<_> = (0..self.headings.len())
            .map(|column| {
                let cells = self.rows.iter().map(|row| count(&row[column]));
                cells.fold(count(self.headings[column]), usize::max)
            })
            .collect();
        let headings: Vec<_> = self
            .headings
            .iter()
            .map(|text| (*text).to_owned())
            .collect();
        if widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1) <= width {
            let rows = [&headings].into_iter().chain(&self.rows);
            let line = |row: &Vec<String>| {
                let cells = row.iter().zip(&widths);
                let cells: Vec<_> = cells
                    .map(|(cell, &width)| format!("{cell:width$}"))
                    .collect();
                format!("{}\n", cells.join("  ").trim_end())
            };
            return rows.map(line).collect();
        }
        let widest = headings.iter().map(|text| count(text)).max().unwrap_or(0);
        let block = |row: &Vec<String>| -> String {
            let cells = headings.iter().zip(row);
            cells
                .map(|(heading, cell)| format!("{heading:widest$}  {cell}\n"))
                .collect()
        };
        let blocks: Vec<_> = self.rows.iter().map(block).collect();
        blocks.join("\n")
    }

    /// Cuts the cells of the last column so that the table fits lines of `width` characters, if
    /// that leaves it as many as its heading has.
    pub fn cut_last(&mut self, width: usize) {
        let last = self.headings.len() - 1;
        let others = |rows: &[Vec<String>]| {
            let widest = |column: usize| {
                let cells = rows.iter().map(|row| count(&row[column]));
                cells.fold(count(self.headings[column]), usize::max) + 2
            };
            (0..last).map(widest).sum::<usize>()
        };
        let left = width.saturating_sub(others(&self.rows));
        let left = left.max(count(self.headings[last]));
        for row in &mut self.rows {
            if count(&row[last]) > left {
                let kept: String = row[last].chars().take(left - 1).collect();
                row[last] = format!("{kept}…");
            }
        }
    }

    /// As [`lines`](Self::lines), for stdout.
    pub fn for_stdout(&self) -> String {
        self.lines(stdout_width())
    }
}

/// Breaks lines that are wider than the terminal at stdout, at spaces, and indents what follows.
/// Elsewhere lines stay whole, for programs that search them.
pub fn fit_terminal(text: &str) -> String {
    if stdout().is_terminal() {
        wrap(text, stdout_width())
    } else {
        text.to_owned()
    }
}

/// Breaks lines of more than `width` characters at spaces.
fn wrap(text: &str, width: usize) -> String {
    let mut wrapped = String::new();
    for line in text.lines() {
        let indent = line.len() - line.trim_start().len() + 4;
        let mut used = 0;
        for (at, word) in line.split(' ').enumerate() {
            let more = count(word) + usize::from(at > 0);
            if used + more > width && used > indent {
                wrapped += &format!("\n{:indent$}{word}", "");
                used = indent + count(word);
            } else {
                wrapped += if at > 0 { " " } else { "" };
                wrapped += word;
                used += more;
            }
        }
        wrapped.push('\n');
    }
    wrapped
}

fn count(text: &str) -> usize {
    text.chars().count()
}

/// How many characters a line on stdout may have.
pub fn stdout_width() -> usize {
    let stdout = stdout();
    let size = stdout.is_terminal().then(|| tcgetwinsize(&stdout));
    match size {
        Some(Ok(size)) if size.ws_col > 0 => size.ws_col.into(),
        _ => USUAL_WIDTH,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_at_spaces() {
        let text = "log a: one two three\n  four\n  five six seven eight\n";
        assert_eq!(wrap(text, 20), text.replace(" eight", "\n      eight"));
        assert_eq!(
            wrap(text, 14),
            "log a: one two\n    three\n  four\n  five six\n      seven\n      eight\n"
        );
        assert_eq!(
            wrap("a-word-that-is-too-long\n", 4),
            "a-word-that-is-too-long\n"
        );
    }

    #[test]
    fn a_table_that_is_too_wide_is_turned() {
        let mut table = Table::new(&["AT", "WHAT"]);
        table.row(vec!["cid:1".to_owned(), "größer".to_owned()]);
        table.row(vec!["snapshot:a".to_owned(), "b".to_owned()]);
        let aligned = "AT          WHAT\ncid:1       größer\nsnapshot:a  b\n";
        assert_eq!(table.lines(18), aligned);
        assert_eq!(
            table.lines(17),
            "AT    cid:1\nWHAT  größer\n\nAT    snapshot:a\nWHAT  b\n"
        );
        assert_eq!(Table::new(&["AT"]).lines(80), "AT\n");
        table.cut_last(16);
        assert_eq!(
            table.lines(16),
            "AT          WHAT\ncid:1       grö…\nsnapshot:a  b\n"
        );
    }
}
