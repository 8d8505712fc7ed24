//! Messages for people have no gaps: a line of a string literal that goes on in the next one ends
//! with a backslash, and only a lost backslash leaves the indentation in the text.

use std::fs;

use crate::{ends_with, files, top};

/// Spaces that no text for people has in a row, unless it is a table.
const GAP: &str = "        ";

/// The string literals of a source, with the numbers of the lines where they begin.
fn literals(source: &str) -> Vec<(usize, String)> {
    let (mut found, mut line) = (Vec::new(), 1);
    let mut rest = source;
    while let Some(first) = rest.chars().next() {
        let len = match first {
            '/' if rest.starts_with("//") => rest.find('\n').unwrap_or(rest.len()),
            '/' if rest.starts_with("/*") => rest.find("*/").map_or(rest.len(), |end| end + 2),
            'r' if rest.starts_with("r#\"") => rest.find("\"#").map_or(rest.len(), |end| end + 2),
            '\'' if rest.starts_with("'\"'") => 3,
            '\'' if rest.starts_with("'\\") => 3,
            '"' => {
                let (text, len) = literal(&rest[1..]);
                found.push((line, text));
                1 + len
            }
            _ => first.len_utf8(),
        };
        line += rest[..len].matches('\n').count();
        rest = &rest[len..];
    }
    found
}

/// The text of a literal up to its closing quote, and the length of both.
fn literal(source: &str) -> (String, usize) {
    let (mut text, mut at) = (String::new(), 0);
    let next = |at: &mut usize| {
        let char = source[*at..].chars().next()?;
        *at += char.len_utf8();
        Some(char)
    };
    while let Some(char) = next(&mut at) {
        match char {
            '"' => break,
            '\\' => match next(&mut at) {
                Some('\n') => {
                    let behind = &source[at..];
                    at += behind.len() - behind.trim_start().len();
                }
                escaped => text.extend(escaped),
            },
            char => text.push(char),
        }
    }
    (text, at)
}

/// Whether there is a gap between two words of a text, which are not the label and the value of a
/// line.
fn has_gap(text: &str) -> bool {
    let gap = text.trim().find(GAP);
    gap.is_some_and(|at| text.trim()[..at].len() > 12)
}

#[test]
fn no_message_has_a_gap() {
    let crates = ["block", "storage", "devices", "vmm", "walvisor"];
    let sources = crates
        .map(|name| files(&top().join(name).join("src")))
        .concat();
    let sources = sources.iter().filter(|path| ends_with(path, "rs"));
    let (mut seen, mut gaps) = (0, Vec::new());
    for file in sources {
        for (line, text) in literals(&fs::read_to_string(file).unwrap()) {
            seen += 1;
            if has_gap(&text) {
                gaps.push(format!("{}:{line}: {text}", file.display()));
            }
        }
    }
    assert!(seen > 1000, "{seen} literals");
    assert!(gaps.is_empty(), "{}", gaps.join("\n"));
}

#[test]
fn a_lost_backslash_is_noticed() {
    let lost = "f(\"there is no room for another time;\n                 make some\")";
    let whole = "f(\"there is no room for another time; \\\n                 make some\")";
    let table = "say!(\"history         {}\", '\"', \"a\")";
    let gaps = |source| {
        literals(source)
            .iter()
            .filter(|(_, text)| has_gap(text))
            .count()
    };
    assert_eq!([lost, whole, table].map(gaps), [1, 0, 0]);
    assert_eq!(literals(table).len(), 2);
    assert_eq!(gaps(&lost.replace('\n', "")), 1);
}
