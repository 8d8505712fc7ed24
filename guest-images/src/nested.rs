//! One boot of the machine around a nested guest.
//!
//! ```text
//!   this process ──▶ qemu-system-x86_64 (TCG) ── /dev/vda  images.ext4, read-only
//!        ▲                │  console             /dev/vdb  work.ext4: job in, status and results out
//!        └────── lines ───┘
//!                         └─ Debian's kernel, kvm_amd ──▶ job.sh ──▶ walvisor run ──▶ the guest
//! ```

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::stdio::stdin;
use rustix::termios::{OptionalActions, Termios, isatty, tcgetattr, tcsetattr};

use crate::error::{Error, FileContext, Result};
use crate::guest::vhost_user_disk;
use crate::process::{Leashed, failed, run};
use crate::stop;
use crate::userland::search_path;

/// Messages of the kernels of either machine when a processor is stuck. Emulated virtualisation sometimes mixes the
/// state of a guest with its host's. No software on that machine can recover from this.
const STUCK: [&str; 3] = ["detected stall", "soft lockup", "stack guard page was hit"];
/// The outer kernel shows its first line after 3 to 6 s on an idle machine.
const BOOT_LIMIT: Duration = Duration::from_secs(90);

/// A machine that prints nothing for longer than this has hung: no job is silent for so long.
const SILENCE_LIMIT: Duration = Duration::from_secs(240);

/// How a boot ended.
pub(crate) enum End {
    /// The machine powered off, or crashed: the work disk then has no status.
    PoweredOff,
    /// The machine did not start the job, or it hung: a kernel's watchdog reported a stuck processor, or the console
    /// fell silent. Or a signal killed QEMU.
    Hung,
    /// The job ran longer than its limit.
    TimedOut,
}

/// The files and the time limit of one boot.
pub(crate) struct Boot<'a> {
    pub(crate) kernel: &'a Path,
    pub(crate) initramfs: &'a Path,
    pub(crate) images: &'a Path,
    pub(crate) work: &'a Path,
    pub(crate) limit: Duration,
    /// Sockets of further vhost-user disks: /dev/vdc, ...
    pub(crate) disks: &'a [PathBuf],
    /// Whether its console is the terminal of this process.
    pub(crate) terminal: bool,
}

impl Boot<'_> {
    fn command(&self) -> Command {
        let mut qemu = Command::new("qemu-system-x86_64");
        let disk = |id: &str, path: &Path, options: &str| {
            format!(
                "id={id},if=none,format=raw,file={},{options}",
                path.display()
            )
        };
        qemu.args(["-nodefaults", "-no-user-config", "-no-reboot"])
            .args(["-display", "none", "-serial", "chardev:console", "-chardev"])
            // Ctrl-C on a terminal goes to the guest.
            .arg(format!("stdio,id=console,signal={}", if self.terminal { "off" } else { "on" }))
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
            .args(["-smp", "2", "-m", "4G"])
            .arg("-kernel")
            .arg(self.kernel)
            .arg("-initrd")
            .arg(self.initramfs)
            .args([
                "-append",
                // With this log level the kernel shows only what ends it: other messages could interrupt the job's
                // output. The setting below turns a stall into a panic, so that it is shown too.
                "console=ttyS0 loglevel=1 panic=-1 sysctl.kernel.panic_on_rcu_stall=1 mitigations=off",
            ])
            .arg("-drive")
            .arg(disk("images", self.images, "readonly=on"))
            .args(["-device", "virtio-blk-pci,drive=images"])
            .arg("-drive")
            // The disk is deleted after the run, so it need not survive a power loss of this machine.
            .arg(disk("work", self.work, "cache=unsafe"))
            .args(["-device", "virtio-blk-pci,drive=work"])
            .args(self.disks.iter().flat_map(|socket| vhost_user_disk(socket, 1)))
            .stdin(match self.terminal {
                true => Stdio::inherit(),
                false => Stdio::null(),
            })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        qemu
    }

    /// Boots the machine, gives every console line to `line`, and waits for the end.
    ///
    /// # Errors
    /// QEMU cannot be started or fails.
    pub(crate) fn run(&self, mut line: impl FnMut(&str)) -> Result<End> {
        let _terminal = self.terminal.then(Terminal::keep);
        let mut command = self.command();
        let mut qemu = Leashed::spawn(&mut command, false)?;
        if self.terminal {
            qemu.show();
        }
        let start = Instant::now();
        let (mut booted, mut stuck) = (false, false);
        // A person may think for longer than a machine.
        let waits_for_person = self.terminal && isatty(stdin());
        let mut heard = start;
        let status = qemu.watch(|text| {
            if let Some(text) = text {
                heard = Instant::now();
                booted |= text.contains("outer: ready");
                stuck |= STUCK.iter().any(|words| text.contains(words));
                line(text);
            }
            stuck |= !waits_for_person && heard.elapsed() > SILENCE_LIMIT;
            if stuck || start.elapsed() > if booted { self.limit } else { BOOT_LIMIT } {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        stop::check()?;
        match status.at("wait for", "qemu-system-x86_64")? {
            Some(status) if status.code().is_none() => {
                line(&format!("outer: qemu-system-x86_64 was killed: {status}"));
                Ok(End::Hung)
            }
            Some(status) if !status.success() => Err(failed(&command, status, &qemu.stderr())),
            Some(_) if booted => Ok(End::PoweredOff),
            None if booted && !stuck => Ok(End::TimedOut),
            _ => Ok(End::Hung),
        }
    }
}

/// The mode of the terminal at stdin, which a QEMU that is killed leaves as it has made it. Dropping this restores it.
struct Terminal(Option<Termios>);

impl Terminal {
    fn keep() -> Self {
        Self(tcgetattr(stdin()).ok())
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        if let Some(mode) = &self.0 {
            // A failure cannot be reported any more.
            let _ = tcsetattr(stdin(), OptionalActions::Now, mode);
        }
    }
}

/// Copies file or directory `name` of the ext4 image `image` into directory `target`, without mounting it.
///
/// # Errors
/// `name` is not in the image, or cannot be copied.
pub(crate) fn extract(image: &Path, name: &str, target: &Path) -> Result<()> {
    let output = run(Command::new("debugfs")
        .env("PATH", search_path())
        .arg("-R")
        .arg(format!("rdump /{name} {}", target.display()))
        .arg(image))?;
    // debugfs exits with status 0 even if it fails.
    if target.join(name).exists() {
        return Ok(());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let reason = stderr.lines().last().unwrap_or("debugfs printed no reason");
    Err(Error::Unusable(format!(
        "{name} is not on the work disk {}: {reason}",
        image.display()
    )))
}
