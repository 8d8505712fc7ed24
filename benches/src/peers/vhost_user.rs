//! Over vhost-user, with a virtio driver in this process as client, which serves all disks in one thread.

use std::process::Command;
use std::time::Duration;

use walvisor::commands::CommandError;
use walvisor_tests::vhost_user_client::VhostUserClient;

use super::place::{DISK_BYTES, DISKS, ImageDirectory};
use super::turns::{PeerDoor, PeerFailure, PeerJob, PeerRow, Schedule, Side, need, take_turns};
use crate::daemon::Daemon;
use crate::load::point::LoadJob;
use crate::load::vhost_user::drive;
use crate::peer::Peer;
use crate::session::Session;

const fn job(
    name: &'static str,
    work: LoadJob,
    disks: usize,
    queues: usize,
    depth: usize,
    goal: f64,
) -> PeerJob {
    PeerJob {
        name,
        work,
        disks,
        queues,
        depth,
        goal,
    }
}

pub const JOBS: [PeerJob; 5] = [
    job("write + flush, 1 client", LoadJob::WriteFsync, 1, 1, 1, 1.0),
    job(
        "write + flush, 16 clients, 4 queues",
        LoadJob::WriteFsync,
        1,
        4,
        4,
        2.0,
    ),
    job(
        "write + flush, 4 disks x 4 clients",
        LoadJob::WriteFsync,
        4,
        1,
        4,
        3.0,
    ),
    job("write, 32 in flight", LoadJob::Write, 1, 1, 32, 1.0),
    job("read, 32 in flight", LoadJob::Read, 1, 1, 32, 1.0),
];

/// Queues of each disk.
const QUEUES: usize = 4;

/// Time of a turn beyond the measured time.
pub const BEFORE: Duration = Duration::from_millis(100);

/// Measures all jobs.
pub fn measure(
    place: &ImageDirectory,
    jobs: &[&'static PeerJob],
    pace: Schedule,
    session: &Session,
) -> Result<Vec<PeerRow>, PeerFailure> {
    need("qemu-storage-daemon", "qemu-system-common")?;
    place.make_images(DISKS)?;
    let sockets = |side: &str| -> Vec<String> {
        let disks = 0..DISKS;
        disks.map(|disk| format!("{side}-{disk}.sock")).collect()
    };
    let sockets = [sockets("ours"), sockets("peer")];
    let specs = sockets[0].iter().enumerate();
    let specs: Vec<String> = specs
        .map(|(disk, socket)| {
            format!("path=ours-{disk}.img,log=log,queues={QUEUES},socket={socket}")
        })
        .collect();
    let mut theirs = Command::new("qemu-storage-daemon");
    for (disk, socket) in sockets[1].iter().enumerate() {
        theirs.arg("--blockdev").arg(format!(
            "driver=file,node-name=disk{disk},filename=peer-{disk}.img,aio=io_uring,cache.direct=on,discard=unmap"
        ));
        theirs.arg("--export").arg(format!(
            "type=vhost-user-blk,id=export{disk},node-name=disk{disk},addr.type=unix,addr.path={socket},writable=on,\
             num-queues={QUEUES}"
        ));
    }
    let ours = Daemon::start("vhost-user", &specs, place.path(), place.path())?;
    let theirs = Peer::start(&mut theirs, &sockets[1], place.path())?;
    let rate = |side: usize, job: &PeerJob, turn| -> Result<f64, CommandError> {
        let failed = |error| CommandError::Failed(format!("vhost-user: {}: {error}", job.name));
        let paths = sockets[side]
            .iter()
            .take(job.disks)
            .map(|name| place.path().join(name));
        let clients: Result<Vec<_>, _> = paths
            .map(|path| VhostUserClient::connect(&path, job.queues))
            .collect();
        let loops = (job.work, job.queues, job.depth);
        let tally = drive(&mut clients.map_err(failed)?, loops, DISK_BYTES, turn);
        Ok(tally.map_err(failed)?.rate())
    };
    let sides: [(&str, &dyn Side); 2] = [("walvisor", &ours), ("qemu-storage-daemon", &theirs)];
    Ok(take_turns(
        (PeerDoor::VhostUser, jobs),
        pace,
        BEFORE,
        session,
        &sides,
        rate,
    )?)
}
