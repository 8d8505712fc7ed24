//! Which seeds a test of random runs takes, and where those are kept that have failed.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::path::Path;
use std::process::Command;

use crate::Random;

/// Seeds that have failed. One line each: `test seed commit date`; what follows `#` is a comment.
const FAILING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../failing-seeds.txt");

/// The seeds of one test: first those with which it has failed, then the same ones in each run,
/// then others for each commit.
///
/// | the environment has | the seeds |
/// |---|---|
/// | `WALVISOR_SEED=N` | only N, or as many from N as the test's own variable says |
/// | the test's own variable, as `WALVISOR_HISTORIES=N` | those that have failed, then 1 to N |
/// | `WALVISOR_SEEDS=N` | the others follow from N, not from the commit |
/// | `WALVISOR_KEEP_SEEDS=1` | [`Seeds::failed`] adds a line to `tests/failing-seeds.txt` |
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seeds {
    test: &'static str,
    /// The variable that says how many.
    count: &'static str,
    /// Those with which the test has failed.
    pub known: Vec<u64>,
    /// The same ones in each run. How often something must have happened is asked of these alone:
    /// with others it depends on luck.
    pub fixed: Range<u64>,
    /// Others for each commit.
    pub fresh: Range<u64>,
    /// What `fresh` follows from.
    number: u64,
}

impl Seeds {
    /// The seeds of the test function `test`: usually so many `fixed` and so many `fresh` ones.
    /// `count`: the variable that asks for another number of them.
    #[must_use]
    pub fn of(test: &'static str, count: &'static str, fixed: u64, fresh: u64) -> Self {
        let (first, asked) = (variable("WALVISOR_SEED"), variable(count));
        let number = variable("WALVISOR_SEEDS").unwrap_or_else(|| commit_number(commit()));
        let kept = fs::read_to_string(FAILING).unwrap_or_default();
        let known = match first {
            Some(_) => Vec::new(),
            None => failing(&kept, test),
        };
        let (fixed, fresh) = chosen(first, asked, fixed, fresh, number);
        Self {
            test,
            count,
            known,
            fixed,
            fresh,
            number,
        }
    }

    /// All, in order.
    pub fn iter(&self) -> impl Iterator<Item = u64> {
        let known = self.known.iter().copied();
        known.chain(self.fixed.clone()).chain(self.fresh.clone())
    }

    /// How to run the test with this seed alone. `target`: the arguments of `cargo test` that select
    /// its target. Keeps the seed if the environment says so.
    #[must_use]
    pub fn failed(&self, seed: u64, target: &str) -> String {
        if std::env::var("WALVISOR_KEEP_SEEDS").is_ok_and(|keep| keep == "1") {
            let commit = commit().unwrap_or_else(|| "unknown".to_owned());
            if let Err(error) = keep(Path::new(FAILING), self.test, seed, &commit) {
                println!("{FAILING}: {error}");
            }
        }
        self.replay(seed, target)
    }

    fn replay(&self, seed: u64, target: &str) -> String {
        let Self { test, count, .. } = self;
        format!("replay: WALVISOR_SEED={seed} {count}=1 cargo test {target} {test}")
    }
}

impl fmt::Display for Seeds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            test,
            known,
            fixed,
            fresh,
            ..
        } = self;
        write!(f, "{test}: seeds {} to {}", fixed.start, fixed.end - 1)?;
        if !known.is_empty() {
            write!(f, ", before them {known:?}, which have failed")?;
        }
        if !fresh.is_empty() {
            let (count, number) = (fresh.end - fresh.start, self.number);
            write!(f, ", and {count} from {}; ", fresh.start)?;
            write!(f, "WALVISOR_SEEDS={number:#x} repeats them")?;
        }
        Ok(())
    }
}

fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    let number = match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => text.parse(),
    };
    Some(number.unwrap_or_else(|_| panic!("{name}={text}: give a whole number below 2^64")))
}

/// The fixed and the fresh seeds.
fn chosen(
    first: Option<u64>,
    asked: Option<u64>,
    fixed: u64,
    fresh: u64,
    number: u64,
) -> (Range<u64>, Range<u64>) {
    let range = |first: u64, count: u64| {
        let end = first.checked_add(count);
        first..end.unwrap_or_else(|| panic!("{count} seeds from {first}: the last is above 2^64"))
    };
    match (first, asked) {
        (None, None) => (range(1, fixed), range(Random(number).next() >> 1, fresh)),
        (first, asked) => (range(first.unwrap_or(1), asked.unwrap_or(1)), 0..0),
    }
}

/// The seeds with which this test has failed, oldest first.
fn failing(text: &str, test: &str) -> Vec<u64> {
    let mut seeds = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.split('#').next().unwrap_or_default();
        let words: Vec<_> = line.split_whitespace().collect();
        let seed = match words[..] {
            [] => continue,
            [_, seed, _commit, _date] => seed.parse().ok(),
            _ => None,
        };
        let seed = seed.unwrap_or_else(|| {
            panic!("failing-seeds.txt, line {number}: {line:?} is not `test seed commit date`")
        });
        if words[0] == test && !seeds.contains(&seed) {
            seeds.push(seed);
        }
    }
    seeds
}

/// Adds a line for a seed, unless the file has one.
fn keep(path: &Path, test: &str, seed: u64, commit: &str) -> std::io::Result<()> {
    let text = fs::read_to_string(path).unwrap_or_default();
    if failing(&text, test).contains(&seed) {
        return Ok(());
    }
    let today = Command::new("date").args(["-u", "+%F"]).output()?.stdout;
    let (commit, date) = (
        &commit[..commit.len().min(12)],
        String::from_utf8_lossy(&today),
    );
    let line_end = if text.is_empty() || text.ends_with('\n') {
        ""
    } else {
        "\n"
    };
    // At once: several tests may write.
    let line = format!("{line_end}{test} {seed} {commit} {}\n", date.trim());
    let mut file = OpenOptions::new().append(true).create(true).open(path)?;
    file.write_all(line.as_bytes())
}

/// The commit that this tree has checked out, if it is one of git.
fn commit() -> Option<String> {
    commit_above(Path::new(env!("CARGO_MANIFEST_DIR")))
}

fn commit_above(place: &Path) -> Option<String> {
    let git = place
        .ancestors()
        .map(|dir| dir.join(".git"))
        .find(|git| git.exists())?;
    // A work tree beside the main one has a file that names its directory.
    let dir = match fs::read_to_string(&git) {
        Ok(text) => git.parent()?.join(text.strip_prefix("gitdir: ")?.trim()),
        Err(_) => git,
    };
    let read = |path: &Path| Some(fs::read_to_string(path).ok()?.trim().to_owned());
    let head = read(&dir.join("HEAD"))?;
    let Some(name) = head.strip_prefix("ref: ") else {
        return Some(head);
    };
    let common = read(&dir.join("commondir")).map_or_else(|| dir.clone(), |to| dir.join(to));
    read(&common.join(name)).or_else(|| {
        let packed = read(&common.join("packed-refs"))?;
        let mut lines = packed.lines();
        lines.find_map(|line| Some(line.strip_suffix(name)?.strip_suffix(' ')?.to_owned()))
    })
}

/// A commit's name is a hash already.
fn commit_number(commit: Option<String>) -> u64 {
    let digits = commit.as_deref().and_then(|commit| commit.get(..16));
    let number = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    number.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_are_fixed_and_fresh_or_those_asked_for() {
        let start = Random(9).next() >> 1;
        assert_eq!(chosen(None, None, 500, 20, 9), (1..501, start..start + 20));
        assert_eq!(chosen(Some(7), None, 500, 20, 9), (7..8, 0..0));
        assert_eq!(chosen(None, Some(30), 500, 20, 9), (1..31, 0..0));
        assert_eq!(chosen(Some(41), Some(30), 500, 20, 9), (41..71, 0..0));
        let last = u64::MAX - 1;
        assert_eq!(chosen(Some(last), None, 500, 20, 9), (last..u64::MAX, 0..0));
    }

    #[test]
    fn what_repeats_the_seeds_is_printed() {
        let seeds = Seeds {
            test: "histories",
            count: "WALVISOR_HISTORIES",
            known: vec![3, 9],
            fixed: 1..101,
            fresh: 5000..5020,
            number: 0xbee,
        };
        assert_eq!(
            seeds.to_string(),
            "histories: seeds 1 to 100, before them [3, 9], which have failed, and 20 from 5000; \
             WALVISOR_SEEDS=0xbee repeats them"
        );
        assert_eq!(
            seeds.replay(5003, "-p walvisor-storage --lib"),
            "replay: WALVISOR_SEED=5003 WALVISOR_HISTORIES=1 cargo test -p walvisor-storage --lib \
             histories"
        );
    }

    #[test]
    fn a_kept_seed_is_read_by_its_test() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("failing");
        fs::write(
            &path,
            "# test seed commit date\n\nlives 5 0ab1b836 2026-11-29 # two",
        )
        .unwrap();
        for (test, seed) in [("lives", 7), ("others", 8), ("lives", 5), ("lives", 7)] {
            keep(&path, test, seed, "0ab1b836deadbeef").unwrap();
        }
        let text = fs::read_to_string(&path).unwrap();
        assert_eq!(failing(&text, "lives"), [5, 7]);
        assert_eq!(failing(&text, "others"), [8]);
        assert_eq!(text.lines().count(), 5, "{text}");
        let last = text.lines().last().unwrap();
        assert!(last.starts_with("others 8 0ab1b836dead 20"), "{last}");
    }

    #[test]
    #[should_panic(expected = "line 2: \"lives five\" is not")]
    fn a_line_without_a_seed_is_refused() {
        failing("others 1 0 2026-11-29\nlives five", "others");
    }

    #[test]
    fn lines_of_the_file_in_the_tree_can_be_read() {
        let kept = fs::read_to_string(FAILING).unwrap_or_default();
        assert_eq!(failing(&kept, ""), [0; 0]);
    }

    #[test]
    fn the_commit_is_found_wherever_git_keeps_it() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        let id = |digit: &str| digit.repeat(40);
        let inside = dir.path().join("tests/kit");
        fs::create_dir_all(&inside).unwrap();
        write(".git/HEAD", &format!("{}\n", id("1")));
        assert_eq!(commit_above(&inside), Some(id("1")));
        write(".git/HEAD", "ref: refs/heads/main\n");
        assert_eq!(commit_above(&inside), None);
        let packed = format!(
            "# pack-refs\n{} refs/heads/a-main\n{} refs/heads/main\n",
            id("2"),
            id("3")
        );
        write(".git/packed-refs", &packed);
        assert_eq!(commit_above(&inside), Some(id("3")));
        write(".git/refs/heads/main", &id("4"));
        assert_eq!(commit_above(&inside), Some(id("4")));
        // A second work tree.
        write("other/.git", "gitdir: ../.git/worktrees/other\n");
        write(".git/worktrees/other/HEAD", "ref: refs/heads/main\n");
        write(".git/worktrees/other/commondir", "../..\n");
        assert_eq!(commit_above(&dir.path().join("other")), Some(id("4")));
        assert_eq!(commit_number(Some(id("4"))), 0x4444_4444_4444_4444);
        assert_eq!(commit_number(None), 0);
    }
}
