//! The targets of the links in the documentation pages exist, and so do the source files that they
//! name.

use std::fs;
use std::path::PathBuf;

use crate::{ends_with, files, top};

/// All files of the project, and those of them that are documentation pages.
fn project() -> (Vec<PathBuf>, Vec<PathBuf>) {
    let all = files(&top());
    let pages = all.iter().filter(|path| ends_with(path, "md"));
    let pages = pages.cloned().collect();
    (all, pages)
}

/// The targets of a page's links, except in code blocks.
fn links(page: &str) -> Vec<&str> {
    let mut code = false;
    let text = page.lines().filter(|line| {
        code ^= line.starts_with("```");
        !code
    });
    text.flat_map(|line| line.split("](").skip(1))
        .filter_map(|rest| rest.split_once(')').map(|(target, _)| target))
        .collect()
}

/// The anchor by which links name a heading.
fn anchor(heading: &str) -> String {
    let kept = heading
        .trim()
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

/// Names between backquotes: tests and functions, which have several words, and types and mutants.
fn names(page: &str) -> (Vec<&str>, Vec<&str>) {
    let quoted = page.split('`').skip(1).step_by(2);
    let is_metric = |name: &str| name.starts_with("walvisor_");
    let is_name = |name: &&str| {
        let of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        name.chars().all(of_name) && !is_metric(name)
    };
    let (functions, others): (Vec<_>, Vec<_>) = quoted
        .filter(is_name)
        .partition(|name| name.matches('_').count() > 2);
    let is_type = |name: &&str| {
        let starts = name.starts_with(|c: char| c.is_ascii_uppercase());
        starts && name.contains(|c: char| c.is_ascii_lowercase())
    };
    (functions, others.into_iter().filter(is_type).collect())
}

#[test]
fn tests_and_mutants_that_pages_name_are_there() {
    let (all, _) = project();
    let sources = all.iter().filter(|path| ends_with(path, "rs"));
    let sources: String = sources
        .map(|path| fs::read_to_string(path).unwrap())
        .collect();
    let mut missing = Vec::new();
    for page in ["docs/trust.md", "docs/security.md"] {
        let text = fs::read_to_string(top().join(page)).unwrap();
        let (functions, types) = names(&text);
        assert!(functions.len() > 5, "{page}: {functions:?}");
        let gone = functions
            .iter()
            .filter(|name| !sources.contains(&format!("fn {name}(")));
        missing.extend(gone.map(|name| format!("{page}: no test {name}")));
        let gone = types.iter().filter(|name| !sources.contains(**name));
        missing.extend(gone.map(|name| format!("{page}: no {name}")));
    }
    assert!(missing.is_empty(), "{}", missing.join("\n"));
}

#[test]
fn links_lead_to_files_and_headings_that_are_there() {
    let (_, found) = project();
    let (mut seen, mut broken) = (0, Vec::new());
    for page in &found {
        let text = fs::read_to_string(page).unwrap();
        for link in links(&text)
            .into_iter()
            .filter(|link| !link.contains("://"))
        {
            seen += 1;
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = match file {
                "" => page.clone(),
                file => page.parent().unwrap().join(file),
            };
            let headings = || {
                let text = fs::read_to_string(&target).unwrap_or_default();
                text.lines()
                    .filter_map(|line| line.strip_prefix('#'))
                    .any(|line| anchor(line.trim_start_matches('#')) == heading)
            };
            if !target.exists() || !(heading.is_empty() || headings()) {
                broken.push(format!("{}: {link}", page.display()));
            }
        }
    }
    println!("{seen} links on {} pages", found.len());
    assert!(found.len() > 10 && seen > 30, "links are not seen");
    assert!(broken.is_empty(), "{broken:#?}");
}

/// The source files that a page names: words such as `a/b.rs` and `a/{b,c}.rs`.
fn sources(page: &str) -> Vec<String> {
    let word = |c: char| !(c.is_ascii_alphanumeric() || "_-/.{,}".contains(c));
    let named = page.split(word).filter(|word| word.ends_with(".rs"));
    named
        .flat_map(|word| match word.split_once('{') {
            Some((before, rest)) => {
                let (names, after) = rest.split_once('}').expect("braces are closed");
                let each = names
                    .split(',')
                    .map(|name| format!("{before}{name}{after}"));
                each.collect()
            }
            None => vec![word.to_owned()],
        })
        .collect()
}

#[test]
fn source_files_that_pages_name_are_there() {
    let (there, found) = project();
    let (mut seen, mut missing) = (0, Vec::new());
    for page in &found {
        for source in sources(&fs::read_to_string(page).unwrap()) {
            seen += 1;
            if !there.iter().any(|path| path.ends_with(&source)) {
                missing.push(format!("{}: {source}", page.display()));
            }
        }
    }
    assert!(seen > 50, "names are not seen");
    assert!(missing.is_empty(), "{missing:#?}");
}
