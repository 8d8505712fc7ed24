//! Checks that the code and the tests that CONFORMANCE.md names exist.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// The Rust sources below `directory`.
fn sources(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).expect("a directory").flatten() {
        let path = entry.path();
        if path.is_dir() {
            found.extend(sources(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
    found
}

/// The functions that a source defines.
fn functions(path: &Path) -> HashSet<String> {
    let text = fs::read_to_string(path).expect("a source");
    let name = |rest: &str| {
        let end = |character: char| !character.is_alphanumeric() && character != '_';
        rest.split(end).next().unwrap_or_default().to_owned()
    };
    text.lines()
        .filter_map(|line| line.split_once("fn ").map(|(_, rest)| name(rest)))
        .collect()
}

/// The rows of the page's tables: section, requirement, code, test.
fn rows() -> Vec<[String; 4]> {
    let page = fs::read_to_string(Path::new(ROOT).join("CONFORMANCE.md")).expect("the page");
    page.lines()
        .filter(|line| line.starts_with("| ") && line.contains('`') && !line.contains("---"))
        .map(|line| {
            let cells = line.trim_matches('|').split('|');
            let cells: Vec<String> = cells.map(|cell| cell.trim().to_owned()).collect();
            cells.try_into().expect("four cells in a row")
        })
        .collect()
}

#[test]
fn every_requirement_names_code_that_exists() {
    let rows = rows();
    assert!(rows.len() >= 80, "{} rows", rows.len());
    for [section, requirement, code, _] in rows {
        let (file, function) = code
            .trim_matches('`')
            .split_once(": ")
            .unwrap_or_else(|| panic!("{section}: no 'file: function' in {code}"));
        let path = Path::new(ROOT).join("src").join(file);
        assert!(path.is_file(), "{section} {requirement}: no {file}");
        let found = functions(&path).contains(function);
        assert!(found, "{section} {requirement}: no {function} in {file}");
    }
}

#[test]
fn every_requirement_names_a_test_that_exists() {
    let folders = [
        "tests/virtio_blk",
        "tests/virtio_net",
        "tests/virtio_scsi",
        "fuzz/tests",
        "../guest-images/guest/src/conformance",
        "src/block",
        "src/net",
    ];
    let mut tests = HashSet::new();
    for path in folders
        .map(|folder| sources(&Path::new(ROOT).join(folder)))
        .concat()
    {
        let module = path.file_stem().expect("a name").to_string_lossy();
        tests.extend(
            functions(&path)
                .iter()
                .map(|name| format!("{module}::{name}")),
        );
    }
    for [section, requirement, _, test] in rows() {
        let found = tests.contains(test.trim_matches('`'));
        assert!(found, "{section} {requirement}: no test {test}");
    }
}
