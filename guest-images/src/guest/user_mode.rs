//! User-mode Linux: a Linux kernel that runs as a program. The guest has one processor.

use std::arch::x86_64::__cpuid_count;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use super::initramfs::build_initramfs;
use super::{CableEnd, FINISH, Guest};
use crate::cache::Cache;
use crate::error::{Error, FileContext, Result};
use crate::images::{GuestImages, ensure_with};
use crate::packages::{self, OtherRelease, install_missing};
use crate::process::run;
use crate::reporter::Reporter;
use crate::scratch::ScratchDir;

/// Where Debian's package has the modules, in a directory named by the kernel's version.
const MODULES: &str = "usr/lib/uml/modules";
/// Where it has the program.
const PROGRAM: &str = "usr/bin/linux.uml";
/// The module for disks over vhost-user.
const DISK_MODULE: &str = "virtio_blk";
/// The modules for SCSI targets over vhost-user.
const SCSI_MODULES: [&str; 2] = ["virtio_scsi", "sd_mod"];

/// The size in bytes of the floating point state that user-mode Linux 6.1 keeps (its
/// `HOST_FP_SIZE`).
const FLOATING_POINT_SIZE: u32 = 2696;
/// The CPUID leaf about XSAVE (Intel SDM volume 1, 13.2).
const XSAVE_LEAF: u32 = 0xd;

/// What the init of a guest over the files of this machine runs first. $MODULES stands for the
/// directory of the modules. Below /var and /mnt the guest sees this machine's files, such as the
/// program under test, and what it writes there stays in its memory.
const BEGIN: &str = "#!/bin/sh
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mount -t tmpfs memory /run
modprobe -d $MODULES overlay || echo guest: no overlay
for name in var mnt; do
    mkdir -p /run/guest/$name /run/guest/$name.work
    mount -t overlay -o lowerdir=/$name,upperdir=/run/guest/$name,workdir=/run/guest/$name.work files /$name
done
mkdir /run/guest/work; cd /run/guest/work
stty -echo </dev/tty0
";

/// The newest user-mode Linux that Debian has, with its own C library: Linux 7 or newer.
#[derive(Clone, Debug)]
pub struct NewestUserMode {
    /// Its packages, unpacked.
    root: PathBuf,
}

impl NewestUserMode {
    /// Unpacks it in `directory`, after downloading it if `cache` does not have it.
    ///
    /// # Errors
    /// A download or another step fails.
    pub fn unpack(directory: &Path, cache: &Cache, reporter: &Reporter) -> Result<Self> {
        const NEEDS: [(&str, &str); 2] = [("dpkg-deb", "dpkg"), ("patchelf", "patchelf")];
        let download = |scratch: &ScratchDir| {
            let release = OtherRelease::unstable(cache.root());
            let wanted = ["user-mode-linux", "libc6"];
            let packages = release.resolve(&wanted, scratch.path(), reporter)?;
            let list = packages::list(&packages);
            cache.entry("uml", &[list.as_bytes()], reporter, |directory| {
                packages::download(&packages, Some(&release), directory, reporter)
            })
        };
        let packages = ensure_with(&NEEDS, download, cache, reporter)?;
        let root = directory.join("uml");
        packages::unpack_files(&packages, &root, reporter)?;
        let library = root.join("usr/lib/x86_64-linux-gnu");
        run(Command::new("patchelf")
            .arg("--set-interpreter")
            .arg(library.join("ld-linux-x86-64.so.2"))
            .arg("--set-rpath")
            .arg(&library)
            .arg(root.join(PROGRAM)))?;
        Ok(Self { root })
    }
}

/// The configuration of a guest in user-mode Linux.
#[derive(Clone, Debug, Default)]
pub struct UserMode {
    /// Sockets of vhost-user disks: /dev/vda, /dev/vdb, ...
    pub disks: Vec<PathBuf>,
    /// Sockets of vhost-user SCSI targets: /dev/sda, ...
    pub scsi: Vec<PathBuf>,
    /// The newest kernel in place of Debian 12's.
    pub newest: Option<NewestUserMode>,
    /// Names of modules to load, with the modules that they depend on.
    pub modules: Vec<String>,
    /// Files that the guest sees as block devices: /dev/ubda, /dev/ubdb, ...
    pub files: Vec<PathBuf>,
    /// The cable in its network card, if it has one.
    pub cable: Option<CableEnd>,
}

impl UserMode {
    /// Installs user-mode Linux and modprobe if they are missing.
    ///
    /// # Errors
    /// A program is missing, and apt cannot install it, usually because the caller is not root.
    pub fn install(reporter: &Reporter) -> Result<()> {
        install_missing(
            &[("linux.uml", "user-mode-linux"), ("modprobe", "kmod")],
            reporter,
        )
    }

    /// Starts a guest that runs `script`, with busybox, e2fsprogs and fio in its memory.
    /// `directory` is for the files that it boots from.
    ///
    /// # Errors
    /// A module does not exist, a file cannot be read or written, or the guest cannot be started.
    pub fn boot(&self, directory: &Path, images: &GuestImages, script: &str) -> Result<Guest> {
        Self::install(&Reporter::quiet(None))?;
        let modules = match self.module_names().as_slice() {
            [] => Vec::new(),
            wanted => self.in_load_order(directory, wanted)?,
        };
        let initramfs = build_initramfs(directory, images, script, &modules)?;
        let mut command = self.command(directory, "256M")?;
        command.arg(format!("initrd={}", initramfs.display()));
        Guest::spawn(command, directory)
    }

    /// Starts a guest that sees the files of this machine read-only. `script` runs in an empty
    /// directory in memory; `directory` is for the files that the guest boots from.
    ///
    /// # Errors
    /// A file cannot be written, or the guest cannot be started.
    pub fn boot_here(&self, directory: &Path, script: &str) -> Result<Guest> {
        Self::install(&Reporter::quiet(None))?;
        let place = self.prepare_module_tree(directory)?;
        let modules: String = self
            .module_names()
            .iter()
            .map(|module| {
                format!(
                    "modprobe -d {} {module} || echo guest: no {module}\n",
                    place.display()
                )
            })
            .collect();
        // The kernel looks for SCSI disks once their driver is there.
        let wait = if self.scsi.is_empty() {
            ""
        } else {
            "until [ -b /dev/sda ]; do sleep 0.1; done\n"
        };
        let init = directory.join("init");
        let begin = BEGIN.replace("$MODULES", &place.display().to_string());
        let text = format!("{begin}{modules}{wait}{script}{FINISH}");
        fs::write(&init, text).at("write", &init)?;
        fs::set_permissions(&init, fs::Permissions::from_mode(0o755))
            .at("set the mode of", &init)?;
        let mut command = self.command(directory, "1G")?;
        command
            .args(["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro"])
            .arg(format!("init={}", init.display()));
        Guest::spawn(command, directory)
    }

    fn module_names(&self) -> Vec<&str> {
        let disks = (!self.disks.is_empty()).then_some(DISK_MODULE);
        let scsi = (!self.scsi.is_empty()).then_some(SCSI_MODULES);
        let modules = self.modules.iter().map(String::as_str);
        let disks = disks.into_iter().chain(scsi.into_iter().flatten());
        disks.chain(modules).collect()
    }

    fn command(&self, directory: &Path, memory: &str) -> Result<Command> {
        // User-mode Linux has several processes, and some survive when the first is killed. So it
        // runs in a PID namespace, which dies with its first process. User-mode Linux cannot be
        // that process itself: the first process of a namespace gets all orphans, and the kernel
        // drops signals that it sends to itself, which is how user-mode Linux ends. So the first
        // process is a shell.
        let mut group = Command::new("unshare");
        group.args(["--pid", "--fork", "--kill-child"]);
        let program = match &self.newest {
            Some(newest) => newest.root.join(PROGRAM),
            None => "linux.uml".into(),
        };
        let mut command = match run(Command::new("unshare").args(["--pid", "--fork", "true"])) {
            Ok(_) => {
                group.args(["sh", "-c", "\"$0\" \"$@\"; exit $?"]);
                group.arg(program);
                group
            }
            Err(_) => Command::new(program),
        };
        command
            .arg(format!("mem={memory}"))
            .args(["con=null", "con0=fd:0,fd:1", "quiet"])
            .arg(format!("uml_dir={}", directory.display()));
        if self.newest.is_none()
            && let Some(library) = build_wide_xsave(directory)?
        {
            command.env("LD_PRELOAD", library);
        }
        // The virtio device IDs of a block device and of a SCSI host.
        for (sockets, id) in [(&self.disks, 2), (&self.scsi, 8)] {
            for socket in sockets {
                command.arg(format!("virtio_uml.device={}:{id}", socket.display()));
            }
        }
        for (number, file) in self.files.iter().enumerate() {
            command.arg(format!("ubd{number}={}", file.display()));
        }
        if let Some(cable) = &self.cable {
            cable.plug(&mut command);
        }
        Ok(command)
    }

    /// Where its packages are installed.
    fn root(&self) -> &Path {
        self.newest
            .as_ref()
            .map_or(Path::new("/"), |newest| &newest.root)
    }

    /// Prepares `directory` for `modprobe -d`.
    fn prepare_module_tree<'a>(&self, directory: &'a Path) -> Result<&'a Path> {
        let lib = directory.join("lib");
        fs::create_dir_all(&lib).at("create", &lib)?;
        let link = lib.join("modules");
        if !link.is_symlink() {
            symlink(self.root().join(MODULES), &link).at("create", &link)?;
        }
        Ok(directory)
    }

    /// The files of `modules` and of the modules that they depend on, in load order.
    fn in_load_order(&self, directory: &Path, modules: &[&str]) -> Result<Vec<PathBuf>> {
        let place = self.prepare_module_tree(directory)?;
        let tree = self.root().join(MODULES);
        let version = fs::read_dir(&tree)
            .at("read", &tree)?
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .next()
            .ok_or_else(|| {
                Error::Unusable(format!(
                    "{} is empty: reinstall user-mode-linux",
                    tree.display()
                ))
            })?;
        let mut files: Vec<PathBuf> = Vec::new();
        for module in modules {
            let mut command = Command::new("modprobe");
            command.args(["--show-depends", "-S", &version, "-d"]);
            let output = run(command.arg(place).arg(module))?;
            // modprobe prints `insmod PATH` for each module, in order, and `builtin NAME` for one
            // in the kernel.
            for line in String::from_utf8_lossy(&output.stdout).lines() {
                let Some(path) = line.strip_prefix("insmod ") else {
                    continue;
                };
                let path = PathBuf::from(path.trim());
                if !files.contains(&path) {
                    files.push(path);
                }
            }
        }
        Ok(files)
    }
}

/// Compiles `wide_xsave.c` if this processor's XSAVE area is larger than user-mode Linux can
/// restore, usually because of AMX.
fn build_wide_xsave(directory: &Path) -> Result<Option<PathBuf>> {
    // EBX is the size for the enabled features.
    if __cpuid_count(XSAVE_LEAF, 0).ebx <= FLOATING_POINT_SIZE {
        return Ok(None);
    }
    let source = directory.join("wide_xsave.c");
    fs::write(&source, include_str!("wide_xsave.c")).at("write", &source)?;
    let library = source.with_extension("so");
    let mut compiler = Command::new("cc");
    compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"]);
    run(compiler.args([&library, &source]))?;
    Ok(Some(library))
}
