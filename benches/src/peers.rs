//! `walvisor-bench peers`: the disk compared with those of other programs. All use the same client
//! and file system, and take turns.
//!
//! ```text
//!   virtio driver in this process ─▶ serve vhost-user  │ qemu-storage-daemon
//!   fio's nbd engine              ─▶ serve nbd         │ qemu-nbd
//!   fio in one emulated guest     ─▶ serve vhost-user  │ QEMU's own virtio-blk
//!   fio in user-mode Linux        ─▶ serve tcmu        │ tcmu-runner
//! ```
//! The peers open their images like a careful host (`cache.direct`, io_uring, FLUSH = fdatasync),
//! and once like a careless one (`cache=writeback`). If a peer is not installed, a note names its
//! package, and the others are measured.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use clap::Args;
use serde_json::{Value, json};
use walvisor::commands::CommandError;
use walvisor_storage::StoreOptions;
use walvisor_testkit::vhost_user_client::VhostUserClient;

use crate::bench::{Bench, Matrix, Row, Settings, Side, TakeTurns, Turn};
use crate::bench_dirs::{BenchDirs, LOGGED, make_disk, make_disks};
use crate::daemon::{Daemon, HaltGuard};
use crate::guests::{self, write_script};
use crate::load::vhost_user::drive;
use crate::output::Output;
use crate::programs::{missing, not_measured, walvisor};
use crate::serve::serve;
use crate::session::Session;

const MATRICES: &str = include_str!("../matrices/peers.toml");
const FIO: &str = include_str!("../scripts/peers-fio.sh");
const TARGET: &str = include_str!("../scripts/peers-target.sh");

/// The ways to reach a disk: over vhost-user, compared with qemu-storage-daemon; over NBD, compared
/// with qemu-nbd; as a disk of an emulated machine, compared with QEMU's own disks; in user-mode
/// Linux, compared with tcmu-runner.
const DOORS: [&str; 4] = ["vhost-user", "nbd", "qemu", "tcmu"];
/// Number of disks of each side over vhost-user, and bytes of each disk.
const DISKS: usize = 4;
const DISK_BYTES: u64 = 256 << 20;
/// Unmeasured work of each daemon before its first turn, to reach the steady state: all segment
/// files of the log exist, and all blocks of the peers' images are allocated.
const WARM_UP: Duration = Duration::from_secs(5);
const MODULES: [&str; 5] = ["configfs", "sd_mod", "uio", "target_core_user", "tcm_loop"];

/// Arguments of `walvisor-bench peers`.
#[derive(Debug, Args)]
pub struct PeersArguments {
    /// Only these doors, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "DOOR,DOOR..", value_parser = DOORS)]
    only: Vec<String>,
    /// Only the jobs with this in their name
    #[arg(long, value_name = "TEXT", default_value = "")]
    job: String,
    #[command(flatten)]
    output: Output,
}

/// Programs that a door needs, with their packages.
fn needs(door: &str) -> &'static [(&'static str, &'static str)] {
    match door {
        "vhost-user" => &[("qemu-storage-daemon", "qemu-system-common")],
        "nbd" => &[("qemu-nbd", "qemu-utils"), ("fio", "fio")],
        "qemu" => &[("qemu-system-x86_64", "qemu-system-x86")],
        _ => &[
            ("linux.uml", "user-mode-linux"),
            ("tcmu-runner", "tcmu-runner"),
            ("dbus-daemon", "dbus"),
            ("qemu-img", "qemu-utils"),
            ("fio", "fio"),
            ("modprobe", "kmod"),
        ],
    }
}

/// Runs `walvisor-bench peers`.
///
/// # Errors
/// If the measurement of an installed peer fails.
pub fn run(arguments: &PeersArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let mut bench = Bench::new(MATRICES, output, &[], &Settings::new());
    let matrix = &mut bench.matrices[0];
    matrix.rows.retain(|row| {
        let job = &row.sides[0];
        let slow = output.quick && job.plan["slow"] == true;
        let door =
            arguments.only.is_empty() || arguments.only.iter().any(|door| door == job.text("door"));
        door && !slow && job.text("title").contains(&arguments.job)
    });
    let session = bench.start()?;
    let place = BenchDirs::new(&output.dir)?;
    let matrix = &mut bench.matrices[0];
    let (mut done, mut failed) = (Vec::new(), Ok(()));
    for door in DOORS {
        let rows = matrix
            .rows
            .extract_if(.., |row| row.sides[0].text("door") == door);
        let mut these = Matrix {
            spec: matrix.spec.clone(),
            rows: rows.collect(),
            notes: Vec::new(),
        };
        if these.rows.is_empty() || session.interrupted() {
            continue;
        }
        if let Some(need) = missing(needs(door)) {
            matrix.notes.push(not_measured(need));
            continue;
        }
        let measured = match door {
            "vhost-user" => vhost_user(&place, &mut these, &session),
            "nbd" => nbd(&place, &mut these, &session),
            "qemu" => qemu(&place, &mut these, &session),
            _ => tcmu(&place, &mut these, &session),
        };
        done.append(&mut these.rows);
        if let Err(error) = measured {
            matrix.notes.push(format!("Not measured: {error}"));
            failed = failed.and(Err(error));
        }
    }
    matrix.rows = done;
    bench.finish(session, failed)
}

/// The daemons of a door, which all run. While one is measured, the others are stopped.
struct Daemons<R> {
    daemons: Vec<(String, Daemon)>,
    /// Measures the rate of a side.
    rate: R,
}

impl<R: Fn(&Side, Duration) -> Result<f64, CommandError>> Daemons<R> {
    fn alone(&self, side: &Side, turn: Duration) -> Result<f64, CommandError> {
        let others = self.daemons.iter().filter(|(name, _)| *name != side.side);
        let _halted: Vec<HaltGuard> = others.map(|(_, daemon)| daemon.halt()).collect();
        (self.rate)(side, turn)
    }

    /// Measures all rows, after each daemon has worked for a while unless the turns are short.
    fn measure(mut self, matrix: &mut Matrix, session: &Session) -> Result<(), CommandError> {
        for side in &matrix.rows[0].sides {
            if side.number("turn_s") > 1 {
                let mut warm_up = side.clone();
                warm_up.plan.insert("job".to_owned(), "randwrite".into());
                warm_up.plan.insert("depth".to_owned(), 32.into());
                let what = format!("{}: warming up", side.name);
                session.step(&what, WARM_UP, || self.alone(&warm_up, WARM_UP))?;
            }
        }
        matrix.measure_rows(session, &mut self)
    }
}

impl<R: Fn(&Side, Duration) -> Result<f64, CommandError>> TakeTurns for Daemons<R> {
    fn prepare(&mut self, _: &Row) -> Result<(), CommandError> {
        self.daemons
            .iter()
            .try_for_each(|(_, daemon)| daemon.checkpoint())
    }

    fn turn(&mut self, side: &Side) -> Result<Turn, CommandError> {
        let rate = self.alone(side, Duration::from_secs(side.number("turn_s")))?;
        Ok(Turn(json!({ "per_s": rate })))
    }
}

/// Starts what serves the sides of a door, each with sockets of its own for its disks.
fn serve_all(
    place: &BenchDirs,
    door: &str,
    matrix: &Matrix,
    disks: usize,
) -> Result<Vec<(String, Daemon)>, CommandError> {
    let mut daemons = Vec::new();
    for side in &matrix.rows[0].sides {
        let sockets: Vec<PathBuf> = (0..disks).map(|disk| socket(place, side, disk)).collect();
        // Each daemon needs a directory for its control socket.
        let control = tempfile::tempdir_in(place.sockets()).map_err(CommandError::failed)?;
        let served = serve(side, door, place.images(), &control.keep(), &sockets)?;
        daemons.extend(served.into_iter().map(|daemon| (side.side.clone(), daemon)));
    }
    Ok(daemons)
}

fn socket(place: &BenchDirs, side: &Side, disk: usize) -> PathBuf {
    place.sockets().join(format!("{}-{disk}", side.side))
}

/// Over vhost-user, with a virtio driver in this process as client, which serves all disks in one
/// thread.
fn vhost_user(
    place: &BenchDirs,
    matrix: &mut Matrix,
    session: &Session,
) -> Result<(), CommandError> {
    make_disks(
        place.images(),
        DISKS,
        DISK_BYTES,
        LOGGED,
        &StoreOptions::default(),
    )?;
    let rate = |side: &Side, turn: Duration| {
        let failed =
            |error| CommandError::Failed(format!("vhost-user: {}: {error}", side.text("title")));
        let [disks, queues, depth] =
            ["disks", "queues", "depth"].map(|name| side.number(name) as usize);
        let connect = |disk| VhostUserClient::try_connect(&socket(place, side, disk), queues);
        let clients = (0..disks).map(connect).collect::<Result<Vec<_>, _>>();
        let mut clients = clients.map_err(failed)?;
        let job = serde_json::from_value(side.plan["job"].clone()).map_err(CommandError::failed)?;
        let tally = drive(&mut clients, (job, queues, depth), DISK_BYTES, turn);
        Ok(tally.map_err(failed)?.rate())
    };
    let daemons = serve_all(place, "vhost-user", matrix, DISKS)?;
    Daemons { daemons, rate }.measure(matrix, session)
}

/// Over NBD, with fio as client. Each queue is a connection.
fn nbd(place: &BenchDirs, matrix: &mut Matrix, session: &Session) -> Result<(), CommandError> {
    let (images, options) = (place.images(), StoreOptions::default());
    make_disks(images, 1, DISK_BYTES, LOGGED, &options)?;
    make_disk(
        images,
        "raw-0.img",
        DISK_BYTES,
        ("memory.img", "memory-log"),
        &options,
    )?;
    let rate = |side: &Side, turn| fio(&socket(place, side, 0), side, turn);
    let daemons = serve_all(place, "nbd", matrix, 1)?;
    Daemons { daemons, rate }.measure(matrix, session)
}

fn fio(socket: &Path, side: &Side, turn: Duration) -> Result<f64, CommandError> {
    let (kind, flushes) = job(side);
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
    command.arg(format!("--numjobs={}", side.number("queues")));
    command.arg(format!("--iodepth={}", side.number("depth")));
    command.arg(format!("--rw={kind}"));
    command.arg(format!("--fsync={flushes}"));
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

/// A side's job as fio's kind of access, and how many writes come before each FLUSH: 0 for none.
fn job(side: &Side) -> (&str, u8) {
    let job = side.text("job");
    match job.strip_suffix("+fsync") {
        Some(kind) => (kind, 1),
        None => (job, 0),
    }
}

/// In a guest that QEMU emulates, which has a disk over vhost-user, and QEMU's own virtio-blk with
/// and without the host's page cache.
fn qemu(place: &BenchDirs, matrix: &mut Matrix, session: &Session) -> Result<(), CommandError> {
    matrix.sides_mut().for_each(|side| side.emulated = true);
    make_disks(
        place.images(),
        1,
        DISK_BYTES,
        LOGGED,
        &StoreOptions::default(),
    )?;
    let (ours, sockets) = (&matrix.rows[0].sides[0], [place.sockets().join("guest")]);
    let _daemons = serve(
        ours,
        "vhost-user",
        place.images(),
        place.sockets(),
        &sockets,
    )?;
    let socket = sockets[0].display();
    let image = place.images().join("raw-0.img");
    let drive = |name: &str, options: &str| {
        // QEMU's two disks can share an image, because no job checks its content.
        let options = format!("{options},discard=unmap,file.locking=off");
        let file = image.display();
        format!("file={file},format=raw,if=none,id={name},{options}")
    };
    let mut command = guests::command("emulated")?;
    let script = guest_settings(matrix) + "DISKS='0=vda 1=vdb 2=vdc'\n" + FIO;
    command
        .arg(write_script(place.images(), "qemu.sh", &script)?)
        .arg("--");
    command.args(["-chardev", &format!("socket,id=disk,path={socket}")]);
    command.args(["-device", "vhost-user-blk-pci,chardev=disk,num-queues=2"]);
    command.args(["-drive", &drive("direct", "aio=io_uring,cache=none")]);
    command.args(["-device", "virtio-blk-pci,drive=direct,num-queues=2"]);
    command.args(["-drive", &drive("cached", "cache=writeback")]);
    command.args(["-device", "virtio-blk-pci,drive=cached,num-queues=2"]);
    run_guest(command, matrix, session)
}

/// In user-mode Linux over the files of this machine, with two disks of its kernel's SCSI target:
/// of `walvisor` with its RAM backend, and of tcmu-runner with its qcow handler over an image in
/// memory.
fn tcmu(place: &BenchDirs, matrix: &mut Matrix, session: &Session) -> Result<(), CommandError> {
    let walvisor = format!("WALVISOR='{}'\n", walvisor()?.display());
    let script = guest_settings(matrix) + &walvisor + TARGET + FIO;
    let mut command = guests::command("user-mode")?;
    command.arg(write_script(place.images(), "tcmu.sh", &script)?);
    command.arg("--files-of-this-machine");
    for module in MODULES {
        command.args(["--module", module]);
    }
    run_guest(command, matrix, session)
}

/// The settings of a guest's script, which knows a row and a side by their numbers.
fn guest_settings(matrix: &Matrix) -> String {
    let jobs = matrix.rows.iter().enumerate().map(|(row, sides)| {
        let (kind, flushes) = job(&sides.sides[0]);
        let depth = sides.sides[0].number("depth");
        format!("{row}:{kind}:{depth}:{flushes}")
    });
    let jobs: Vec<String> = jobs.collect();
    let (rounds, turn) = (matrix.rounds(), matrix.rows[0].sides[0].number("turn_s"));
    format!("JOBS='{}' ROUNDS={rounds} TURN={turn}\n", jobs.join(" "))
}

fn run_guest(command: Command, matrix: &mut Matrix, session: &Session) -> Result<(), CommandError> {
    let expected = matrix.expected();
    session.step("fio in a guest", expected, || {
        guests::run(command, session, |line, _| read_guest(line, matrix))
    })?;
    Ok(())
}

/// Reads a rate from a line of the guest, and refuses disks whose write caches differ.
fn read_guest(line: &str, matrix: &mut Matrix) -> Result<(), CommandError> {
    let number = |word: &str| word.parse::<usize>().ok();
    match line.split(' ').collect::<Vec<_>>()[..] {
        ["guest:", "rate", disk, job, rate] => {
            let row = number(job).and_then(|job| matrix.rows.get_mut(job));
            let side = row.and_then(|row| row.sides.get_mut(number(disk)?));
            match (side, rate.parse::<f64>()) {
                (Some(side), Ok(rate)) if rate > 0.0 => {
                    side.turns.push(Turn(json!({ "per_s": rate })));
                    Ok(())
                }
                _ => Err(CommandError::Failed(format!("fio in a guest: {line}"))),
            }
        }
        ["guest:", "cache", disk, "write", cache] if cache != "back" => {
            let side = number(disk).and_then(|disk| matrix.rows[0].sides.get(disk));
            let name = side.map_or("a disk", |side| &side.name);
            Err(CommandError::Failed(format!(
                "{name}: the guest says that its write cache is {cache}: it cannot be compared \
                 with the others, which are writeback"
            )))
        }
        _ => Ok(()),
    }
}
