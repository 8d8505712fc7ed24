//! Copies of disks and logs, with what belongs to them, and who owns files.

use std::fs;
use std::os::unix::fs::chown;
use std::path::Path;

/// The extended attribute with an image's mark.
const ATTRIBUTE: &str = "user.walvisor.disk";

/// The text of the mark of an image, if it has one.
#[must_use]
pub fn mark(image: &Path) -> Option<String> {
    let mut text = [0; 256];
    let len = rustix::fs::getxattr(image, ATTRIBUTE, &mut text[..]).ok()?;
    Some(String::from_utf8(text[..len].to_vec()).expect("a text"))
}

/// Copies an image with its mark, as `cp -a` does. (Not by `cp`: between fork and exec, a child
/// would hold the locks of every test in this process.)
pub fn copy_image(from: &Path, to: &Path) {
    fs::copy(from, to).expect("a copy");
    if let Some(mark) = mark(from) {
        let flags = rustix::fs::XattrFlags::empty();
        rustix::fs::setxattr(to, ATTRIBUTE, mark.as_bytes(), flags).expect("a mark");
    }
}

/// Copies the files of a log to an empty directory, as a crash would leave them. No checkpoint may
/// run.
pub fn copy_log(from: &Path, to: &Path) {
    fs::copy(from.join("control"), to.join("control")).expect("a copy");
    for entry in fs::read_dir(from).expect("a log") {
        let name = entry.expect("a file").file_name();
        let text = name.to_str().expect("a text");
        if text.starts_with("segment") && !text.ends_with(".new") {
            fs::copy(from.join(&name), to.join(&name)).expect("a copy");
        }
    }
}

/// Gives a file, or a directory and all beneath it, to a user and the group of the same number.
#[track_caller]
pub fn give(path: &Path, user: u32) {
    chown(path, Some(user), Some(user)).expect("root");
    if path.is_dir() {
        for entry in fs::read_dir(path).expect("a directory") {
            give(&entry.expect("an entry").path(), user);
        }
    }
}
