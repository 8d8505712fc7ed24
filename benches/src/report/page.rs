//! A report as a self-contained page: no network, no script, light or dark like the reader's system.

use std::fmt::Write as _;

use walvisor::commands::CommandError;

use super::picture::on_page;
use super::section::{Cell, Report, SCATTER, Table, Verdict};

const STYLE: &str = include_str!("page.css");

/// The page.
///
/// # Errors
/// If a plot can't be drawn.
pub fn page(report: &Report) -> Result<String, CommandError> {
    let mut body = String::new();
    let title = escape(&report.title);
    paragraph(&mut body, "machine", &report.machine.to_string());
    if report.interrupted {
        paragraph(
            &mut body,
            "warning",
            "Cut short: what is missing was not measured.",
        );
    }
    if report.quick {
        paragraph(
            &mut body,
            "warning",
            "A quick run: few and short rounds, figures scatter.",
        );
    }
    if report.sections.len() > 1 {
        body.push_str("<nav><ul>\n");
        for section in &report.sections {
            let (key, title) = (escape(&section.key), escape(&section.title));
            let _ = writeln!(body, "<li><a href=\"#{key}\">{title}</a></li>");
        }
        body.push_str("</ul></nav>\n");
    }
    for section in &report.sections {
        let (key, title) = (escape(&section.key), escape(&section.title));
        let _ = writeln!(body, "<section id=\"{key}\">\n<h2>{title}</h2>");
        for note in &section.notes {
            paragraph(&mut body, "note", note);
        }
        for plot in &section.plots {
            let _ = writeln!(body, "<figure>{}</figure>", on_page(&plot.svg()?));
        }
        table(&mut body, &section.table);
        body.push_str("</section>\n");
    }
    Ok(format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>{title}</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n<h1>{title}</h1>\n{body}</main>\n\
         </body>\n</html>\n"
    ))
}

fn paragraph(body: &mut String, class: &str, text: &str) {
    let text = escape(text).replace('\n', "<br>\n");
    let _ = writeln!(body, "<p class=\"{class}\">{text}</p>");
}

fn table(body: &mut String, table: &Table) {
    body.push_str("<div class=\"table\"><table>\n<thead><tr>");
    let classes: Vec<&str> = (0..table.columns.len())
        .map(|at| {
            if table.is_figures(at) {
                " class=\"figure\""
            } else {
                ""
            }
        })
        .collect();
    for (column, class) in table.columns.iter().zip(&classes) {
        let _ = write!(body, "<th{class}>{}</th>", escape(column.title));
    }
    body.push_str("</tr></thead>\n<tbody>\n");
    for row in &table.rows {
        body.push_str(match verdict(row) {
            Some(Verdict::Good) => "<tr class=\"good\">",
            Some(Verdict::Bad) => "<tr class=\"bad\">",
            None => "<tr>",
        });
        for (cell, class) in row.iter().zip(&classes) {
            let (text, class) = match cell {
                Cell::Grey(cell) => (cell.to_string(), " class=\"figure grey\""),
                Cell::Judged(cell, Verdict::Good) => {
                    (format!("▲ {cell}"), " class=\"figure good\"")
                }
                Cell::Judged(cell, Verdict::Bad) => (format!("▼ {cell}"), " class=\"figure bad\""),
                cell => (cell.to_string(), *class),
            };
            let _ = write!(body, "<td{class}>{}</td>", escape(&text));
        }
        body.push_str("</tr>\n");
    }
    body.push_str("</tbody></table></div>\n");
    if table
        .rows
        .iter()
        .any(|row| row.iter().any(|cell| matches!(cell, Cell::Judged(..))))
    {
        let percent = SCATTER * 100.0;
        let text = format!(
            "▲ is better than what it is compared with, ▼ worse, by {percent:.0} % or more. A row with a mark at its left has \
             only such figures."
        );
        paragraph(body, "note", &text);
    }
}

/// The verdict of a row: that of its judged cells, if they agree.
fn verdict(row: &[Cell]) -> Option<Verdict> {
    let mut verdicts = row.iter().filter_map(|cell| match cell {
        Cell::Judged(_, verdict) => Some(*verdict),
        _ => None,
    });
    let first = verdicts.next()?;
    verdicts.all(|other| other == first).then_some(first)
}

/// The text with the characters of markup escaped.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => escaped.push_str("&amp;"),
            '<' => escaped.push_str("&lt;"),
            '>' => escaped.push_str("&gt;"),
            '"' => escaped.push_str("&quot;"),
            letter => escaped.push(letter),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::machine::MachineInfo;
    use super::super::section::{Preference, Section};
    use super::*;

    #[test]
    fn text_is_escaped_and_nothing_is_fetched() {
        let mut section = Section::new("a", "A & <b>", &["\"note\""], &[("x_us", "x <us>")]);
        section.table.rows = vec![
            vec![Cell::text("<script>")],
            vec![Cell::Number(1.5, 1).grey()],
            vec![Cell::ratio(6.1, Preference::More)],
            vec![Cell::ratio(6.2, Preference::Less)],
        ];
        let report = Report {
            title: "T".to_owned(),
            machine: MachineInfo::current(Path::new("/")),
            interrupted: true,
            quick: false,
            elapsed_s: 1.0,
            sections: vec![section],
        };
        let page = page(&report).unwrap();
        for text in [
            "A &amp; &lt;b&gt;",
            "&lt;script&gt;",
            "Cut short",
            "figure grey\">1.5<",
            "<tr class=\"good\"><td class=\"figure good\">▲ 6.10<",
            "<tr class=\"bad\"><td class=\"figure bad\">▼ 6.20<",
            "by 5 % or more",
        ] {
            assert!(page.contains(text), "{text}: {page}");
        }
        assert!(!page.contains("<script") && !page.contains("http"));
    }
}
