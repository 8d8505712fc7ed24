//! The environment for databases: a daemon with the disks, guests in user-mode Linux with the
//! servers, and the jobs for them.

use std::path::Path;

use serde_json::json;
use tempfile::TempDir;
use walvisor::commands::CommandError;
use walvisor_guest_images::UserMode;
use walvisor_storage::{StoreOptions, create_disk};
use walvisor_tests::postgresql;

use crate::bench::{Side, Turn};
use crate::bench_dirs::{BenchDirs, directory, make_raw};
use crate::blocks::BLOCK;
use crate::console::Console;
use crate::daemon::Daemon;
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

/// The name of a part's server in the guests' script, and the programs that it needs.
fn server(part: &str) -> (&'static str, &'static [(&'static str, &'static str)]) {
    match part {
        "mariadb" => {
            const MARIADB: [(&str, &str); 3] = [
                ("mariadbd", "mariadb-server-core"),
                ("mariadb", "mariadb-client-core"),
                ("mariadb-slap", "mariadb-client"),
            ];
            ("mariadb", &MARIADB)
        }
        "sqlite" => ("sqlite", &[("sqlite3", "sqlite3")]),
        _ => ("postgresql", &postgresql::NEEDS),
    }
}

/// The guests with their running servers. Dropping it ends the guests and the daemon.
pub struct DatabaseSite {
    // The order of the fields matters: the daemon ends before its directories are removed.
    guests: Vec<Console>,
    daemon: Daemon,
    _place: BenchDirs,
    _directories: Vec<TempDir>,
}

impl DatabaseSite {
    /// Creates disks in `dir`, and starts the daemon and the guests, each with the servers of all
    /// `parts`.
    ///
    /// # Errors
    /// If a program is missing, a disk cannot be made, or the daemon, a guest or a server does not
    /// start.
    pub fn start(dir: &Path, guests: usize, parts: &[&str]) -> Result<Self, CommandError> {
        require(&NEEDS)?;
        let servers: Vec<_> = parts.iter().map(|part| server(part)).collect();
        servers.iter().try_for_each(|(_, needs)| require(needs))?;
        let servers: Vec<&str> = servers.iter().map(|(name, _)| *name).collect();
        let place = BenchDirs::new(dir)?;
        let mut disks = vec!["raw", "wal"];
        disks.extend(parts.contains(&"mariadb").then_some("single"));
        let (names, running) = (disks.join(" "), servers.join(" "));
        let mut script = format!("DISKS='{names}' SERVERS='{running}'\n");
        let mut directories = Vec::new();
        if servers.contains(&"postgresql") {
            let files = postgresql::prepare(&[]).map_err(CommandError::failed)?;
            script += &format!("POSTGRESQL='{}'\n", files.path().display());
            directories.push(files);
        }
        script += SCRIPT;
        let (mut specs, mut machines) = (Vec::new(), Vec::new());
        for guest in 0..guests {
            let mut machine = UserMode::default();
            for disk in &disks {
                let socket = place.sockets().join(image(disk, guest));
                specs.push(make_disk(disk, guest, &place, &socket)?);
                machine.disks.push(socket);
            }
            machines.push(machine);
        }
        let daemon = Daemon::start("vhost-user", &specs, place.images(), place.sockets())?;
        let mut guests = Vec::new();
        for machine in machines {
            let own = directory(&std::env::temp_dir())?;
            guests.push(Console::boot(&machine, own.path(), &script)?);
            directories.push(own);
        }
        for guest in &mut guests {
            guest.wait_for("begun")?;
        }
        Ok(Self {
            guests,
            daemon,
            _place: place,
            _directories: directories,
        })
    }

    /// Runs a job in all guests at the same time. The counts are for all guests together.
    ///
    /// # Errors
    /// If it fails in a guest, or a guest has ended.
    pub fn measure(&mut self, side: &Side) -> Result<Turn, CommandError> {
        let (engine, disk) = (side.text("engine"), side.text("disk"));
        let (clients, commits) = (side.number("clients"), side.number("commits"));
        for guest in &mut self.guests {
            guest.send(&format!("{engine} {disk} {clients} {commits}"))?;
        }
        for guest in &mut self.guests {
            guest.wait_for("ready")?;
        }
        let before = self.counters(disk)?;
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
        let after = self.counters(disk)?;
        let commits = commits as f64 * self.guests.len() as f64;
        let each = |figure: fn(&Counters) -> u64| {
            figure(&after).saturating_sub(figure(&before)) as f64 / commits
        };
        Ok(Turn(json!({
            "commits_per_s": commits / slowest,
            "flushes_per_commit": each(|counters| counters.flushes),
            "syncs_per_commit": each(|counters| counters.syncs),
            "writes_per_commit": each(|counters| counters.writes),
            "written_kib_per_commit": each(|counters| counters.written_bytes) / 1024.0,
        })))
    }

    /// The counters of all guests' disks of this kind.
    fn counters(&self, disk: &str) -> Result<Counters, CommandError> {
        let mut sum = Counters::default();
        for guest in 0..self.guests.len() {
            let of = self.daemon.counters(&image(disk, guest))?;
            let count = |key: &str| of[key].as_u64().unwrap_or(0);
            sum.flushes += count("flushes");
            sum.writes += count("writes");
            sum.written_bytes += count("written_bytes");
            // Without a log each FLUSH is an fdatasync of the image. A log counts the syncs of all
            // its disks.
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
        // The disks are thrown away, so the daemon is killed before it copies anything to them.
        // Fails if it has ended.
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

/// The image of a guest's disk: `raw`, `wal`, or `single`, which is a `wal` whose server writes
/// each page once.
fn image(disk: &str, guest: usize) -> String {
    format!("{disk}-{guest}.img")
}

/// Creates a guest's disk in `place`. All guests' disks of a kind share a log. Returns its SPEC.
fn make_disk(
    disk: &str,
    guest: usize,
    place: &BenchDirs,
    socket: &Path,
) -> Result<String, CommandError> {
    let image = image(disk, guest);
    let (path, socket) = (place.images().join(&image), socket.display());
    if disk == "raw" {
        // All its blocks are allocated: a sync then writes only data, which is the best case for a
        // raw image.
        make_raw(&path, DISK_BYTES, BLOCK)?;
        return Ok(format!("path={image},backend=raw,socket={socket}"));
    }
    let log = format!("{disk}.log");
    let (directory, options) = (place.images().join(&log), StoreOptions::default());
    create_disk(&path, DISK_BYTES, &directory, &options).map_err(CommandError::failed)?;
    Ok(format!("path={image},log={log},socket={socket}"))
}
