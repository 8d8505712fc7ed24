//! What is typed, and what the program prints then, word by word: the files `sessions/NAME.trycmd`
//! beside the tests. With `TRYCMD=overwrite` in the environment a test writes what is printed now
//! into its file.

use std::fs;
use std::os::unix::fs::symlink;
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::time::Duration;

use walvisor_testkit::process::program;

/// Runs each session of `sessions/NAME.trycmd`, beside the file of the calling test, in `dir`. It
/// must end with the status that the file has, and print the one line on stderr, or what succeeds
/// prints. The `variables` of the file stand for texts, and so does `[DIR]` for the directory.
#[track_caller]
pub fn run_sessions<const N: usize>(
    name: &str,
    dir: &Path,
    variables: [(&'static str, String); N],
) {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let beside = Path::new(Location::caller().file()).with_file_name("sessions");
    let source = top.join(beside).join(name).with_extension("trycmd");
    let text = fs::read_to_string(&source).expect("the sessions");
    for session in text.split("\n$ ").skip(1) {
        let lines: Vec<_> = session.lines().take(4).collect();
        if lines[1].starts_with("? ") {
            assert!(lines[2].starts_with("walvisor: "), "{session}");
            assert!(lines[3].is_empty(), "not one line: {session}");
        }
    }
    // A session runs in the directory that has the name of its file.
    let place = tempfile::tempdir().expect("a directory");
    let file: PathBuf = place.path().join(name).with_extension("trycmd");
    symlink(source, &file).expect("a link");
    symlink(dir, file.with_extension("in")).expect("a link");
    let cases = trycmd::TestCases::new();
    let streams = concat!(env!("CARGO_MANIFEST_DIR"), "/scripts/walvisor-streams");
    cases
        .register_bin("walvisor", Path::new(streams))
        .env("WALVISOR", program().display().to_string())
        .timeout(Duration::from_secs(120));
    let directory = ("[DIR]", dir.display().to_string());
    for (name, text) in variables.into_iter().chain([directory]) {
        cases.insert_var(name, text).expect("a name in brackets");
    }
    cases.case(&file).run();
}
