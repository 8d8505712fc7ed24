//! Over NBD, with fio as client. Each queue is a connection.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use walvisor::commands::CommandError;

use super::place::{DISK_BYTES, ImageDirectory};
use super::turns::{PeerDoor, PeerFailure, PeerJob, PeerRow, Schedule, Side, need, take_turns};
use crate::daemon::Daemon;
use crate::load::point::LoadJob;
use crate::output::failed;
use crate::peer::Peer;
use crate::session::Session;

const fn job(name: &'static str, work: LoadJob, queues: usize, depth: usize, goal: f64) -> PeerJob {
    PeerJob {
        name,
        work,
        disks: 1,
        queues,
        depth,
        goal,
    }
}

pub const JOBS: [PeerJob; 4] = [
    job(
        "write + flush, 1 connection",
        LoadJob::WriteFsync,
        1,
        1,
        1.0,
    ),
    job(
        "write + flush, 16 connections",
        LoadJob::WriteFsync,
        16,
        1,
        2.0,
    ),
    job("write, 32 in flight", LoadJob::Write, 1, 32, 1.0),
    job("read, 32 in flight", LoadJob::Read, 1, 32, 1.0),
];

const SOCKETS: [&str; SIDES] = ["ours.nbd", "peer.nbd", "memory.nbd"];

/// Number of sides that take turns.
pub const SIDES: usize = 3;

/// `walvisor` with `answer=memory`. The difference to the default is what it costs to keep answered writes when the daemon
/// dies.
pub const FROM_MEMORY: &str = "walvisor, answer=memory";

/// Time of a turn besides the measured time.
pub const BEFORE: Duration = Duration::from_millis(400);

/// Measures all jobs.
pub fn measure(
    place: &ImageDirectory,
    jobs: &[&'static PeerJob],
    pace: Schedule,
    session: &Session,
) -> Result<Vec<PeerRow>, PeerFailure> {
    need("qemu-nbd", "qemu-utils")?;
    need("fio", "fio")?;
    place.make_images(1)?;
    place.import(0, "memory.img", "memory-log")?;
    let start = |spec: &str, socket: &str| {
        let spec = format!("{spec},socket={socket},serial=disk");
        // Each daemon needs a directory for its control socket.
        let control = place.path().join(format!("{socket}.d"));
        std::fs::create_dir(&control).map_err(failed("make", &control))?;
        Daemon::start("nbd", &[spec], place.path(), &control)
    };
    let ours = start("path=ours-0.img,log=log", SOCKETS[0])?;
    let from_memory = start("path=memory.img,log=memory-log,answer=memory", SOCKETS[2])?;
    let mut theirs = Command::new("qemu-nbd");
    theirs.args(["--format=raw", "--cache=none", "--aio=io_uring"]);
    theirs.args(["--discard=unmap", "--shared=64", "--persistent"]);
    theirs.arg("--export-name=disk");
    theirs.arg(format!(
        "--socket={}",
        place.path().join(SOCKETS[1]).display()
    ));
    theirs.arg("peer-0.img");
    let theirs = Peer::start(&mut theirs, &[SOCKETS[1].to_owned()], place.path())?;
    let sides: [(&str, &dyn Side); SIDES] = [
        ("walvisor", &ours),
        ("qemu-nbd", &theirs),
        (FROM_MEMORY, &from_memory),
    ];
    let measured = |side: usize, job: &PeerJob, turn| fio(place, SOCKETS[side], job, turn);
    Ok(take_turns(
        (PeerDoor::Nbd, jobs),
        pace,
        BEFORE,
        session,
        &sides,
        measured,
    )?)
}

fn fio(
    place: &ImageDirectory,
    socket: &str,
    job: &PeerJob,
    turn: Duration,
) -> Result<f64, CommandError> {
    let socket = place.path().join(socket);
    let mut command = Command::new("fio");
    command.args(["--name=peers", "--ioengine=nbd", "--thread"]);
    command.args(["--group_reporting", "--time_based", "--bs=4k"]);
    command.arg("--output-format=json");
    command.arg(format!(
        "--uri=nbd+unix:///disk?socket={}",
        socket.display()
    ));
    command.arg(format!("--size={DISK_BYTES}"));
    command.arg(format!("--runtime={}", turn.as_secs()));
    command.arg(format!("--numjobs={}", job.queues));
    command.arg(format!("--iodepth={}", job.depth));
    command.arg(match job.work {
        LoadJob::Read => "--rw=randread",
        LoadJob::Write | LoadJob::WriteFsync => "--rw=randwrite",
    });
    if job.work == LoadJob::WriteFsync {
        command.arg("--fsync=1");
    }
    let failed = |why: &str| CommandError::Failed(format!("fio over NBD: {}", why.trim()));
    let output = command.current_dir(place.path()).output();
    let output = output.map_err(|error| failed(&error.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    // fio may print messages before its report.
    let report = text.find('{').map(|at| serde_json::from_str(&text[at..]));
    let report: Value = match report {
        Some(Ok(report)) if output.status.success() => report,
        _ => return Err(failed(&String::from_utf8_lossy(&output.stderr))),
    };
    let iops = |kind: &str| report["jobs"][0][kind]["iops"].as_f64().unwrap_or(0.0);
    Ok(iops("read") + iops("write"))
}
