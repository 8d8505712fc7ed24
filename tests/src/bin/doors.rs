//! Writes to disks that have different doors, a thread for each, and checks what they hold
//! afterwards.
//!
//! ```text
//!   doors load STATE DISK...            until each disk fails, as when its daemon is killed
//!   doors load STATE DISK... --writes N N writes of each disk, each with a FLUSH; a failure is an error
//!   doors check STATE DISK...           what each disk holds is what STATE allows
//! ```
//! A DISK is a vhost-user socket, or a block device of this machine. STATE keeps, for each block,
//! the contents that it may have: that of its last FLUSH, and those of later writes.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use walvisor_testkit::Random;
use walvisor_testkit::vhost_user_client::VhostUserClient;

const BLOCK: usize = 4096;
/// Blocks that are written on each disk.
const BLOCKS: usize = 64;
/// An answer that takes longer does not come.
const PATIENCE: Duration = Duration::from_secs(120);
/// The same for a disk whose daemon is going to be killed, of which the client hears nothing. A
/// daemon that is only slow ends its load too early, which loses nothing.
const UNTIL_KILL: Duration = Duration::from_secs(5);

/// A block, aligned as O_DIRECT wants it.
#[repr(align(4096))]
struct Page([u8; BLOCK]);

enum Disk {
    VhostUser(Box<VhostUserClient>, Duration),
    Device(File),
}

impl Disk {
    fn open(path: &str, patience: Duration) -> io::Result<Self> {
        if fs::metadata(path)?.file_type().is_socket() {
            let client = VhostUserClient::try_connect(Path::new(path), 1)?;
            return Ok(Self::VhostUser(Box::new(client), patience));
        }
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(libc::O_DIRECT);
        options.open(path).map(Self::Device)
    }

    fn write(&mut self, block: usize, value: u8) -> io::Result<()> {
        let (at, page) = ((block * BLOCK) as u64, Page([value; BLOCK]));
        match self {
            Self::VhostUser(client, patience) => {
                client.write(0, 0, at, &page.0);
                client.end(0, *patience)
            }
            Self::Device(file) => file.write_all_at(&page.0, at),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::VhostUser(client, patience) => {
                client.flush(0, 0);
                client.end(0, *patience)
            }
            Self::Device(file) => file.sync_data(),
        }
    }

    fn read(&mut self, block: usize) -> io::Result<Vec<u8>> {
        let (at, mut page) = ((block * BLOCK) as u64, Page([0; BLOCK]));
        match self {
            Self::VhostUser(client, patience) => {
                client.read(0, 0, at, BLOCK);
                client.end(0, *patience)?;
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

/// Writes to a disk: `writes` times, or until it fails. Returns what it may hold.
fn load(path: &str, allowed: &Allowed, writes: Option<usize>) -> io::Result<(Allowed, usize)> {
    let mut disk = Disk::open(path, writes.map_or(UNTIL_KILL, |_| PATIENCE))?;
    let mut allowed = check(path, &mut disk, allowed)?;
    // What was read may not be durable yet.
    disk.flush()?;
    let mut flushed = 0;
    let mut random = Random(7);
    for number in 0..writes.unwrap_or(usize::MAX) {
        let (block, value) = (random.below(BLOCKS as u64) as usize, (number % 251) as u8);
        allowed[block].push(value);
        let done = disk.write(block, value).and_then(|()| disk.flush());
        match done {
            Ok(()) => {
                allowed[block] = vec![value];
                flushed += 1;
            }
            Err(error) if writes.is_some() => return Err(error),
            Err(_) => break,
        }
    }
    Ok((allowed, flushed))
}

fn run(arguments: &[String]) -> io::Result<()> {
    let wrong = || io::Error::other("usage: doors load|check STATE DISK... [--writes N]");
    let [job, state, rest @ ..] = arguments else {
        return Err(wrong());
    };
    let (disks, writes) = match rest {
        [disks @ .., flag, number] if flag == "--writes" => {
            (disks, Some(number.parse().map_err(io::Error::other)?))
        }
        disks => (disks, None),
    };
    let known: Vec<Allowed> = match fs::read(state) {
        Ok(text) => serde_json::from_slice(&text)?,
        Err(_) => vec![vec![vec![0]; BLOCKS]; disks.len()],
    };
    match job.as_str() {
        "check" => {
            for (path, allowed) in disks.iter().zip(&known) {
                check(path, &mut Disk::open(path, PATIENCE)?, allowed)?;
            }
            Ok(())
        }
        "load" => {
            let ended: Vec<_> = thread::scope(|scope| {
                let each = disks.iter().zip(&known);
                let threads: Vec<_> = each
                    .map(|(path, allowed)| scope.spawn(move || load(path, allowed, writes)))
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
