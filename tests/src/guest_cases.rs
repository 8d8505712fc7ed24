//! Jobs with Linux guests, several of which share a machine.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;

use walvisor_guest_images::{
    Cache, GuestJob, JobOutcome, Machine, NewerKernel, Reporter, Result, obstacle,
};

use crate::binary;

/// A job that shares its machine with others, and what holds of its outcome.
pub struct GuestCase {
    /// Its name in `WALVISOR_GUESTS`.
    pub name: &'static str,
    /// The kernel of the machine, if not Debian 12's own.
    pub kernel: Option<NewerKernel>,
    /// Whether it is always emulated: the script needs the modules and devices of the kernel that it
    /// itself runs on, or changes them.
    pub emulated: bool,
    /// Makes the job. `None`: it cannot run here, and `skipped: why` is printed.
    pub job: fn() -> Option<GuestJob>,
    /// Panics if something is wrong.
    pub check: fn(&JobOutcome),
}

/// A job with the `walvisor` of this source tree.
#[must_use]
pub fn guest_job<C: AsRef<[u8]>>(script: &str, files: &[(&str, C)]) -> GuestJob {
    let job = GuestJob::new(script, binary());
    let files = files.iter();
    files.fold(job, |job, (name, content)| {
        job.file(*name, content.as_ref())
    })
}

/// Runs a job of its own. Prints the console, which the test harness shows if the test fails.
/// Returns `None` if this machine cannot run it, after printing `skipped: why`.
#[must_use]
pub fn run_job(job: &GuestJob) -> Option<JobOutcome> {
    if let Some(why) = obstacle() {
        println!("skipped: {why}");
        return None;
    }
    let ends = run(std::slice::from_ref(job), Machine::choose().0);
    let outcome = ends.into_iter().next().expect("a job");
    let outcome =
        outcome.unwrap_or_else(|error| panic!("{error}; console: {}", console_log().display()));
    show(&outcome);
    Some(outcome)
}

/// Runs the cases for this kernel, or those of them that `WALVISOR_GUESTS` names, checks the outcome
/// of each, and names those that have failed.
pub fn run_cases(cases: &[GuestCase], kernel: Option<NewerKernel>) {
    if let Some(why) = obstacle() {
        println!("skipped: {why}");
        return;
    }
    let wanted = std::env::var("WALVISOR_GUESTS").ok();
    let wanted: Option<Vec<&str>> = wanted.as_deref().map(|names| names.split(',').collect());
    for name in wanted.iter().flatten() {
        let known: Vec<_> = cases.iter().map(|case| case.name).collect();
        assert!(known.contains(name), "no {name} in {known:?}");
    }
    let is_wanted = |case: &&GuestCase| {
        let named = wanted
            .as_ref()
            .is_none_or(|names| names.contains(&case.name));
        case.kernel == kernel && named
    };
    let chosen = Machine::choose().0;
    let mut failed = Vec::new();
    for machine in [Machine::Direct, Machine::Nested] {
        let here = |case: &&GuestCase| {
            let own = if case.emulated {
                Machine::Nested
            } else {
                chosen
            };
            own == machine
        };
        let mut jobs = Vec::new();
        let mut with_jobs = Vec::new();
        for case in cases.iter().filter(is_wanted).filter(here) {
            if let Some(mut job) = (case.job)() {
                job.kernel = kernel;
                jobs.push(job);
                with_jobs.push(case);
            }
        }
        if jobs.is_empty() {
            continue;
        }
        for (case, end) in with_jobs.into_iter().zip(run(&jobs, machine)) {
            println!("\n=== {} ===", case.name);
            let passed = match end {
                Ok(outcome) => {
                    show(&outcome);
                    catch_unwind(AssertUnwindSafe(|| (case.check)(&outcome))).is_ok()
                }
                Err(error) => {
                    println!("{error}; console: {}", console_log().display());
                    false
                }
            };
            if !passed {
                failed.push(case.name);
            }
        }
    }
    assert!(failed.is_empty(), "failed: {}", failed.join(", "));
}

/// Runs the jobs, those of one machine after each other.
fn run(jobs: &[GuestJob], machine: Machine) -> Vec<Result<JobOutcome>> {
    let cache = Cache::open(None).expect("the image cache");
    // The console goes to a file as well, so that it can be read while a job hangs.
    let log = console_log();
    let reporter = Reporter::quiet(File::create(&log).ok());
    GuestJob::run_all(jobs, machine, &cache, &reporter)
        .unwrap_or_else(|error| panic!("{error}; console: {}", log.display()))
}

fn console_log() -> PathBuf {
    let thread = std::thread::current();
    let name = thread.name().unwrap_or("job").replace("::", "-");
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../target/{name}.log"))
}

fn show(outcome: &JobOutcome) {
    println!("{}", outcome.console);
    println!(
        "attempts given up because a guest hung or crashed: {}",
        outcome.hung_boots
    );
}
