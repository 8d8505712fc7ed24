//! What is typed, and what the program prints then, word by word: the files in `sessions/`. With `TRYCMD=overwrite` in the
//! environment a test writes what is printed now into its file.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The sessions of a file, each of which ends with a line of errors, and a directory for them.
pub struct Sessions {
    file: PathBuf,
    _dir: tempfile::TempDir,
}

impl Sessions {
    pub fn new(name: &str) -> Self {
        let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/run/sessions");
        let source = here.join(name).with_extension("trycmd");
        for session in fs::read_to_string(&source).unwrap().split("\n$ ").skip(1) {
            let printed = session.split("\n\n").next().unwrap();
            let lines: Vec<_> = printed.lines().collect();
            assert_eq!(lines.len(), 3, "typed, status, one line: {printed}");
            assert!(lines[2].starts_with("walvisor: "), "{printed}");
        }
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(name).with_extension("trycmd");
        symlink(source, &file).unwrap();
        fs::create_dir(file.with_extension("in")).unwrap();
        Self { file, _dir: dir }
    }

    /// Where they run.
    pub fn dir(&self) -> PathBuf {
        self.file.with_extension("in")
    }

    /// Runs them, with texts in place of variables.
    pub fn run<const N: usize>(&self, variables: [(&'static str, String); N]) {
        let cases = trycmd::TestCases::new();
        let marks_streams = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/run/sessions/walvisor");
        cases
            .register_bin("walvisor", Path::new(marks_streams))
            .env("WALVISOR", env!("CARGO_BIN_EXE_walvisor"))
            .timeout(Duration::from_secs(120));
        for (name, text) in variables {
            cases.insert_var(name, text).unwrap();
        }
        cases.case(&self.file).run();
    }
}
