//! Landlock: limits the files and ports that a process can reach once it has started.
//!
//! ```text
//!   AllowedPaths::of(specs) + the command's own ─▶ restrict ─▶ open disks, start threads: these inherit it
//! ```
//! Landlock restricts the calling thread and the threads that it starts, so it must come before the
//! process starts any. It also comes before the recovery of logs, where the process first reads
//! bytes that a crash or a stranger has left. Afterwards the process may use:
//!
//! * the images and logs that its disks' specs name, whatever else a log names,
//! * the files that the command reads,
//! * the directories that `--disk-dir` names.
//!
//! It can't run a program, bind or connect to a port (unless connecting is the command's job), or
//! reach an abstract socket or process outside. Files that are already open stay open. Outside
//! `--disk-dir` the process need not make or remove files beside the images: a new log is made
//! before the restriction, and another process removes the names of sockets.
//!
//! The process uses all of Landlock that the kernel has (Linux 5.13 for files, 6.7 for ports, 6.12
//! for the rest). If the kernel has none, the process warns once.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd,
    Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use walvisor_storage::FetchMap;

use crate::disk_spec::{BackendKind, DiskSpec};

/// Whether the process gives up the files and ports that it does not need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Landlock {
    /// Confine the process as far as the kernel supports it
    #[default]
    On,
    /// Do not confine the process
    Off,
}

/// The newest version of Landlock that this program knows.
const NEWEST: ABI = ABI::V6;

/// Paths, and the rights beneath each.
#[derive(Default)]
pub struct AllowedPaths {
    rules: Vec<(PathBuf, BitFlags<AccessFs>)>,
    /// Whether the process may connect to ports.
    connects: bool,
}

impl AllowedPaths {
    /// The images and logs of a command line's disks. The logs must exist
    /// ([`make_logs`](crate::disks::make_files)).
    pub fn of(specs: &[DiskSpec]) -> Self {
        let mut places = Self::default();
        for spec in specs.iter().filter(|spec| spec.backend != BackendKind::Ram) {
            let image = spec.path.clone().unwrap_or_default();
            if spec.at.is_some() {
                places.read(&image);
                places.fetch_map(&image);
                spec.log_directory().iter().for_each(|log| places.read(log));
                continue;
            }
            places.image(&image);
            let Some(log) = spec.log_directory() else {
                continue;
            };
            spec.detached.iter().for_each(|image| places.image(image));
            places.log(&log);
        }
        // Memory use and limits of the process; and its own file, from which backtraces take line
        // numbers.
        places.read(Path::new("/proc/self"));
        places.read(Path::new("/sys/fs/cgroup"));
        if let Ok(program) = std::env::current_exe() {
            places.read(&program);
        }
        places
    }

    /// What it takes to connect to a server by its name, over TLS: the system's settings, its
    /// certificates and the libraries that look names up.
    pub fn connecting() -> Self {
        let mut places = Self {
            connects: true,
            ..Self::default()
        };
        let settings = [
            "/etc",
            "/usr/lib",
            "/usr/share/ca-certificates",
            "/usr/local/share/ca-certificates",
            "/lib",
            "/lib64",
        ];
        let system = [
            "/run/systemd/resolve",
            "/proc/self",
            "/proc/sys/kernel",
            "/dev/urandom",
        ];
        for path in settings.into_iter().chain(system) {
            places.read(Path::new(path));
        }
        // Where a user says that the certificates are.
        for name in ["SSL_CERT_FILE", "SSL_CERT_DIR"] {
            let path = std::env::var_os(name);
            path.iter().for_each(|path| places.read(Path::new(path)));
        }
        if let Ok(program) = std::env::current_exe() {
            places.read(&program);
        }
        places
    }

    /// Allows making, changing and removing files and directories beneath a directory.
    pub fn tree(&mut self, path: &Path) {
        let rights = AccessFs::ReadFile
            | AccessFs::ReadDir
            | AccessFs::WriteFile
            | AccessFs::Truncate
            | AccessFs::MakeReg
            | AccessFs::MakeDir
            | AccessFs::Refer
            | AccessFs::RemoveFile
            | AccessFs::RemoveDir;
        self.rules.push((path.to_owned(), rights));
    }

    /// Allows reading a file, or all files in a directory.
    pub fn read(&mut self, path: &Path) {
        let rights = AccessFs::ReadFile | AccessFs::ReadDir;
        self.rules.push((path.to_owned(), rights));
    }

    /// Allows opening, reading and writing a device, and its ioctls.
    pub fn device(&mut self, path: &Path) {
        let rights = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
        self.rules.push((path.to_owned(), rights));
    }

    /// Allows reading and setting attributes beneath a directory of configfs, and making and
    /// removing entries in it.
    pub fn configure(&mut self, path: &Path) {
        let rights = AccessFs::ReadFile
            | AccessFs::ReadDir
            | AccessFs::WriteFile
            | AccessFs::MakeSym
            | AccessFs::RemoveFile
            | AccessFs::RemoveDir;
        self.rules.push((path.to_owned(), rights));
    }

    /// Allows making directories beneath a directory, and what [`configure`](Self::configure)
    /// allows.
    pub fn build(&mut self, path: &Path) {
        self.configure(path);
        self.rules.push((path.to_owned(), AccessFs::MakeDir.into()));
    }

    /// Allows removing directories beneath a directory.
    pub fn dismantle(&mut self, path: &Path) {
        self.rules
            .push((path.to_owned(), AccessFs::RemoveDir.into()));
    }

    /// Allows adding disks beneath a directory later, with their logs and sockets.
    pub fn disks_in(&mut self, path: &Path) {
        let rights = AccessFs::ReadFile
            | AccessFs::ReadDir
            | AccessFs::WriteFile
            | AccessFs::Truncate
            | AccessFs::MakeReg
            | AccessFs::MakeDir
            | AccessFs::MakeSock
            | AccessFs::RemoveFile;
        self.rules.push((path.to_owned(), rights));
    }

    fn image(&mut self, path: &Path) {
        let rights = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate;
        self.rules.push((path.to_owned(), rights));
        self.fetch_map(path);
    }

    /// Allows asking a restore for chunks of an image that it is not done with.
    fn fetch_map(&mut self, image: &Path) {
        let map = FetchMap::path_of(image);
        if map.exists() {
            self.rules
                .push((map, AccessFs::ReadFile | AccessFs::WriteFile));
        }
    }

    fn log(&mut self, path: &Path) {
        let rights = AccessFs::ReadFile
            | AccessFs::ReadDir
            | AccessFs::WriteFile
            | AccessFs::Truncate
            | AccessFs::MakeReg
            | AccessFs::RemoveFile;
        self.rules.push((path.to_owned(), rights));
    }

    /// Gives up all other rights, for this thread and the threads that it will start. Call it
    /// before there is a second thread. Rights that the kernel does not know are skipped; if it
    /// knows none, there is a warning.
    pub fn restrict(&self, mode: Landlock) {
        if mode == Landlock::Off {
            return;
        }
        match self.try_restrict() {
            Ok(RulesetStatus::NotEnforced) => tracing::warn!(
                "this kernel has no Landlock, so the process can still reach all files of its \
                 user: '--landlock off' accepts that and silences this warning"
            ),
            Ok(_) => {}
            Err(error) => tracing::warn!(
                "Landlock: {error}: the process can still reach all files of its user; \
                 '--landlock off' accepts that and silences this warning"
            ),
        }
    }

    fn try_restrict(&self) -> Result<RulesetStatus, RulesetError> {
        let ports = if self.connects {
            AccessNet::BindTcp.into()
        } else {
            AccessNet::from_all(NEWEST)
        };
        let ruleset = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(NEWEST))?
            .handle_access(ports)?
            .scope(Scope::from_all(NEWEST))?
            .create()?;
        let ruleset = self.rules.iter().try_fold(ruleset, add)?;
        Ok(ruleset.restrict_self()?.ruleset)
    }
}

fn add(
    ruleset: RulesetCreated,
    (path, rights): &(PathBuf, BitFlags<AccessFs>),
) -> Result<RulesetCreated, RulesetError> {
    // A missing path is reported by the code that uses it.
    let Ok(file) = PathFd::new(path) else {
        return Ok(ruleset);
    };
    // Some rights are for directories only.
    let rights = if path.is_dir() {
        *rights
    } else {
        *rights & AccessFs::from_file(NEWEST)
    };
    ruleset.add_rule(PathBeneath::new(file, rights))
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::net::{TcpListener, TcpStream};
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use walvisor_devices::backend::{Buffer, Operation, flush};

    use super::*;
    use crate::disk_spec::DiskCommand;
    use crate::disks::{make_files, open};
    use crate::plan::Plan;

    const DIRECTORY: &str = "WALVISOR_TEST_LANDLOCK";

    /// The test below runs this in a child process. As a test of its own it does nothing.
    #[test]
    fn a_restricted_process() {
        let Some(dir) = std::env::var_os(DIRECTORY).map(PathBuf::from) else {
            return;
        };
        let open_before = File::open(dir.join("secret")).unwrap();
        let text = format!("path={}", dir.join("disk.img").display());
        let disk = DiskSpec::parse(&text, DiskCommand::Run).unwrap();
        let plan = Plan::new(&[disk]).unwrap();
        let scratch = make_files(&plan).unwrap();
        AllowedPaths::of(&plan.disks).restrict(Landlock::On);

        // The first run of a new disk, from its first write to its close.
        let (disks, logs) = open(&plan, 1, scratch).unwrap();
        flush(&*disks[0].backend).unwrap();
        let mut queue = disks[0].backend.open_queue().unwrap();
        let data = Buffer::from(&[7; 4096][..]);
        queue.submit(0, Operation::Write { sector: 0, data });
        queue.kick();
        flush(&*disks[0].backend).unwrap();
        drop((queue, disks));
        logs.close().unwrap();
        assert_eq!(fs::read(dir.join("disk.img")).unwrap()[..4096], [7; 4096]);

        let log = dir.join("disk.img.wal");
        fs::write(log.join("new"), "x").unwrap();
        fs::rename(log.join("new"), log.join("newer")).unwrap();
        fs::remove_file(log.join("newer")).unwrap();
        fs::read_to_string("/proc/self/status").unwrap();
        assert!(open_before.metadata().is_ok());

        let denied = |done: std::io::Result<()>| {
            let error = done.expect_err("denied");
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
        };
        let secret = dir.join("secret");
        denied(fs::read(&secret).map(drop));
        denied(File::options().write(true).open(&secret).map(drop));
        denied(File::options().append(true).open(&secret).map(drop));
        let truncate = File::options().write(true).truncate(true).open(&secret);
        denied(truncate.map(drop));
        denied(fs::remove_file(&secret));
        denied(fs::rename(&secret, dir.join("renamed")));
        denied(fs::hard_link(&secret, dir.join("linked")));
        denied(fs::rename(&secret, log.join("moved")));
        denied(fs::write(dir.join("other"), "x"));
        denied(fs::create_dir(dir.join("directory")));
        denied(UnixListener::bind(dir.join("socket")).map(drop));
        denied(std::os::unix::fs::symlink("x", dir.join("link")));
        denied(fs::remove_file(dir.join("disk.img")));
        denied(fs::remove_dir(&log));
        denied(fs::create_dir(log.join("directory")));
        denied(fs::read("/etc/passwd").map(drop));
        denied(Command::new("/bin/true").spawn().map(drop));
        // New threads are restricted too.
        let thread = std::thread::spawn(move || fs::read(secret).map(drop));
        denied(thread.join().unwrap());
        // This needs Linux 6.7 or later.
        if std::env::var_os("WALVISOR_TEST_LANDLOCK_NET").is_some() {
            denied(TcpListener::bind("127.0.0.1:0").map(drop));
            denied(TcpStream::connect("127.0.0.1:9").map(drop));
        }
        std::process::exit(77);
    }

    #[test]
    fn only_allowed_paths_can_be_reached() {
        // SAFETY: the call only asks for the version; the kernel reads no memory through the null
        // pointer.
        let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, 0, 0, 1) };
        if version < 1 {
            println!("skipped: this kernel has no Landlock");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        fs::write(at("disk.img"), [0; 1 << 20]).unwrap();
        fs::write(at("secret"), "x").unwrap();
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args([
            "--exact",
            "landlock::tests::a_restricted_process",
            "--nocapture",
        ]);
        command.env(DIRECTORY, dir.path());
        if version >= 4 {
            command.env("WALVISOR_TEST_LANDLOCK_NET", "1");
        }
        let output = command.output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(77), "{text}");
        assert_eq!(fs::read(at("secret")).unwrap(), b"x");
    }
}
