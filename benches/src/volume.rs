//! File systems on what an NBD server serves. One of them is a volume that is limited by
//! operations, like small cloud volumes: 1 ms each, only a few at a time.
//!
//! ```text
//!   file ◀── nbdkit -t 3, delay filter ◀─┬─ nbdfuse ◀── loop device, direct I/O ◀── ext4
//!   another server with a Unix socket ◀──┘
//! ```
//! The mounts are in a namespace of this thread and its children: whatever ends this process, the
//! kernel unmounts them and frees the loop device.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::geteuid;
use rustix::thread::{UnshareFlags, unshare_unsafe};

use walvisor::commands::CommandError;
use walvisor_guest_images::leash;
use walvisor_testkit::process;

use crate::bench_dirs::failed;
use crate::programs;

/// Programs, each with its package.
const NEEDS: [(&str, &str); 5] = [
    ("nbdkit", "nbdkit"),
    ("nbdfuse", "libnbd-bin"),
    ("losetup", "mount"),
    ("mkfs.ext4", "e2fsprogs"),
    ("mount", "mount"),
];
/// Even on the slowest machine no step takes this long.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);

/// The mounted volume. Dropping it unmounts it and ends its programs.
pub struct Volume {
    server: Child,
    place: PathBuf,
    /// The name of its loop device, such as `loop0`.
    device: String,
}

/// Why a volume cannot be mounted here, as a text for the report; `None` if it can.
pub fn missing() -> Option<String> {
    if !geteuid().is_root() {
        return Some("Not measured: volumes are mounted, which only root may do".to_owned());
    }
    if !Path::new("/dev/fuse").exists() || !Path::new("/dev/loop-control").exists() {
        return Some("Not measured: volumes need /dev/fuse and /dev/loop-control".to_owned());
    }
    programs::missing(&NEEDS).map(programs::not_measured)
}

/// Gives this thread and its children mounts of their own.
///
/// # Errors
/// If only root may do that.
pub fn own_mounts() -> Result<(), CommandError> {
    // SAFETY: only the mounts are unshared, no file descriptors, so all that this process has open
    // stays valid.
    unsafe { unshare_unsafe(UnshareFlags::NEWNS) }.map_err(CommandError::failed)?;
    run("mount", &["--make-rprivate", "/"]).map(drop)
}

impl Volume {
    /// Creates a volume that is limited by operations, of `bytes` bytes, in the directory `place`.
    ///
    /// # Errors
    /// If a program fails.
    pub fn capped(place: &Path, bytes: u64) -> Result<Self, CommandError> {
        let file = place.join("volume");
        std::fs::File::create_new(&file)
            .and_then(|file| file.set_len(bytes))
            .map_err(failed("make", &file))?;
        Self::mount(
            place,
            "[ nbdkit --exit-with-parent --foreground --threads=3 --filter=delay file volume \
             wdelay=1ms rdelay=1ms ]",
        )
    }

    /// Mounts a new file system in the directory `place`, on an NBD server: its URI, or a command
    /// in brackets. [`own_mounts`] must have been called.
    ///
    /// # Errors
    /// If a program fails.
    pub fn mount(place: &Path, server: &str) -> Result<Self, CommandError> {
        let place = place.canonicalize().map_err(failed("find", place))?;
        for directory in ["fuse", "disks"] {
            let directory = place.join(directory);
            std::fs::create_dir(&directory).map_err(failed("make", &directory))?;
        }
        let words = server.split_whitespace();
        let mut server = Command::new("nbdfuse");
        server.arg("fuse/volume").args(words);
        // In a process group of its own it does not get the terminal's Ctrl-C, so it outlives the
        // disks on it.
        leash(&mut server).process_group(0).current_dir(&place);
        server.stdin(Stdio::null()).stderr(Stdio::null());
        let server = server.spawn().map_err(CommandError::failed)?;
        // From here on, dropping the value cleans up after a failure.
        let mut volume = Self {
            server,
            place,
            device: String::new(),
        };
        let served = volume.place.join("fuse/volume");
        let began = Instant::now();
        while !served.exists() {
            if began.elapsed() > STEP_TIMEOUT || !matches!(volume.server.try_wait(), Ok(None)) {
                return Err(CommandError::Failed("nbdfuse does not serve".to_owned()));
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        let served = served.display().to_string();
        let device = run("losetup", &["--direct-io=on", "--find", "--show", &served])?;
        // Everything is written now, so that nothing is written in the background of a turn.
        let options = "nodiscard,lazy_itable_init=0,lazy_journal_init=0";
        let made = run("mkfs.ext4", &["-q", "-E", options, &device])
            .and_then(|_| run("mount", &[&device, &volume.disks().display().to_string()]));
        // While it is mounted, this only makes it detach once it is unmounted.
        run("losetup", &["--detach", &device])?;
        made?;
        volume.device = device.trim_start_matches("/dev/").to_owned();
        Ok(volume)
    }

    /// The directory of its file system.
    pub fn disks(&self) -> PathBuf {
        self.place.join("disks")
    }

    /// The file with the counts of its block device (Documentation/block/stat.rst of the kernel).
    pub fn counts(&self) -> PathBuf {
        format!("/sys/block/{}/stat", self.device).into()
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        for mounted in [self.disks(), self.place.join("fuse")] {
            let mounted = mounted.display().to_string();
            // Fails if the volume was never mounted, which is fine.
            if run("umount", &[&mounted]).is_err() {
                let _ = run("umount", &["--lazy", &mounted]);
            }
        }
        // nbdfuse ends when it is unmounted; a signal ends it in all other cases. nbdkit ends with
        // it.
        programs::end(&mut self.server, Some(STEP_TIMEOUT));
    }
}

/// Runs a program, waits until it ends, and returns what it printed.
fn run(name: &str, arguments: &[&str]) -> Result<String, CommandError> {
    process::run(name, arguments).map_err(CommandError::Failed)
}
