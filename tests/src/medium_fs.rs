//! A file system on a [`MediumFile`]: ext4 or XFS, over a loop device.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use walvisor_testkit::process::run;
use walvisor_testkit::{own_mounts, try_unmount};

use crate::have;
use crate::medium_file::MediumFile;

/// Bytes of a medium. XFS wants 300 MiB.
const SIZE: u64 = 400 << 20;
/// All requests from now on.
pub const ALL: u64 = u64::MAX;

/// A file system on a medium. Dropping it removes all of it.
#[derive(Debug)]
pub struct MediumFs {
    mounted: bool,
    /// For mount(8).
    options: &'static str,
    /// Bytes of a logical sector of the loop device.
    sector: u32,
    medium: Option<MediumFile>,
    /// The last to be dropped.
    dir: tempfile::TempDir,
}

impl MediumFs {
    /// Makes a file system of a kind, `ext4` or `xfs`, on a new medium.
    ///
    /// # Errors
    /// That fails; the text says why.
    pub fn new(kind: &str) -> Result<Self, String> {
        Self::with_sectors(kind, 512)
    }

    /// The same, on a block device whose logical sectors have `sector` bytes.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_sectors(kind: &str, sector: u32) -> Result<Self, String> {
        let (maker, package, options, mounting) = match kind {
            "xfs" => ("mkfs.xfs", "xfsprogs", &["-q", "-K"][..], "defaults"),
            _ => {
                let options = &["-q", "-t", "ext4", "-E", "nodiscard"][..];
                // By itself ext4 would sync every five seconds: a slow machine would count those.
                ("mke2fs", "e2fsprogs", options, "commit=3600")
            }
        };
        if !have(maker, package) || !have("losetup", "mount") {
            return Err("no tools for file systems".to_owned());
        }
        let mut made = Self::empty()?;
        (made.options, made.sector) = (mounting, sector);
        made.medium = Some(MediumFile::mount(&made.image(), SIZE)?);
        made.mount(|device| run(maker, &[options, &[device]].concat()).map(drop))?;
        Ok(made)
    }

    /// Mounts the file system that `write` puts into a file, such as what a power cut has left of a
    /// medium. The file itself is no [`medium`](Self::medium).
    ///
    /// # Errors
    /// That fails; the text says why.
    pub fn from_image(write: impl FnOnce(&Path) -> io::Result<()>) -> Result<Self, String> {
        let mut made = Self::empty()?;
        write(&made.image()).map_err(|error| error.to_string())?;
        made.mount(|_| Ok(()))?;
        Ok(made)
    }

    /// A mount point, and nothing there yet.
    fn empty() -> Result<Self, String> {
        own_mounts().map_err(|error| error.to_string())?;
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let made = Self {
            mounted: false,
            options: "defaults",
            sector: 512,
            medium: None,
            dir,
        };
        std::fs::create_dir(made.top()).map_err(|error| error.to_string())?;
        Ok(made)
    }

    /// The medium.
    #[must_use]
    pub fn medium(&self) -> &MediumFile {
        self.medium.as_ref().expect("it has one")
    }

    /// The mount point.
    #[must_use]
    pub fn top(&self) -> PathBuf {
        self.dir.path().join("mounted")
    }

    /// The file that it is on: the medium, if it has one.
    fn image(&self) -> PathBuf {
        self.dir.path().join("medium")
    }

    /// Mounts a loop device, once `prepare` has done its work on it. The device ends when it is
    /// unmounted, also by the end of this process.
    fn mount(&mut self, prepare: impl FnOnce(&str) -> Result<(), String>) -> Result<(), String> {
        let image = self.image().display().to_string();
        let direct = if self.medium.is_some() { "on" } else { "off" };
        let (direct, sector) = (format!("--direct-io={direct}"), self.sector.to_string());
        let arguments = [
            "--find",
            "--show",
            &direct,
            "--sector-size",
            &sector,
            &image,
        ];
        let device = run("losetup", &arguments)?;
        let top = self.top().display().to_string();
        let mounted = prepare(&device)
            .and_then(|()| run("mount", &["-o", self.options, &device, &top]).map(drop));
        self.mounted = mounted.is_ok();
        run("losetup", &["--detach", &device])?;
        mounted
    }

    /// Makes what was written to the file system durable, and of no other file system.
    ///
    /// # Errors
    /// The medium fails.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(File::open(self.top())?)?)
    }

    /// Unmounts the file system, so that nothing of it is in memory.
    fn unmount(&mut self) -> Result<(), String> {
        if self.mounted {
            try_unmount(&self.top())?;
        }
        self.mounted = false;
        Ok(())
    }

    /// Unmounts the file system, which takes until all requests to it have ended, and mounts it
    /// again.
    pub fn remount(&mut self) {
        self.unmount().unwrap();
        self.mount(|_| Ok(())).unwrap();
    }

    /// What a power cut does, after all processes have ended: what is not on the medium by now is
    /// lost.
    pub fn lose_power(&mut self) {
        self.medium().fail_writes(0, ALL);
        self.unmount().unwrap();
        self.medium().heal();
        self.mount(|_| Ok(())).unwrap();
    }
}

impl Drop for MediumFs {
    fn drop(&mut self) {
        if let Err(why) = self.unmount() {
            println!("{why}");
        }
    }
}
