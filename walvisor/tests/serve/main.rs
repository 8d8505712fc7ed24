//! `walvisor serve`, as its clients see it: third-party programs, and clients that break every
//! rule.

mod activation;
mod clients;
mod control;
mod documents;
mod doors;
mod export;
mod failing_image;
mod foreign_write;
mod formats;
mod history;
mod hostile;
mod incremental;
mod kill;
mod largest;
mod lifecycle;
mod looking;
mod looks;
mod members;
mod memory;
mod metrics;
mod owner;
mod points;
mod privileges;
mod qemu_locks;
mod recovery;
mod reload;
mod sandbox;
mod saving;
mod scsi;
mod slow_holes;
mod tls;
mod top;
mod tracepoints;
mod vhost_user;
mod without_log;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;
use walvisor_testkit::nbd::{READ, RawClient};
use walvisor_testkit::process::{
    assert_says, client, create, foreign, refused, run_client, succeed, text, walvisor,
};
use walvisor_testkit::{Daemon, Process, noise, test_dir};

const WALVISOR: &str = env!("CARGO_BIN_EXE_walvisor");
const MIB: u64 = 1 << 20;

/// The value of a metric in `text`, for its first disk.
#[track_caller]
fn metric(text: &str, name: &str) -> u64 {
    let line = text
        .lines()
        .find(|line| line.starts_with(&format!("{name}{{")));
    let value = line.and_then(|line| line.rsplit(' ').next());
    value
        .unwrap_or_else(|| panic!("{name} is missing:\n{text}"))
        .parse()
        .unwrap()
}

/// Starts `walvisor serve` with these arguments, and waits until its `disks` are served.
#[track_caller]
fn serve(dir: &Path, arguments: &str, disks: usize) -> Daemon {
    Daemon::start_as(dir, &mut serve_command(arguments), disks)
}

/// The same, for a daemon whose errors the test reads while it runs, from the file `errors`.
#[track_caller]
fn serve_telling(dir: &Path, arguments: &str, disks: usize) -> Daemon {
    let errors = fs::File::create(dir.join("errors")).unwrap();
    Daemon::start_telling(dir, &mut serve_command(arguments), errors.into(), disks)
}

fn serve_command(arguments: &str) -> Command {
    let mut command = Command::new(WALVISOR);
    command.arg("serve").args(arguments.split_whitespace());
    command.stdin(Stdio::null());
    command
}

/// What the daemon of [`serve_telling`] has said so far.
fn errors(dir: &Path) -> String {
    fs::read_to_string(dir.join("errors")).unwrap()
}

/// Asserts that the daemon at the control socket `ctl` refuses a request. Returns what it says.
#[track_caller]
fn ctl_refused(dir: &Path, words: &str, parts: &[&str]) -> String {
    refused(dir, &format!("ctl ctl {words}"), 1, parts)
}

/// Starts a request to the daemon at the control socket `ctl`, and does not wait for its answer.
#[track_caller]
fn ctl_begun(dir: &Path, words: &str) -> Process {
    let mut command = Command::new(WALVISOR);
    command.args(["ctl", "ctl"]).args(words.split(' '));
    Process::spawn(command.current_dir(dir).stderr(Stdio::piped()))
}

/// The answer of the daemon at the control socket `ctl`.
#[track_caller]
fn ctl(dir: &Path, words: &str) -> Value {
    serde_json::from_str(&told(dir, &format!("--json {words}"))).unwrap()
}

/// The same as people read it.
#[track_caller]
fn told(dir: &Path, words: &str) -> String {
    succeed(dir, &format!("ctl ctl {words}"))
}

/// The names of the disks that the daemon at `ctl` serves.
fn disk_names(dir: &Path) -> Vec<String> {
    let stats = ctl(dir, "stats");
    let disks = stats["disks"].as_array().unwrap().iter();
    let names = disks.map(|disk| disk["name"].as_str().unwrap().to_owned());
    names.collect()
}

/// What the daemon at `ctl` says of a disk.
#[track_caller]
fn disk_stats(dir: &Path, name: &str) -> Value {
    let stats = ctl(dir, "stats");
    let mut disks = stats["disks"].as_array().unwrap().iter();
    disks.find(|disk| disk["name"] == name).unwrap().clone()
}

/// The bytes of the files of `disk.img` and of its log.
fn disk_files(dir: &Path) -> Vec<Vec<u8>> {
    let names = fs::read_dir(dir.join("disk.img.wal")).unwrap();
    let mut paths: Vec<_> = names.map(|entry| entry.unwrap().path()).collect();
    paths.sort();
    paths.push(dir.join("disk.img"));
    paths.iter().map(|path| fs::read(path).unwrap()).collect()
}

/// Bytes of a disk.
#[track_caller]
fn read(client: &mut RawClient, offset: u64, length: u64) -> Vec<u8> {
    client.request(0, READ, 9, offset, length);
    let reply = client.reply();
    assert_eq!((reply.kind, reply.cookie), (1, 9));
    // The offset comes before the data.
    reply.data[8..].to_vec()
}
