//! Boots a user's own root image with the distribution's kernel. Its disk is on a write-ahead log of this machine.
//!
//! ```text
//!   a KVM for kernels:  walvisor run ── disk.img, disk.img.wal
//!   any other machine:  walvisor serve vhost-user ── disk.img, disk.img.wal
//!                          └─▶ QEMU: /dev/vdc ──▶ kvm_amd ▶ walvisor run ── /dev/vdc, backend=raw
//! ```
//! Either way, a FLUSH of the guest is durable in the log.

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::cache::Cache;
use crate::error::{Error, FileContext, Result};
use crate::images::GuestImages;
use crate::job::Job;
use crate::machine::Machine;
use crate::process::{command_text, leash};
use crate::reporter::Reporter;
use crate::scratch::ScratchDir;
use crate::stop;

const JOB: &str = include_str!("../scripts/boot-job.sh");
/// A limit that no guest reaches.
const NO_LIMIT: Duration = Duration::from_secs(u32::MAX as u64);

/// A user's own guest.
#[derive(Clone, Debug)]
pub struct OwnGuest {
    /// The raw image with the root file system, which is ext4.
    pub image: PathBuf,
    /// The device with that file system: `/dev/vda`, or a partition.
    pub root: String,
    /// What to append to the kernel's command line.
    pub append: String,
    /// Virtual CPUs.
    pub cpus: u8,
    /// Memory, as `walvisor run --memory` takes it.
    pub memory: String,
}

impl OwnGuest {
    /// Boots the guest, with its console on the terminal, and waits until it ends. Returns the exit status.
    ///
    /// # Errors
    /// The images cannot be built, or a program cannot be started.
    pub fn boot(&self, walvisor: &Path, cache: &Cache) -> Result<u8> {
        let image = self.image.canonicalize().at("open", &self.image)?;
        let (machine, reason) = Machine::choose();
        let reporter = Reporter::quiet(None);
        reporter.note(&reason);
        let command_line = format!(
            "console=ttyS0 quiet reboot=t panic=-1 root={} {}",
            self.root, self.append
        );
        match machine {
            Machine::Direct => {
                let images = GuestImages::ensure(cache, &reporter)?;
                drop(reporter);
                stop::check()?;
                let mut command = Command::new(walvisor);
                command
                    .args(["run", "--cmdline", command_line.trim_end()])
                    .args(["--memory", &self.memory, "--cpus", &self.cpus.to_string()])
                    .arg("--kernel")
                    .arg(images.path("vmlinux"))
                    .arg("--initrd")
                    .arg(images.path("initramfs-base.cpio"))
                    .arg("--disk")
                    .arg(format!("path={},transport=pci", escape(&image)));
                // From here on walvisor has the terminal, and handles signals.
                let source = command.exec();
                Err(Error::Start {
                    command: command_text(&command),
                    source,
                })
            }
            Machine::Nested => {
                let scratch = ScratchDir::new(cache, &reporter)?;
                let socket = scratch.path().join("disk");
                let daemon = Daemon::start(walvisor, &image, &socket)?;
                let mut job = Job::new(JOB, walvisor);
                let quoted = command_line.trim_end().replace('\'', "'\\''");
                job.script = format!(
                    "GUEST_CPUS={} GUEST_MEMORY={} GUEST_CMDLINE='{quoted}'\n{JOB}",
                    self.cpus, self.memory
                );
                job.limit = NO_LIMIT;
                job.disk = Some(socket);
                job.terminal = true;
                let outcome = job.run_on(machine, cache, &reporter)?;
                drop(daemon);
                Ok(u8::try_from(outcome.status).unwrap_or(1))
            }
        }
    }
}

/// The path as a value of `--disk`, where commas are doubled.
fn escape(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// `walvisor serve vhost-user` with one disk. Dropping it stops it, which closes the disk.
struct Daemon(Child);

impl Daemon {
    fn start(walvisor: &Path, image: &Path, socket: &Path) -> Result<Self> {
        let mut command = Command::new(walvisor);
        command
            .args(["serve", "vhost-user", "--disk"])
            .arg(format!("path={},socket={}", escape(image), escape(socket)))
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        stop::check()?;
        let child = leash(&mut command).spawn().map_err(|source| Error::Start {
            command: command_text(&command),
            source,
        })?;
        let mut daemon = Self(child);
        stop::exempt(Pid::from_child(&daemon.0));
        // It prints a line once it serves the disk. Errors go to stderr.
        let mut line = String::new();
        if let Some(output) = daemon.0.stdout.take() {
            BufReader::new(output)
                .read_line(&mut line)
                .at("read the output of", walvisor)?;
        }
        if line.is_empty() {
            return Err(Error::Unusable(format!(
                "{}: walvisor does not serve it, for the reason above",
                image.display()
            )));
        }
        Ok(daemon)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // Fails if it has already ended.
        let _ = kill_process(Pid::from_child(&self.0), Signal::TERM);
        let _ = self.0.wait();
    }
}
