//! Tables for people: aligned columns, or one block for each row where those would not fit the terminal.

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

    /// Adds a row.
    ///
    /// # Panics
    /// If it has not one cell for each heading.
    pub fn row(&mut self, cells: Vec<String>) {
        assert_eq!(cells.len(), self.headings.len(), "a cell for each heading");
        self.rows.push(cells);
    }

    /// The table as lines of at most `width` characters or, if it is wider, a block of lines for each row: a heading and
    /// its cell in each.
    pub fn lines(&self, width: usize) -> String {
        let count = |text: &str| text.chars().count();
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

    /// As [`lines`](Self::lines), for stdout.
    pub fn for_stdout(&self) -> String {
        self.lines(stdout_width())
    }
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
    }
}
