//! docs/layout.md sends somebody new to the folder that does a job: what it names is there.

use std::fs;
use std::path::Path;

const PAGE: &str = include_str!("../../docs/layout.md");

/// Whether a source file beneath the folder defines the item.
fn defines(folder: &Path, item: &str) -> bool {
    fs::read_dir(folder).unwrap().any(|entry| {
        let path = entry.unwrap().path();
        if path.is_dir() {
            return defines(&path, item);
        }
        let text = fs::read_to_string(&path).unwrap_or_default();
        ["struct", "enum", "trait", "fn"].iter().any(|kind| {
            let definition = format!("{kind} {item}");
            text.match_indices(&definition).any(|(at, _)| {
                let next = text[at + definition.len()..].chars().next();
                next.is_some_and(|next| !next.is_alphanumeric() && next != '_')
            })
        })
    })
}

#[test]
fn each_job_is_where_the_page_says() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let rows = PAGE.lines().filter(|line| line.starts_with("| ")).skip(1);
    let mut jobs = 0;
    for row in rows {
        let named: Vec<_> = row.rsplit('|').skip(1).take(2).collect();
        let [item, folder] = [named[0], named[1]].map(|cell| cell.trim().trim_matches('`'));
        assert!(
            defines(&top.join(folder), item),
            "{row}: no {item} in {folder}"
        );
        jobs += 1;
    }
    assert!(jobs >= 20, "{jobs} jobs");
}
