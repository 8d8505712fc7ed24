//! A disk of the kernel's SCSI target, compared with tcmu-runner. Both run in one user-mode Linux over the files of this
//! machine. `walvisor` uses its RAM backend, tcmu-runner its qcow handler with an image in memory.

use std::ffi::OsString;
use std::time::Duration;

use super::emulated::{expected_jobs, of, read, rows, script};
use super::turns::{PeerDoor, PeerFailure, PeerRow, Schedule, need};
use crate::guests;
use crate::programs;
use crate::session::Session;

const TARGET: &str = include_str!("../../scripts/peers-target.sh");
const FIO: &str = include_str!("../../scripts/peers-fio.sh");

/// The jobs. A quick run uses the first two.
const JOBS: [(&str, &str, usize, u8); 4] = [
    ("read, 1 in flight", "randread", 1, 0),
    ("write, 32 in flight", "randwrite", 32, 0),
    ("read, 32 in flight", "randread", 32, 0),
    ("write, 1 in flight", "randwrite", 1, 0),
];

const MODULES: [&str; 5] = ["configfs", "sd_mod", "uio", "target_core_user", "tcm_loop"];

/// Estimated time of the measurement.
pub fn expected(pace: Schedule) -> Duration {
    Duration::from_secs(6) + expected_jobs(pace, of(pace, &JOBS).len() * 2)
}

/// Measures all jobs.
pub fn measure(pace: Schedule, session: &Session) -> Result<Vec<PeerRow>, PeerFailure> {
    for (program, package) in [
        ("linux.uml", "user-mode-linux"),
        ("tcmu-runner", "tcmu-runner"),
        ("dbus-daemon", "dbus"),
        ("qemu-img", "qemu-utils"),
        ("fio", "fio"),
        ("modprobe", "kmod"),
    ] {
        need(program, package)?;
    }
    let walvisor = programs::walvisor()?;
    let jobs = of(pace, &JOBS);
    let settings = script(jobs, "", pace);
    let script = format!("{settings}WALVISOR='{}'\n{TARGET}{FIO}", walvisor.display());
    let mut arguments = vec![OsString::from("--files-of-this-machine")];
    for module in MODULES {
        arguments.extend([OsString::from("--module"), OsString::from(module)]);
    }
    let mut rows = rows(PeerDoor::Tcmu, jobs, Some(1.0));
    session.step("TCMU", expected(pace), || {
        guests::run("user-mode", &script, &arguments, session, |line| {
            read(line, &mut rows, |disk| match disk {
                "walvisor" => None,
                _ => Some("tcmu-runner, qcow in memory"),
            })
        })
    })?;
    Ok(rows)
}
