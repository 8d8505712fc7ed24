//! An ext4 that debugfs(8) reads, where the kernel may not mount it or should not.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Component, Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::io::{FdFlags, fcntl_setfd};

use super::output::NewFile;
use super::{FoundFile, not_a_file, not_there, shown};

/// Where it may be, for users whose PATH has no directories of administration.
const PATHS: &str = "/usr/local/sbin:/usr/sbin:/sbin";

/// An ext4 in a file.
pub(super) struct Debugfs {
    /// A descriptor that the program inherits.
    disk: File,
}

impl Debugfs {
    /// Replays the journal of the ext4 in a file.
    pub(super) fn new(file: &File) -> Result<Self, String> {
        let failed = |error| format!("can't pass a file to debugfs: {error}");
        let debugfs = Self {
            disk: inheritable(file).map_err(failed)?,
        };
        let (_, replayed) = debugfs.run(&["-w"], "journal_run")?;
        let (told, why) = debugfs.run(&[], "show_super_stats -h")?;
        let mut lines = told.lines();
        match lines.find(|line| line.starts_with("Filesystem features:")) {
            None => Err(format!("debugfs can't read its ext4: {why}")),
            Some(features) if features.contains("needs_recovery") => Err(format!(
                "debugfs can't replay the journal of its ext4: {replayed}"
            )),
            Some(_) => Ok(debugfs),
        }
    }

    /// Copies a file.
    pub(super) fn copy(&self, path: &Path, new: &Path) -> Result<FoundFile, String> {
        let whole: PathBuf = [Component::RootDir]
            .into_iter()
            .chain(path.components())
            .collect();
        let Some(stat) = self.stat(&whole)? else {
            for nearest in whole.ancestors().skip(1) {
                if self.stat(nearest)?.is_some() {
                    return Err(not_there(path, nearest, &[]));
                }
            }
            return Err(not_there(path, Path::new("/"), &[]));
        };
        let what = match after(&stat, "Type:") {
            Some("regular") => None,
            Some("directory") => Some("a directory"),
            Some("symlink") => Some("a symbolic link, which debugfs does not follow"),
            _ => Some("not a regular file"),
        };
        if let Some(what) = what {
            return Err(not_a_file(path, what));
        }
        let number = |key| after(&stat, key).and_then(|text| text.parse().ok());
        let mode = after(&stat, "Mode:").and_then(|text| u32::from_str_radix(text, 8).ok());
        let (Some(size), Some(mode)) = (number("Size:"), mode) else {
            return Err(format!("debugfs says what is not understood: {stat}"));
        };
        let found = FoundFile {
            size,
            mode: mode & 0o777,
            uid: number("User:").unwrap_or(0) as u32,
            gid: number("Group:").unwrap_or(0) as u32,
        };
        let made = NewFile::create(new, found.mode)?;
        let target =
            inheritable(made.file()).map_err(|error| format!("{}: {error}", new.display()))?;
        let dump = format!(
            "dump {} /proc/self/fd/{}",
            word(&whole)?,
            target.as_raw_fd()
        );
        self.run(&[], &dump)?;
        let copied = made.file().metadata();
        let copied = copied
            .map_err(|error| format!("{}: {error}", new.display()))?
            .len();
        if copied != size {
            return Err(format!(
                "{}: debugfs copied {copied} of {size} bytes of {}",
                new.display(),
                shown(path)
            ));
        }
        made.publish()?;
        Ok(found)
    }

    /// What debugfs tells of a path; `None`: it is not there.
    fn stat(&self, path: &Path) -> Result<Option<String>, String> {
        let (stat, _) = self.run(&[], &format!("stat {}", word(path)?))?;
        Ok(stat.contains("Type:").then_some(stat))
    }

    /// Runs debugfs with one request, and returns its stdout and the last line of its stderr. Its
    /// status tells nothing of the request.
    fn run(&self, options: &[&str], request: &str) -> Result<(String, String), String> {
        let disk = format!("/proc/self/fd/{}", self.disk.as_raw_fd());
        let paths = std::env::var("PATH").unwrap_or_default();
        let mut command = Command::new("debugfs");
        command.args(options).args(["-R", request, &disk]);
        command
            .env("PATH", format!("{paths}:{PATHS}"))
            .env("DEBUGFS_PAGER", "cat")
            .env("LC_ALL", "C")
            .stdin(Stdio::null());
        let output = command.output().map_err(|error| {
            format!(
                "without a mount, which needs root and loop devices, it takes debugfs of the \
                 package e2fsprogs: {error}"
            )
        })?;
        let [out, errors] = [output.stdout, output.stderr]
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
        // The line before "Filesystem not open" says why.
        let mut last = errors.lines().rev();
        let last = last
            .find(|line| !line.contains("not open"))
            .unwrap_or_default()
            .escape_debug()
            .to_string();
        if output.status.success() {
            Ok((out, last))
        } else {
            Err(format!("debugfs failed ({}): {last}", output.status))
        }
    }
}

/// The same open file, by a descriptor that child processes inherit.
fn inheritable(file: &File) -> std::io::Result<File> {
    let file = file.try_clone()?;
    fcntl_setfd(file.as_fd(), FdFlags::empty())?;
    Ok(file)
}

/// A path as a word of debugfs.
fn word(path: &Path) -> Result<String, String> {
    match path.to_str() {
        Some(text) if !text.contains(['\n', '\r']) => {
            Ok(format!("\"{}\"", text.replace('"', "\"\"")))
        }
        _ => Err(format!("debugfs takes no such name: {}", shown(path))),
    }
}

/// The word after `key`.
fn after<'a>(text: &'a str, key: &str) -> Option<&'a str> {
    let mut words = text.split_once(key)?.1.split_whitespace();
    words.next()
}
