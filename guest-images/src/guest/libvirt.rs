//! libvirt's own daemon: that of the system (`qemu:///system`) if the caller is root, else that of
//! an ordinary user. It needs no set-up of the machine: what it writes is below one directory.

use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt;
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

/// Runs `libvirtd` in system mode in a mount namespace of its own, with the files of $PLACE in
/// place of the system's, and the user and groups that its package makes.
const SYSTEM: &str = "set -e
for place in etc var/lib var/cache var/log; do
    mkdir -p \"$PLACE/$place/libvirt\" \"/$place/libvirt\"
    mount --bind \"$PLACE/$place/libvirt\" \"/$place/libvirt\"
done
mount -t tmpfs run /run
mkdir /run/libvirt
cp /etc/passwd /etc/group /run
echo libvirt-qemu:x:64055:64055::/var/lib/libvirt:/usr/sbin/nologin >>/run/passwd
for group in libvirt-qemu:x:64055: kvm:x:64054:; do
    grep -q \"^${group%%:*}:\" /run/group || echo $group >>/run/group
done
for file in passwd group; do mount --bind /run/$file /etc/$file; done
libvirtd --config \"$PLACE/libvirtd.conf\"; true";

/// A `libvirtd` whose domains are QEMU's in full emulation. Dropping it kills it and all its
/// domains, like a power cut.
pub struct Libvirt {
    place: PathBuf,
    _daemon: LeashedChild,
}

impl Libvirt {
    /// The user ID and group ID of the domains, if the caller is root: `nobody`.
    pub const USER: u32 = 65534;

    /// Starts the daemon. All its files are in `dir`, where it finds its domains again after a
    /// kill.
    ///
    /// # Errors
    /// A file cannot be written, or a program cannot be started.
    pub fn start(dir: &Path) -> Result<Self> {
        let root = rustix::process::geteuid().is_root();
        let settings = dir.join(if root {
            "etc/libvirt"
        } else {
            ".config/libvirt"
        });
        fs::create_dir_all(&settings).at("create", &settings)?;
        // QEMU's output goes to a file instead of virtlogd, one daemon less.
        let mut text = "stdio_handler = \"file\"\n".to_owned();
        if root {
            text += "user = \"nobody\"\ngroup = \"nogroup\"\ndynamic_ownership = 0\n\
                     remember_owner = 0\ncgroup_controllers = []\nnamespaces = []\n\
                     security_driver = \"none\"\n";
            let reachable = fs::Permissions::from_mode(0o755);
            fs::set_permissions(dir, reachable).at("set the mode of", dir)?;
            let file = dir.join("libvirtd.conf");
            let place = dir.display();
            let daemon = format!("unix_sock_dir = \"{place}\"\nauth_unix_rw = \"none\"\n");
            fs::write(&file, daemon).at("write", &file)?;
        }
        let file = settings.join("qemu.conf");
        fs::write(&file, text).at("write", &file)?;
        let place = dir.to_owned();
        let log = place.join("libvirtd.log");
        let log = File::create(&log).at("create", &log)?;
        // QEMU detaches from libvirt, which starts it. The namespace's first process, which stays,
        // adopts it, and takes it along.
        let mut command = Command::new("unshare");
        command.args((!root).then_some("--map-current-user"));
        command.args(["--pid", "--fork", "--kill-child", "--mount-proc"]);
        let script = if root { SYSTEM } else { "libvirtd; true" };
        command.args(["sh", "-c", script]);
        at_home(&mut command, &place);
        command
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
        at_home(&mut command, &self.place);
        let daemon = if rustix::process::geteuid().is_root() {
            let place = self.place.display();
            format!("qemu:///system?socket={place}/libvirt-sock")
        } else {
            "qemu:///session".to_owned()
        };
        command.args(["virsh", "--quiet", "--connect", &daemon]);
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

/// Lets a command take `place` for its home.
fn at_home(command: &mut Command, place: &Path) {
    command
        .current_dir(place)
        .env("PLACE", place)
        .env("HOME", place)
        .env("XDG_RUNTIME_DIR", place);
    command
        .env_remove("XDG_CONFIG_HOME")
        .env_remove("XDG_CACHE_HOME");
    // Otherwise virsh starts a daemon of its own, which would stay.
    command.env("LIBVIRT_AUTOSTART", "0");
}
