//! A test's own file systems: on a loop device with a given sector size, or on a file that another
//! program may serve.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use walvisor_testkit::Process;
use walvisor_testkit::process::run;
use walvisor_tests::have;

/// Waits until `is_so` returns `true`.
///
/// # Errors
/// If it does not within a minute.
pub fn wait(what: &str, is_so: impl Fn() -> bool) -> Result<(), String> {
    let began = Instant::now();
    while !is_so() {
        if began.elapsed() > Duration::from_secs(60) {
            return Err(format!("{what}: not within a minute"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(())
}

/// An ext4 file system on a loop device. Dropping this removes both.
pub struct Volume {
    dir: tempfile::TempDir,
    sector: u32,
    server: Option<Server>,
    device: Option<String>,
    mounted: bool,
}

impl Volume {
    /// Makes a file system of 64 MiB with logical sectors of `sector` bytes, and mounts it.
    pub fn new(sector: u32) -> Result<Self, String> {
        let tools = [("mke2fs", "e2fsprogs"), ("losetup", "mount")];
        if !tools
            .iter()
            .all(|(program, package)| have(program, package))
        {
            return Err("no tools for file systems".to_owned());
        }
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let mut volume = Self {
            dir,
            sector,
            server: None,
            device: None,
            mounted: false,
        };
        let file = volume.file();
        let made = std::fs::File::create(&file).and_then(|file| file.set_len(64 << 20));
        made.and_then(|()| std::fs::create_dir(volume.top()))
            .map_err(|error| error.to_string())?;
        run("mke2fs", &["-q", "-t", "ext4", "-b", "4096", &file])?;
        volume.mount(&file)?;
        Ok(volume)
    }

    /// The mount point.
    pub fn top(&self) -> PathBuf {
        self.dir.path().join("mounted")
    }

    fn file(&self) -> String {
        self.dir.path().join("volume").display().to_string()
    }

    fn mount(&mut self, file: &str) -> Result<(), String> {
        let sector = self.sector.to_string();
        let device = run(
            "losetup",
            &["--find", "--show", "--sector-size", &sector, file],
        )?;
        self.device = Some(device.clone());
        run("mount", &[&device, &self.top().display().to_string()])?;
        self.mounted = true;
        Ok(())
    }

    /// Mounts the file system from another program that serves it.
    pub fn mount_from(&mut self, server: Server) -> Result<(), String> {
        let file = server.file.clone();
        self.server = Some(server);
        self.mount(&file)
    }

    /// Unmounts it.
    pub fn unmount(&mut self) {
        if std::mem::take(&mut self.mounted) {
            let _ = run("umount", &[&self.top().display().to_string()]);
        }
        if let Some(device) = self.device.take() {
            let _ = run("losetup", &["--detach", &device]);
        }
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        self.unmount();
        self.server = None;
    }
}

/// nbdkit and nbdfuse, which together serve a volume's file as another file.
pub struct Server {
    _process: Process,
    file: String,
}

impl Server {
    /// Serves the volume through a filter of nbdkit, with an option for the filter.
    pub fn start(volume: &Volume, filter: &[&str], option: &str) -> Result<Self, String> {
        let tools = [("nbdkit", "nbdkit"), ("nbdfuse", "libnbd-bin")];
        if !tools
            .iter()
            .all(|(program, package)| have(program, package))
        {
            return Err("no nbdkit".to_owned());
        }
        let served = volume.dir.path().join("served");
        std::fs::write(&served, "").map_err(|error| error.to_string())?;
        let mut command = Command::new("nbdfuse");
        command
            .arg(&served)
            .args([
                "--command",
                "nbdkit",
                "-s",
                "--exit-with-parent",
                "-t",
                "16",
            ])
            .args(filter)
            .args(["file", &format!("file={}", volume.file()), option])
            .stdin(Stdio::null());
        let process = Process::spawn(&mut command);
        let server = Self {
            _process: process,
            file: served.display().to_string(),
        };
        wait("nbdfuse", || {
            std::fs::metadata(&served).is_ok_and(|served| served.len() > 0)
        })?;
        Ok(server)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = run("umount", &[&self.file]);
    }
}

/// Whether a file system is mounted at a path.
pub fn is_mount(path: &Path) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let path = path.display().to_string();
    mounts
        .lines()
        .any(|line| line.split(' ').nth(1) == Some(&path))
}
