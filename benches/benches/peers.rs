//! The disk beside those of others: `walvisor serve vhost-user` beside qemu-storage-daemon, `walvisor serve nbd` beside
//! qemu-nbd, each with the same client on the same file system, taking turns. The peers open their images as a careful
//! host does: `cache.direct`, io_uring, FLUSH = fdatasync.
//!
//! `cargo bench -p walvisor-benches --bench peers`; with `-- --json`, the same as JSON; `-- --dir DIR`: on the file system
//! of DIR; `-- --job TEXT`: only the jobs with TEXT in their name. Over vhost-user the client is a virtio driver in this process, one thread; over NBD it is fio.

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use walvisor::vhost_user_client::VhostUserClient;
use walvisor_benches::spread::Spread;
use walvisor_guest_images::walvisor_binary;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// How often both take turns, and for how long each time.
const ROUNDS: usize = 5;
const TURN: Duration = Duration::from_secs(2);
/// Disks of each side, and bytes of each.
const DISKS: usize = 4;
const DISK_BYTES: u64 = 256 << 20;
const BLOCK: usize = 4096;
/// Queues of each disk over vhost-user.
const QUEUES: usize = 4;

/// What a client does over and over.
#[derive(Clone, Copy, PartialEq)]
enum Work {
    /// A write, and once it has ended a FLUSH: one commit.
    Commit,
    Write,
    Read,
}

struct Job {
    name: &'static str,
    work: Work,
    disks: usize,
    queues: usize,
    /// Requests in flight of each queue.
    depth: usize,
    /// What `walvisor` should at least reach of its peer.
    goal: f64,
}

const VHOST_USER: [Job; 5] = [
    job("write + flush, 1 client", Work::Commit, 1, 1, 1, 1.0),
    job(
        "write + flush, 16 clients, 4 queues",
        Work::Commit,
        1,
        4,
        4,
        2.0,
    ),
    job(
        "write + flush, 4 disks x 4 clients",
        Work::Commit,
        4,
        1,
        4,
        3.0,
    ),
    job("write, 32 in flight", Work::Write, 1, 1, 32, 1.0),
    job("read, 32 in flight", Work::Read, 1, 1, 32, 1.0),
];

/// Each queue is a connection.
const NBD: [Job; 4] = [
    job("write + flush, 1 connection", Work::Commit, 1, 1, 1, 1.0),
    job("write + flush, 16 connections", Work::Commit, 1, 16, 1, 2.0),
    job("write, 32 in flight", Work::Write, 1, 1, 32, 1.0),
    job("read, 32 in flight", Work::Read, 1, 1, 32, 1.0),
];

const fn job(
    name: &'static str,
    work: Work,
    disks: usize,
    queues: usize,
    depth: usize,
    goal: f64,
) -> Job {
    Job {
        name,
        work,
        disks,
        queues,
        depth,
        goal,
    }
}

struct Row {
    door: &'static str,
    peer: &'static str,
    job: &'static Job,
    ours: Spread,
    theirs: Spread,
    /// Of the medians.
    ratio: f64,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("peers: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Outcome<()> {
    let arguments: Vec<String> = std::env::args().collect();
    let as_json = arguments.iter().any(|argument| argument == "--json");
    let value = |name: &str| {
        let at = arguments.iter().position(|argument| argument == name)?;
        arguments.get(at + 1).cloned()
    };
    let directory = match value("--dir") {
        Some(directory) => tempfile::tempdir_in(directory)?,
        None => tempfile::tempdir()?,
    };
    let wanted = value("--job").unwrap_or_default();
    let directory = directory.path();
    for (program, package) in [
        ("qemu-storage-daemon", "qemu-system-common"),
        ("qemu-nbd", "qemu-utils"),
        ("fio", "fio"),
    ] {
        if Command::new(program).arg("--version").output().is_err() {
            return Err(format!("{program} is missing: install the package {package}").into());
        }
    }
    let walvisor = walvisor_binary("release")?;
    make_images(&walvisor, directory)?;
    let wanted = |jobs: &'static [Job]| -> Vec<&'static Job> {
        let jobs = jobs.iter();
        jobs.filter(|job| job.name.contains(&wanted)).collect()
    };
    let mut rows = vhost_user(&walvisor, directory, &wanted(&VHOST_USER))?;
    rows.extend(nbd(&walvisor, directory, &wanted(&NBD))?);
    match as_json {
        true => println!("{}", serde_json::to_string_pretty(&to_json(&rows))?),
        false => print(&rows),
    }
    Ok(())
}

/// Images full of bytes that are no zeroes: raw ones for the peers, and the same imported for `walvisor`, on one log.
fn make_images(walvisor: &Path, directory: &Path) -> Outcome<()> {
    let bytes: Vec<u8> = (0..DISK_BYTES / 8)
        .flat_map(|word| word.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes())
        .collect();
    for disk in 0..DISKS {
        let raw = directory.join(format!("peer-{disk}.img"));
        std::fs::write(&raw, &bytes)?;
        std::fs::File::open(&raw)?.sync_all()?;
        let output = Command::new(walvisor)
            .args(["disk", "import"])
            .arg(directory.join(format!("ours-{disk}.img")))
            .arg(&raw)
            .arg("--log")
            .arg(directory.join("log"))
            .output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into());
        }
    }
    Ok(())
}

/// A daemon, asked to stop when dropped.
struct Daemon(Child);

impl Daemon {
    /// Starts it, and waits until there is a socket at each of `sockets`.
    fn start(command: &mut Command, sockets: &[String], directory: &Path) -> Outcome<Self> {
        let daemon = Self(
            command
                .current_dir(directory)
                .stdout(Stdio::null())
                .spawn()?,
        );
        let end = Instant::now() + Duration::from_secs(60);
        while sockets
            .iter()
            .any(|socket| !directory.join(socket).exists())
        {
            if Instant::now() > end {
                return Err(format!("{command:?} does not serve").into());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(daemon)
    }

    /// `walvisor serve`: ready when it has said where each disk is.
    fn walvisor(command: &mut Command, disks: usize, directory: &Path) -> Outcome<Self> {
        let mut child = command
            .current_dir(directory)
            .stdout(Stdio::piped())
            .spawn()?;
        let lines = BufReader::new(child.stdout.take().ok_or("no output")?).lines();
        let daemon = Self(child);
        match lines.take(disks).filter(Result::is_ok).count() == disks {
            true => Ok(daemon),
            false => Err(format!("{command:?} does not serve").into()),
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Asked again and again: qemu-nbd does not hear it while it starts.
        for _ in 0..100 {
            if let Some(pid) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
                // Gone already is as good.
                let _ = kill_process(pid, Signal::TERM);
            }
            std::thread::sleep(Duration::from_millis(50));
            if !matches!(self.0.try_wait(), Ok(None)) {
                return;
            }
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn vhost_user(walvisor: &Path, directory: &Path, jobs: &[&'static Job]) -> Outcome<Vec<Row>> {
    if jobs.is_empty() {
        return Ok(Vec::new());
    }
    let sockets = |side: &str| -> Vec<String> {
        (0..DISKS)
            .map(|disk| format!("{side}-{disk}.sock"))
            .collect()
    };
    let (our_sockets, their_sockets) = (sockets("ours"), sockets("peer"));
    let mut ours = Command::new(walvisor);
    ours.args(["serve", "vhost-user"]);
    let mut theirs = Command::new("qemu-storage-daemon");
    for disk in 0..DISKS {
        ours.args([
            "--disk".to_owned(),
            format!(
                "path=ours-{disk}.img,log=log,queues={QUEUES},socket={}",
                our_sockets[disk]
            ),
        ]);
        theirs.args([
            "--blockdev".to_owned(),
            format!(
                "driver=file,node-name=disk{disk},filename=peer-{disk}.img,aio=io_uring,cache.direct=on,discard=unmap"
            ),
            "--export".to_owned(),
            format!(
                "type=vhost-user-blk,id=export{disk},node-name=disk{disk},addr.type=unix,addr.path={},writable=on,\
                 num-queues={QUEUES}",
                their_sockets[disk]
            ),
        ]);
    }
    let _ours = Daemon::walvisor(&mut ours, DISKS, directory)?;
    let _theirs = Daemon::start(&mut theirs, &their_sockets, directory)?;
    let rate = |sockets: &[String], job: &Job| -> Outcome<f64> {
        let sockets = sockets.iter().take(job.disks);
        let clients =
            sockets.map(|socket| VhostUserClient::connect(&directory.join(socket), job.queues));
        drive(&mut clients.collect::<Result<Vec<_>, _>>()?, job)
    };
    let mut rows = Vec::new();
    for &job in jobs {
        rows.push(compare("vhost-user", "qemu-storage-daemon", job, |own| {
            rate(if own { &our_sockets } else { &their_sockets }, job)
        })?);
    }
    Ok(rows)
}

/// Closed loops over every queue of every client; what ended in a second, commits counted once.
fn drive(clients: &mut [VhostUserClient], job: &Job) -> Outcome<f64> {
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut offset = move || {
        // Xorshift (Marsaglia 2003).
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % (DISK_BYTES / BLOCK as u64) * BLOCK as u64
    };
    let data = [0x5a; BLOCK];
    // By client, queue and slot: the FLUSH of a commit is on its way.
    let mut flushing = vec![vec![vec![false; job.depth]; job.queues]; clients.len()];
    let mut begin = |client: &mut VhostUserClient, queue: usize, slot: usize| {
        let buffer = queue * job.depth + slot;
        match job.work {
            Work::Read => client.read(queue, buffer, offset(), BLOCK),
            _ => client.write(queue, buffer, offset(), &data),
        }
    };
    for client in clients.iter_mut() {
        for queue in 0..job.queues {
            (0..job.depth).try_for_each(|slot| begin(client, queue, slot))?;
            client.kick(queue)?;
        }
    }
    let (mut done, mut in_flight) = (0_u64, clients.len() * job.queues * job.depth);
    let began = Instant::now();
    let mut took = TURN;
    while in_flight > 0 {
        let over = began.elapsed() >= TURN;
        let mut any = false;
        for (client, flushing) in clients.iter_mut().zip(&mut flushing) {
            for (queue, flushing) in flushing.iter_mut().enumerate() {
                let ended = client.ended(queue);
                any |= !ended.is_empty();
                for &(buffer, status) in &ended {
                    assert_eq!(status, 0, "a request failed");
                    let slot = buffer - queue * job.depth;
                    if job.work == Work::Commit && !flushing[slot] {
                        flushing[slot] = true;
                        client.flush(queue, buffer)?;
                        continue;
                    }
                    flushing[slot] = false;
                    if over {
                        in_flight -= 1;
                        continue;
                    }
                    done += 1;
                    begin(client, queue, slot)?;
                }
                if !ended.is_empty() {
                    client.kick(queue)?;
                }
            }
        }
        if over && took == TURN {
            took = began.elapsed();
        }
        if !any && in_flight > 0 {
            wait(clients, job.queues)?;
        }
    }
    Ok(done as f64 / took.as_secs_f64())
}

/// Sleeps until some queue has had an interrupt.
fn wait(clients: &mut [VhostUserClient], queues: usize) -> Outcome<()> {
    let each = || {
        clients
            .iter()
            .flat_map(|client| (0..queues).map(move |queue| (client, queue)))
    };
    let mut fds: Vec<_> = each()
        .map(|(client, queue)| PollFd::from_borrowed_fd(client.event(queue), PollFlags::IN))
        .collect();
    let patience = Timespec {
        tv_sec: 20,
        tv_nsec: 0,
    };
    let ready = poll(&mut fds, Some(&patience)).expect("poll");
    assert!(ready > 0, "no request has ended for 20 s");
    let rung: Vec<bool> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
    for (at, _) in rung.iter().enumerate().filter(|(_, rung)| **rung) {
        clients[at / queues].clear(at % queues)?;
    }
    Ok(())
}

fn nbd(walvisor: &Path, directory: &Path, jobs: &[&'static Job]) -> Outcome<Vec<Row>> {
    if jobs.is_empty() {
        return Ok(Vec::new());
    }
    let (our_socket, their_socket) = ("ours.nbd", "peer.nbd");
    let mut ours = Command::new(walvisor);
    ours.args(["serve", "nbd", "--disk"]);
    ours.arg(format!(
        "path=ours-0.img,log=log,socket={our_socket},serial=disk"
    ));
    let mut theirs = Command::new("qemu-nbd");
    theirs.args([
        "--format=raw",
        "--cache=none",
        "--aio=io_uring",
        "--discard=unmap",
    ]);
    theirs.args(["--shared=64", "--persistent", "--export-name=disk"]);
    theirs.arg(format!(
        "--socket={}",
        directory.join(their_socket).display()
    ));
    theirs.arg("peer-0.img");
    let _ours = Daemon::walvisor(&mut ours, 1, directory)?;
    let _theirs = Daemon::start(&mut theirs, &[their_socket.to_owned()], directory)?;
    let mut rows = Vec::new();
    for &job in jobs {
        rows.push(compare("nbd", "qemu-nbd", job, |own| {
            fio(directory, if own { our_socket } else { their_socket }, job)
        })?);
    }
    Ok(rows)
}

fn fio(directory: &Path, socket: &str, job: &Job) -> Outcome<f64> {
    let socket = directory.join(socket);
    let mut command = Command::new("fio");
    command.args([
        "--name=peers",
        "--ioengine=nbd",
        "--thread",
        "--group_reporting",
    ]);
    command.args(["--time_based", "--output-format=json", "--bs=4k"]);
    command.arg(format!(
        "--uri=nbd+unix:///disk?socket={}",
        socket.display()
    ));
    command.arg(format!("--size={DISK_BYTES}"));
    command.arg(format!("--runtime={}", TURN.as_secs()));
    command.arg(format!("--numjobs={}", job.queues));
    command.arg(format!("--iodepth={}", job.depth));
    command.arg(match job.work {
        Work::Read => "--rw=randread",
        _ => "--rw=randwrite",
    });
    if job.work == Work::Commit {
        command.arg("--fsync=1");
    }
    let output = command.current_dir(directory).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    // fio may have something to say before its report.
    let report = text.find('{').map(|at| &text[at..]);
    let report: Value = match report.map(serde_json::from_str) {
        Some(Ok(report)) if output.status.success() => report,
        _ => return Err(format!("fio failed: {}", String::from_utf8_lossy(&output.stderr)).into()),
    };
    let iops = |kind: &str| report["jobs"][0][kind]["iops"].as_f64().unwrap_or(0.0);
    Ok(iops("read") + iops("write"))
}

/// Both take turns at a job.
fn compare(
    door: &'static str,
    peer: &'static str,
    job: &'static Job,
    mut rate: impl FnMut(bool) -> Outcome<f64>,
) -> Outcome<Row> {
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        // Neither is always the first.
        for own in [round % 2 == 0, round % 2 != 0] {
            let rates = if own { &mut ours } else { &mut theirs };
            rates.push(rate(own)?);
        }
    }
    let (Some(ours), Some(theirs)) = (Spread::of(&ours), Spread::of(&theirs)) else {
        return Err("no round was run".into());
    };
    eprintln!(
        "{door}: {}: {:.0} beside {:.0}",
        job.name, ours.median, theirs.median
    );
    Ok(Row {
        door,
        peer,
        job,
        ours,
        theirs,
        ratio: ours.median / theirs.median,
    })
}

fn print(rows: &[Row]) {
    println!("a second: median of {ROUNDS} turns of {TURN:?} (lowest to highest); 4 KiB, random\n");
    println!("| door | job | walvisor | peer | ratio | goal |");
    println!("|---|---|---|---|---|---|");
    let spread = |of: &Spread| format!("{:.0} ({:.0} to {:.0})", of.median, of.min, of.max);
    for row in rows {
        println!(
            "| {} | {} | {} | {} {} | {:.2} | {:.1} |",
            row.door,
            row.job.name,
            spread(&row.ours),
            row.peer,
            spread(&row.theirs),
            row.ratio,
            row.job.goal
        );
    }
}

fn to_json(rows: &[Row]) -> Value {
    let spread = |of: &Spread| json!({"median": of.median, "min": of.min, "max": of.max});
    let row = |row: &Row| {
        json!({
            "door": row.door,
            "job": row.job.name,
            "peer": row.peer,
            "walvisor_per_s": spread(&row.ours),
            "peer_per_s": spread(&row.theirs),
            "ratio": row.ratio,
            "goal": row.job.goal,
        })
    };
    json!({ "rounds": ROUNDS, "turn_s": TURN.as_secs_f64(), "rows": rows.iter().map(row).collect::<Vec<_>>() })
}
