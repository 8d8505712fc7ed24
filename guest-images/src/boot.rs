//! Boots a user's own root image with the distribution's kernel. Its disk is on a write-ahead log
//! of this machine.
//!
//! ```text
//!   a KVM for kernels:  walvisor run ── disk.img, disk.img.wal
//!   any other machine:  walvisor serve vhost-user ── disk.img, disk.img.wal
//!                          └─▶ QEMU: /dev/vdc ──▶ kvm_amd ▶ walvisor run ── /dev/vdc, backend=raw
//!                      passt ──▶ QEMU: eth0 ── bridge ── tap0 ──┘
//! ```
//! Either way, a FLUSH of the guest is durable in the log.

use std::io::{BufRead, BufReader};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, getpid, kill_process, waitid};
use walvisor::machine_memory::{check_guest_memory, machine_memory};
use walvisor::net_spec::{NetLink, NetSpec};
use walvisor::network;
use walvisor::size::{human_size, parse_size};

use crate::cache::Cache;
use crate::error::{Error, FileContext, Result};
use crate::images::GuestImages;
use crate::job::GuestJob;
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
    /// Further disks, as `walvisor run --disk` takes them: /dev/vdb, and so on.
    pub disks: Vec<String>,
    /// A network, as `walvisor run --net` takes it; nested only passt.
    pub network: Option<String>,
    /// Where to listen for `walvisor ctl`.
    pub control: Option<PathBuf>,
    /// The file for the metrics.
    pub metrics: Option<PathBuf>,
    /// Where metrics are served, as `walvisor run --metrics-listen` takes it.
    pub metrics_listen: Option<String>,
}

/// How long the daemon of the disks may take to close them.
const CLOSE_LIMIT: Duration = Duration::from_secs(60);
/// Bytes of memory that a nested machine has.
const NESTED_MACHINE: u64 = 4 << 30;
/// Bytes of them that a guest may have.
const MOST_NESTED_MEMORY: u64 = 3 << 30;

impl OwnGuest {
    /// Boots the guest, with its console on the terminal, and waits until it ends. Returns the exit
    /// status.
    ///
    /// # Errors
    /// The images cannot be built, or a program cannot be started.
    pub fn boot(&self, walvisor: &Path, cache: &Cache) -> Result<u8> {
        let image = self.image.canonicalize().at("open", &self.image)?;
        let (machine, reason) = Machine::choose();
        let reporter = Reporter::quiet(None);
        reporter.note(&reason);
        self.check_memory(machine, machine_memory())?;
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
                command.args(self.disks.iter().flat_map(|spec| ["--disk", spec]));
                command.args(self.network.iter().flat_map(|spec| ["--net", spec]));
                self.give_files(&mut command);
                // From here on walvisor has the terminal, and handles signals.
                let source = command.exec();
                Err(Error::Start {
                    command: command_text(&command),
                    source,
                })
            }
            Machine::Nested => {
                let network = self.network.as_deref();
                let network = network.map(|spec| NestedNetwork::start(spec, &image));
                let network = network.transpose()?;
                let scratch = ScratchDir::new(cache, &reporter)?;
                let sockets =
                    (0..=self.disks.len()).map(|n| scratch.path().join(format!("disk{n}")));
                let sockets: Vec<_> = sockets.collect();
                let daemon = Daemon::start(self, walvisor, &image, &sockets)?;
                let mut job = GuestJob::new(JOB, walvisor);
                let quoted = command_line.trim_end().replace('\'', "'\\''");
                job.script = format!(
                    "GUEST_CPUS={} GUEST_MEMORY={} GUEST_CMDLINE='{quoted}' GUEST_DISKS={} GUEST_NET={}\n{JOB}",
                    self.cpus,
                    self.memory,
                    sockets.len(),
                    network.as_ref().map_or("", |network| &network.keys),
                );
                job.limit = NO_LIMIT;
                job.disks = sockets;
                job.network = network.map(|network| network.socket);
                job.terminal = true;
                let outcome = job.run_on(machine, cache, &reporter)?;
                drop(daemon);
                Ok(u8::try_from(outcome.status).unwrap_or(1))
            }
        }
    }

    /// Tells `walvisor run` or `serve` where to listen, and where to write metrics.
    fn give_files(&self, command: &mut Command) {
        for (option, path) in [("--control", &self.control), ("--metrics", &self.metrics)] {
            if let Some(path) = path {
                command.arg(option).arg(path);
            }
        }
        let listen = self.metrics_listen.iter();
        command.args(listen.flat_map(|address| ["--metrics-listen", address]));
    }

    /// Refuses a guest with more memory than this machine has, before images are made for it.
    /// `available`: the bytes of memory and swap of this machine.
    fn check_memory(&self, machine: Machine, available: u64) -> Result<()> {
        let memory = &self.memory;
        let refused = |reason: String| Err(Error::Unusable(format!("--memory {memory}: {reason}")));
        let bytes = match parse_size(memory) {
            Err(reason) => return refused(reason.to_string()),
            Ok(bytes) => bytes,
        };
        if let Err(reason) = check_guest_memory(bytes) {
            return refused(reason.to_owned());
        }
        let has = format!(
            "this machine has {} of memory and swap",
            human_size(available)
        );
        match machine {
            Machine::Nested if bytes > MOST_NESTED_MEMORY => refused(
                "the machine that QEMU emulates around the guest has 4 GiB: give at most 3G"
                    .to_owned(),
            ),
            Machine::Nested if available < NESTED_MACHINE => Err(Error::Unusable(format!(
                "the machine that QEMU emulates around the guest has 4 GiB, and {has}: boot the \
                 guest where there is more"
            ))),
            Machine::Direct if bytes > available => refused(format!("{has}: give less")),
            _ => Ok(()),
        }
    }
}

/// The network of a nested guest: a passt on this machine, and a bridge from the emulated network
/// card to a tap device.
struct NestedNetwork {
    /// QEMU's end.
    socket: Arc<OwnedFd>,
    /// Keys of the guest's device.
    keys: String,
}

impl NestedNetwork {
    fn start(spec: &str, image: &Path) -> Result<Self> {
        let unusable =
            |reason: &dyn std::fmt::Display| Error::Unusable(format!("--net {spec}: {reason}"));
        let parsed = NetSpec::parse(spec).map_err(|error| unusable(&error))?;
        let NetLink::Passt(options) = &parsed.link else {
            return Err(unusable(&"a nested guest has only passt: give passt"));
        };
        // QEMU inherits the socket.
        let started = network::start_passt(parsed.mtu, options);
        let (socket, _) = started.map_err(|source| Error::Start {
            command: "passt".to_owned(),
            source,
        })?;
        let mac = network::address(&parsed, 0, image);
        Ok(Self {
            socket: Arc::new(socket.into()),
            keys: format!(",mac={mac},mtu={}", parsed.mtu),
        })
    }
}

/// The path as a value of `--disk`, where commas are doubled.
fn escape(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// `walvisor serve vhost-user` with the guest's disks. Dropping it stops it, which closes the
/// disks.
struct Daemon {
    child: Child,
    /// Whether its end is expected.
    ending: Arc<AtomicBool>,
}

impl Daemon {
    fn start(guest: &OwnGuest, walvisor: &Path, image: &Path, sockets: &[PathBuf]) -> Result<Self> {
        let mut command = Command::new(walvisor);
        command.args(["serve", "vhost-user"]);
        let first = format!("path={}", escape(image));
        for (spec, socket) in [&first].into_iter().chain(&guest.disks).zip(sockets) {
            let spec = format!("{spec},socket={}", escape(socket));
            command.args(["--disk", &spec]);
        }
        guest.give_files(&mut command);
        command.stdin(Stdio::null()).stdout(Stdio::piped());
        stop::check()?;
        let child = leash(&mut command).spawn().map_err(|source| Error::Start {
            command: command_text(&command),
            source,
        })?;
        let mut daemon = Self {
            child,
            ending: Arc::default(),
        };
        stop::exempt(Pid::from_child(&daemon.child));
        // It prints a line once it serves the disk. Errors go to stderr.
        let mut line = String::new();
        if let Some(output) = daemon.child.stdout.take() {
            BufReader::new(output)
                .read_line(&mut line)
                .at("read the output of", walvisor)?;
        }
        // It prints a line for each disk, and each is served by then.
        if line.is_empty() {
            daemon.ending.store(true, Ordering::SeqCst);
            return Err(Error::Unusable(format!(
                "{}: walvisor does not serve it, for the reason above",
                image.display()
            )));
        }
        daemon.watch();
        Ok(daemon)
    }

    /// Ends the guest if the daemon ends before it: QEMU would wait for it for ever.
    fn watch(&self) {
        let (daemon, ending) = (Pid::from_child(&self.child), Arc::clone(&self.ending));
        thread::spawn(move || {
            let exited = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while matches!(waitid(WaitId::Pid(daemon), exited), Err(Errno::INTR)) {}
            if !ending.load(Ordering::SeqCst) {
                eprintln!(
                    "\r\nwalvisor-guest-images: 'walvisor serve', which has the disks, has ended: the guest is stopped"
                );
                // As a signal of the user: everything that this process has started ends.
                let _ = kill_process(getpid(), Signal::TERM);
            }
        });
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.ending.store(true, Ordering::SeqCst);
        let began = Instant::now();
        // One that somebody has stopped would not end. Fails if it has already ended.
        for signal in [Signal::TERM, Signal::CONT] {
            let _ = kill_process(Pid::from_child(&self.child), signal);
        }
        while matches!(self.child.try_wait(), Ok(None)) {
            if began.elapsed() > CLOSE_LIMIT {
                eprintln!(
                    "walvisor-guest-images: 'walvisor serve', which has the disks, does not end, \
                     and is killed: they are as after a power cut"
                );
                let _ = self.child.kill();
                let _ = self.child.wait();
                return;
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_checked_against_the_machine_that_has_to_have_it() {
        let check = |memory: &str, machine, available| {
            let guest = OwnGuest {
                image: PathBuf::new(),
                root: String::new(),
                append: String::new(),
                cpus: 1,
                memory: memory.to_owned(),
                disks: Vec::new(),
                network: None,
                control: None,
                metrics: None,
                metrics_listen: None,
            };
            let checked = guest.check_memory(machine, available);
            checked.map_err(|error| error.to_string())
        };
        let (direct, nested) = (Machine::Direct, Machine::Nested);
        for (memory, machine, available) in [
            ("8G", direct, 8 << 30),
            ("3G", nested, 4 << 30),
            ("512M", nested, 4 << 30),
        ] {
            assert_eq!(check(memory, machine, available), Ok(()));
        }
        for (memory, machine, available, part) in [
            (
                "8G",
                direct,
                7 << 30,
                "this machine has 7 GiB of memory and swap: give less",
            ),
            ("2T", direct, 4 << 40, "give a multiple of 4K from 1M to 1T"),
            (
                "5000",
                nested,
                8 << 30,
                "give a multiple of 4K from 1M to 1T",
            ),
            ("much", direct, 8 << 30, "a number of bytes"),
            ("8G", nested, 16 << 30, "has 4 GiB: give at most 3G"),
            (
                "1G",
                nested,
                2 << 30,
                "has 4 GiB, and this machine has 2 GiB",
            ),
        ] {
            let refused = check(memory, machine, available).unwrap_err();
            assert!(refused.contains(part), "{memory}: {refused}");
        }
    }
}
