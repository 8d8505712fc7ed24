//! The initramfs of guests that boot without a disk of their own.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use super::FINISH;
use crate::error::{FileContext, Result};
use crate::images::GuestImages;

/// What every guest's init runs before its script.
const BEGIN: &str = "#!/bin/sh
export PATH=/bin:/sbin HOME=/
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev; mount -t tmpfs run /run
for module in $(ls /uml/*.ko 2>/dev/null || ls /modules/*.ko); do insmod $module || echo guest: no $module; done
";

/// Creates an initramfs in `directory` that has busybox, e2fsprogs and, of Debian 12's own kernel,
/// fio, of a newer one LVM and xfsprogs, and runs `script`. If
/// `modules` is not empty, the guest loads these instead of the images' own modules, which belong
/// to another kernel.
///
/// # Errors
/// A file cannot be read or written.
pub(super) fn build_initramfs(
    directory: &Path,
    images: &GuestImages,
    script: &str,
    modules: &[PathBuf],
) -> Result<PathBuf> {
    let mut archive = Vec::new();
    for part in images.initramfs_parts() {
        archive.extend(fs::read(&part).at("read", &part)?);
    }
    let init = format!("{BEGIN}{script}{FINISH}");
    entry(&mut archive, "init", 0o100_755, init.as_bytes());
    if !modules.is_empty() {
        entry(&mut archive, "uml", 0o040_755, b"");
    }
    for (position, module) in modules.iter().enumerate() {
        let name = module.file_name().unwrap_or_default().to_string_lossy();
        let content = fs::read(module).at("read", module)?;
        // The guest loads the modules in the order of their names.
        let name = format!("uml/{position:02}-{name}");
        entry(&mut archive, &name, 0o100_644, &content);
    }
    entry(&mut archive, "TRAILER!!!", 0, b"");
    let path = directory.join("initramfs.cpio");
    fs::write(&path, archive).at("write", &path)?;
    Ok(path)
}

/// Appends a file to an archive in the kernel's format (newc). A later file replaces an earlier one
/// of the same name.
fn entry(archive: &mut Vec<u8>, name: &str, mode: u32, content: &[u8]) {
    let (inode, links) = (archive.len() as u32, 1);
    let (size, name_size) = (content.len() as u32, name.len() as u32 + 1);
    let fields = [inode, mode, 0, 0, links, 0, size, 0, 0, 0, 0, name_size, 0];
    archive.extend(b"070701");
    for field in fields {
        // Writing to memory cannot fail.
        let _ = write!(archive, "{field:08x}");
    }
    archive.extend(name.as_bytes());
    archive.push(0);
    archive.resize(archive.len().next_multiple_of(4), 0);
    archive.extend(content);
    archive.resize(archive.len().next_multiple_of(4), 0);
}
