//! The shared part of the integration tests: they run jobs with Linux guests, or print why this
//! machine cannot. What returns no `Result` panics if it fails: the test has failed then.

mod daemon;
mod guest_cases;
mod loop_fs;
pub mod medium_file;
pub mod medium_fs;
pub mod postgresql;
mod qemu_nbd;
mod sessions;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

pub use daemon::{binary, serve, succeed, walvisor};
pub use guest_cases::{GuestCase, guest_job, run_cases, run_job};
pub use loop_fs::LoopFs;
pub use qemu_nbd::QemuNbd;
use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
pub use sessions::run_sessions;
use walvisor_guest_images::{
    Cache, GuestImages, JobOutcome, Metrics, NewerKernel, Reporter, UserMode, install_missing,
};
use walvisor_testkit::Process;

/// Functions of scripts that set the wall clock of their machine.
pub const CLOCK_FUNCTIONS: &str = include_str!("../scripts/clock-functions.sh");

/// Installs a program that a test needs. Returns `false` if that fails, after printing
/// `skipped: why`.
#[must_use]
pub fn have(program: &str, package: &str) -> bool {
    match install_missing(&[(program, package)], &Reporter::quiet(None)) {
        Ok(()) => true,
        Err(error) => {
            println!("skipped: no {program}, and {package} cannot be installed: {error}");
            false
        }
    }
}

/// As [`have`], for several programs and their packages.
#[must_use]
pub fn have_all(needs: &[(&str, &str)]) -> bool {
    needs
        .iter()
        .all(|(program, package)| have(program, package))
}

/// Installs passt, and checks that this machine has the default route that it takes its addresses
/// from. Returns `false` if one of these fails, after printing `skipped: why`.
#[must_use]
pub fn have_passt() -> bool {
    let routes = fs::read_to_string("/proc/net/route").unwrap_or_default();
    let is_default = |line: &str| line.split_whitespace().nth(1) == Some("00000000");
    if !routes.lines().any(is_default) {
        println!(
            "skipped: this machine has no default route, and passt takes its addresses from one"
        );
        return false;
    }
    have("passt", "passt")
}

/// Runs `script` in user-mode Linux with these modules, in a new folder `files` of `dir`. $WALVISOR
/// is the `walvisor` of this source tree, and $PLACE is `dir`, below which all modules are. Returns
/// the lines that it prints after `guest: `. Prints the end of the console, which the test harness
/// shows if the test fails.
#[must_use]
pub fn run_in_user_mode(dir: &Path, modules: &[&str], script: &str) -> Vec<String> {
    fs::create_dir(dir.join("files")).unwrap();
    let script = format!(
        "WALVISOR='{}' PLACE='{}'\nmkdir files && mount -t hostfs none files -o \"$PLACE/files\" && cd files || exit\n{script}",
        binary().display(),
        dir.display(),
    );
    let guest = UserMode {
        modules: modules.iter().map(|&name| name.to_owned()).collect(),
        ..UserMode::default()
    };
    let mut guest = guest.boot_here(dir, &script).unwrap();
    let mut lines = Vec::new();
    loop {
        let line = guest.wait_for("guest: ").unwrap();
        match line.strip_prefix("guest: ") {
            Some(line) if line != "end" => lines.push(line.to_owned()),
            _ => break,
        }
    }
    println!("{}", guest.console());
    guest.end().unwrap();
    lines
}

/// The sum of a counter over all disks that the daemon `name` served. Its metrics are in `place`.
#[must_use]
pub fn sum_counter(place: &Path, name: &str, counter: &str) -> f64 {
    let text = fs::read_to_string(place.join(format!("{name}.prom"))).expect("metrics");
    let metrics = Metrics::parse(&text);
    metrics.value(counter).unwrap_or_default()
}

/// Installs Python with its whole library, if it is missing. Returns `false` if that fails, after
/// printing `skipped: why`.
#[must_use]
pub fn have_python() -> bool {
    // An interpreter may be installed without its library. The package with the library contains
    // this program.
    have("pydoc3", "python3")
}

/// What Prometheus' linter says about metrics, which is nothing if their names are good ones.
/// `promtool` must be installed.
#[must_use]
pub fn metrics_complaints(metrics: &str) -> String {
    let mut promtool = Command::new("promtool");
    let promtool = promtool.args(["check", "metrics"]);
    let mut promtool = Process::spawn(promtool.stdin(Stdio::piped()).stderr(Stdio::piped()));
    let mut stdin = promtool.stdin.take().expect("a pipe");
    stdin.write_all(metrics.as_bytes()).expect("it reads");
    drop(stdin);
    let complaints = promtool.errors();
    let status = promtool.wait().expect("it ends");
    if status.success() {
        complaints
    } else {
        format!("{status}: {complaints}")
    }
}

/// A pseudo-terminal: the side of the user, and the side of the program.
#[must_use]
pub fn terminal() -> (File, File) {
    let person = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
    grantpt(&person).unwrap();
    unlockpt(&person).unwrap();
    let path = ptsname(&person, Vec::new()).unwrap();
    let program = open(
        path,
        OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    (person.into(), program.unwrap().into())
}

/// The images that Linux guests boot.
#[must_use]
pub fn images() -> GuestImages {
    let cache = Cache::open(None).expect("the image cache");
    GuestImages::ensure(&cache, &Reporter::quiet(None)).expect("the guest's images")
}

/// The reader of logs that was written from the format's page. It takes a log, or a log, a snapshot,
/// a disk's number, its image, and where to write the disk as of the snapshot.
#[must_use]
pub fn second_reader() -> Command {
    let mut command = Command::new("python3");
    command.arg(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../storage/tests/format_reader.py"
    ));
    command
}

/// As [`images`], with a newer kernel.
#[must_use]
pub fn newer_images(kernel: NewerKernel) -> GuestImages {
    let cache = Cache::open(None).expect("the image cache");
    let images = GuestImages::ensure_newer(&cache, kernel, &Reporter::quiet(None));
    images.expect("the newer guest's images")
}

/// Makes the program of `scripts/NAME.c` in `directory`. It runs on a machine without libraries
/// too.
#[must_use]
pub fn compile(directory: &Path, name: &str) -> PathBuf {
    let program = directory.join(name);
    let built = Command::new("cc")
        .args(["-O1", "-s", "-static", "-o"])
        .arg(&program)
        .arg(format!("{}/scripts/{name}.c", env!("CARGO_MANIFEST_DIR")))
        .status();
    assert!(built.expect("cc starts").success(), "cc failed");
    program
}

/// The bytes of a file as text, for scripts that make it again with `base64 -d`.
#[must_use]
pub fn base64(file: &Path) -> String {
    let text = Command::new("base64").arg(file).output();
    String::from_utf8(text.expect("base64 starts").stdout).expect("text")
}

/// The guest's `script`, before which the guest gets the program of `scripts/NAME.c` as
/// `/bin/NAME`. It is compiled in `directory`.
#[must_use]
pub fn with_program(directory: &Path, name: &str, script: &str) -> String {
    let text = base64(&compile(directory, name));
    format!("base64 -d >/bin/{name} <<'END'\n{text}END\nchmod +x /bin/{name}\n{script}")
}

/// The rest of each line of the job's console that begins with `prefix`.
#[must_use]
pub fn told<'a>(outcome: &'a JobOutcome, prefix: &str) -> Vec<&'a str> {
    let lines = outcome.console.lines();
    let told = lines.filter_map(|line| line.strip_prefix(prefix));
    told.map(str::trim).collect()
}

/// What the job itself has told, after `job: `.
#[must_use]
pub fn job_lines(outcome: &JobOutcome) -> Vec<&str> {
    told(outcome, "job: ")
}

/// Checks that waits use the monotonic clock: the processor time of the same work is about the same
/// while the clock is set as before, and that of a period of rest is about none.
pub fn nothing_spun(ticks: &str) {
    println!("{ticks}");
    let numbers: Vec<u64> = ticks
        .split(' ')
        .filter_map(|word| word.parse().ok())
        .collect();
    let [quiet, stepped, idle_before, idle] = numbers[..] else {
        panic!("{ticks}");
    };
    // Both values are for the same work, and for `run` a period of rest. A spinning thread takes
    // 100 ticks a second, for 10 s.
    assert!(stepped <= 3 * quiet + 300, "{ticks}");
    // A spinning thread would take 300 ticks.
    assert!(idle <= idle_before + 100, "{ticks}");
}
