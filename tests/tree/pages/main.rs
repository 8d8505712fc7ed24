//! Pages name what is there, and messages for people have no gaps.

mod layout;
mod links;
mod messages;

use std::fs;
use std::path::{Path, PathBuf};

/// The project's directory.
fn top() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// The files below `folder`, except in build directories and hidden ones.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            found.extend(files(&path));
        } else {
            found.push(path);
        }
    }
    found
}

/// Whether a file's name ends with `.EXTENSION`.
fn ends_with(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|end| end == extension)
}
