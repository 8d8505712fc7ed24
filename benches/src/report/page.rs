//! A report as a self-contained page, and a plot as SVG: no network, no script. The page is light
//! or dark like the reader's system.

use std::sync::LazyLock;

use minijinja::value::Value;
use minijinja::{AutoEscape, Environment, context};
use serde_json::json;

use walvisor::commands::CommandError;

use super::section::{Cell, Report, SCATTER, Section, Verdict};

/// The templates. What they are filled with is escaped.
static TEMPLATES: LazyLock<Environment<'static>> = LazyLock::new(|| {
    let mut templates = Environment::new();
    templates.set_auto_escape_callback(|_| AutoEscape::Html);
    for (name, text) in [
        ("page", include_str!("page.html")),
        ("plot", include_str!("plot.svg")),
    ] {
        let added = templates.add_template(name, text);
        added.expect("a template without mistakes");
    }
    templates
});

/// Fills the template with this name.
pub(super) fn fill(name: &str, values: Value) -> Result<String, CommandError> {
    let template = TEMPLATES.get_template(name).map_err(CommandError::failed)?;
    template.render(values).map_err(CommandError::failed)
}

/// The page.
///
/// # Errors
/// If a plot can't be drawn.
pub fn page(report: &Report) -> Result<String, CommandError> {
    let sections: Result<Vec<_>, _> = report.sections.iter().map(view).collect();
    let values = context! {
        report,
        machine => report.machine.to_string(),
        sections => sections?,
        scatter => (SCATTER * 100.0) as u64,
    };
    fill("page", values)
}

/// A section as the template shows it.
fn view(section: &Section) -> Result<Value, CommandError> {
    let table = &section.table;
    let plots = section.plots.iter().map(|plot| plot.draw(true));
    let plots: Vec<String> = plots.collect::<Result<_, _>>()?;
    let class = |at| if table.is_figures(at) { "figure" } else { "" };
    let columns = table.columns.iter().enumerate();
    let columns: Vec<_> = columns
        .map(|(at, column)| json!({ "title": column.title, "class": class(at) }))
        .collect();
    let cell = |(at, cell): (usize, &Cell)| match cell {
        Cell::Grey(cell) => json!({ "text": cell.to_string(), "class": "figure grey" }),
        Cell::Judged(cell, verdict) => {
            let text = format!("{} {cell}", verdict.sign());
            json!({ "text": text, "class": format!("figure {}", verdict.name()) })
        }
        cell => json!({ "text": cell.to_string(), "class": class(at) }),
    };
    let row = |row: &Vec<Cell>| {
        let cells: Vec<_> = row.iter().enumerate().map(cell).collect();
        json!({ "class": verdict(row).map_or("", Verdict::name), "cells": cells })
    };
    let rows: Vec<_> = table.rows.iter().map(row).collect();
    let judged = |cell: &Cell| matches!(cell, Cell::Judged(..));
    let Section {
        key, title, notes, ..
    } = section;
    Ok(context! {
        key, title, notes, plots, columns, rows,
        judged => table.rows.iter().flatten().any(judged),
    })
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

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::machine::MachineInfo;
    use super::super::section::Preference;
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
