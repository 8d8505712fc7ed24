//! What a run prints, and the file of its results.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::{self, IsTerminal, Write};
use std::path::Path;
use std::time::Duration;

/// Lines of a failed test's output that are shown.
const TAIL: usize = 60;
/// Targets whose time is shown.
const SLOWEST: usize = 12;

/// How a test went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    Passed,
    /// It cannot run here; the line says why.
    Skipped(String),
    Failed,
    OverLimit,
}

/// A test that has run.
pub(crate) struct TestResult {
    pub(crate) id: String,
    pub(crate) verdict: Verdict,
    pub(crate) took: Duration,
    /// This is the result of a second attempt.
    pub(crate) retried: bool,
    pub(crate) output: String,
}

/// The time of each test, by its ID.
pub(crate) type Times = HashMap<String, Duration>;

/// The times in the file of an earlier run's results; none if there is no such file.
pub(crate) fn read_times(results: &Path) -> Times {
    let text = fs::read_to_string(results).unwrap_or_default();
    let time = |line: &str| {
        let mut words = line.splitn(3, ' ').skip(1);
        let seconds = words.next()?.parse().ok()?;
        let took = Duration::try_from_secs_f64(seconds).ok()?;
        Some((words.next()?.to_owned(), took))
    };
    text.lines().filter_map(time).collect()
}

/// The results of a run.
pub(crate) struct Report {
    tests: usize,
    results: Vec<TestResult>,
    /// Processes that have outlived all tests.
    pub(crate) left_over: Vec<String>,
}

impl Report {
    pub(crate) fn new(tests: usize) -> Self {
        Self {
            tests,
            results: Vec::with_capacity(tests),
            left_over: Vec::new(),
        }
    }

    /// Adds a result, and shows it: a failure at once, progress on a terminal.
    pub(crate) fn add(&mut self, result: TestResult) {
        let done = self.results.len() + 1;
        let seconds = result.took.as_secs_f64();
        let verdict = &result.verdict;
        if matches!(verdict, Verdict::Failed | Verdict::OverLimit) {
            println!("test {} ... FAILED ({seconds:.1} s)", result.id);
            println!("{}", tail(&result.output));
        } else if io::stdout().is_terminal() {
            print!("\r\x1b[K{done}/{}: {}", self.tests, result.id);
            let _ = io::stdout().flush();
        }
        self.results.push(result);
    }

    pub(crate) fn is_green(&self) -> bool {
        self.left_over.is_empty()
            && self
                .results
                .iter()
                .all(|result| matches!(result.verdict, Verdict::Passed | Verdict::Skipped(_)))
    }

    /// A line for each test: its status, its seconds, its ID. Times of tests that did not run stay.
    pub(crate) fn write_results(&self, path: &Path) -> io::Result<()> {
        let mut earlier = read_times(path);
        let mut lines = Vec::new();
        for result in &self.results {
            earlier.remove(&result.id);
            let status = match result.verdict {
                Verdict::Passed => "ok",
                Verdict::Skipped(_) => "skipped",
                Verdict::Failed => "FAILED",
                Verdict::OverLimit => "LIMIT",
            };
            lines.push((status, result.took, result.id.as_str()));
        }
        let earlier = earlier
            .iter()
            .map(|(id, took)| ("earlier", *took, id.as_str()));
        lines.extend(earlier);
        lines.sort_by_key(|(status, took, _)| (*status == "earlier", std::cmp::Reverse(*took)));
        let mut text = String::new();
        for (status, took, id) in lines {
            text += &format!("{status} {:.3} {id}\n", took.as_secs_f64());
        }
        fs::write(path, text)
    }

    /// Prints the sum: the slowest targets, what was skipped and why, what failed.
    pub(crate) fn print(&self, took: Duration) {
        let mut targets: BTreeMap<&str, (usize, Duration)> = BTreeMap::new();
        let (mut passed, mut skipped, mut failed) = (0, BTreeMap::new(), Vec::new());
        let mut retried = Vec::new();
        for result in &self.results {
            // PACKAGE/TARGET/PATH, where a package may be some folders deep.
            let path = result.id.rfind('/').unwrap_or(0);
            let sum = targets.entry(&result.id[..path]).or_default();
            *sum = (sum.0 + 1, sum.1 + result.took);
            match &result.verdict {
                Verdict::Passed => passed += 1,
                Verdict::Skipped(why) => *skipped.entry(why).or_insert(0) += 1,
                Verdict::Failed | Verdict::OverLimit => failed.push(&result.id),
            }
            if result.retried {
                retried.push(&result.id);
            }
        }
        if io::stdout().is_terminal() {
            print!("\r\x1b[K");
        }
        let mut targets: Vec<_> = targets.into_iter().collect();
        targets.sort_by_key(|(_, (_, took))| std::cmp::Reverse(*took));
        println!("seconds  tests  target");
        for (name, (count, took)) in targets.into_iter().take(SLOWEST) {
            println!("{:7.1}  {count:5}  {name}", took.as_secs_f64());
        }
        for (why, count) in &skipped {
            println!("{count} {why}");
        }
        for id in retried {
            println!("tried twice, for the kernel had lost requests of an io_uring: {id}");
        }
        for process in &self.left_over {
            println!("left over: {process}");
        }
        for id in &failed {
            println!("failed: {id}");
        }
        let skipped: usize = skipped.values().sum();
        println!(
            "tests: {passed} ok, {skipped} could not run here (skipped), {} failed, in {:.0} s",
            failed.len(),
            took.as_secs_f64()
        );
    }
}

/// The last lines of a text.
fn tail(text: &str) -> &str {
    let start = text.trim_end().rmatch_indices('\n').nth(TAIL - 1);
    start.map_or(text, |(at, _)| &text[at + 1..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_output_is_cut_at_a_line() {
        let text: String = (0..100).map(|line| format!("{line}\n")).collect();
        assert!(tail(&text).starts_with("40\n41\n"));
        assert!(tail(&text).ends_with("\n99\n"));
        assert_eq!(tail("a\nb"), "a\nb");
    }

    #[test]
    fn results_are_read_as_times_and_earlier_ones_stay() {
        let path = std::env::temp_dir().join(format!("walvisor-results-{}", std::process::id()));
        let mut report = Report::new(1);
        let run = |report: &mut Report, id: &str, verdict, seconds| {
            report.results.push(TestResult {
                id: id.to_owned(),
                verdict,
                took: Duration::from_secs(seconds),
                retried: false,
                output: String::new(),
            });
        };
        run(&mut report, "a/lib/one", Verdict::Passed, 2);
        assert!(report.is_green());
        report.write_results(&path).unwrap();
        let mut report = Report::new(1);
        run(&mut report, "a/lib/two", Verdict::OverLimit, 3);
        assert!(!report.is_green());
        report.write_results(&path).unwrap();
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(text, "LIMIT 3.000 a/lib/two\nearlier 2.000 a/lib/one\n");
        let times = read_times(&path);
        fs::remove_file(&path).unwrap();
        assert_eq!(times["a/lib/one"], Duration::from_secs(2));
        assert_eq!(times.len(), 2);
    }
}
