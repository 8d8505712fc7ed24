//! What the integration tests share: running a job with Linux guests, or telling why this machine cannot.

mod daemon;
pub mod vhost_user_client;

use std::fs::File;
use std::path::PathBuf;

pub use daemon::{Daemon, binary, succeed, walvisor};
use rustix::fs::{Mode, OFlags, open};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
pub use walvisor_guest_images::leash;
use walvisor_guest_images::{
    Cache, GuestImages, Job, Machine, Outcome, Reporter, install_missing, obstacle, walvisor_binary,
};

/// Installs what a test needs. `false`: that cannot be, and `skipped: why` was printed.
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

/// Installs Python with its whole library, if need be. `false`: that cannot be, and `skipped: why` was printed.
#[must_use]
pub fn have_python() -> bool {
    // An interpreter may be there without its library; with that comes this program.
    have("pydoc3", "python3")
}

/// A pseudo-terminal: the side of the person at it, and the side of the program.
///
/// # Panics
/// This machine has none to give.
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

/// What guests of Linux boot.
///
/// # Panics
/// It cannot be built.
#[must_use]
pub fn images() -> GuestImages {
    let cache = Cache::open(None).expect("the image cache");
    GuestImages::ensure(&cache, &Reporter::quiet(None)).expect("the guest's images")
}

/// Runs `script` (with further `files`) as a job with the `walvisor` of this source tree. Prints the console, which
/// the test harness shows if the test fails. `None`: this machine cannot, and `skipped: why` was printed.
///
/// # Panics
/// The images or `walvisor` cannot be built, or the machine cannot be started.
#[must_use]
pub fn run_linux_job(script: &str, files: &[(&str, &str)]) -> Option<Outcome> {
    run_on(Machine::choose().0, script, files)
}

/// The same in emulation, also where guests could run without: for scripts that use the Debian kernel that they run on
/// themselves, with its modules and devices.
///
/// # Panics
/// As [`run_linux_job`].
#[must_use]
pub fn run_emulated_job(script: &str, files: &[(&str, &str)]) -> Option<Outcome> {
    run_on(Machine::Nested, script, files)
}

/// What a job has said, line by line: its lines on the console that begin with `job: `, without that.
#[must_use]
pub fn said(outcome: &Outcome) -> Vec<&str> {
    let lines = outcome.console.lines();
    lines
        .filter_map(|line| line.strip_prefix("job: "))
        .collect()
}

fn run_on(machine: Machine, script: &str, files: &[(&str, &str)]) -> Option<Outcome> {
    if let Some(why) = obstacle() {
        println!("skipped: {why}");
        return None;
    }
    let walvisor = walvisor_binary("dev").expect("building walvisor");
    let mut job = Job::new(script, walvisor);
    for (name, content) in files {
        job = job.file(*name, *content);
    }
    let cache = Cache::open(None).expect("the image cache");
    // Kept on disk as well: a job that hangs has a console to look at.
    let name = std::thread::current()
        .name()
        .unwrap_or("job")
        .replace("::", "-");
    let log = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../target/{name}.log"));
    let reporter = Reporter::quiet(File::create(&log).ok());
    match job.run_on(machine, &cache, &reporter) {
        Ok(outcome) => {
            println!("{}", outcome.console);
            println!(
                "attempts given up because a guest hung or fell over: {}",
                outcome.hung_boots
            );
            Some(outcome)
        }
        Err(error) => panic!("{error}; console: {}", log.display()),
    }
}
