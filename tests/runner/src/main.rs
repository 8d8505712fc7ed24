//! Runs each test of the workspace in a process of its own: several at a time, each with a limit.
//!
//! ```text
//! walvisor-test-runner [--tier test|guests|all] [--jobs N] [--limit SECONDS] [--shuffle SEED]
//!                      [--only ID] [--skip ID] [WORD ...]
//! ```
//!
//! The tier is `test`, or `all` if something names tests. A test's ID is `PACKAGE/TARGET/PATH`, such
//! as `storage/lib/log::ring::tests::a_ring_wraps`. `--only` and `--skip` take the beginning of an
//! ID and may be repeated; a WORD is any part of it.
//!
//! A process of its own shares nothing with other tests, may crash alone, and can be ended alone.
//! Whoever ends a test for its limit first sees what its threads do, and what its daemons have
//! written. A process that outlives its test makes the test fail.
//!
//! The longest tests start first, as the last run has timed them; `--shuffle` starts them in
//! another order, which SEED repeats. `target/tests` has a file with the output of each test, and
//! `results.txt`: status, seconds and ID of each.

mod limit;
mod processes;
mod report;
mod targets;
mod tiers;

use std::collections::VecDeque;
use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, ExitCode, ExitStatus, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use crate::limit::End;
use crate::processes::MARK;
use crate::report::{Report, TestResult, Verdict};
use crate::targets::Test;
use crate::tiers::Tier;

/// What the command line asks for.
struct Options {
    tier: Option<Tier>,
    /// Tests at a time.
    jobs: usize,
    /// What a test may take.
    limit: Duration,
    /// The seed of the order.
    shuffle: Option<u64>,
    only: Vec<String>,
    skip: Vec<String>,
    words: Vec<String>,
}

impl Options {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let mut options = Self {
            tier: None,
            jobs: 2 * cores,
            limit: Duration::from_secs(300),
            shuffle: None,
            only: Vec::new(),
            skip: Vec::new(),
            words: Vec::new(),
        };
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word}: its value is missing"));
            let number = |text: String| {
                let number = text.parse::<u64>().ok().filter(|&number| number > 0);
                number.ok_or(format!("{word} {text}: give a whole number above 0"))
            };
            match word.as_str() {
                "--tier" => options.tier = Some(Tier::parse(&value()?)?),
                "--jobs" => options.jobs = usize::try_from(number(value()?)?).unwrap_or(usize::MAX),
                "--limit" => options.limit = Duration::from_secs(number(value()?)?),
                "--shuffle" => options.shuffle = Some(number(value()?)?),
                "--only" => options.only.push(value()?),
                "--skip" => options.skip.push(value()?),
                _ if word.starts_with('-') => return Err(format!("{word}: no such option")),
                _ => options.words.push(word),
            }
        }
        Ok(options)
    }

    fn selects(&self, id: &str) -> bool {
        let names_some = !self.only.is_empty() || !self.words.is_empty();
        let usual = if names_some { Tier::All } else { Tier::Test };
        let begins = |starts: &[String]| starts.iter().any(|start| id.starts_with(start));
        self.tier.unwrap_or(usual).has(id)
            && (self.only.is_empty() || begins(&self.only))
            && !begins(&self.skip)
            && (self.words.is_empty() || self.words.iter().any(|word| id.contains(word)))
    }
}

fn main() -> ExitCode {
    let done = Options::parse(std::env::args().skip(1)).and_then(|options| run(&options));
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(why) => {
            eprintln!("walvisor-test-runner: {why}");
            ExitCode::from(2)
        }
    }
}

/// Builds, runs and reports. Returns whether all tests have passed.
fn run(options: &Options) -> Result<bool, String> {
    processes::adopt_orphans().map_err(|error| format!("cannot adopt orphans: {error}"))?;
    let built = targets::build()?;
    let began = Instant::now();
    let mut tests: Vec<Test> = built.tests()?;
    for start in tiers::GUESTS {
        if !tests.iter().any(|test| test.id.starts_with(start)) {
            return Err(format!(
                "tests/runner/src/tiers.rs: no test begins with {start}"
            ));
        }
    }
    for start in &options.only {
        if !tests.iter().any(|test| test.id.starts_with(start)) {
            return Err(format!("--only {start}: no test begins with it"));
        }
    }
    tests.retain(|test| options.selects(&test.id));
    if tests.is_empty() {
        return Err("no test has such an ID".to_owned());
    }
    let place = built.target_directory.join("tests");
    let results = place.join("results.txt");
    order(&mut tests, options.shuffle, &report::read_times(&results));
    // The outputs of an earlier run would pass for those of this one.
    let outputs = place.join("output");
    let _ = fs::remove_dir_all(&outputs);
    fs::create_dir_all(&outputs).map_err(|error| format!("{}: {error}", outputs.display()))?;

    let programs = built.target_directory.join("debug");
    let report = Mutex::new(Report::new(tests.len()));
    let queue = Mutex::new(VecDeque::from(tests));
    let next = || queue.lock().expect("no panic").pop_front();
    thread::scope(|scope| {
        for _ in 0..options.jobs {
            scope.spawn(|| {
                while let Some(test) = next() {
                    let result = run_test(&test, options.limit, &outputs, &programs);
                    report.lock().expect("no panic").add(result);
                }
            });
        }
    });
    let mut report = report.into_inner().expect("no panic");
    report.left_over = processes::end_orphans();
    report
        .write_results(&results)
        .map_err(|error| format!("{}: {error}", results.display()))?;
    report.print(began.elapsed());
    Ok(report.is_green())
}

/// Longest first; a test that has no time yet counts as a long one. With a seed: any order.
fn order(tests: &mut [Test], seed: Option<u64>, times: &report::Times) {
    let Some(mut state) = seed else {
        let time = |test: &Test| {
            times
                .get(&test.id)
                .copied()
                .unwrap_or(Duration::from_secs(5))
        };
        tests.sort_by_cached_key(|test| std::cmp::Reverse(time(test)));
        return;
    };
    for end in (1..tests.len()).rev() {
        // Splitmix64.
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let other = (mixed ^ (mixed >> 31)) % (end as u64 + 1);
        tests.swap(end, usize::try_from(other).expect("an index"));
    }
}

/// Runs a test, a second time only if the kernel has lost requests of the first one.
fn run_test(test: &Test, limit: Duration, outputs: &Path, programs: &Path) -> TestResult {
    let output = outputs.join(format!(
        "{}.txt",
        test.id.replace('/', "-").replace("::", "-")
    ));
    let began = Instant::now();
    let mut attempt = attempt(test, limit, &output, programs);
    let retried = matches!(attempt, Ok((End::LostByKernel, _)));
    if retried {
        attempt = self::attempt(test, limit, &output, programs);
    }
    let took = began.elapsed();
    let mut text = String::from_utf8_lossy(&fs::read(&output).unwrap_or_default()).into_owned();
    let verdict = match attempt {
        Ok((End::Exited(status), left)) => {
            for line in &left {
                text += &format!("left over: {line}\n");
            }
            verdict(status, left.is_empty(), &text)
        }
        Ok((End::LostByKernel | End::OverLimit, _)) => Verdict::OverLimit,
        Err(error) => {
            text += &format!("{}: {error}\n", test.program.display());
            Verdict::Failed
        }
    };
    TestResult {
        id: test.id.clone(),
        verdict,
        took,
        retried,
        output: text,
    }
}

fn verdict(status: ExitStatus, alone: bool, output: &str) -> Verdict {
    if !status.success() || !alone {
        return Verdict::Failed;
    }
    // A test that ends its process with status 0 has not passed.
    if !output.contains("test result: ok. 1 passed") {
        return Verdict::Failed;
    }
    let skipped = output.lines().find(|line| line.starts_with("skipped: "));
    skipped.map_or(Verdict::Passed, |why| Verdict::Skipped(why.to_owned()))
}

/// How one attempt ends, and what has outlived it.
fn attempt(
    test: &Test,
    limit: Duration,
    output: &Path,
    programs: &Path,
) -> std::io::Result<(End, Vec<String>)> {
    let file = File::create(output)?;
    let mut child = Command::new(&test.program)
        .args([test.name.as_str(), "--exact", "--nocapture"])
        .current_dir(&test.directory)
        .env("CARGO_MANIFEST_DIR", &test.directory)
        .env("WALVISOR_BUILT", programs)
        .env(MARK, &test.id)
        .stdin(Stdio::null())
        .stdout(file.try_clone()?)
        .stderr(file.try_clone()?)
        .spawn()?;
    let end = limit::wait(&mut child, limit, file)?;
    Ok((end, processes::end_left(&test.id)))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn options(text: &str) -> Result<Options, String> {
        Options::parse(text.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn ids_are_selected_by_their_beginning_or_a_word() {
        let select = |text, id| options(text).map(|options| options.selects(id)).unwrap();
        for (text, expected) in [
            ("", false),
            ("--tier guests", true),
            ("--tier test jobs", false),
            ("--tier all", true),
            ("--only tests/guests_jobs", true),
            ("--only tests/media --only tests/guests_jobs", true),
            ("--only jobs", false),
            ("--skip tests/guests_jobs/one", false),
            ("jobs", true),
            ("media", false),
            ("media one", true),
        ] {
            assert_eq!(select(text, "tests/guests_jobs/one"), expected, "{text}");
        }
        for wrong in ["--jobs", "--jobs 0", "--limit x", "--fast", "--tier x"] {
            assert!(options(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_longest_and_the_unknown_start_first_and_a_seed_repeats_its_order() {
        let test = |id: &str| Test {
            id: id.to_owned(),
            name: String::new(),
            program: PathBuf::new(),
            directory: PathBuf::new(),
        };
        let ids = ["a", "b", "c", "d", "e", "f"];
        let ordered = |seed, times: &report::Times| {
            let mut tests: Vec<_> = ids.iter().map(|id| test(id)).collect();
            order(&mut tests, seed, times);
            tests.into_iter().map(|test| test.id).collect::<Vec<_>>()
        };
        let seconds = [("a", 1), ("b", 60), ("d", 2), ("e", 3), ("f", 4)];
        let times = seconds.map(|(id, seconds)| (id.to_owned(), Duration::from_secs(seconds)));
        let times = report::Times::from(times);
        assert_eq!(ordered(None, &times), ["b", "c", "f", "e", "d", "a"]);
        let shuffled = ordered(Some(7), &times);
        assert_eq!(ordered(Some(7), &times), shuffled);
        assert!((1..20).any(|seed| ordered(Some(seed), &times) != shuffled));
        let mut sorted = shuffled;
        sorted.sort();
        assert_eq!(sorted, ids);
    }

    #[test]
    fn a_test_that_cannot_run_counts_as_skipped() {
        let status = |code: i32| {
            let mut shell = Command::new("sh");
            shell
                .args(["-c", &format!("exit {code}")])
                .status()
                .unwrap()
        };
        let passed = "test result: ok. 1 passed; 0 failed";
        assert_eq!(verdict(status(0), true, passed), Verdict::Passed);
        let why = "skipped: no KVM";
        let skipped = Verdict::Skipped(why.to_owned());
        let output = format!("a\n{why}\n{passed}\n");
        assert_eq!(verdict(status(0), true, &output), skipped);
        assert_eq!(verdict(status(1), true, &output), Verdict::Failed);
        assert_eq!(verdict(status(0), false, &output), Verdict::Failed);
        assert_eq!(
            verdict(status(0), true, "it has called exit"),
            Verdict::Failed
        );
    }
}
