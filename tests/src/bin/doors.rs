//! Writes to disks that have different doors, a thread for each, and checks what they hold
//! afterwards.
//!
//! ```text
//!   doors load STATE DISK... --until FILE  until each disk fails: its daemon is killed, which FILE tells of;
//!                                          "busy" is printed once each disk has answered some FLUSHes
//!   doors load STATE DISK... --writes N    N writes of each disk, each with a FLUSH; a failure is an error
//!   doors check STATE DISK...              what each disk holds is what STATE allows
//! ```
//! A DISK is a vhost-user socket, or a block device of this machine. STATE keeps, for each block,
//! the contents that it may have: that of its last FLUSH, and those of later writes.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::process::ExitCode;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use walvisor_testkit::Random;
use walvisor_testkit::vhost_user_client::VhostUserClient;

const BLOCK: usize = 4096;
/// Blocks that are written on each disk.
const BLOCKS: usize = 64;
/// An answer that takes longer does not come.
const PATIENCE: Duration = Duration::from_secs(120);
/// How often a client of vhost-user, which hears nothing of a kill, looks for the file that tells.
const LOOK: Duration = Duration::from_millis(200);
/// FLUSHes that each disk has answered before the load is a load.
const BUSY: usize = 20;

/// A block, aligned as O_DIRECT wants it.
#[repr(align(4096))]
struct Page([u8; BLOCK]);

/// How long a load goes on.
#[derive(Clone, Copy)]
enum Length<'a> {
    /// This many writes.
    Writes(usize),
    /// Until the daemon is killed, which comes at once when this file exists.
    Until(&'a Path),
}

enum Disk<'a> {
    /// With the file that tells of a kill, if one is to come.
    VhostUser(Box<VhostUserClient>, Option<&'a Path>),
    Device(File),
}

/// Waits for the answer to the one request of `client`, but not once `killed` exists.
fn end(client: &mut VhostUserClient, killed: Option<&Path>) -> io::Result<()> {
    let Some(killed) = killed else {
        return client.end(0, PATIENCE);
    };
    let began = Instant::now();
    loop {
        let was_killed = killed.exists();
        match client.end(0, LOOK) {
            Err(error)
                if error.kind() == io::ErrorKind::TimedOut
                    && !was_killed
                    && began.elapsed() < PATIENCE => {}
            ended => return ended,
        }
    }
}

impl<'a> Disk<'a> {
    fn open(path: &str, killed: Option<&'a Path>) -> io::Result<Self> {
        if fs::metadata(path)?.file_type().is_socket() {
            let client = VhostUserClient::try_connect(Path::new(path), 1)?;
            return Ok(Self::VhostUser(Box::new(client), killed));
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        options.open(path).map(Self::Device)
    }

    fn write(&mut self, block: usize, value: u8) -> io::Result<()> {
        let (at, page) = ((block * BLOCK) as u64, Page([value; BLOCK]));
        match self {
            Self::VhostUser(client, killed) => {
                client.write(0, 0, at, &page.0);
                end(client, *killed)
            }
            Self::Device(file) => file.write_all_at(&page.0, at),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::VhostUser(client, killed) => {
                client.flush(0, 0);
                end(client, *killed)
            }
            Self::Device(file) => file.sync_data(),
        }
    }

    fn read(&mut self, block: usize) -> io::Result<Vec<u8>> {
        let (at, mut page) = ((block * BLOCK) as u64, Page([0; BLOCK]));
        match self {
            Self::VhostUser(client, killed) => {
                client.read(0, 0, at, BLOCK);
                end(client, *killed)?;
                Ok(client.data(0, BLOCK))
            }
            Self::Device(file) => {
                file.read_exact_at(&mut page.0, at)?;
                Ok(page.0.to_vec())
            }
        }
    }
}

/// What each block of a disk may hold.
type Allowed = Vec<Vec<u8>>;

/// Checks a disk, and returns what it holds.
fn check(name: &str, disk: &mut Disk, allowed: &Allowed) -> io::Result<Allowed> {
    let mut held = Vec::new();
    for (block, allowed) in allowed.iter().enumerate() {
        let contents = disk.read(block)?;
        let value = contents[0];
        if contents.iter().any(|byte| *byte != value) {
            return Err(io::Error::other(format!("{name}: block {block} is torn")));
        }
        if !allowed.contains(&value) {
            return Err(io::Error::other(format!(
                "{name}: block {block} holds {value}, and not one of {allowed:?}"
            )));
        }
        held.push(vec![value]);
    }
    Ok(held)
}

/// Writes to a disk, and counts down `idle` once it has answered [`BUSY`] FLUSHes. Returns what it
/// may hold, and its FLUSHes.
fn load(
    path: &str,
    allowed: &Allowed,
    length: Length,
    idle: &AtomicUsize,
) -> io::Result<(Allowed, usize)> {
    let (writes, killed) = match length {
        Length::Writes(writes) => (writes, None),
        Length::Until(killed) => (usize::MAX, Some(killed)),
    };
    let mut disk = Disk::open(path, killed)?;
    let mut allowed = check(path, &mut disk, allowed)?;
    // What was read may not be durable yet.
    disk.flush()?;
    let mut flushed = 0;
    let mut random = Random(7);
    for number in 0..writes {
        let (block, value) = (random.below(BLOCKS as u64) as usize, (number % 251) as u8);
        allowed[block].push(value);
        let done = disk.write(block, value).and_then(|()| disk.flush());
        match done {
            Ok(()) => {
                allowed[block] = vec![value];
                flushed += 1;
                if flushed == BUSY && idle.fetch_sub(1, Ordering::Relaxed) == 1 {
                    println!("busy");
                }
            }
            Err(_) if killed.is_some_and(Path::exists) => break,
            Err(error) => return Err(error),
        }
    }
    Ok((allowed, flushed))
}

fn run(arguments: &[String]) -> io::Result<()> {
    let wrong = || io::Error::other("usage: doors load|check STATE DISK... [--writes N]");
    let [job, state, rest @ ..] = arguments else {
        return Err(wrong());
    };
    let (disks, length) = match rest {
        [disks @ .., flag, number] if flag == "--writes" => {
            let writes = number.parse().map_err(io::Error::other)?;
            (disks, Some(Length::Writes(writes)))
        }
        [disks @ .., flag, file] if flag == "--until" => {
            (disks, Some(Length::Until(Path::new(file))))
        }
        disks => (disks, None),
    };
    let known: Vec<Allowed> = match fs::read(state) {
        Ok(text) => serde_json::from_slice(&text)?,
        Err(_) => vec![vec![vec![0]; BLOCKS]; disks.len()],
    };
    match (job.as_str(), length) {
        ("check", None) => {
            for (path, allowed) in disks.iter().zip(&known) {
                check(path, &mut Disk::open(path, None)?, allowed)?;
            }
            Ok(())
        }
        ("load", Some(length)) => {
            let idle = &AtomicUsize::new(disks.len());
            let ended: Vec<_> = thread::scope(|scope| {
                let each = disks.iter().zip(&known);
                let threads: Vec<_> = each
                    .map(|(path, allowed)| scope.spawn(move || load(path, allowed, length, idle)))
                    .collect();
                let joined = threads.into_iter().map(|thread| thread.join().unwrap());
                joined.collect()
            });
            let ended: Vec<(Allowed, usize)> = ended.into_iter().collect::<io::Result<_>>()?;
            let (states, flushed): (Vec<Allowed>, Vec<usize>) = ended.into_iter().unzip();
            fs::write(state, serde_json::to_vec(&states)?)?;
            let flushed: Vec<_> = flushed.iter().map(usize::to_string).collect();
            println!("flushed {}", flushed.join(" "));
            Ok(())
        }
        _ => Err(wrong()),
    }
}

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("doors: {error}");
            ExitCode::FAILURE
        }
    }
}
