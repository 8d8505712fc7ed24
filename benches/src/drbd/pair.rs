//! Two machines in user-mode Linux with DRBD between them. Each takes commands from its console.

use std::path::Path;

use tempfile::TempDir;
use walvisor::commands::CommandError;
use walvisor_guest_images::{CableEnd, UserMode};

use crate::bench_dirs::{directory, failed};
use crate::console::Console;
use crate::programs::require;

/// The script of both machines, which documents the commands.
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

/// The pair. Dropping it kills both machines.
pub struct MachinePair {
    /// The machine that starts as the primary.
    pub first: Console,
    /// The other machine.
    pub second: Console,
    // The machines end before their files are removed.
    _places: [TempDir; 3],
}

impl MachinePair {
    /// Boots both machines with empty disks in `dir`, and connects them with DRBD's `protocol`.
    /// Neither is the primary yet.
    ///
    /// # Errors
    /// If a program is missing, a disk cannot be made, or a machine or DRBD does not start.
    pub fn start(dir: &Path, protocol: &str) -> Result<Self, CommandError> {
        require(&NEEDS)?;
        let disks = directory(dir)?;
        // Socket paths must be short.
        let place = || directory(&std::env::temp_dir());
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
            Console::boot(&machine, places[node - 1].path(), &script)
        };
        let [one, other] = CableEnd::pair().map_err(CommandError::failed)?;
        let mut first = boot(1, &["first", "plain"], one)?;
        let mut second = boot(2, &["second"], other)?;
        for machine in [&mut first, &mut second] {
            machine.wait_for("ready")?;
        }
        // Each waits for the other.
        first.send("up")?;
        second.send("up")?;
        first.wait_for_end()?;
        second.wait_for_end()?;
        let [one, other] = places;
        Ok(Self {
            first,
            second,
            _places: [disks, one, other],
        })
    }

    /// Makes the first machine the primary, with a new file system on the replicated disk.
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
