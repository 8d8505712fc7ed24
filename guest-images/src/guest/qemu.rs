//! QEMU in full emulation: it runs the distribution's kernel on any machine.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::Command;

use super::Guest;
use super::initramfs::build_initramfs;
use crate::error::{FileContext, Result};
use crate::images::GuestImages;

/// The user ID of `nobody`.
const NOBODY: u32 = 65534;

/// QEMU's arguments for the vhost-user disk at `socket`. QEMU reconnects whenever the daemon comes back.
#[must_use]
pub fn vhost_user_disk(number: usize, socket: &Path, queues: u16) -> [String; 4] {
    let socket = socket.display();
    [
        "-chardev".to_owned(),
        format!("socket,id=disk{number},path={socket},reconnect=1"),
        "-device".to_owned(),
        format!("vhost-user-blk-pci,chardev=disk{number},num-queues={queues}"),
    ]
}

impl Guest {
    /// Starts QEMU in full emulation, with further `arguments`, for instance for disks; the first is /dev/vda. The guest's
    /// memory is shared, as [`vhost_user_disk`] requires.
    ///
    /// # Errors
    /// A file cannot be read or written, or QEMU cannot be started.
    pub fn qemu(
        dir: &Path,
        images: &GuestImages,
        arguments: &[String],
        script: &str,
    ) -> Result<Self> {
        let initramfs = build_initramfs(dir, images, script, &[])?;
        let mut command = Command::new("qemu-system-x86_64");
        command
            .args(["-nodefaults", "-no-user-config", "-no-reboot"])
            .args(["-display", "none", "-serial", "stdio", "-cpu", "max"])
            .args(["-machine", "q35,accel=tcg,memory-backend=memory"])
            .args([
                "-object",
                "memory-backend-memfd,id=memory,size=512M,share=on",
            ])
            .args(["-smp", "2", "-m", "512M"])
            .arg("-kernel")
            .arg(images.path("vmlinuz"))
            .arg("-initrd")
            .arg(initramfs)
            .args(["-append", "console=ttyS0 quiet panic=-1"])
            .args(arguments);
        Self::spawn(command, dir)
    }

    /// Starts a libvirt domain without libvirt's daemon. `socket` replaces `/run/walvisor/vm.sock`, its disk.
    ///
    /// # Errors
    /// A file cannot be read or written, or the guest cannot be started.
    pub fn libvirt(
        dir: &Path,
        images: &GuestImages,
        domain: &str,
        socket: &Path,
        script: &str,
    ) -> Result<Self> {
        let own = dir.join("libvirt");
        fs::create_dir(&own).at("create", &own)?;
        let kernel = images.path("vmlinuz");
        fs::copy(&kernel, own.join("vmlinuz")).at("copy", &kernel)?;
        build_initramfs(&own, images, script, &[])?;
        // QEMU's output goes to a file instead of virtlogd, so none of libvirt's daemons has to run.
        let (root, etc) = (own.join("root"), own.join("root/etc"));
        fs::create_dir_all(&etc).at("create", &etc)?;
        let settings = etc.join("qemu.conf");
        fs::write(&settings, "stdio_handler = \"file\"\n").at("write", &settings)?;
        // As a user other than root, libvirt needs no system-wide setup.
        let nobody = rustix::process::geteuid().is_root();
        if nobody {
            let reachable = fs::Permissions::from_mode(0o755);
            fs::set_permissions(dir, reachable).at("set the mode of", dir)?;
            for path in [&own, &root, &etc] {
                chown(path, Some(NOBODY), Some(NOBODY)).at("change the owner of", path)?;
            }
        }
        let place = own.display();
        let domain = domain
            .replace("/run/walvisor/vm.sock", &socket.display().to_string())
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
        let description = own.join("domain.xml");
        fs::write(&description, domain).at("write", &description)?;
        let run = format!("virt-qemu-run -r {place}/root domain.xml >libvirt.log 2>&1");
        let run = if nobody {
            // QEMU detaches from libvirt, which starts it. The namespace's first shell adopts it, so QEMU ends with that
            // shell.
            format!(
                "unshare --pid --fork --kill-child --mount-proc sh -c 'setpriv --reuid={NOBODY} --regid={NOBODY} \\
                 --clear-groups {run} & wait'"
            )
        } else {
            run
        };
        let script = format!(
            "mkfifo -m 666 console.in console.out
             export HOME=$PWD XDG_RUNTIME_DIR=$PWD
             # If no guest starts, what libvirt says of it stands in its place.
             (trap 'kill -9 $run; exit' TERM
              {run} & run=$!
              wait $run
              timeout 2 sh -c 'cat libvirt.log >console.out') >/dev/null &
             cat console.out
             kill $!
             wait $!
             exit 0"
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        Self::spawn(command, &own)
    }
}
