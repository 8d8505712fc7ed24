//! The environment for databases: a daemon with the disks, guests in user-mode Linux with the servers, and the jobs for
//! them.

use std::fs::File;
use std::io::Write;
use std::path::Path;

use tempfile::TempDir;
use walvisor::commands::CommandError;
use walvisor_guest_images::UserMode;
use walvisor_storage::{StoreOptions, create_disk};
use walvisor_tests::postgresql;

use super::job::{DatabaseDisk, DatabaseJob, DatabaseMeasurement};
use crate::console::Console;
use crate::daemon::Daemon;
use crate::output::failed;
use crate::programs::require;

/// The guests' script.
const SCRIPT: &str = include_str!("../../scripts/database.sh");
/// Programs of this machine that each guest needs, with their packages.
const NEEDS: [(&str, &str); 3] = [
    ("linux.uml", "user-mode-linux"),
    ("modprobe", "kmod"),
    ("mkfs.ext4", "e2fsprogs"),
];
const DISK_BYTES: u64 = 320 << 20;

/// A database server, which each guest runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DatabaseServer {
    Mariadb,
    Postgresql,
    Sqlite,
}

impl DatabaseServer {
    /// Its name in the guests' script.
    fn name(self) -> &'static str {
        match self {
            Self::Mariadb => "mariadb",
            Self::Postgresql => "postgresql",
            Self::Sqlite => "sqlite",
        }
    }

    fn needs(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Mariadb => &[
                ("mariadbd", "mariadb-server-core"),
                ("mariadb", "mariadb-client-core"),
                ("mariadb-slap", "mariadb-client"),
            ],
            Self::Postgresql => &postgresql::NEEDS,
            Self::Sqlite => &[("sqlite3", "sqlite3")],
        }
    }
}

/// The guests with their running servers. Dropping it ends the guests and the daemon.
pub struct DatabaseSite {
    // The order of the fields matters: the daemon ends before its directories are removed.
    guests: Vec<Console>,
    daemon: Daemon,
    _places: Vec<TempDir>,
}

impl DatabaseSite {
    /// Creates disks in `dir`, and starts the daemon and the guests, each with all `servers`.
    ///
    /// # Errors
    /// If a program is missing, a disk cannot be made, or the daemon, a guest or a server does not start.
    pub fn start(
        dir: &Path,
        guests: usize,
        servers: &[DatabaseServer],
    ) -> Result<Self, CommandError> {
        require(&NEEDS)?;
        for server in servers {
            require(server.needs())?;
        }
        let place = tempfile::Builder::new()
            .prefix("walvisor-bench-")
            .tempdir_in(dir)
            .map_err(failed("make a directory", dir))?;
        // Socket paths must be short.
        let short = || tempfile::tempdir().map_err(CommandError::failed);
        let sockets = short()?;
        let disks: &[_] = if servers.contains(&DatabaseServer::Mariadb) {
            &[DatabaseDisk::Raw, DatabaseDisk::Wal, DatabaseDisk::Single]
        } else {
            &[DatabaseDisk::Raw, DatabaseDisk::Wal]
        };
        let (specs, machines) = make_disks(disks, guests, place.path(), sockets.path())?;
        let mut places = Vec::new();
        let names: Vec<_> = disks.iter().map(|disk| disk.name()).collect();
        let running: Vec<_> = servers.iter().map(|server| server.name()).collect();
        let (names, running) = (names.join(" "), running.join(" "));
        let mut script = format!("DISKS='{names}' SERVERS='{running}'\n");
        if servers.contains(&DatabaseServer::Postgresql) {
            let files = postgresql::prepare(&[]).map_err(CommandError::failed)?;
            script += &format!("POSTGRESQL='{}'\n", files.path().display());
            places.push(files);
        }
        script += SCRIPT;
        let daemon = Daemon::start("vhost-user", &specs, place.path(), sockets.path())?;
        let mut guests = Vec::new();
        for machine in machines {
            let own = short()?;
            guests.push(Console::boot(&machine, own.path(), &script)?);
            places.push(own);
        }
        for guest in &mut guests {
            guest.wait_for("begun")?;
        }
        places.extend([place, sockets]);
        Ok(Self {
            guests,
            daemon,
            _places: places,
        })
    }

    /// Runs a job in all guests at the same time.
    ///
    /// # Errors
    /// If it fails in a guest, or a guest has ended.
    pub fn measure(&mut self, job: &DatabaseJob) -> Result<DatabaseMeasurement, CommandError> {
        let (engine, disk) = (job.engine.name(), job.disk.name());
        let DatabaseJob {
            clients, commits, ..
        } = job;
        for guest in &mut self.guests {
            guest.send(&format!("{engine} {disk} {clients} {commits}"))?;
        }
        for guest in &mut self.guests {
            guest.wait_for("ready")?;
        }
        let before = self.counters(job.disk)?;
        for guest in &mut self.guests {
            guest.send("go")?;
        }
        // The slowest guest determines the time.
        let mut slowest: f64 = 0.0;
        for guest in &mut self.guests {
            let seconds = guest.wait_for("sample: ")?;
            match seconds.parse() {
                Ok(seconds) if seconds > 0.0 => slowest = slowest.max(seconds),
                _ => {
                    return Err(CommandError::Failed(format!(
                        "a guest measured '{seconds}', not seconds"
                    )));
                }
            }
        }
        let after = self.counters(job.disk)?;
        let commits = f64::from(*commits) * self.guests.len() as f64;
        let each = |figure: fn(&Counters) -> u64| {
            figure(&after).saturating_sub(figure(&before)) as f64 / commits
        };
        Ok(DatabaseMeasurement {
            commits_per_s: commits / slowest,
            flushes: each(|counters| counters.flushes),
            syncs: each(|counters| counters.syncs),
            writes: each(|counters| counters.writes),
            kib: each(|counters| counters.written_bytes) / 1024.0,
        })
    }

    /// The counters of all guests' disks of this kind.
    fn counters(&self, kind: DatabaseDisk) -> Result<Counters, CommandError> {
        let mut sum = Counters::default();
        for guest in 0..self.guests.len() {
            let of = self.daemon.counters(&kind.image(guest))?;
            let count = |key: &str| of[key].as_u64().unwrap_or(0);
            sum.flushes += count("flushes");
            sum.writes += count("writes");
            sum.written_bytes += count("written_bytes");
            // Without a log each FLUSH is an fdatasync of the image. A log counts the syncs of all its disks.
            match of["log"]["syncs"].as_u64() {
                Some(syncs) => sum.syncs = syncs,
                None => sum.syncs += count("flushes"),
            }
        }
        Ok(sum)
    }
}

impl Drop for DatabaseSite {
    fn drop(&mut self) {
        self.guests.clear();
        // The disks are thrown away, so the daemon is killed before it copies anything to them. Fails if it has ended.
        let _ = self.daemon.process().kill();
    }
}

/// The counters of disks.
#[derive(Default)]
struct Counters {
    flushes: u64,
    syncs: u64,
    writes: u64,
    written_bytes: u64,
}

/// Creates the disks of all guests in `place`. Returns their SPECs, and the guests with them.
fn make_disks(
    disks: &[DatabaseDisk],
    guests: usize,
    place: &Path,
    sockets: &Path,
) -> Result<(Vec<String>, Vec<UserMode>), CommandError> {
    let (mut specs, mut machines) = (Vec::new(), Vec::new());
    for guest in 0..guests {
        let mut machine = UserMode::default();
        for disk in disks {
            let socket = sockets.join(disk.image(guest));
            specs.push(make_disk(*disk, guest, place, &socket)?);
            machine.disks.push(socket);
        }
        machines.push(machine);
    }
    Ok((specs, machines))
}

/// Creates a guest's disk in `place`. Returns its SPEC.
fn make_disk(
    disk: DatabaseDisk,
    guest: usize,
    place: &Path,
    socket: &Path,
) -> Result<String, CommandError> {
    let image = disk.image(guest);
    let (path, socket) = (place.join(&image), socket.display());
    match disk.log() {
        None => {
            write_zeroes(&path)?;
            Ok(format!("path={image},backend=raw,socket={socket}"))
        }
        Some(log) => {
            create_disk(
                &path,
                DISK_BYTES,
                &place.join(&log),
                &StoreOptions::default(),
            )
            .map_err(CommandError::failed)?;
            Ok(format!("path={image},log={log},socket={socket}"))
        }
    }
}

/// Creates a file whose blocks are all allocated: a sync then writes only data, which is the best case for a raw image.
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
