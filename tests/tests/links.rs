//! The targets of the links in the documentation pages exist.

use std::fs;
use std::path::{Path, PathBuf};

/// The pages below `folder`, except in build directories and hidden ones.
fn pages(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            pages(&path, found);
        } else if name.ends_with(".md") {
            found.push(path);
        }
    }
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

#[test]
fn links_lead_to_files_and_headings_that_are_there() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut found = Vec::new();
    pages(&root, &mut found);
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
