//! The disk of a guest that QEMU emulates: over vhost-user, compared with QEMU's own virtio-blk with and without the host's
//! page cache. One guest has all three disks, and runs one fio.

use std::ffi::OsString;
use std::time::Duration;

use walvisor::commands::CommandError;

use super::place::ImageDirectory;
use super::turns::{PeerDoor, PeerFailure, PeerRow, Schedule, need};
use crate::daemon::Daemon;
use crate::guests;
use crate::session::Session;

const FIO: &str = include_str!("../../scripts/peers-fio.sh");

/// Name, fio's kind, requests in flight, whether each write is flushed. A quick run uses the first two.
const JOBS: [(&str, &str, usize, u8); 4] = [
    ("write + flush, 1 in flight", "randwrite", 1, 1),
    ("read, 32 in flight", "randread", 32, 0),
    ("read, 1 in flight", "randread", 1, 0),
    ("write, 32 in flight", "randwrite", 32, 0),
];

const OURS: &str = "walvisor";
const PEERS: [&str; 2] = ["QEMU, cache=none", "QEMU, cache=writeback"];

/// Time that a guest takes to boot and to shut down.
const OVERHEAD: Duration = Duration::from_secs(8);

/// Estimated time of the measurement.
pub fn expected(pace: Schedule) -> Duration {
    OVERHEAD + expected_jobs(pace, of(pace, &JOBS).len() * 3)
}

/// The jobs that are measured: all, or the first two if quick.
pub fn of<T>(pace: Schedule, jobs: &[T]) -> &[T] {
    if pace.quick { &jobs[..2] } else { jobs }
}

/// Time of this many jobs of fio in all rounds.
pub fn expected_jobs(pace: Schedule, jobs: usize) -> Duration {
    (pace.turn + Duration::from_millis(700)) * (pace.rounds * jobs) as u32
}

/// Measures all jobs.
pub fn measure(
    place: &ImageDirectory,
    pace: Schedule,
    session: &Session,
) -> Result<Vec<PeerRow>, PeerFailure> {
    need("qemu-system-x86_64", "qemu-system-x86")?;
    place.make_images(1)?;
    let spec = "path=ours-0.img,log=log,socket=guest.sock,queues=2".to_owned();
    let _ours = Daemon::start("vhost-user", &[spec], place.path(), place.path())?;
    let path = |name: &str| place.path().join(name).display().to_string();
    let socket = path("guest.sock");
    let image = path("peer-0.img");
    let direct = format!("file={image},format=raw,if=none,aio=io_uring,cache=none,discard=unmap");
    // QEMU's two disks can share an image, because no job checks its content.
    let cached =
        format!("file={image},format=raw,if=none,cache=writeback,discard=unmap,file.locking=off");
    let arguments = [
        "--".to_owned(),
        "-chardev".to_owned(),
        format!("socket,id=disk,path={socket}"),
        "-device".to_owned(),
        "vhost-user-blk-pci,chardev=disk,num-queues=2".to_owned(),
        "-drive".to_owned(),
        format!("{direct},file.locking=off,id=direct"),
        "-device".to_owned(),
        "virtio-blk-pci,drive=direct,num-queues=2".to_owned(),
        "-drive".to_owned(),
        format!("{cached},id=cached"),
        "-device".to_owned(),
        "virtio-blk-pci,drive=cached,num-queues=2".to_owned(),
    ];
    let arguments: Vec<OsString> = arguments.into_iter().map(OsString::from).collect();
    let disks = "vda vdb vdc".split(' ').zip([0, 1, 2]);
    let disks: Vec<String> = disks
        .map(|(device, number)| format!("{number}={device}"))
        .collect();
    let jobs = of(pace, &JOBS);
    let script = script(jobs, &disks.join(" "), pace) + FIO;
    let names = |number: &str| match number {
        "0" => None,
        "1" => Some(PEERS[0]),
        _ => Some(PEERS[1]),
    };
    let mut rows = rows(PeerDoor::Qemu, jobs, None);
    let expected = expected(pace);
    session.step("QEMU", expected, || {
        guests::run("emulated", &script, &arguments, session, |line| {
            read(line, &mut rows, names)
        })
    })?;
    Ok(rows)
}

/// The settings of the script.
pub fn script(jobs: &[(&str, &str, usize, u8)], disks: &str, pace: Schedule) -> String {
    let jobs: Vec<String> = jobs
        .iter()
        .enumerate()
        .map(|(number, (_, kind, depth, flush))| format!("{number}:{kind}:{depth}:{flush}"))
        .collect();
    format!(
        "JOBS='{}' DISKS='{disks}' ROUNDS={} TURN={}\n",
        jobs.join(" "),
        pace.rounds,
        pace.turn.as_secs()
    )
}

/// A row for each job.
pub fn rows(door: PeerDoor, jobs: &[(&str, &str, usize, u8)], goal: Option<f64>) -> Vec<PeerRow> {
    let jobs = jobs.iter();
    jobs.map(|job| PeerRow::new(door, job.0, goal)).collect()
}

/// Reads a rate from a line of the guest, and refuses disks whose write caches differ. `peer` returns the peer of a disk in
/// the script, or `None` for the disk of `walvisor`.
pub fn read<'a>(
    line: &str,
    rows: &mut [PeerRow],
    peer: impl Fn(&str) -> Option<&'a str>,
) -> Result<(), CommandError> {
    match line.split(' ').collect::<Vec<_>>()[..] {
        ["guest:", "rate", disk, job, rate] => {
            let (job, rate) = (job.parse::<usize>(), rate.parse::<f64>());
            match (job, rate) {
                (Ok(job), Ok(rate)) if job < rows.len() && rate > 0.0 => {
                    rows[job].add(peer(disk), rate);
                    Ok(())
                }
                _ => Err(CommandError::Failed(format!("fio in a guest: {line}"))),
            }
        }
        ["guest:", "cache", disk, "write", cache] if cache != "back" => {
            let name = peer(disk).unwrap_or(OURS);
            Err(CommandError::Failed(format!(
                "{name}: the guest says that its write cache is {cache}: it cannot be compared with the others, which are \
                 writeback"
            )))
        }
        _ => Ok(()),
    }
}
