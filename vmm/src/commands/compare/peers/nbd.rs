//! Over NBD, with fio as client: each queue is a connection.

use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use super::super::notify::daemon::Daemon;
use super::peer::Peer;
use super::{CommandError, DISK_BYTES, Door, Failure, Job, Pace, Place, Row, Session, Work, need};

const fn job(name: &'static str, work: Work, queues: usize, depth: usize, goal: f64) -> Job {
    Job {
        name,
        work,
        disks: 1,
        queues,
        depth,
        goal,
    }
}

pub const JOBS: [Job; 4] = [
    job("write + flush, 1 connection", Work::WriteFsync, 1, 1, 1.0),
    job(
        "write + flush, 16 connections",
        Work::WriteFsync,
        16,
        1,
        2.0,
    ),
    job("write, 32 in flight", Work::Write, 1, 32, 1.0),
    job("read, 32 in flight", Work::Read, 1, 32, 1.0),
];

const SOCKETS: [&str; 2] = ["ours.nbd", "peer.nbd"];

/// How long it takes, about.
pub fn expected(jobs: &[&Job], pace: Pace) -> Duration {
    (pace.turn + Duration::from_millis(400)) * (2 * pace.rounds * jobs.len()) as u32
}

/// Measures all jobs.
pub fn measure(
    place: &Place,
    jobs: &[&'static Job],
    pace: Pace,
    session: &Session,
) -> Result<Vec<Row>, Failure> {
    need("qemu-nbd", "qemu-utils")?;
    need("fio", "fio")?;
    place.make_images(1)?;
    let spec = format!("path=ours-0.img,log=log,socket={},serial=disk", SOCKETS[0]);
    let _ours = Daemon::start("nbd", &[spec], place.path(), place.path())?;
    let mut theirs = Command::new("qemu-nbd");
    theirs.args(["--format=raw", "--cache=none", "--aio=io_uring"]);
    theirs.args(["--discard=unmap", "--shared=64", "--persistent"]);
    theirs.arg("--export-name=disk");
    theirs.arg(format!(
        "--socket={}",
        place.path().join(SOCKETS[1]).display()
    ));
    theirs.arg("peer-0.img");
    let _theirs = Peer::start(&mut theirs, &[SOCKETS[1].to_owned()], place.path())?;
    let mut rows = Vec::new();
    for job in jobs {
        let mut row = Row::new(Door::Nbd, job.name, Some(job.goal));
        for round in 0..pace.rounds {
            // Neither is always the first.
            for side in [round % 2, 1 - round % 2] {
                let what = format!("nbd: {}, round {} of {}", job.name, round + 1, pace.rounds);
                let rate = session.step(&what, pace.turn + Duration::from_millis(400), || {
                    fio(place, SOCKETS[side], job, pace.turn)
                })?;
                if let Some(rate) = rate {
                    row.add((side == 1).then_some("qemu-nbd"), rate);
                }
            }
        }
        rows.push(row);
    }
    Ok(rows)
}

fn fio(place: &Place, socket: &str, job: &Job, turn: Duration) -> Result<f64, CommandError> {
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
        Work::Read => "--rw=randread",
        Work::Write | Work::WriteFsync => "--rw=randwrite",
    });
    if job.work == Work::WriteFsync {
        command.arg("--fsync=1");
    }
    let failed = |why: &str| CommandError::Failed(format!("fio over NBD: {}", why.trim()));
    let output = command.current_dir(place.path()).output();
    let output = output.map_err(|error| failed(&error.to_string()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    // fio may have something to say before its report.
    let report = text.find('{').map(|at| serde_json::from_str(&text[at..]));
    let report: Value = match report {
        Some(Ok(report)) if output.status.success() => report,
        _ => return Err(failed(&String::from_utf8_lossy(&output.stderr))),
    };
    let iops = |kind: &str| report["jobs"][0][kind]["iops"].as_f64().unwrap_or(0.0);
    Ok(iops("read") + iops("write"))
}
