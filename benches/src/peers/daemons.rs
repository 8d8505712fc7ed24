//! Over vhost-user, with a virtio driver in this process as client, which serves all disks in one thread; and over NBD, with
//! fio as client.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use walvisor::commands::CommandError;
use walvisor_testkit::vhost_user_client::VhostUserClient;

use super::{PeerJob, RATE, Schedule, job};
use crate::daemon::{Daemon, HaltGuard};
use crate::load::loops::LoadJob;
use crate::load::vhost_user::drive;
use crate::matrix::{Matrix, Turn};
use crate::place::Place;
use crate::session::Session;

pub const VHOST_USER: [PeerJob; 5] = [
    job("write + flush, 1 client", LoadJob::WriteFsync, 1, Some(1.0)),
    PeerJob {
        queues: QUEUES,
        ..job(
            "write + flush, 16 clients, 4 queues",
            LoadJob::WriteFsync,
            4,
            Some(2.0),
        )
    },
    PeerJob {
        disks: DISKS,
        ..job(
            "write + flush, 4 disks x 4 clients",
            LoadJob::WriteFsync,
            4,
            Some(3.0),
        )
    },
    job("write, 32 in flight", LoadJob::Write, 32, Some(1.0)),
    job("read, 32 in flight", LoadJob::Read, 32, Some(1.0)),
];

pub const NBD: [PeerJob; 4] = [
    job(
        "write + flush, 1 connection",
        LoadJob::WriteFsync,
        1,
        Some(1.0),
    ),
    PeerJob {
        queues: 16,
        ..job(
            "write + flush, 16 connections",
            LoadJob::WriteFsync,
            1,
            Some(2.0),
        )
    },
    job("write, 32 in flight", LoadJob::Write, 32, Some(1.0)),
    job("read, 32 in flight", LoadJob::Read, 32, Some(1.0)),
];

/// Number of disks of each side over vhost-user, queues and bytes of each disk.
const DISKS: usize = 4;
const QUEUES: usize = 4;
const DISK_BYTES: u64 = 256 << 20;

/// Unmeasured work of each side before its first turn, to reach the steady state: all segment files of the log exist, and
/// all blocks of the peers' images are allocated.
pub const WARM_UP: Duration = Duration::from_secs(5);

/// Creates the images of the first `disks` disks unless they exist: `peer-N.img`, and `ours-N.img` on one log.
pub fn make_images(place: &Place, disks: usize) -> Result<(), CommandError> {
    for disk in 0..disks {
        let ours = format!("ours-{disk}.img");
        if !place.images().join(&ours).exists() {
            let raw = format!("peer-{disk}.img");
            place.make_disk(&raw, DISK_BYTES, (&ours, "log"))?;
        }
    }
    Ok(())
}

/// Measures all jobs over vhost-user.
pub fn vhost_user(
    place: &Place,
    schedule: &Schedule,
    session: &Session,
    matrix: &mut Matrix<PeerJob>,
) -> Result<(), CommandError> {
    make_images(place, DISKS)?;
    let socket = |side: usize, disk: usize| place.sockets().join(format!("{side}-{disk}"));
    let spec = |disk: usize| {
        let socket = socket(0, disk);
        format!(
            "path=ours-{disk}.img,log=log,queues={QUEUES},socket={}",
            socket.display()
        )
    };
    let specs: Vec<String> = (0..DISKS).map(spec).collect();
    let mut theirs = Command::new("qemu-storage-daemon");
    for disk in 0..DISKS {
        theirs.arg("--blockdev").arg(format!(
            "driver=file,node-name=disk{disk},filename=peer-{disk}.img,aio=io_uring,cache.direct=on,discard=unmap"
        ));
        theirs.arg("--export").arg(format!(
            "type=vhost-user-blk,id=export{disk},node-name=disk{disk},addr.type=unix,addr.path={},writable=on,\
             num-queues={QUEUES}",
            socket(1, disk).display()
        ));
    }
    let ours = Daemon::start("vhost-user", &specs, place.images(), place.sockets())?;
    let sockets: Vec<_> = (0..DISKS).map(|disk| socket(1, disk)).collect();
    let theirs = Daemon::peer(&mut theirs, place.images(), &sockets)?;
    take_turns(
        schedule,
        session,
        matrix,
        &[ours, theirs],
        |side, job, turn| {
            let failed = |error| CommandError::Failed(format!("vhost-user: {}: {error}", job.name));
            let disks = 0..job.disks;
            let clients =
                disks.map(|disk| VhostUserClient::try_connect(&socket(side, disk), job.queues));
            let mut clients = clients.collect::<Result<Vec<_>, _>>().map_err(failed)?;
            let loops = (job.work, job.queues, job.depth);
            let tally = drive(&mut clients, loops, DISK_BYTES, turn);
            Ok(tally.map_err(failed)?.rate())
        },
    )
}

/// Measures all jobs over NBD. Each queue is a connection.
pub fn nbd(
    place: &Place,
    schedule: &Schedule,
    session: &Session,
    matrix: &mut Matrix<PeerJob>,
) -> Result<(), CommandError> {
    make_images(place, 1)?;
    place.make_disk("peer-0.img", DISK_BYTES, ("memory.img", "memory-log"))?;
    let socket = |side: usize| place.sockets().join(format!("{side}.nbd"));
    let start = |side: usize, spec: &str| {
        let spec = format!("{spec},socket={},serial=disk", socket(side).display());
        // Each daemon needs a directory for its control socket.
        let control = tempfile::tempdir_in(place.sockets()).map_err(CommandError::failed)?;
        Daemon::start("nbd", &[spec], place.images(), &control.keep())
    };
    let sides = [
        start(0, "path=ours-0.img,log=log")?,
        Daemon::qemu_nbd(place.images(), "peer-0.img", &socket(1), "none")?,
        start(2, "path=memory.img,log=memory-log,answer=memory")?,
    ];
    take_turns(schedule, session, matrix, &sides, |side, job, turn| {
        fio(&socket(side), job, turn)
    })
}

/// Lets the daemons take turns at each job. While one is measured, all others are stopped. `rate` measures the daemon with
/// the given number for the given time.
fn take_turns(
    schedule: &Schedule,
    session: &Session,
    matrix: &mut Matrix<PeerJob>,
    daemons: &[Daemon],
    rate: impl Fn(usize, &PeerJob, Duration) -> Result<f64, CommandError>,
) -> Result<(), CommandError> {
    let names = schedule.door.sides();
    let alone = |side: usize, job: &PeerJob, turn: Duration| {
        let others = daemons.iter().enumerate();
        let others = others.filter(|(other, _)| *other != side);
        let _halted: Vec<HaltGuard> = others.map(|(_, daemon)| daemon.halt()).collect();
        rate(side, job, turn)
    };
    if let (Some(first), false) = (schedule.jobs.first(), schedule.quick) {
        let warm_up = PeerJob {
            disks: first.disks,
            ..job("warming up", LoadJob::Write, 32, None)
        };
        for (side, name) in names.iter().enumerate() {
            let what = format!("{name}: warming up");
            session.step(&what, WARM_UP, || alone(side, &warm_up, WARM_UP))?;
        }
    }
    for row in &mut matrix.rows {
        daemons.iter().try_for_each(Daemon::checkpoint)?;
        for round in 0..schedule.rounds {
            let goes_on = row.measure(
                (round, schedule.rounds),
                session,
                |_| schedule.turn(),
                |side| {
                    let at = names.iter().position(|name| *name == side.name);
                    let at = at.expect("a side of this door");
                    let rate = alone(at, &side.plan, schedule.turn)?;
                    Ok(Turn(json!({ RATE: rate })))
                },
            )?;
            if !goes_on {
                return Ok(());
            }
        }
    }
    Ok(())
}

fn fio(socket: &Path, job: &PeerJob, turn: Duration) -> Result<f64, CommandError> {
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
    command.arg(format!(
        "--rw={}",
        job.work.name().trim_end_matches("+fsync")
    ));
    if job.work == LoadJob::WriteFsync {
        command.arg("--fsync=1");
    }
    let failed = |why: &str| CommandError::Failed(format!("fio over NBD: {}", why.trim()));
    let output = command.output();
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
