//! `walvisor-bench fsync`: what each way to have a disk does with a FLUSH. A medium beneath the
//! file system counts the requests to make data durable, and records what reaches it. So a power
//! cut at any place can be shown: the file system of what is left is mounted, and the same command
//! serves the disk again.
//!
//! ```text
//!   NBD clients ─▶ walvisor, qemu-nbd, qemu-storage-daemon, nbdkit ─▶ ext4 ─▶ loop ─▶ medium
//!   guests ──────▶ QEMU, walvisor, caches of a kernel ──────────────▶                   │
//!                                the same on ext4 ◀── what is left after a cut ─────────┘
//! ```

mod guest;

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::slice;
use std::thread;

use clap::Args;
use serde_json::{Value, json};
use tempfile::TempDir;
use walvisor::commands::CommandError;
use walvisor_storage::StoreOptions;
use walvisor_testkit::Random;
use walvisor_testkit::nbd::{FLUSH, READ, SEND_FLUSH, SEND_FUA, SimpleClient, WRITE};
use walvisor_tests::medium_file::{MediumEvent, Recording};
use walvisor_tests::medium_fs::MediumFs;

use crate::bench::{Bench, Settings, Side, Turn, fill, measure_together};
use crate::bench_dirs::{LOGGED, directory, make_disks};
use crate::blocks::{BLOCK, is_stamped, stamp};
use crate::daemon::Daemon;
use crate::output::Output;
use crate::programs::{missing, not_measured};
use crate::serve::serve;

const MATRICES: &str = include_str!("../../matrices/fsync.toml");
const DISKS: usize = 4;
/// Clients of each disk, when all work at once.
const CLIENTS: usize = 4;
/// Bytes of a database's page.
const PAGE: usize = 16 << 10;
const SECTOR: usize = 512;
const NBD: &str = "nbd";
/// In the stamps of all that is written here.
const WRITER: u64 = 1;

/// Arguments of `walvisor-bench fsync`.
#[derive(Debug, Args)]
pub struct FsyncArguments {
    /// Only the ways whose names begin so, separated by commas
    #[arg(long, value_delimiter = ',', value_name = "WAY,WAY..")]
    only: Vec<String>,
    #[command(flatten)]
    output: Output,
}

/// Programs of the ways, with their packages.
const PACKAGES: [(&str, &str); 7] = [
    ("qemu-nbd", "qemu-utils"),
    ("qemu-storage-daemon", "qemu-system-common"),
    ("nbdkit", "nbdkit"),
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("linux.uml", "user-mode-linux"),
    ("make-bcache", "bcache-tools"),
    ("fio", "fio"),
];

/// Runs `walvisor-bench fsync`.
///
/// # Errors
/// If a program that is installed does not serve a disk, or the medium can't be made: it takes
/// root.
pub fn run(arguments: &FsyncArguments) -> Result<(), CommandError> {
    let output = &arguments.output;
    let mut bench = Bench::new(MATRICES, output, &[], &Settings::new());
    for matrix in &mut bench.matrices {
        for row in &mut matrix.rows {
            let only = &arguments.only;
            let wanted = |side: &Side| only.iter().any(|start| side.side.starts_with(start));
            row.sides.retain(|side| only.is_empty() || wanted(side));
        }
        for need in PACKAGES {
            let program = need.0;
            if !matrix.sides().any(|side| needs(side, program)) {
                continue;
            }
            if missing(&[need]).is_none() {
                matrix.notes.extend(version(program));
                continue;
            }
            matrix.notes.push(not_measured(need));
            for row in &mut matrix.rows {
                row.sides.retain(|side| !needs(side, program));
            }
        }
    }
    bench
        .matrices
        .retain(|matrix| matrix.sides().next().is_some());
    let session = bench.start()?;
    let run = measure_together(&mut bench.matrices, &session, measure);
    bench.finish(session, run)
}

/// Whether a side needs a program.
fn needs(side: &Side, program: &str) -> bool {
    let words = ["command", "guest", "setup", "busy"].map(|key| side.text(key).split_whitespace());
    words.into_iter().flatten().any(|word| word == program)
}

/// What a program says of itself.
fn version(program: &str) -> Option<String> {
    let output = Command::new(program).arg("--version").output().ok()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let line = text.lines().next()?;
    let named = line.starts_with(|first: char| first.is_alphabetic());
    Some(if named {
        line.to_owned()
    } else {
        format!("{program} {line}")
    })
}

/// All figures of a way.
fn measure(side: &Side) -> Result<Turn, CommandError> {
    let volume = MediumFs::new("ext4").map_err(CommandError::Failed)?;
    let options = StoreOptions {
        segment_size: 1 << 20,
        max_segments: 16,
        ..StoreOptions::default()
    };
    let bytes = side.number("disk_mib") << 20;
    make_disks(&volume.top(), count(side), bytes, LOGGED, &options)?;
    volume.sync().map_err(CommandError::failed)?;
    let way = Way { side, volume };
    if !side.text("guest").is_empty() {
        return guest::measure(&way).map(Turn);
    }
    let mut figures = way.counts()?;
    figures["lost_by_kill"] = way.lost_by_kill()?.into();
    figures["lost_by_cut"] = way.lost_by_cut()?.into();
    figures["torn"] = way.torn()?.into();
    Ok(Turn(figures))
}

/// How many disks are served: some are for a cache of a guest's kernel.
fn count(side: &Side) -> usize {
    DISKS.max(side.number("served") as usize)
}

/// A way to have disks, on a volume whose medium is watched.
struct Way<'a> {
    side: &'a Side,
    volume: MediumFs,
}

/// Disks that are served.
struct ServedDisks {
    daemons: Vec<Daemon>,
    sockets: Vec<PathBuf>,
    _dir: TempDir,
    /// What a power cut has left, if they are on that. Dropped after the daemons.
    left: Option<MediumFs>,
}

impl ServedDisks {
    /// A client of a disk.
    fn connect(&self, disk: usize) -> Result<Client, CommandError> {
        let nbd = SimpleClient::connect(&self.sockets[disk], &format!("disk{disk}"));
        nbd.map(Client).map_err(CommandError::failed)
    }

    /// Ends them with SIGKILL.
    fn kill(self) {
        self.daemons.into_iter().for_each(Daemon::kill);
    }
}

/// A client of a disk, whose errors end the benchmark.
struct Client(SimpleClient);

impl Client {
    fn write(&mut self, offset: u64, data: &mut [u8], fua: bool) -> Result<(), CommandError> {
        let len = data.len();
        let ended = self.0.end(WRITE, offset, len, data, fua);
        ended.map_err(CommandError::failed)
    }

    /// A server without a cache offers no FLUSH: its writes are durable when they are answered.
    fn flush(&mut self) -> Result<(), CommandError> {
        if self.0.flags & SEND_FLUSH == 0 {
            return Ok(());
        }
        let ended = self.0.end(FLUSH, 0, 0, &mut [], false);
        ended.map_err(CommandError::failed)
    }

    /// Writes a block, and then flushes.
    fn commit(&mut self, block: u64, number: u64) -> Result<(), CommandError> {
        self.write_block(block, number, false)?;
        self.flush()
    }

    fn write_block(&mut self, block: u64, number: u64, fua: bool) -> Result<(), CommandError> {
        let mut data = [0; BLOCK];
        stamp(&mut data, WRITER, number);
        self.write(block * BLOCK as u64, &mut data, fua)
    }

    fn read(&mut self, offset: u64, len: usize) -> Result<Vec<u8>, CommandError> {
        let mut data = vec![0; len];
        let ended = self.0.end(READ, offset, len, &mut data, false);
        ended.map_err(CommandError::failed)?;
        Ok(data)
    }

    /// How many of the blocks 0 to `count` - 1 don't have what [`commit`](Self::commit) wrote with
    /// the number `first` and those after it.
    fn count_lost(&mut self, count: u64, first: u64) -> Result<u64, CommandError> {
        let mut lost = 0;
        for block in 0..count {
            let data = self.read(block * BLOCK as u64, BLOCK)?;
            lost += u64::from(!is_stamped(&data, WRITER, first + block));
        }
        Ok(lost)
    }
}

impl Way<'_> {
    fn commits(&self) -> u64 {
        self.side.number("commits")
    }

    /// Serves the disks in a directory through a door.
    fn serve(&self, door: &str, images: &Path) -> Result<ServedDisks, CommandError> {
        let dir = directory(&std::env::temp_dir())?;
        let sockets = (0..count(self.side)).map(|disk| dir.path().join(disk.to_string()));
        let sockets: Vec<_> = sockets.collect();
        let template = self.side.text("command");
        let daemons = if template.is_empty() {
            serve(self.side, door, images, dir.path(), &sockets)?
        } else {
            let daemons = sockets.iter().enumerate().map(|(disk, socket)| {
                let mut settings = self.side.plan.clone();
                settings.insert("disk".to_owned(), disk.into());
                settings.insert("socket".to_owned(), socket.display().to_string().into());
                settings.insert("image".to_owned(), format!("raw-{disk}.img").into());
                let command = fill(template, &settings);
                let mut words = command.split_whitespace();
                let mut command = Command::new(words.next().unwrap_or_default());
                command.args(words).stderr(Stdio::null());
                Daemon::peer(&mut command, images, slice::from_ref(socket))
            });
            daemons.collect::<Result<_, _>>()?
        };
        Ok(ServedDisks {
            daemons,
            sockets,
            _dir: dir,
            left: None,
        })
    }

    /// Counts syncs of the medium.
    fn counts(&self) -> Result<Value, CommandError> {
        let (served, commits) = (self.serve(NBD, &self.volume.top())?, self.commits());
        let syncs = || self.volume.medium().syncs();
        let mut client = served.connect(0)?;
        client.commit(0, 0)?;
        let before = syncs();
        (0..commits).try_for_each(|number| client.commit(number, number))?;
        let alone = syncs() - before;
        // Syncs of writes with FUA, one after the other, and each right after a FLUSH.
        let (mut fua, mut fua_after_flush) = (None, None);
        if client.0.flags & SEND_FUA != 0 {
            let before = syncs();
            let mut numbers = 0..commits;
            numbers.try_for_each(|number| client.write_block(number, number, true))?;
            fua = Some((syncs() - before) as f64 / commits as f64);
            let mut after_flush = 0;
            for number in 0..commits {
                client.commit(number, number)?;
                let before = syncs();
                client.write_block(number, number, true)?;
                after_flush += syncs() - before;
            }
            fua_after_flush = Some(after_flush as f64 / commits as f64);
        }
        let clients = (0..DISKS * CLIENTS).map(|number| served.connect(number % DISKS));
        let mut clients = clients.collect::<Result<Vec<_>, _>>()?;
        clients
            .iter_mut()
            .try_for_each(|client| client.commit(0, 0))?;
        let before = syncs();
        let all: Result<Vec<()>, CommandError> = thread::scope(|scope| {
            let work = |client: &mut Client| {
                (0..commits).try_for_each(|number| client.commit(number, number))
            };
            let threads = clients
                .iter_mut()
                .map(|client| scope.spawn(move || work(client)));
            let threads: Vec<_> = threads.collect();
            let ended = threads.into_iter().map(|thread| {
                let panicked = |_| Err(CommandError::Failed("a client has panicked".to_owned()));
                thread.join().unwrap_or_else(panicked)
            });
            ended.collect()
        });
        all?;
        let together = syncs() - before;
        Ok(json!({
            "per_flush_alone": alone as f64 / commits as f64,
            "per_flush_together": together as f64 / (commits * (DISKS * CLIENTS) as u64) as f64,
            "per_fua": fua,
            "per_fua_after_flush": fua_after_flush,
        }))
    }

    /// Writes that were answered, and that a kill loses.
    fn lost_by_kill(&self) -> Result<u64, CommandError> {
        const FIRST: u64 = 1000;
        let (served, commits) = (self.serve(NBD, &self.volume.top())?, self.commits());
        let mut client = served.connect(0)?;
        (0..commits).try_for_each(|block| client.write_block(block, FIRST + block, false))?;
        served.kill();
        let served = self.serve(NBD, &self.volume.top())?;
        served.connect(0)?.count_lost(commits, FIRST)
    }

    /// FLUSHed writes that a power cut loses, if the medium keeps only what was synced.
    fn lost_by_cut(&self) -> Result<u64, CommandError> {
        const FIRST: u64 = 2000;
        let (served, commits) = (self.serve(NBD, &self.volume.top())?, self.commits());
        let medium = self.volume.medium();
        let mut client = served.connect(0)?;
        client.commit(0, 0)?;
        record(&self.volume)?;
        (0..commits).try_for_each(|block| client.commit(block, FIRST + block))?;
        let last = medium.recorded();
        let recording = medium.end_recording();
        let served = self.serve_after(|path| recording.lose_unsynced(last, path))?;
        served.connect(0)?.count_lost(commits, FIRST)
    }

    /// Power cuts, each within a write to the medium, that leave a page partly old.
    fn torn(&self) -> Result<u64, CommandError> {
        const PAGES: u64 = 4;
        let served = self.serve(NBD, &self.volume.top())?;
        let medium = self.volume.medium();
        let mut client = served.connect(0)?;
        let mut page = vec![0; PAGE];
        let mut write = |number: u64| {
            stamp(&mut page, WRITER, number);
            client.write(number % PAGES * PAGE as u64, &mut page, false)?;
            client.flush()
        };
        (0..PAGES).try_for_each(&mut write)?;
        record(&self.volume)?;
        (PAGES..8 * PAGES).try_for_each(&mut write)?;
        // What a disk does later is torn too: copies of a log to its images, and pages of a cache.
        served.daemons.iter().try_for_each(Daemon::checkpoint)?;
        self.volume.sync().map_err(CommandError::failed)?;
        let recording = medium.end_recording();
        drop(served);
        let mut torn = 0;
        for (at, bytes) in cuts(self.side, &recording) {
            let served = self.serve_after(|path| recording.tear(at, bytes, path))?;
            let mut client = served.connect(0)?;
            let pages = (0..PAGES).map(|page| client.read(page * PAGE as u64, PAGE));
            let pages = pages.collect::<Result<Vec<_>, _>>()?;
            let is_torn = |page: &Vec<u8>| page.chunks(16).any(|chunk| chunk != &page[..16]);
            torn += u64::from(pages.iter().any(is_torn));
        }
        Ok(torn)
    }

    /// Serves the disks on what a power cut has left, which `write` puts into a file.
    fn serve_after(
        &self,
        write: impl FnOnce(&Path) -> io::Result<()>,
    ) -> Result<ServedDisks, CommandError> {
        let volume = MediumFs::from_image(write).map_err(CommandError::Failed)?;
        let mut served = self.serve(NBD, &volume.top())?;
        served.left = Some(volume);
        Ok(served)
    }
}

/// Begins to record, with everything so far on the medium.
fn record(volume: &MediumFs) -> Result<(), CommandError> {
    let recording = volume.sync().and_then(|()| volume.medium().record());
    recording.map_err(CommandError::failed)
}

/// Where to cut the power: events that are writes, all over the recording, and how many of their
/// bytes reach the medium.
fn cuts(side: &Side, recording: &Recording) -> Vec<(usize, usize)> {
    let writes = recording.events.iter().enumerate();
    let writes = writes.filter_map(|(at, event)| match event {
        MediumEvent::Write(_, data) if data.len() > SECTOR => Some((at, data.len())),
        _ => None,
    });
    let writes: Vec<(usize, usize)> = writes.collect();
    let (cuts, mut random) = (side.number("cuts") as usize, Random(1));
    let chosen = (0..cuts).filter_map(|cut| writes.get(cut * writes.len() / cuts));
    let chosen = chosen.map(|&(at, len)| {
        let sectors = 1 + random.below((len / SECTOR - 1) as u64) as usize;
        (at, sectors * SECTOR)
    });
    chosen.collect()
}
