//! The environment for databases: a daemon with the disks, user-mode Linux with the servers, and the jobs sent to it.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use tempfile::TempDir;
use walvisor::commands::CommandError;
use walvisor::control_socket::{ControlCommand, Format, ask};
use walvisor_storage::{StoreOptions, create_disk, default_log_dir};

use super::job::{DatabaseDisk, DatabaseJob, DatabaseMeasured};
use crate::output::failed;
use crate::programs::{GUEST_IMAGES, Killed, guest_images, require, walvisor};

/// The guest's script.
const SCRIPT: &str = include_str!("../../scripts/database.sh");
/// Programs of this machine that the guest runs, each with its package.
const NEEDS: [(&str, &str); 5] = [
    ("mariadbd", "mariadb-server-core"),
    ("mariadb", "mariadb-client-core"),
    ("mariadb-slap", "mariadb-client"),
    ("sqlite3", "sqlite3"),
    ("mkfs.ext4", "e2fsprogs"),
];
const DISK_BYTES: u64 = 256 << 20;
/// No step takes this long on the slowest machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// The guest with its running servers. Dropping it ends the guest and the daemon.
pub struct DatabaseSite {
    input: ChildStdin,
    lines: Receiver<String>,
    control: PathBuf,
    // The order of the fields matters: the guest ends before its disks, and these before their directory.
    _guest: Killed,
    _daemon: Killed,
    _places: [TempDir; 2],
}

impl DatabaseSite {
    /// Makes disks in `dir`, and starts the daemon and the guest.
    ///
    /// # Errors
    /// If a program is missing, a disk cannot be made, or the daemon or the guest does not start.
    pub fn start(dir: &Path) -> Result<Self, CommandError> {
        require(&NEEDS)?;
        let guests = guest_images()?;
        let place = tempfile::Builder::new()
            .prefix("walvisor-compare-")
            .tempdir_in(dir)
            .map_err(failed("make a directory", dir))?;
        let at = place.path().canonicalize().map_err(CommandError::failed)?;
        // The paths of sockets must be short.
        let sockets = tempfile::tempdir().map_err(CommandError::failed)?;
        let control = sockets.path().join("control");
        let mut daemon = Command::new(walvisor()?);
        daemon
            .args(["serve", "vhost-user", "--control"])
            .arg(&control);
        let mut guest = Command::new(guests);
        guest.args(["user-mode", "database.sh", "--files-of-this-machine"]);
        for disk in DatabaseDisk::ALL {
            let (path, socket) = (at.join(disk.image()), sockets.path().join(disk.name()));
            match disk {
                DatabaseDisk::Raw => write_zeroes(&path)?,
                DatabaseDisk::Wal | DatabaseDisk::Single => {
                    let log = default_log_dir(&path);
                    create_disk(&path, DISK_BYTES, &log, &StoreOptions::default())
                        .map_err(CommandError::failed)?;
                }
            }
            let backend = if disk == DatabaseDisk::Raw {
                "raw"
            } else {
                "wal"
            };
            let spec = format!(
                "path={},backend={backend},socket={}",
                disk.image(),
                socket.display()
            );
            daemon.args(["--disk", &spec]);
            guest.arg("--disk").arg(socket);
        }
        std::fs::write(at.join("database.sh"), SCRIPT)
            .map_err(failed("write the guest's script", &at))?;
        let mut daemon = spawn(daemon, &at)?;
        let served = BufReader::new(daemon.0.stdout.take().ok_or_else(ended)?).lines();
        if served
            .take(DatabaseDisk::ALL.len())
            .filter(Result::is_ok)
            .count()
            < DatabaseDisk::ALL.len()
        {
            return Err(CommandError::Failed("the daemon ended at once".to_owned()));
        }
        let mut guest = spawn(guest, &at)?;
        let output = BufReader::new(guest.0.stdout.take().ok_or_else(ended)?);
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in output.split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        let site = Self {
            input: guest.0.stdin.take().ok_or_else(ended)?,
            lines,
            control,
            _guest: guest,
            _daemon: daemon,
            _places: [place, sockets],
        };
        site.wait_for("begun")?;
        Ok(site)
    }

    /// Runs a job in the guest.
    ///
    /// # Errors
    /// If it fails, or the guest has ended.
    pub fn measure(&mut self, job: &DatabaseJob) -> Result<DatabaseMeasured, CommandError> {
        let (engine, disk) = (job.engine.name(), job.disk.name());
        let DatabaseJob {
            clients, commits, ..
        } = job;
        self.tell(&format!("{engine} {disk} {clients} {commits}"))?;
        self.wait_for("ready")?;
        let before = self.counters(job.disk)?;
        self.tell("go")?;
        let seconds = self.wait_for("sample: ")?;
        let after = self.counters(job.disk)?;
        let seconds: f64 = match seconds.parse() {
            Ok(seconds) if seconds > 0.0 => seconds,
            _ => {
                return Err(CommandError::Failed(format!(
                    "the guest measured '{seconds}', not seconds"
                )));
            }
        };
        let commits = *commits as f64;
        let each = |figure: fn(&Counters) -> u64| {
            figure(&after).saturating_sub(figure(&before)) as f64 / commits
        };
        Ok(DatabaseMeasured {
            commits_per_s: commits / seconds,
            flushes: each(|counters| counters.flushes),
            syncs: each(|counters| counters.syncs),
            writes: each(|counters| counters.writes),
            kib: each(|counters| counters.written_bytes) / 1024.0,
        })
    }

    fn tell(&mut self, line: &str) -> Result<(), CommandError> {
        self.input
            .write_all(format!("{line}\n").as_bytes())
            .map_err(|_| ended())
    }

    /// Waits for the guest's next line that begins with `start`, and returns the rest of that line.
    fn wait_for(&self, start: &str) -> Result<String, CommandError> {
        loop {
            let line = self.lines.recv_timeout(PATIENCE).map_err(|error| {
                let seconds = PATIENCE.as_secs();
                match error {
                    RecvTimeoutError::Disconnected => ended(),
                    RecvTimeoutError::Timeout => {
                        CommandError::Failed(format!("the guest has said nothing for {seconds} s"))
                    }
                }
            })?;
            if let Some(rest) = line.strip_prefix(start) {
                return Ok(rest.to_owned());
            }
            if let Some((_, why)) = line.split_once("failed: ") {
                return Err(CommandError::Failed(format!("in the guest: {why}")));
            }
        }
    }

    fn counters(&self, disk: DatabaseDisk) -> Result<Counters, CommandError> {
        let stats = ask(&self.control, &ControlCommand::Stats(Format::Json))
            .map_err(CommandError::Failed)?;
        let disks = stats["disks"].as_array();
        let found = disks.and_then(|disks| disks.iter().find(|it| it["name"] == disk.image()));
        let of = found.ok_or_else(|| {
            CommandError::Failed(format!("the daemon has no disk {}", disk.image()))
        })?;
        let count = |key: &str| of[key].as_u64().unwrap_or(0);
        Ok(Counters {
            flushes: count("flushes"),
            // Without a log each FLUSH is an fdatasync of the image.
            syncs: match of["log"].is_null() {
                true => count("flushes"),
                false => of["log"]["syncs"].as_u64().unwrap_or(0),
            },
            writes: count("writes"),
            written_bytes: count("written_bytes"),
        })
    }
}

impl Drop for DatabaseSite {
    fn drop(&mut self) {
        // The guest powers off at once. If it were killed, user-mode Linux would leave processes behind.
        if self.tell("quit").is_ok() {
            while self.lines.recv_timeout(Duration::from_secs(20)).is_ok() {}
        }
    }
}

/// The counters of a disk.
struct Counters {
    flushes: u64,
    syncs: u64,
    writes: u64,
    written_bytes: u64,
}

fn ended() -> CommandError {
    CommandError::Failed(format!(
        "the guest has ended too early: see what '{GUEST_IMAGES} user-mode' says"
    ))
}

fn spawn(mut command: Command, directory: &Path) -> Result<Killed, CommandError> {
    let child = command
        .current_dir(directory)
        // A group of its own keeps Ctrl-C away from the child, which ends when this process has finished with it.
        .process_group(0)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn();
    child.map(Killed).map_err(|error| {
        let program = command.get_program().display();
        CommandError::Failed(format!("{program} cannot be started: {error}"))
    })
}

/// Makes a file whose blocks are all allocated. A sync of it writes data alone, which is the best case for a raw image.
fn write_zeroes(path: &Path) -> Result<(), CommandError> {
    let write = || {
        let mut file = File::create(path)?;
        let zeroes = vec![0; 1 << 20];
        for _ in 0..DISK_BYTES / zeroes.len() as u64 {
            file.write_all(&zeroes)?;
        }
        file.sync_all()
    };
    write().map_err(failed("write the raw image", path))
}
