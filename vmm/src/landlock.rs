//! What of the file system, and of the network, a process can still reach once it has begun: Landlock.
//!
//! ```text
//!   Places::of(specs) + what the command adds ─▶ restrict ─▶ disks are opened, threads start: all of them inherit it
//! ```
//! Landlock binds a thread and those that it starts, so it comes before the first thread: before logs are recovered, which
//! is where bytes that a crash or a stranger has left are first read. A new log is made before, and the names of sockets are
//! left to another process: so nothing has to be made or removed beside the images. Allowed are the images and logs that the command line
//! names, images that share such a log, and what the command reads; nothing can be run, no port bound or connected to, and
//! no abstract socket or process outside be reached. What is open already stays open.
//!
//! It asks for what the kernel has (Linux 5.13 for files, 6.7 for ports, 6.12 for the rest) and does without what it has
//! not; a kernel without any is told once.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd,
    Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};
use walvisor_storage::log_images;

use crate::disk_spec::{BackendKind, DiskSpec};

/// Whether the process gives up what it does not need.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Landlock {
    /// Confine the process as far as the kernel supports it
    #[default]
    On,
    /// Do not confine the process
    Off,
}

/// The newest version whose rights are known here.
const NEWEST: ABI = ABI::V6;

/// Paths, and what may be done beneath them.
#[derive(Default)]
pub struct Places {
    rules: Vec<(PathBuf, BitFlags<AccessFs>)>,
}

impl Places {
    /// What the disks of a command line take: their images and logs, which are there
    /// ([`make_logs`](crate::disks::make_logs)).
    pub fn of(specs: &[DiskSpec]) -> Self {
        let mut places = Self::default();
        for spec in specs.iter().filter(|spec| spec.backend != BackendKind::Ram) {
            let image = spec.path.clone().unwrap_or_default();
            places.image(&image);
            let Some(log) = spec.log_directory() else {
                continue;
            };
            // Opened too if the log holds records of theirs.
            log_images(&log)
                .iter()
                .for_each(|image| places.image(image));
            places.log(&log);
        }
        // Of the process itself: its memory's use, its limits. Backtraces name the program's own lines.
        places.read(Path::new("/proc/self"));
        places.read(Path::new("/sys/fs/cgroup"));
        if let Ok(program) = std::env::current_exe() {
            places.read(&program);
        }
        places
    }

    /// A file, or all in a directory, is read.
    pub fn read(&mut self, path: &Path) {
        let rights = AccessFs::ReadFile | AccessFs::ReadDir;
        self.rules.push((path.to_owned(), rights));
    }

    /// A device is opened and asked.
    pub fn device(&mut self, path: &Path) {
        let rights = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
        self.rules.push((path.to_owned(), rights));
    }

    /// Attributes beneath a directory of configfs are read and set, and what is in it comes and goes.
    pub fn configure(&mut self, path: &Path) {
        let rights = AccessFs::ReadFile
            | AccessFs::ReadDir
            | AccessFs::WriteFile
            | AccessFs::MakeSym
            | AccessFs::RemoveFile
            | AccessFs::RemoveDir;
        self.rules.push((path.to_owned(), rights));
    }

    /// Directories beneath a directory go.
    pub fn dismantle(&mut self, path: &Path) {
        self.rules
            .push((path.to_owned(), AccessFs::RemoveDir.into()));
    }

    fn image(&mut self, path: &Path) {
        let rights = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::Truncate;
        self.rules.push((path.to_owned(), rights));
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

    /// Gives up everything else, for this thread and those that it will start: to be called before there is a second one.
    /// What the kernel does not have is done without; where that is everything, a warning says so.
    pub fn restrict(&self, mode: Landlock) {
        if mode == Landlock::Off {
            return;
        }
        match self.try_restrict() {
            Ok(RulesetStatus::NotEnforced) => tracing::warn!(
                "this kernel has no Landlock: the process keeps its reach into the file system; '--landlock off' says \
                 that this is known"
            ),
            Ok(_) => {}
            Err(error) => tracing::warn!(
                "Landlock: {error}: the process keeps its reach into the file system; '--landlock off' says that this is \
                 known"
            ),
        }
    }

    fn try_restrict(&self) -> Result<RulesetStatus, RulesetError> {
        let ruleset = Ruleset::default()
            .set_compatibility(CompatLevel::BestEffort)
            .handle_access(AccessFs::from_all(NEWEST))?
            .handle_access(AccessNet::from_all(NEWEST))?
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
    // What is not there, its user will find missing, and say so.
    let Ok(file) = PathFd::new(path) else {
        return Ok(ruleset);
    };
    // A file takes fewer rights than a directory.
    let rights = match path.is_dir() {
        true => *rights,
        false => *rights & AccessFs::from_file(NEWEST),
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
    use crate::disks::{make_logs, open};

    const DIRECTORY: &str = "WALVISOR_TEST_LANDLOCK";

    /// Where the test below begins in a process of its own; as a test it has nothing to do.
    #[test]
    fn a_restricted_process() {
        let Some(dir) = std::env::var_os(DIRECTORY).map(PathBuf::from) else {
            return;
        };
        let open_before = File::open(dir.join("secret")).unwrap();
        let text = format!("path={}", dir.join("disk.img").display());
        let specs = [DiskSpec::parse(&text, DiskCommand::Run).unwrap()];
        make_logs(&specs).unwrap();
        Places::of(&specs).restrict(Landlock::On);

        // The first run of a raw image, from its first write to its end.
        let (disks, logs) = open(&specs, 1).unwrap();
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
        // Threads too.
        let thread = std::thread::spawn(move || fs::read(secret).map(drop));
        denied(thread.join().unwrap());
        // Kernels from 6.7 on.
        if std::env::var_os("WALVISOR_TEST_LANDLOCK_NET").is_some() {
            denied(TcpListener::bind("127.0.0.1:0").map(drop));
            denied(TcpStream::connect("127.0.0.1:9").map(drop));
        }
        std::process::exit(77);
    }

    #[test]
    fn only_the_disks_and_what_they_take_can_be_reached() {
        // SAFETY: asks for the version alone: no pointer is looked at.
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
