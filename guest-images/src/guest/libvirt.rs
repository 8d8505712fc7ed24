//! libvirt's own daemon, of an ordinary user: it needs no set-up of the machine, and leaves nothing
//! behind.

use std::fs::{self, File};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use super::Guest;
use super::initramfs::build_initramfs;
use crate::error::{FileContext, Result};
use crate::images::GuestImages;
use crate::process::{LeashedChild, run};

/// Seconds that `virsh` may take.
const PATIENCE: &str = "120";
/// How long the daemon may take to start.
const START_LIMIT: Duration = Duration::from_secs(120);

/// A `libvirtd` whose domains are QEMU's in full emulation. Dropping it kills it and all its
/// domains, like a power cut.
pub struct Libvirt {
    place: PathBuf,
    _daemon: LeashedChild,
}

impl Libvirt {
    /// The user ID and group ID of the daemon and its domains, if the caller is root: `nobody`.
    pub const USER: u32 = 65534;

    /// Starts the daemon. All its files are in `dir`, where it finds its domains again after a
    /// kill.
    ///
    /// # Errors
    /// A file cannot be written, or a program cannot be started.
    pub fn start(dir: &Path) -> Result<Self> {
        let settings = dir.join(".config/libvirt");
        fs::create_dir_all(&settings).at("create", &settings)?;
        // QEMU's output goes to a file instead of virtlogd, one daemon less.
        let file = settings.join("qemu.conf");
        fs::write(&file, "stdio_handler = \"file\"\n").at("write", &file)?;
        if rustix::process::geteuid().is_root() {
            let reachable = fs::Permissions::from_mode(0o755);
            fs::set_permissions(dir, reachable).at("set the mode of", dir)?;
            for place in [dir, &dir.join(".config"), &settings] {
                chown(place, Some(Self::USER), Some(Self::USER))
                    .at("change the owner of", place)?;
            }
        }
        let place = dir.to_owned();
        let log = place.join("libvirtd.log");
        let log = File::create(&log).at("create", &log)?;
        // QEMU detaches from libvirt, which starts it. The namespace's first process adopts it, and
        // takes it along.
        let mut command = Command::new("unshare");
        let root = rustix::process::geteuid().is_root();
        command.args((!root).then_some("--map-current-user"));
        command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        command.args(["sh", "-c", "\"$@\"; true", "sh"]);
        as_user(&mut command, &place);
        command
            .arg("libvirtd")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let daemon = LeashedChild::spawn(&mut command, true)?;
        let libvirt = Self {
            place,
            _daemon: daemon,
        };
        let began = Instant::now();
        while let Err(error) = libvirt.virsh(&["version"]) {
            if began.elapsed() > START_LIMIT {
                return Err(error);
            }
            thread::sleep(Duration::from_millis(200));
        }
        Ok(libvirt)
    }

    /// Runs `virsh` in the daemon's directory, and returns what it prints.
    ///
    /// # Errors
    /// It fails, or does not end within two minutes.
    pub fn virsh(&self, arguments: &[&str]) -> Result<String> {
        let mut command = Command::new("timeout");
        command.arg(PATIENCE);
        as_user(&mut command, &self.place);
        command.args(["virsh", "--quiet", "--connect", "qemu:///session"]);
        let output = run(command.args(arguments))?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    }

    /// Defines a domain that boots the images' kernel and runs `script`.
    ///
    /// # Errors
    /// A file cannot be read or written, or libvirt refuses the domain.
    pub fn define(&self, domain: &str, images: &GuestImages, script: &str) -> Result<()> {
        let place = self.place.display();
        let kernel = images.path("vmlinuz");
        fs::copy(&kernel, self.place.join("vmlinuz")).at("copy", &kernel)?;
        build_initramfs(&self.place, images, script, &[])?;
        let domain = domain
            .replace(
                "</os>",
                &format!(
                    "<kernel>{place}/vmlinuz</kernel><initrd>{place}/initramfs.cpio</initrd>
                     <cmdline>console=ttyS0 quiet panic=-1</cmdline></os>"
                ),
            )
            .replace(
                "</devices>",
                &format!("<serial type='pipe'><source path='{place}/console'/></serial></devices>"),
            );
        let description = self.place.join("domain.xml");
        fs::write(&description, domain).at("write", &description)?;
        self.virsh(&["define", "domain.xml"]).map(drop)
    }

    /// Starts a domain that was [defined](Self::define), and returns its console.
    ///
    /// # Errors
    /// libvirt cannot start it.
    pub fn start_domain(&self, name: &str) -> Result<Guest> {
        let pipes = ["console.in", "console.out"].map(|name| self.place.join(name));
        // Those of the start before.
        pipes.iter().for_each(|pipe| drop(fs::remove_file(pipe)));
        run(Command::new("mkfifo").args(["-m", "666"]).args(&pipes))?;
        let mut command = Command::new("cat");
        command.arg(&pipes[1]);
        let guest = Guest::spawn(command, &self.place)?;
        self.virsh(&["start", name])?;
        Ok(guest)
    }
}

/// Lets a command that takes a command run the next one as libvirt's user, whose home is `place`.
fn as_user(command: &mut Command, place: &Path) {
    command
        .current_dir(place)
        .env("HOME", place)
        .env("XDG_RUNTIME_DIR", place);
    command
        .env_remove("XDG_CONFIG_HOME")
        .env_remove("XDG_CACHE_HOME");
    // Otherwise virsh starts a daemon of its own, which would stay.
    command.env("LIBVIRT_AUTOSTART", "0");
    if rustix::process::geteuid().is_root() {
        let user = Libvirt::USER;
        command
            .arg("setpriv")
            .arg(format!("--reuid={user}"))
            .arg(format!("--regid={user}"));
        command.arg("--clear-groups");
    }
}
