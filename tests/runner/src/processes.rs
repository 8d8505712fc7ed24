//! The processes that a test starts. Each has the test's ID in its environment. An orphan becomes a
//! child of the runner: so what outlives its test is found whatever it did to its environment.

use std::fs;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{
    Pid, Signal, WaitOptions, getpid, kill_process, set_child_subreaper, waitpid,
};

/// The variable of the environment that has the test's ID.
pub(crate) const MARK: &str = "WALVISOR_TEST_ID";

/// What is killed takes a moment to end.
const MOMENT: Duration = Duration::from_secs(10);

/// Makes orphans children of this process.
pub(crate) fn adopt_orphans() -> io::Result<()> {
    // Any number but none: see prctl(2), PR_SET_CHILD_SUBREAPER.
    Ok(set_child_subreaper(Some(getpid()))?)
}

/// The children of process `pid`.
pub(crate) fn children(pid: Pid) -> Vec<Pid> {
    let tasks = fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero()));
    let tasks = tasks.into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    let numbers = lists.flat_map(|list| {
        let numbers = list.split_whitespace().map(str::parse);
        numbers.collect::<Vec<Result<i32, _>>>()
    });
    numbers.flatten().filter_map(Pid::from_raw).collect()
}

/// Process `pid`, its children, and theirs.
pub(crate) fn family(pid: Pid) -> Vec<Pid> {
    let mut family = vec![pid];
    let mut next = 0;
    while let Some(&member) = family.get(next) {
        family.extend(children(member));
        next += 1;
    }
    family
}

/// The words that started a process.
pub(crate) fn command_line(pid: Pid) -> String {
    let bytes = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes).replace('\0', " ");
    text.trim_end().to_owned()
}

/// Whether the process works for the test `id`.
fn works_for(pid: Pid, id: &str) -> bool {
    let mark = format!("{MARK}={id}");
    let environment = fs::read(format!("/proc/{}/environ", pid.as_raw_nonzero()));
    let environment = environment.unwrap_or_default();
    environment
        .split(|&byte| byte == 0)
        .any(|variable| variable == mark.as_bytes())
}

/// Waits a moment for the processes that a test has left, kills those that stay, and names them.
pub(crate) fn end_left(id: &str) -> Vec<String> {
    let orphans = || -> Vec<Pid> {
        let mut orphans = children(getpid());
        orphans.retain(|&pid| works_for(pid, id));
        orphans
    };
    end(orphans)
}

/// The same for all orphans, once all tests have ended: of some nobody knows the test.
pub(crate) fn end_orphans() -> Vec<String> {
    end(|| {
        let mut orphans = children(getpid());
        orphans.retain(|&pid| !has_ended(pid));
        orphans
    })
}

/// Reaps an orphan that has ended.
fn has_ended(pid: Pid) -> bool {
    !matches!(waitpid(Some(pid), WaitOptions::NOHANG), Ok(None))
}

fn end(processes: impl Fn() -> Vec<Pid>) -> Vec<String> {
    let began = Instant::now();
    let mut left = processes();
    while !left.is_empty() && began.elapsed() < MOMENT {
        thread::sleep(Duration::from_millis(20));
        left = processes();
    }
    let named = |&pid: &Pid| format!("process {}: {}", pid.as_raw_nonzero(), command_line(pid));
    let names = left.iter().map(named).collect();
    for pid in left.into_iter().flat_map(family) {
        let _ = kill_process(pid, Signal::KILL);
    }
    names
}
