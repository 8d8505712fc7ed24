//! Two machines in user-mode Linux with DRBD between them. Each takes commands from its console.

use std::io::Write;
use std::path::Path;
use std::process::ChildStdin;

use tempfile::TempDir;
use walvisor::commands::CommandError;
use walvisor_guest_images::{CableEnd, Guest, UserMode};

use crate::output::failed;
use crate::programs::require;

/// The script of both machines. It describes the commands.
const SCRIPT: &str = include_str!("../../scripts/drbd.sh");
/// Programs of this machine that the machines use, each with its package.
const NEEDS: [(&str, &str); 6] = [
    ("linux.uml", "user-mode-linux"),
    ("modprobe", "kmod"),
    ("drbdadm", "drbd-utils"),
    ("mkfs.ext4", "e2fsprogs"),
    ("ping", "iputils-ping"),
    ("tc", "iproute2"),
];
/// Bytes of each disk: sparse files.
const DISK_BYTES: u64 = 600 << 20;
/// Lines of a machine's console in an error.
const LAST_LINES: usize = 10;

/// The pair. Dropping it kills both machines.
pub struct Pair {
    /// The machine that is the primary first.
    pub first: Machine,
    /// The other machine.
    pub second: Machine,
    // The machines end before their files are removed.
    _places: [TempDir; 3],
}

/// A running machine.
pub struct Machine {
    guest: Guest,
    input: ChildStdin,
}

impl Pair {
    /// Boots both machines with empty disks in `dir`, and connects them with DRBD's `protocol`. None is the primary.
    ///
    /// # Errors
    /// If a program is missing, a disk cannot be made, or a machine or DRBD does not start.
    pub fn start(dir: &Path, protocol: &str) -> Result<Self, CommandError> {
        require(&NEEDS)?;
        let disks = tempfile::Builder::new()
            .prefix("walvisor-bench-")
            .tempdir_in(dir)
            .map_err(failed("make a directory", dir))?;
        // The paths of the machines' sockets must be short.
        let place = || tempfile::tempdir().map_err(CommandError::failed);
        let places = [place()?, place()?];
        let bench = std::env::current_exe().map_err(CommandError::failed)?;
        let boot = |node: usize, names: &[&str], cable: CableEnd| {
            let disk = |name: &&str| {
                let path = std::path::absolute(disks.path().join(name))?;
                let file = std::fs::File::create_new(&path)?;
                file.set_len(DISK_BYTES).map(|()| path)
            };
            let files = names.iter().map(disk).collect::<Result<_, _>>();
            let machine = UserMode {
                modules: vec!["drbd".to_owned(), "sch_netem".to_owned()],
                files: files.map_err(failed("make a disk", disks.path()))?,
                cable: Some(cable),
                ..UserMode::default()
            };
            let script = format!(
                "NODE={node} PROTOCOL={protocol} BENCH='{}'\n{SCRIPT}",
                bench.display()
            );
            let guest = machine.boot_here(places[node - 1].path(), &script);
            let mut guest = guest.map_err(CommandError::failed)?;
            let input = guest.input().ok_or_else(|| ended(node))?;
            Ok::<_, CommandError>(Machine { guest, input })
        };
        let [one, other] = CableEnd::pair().map_err(CommandError::failed)?;
        let mut first = boot(1, &["first", "plain"], one)?;
        let mut second = boot(2, &["second"], other)?;
        for machine in [&mut first, &mut second] {
            let ready = machine.guest.wait_for("guest: ready");
            ready.map_err(CommandError::failed)?;
        }
        // Each waits for the other.
        first.tell("up")?;
        second.tell("up")?;
        first.done()?;
        second.done()?;
        let [one, other] = places;
        Ok(Self {
            first,
            second,
            _places: [disks, one, other],
        })
    }

    /// Makes the first machine the primary of a new file system on the replicated disk.
    ///
    /// # Errors
    /// If a command fails.
    pub fn begin(&mut self) -> Result<(), CommandError> {
        self.first.run("promote_new")?;
        self.first.run("format /dev/drbd0 disk")?;
        Ok(())
    }

    /// Delays frames in both directions by this number of milliseconds, which may have a fraction.
    ///
    /// # Errors
    /// If a command fails.
    pub fn delay(&mut self, milliseconds: f64) -> Result<(), CommandError> {
        for machine in [&mut self.first, &mut self.second] {
            machine.run(&format!("delay {milliseconds}"))?;
        }
        Ok(())
    }
}

impl Machine {
    /// Runs a command. Returns the lines that it printed for the caller.
    ///
    /// # Errors
    /// If the command fails, or the machine ends.
    pub fn run(&mut self, command: &str) -> Result<Vec<String>, CommandError> {
        self.tell(command)?;
        self.done()
            .map_err(|error| CommandError::Failed(format!("{command}: {error}")))
    }

    fn tell(&mut self, command: &str) -> Result<(), CommandError> {
        let told = self.input.write_all(format!("{command}\n").as_bytes());
        told.map_err(|error| CommandError::Failed(format!("a machine reads no commands: {error}")))
    }

    /// Waits for the end of the command.
    fn done(&mut self) -> Result<Vec<String>, CommandError> {
        let mut said = Vec::new();
        loop {
            let line = self.line()?;
            match line.strip_prefix("done ") {
                Some("0") => return Ok(said),
                Some(status) => {
                    let console = self.guest.console();
                    let last: Vec<&str> = console.lines().collect();
                    let last = &last[last.len().saturating_sub(LAST_LINES)..];
                    return Err(CommandError::Failed(format!(
                        "status {status}; the machine said last: {}",
                        last.join(" / ")
                    )));
                }
                None => said.push(line),
            }
        }
    }

    /// The next line that the machine prints for the caller.
    ///
    /// # Errors
    /// If the machine ends, or prints nothing for four minutes.
    pub fn line(&mut self) -> Result<String, CommandError> {
        let line = self.guest.wait_for("guest: ");
        line.map(|line| line.replacen("guest: ", "", 1))
            .map_err(CommandError::failed)
    }

    /// Kills the machine at once. Returns the lines that it has printed for the caller and that were not read yet.
    pub fn kill(self) -> Vec<String> {
        let lines = self.guest.cut().into_iter();
        lines
            .filter_map(|line| Some(line.strip_prefix("guest: ")?.to_owned()))
            .collect()
    }
}

fn ended(node: usize) -> CommandError {
    CommandError::Failed(format!("machine {node} has no console"))
}
