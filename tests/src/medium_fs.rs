//! A file system on a [`MediumFile`]: ext4 or XFS, over a loop device.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use walvisor_testkit::process::run;

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
    device: Option<String>,
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
        made.options = mounting;
        let file = made.dir.path().join("medium");
        made.medium = Some(MediumFile::mount(&file, SIZE)?);
        let file = file.display().to_string();
        let device = run("losetup", &["--find", "--show", "--direct-io=on", &file])?;
        made.device = Some(device.clone());
        run(maker, &[options, &[&device]].concat())?;
        made.mount()?;
        Ok(made)
    }

    /// Mounts the file system that `write` puts into a file, such as what a power cut has left of a
    /// medium. The file itself is no [`medium`](Self::medium).
    ///
    /// # Errors
    /// That fails; the text says why.
    pub fn from_image(write: impl FnOnce(&Path) -> io::Result<()>) -> Result<Self, String> {
        let mut made = Self::empty()?;
        let file = made.dir.path().join("image");
        write(&file).map_err(|error| error.to_string())?;
        let file = file.display().to_string();
        made.device = Some(run("losetup", &["--find", "--show", &file])?);
        made.mount()?;
        Ok(made)
    }

    /// A mount point, and nothing there yet.
    fn empty() -> Result<Self, String> {
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let made = Self {
            mounted: false,
            options: "defaults",
            device: None,
            medium: None,
            dir,
        };
        std::fs::create_dir(made.top()).map_err(|error| error.to_string())?;
        Ok(made)
    }

    /// The medium.
    ///
    /// # Panics
    /// It was made [from an image](Self::from_image).
    #[must_use]
    pub fn medium(&self) -> &MediumFile {
        self.medium.as_ref().expect("it has one")
    }

    /// The mount point.
    #[must_use]
    pub fn top(&self) -> PathBuf {
        self.dir.path().join("mounted")
    }

    fn mount(&mut self) -> Result<(), String> {
        let device = self.device.as_deref().expect("it has one");
        let top = self.top().display().to_string();
        run("mount", &["-o", self.options, device, &top])?;
        self.mounted = true;
        Ok(())
    }

    /// Makes what was written to the file system durable, and of no other file system.
    ///
    /// # Errors
    /// The medium fails.
    pub fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::syncfs(File::open(self.top())?)?)
    }

    /// Unmounts the file system, so that nothing of it is in memory. What io_uring does for a
    /// process that was killed ends a moment later than the process.
    fn unmount(&mut self) -> Result<(), String> {
        let began = Instant::now();
        while self.mounted {
            match run("umount", &[&self.top().display().to_string()]) {
                Err(why) if !why.contains("busy") || began.elapsed().as_secs() > 30 => {
                    return Err(why);
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
                Ok(_) => self.mounted = false,
            }
        }
        Ok(())
    }

    /// What a power cut does, after all processes have ended: what is not on the medium by now is
    /// lost.
    ///
    /// # Panics
    /// The file system can't be unmounted or mounted again.
    pub fn lose_power(&mut self) {
        self.medium().fail_writes(0, ALL);
        self.unmount().unwrap();
        self.medium().heal();
        self.mount().unwrap();
    }
}

impl Drop for MediumFs {
    fn drop(&mut self) {
        if let Err(why) = self.unmount() {
            println!("{why}");
        }
        if let Some(device) = self.device.take() {
            let _ = run("losetup", &["--detach", &device]);
        }
    }
}
