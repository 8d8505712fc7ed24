//! `walvisor serve`, as its clients see it: third-party programs, and clients that break every
//! rule.

mod activation;
mod clients;
mod control;
mod crash;
mod documents;
mod doors;
mod export;
mod failing_image;
mod foreign_write;
mod formats;
mod guest_file;
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
mod points;
mod privileges;
mod qemu_locks;
mod recovery;
mod sandbox;
mod saving;
mod scsi;
mod slow_holes;
mod tls;
mod top;
mod tracepoints;
mod vhost_user;
mod without_log;

use walvisor_testkit::process::{client, create, foreign, run_client, text, walvisor};
use walvisor_testkit::{Daemon, noise};

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
