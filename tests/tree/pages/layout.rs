//! docs/layout.md sends somebody new to the folder that does a job: what it names is there. Each
//! test of `tests/` is built.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{ends_with, files, top};

const PAGE: &str = include_str!("../../../docs/layout.md");

/// Whether a source file beneath the folder defines the item.
fn defines(folder: &Path, item: &str) -> bool {
    files(folder).iter().any(|path| {
        let text = fs::read_to_string(path).unwrap_or_default();
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
    let rows = PAGE.lines().filter(|line| line.starts_with("| ")).skip(1);
    let mut jobs = 0;
    for row in rows {
        let named: Vec<_> = row.rsplit('|').skip(1).take(2).collect();
        let [item, folder] = [named[0], named[1]].map(|cell| cell.trim().trim_matches('`'));
        assert!(
            defines(&top().join(folder), item),
            "{row}: no {item} in {folder}"
        );
        jobs += 1;
    }
    assert!(jobs >= 20, "{jobs} jobs");
}

/// The files in a folder of tests that are tests of their own.
fn tests_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    let of_entry = |path: PathBuf| {
        if path.is_dir() {
            path.join("main.rs")
        } else {
            path
        }
    };
    let tests = paths.map(of_entry);
    let tests = tests.filter(|path| path.is_file() && ends_with(path, "rs"));
    tests.map(|path| path.display().to_string()).collect()
}

/// Cargo does not look into these folders by itself.
#[test]
fn each_test_has_its_lines_in_the_manifest() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    let manifest = include_str!("../../Cargo.toml");
    let named = manifest
        .lines()
        .filter_map(|line| line.strip_prefix("path = \""));
    let mut named: Vec<_> = named
        .map(|path| tests.join(path.trim_end_matches('"')).display().to_string())
        .collect();
    let folders = named.iter().map(|path| {
        let inside = Path::new(path).strip_prefix(tests).unwrap();
        tests.join(inside.iter().next().unwrap())
    });
    let folders: BTreeSet<_> = folders.collect();
    let mut there: Vec<_> = folders.iter().flat_map(|folder| tests_in(folder)).collect();
    named.sort();
    there.sort();
    assert_eq!(named, there);
}
