//! The two sets of images.
//!
//! ```text
//!   packages + scripts ──▶ guest-<key>/    vmlinuz, vmlinux, initramfs-base.cpio, initramfs-fio.cpio,
//!                                          initramfs-disks.cpio, root.ext4, initramfs-outer.cpio,
//!                                          initramfs-scsi.cpio
//!   guest-<key>/ ────────▶ nested-<key>/   images.ext4: all of that on a disk, built only for nesting
//! ```

use std::fs;
use std::path::{Path, PathBuf};

use crate::cache::{Cache, MANIFEST};
use crate::error::{Error, FileContext, Result};
use crate::kernel::{Modules, extract_vmlinux};
use crate::packages::{self, OtherRelease};
use crate::reporter::Reporter;
use crate::scratch::ScratchDir;
use crate::userland::{FileTree, make_ext4};

/// Incremented when the builder changes what it makes of the same inputs.
const BUILDER: &[u8] = b"8";

const GUEST_INIT: &str = include_str!("../scripts/guest-init.sh");
const OUTER_INIT: &str = include_str!("../scripts/outer-init.sh");

const IMAGES_DISK: &str = "images.ext4";

/// The modules that the guest loads at boot.
const GUEST_MODULES: [&str; 7] = [
    "virtio_mmio",
    "virtio_pci",
    "virtio_blk",
    "virtio_net",
    // ext4 asks the kernel's crypto interface for this checksum by name.
    "crc32c_generic",
    "ext4",
    "virtio_rng",
];
/// The modules of `initramfs-disks.cpio`, apart because only some guests need them, and loading
/// takes time in emulation.
const DISK_MODULES: [&str; 2] = ["xfs", "pvpanic_mmio"];
/// The programs of `initramfs-disks.cpio`.
const DISK_PROGRAMS: [&str; 6] = [
    "bin/lsblk",
    "sbin/blkdiscard",
    "sbin/blockdev",
    "sbin/fstrim",
    "sbin/mkfs.xfs",
    "sbin/xfs_repair",
];
/// The modules of the machine around a nested guest. `nbd` is for jobs that use that machine's
/// kernel as an NBD client, `tun` for guests with a tap device, and a network card and `bridge` for
/// a guest of a user's own.
const OUTER_MODULES: [&str; 9] = [
    "virtio_pci",
    "virtio_blk",
    "crc32c_generic",
    "ext4",
    "kvm_amd",
    "nbd",
    "tun",
    "virtio_net",
    "bridge",
];

/// The modules of `initramfs-scsi.cpio`, for jobs that use that machine's SCSI target.
const SCSI_MODULES: [&str; 4] = ["target_core_user", "tcm_loop", "vhost_scsi", "sd_mod"];
/// The modules of a guest with a newer kernel, which has a SCSI disk.
const NEWER_GUEST_MODULES: [&str; 5] = [
    "virtio_mmio",
    "virtio_pci",
    "virtio_blk",
    "virtio_scsi",
    "sd_mod",
];
/// The further modules of its `initramfs-volumes.cpio`.
const VOLUME_MODULES: [&str; 3] = ["ext4", "xfs", "dm_mod"];
/// The modules of a machine around a job, with that kernel: the job uses its user-space block
/// driver, or its SCSI target.
const NEWER_OUTER_MODULES: [&str; 8] = [
    "virtio_pci",
    "virtio_blk",
    "ext4",
    "kvm_amd",
    "ublk_drv",
    "target_core_user",
    "tcm_loop",
    "sd_mod",
];
/// Host programs that the build needs, each with its package.
pub(crate) const BUILD_NEEDS: [(&str, &str); 8] = [
    ("dpkg-deb", "dpkg"),
    ("cpio", "cpio"),
    ("mke2fs", "e2fsprogs"),
    ("lz4", "lz4"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
    ("gzip", "gzip"),
    ("ldd", "libc-bin"),
];

/// A kernel that is newer than Debian 12's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NewerKernel {
    /// Linux 6.12, which Debian 12 has beside its own.
    V6_12,
    /// The newest that Debian builds for a stable release: of Debian 13's backports.
    Newest,
}

/// Images for a Linux guest: a directory with
///
/// - `vmlinuz`: the distribution's kernel as a bzImage;
/// - `vmlinux`: the same kernel as an ELF file with a PVH entry point;
/// - `initramfs-base.cpio`: busybox, e2fsprogs, the virtio and ext4 modules, and `/init`;
/// - `initramfs-fio.cpio`: fio with its libraries, to be appended to the base;
/// - `initramfs-disks.cpio`: lsblk, blkdiscard, blockdev and fstrim of util-linux, xfsprogs, xfs
///   and the driver of the panic device, to be appended to the base too;
/// - `root.ext4`: a root file system with all of these programs, to be booted with `root=/dev/vda`;
/// - `initramfs-outer.cpio`: for the machine around a nested guest: the base with kvm_amd, the
///   kernel's NBD client, and another `/init`;
/// - `initramfs-scsi.cpio`: for jobs on that machine: the modules of the SCSI target with its disk
///   driver, which `/init` does not load;
/// - `packages.txt`: the packages that the images are made of.
#[derive(Clone, Debug)]
pub struct GuestImages {
    /// The directory.
    pub directory: PathBuf,
}

impl GuestImages {
    /// Returns the images, after building them if they are missing, damaged or out of date.
    ///
    /// # Errors
    /// A download or a step of the build fails. The cache is then as before.
    pub fn ensure(cache: &Cache, reporter: &Reporter) -> Result<Self> {
        let build = |scratch: &ScratchDir| Self::from_package_lists(cache, scratch, reporter);
        ensure_with(&BUILD_NEEDS, build, cache, reporter)
    }

    /// Images of the packages in this machine's package lists.
    fn from_package_lists(
        cache: &Cache,
        scratch: &ScratchDir,
        reporter: &Reporter,
    ) -> Result<Self> {
        let kept = cache.root().join("versions-guest");
        let packages =
            packages::resolve(&packages::GUEST_PACKAGES, &kept, scratch.path(), reporter)?;
        let list = packages::list(&packages);
        let inputs = [
            BUILDER,
            list.as_bytes(),
            GUEST_INIT.as_bytes(),
            OUTER_INIT.as_bytes(),
        ];
        let directory = cache.entry("guest", &inputs, reporter, |directory| {
            let unpacked = scratch.path().join("unpacked");
            packages::unpack(&packages, None, scratch.path(), &unpacked, reporter)?;
            build_guest(&unpacked, scratch.path(), directory, reporter)?;
            let record = directory.join("packages.txt");
            fs::write(&record, &list).at("write", &record)
        })?;
        Ok(Self { directory })
    }

    /// `vmlinuz`, `initramfs-base.cpio` and `initramfs-outer.cpio` with a newer kernel, which knows
    /// atomic writes and user-space block devices; and `initramfs-volumes.cpio` with LVM, ext4 and
    /// xfs, to be appended to the base.
    ///
    /// # Errors
    /// As [`ensure`](Self::ensure).
    pub fn ensure_newer(cache: &Cache, kernel: NewerKernel, reporter: &Reporter) -> Result<Self> {
        let build = |scratch: &ScratchDir| match kernel {
            NewerKernel::V6_12 => {
                let wanted = [&packages::NEWER_PACKAGES[..], &[packages::KERNEL_6_12]].concat();
                Self::with_kernel("newer", &wanted, None, cache, scratch, reporter)
            }
            NewerKernel::Newest => {
                let backports = OtherRelease::backports(cache.root());
                let wanted = &packages::NEWER_PACKAGES;
                Self::with_kernel("newest", wanted, Some(&backports), cache, scratch, reporter)
            }
        };
        ensure_with(&BUILD_NEEDS, build, cache, reporter)
    }

    /// Images of the packages `wanted`, with the kernel of `backports` if there are any.
    fn with_kernel(
        name: &str,
        wanted: &[&str],
        backports: Option<&OtherRelease>,
        cache: &Cache,
        scratch: &ScratchDir,
        reporter: &Reporter,
    ) -> Result<Self> {
        let kept = cache.root().join(format!("versions-{name}"));
        let packages = packages::resolve(wanted, &kept, scratch.path(), reporter)?;
        let kernel = match backports {
            Some(backports) => backports.resolve_kernel(scratch.path(), reporter)?,
            None => Vec::new(),
        };
        let list = packages::list(&packages) + &packages::list(&kernel);
        let modules = [
            &NEWER_GUEST_MODULES[..],
            &VOLUME_MODULES,
            &NEWER_OUTER_MODULES,
        ];
        let modules = modules.concat().join(" ");
        let inputs = [
            BUILDER,
            list.as_bytes(),
            modules.as_bytes(),
            GUEST_INIT.as_bytes(),
            OUTER_INIT.as_bytes(),
        ];
        let directory = cache.entry(name, &inputs, reporter, |directory| {
            let unpacked = scratch.path().join("unpacked");
            packages::unpack(&packages, None, scratch.path(), &unpacked, reporter)?;
            if backports.is_some() {
                packages::unpack(&kernel, backports, scratch.path(), &unpacked, reporter)?;
            }
            build_newer(&unpacked, scratch.path(), directory)
        })?;
        Ok(Self { directory })
    }

    /// The parts of an initramfs that a guest without a disk of its own boots.
    pub(crate) fn initramfs_parts(&self) -> Vec<PathBuf> {
        let parts = ["base", "fio", "volumes"].map(|part| format!("initramfs-{part}.cpio"));
        let paths = parts.iter().map(|name| self.path(name));
        paths.filter(|path| path.exists()).collect()
    }

    /// The path of one of the files that [`GuestImages`] lists.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }
}

/// Installs `needs`, and returns what `build` makes. If apt's package lists turn out to be
/// outdated, updates them and builds once more.
pub(crate) fn ensure_with<T>(
    needs: &[(&str, &str)],
    build: impl Fn(&ScratchDir) -> Result<T>,
    cache: &Cache,
    reporter: &Reporter,
) -> Result<T> {
    packages::install_missing(needs, reporter)?;
    let scratch = ScratchDir::new(cache, reporter)?;
    match build(&scratch) {
        // The archive no longer has the versions that the lists name.
        Err(Error::Program { command, .. }) if command.starts_with("apt-get ") => {
            packages::update(reporter)?;
            build(&scratch)
        }
        ensured => ensured,
    }
}

fn build_newer(unpacked: &Path, scratch: &Path, directory: &Path) -> Result<()> {
    let vmlinuz = find_kernel(unpacked)?;
    fs::copy(&vmlinuz, directory.join("vmlinuz")).at("copy", &vmlinuz)?;
    let base = FileTree::new(scratch.join("base"))?;
    add_system(&base, unpacked, "init", GUEST_INIT, &NEWER_GUEST_MODULES)?;
    base.pack_initramfs(&directory.join("initramfs-base.cpio"))?;
    let volumes = FileTree::new(scratch.join("volumes"))?;
    for program in ["sbin/lvm", "sbin/mkfs.xfs"] {
        volumes.program(unpacked, program)?;
    }
    let all = [&NEWER_GUEST_MODULES[..], &VOLUME_MODULES].concat();
    add_modules(&volumes, unpacked, &all, &NEWER_GUEST_MODULES)?;
    volumes.pack_initramfs(&directory.join("initramfs-volumes.cpio"))?;
    let outer = FileTree::new(scratch.join("outer"))?;
    add_system(&outer, unpacked, "init", OUTER_INIT, &NEWER_OUTER_MODULES)?;
    outer.directories(&["base", "images"])?;
    outer.pack_initramfs(&directory.join("initramfs-outer.cpio"))
}

fn build_guest(
    unpacked: &Path,
    scratch: &Path,
    directory: &Path,
    reporter: &Reporter,
) -> Result<()> {
    reporter.progress("extracting the kernel");
    let vmlinuz = find_kernel(unpacked)?;
    let image = fs::read(&vmlinuz).at("read", &vmlinuz)?;
    let target = directory.join("vmlinux");
    fs::write(&target, extract_vmlinux(&image)?).at("write", &target)?;
    let target = directory.join("vmlinuz");
    fs::write(&target, image).at("write", &target)?;

    reporter.progress("packing the guest's initramfs");
    let base = FileTree::new(scratch.join("base"))?;
    add_system(&base, unpacked, "init", GUEST_INIT, &GUEST_MODULES)?;
    base.pack_initramfs(&directory.join("initramfs-base.cpio"))?;
    let fio = FileTree::new(scratch.join("fio"))?;
    fio.program(unpacked, "bin/fio")?;
    fio.pack_initramfs(&directory.join("initramfs-fio.cpio"))?;
    let disks = FileTree::new(scratch.join("disks"))?;
    for program in DISK_PROGRAMS {
        disks.program(unpacked, program)?;
    }
    let all: Vec<_> = GUEST_MODULES.into_iter().chain(DISK_MODULES).collect();
    add_modules(&disks, unpacked, &all, &GUEST_MODULES)?;
    disks.pack_initramfs(&directory.join("initramfs-disks.cpio"))?;

    reporter.progress("packing the outer initramfs");
    let outer = FileTree::new(scratch.join("outer"))?;
    add_system(&outer, unpacked, "init", OUTER_INIT, &OUTER_MODULES)?;
    outer.directories(&["base", "images"])?;
    outer.program(unpacked, "sbin/nbd-client")?;
    outer.pack_initramfs(&directory.join("initramfs-outer.cpio"))?;
    let scsi = FileTree::new(scratch.join("scsi"))?;
    let all: Vec<_> = OUTER_MODULES.into_iter().chain(SCSI_MODULES).collect();
    add_modules(&scsi, unpacked, &all, &OUTER_MODULES)?;
    scsi.pack_initramfs(&directory.join("initramfs-scsi.cpio"))?;

    reporter.progress("making the guest's root file system");
    let root = FileTree::new(scratch.join("root"))?;
    add_system(&root, unpacked, "sbin/init", GUEST_INIT, &[])?;
    for program in DISK_PROGRAMS.into_iter().chain(["bin/fio"]) {
        root.program(unpacked, program)?;
    }
    root.pack_ext4(&directory.join("root.ext4"), 192)
}

/// Adds what every system has: busybox, e2fsprogs, its modules in load order, and its init.
fn add_system(
    tree: &FileTree,
    unpacked: &Path,
    init: &str,
    script: &str,
    modules: &[&str],
) -> Result<()> {
    tree.directories(&["dev", "etc", "mnt", "proc", "run", "sys", "tmp"])?;
    tree.busybox(unpacked)?;
    for program in ["sbin/mke2fs", "sbin/e2fsck", "sbin/debugfs"] {
        tree.program(unpacked, program)?;
    }
    // Without this link the shell runs busybox's mke2fs for `mkfs.ext4`, which knows only ext2.
    tree.alias("mke2fs", "mkfs.ext4")?;
    let configuration = unpacked.join("etc/mke2fs.conf");
    let text = fs::read(&configuration).at("read", &configuration)?;
    tree.file("etc/mke2fs.conf", &text, 0o644)?;
    tree.file(init, script.as_bytes(), 0o755)?;
    add_modules(tree, unpacked, modules, &[])
}

/// Adds `modules`, except those of `present` and their dependencies, which another tree has. The
/// file names sort in load order, even when both trees are combined.
fn add_modules(tree: &FileTree, unpacked: &Path, modules: &[&str], present: &[&str]) -> Result<()> {
    let found = Modules::find(unpacked)?;
    let present = found.load_order(present)?.len();
    let order = found.load_order(modules)?;
    for (position, (name, content)) in order.iter().enumerate().skip(present) {
        tree.file(&format!("modules/{position:02}-{name}.ko"), content, 0o644)?;
    }
    Ok(())
}

/// `boot/vmlinuz-VERSION`, or `usr/lib/modules/VERSION/vmlinuz` in newer packages.
fn find_kernel(unpacked: &Path) -> Result<PathBuf> {
    let entries = |directory: &str| {
        let found = fs::read_dir(unpacked.join(directory)).into_iter().flatten();
        found.filter_map(|entry| Some(entry.ok()?.path()))
    };
    let is_named = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default();
        name.to_string_lossy().starts_with("vmlinuz-")
    };
    let beside_modules = entries("usr/lib/modules").map(|path| path.join("vmlinuz"));
    entries("boot")
        .filter(is_named)
        .chain(beside_modules.filter(|path| path.exists()))
        .next()
        .ok_or_else(|| Error::Unusable("the kernel's packages have no vmlinuz".to_owned()))
}

/// The disk with the guest's images, for the machine around a nested guest.
///
/// # Errors
/// The disk is missing, damaged or out of date, and cannot be built.
pub(crate) fn images_disk(
    cache: &Cache,
    guest: &GuestImages,
    reporter: &Reporter,
) -> Result<PathBuf> {
    let manifest = guest.path(MANIFEST);
    let manifest = fs::read(&manifest).at("read", &manifest)?;
    let directory = cache.entry("nested", &[BUILDER, &manifest], reporter, |directory| {
        reporter.progress("packing the images for nesting");
        make_ext4(&guest.directory, &directory.join(IMAGES_DISK), 512)
    })?;
    Ok(directory.join(IMAGES_DISK))
}
