//! Runs of `walvisor-bench`, its reports and their figures. The tests check counts, and no times but
//! those that a delay makes impossible.

mod commit;
mod database;
mod drbd;
mod fsync;
mod linux;
mod notify;
mod store;
mod sustained;
mod tables;

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Output};

use rustix::process::geteuid;
use serde_json::Value;
use walvisor_guest_images::program;
use walvisor_tests::{binary, have, have_all};

/// `walvisor-bench` with these arguments, in `dir`.
pub fn bench(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_walvisor-bench"));
    command
        .args(arguments)
        .current_dir(dir)
        .env("WALVISOR", binary());
    command
}

/// The report that a run printed, which must have succeeded.
#[track_caller]
pub fn report(output: &Output) -> Value {
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_slice(&output.stdout).expect("JSON, and nothing else")
}

/// The rows of the section with this key.
#[track_caller]
pub fn rows<'a>(report: &'a Value, key: &str) -> &'a [Value] {
    let mut sections = report["sections"].as_array().unwrap().iter();
    let section = sections.find(|section| section["key"] == key);
    let section = section.unwrap_or_else(|| panic!("no {key}: {report}"));
    section["rows"].as_array().unwrap()
}

/// The texts of a column.
pub fn texts<'a>(rows: &'a [Value], key: &str) -> Vec<&'a str> {
    rows.iter().map(|row| row[key].as_str().unwrap()).collect()
}

/// A figure of a row: the median if there are several rounds.
#[track_caller]
pub fn number(row: &Value, key: &str) -> f64 {
    let cell = &row[key];
    let value = cell.as_f64().or_else(|| cell["median"].as_f64());
    value.unwrap_or_else(|| panic!("{key}: {row}"))
}

/// Builds the program that runs guests, and returns the search path with its directory.
fn path_with_guest_images() -> OsString {
    let built = program("walvisor-guest-images", "dev").expect("the program that makes guests");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories = std::env::split_paths(&path);
    let own = built.parent().unwrap().to_owned();
    std::env::join_paths([own].into_iter().chain(directories)).unwrap()
}

/// The report of a quick run with real guests. Returns `None` if a program of `needs` cannot be
/// installed, after printing why.
pub fn compare(arguments: &str, needs: &[(&str, &str)]) -> Option<Value> {
    let arguments: Vec<&str> = arguments.split(' ').collect();
    have_all(needs).then(|| run(&arguments, Some(path_with_guest_images())))
}

/// The report of a quick run without guests.
#[track_caller]
pub fn measure(arguments: &[&str]) -> Value {
    run(arguments, None)
}

/// The report of a quick run, which leaves nothing behind. `path`: where it finds programs.
#[track_caller]
fn run(arguments: &[&str], path: Option<OsString>) -> Value {
    let directory = tempfile::tempdir().unwrap();
    let mut command = bench(directory.path(), arguments);
    command.args(["--quick", "--json"]);
    command.envs(path.map(|path| ("PATH", path)));
    let output = command.output().unwrap();
    // The errors show how often an emulated machine crashed, if it did.
    println!("{}", String::from_utf8_lossy(&output.stderr));
    let left = std::fs::read_dir(directory.path()).unwrap().count();
    assert_eq!(left, 0, "something is left behind");
    report(&output)
}

/// Whether file systems can be mounted on what an NBD server serves. Prints why if they can't.
pub fn can_mount_volumes() -> bool {
    let devices = ["/dev/fuse", "/dev/loop-control"];
    if !geteuid().is_root() || !devices.iter().all(|device| Path::new(device).exists()) {
        println!("skipped: mounting a volume needs root and {devices:?}");
        return false;
    }
    have("nbdkit", "nbdkit") && have("nbdfuse", "libnbd-bin")
}

#[test]
fn what_cannot_be_done_is_told_in_one_line_and_no_table_printed() {
    let dir = tempfile::tempdir().unwrap();
    for (arguments, status, told) in [
        (
            "commit --html no/page.html",
            1,
            "no/page.html: cannot write the page: ",
        ),
        ("commit --dir no", 1, "no: can't work there"),
        ("commit --only everything", 2, "invalid value 'everything'"),
        ("drbd --only everything", 2, "invalid value 'everything'"),
        ("drbd --dir .", 1, " is missing: apt-get install "),
        (
            "sustained --only everything",
            2,
            "invalid value 'everything'",
        ),
        ("sustained --size 5000", 2, "not a multiple of 1M"),
        (
            "sustained --dir .",
            1,
            "qemu-nbd is missing: apt-get install ",
        ),
        (
            "store commit --dir /nonexistent/place",
            1,
            "/nonexistent/place",
        ),
        ("store commit --clients 0", 2, "--clients"),
        ("store commit --clients 8 --commits 7", 2, "--commits 7"),
        ("store commit --clients 2 --disks 3", 2, "--disks 3"),
        (
            "store commit --sync-latency-us 2000000",
            2,
            "--sync-latency-us",
        ),
        ("store commit --group maybe", 2, "--group"),
        (
            "store commit --operations-per-second 0",
            2,
            "--operations-per-second",
        ),
        ("store append --block 100", 2, "--block 100"),
        ("store append --bytes 1K", 2, "--bytes 1024"),
        ("store read --bytes 10", 2, "--bytes 10"),
        ("store checkpoint --block 6K", 2, "--block 6144"),
        ("store recover --bytes 1000001", 2, "--bytes 1000001"),
        ("store load --bytes 4097", 2, "--bytes 4097"),
    ] {
        let arguments: Vec<&str> = arguments.split(' ').collect();
        let mut command = bench(dir.path(), &arguments);
        let output = command.env("PATH", "/nowhere").output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {error}");
        let one_line = error.lines().count() == 1;
        assert!(error.contains(told) && one_line, "{arguments:?}: {error}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}
