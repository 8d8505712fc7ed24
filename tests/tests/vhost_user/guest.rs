//! Guests of other monitors: what they boot, and their consoles. Each of those that share this uses a part of it.
#![allow(dead_code)]

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use walvisor_guest_images::{Cache, GuestImages, Reporter, install_missing};

/// Nothing takes this long on the slowest machine; a guest that is silent for longer has hung.
const PATIENCE: Duration = Duration::from_secs(240);

/// Where user-mode Linux keeps its modules.
const UML_MODULES: &str = "/usr/lib/uml/modules";

/// The user that nothing belongs to.
const NOBODY: u32 = 65534;

/// What every guest does before its script, and after it.
const BEGIN: &str = "#!/bin/sh
export PATH=/bin:/sbin HOME=/
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mount -t tmpfs run /run
for module in $(ls /uml/*.ko 2>/dev/null || ls /modules/*.ko); do insmod $module || echo guest: no $module; done
";
const END: &str = "
echo guest: end
poweroff -f
";

/// Installs what a test needs. `false`: that cannot be, and why was printed.
pub fn have(program: &str, package: &str) -> bool {
    match install_missing(&[(program, package)], &Reporter::quiet(None)) {
        Ok(()) => true,
        Err(error) => {
            println!("skipped: no {program}, and {package} cannot be installed: {error}");
            false
        }
    }
}

pub fn images() -> GuestImages {
    let cache = Cache::open(None).expect("the image cache");
    GuestImages::ensure(&cache, &Reporter::quiet(None)).expect("the guest's images")
}

/// Makes an initramfs in `dir` with busybox, e2fsprogs and fio, that runs `script`.
fn initramfs(dir: &Path, images: &GuestImages, script: &str, modules: &[PathBuf]) -> PathBuf {
    let mut archive = Vec::new();
    for name in ["initramfs-base.cpio", "initramfs-fio.cpio"] {
        archive.extend(fs::read(images.directory.join(name)).unwrap());
    }
    let init = format!("{BEGIN}{script}{END}");
    entry(&mut archive, "init", 0o100_755, init.as_bytes());
    if !modules.is_empty() {
        entry(&mut archive, "uml", 0o040_755, b"");
    }
    for module in modules {
        let name = module.file_name().unwrap().to_string_lossy();
        let content = fs::read(module).unwrap();
        entry(&mut archive, &format!("uml/{name}"), 0o100_644, &content);
    }
    entry(&mut archive, "TRAILER!!!", 0, b"");
    let path = dir.join("initramfs.cpio");
    fs::write(&path, archive).unwrap();
    path
}

/// Appends a file to an archive in the kernel's format (newc). What comes later replaces what was there before.
fn entry(archive: &mut Vec<u8>, name: &str, mode: u32, content: &[u8]) {
    let (inode, links) = (archive.len() as u32, 1);
    let (size, name_size) = (content.len() as u32, name.len() as u32 + 1);
    let fields = [inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0];
    archive.extend(b"070701");
    for field in fields {
        write!(archive, "{field:08x}").unwrap();
    }
    archive.extend(name.as_bytes());
    archive.push(0);
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend(content);
    archive.resize(archive.len().next_multiple_of(4), 0);
}

/// A running guest. Dropping it kills it.
pub struct Guest {
    child: Child,
    lines: Receiver<String>,
    /// The last lines of its console, for the one who wonders.
    last: VecDeque<String>,
}

impl Guest {
    /// User-mode Linux with the disk at `socket` as /dev/vda.
    pub fn user_mode(dir: &Path, images: &GuestImages, socket: &Path, script: &str) -> Self {
        let version = fs::read_dir(UML_MODULES).unwrap().next().unwrap().unwrap();
        let module = version.path().join("kernel/drivers/block/virtio_blk.ko");
        let initramfs = initramfs(dir, images, script, &[module]);
        let mut command = Command::new("linux.uml");
        command
            .args(["mem=256M", "con=null", "con0=null,fd:1", "quiet"])
            .arg(format!("initrd={}", initramfs.display()))
            .arg(format!("uml_dir={}", dir.display()))
            // 2 is the number of a block device.
            .arg(format!("virtio_uml.device={}:2", socket.display()));
        Self::spawn(command, dir)
    }

    /// User-mode Linux over the files of this machine, which it cannot change, with the modules of `wanted` loaded. `script`
    /// runs in an empty directory in memory.
    pub fn user_mode_here(dir: &Path, wanted: &[&str], script: &str) -> Self {
        // As `modprobe -d` wants it.
        fs::create_dir(dir.join("lib")).unwrap();
        std::os::unix::fs::symlink(UML_MODULES, dir.join("lib/modules")).unwrap();
        let (init, place) = (dir.join("init"), dir.display());
        let begin = "#!/bin/sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
for directory in /run /var /mnt; do mount -t tmpfs memory $directory; done";
        let modules: String = wanted
            .iter()
            .map(|module| format!("modprobe -d {place} {module} || echo guest: no {module}\n"))
            .collect();
        let text = format!("{begin}\n{modules}cd /mnt\n{script}{END}");
        fs::write(&init, text).unwrap();
        fs::set_permissions(&init, fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = Command::new("linux.uml");
        command
            .args(["mem=1G", "con=null", "con0=null,fd:1", "quiet"])
            .args(["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"])
            .arg(format!("init={}", init.display()))
            .arg(format!("uml_dir={place}"));
        Self::spawn(command, dir)
    }

    /// QEMU in full emulation with the disk at `socket` as /dev/vda, connected anew whenever the daemon is back.
    pub fn qemu(
        dir: &Path,
        images: &GuestImages,
        socket: &Path,
        queues: u16,
        script: &str,
    ) -> Self {
        let initramfs = initramfs(dir, images, script, &[]);
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
            .arg(images.directory.join("vmlinuz"))
            .arg("-initrd")
            .arg(initramfs)
            .args(["-append", "console=ttyS0 quiet panic=-1"])
            .arg("-chardev")
            .arg(format!(
                "socket,id=disk,path={},reconnect=1",
                socket.display()
            ))
            .arg("-device")
            .arg(format!(
                "vhost-user-blk-pci,chardev=disk,num-queues={queues}"
            ));
        Self::spawn(command, dir)
    }

    /// A domain of libvirt, its disk moved from `/run/walvisor/vm.sock` to `socket`. Without libvirt's daemon.
    pub fn libvirt(
        dir: &Path,
        images: &GuestImages,
        domain: &str,
        socket: &Path,
        script: &str,
    ) -> Self {
        let own = dir.join("libvirt");
        fs::create_dir(&own).unwrap();
        fs::copy(images.directory.join("vmlinuz"), own.join("vmlinuz")).unwrap();
        initramfs(&own, images, script, &[]);
        // A user that is not root needs no set-up of the system for libvirt.
        let nobody = rustix::process::geteuid().is_root();
        if nobody {
            let reachable = fs::Permissions::from_mode(0o755);
            fs::set_permissions(dir, reachable).unwrap();
            chown(&own, Some(NOBODY), Some(NOBODY)).unwrap();
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
        fs::write(own.join("domain.xml"), domain).unwrap();
        let run = format!("virt-qemu-run -r {place}/root domain.xml >libvirt.log 2>&1");
        let run = match nobody {
            // What libvirt starts is its child no more: it gets a parent here, and ends with it.
            true => format!(
                "unshare --pid --fork --kill-child --mount-proc sh -c 'setpriv --reuid={NOBODY} --regid={NOBODY} \\
                 --clear-groups {run} & wait'"
            ),
            false => run,
        };
        let script = format!(
            "mkfifo -m 666 console.in console.out
             export HOME=$PWD XDG_RUNTIME_DIR=$PWD
             {run} &
             cat console.out
             kill -9 $!"
        );
        let mut command = Command::new("sh");
        command.args(["-c", &script]);
        Self::spawn(command, &own)
    }

    fn spawn(mut command: Command, dir: &Path) -> Self {
        let mut child = command
            .current_dir(dir)
            .env("HOME", dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            // It may have processes of its own.
            .process_group(0)
            .spawn()
            .unwrap();
        let (sender, lines) = channel();
        let console = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in console.split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).trim_end().to_owned();
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Self {
            child,
            lines,
            last: VecDeque::new(),
        }
    }

    /// The next line of its console; `None` when it has ended.
    #[track_caller]
    pub fn line(&mut self) -> Option<String> {
        use std::sync::mpsc::RecvTimeoutError::{Disconnected, Timeout};
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => {
                if self.last.len() == 60 {
                    self.last.pop_front();
                }
                self.last.push_back(line.clone());
                Some(line)
            }
            Err(Disconnected) => None,
            Err(Timeout) => panic!("the guest hangs:\n{}", self.console()),
        }
    }

    /// Waits for a line that begins with `start`.
    #[track_caller]
    pub fn wait_for(&mut self, start: &str) -> String {
        loop {
            match self.line() {
                Some(line) if line.starts_with(start) => return line,
                Some(_) => {}
                None => panic!("no {start:?}:\n{}", self.console()),
            }
        }
    }

    pub fn console(&self) -> String {
        self.last.iter().map(|line| format!("{line}\n")).collect()
    }

    /// Waits until it has powered off.
    #[track_caller]
    pub fn end(mut self) -> ExitStatus {
        while self.line().is_some() {}
        self.child.wait().unwrap()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = kill_process_group(Pid::from_child(&self.child), Signal::KILL);
        let _ = self.child.wait();
    }
}
