//! QEMU in full emulation: it runs the distribution's kernel on any machine.

use std::path::Path;
use std::process::Command;

use super::Guest;
use super::initramfs::build_initramfs;
use crate::error::Result;
use crate::images::GuestImages;

/// QEMU's arguments for the vhost-user disk at `socket`. QEMU reconnects whenever the daemon comes
/// back.
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
    /// Starts QEMU in full emulation, with further `arguments`, for instance for disks; the first
    /// is /dev/vda. The guest's memory is shared, as [`vhost_user_disk`] requires.
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
            // One thread runs both processors: with a thread each, an emulated processor sometimes
            // executes an instruction that the kernel on the other one has just patched away, and
            // the kernel dies of that breakpoint.
            .args(["-accel", "tcg,thread=single"])
            .args(["-machine", "q35,memory-backend=memory"])
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
}
