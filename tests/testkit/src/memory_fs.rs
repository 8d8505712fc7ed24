//! File systems in memory, or in a file; and mounts that only their test sees.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Instant;

use rustix::mount::{MountPropagationFlags, mount_change};
use rustix::thread::{UnshareFlags, unshare_unsafe};

use crate::process::run;
use crate::wait::{PATIENCE, pause};

/// Gives this thread, and the threads and processes that it starts from now on, mounts of their own.
/// Does nothing if it has them. Whatever ends them, the kernel unmounts what they have mounted.
///
/// A process that unshares its mounts gets a copy of all that it sees, and keeps each file system
/// and its loop device in use. So what several tests see can't be unmounted for certain.
///
/// # Errors
/// Only root may do that.
pub fn own_mounts() -> io::Result<()> {
    static FIRST: OnceLock<PathBuf> = OnceLock::new();
    let current = fs::read_link("/proc/thread-self/ns/mnt")?;
    if *FIRST.get_or_init(|| current.clone()) != current {
        return Ok(());
    }
    // SAFETY: this thread stops sharing mounts and its working directory with others, and no file
    // descriptors: all that is open stays valid.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }?;
    // What is mounted here appears nowhere else; what others unmount is unmounted here too.
    let flags = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    Ok(mount_change("/", flags)?)
}

/// A file system in memory, or in a file. Dropping it unmounts it.
pub struct MemoryFs(tempfile::TempDir);

impl MemoryFs {
    /// Mounts one without extended attributes, where images have no marks. Returns `None` if that
    /// fails, after printing `skipped: why`.
    #[must_use]
    pub fn ramfs() -> Option<Self> {
        Self::mount("ramfs", "mode=0700")
    }

    /// Mounts a tmpfs in the same way, with these options of mount(8).
    #[must_use]
    pub fn tmpfs(options: &str) -> Option<Self> {
        Self::mount("tmpfs", options)
    }

    /// Mounts the ext4 file system in the file at `image`, as `-o loop` with further `options` of
    /// mount(8), in the same way.
    #[must_use]
    pub fn ext4(image: &Path, options: &str) -> Option<Self> {
        Self::mount_from("ext4", &format!("loop,{options}"), image)
    }

    fn mount(kind: &str, options: &str) -> Option<Self> {
        Self::mount_from(kind, options, Path::new(kind))
    }

    fn mount_from(kind: &str, options: &str, source: &Path) -> Option<Self> {
        let mounted = Self(tempfile::tempdir().expect("a directory"));
        let source = source.to_string_lossy();
        let made = own_mounts().map_err(|error| error.to_string());
        match made.and_then(|()| mounted.call(&["-t", kind, "-o", options, &source])) {
            Ok(()) => Some(mounted),
            Err(why) => {
                println!("skipped: no {kind}: {why}");
                None
            }
        }
    }

    /// Changes the options of mount(8).
    pub fn remount(&self, options: &str) {
        let done = self.call(&["-o", &format!("remount,{options}")]);
        done.unwrap_or_else(|why| panic!("{options}: {why}"));
    }

    /// Lets every write wait until the guard is dropped. Not for a tmpfs or ramfs.
    #[must_use]
    pub fn freeze(&self) -> FrozenFs<'_> {
        let frozen = run("fsfreeze", &["--freeze", &self.path().to_string_lossy()]);
        frozen.unwrap_or_else(|why| panic!("freeze: {why}"));
        FrozenFs(self)
    }

    fn call(&self, arguments: &[&str]) -> Result<(), String> {
        let place = self.path().to_string_lossy();
        run("mount", &[arguments, &[&place]].concat()).map(drop)
    }

    /// The mount point.
    #[must_use]
    pub fn path(&self) -> &Path {
        self.0.path()
    }
}

/// A file system that does not answer. Dropping this thaws it.
pub struct FrozenFs<'a>(&'a MemoryFs);

impl Drop for FrozenFs<'_> {
    fn drop(&mut self) {
        // If this fails, the test hangs, and its time limit ends it.
        let _ = run(
            "fsfreeze",
            &["--unfreeze", &self.0.path().to_string_lossy()],
        );
    }
}

impl Drop for MemoryFs {
    fn drop(&mut self) {
        unmount(self.path());
    }
}

/// Unmounts a file system, if it is mounted.
pub fn unmount(place: &Path) {
    let _ = try_unmount(place);
}

/// Unmounts a file system. The kernel may still hold files of a process that was killed, for a
/// moment after its end: io_uring ends later.
///
/// # Errors
/// umount(8) fails; the text says why.
pub fn try_unmount(place: &Path) -> Result<(), String> {
    let (place, began) = (place.to_string_lossy(), Instant::now());
    loop {
        match run("umount", &[&place]) {
            Err(why) if why.contains("busy") && began.elapsed() < PATIENCE => pause(began),
            ended => return ended.map(drop),
        }
    }
}
