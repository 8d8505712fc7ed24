//! The disks of one guest, which runs fio on each in turns. A guest that QEMU emulates has a disk over vhost-user, and
//! QEMU's own virtio-blk with and without the host's page cache. A guest in user-mode Linux has two disks of its kernel's SCSI
//! target: of `walvisor` with its RAM backend, and of tcmu-runner with its qcow handler over an image in memory.

use std::process::Command;

use serde_json::json;
use walvisor::commands::CommandError;

use super::{OURS, PeerJob, RATE, Schedule, daemons, job};
use crate::daemon::Daemon;
use crate::guests::{self, write_script};
use crate::load::loops::LoadJob;
use crate::matrix::{Matrix, Turn};
use crate::place::Place;
use crate::programs;
use crate::session::Session;

const FIO: &str = include_str!("../../scripts/peers-fio.sh");
const TARGET: &str = include_str!("../../scripts/peers-target.sh");

/// The jobs of each guest. A quick run uses the first two.
pub const QEMU: [PeerJob; 4] = [
    job("write + flush, 1 in flight", LoadJob::WriteFsync, 1, None),
    job("read, 32 in flight", LoadJob::Read, 32, None),
    job("read, 1 in flight", LoadJob::Read, 1, None),
    job("write, 32 in flight", LoadJob::Write, 32, None),
];
pub const TCMU: [PeerJob; 4] = [
    job("read, 1 in flight", LoadJob::Read, 1, Some(1.0)),
    job("write, 32 in flight", LoadJob::Write, 32, Some(1.0)),
    job("read, 32 in flight", LoadJob::Read, 32, Some(1.0)),
    job("write, 1 in flight", LoadJob::Write, 1, Some(1.0)),
];

const MODULES: [&str; 5] = ["configfs", "sd_mod", "uio", "target_core_user", "tcm_loop"];

/// Measures all jobs in a guest that QEMU emulates.
pub fn qemu(
    place: &Place,
    schedule: &Schedule,
    session: &Session,
    matrix: &mut Matrix<PeerJob>,
) -> Result<(), CommandError> {
    daemons::make_images(place, 1)?;
    let socket = place.sockets().join("guest");
    let socket = socket.display();
    let spec = format!("path=ours-0.img,log=log,socket={socket},queues=2");
    let _ours = Daemon::start("vhost-user", &[spec], place.images(), place.sockets())?;
    let image = place.images().join("peer-0.img");
    let drive = |name: &str, options: &str| {
        // QEMU's two disks can share an image, because no job checks its content.
        let options = format!("{options},discard=unmap,file.locking=off");
        let file = image.display();
        format!("file={file},format=raw,if=none,id={name},{options}")
    };
    let mut command = guests::command("emulated")?;
    let disks = "DISKS='0=vda 1=vdb 2=vdc'\n";
    let script = settings(schedule) + disks + FIO;
    command
        .arg(write_script(place.images(), "qemu.sh", &script)?)
        .arg("--");
    command.args(["-chardev", &format!("socket,id=disk,path={socket}")]);
    command.args(["-device", "vhost-user-blk-pci,chardev=disk,num-queues=2"]);
    command.args(["-drive", &drive("direct", "aio=io_uring,cache=none")]);
    command.args(["-device", "virtio-blk-pci,drive=direct,num-queues=2"]);
    command.args(["-drive", &drive("cached", "cache=writeback")]);
    command.args(["-device", "virtio-blk-pci,drive=cached,num-queues=2"]);
    run(command, schedule, session, matrix)
}

/// Measures all jobs in user-mode Linux over the files of this machine.
pub fn tcmu(
    place: &Place,
    schedule: &Schedule,
    session: &Session,
    matrix: &mut Matrix<PeerJob>,
) -> Result<(), CommandError> {
    let walvisor = programs::walvisor()?;
    let walvisor = format!("WALVISOR='{}'\n", walvisor.display());
    let script = settings(schedule) + &walvisor + TARGET + FIO;
    let mut command = guests::command("user-mode")?;
    command.arg(write_script(place.images(), "tcmu.sh", &script)?);
    command.arg("--files-of-this-machine");
    for module in MODULES {
        command.args(["--module", module]);
    }
    run(command, schedule, session, matrix)
}

/// The settings of the script.
fn settings(schedule: &Schedule) -> String {
    let jobs = schedule.jobs.iter().enumerate().map(|(number, job)| {
        let kind = job.work.name().trim_end_matches("+fsync");
        let flush = u8::from(job.work == LoadJob::WriteFsync);
        format!("{number}:{kind}:{}:{flush}", job.depth)
    });
    format!(
        "JOBS='{}' ROUNDS={} TURN={}\n",
        jobs.collect::<Vec<_>>().join(" "),
        schedule.rounds,
        schedule.turn.as_secs()
    )
}

/// Runs the guest. Its script names a disk by the number of its side.
fn run(
    command: Command,
    schedule: &Schedule,
    session: &Session,
    matrix: &mut Matrix<PeerJob>,
) -> Result<(), CommandError> {
    let what = format!("a guest for {}", schedule.door.name());
    session.step(&what, schedule.expected(), || {
        guests::run(command, session, |line, _| read(line, matrix))
    })?;
    Ok(())
}

/// Reads a rate from a line of the guest, and refuses disks whose write caches differ.
fn read(line: &str, matrix: &mut Matrix<PeerJob>) -> Result<(), CommandError> {
    let number = |word: &str| word.parse::<usize>().ok();
    match line.split(' ').collect::<Vec<_>>()[..] {
        ["guest:", "rate", disk, job, rate] => {
            let row = number(job).and_then(|job| matrix.rows.get_mut(job));
            let side = row.and_then(|row| row.sides.get_mut(number(disk)?));
            match (side, rate.parse::<f64>()) {
                (Some(side), Ok(rate)) if rate > 0.0 => {
                    side.turns.push(Turn(json!({ RATE: rate })));
                    Ok(())
                }
                _ => Err(CommandError::Failed(format!("fio in a guest: {line}"))),
            }
        }
        ["guest:", "cache", disk, "write", cache] if cache != "back" => {
            let sides = matrix.rows.first().map_or(&[][..], |row| &row.sides);
            let side = number(disk).and_then(|disk| sides.get(disk));
            let name = side.map_or(OURS, |side| &side.name);
            Err(CommandError::Failed(format!(
                "{name}: the guest says that its write cache is {cache}: it cannot be compared with the others, which are \
                 writeback"
            )))
        }
        _ => Ok(()),
    }
}
