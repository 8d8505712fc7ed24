//! Networks of `walvisor run`, with a guest that has no driver for them: what is opened, what ends
//! with the run, and the mistakes.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use walvisor_testkit::leash;
use walvisor_testkit::process::assert_refused;
use walvisor_tests::have_passt;

use crate::kernel::{self, KernelAction};
use crate::{command, has_kvm, stderr, stdout, wait_for};

/// A kernel that does `then`, and the directory that it is in.
fn kernel(then: KernelAction) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = kernel::save(directory.path(), "kernel", &kernel::bzimage(then));
    (directory, path)
}

/// The arguments of a run of the kernel with this network.
fn arguments<'a>(kernel: &'a str, net: &'a str) -> impl Iterator<Item = &'a str> {
    let words = "run --memory 4M --cmdline booted".split(' ');
    words.chain(["--kernel", kernel, "--net", net])
}

/// The passt whose parent is `parent`, if it has one.
fn passt_of(parent: Pid) -> Option<Pid> {
    let children = format!("/proc/{0}/task/{0}/children", parent.as_raw_nonzero());
    let children = fs::read_to_string(children).unwrap_or_default();
    let pids = children
        .split_whitespace()
        .filter_map(|pid| pid.parse().ok());
    let is_passt = |pid: &i32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        name.starts_with("passt")
    };
    pids.filter(is_passt).find_map(Pid::from_raw)
}

/// Whether a process runs: one that has ended may wait for its parent.
fn runs(pid: Pid) -> bool {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero()));
    stat.is_ok_and(|stat| {
        !stat
            .rsplit(')')
            .next()
            .unwrap_or_default()
            .starts_with(" Z")
    })
}

#[test]
fn a_guest_boots_with_passt_over_both_transports() {
    if !has_kvm() || !have_passt() {
        return;
    }
    let (_directory, kernel) = kernel(KernelAction::PowerOff);
    for net in ["passt", "passt,host=on,transport=pci,mtu=65520"] {
        let run = command(arguments(kernel.to_str().unwrap(), net))
            .output()
            .unwrap();
        assert_eq!(run.status.code(), Some(0), "{}", stderr(&run));
        assert_eq!(stdout(&run), "booted");
    }
}

#[test]
fn passt_ends_with_a_walvisor_that_is_killed() {
    if !has_kvm() || !have_passt() {
        return;
    }
    let (_directory, kernel) = kernel(KernelAction::Echo);
    let mut command = Command::new(env!("CARGO_BIN_EXE_walvisor"));
    command
        .args(arguments(kernel.to_str().unwrap(), "passt"))
        .stdin(Stdio::null())
        .stdout(Stdio::null());
    let mut walvisor = leash(&mut command).spawn().unwrap();
    let parent = Pid::from_child(&walvisor);
    wait_for("a start of passt", || passt_of(parent).is_some());
    let passt = passt_of(parent).unwrap();
    assert!(runs(passt));
    kill_process(parent, Signal::KILL).unwrap();
    walvisor.wait().unwrap();
    wait_for("the end of passt", || !runs(passt));
}

/// How mistakes in what follows `--net` are told, `net_spec` shows.
#[test]
fn a_network_that_is_not_there_is_one_line() {
    let (_directory, kernel) = kernel(KernelAction::PowerOff);
    let kernel = kernel.to_str().unwrap();
    for (net, status, parts) in [
        ("user", 2, ["'user': begin with passt, tap=NAME", "--net"]),
        ("tap=no/tap", 1, ["tap=no/tap: ", "1 to 15 bytes"]),
        (
            "stream=/no/socket",
            1,
            ["/no/socket: No such file", "a program listens"],
        ),
        ("passt", 1, ["no program passt", "apt-get install passt"]),
    ] {
        let mut run = Command::new(env!("CARGO_BIN_EXE_walvisor"));
        run.args(arguments(kernel, net)).env("PATH", "/no/programs");
        assert_refused(&run.output().unwrap(), status, &parts);
    }
    let help = command(["run", "--net", "help"]).output().unwrap();
    assert_eq!(help.status.code(), Some(0));
    assert!(stdout(&help).contains("stream=SOCKET"));
}
