//! A boot of the machine around a nested guest.
//!
//! ```text
//!   this process ──▶ qemu-system-x86_64 (TCG) ── /dev/vda  images.ext4, read-only
//!        ▲                │  console, pulse      /dev/vdb  work.ext4: jobs in, statuses and results out
//!        └────── lines ───┘
//!                         └─ Debian's kernel, kvm_amd ──▶ each job.sh ──▶ walvisor run ──▶ the guest
//! ```

use std::fs::File;
use std::io::Read;
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::stdio::stdin;
use rustix::termios::isatty;

use crate::error::{Error, FileContext, Result};
use crate::guest::vhost_user_disk;
use crate::keyboard::Keyboard;
use crate::process::{LeashedChild, program_error, run};
use crate::stop;
use crate::userland::search_path;

/// What the kernel of either machine prints when a processor is stuck. Emulated virtualization
/// sometimes mixes up the state of a guest with its host's, and no software on that machine can
/// recover from that.
const STUCK: [&str; 3] = ["detected stall", "soft lockup", "stack guard page was hit"];
/// On an idle machine the outer kernel prints its first line after 3 to 6 s.
const BOOT_LIMIT: Duration = Duration::from_secs(90);

/// Each processor of the machine writes its number to the second serial port every three seconds.
/// One that does not for this long is stuck, perhaps with interrupts off, which no watchdog of its
/// kernel notices.
const PULSE_LIMIT: Duration = Duration::from_secs(60);
const PROCESSORS: usize = 2;
/// What the machine prints before the number of the job that begins, if it has several.
const JOB_BEGINS: &str = "outer: job ";

/// How a boot ended.
pub(crate) enum BootEnd {
    /// The machine powered off, or crashed: then the work disk lacks a job's status.
    PoweredOff,
    /// The machine never started a job, or it hung: a kernel's watchdog reported a stuck
    /// processor, or a processor has no pulse. Or a signal killed QEMU.
    Hung,
    /// A job ran longer than its limit.
    TimedOut,
    /// A user has typed Ctrl-A x, and the machine went on.
    GivenUp,
}

/// The files and the time limits of one boot.
pub(crate) struct NestedBoot<'a> {
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
    pub(crate) images: &'a Path,
    pub(crate) work: &'a Path,
    /// The file for what the machine's processors write.
    pub(crate) pulse: &'a Path,
    /// The limit of each job on the work disk.
    pub(crate) limits: &'a [Duration],
    /// Sockets of further vhost-user disks: /dev/vdc, ...
    pub(crate) disks: &'a [PathBuf],
    /// A socket that QEMU inherits, for a network card: a stream of frames, each after its length.
    pub(crate) network: Option<&'a OwnedFd>,
    /// Whether the machine's console is the terminal of this process.
    pub(crate) terminal: bool,
}

impl NestedBoot<'_> {
    fn command(&self) -> Command {
        let mut qemu = Command::new("qemu-system-x86_64");
        let disk = |id: &str, path: &Path, options: &str| {
            format!(
                "id={id},if=none,format=raw,file={},{options}",
                path.display()
            )
        };
        let disks = self.disks.iter().enumerate();
        let disks = disks.flat_map(|(number, socket)| vhost_user_disk(number, socket, 1));
        let network = self.network.iter().flat_map(|socket| {
            let socket = socket.as_raw_fd();
            [
                "-netdev".to_owned(),
                format!("stream,id=network,server=off,addr.type=fd,addr.str={socket}"),
                "-device".to_owned(),
                "virtio-net-pci,netdev=network,romfile=".to_owned(),
            ]
        });
        if let Some(socket) = self.network {
            let socket = socket.as_raw_fd();
            // SAFETY: between fork and exec the closure only makes a system call. The descriptor is
            // open, because the command is run while `self.network` is borrowed.
            unsafe {
                qemu.pre_exec(move || {
                    let socket = BorrowedFd::borrow_raw(socket);
                    fcntl_setfd(socket, FdFlags::empty())?;
                    Ok(())
                });
            }
        }
        qemu.args(["-nodefaults", "-no-user-config", "-no-reboot"])
            .args(["-display", "none", "-serial", "chardev:console", "-chardev"])
            .arg("stdio,id=console")
            .args(["-serial", "chardev:pulse", "-chardev"])
            .arg(format!("file,id=pulse,path={}", self.pulse.display()))
            .args([
                "-accel",
                "tcg,thread=multi",
                "-machine",
                // The daemons of vhost-user disks share the machine's memory.
                "q35,memory-backend=memory",
                "-object",
                "memory-backend-memfd,id=memory,size=4G,share=on",
                "-cpu",
                "EPYC,+svm",
            ])
            .args(["-smp", &PROCESSORS.to_string(), "-m", "4G"])
            .arg("-kernel")
            .arg(self.kernel)
            .arg("-initrd")
            .arg(self.initramfs)
            .args([
                "-append",
                // With this log level the kernel prints only panics: other messages could interrupt
                // the job's output. The sysctl turns a stall into a panic, so that it is printed
                // too.
                "console=ttyS0 loglevel=1 panic=-1 sysctl.kernel.panic_on_rcu_stall=1 \
                 mitigations=off",
            ])
            .arg("-drive")
            .arg(disk("images", self.images, "readonly=on"))
            .args(["-device", "virtio-blk-pci,drive=images"])
            .arg("-drive")
            // The disk is deleted after the run, so it does not have to survive a power loss of
            // this machine.
            .arg(disk("work", self.work, "cache=unsafe"))
            .args(["-device", "virtio-blk-pci,drive=work"])
            .args(disks)
            .args(network)
            .stdin(if self.terminal {
                Stdio::piped()
            } else {
                Stdio::null()
            })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        qemu
    }

    /// Boots the machine, passes every console line to `line`, with the place of the job that runs,
    /// and waits until the machine ends.
    ///
    /// # Errors
    /// QEMU cannot be started or fails.
    pub(crate) fn run(&self, mut line: impl FnMut(usize, &str)) -> Result<BootEnd> {
        let mut pulse = Pulse::new(self.pulse)?;
        let mut command = self.command();
        let mut qemu = LeashedChild::spawn(&mut command, false)?;
        let keyboard = match qemu.take_input() {
            Some(input) => {
                qemu.echo();
                let keyboard = Keyboard::connect(input);
                Some(keyboard.at("read", "the terminal")?)
            }
            None => None,
        };
        let (mut booted, mut stuck, mut job) = (false, false, 0);
        // Of the boot, and then of each job.
        let (mut began, mut limit) = (Instant::now(), BOOT_LIMIT);
        // A user at the console may stop the machine for any time.
        let is_interactive = self.terminal && isatty(stdin());
        let (mut asked, mut given_up) = (None, false);
        let status = qemu.watch(|text| {
            if let Some(text) = text {
                stuck |= STUCK.iter().any(|words| text.contains(words));
                let begins = text.strip_prefix(JOB_BEGINS);
                let begins = begins.and_then(|place| place.parse().ok());
                let begins = begins.filter(|&place: &usize| place < self.limits.len());
                if let Some(place) = begins.or_else(|| text.contains("outer: ready").then_some(0)) {
                    (booted, job) = (true, place);
                    (began, limit) = (Instant::now(), self.limits[place]);
                }
                line(job, text);
            }
            if booted && pulse.has_stopped(PULSE_LIMIT) && !is_interactive {
                stuck = true;
                let seconds = PULSE_LIMIT.as_secs();
                line(
                    job,
                    &format!("outer: a processor has had no pulse for {seconds} s"),
                );
            }
            let mut keyboard = keyboard.iter();
            given_up = keyboard.any(|keyboard| keyboard.gives_up(&mut asked));
            if given_up || stuck || began.elapsed() > limit {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        stop::check()?;
        if given_up {
            return Ok(BootEnd::GivenUp);
        }
        match status.at("wait for", "qemu-system-x86_64")? {
            Some(status) if status.code().is_none() => {
                line(
                    job,
                    &format!("outer: qemu-system-x86_64 was killed: {status}"),
                );
                Ok(BootEnd::Hung)
            }
            Some(status) if !status.success() => {
                Err(program_error(&command, status, &qemu.read_stderr()))
            }
            Some(_) if booted => Ok(BootEnd::PoweredOff),
            None if booted && !stuck => Ok(BootEnd::TimedOut),
            _ => Ok(BootEnd::Hung),
        }
    }
}

/// What the machine's processors write.
struct Pulse {
    file: File,
    /// When each wrote last.
    last: Option<[Instant; PROCESSORS]>,
}

impl Pulse {
    fn new(path: &Path) -> Result<Self> {
        // QEMU opens the same file.
        File::create(path).at("create", path)?;
        Ok(Self {
            file: File::open(path).at("open", path)?,
            last: None,
        })
    }

    /// Whether a processor has not written for longer than `limit`. The first call begins the wait
    /// for it.
    fn has_stopped(&mut self, limit: Duration) -> bool {
        let (now, mut bytes) = (Instant::now(), Vec::new());
        let last = self.last.get_or_insert([now; PROCESSORS]);
        // What cannot be read is as what was not written.
        let _ = self.file.read_to_end(&mut bytes);
        for byte in bytes {
            let number = usize::from(byte.wrapping_sub(b'0'));
            if let Some(last) = last.get_mut(number) {
                *last = now;
            }
        }
        last.iter().any(|last| now - *last > limit)
    }
}

/// Brings the ext4 image of a machine that did not unmount it in order, so that [`extract`] finds
/// what was written. It complains of what is missing.
pub(crate) fn replay_journal(image: &Path) {
    let mut command = Command::new("e2fsck");
    command.env("PATH", search_path());
    let _ = command
        .args(["-p", "-E", "journal_only"])
        .arg(image)
        .output();
}

/// Copies file or directory `name` of the ext4 image `image` into directory `target`, without
/// mounting it.
///
/// # Errors
/// `name` is not in the image, or cannot be copied.
pub(crate) fn extract(image: &Path, name: &str, target: &Path) -> Result<()> {
    let output = run(Command::new("debugfs")
        .env("PATH", search_path())
        .arg("-R")
        .arg(format!("rdump /{name} {}", target.display()))
        .arg(image))?;
    // debugfs exits with status 0 even on failure.
    let last = Path::new(name).file_name().unwrap_or_default();
    if target.join(last).exists() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let reason = stderr.lines().last().unwrap_or("debugfs printed no reason");
    Err(Error::Unusable(format!(
        "{name} is not on the work disk {}: {reason}",
        image.display()
    )))
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::io::Write;

    use super::*;

    #[test]
    fn a_machine_with_one_stuck_processor_has_stopped() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("pulse");
        let mut pulse = Pulse::new(&path).unwrap();
        let mut written = OpenOptions::new().append(true).open(&path).unwrap();
        let (minute, none) = (Duration::from_secs(60), Duration::ZERO);
        assert!(!pulse.has_stopped(minute), "it has just begun");
        written.write_all(b"01").unwrap();
        assert!(!pulse.has_stopped(none), "both have just written");
        written.write_all(b"0").unwrap();
        assert!(pulse.has_stopped(none), "the other one has not");
        assert!(!pulse.has_stopped(minute), "but may");
    }
}
