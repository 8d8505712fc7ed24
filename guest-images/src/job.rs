//! Jobs: shell scripts that run `walvisor run` on a machine whose KVM can run Linux.

use std::fs;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cache::Cache;
use crate::error::{Error, FileContext, Result};
use crate::images::{GuestImages, NewerKernel, images_disk};
use crate::machine::Machine;
use crate::nested::{BootEnd, NestedBoot, extract};
use crate::packages::install_missing;
use crate::process::LeashedChild;
use crate::reporter::Reporter;
use crate::scratch::ScratchDir;
use crate::stop;
use crate::userland::{make_ext4, needed_libraries, search_path};

const RUN: &str = include_str!("../scripts/run.sh");
const GUEST_FUNCTIONS: &str = include_str!("../scripts/guest-functions.sh");
/// The exit status of a job whose guest hung at boot, or ended without output (`EX_TEMPFAIL` of
/// sysexits.h).
const TRY_AGAIN: i32 = 75;
/// The outer machine prints this if its processor cannot run guests. A retry would not help.
const NO_KVM: &str = "outer: kvm_amd gives no /dev/kvm";
/// The name of the job's directory in its scratch directory: `$BASE`.
const BASE: &str = "job";
/// Host programs needed to run a job, each with its package.
const DIRECT_NEEDS: [(&str, &str); 2] = [("setpriv", "util-linux"), ("cpio", "cpio")];
const NESTED_NEEDS: [(&str, &str); 2] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("debugfs", "e2fsprogs"),
];

/// A job. The top of `scripts/run.sh` says what its script may use.
#[derive(Clone, Debug)]
pub struct GuestJob {
    /// The script, for a POSIX shell.
    pub script: String,
    /// Further files, `(name, content)`, that the script finds in `$JOB`, mostly the guests'
    /// scripts.
    pub files: Vec<(String, Vec<u8>)>,
    /// The `walvisor` binary.
    pub walvisor: PathBuf,
    /// The whole job is killed after this time.
    pub limit: Duration,
    /// Space for the guests' disks in MiB. It is sparse: only what is written takes space.
    pub disk_mebibytes: u64,
    /// The most attempts, at least 1: the job is retried if its machine or a guest on it hangs or
    /// crashes.
    pub attempts: u32,
    /// The kernel of a nested machine, if not Debian 12's own.
    pub kernel: Option<NewerKernel>,
    /// The sockets of vhost-user disks: /dev/vdc of a nested machine, and so on.
    pub disks: Vec<PathBuf>,
    /// A socket for a network card of a nested machine: a stream of frames, each after its length.
    /// QEMU inherits it.
    pub network: Option<Arc<OwnedFd>>,
    /// Whether the console of a nested machine is the terminal of this process, for input too.
    pub terminal: bool,
}

impl GuestJob {
    /// A job without further files, with a limit of ten minutes, 4 GiB for disks, and six attempts.
    #[must_use]
    pub fn new(script: impl Into<String>, walvisor: impl Into<PathBuf>) -> Self {
        Self {
            script: script.into(),
            files: Vec::new(),
            walvisor: walvisor.into(),
            limit: Duration::from_secs(600),
            disk_mebibytes: 4096,
            attempts: 6,
            kernel: None,
            disks: Vec::new(),
            network: None,
            terminal: false,
        }
    }

    /// Adds the file `$JOB/<name>`.
    #[must_use]
    pub fn file(mut self, name: impl Into<String>, content: impl Into<Vec<u8>>) -> Self {
        self.files.push((name.into(), content.into()));
        self
    }

    /// Runs the job on the machine of [`Machine::choose`], which a note names, and waits until it
    /// ends.
    ///
    /// # Errors
    /// As [`GuestJob::run_on`].
    pub fn run(&self, cache: &Cache, reporter: &Reporter) -> Result<JobOutcome> {
        let (machine, reason) = Machine::choose();
        reporter.note(&reason);
        self.run_on(machine, cache, reporter)
    }

    /// Runs the job on `machine`, and waits until it ends. If the machine or a guest on it hangs or
    /// crashes, the job is retried. Such attempts are counted, and a note reports each.
    ///
    /// # Errors
    /// The images cannot be built, the machine cannot be started or hangs in every attempt, or the
    /// job takes longer than its limit. A script that fails is not an error: see
    /// [`JobOutcome::status`].
    pub fn run_on(
        &self,
        machine: Machine,
        cache: &Cache,
        reporter: &Reporter,
    ) -> Result<JobOutcome> {
        let needs: &[_] = match machine {
            Machine::Direct => &DIRECT_NEEDS,
            Machine::Nested => &NESTED_NEEDS,
        };
        install_missing(needs, reporter)?;
        let images = GuestImages::ensure(cache, reporter)?;
        for attempt in 1..=self.attempts {
            stop::check()?;
            let scratch = ScratchDir::new(cache, reporter)?;
            let base = scratch.path().join(BASE);
            self.write_files(&base, machine)?;
            let mut console = String::new();
            let line = |text: &str| {
                console.push_str(text);
                console.push('\n');
                match text.strip_prefix("progress: ") {
                    Some(progress) => reporter.progress(progress),
                    None => reporter.console(text),
                }
            };
            let status = match machine {
                Machine::Direct => self.run_direct(&base, &images, line)?,
                Machine::Nested => {
                    // One nested job at a time: two emulated machines would starve each other.
                    let _session = cache.lock("session", reporter)?;
                    let disk = images_disk(cache, &images, reporter)?;
                    let system = match self.kernel {
                        Some(kernel) => GuestImages::ensure_newer(cache, kernel, reporter)?,
                        None => images.clone(),
                    };
                    reporter.progress("booting the outer machine");
                    if self.terminal {
                        reporter.note("booting the outer machine, which takes some seconds");
                        reporter.clear();
                    }
                    self.run_nested(&base, &system.directory, &disk, line)?
                }
            };
            if let Some(status) = status {
                let hung_boots = attempt - 1;
                return Ok(JobOutcome {
                    status,
                    console,
                    hung_boots,
                    machine,
                    scratch,
                });
            }
            reporter.note(&format!(
                "a guest hung or crashed: attempt {attempt} of {}",
                self.attempts
            ));
        }
        Err(Error::Hung {
            what: "the machine or a guest on it",
            attempts: self.attempts,
        })
    }

    /// Writes the job's files below `base`. The layout is the same on both machines.
    fn write_files(&self, base: &Path, machine: Machine) -> Result<()> {
        for directory in ["job", "files", "results", "bin"] {
            let path = base.join(directory);
            fs::create_dir_all(&path).at("create", &path)?;
        }
        let write = |name: &str, content: &[u8], mode: u32| {
            let path = base.join(name);
            fs::write(&path, content).at("write", &path)?;
            fs::set_permissions(&path, fs::Permissions::from_mode(mode))
                .at("set the mode of", &path)
        };
        let kind = match machine {
            Machine::Direct => "direct",
            Machine::Nested => "nested",
        };
        write("machine", kind.as_bytes(), 0o644)?;
        write("run.sh", RUN.as_bytes(), 0o644)?;
        write("guest-functions.sh", GUEST_FUNCTIONS.as_bytes(), 0o644)?;
        write("job/job.sh", self.script.as_bytes(), 0o644)?;
        for (name, content) in &self.files {
            write(&format!("job/{name}"), content, 0o644)?;
        }
        let walvisor = self.walvisor.canonicalize().at("find", &self.walvisor)?;
        let start = match machine {
            // The guest must not outlive the job's shell.
            Machine::Direct => format!(
                "exec setpriv --pdeathsig KILL '{}' \"$@\"",
                walvisor.display()
            ),
            Machine::Nested => {
                let program = base.join("program");
                fs::create_dir(&program).at("create", &program)?;
                copy_with_libraries(&walvisor, &program)?;
                // The program brings its libraries, because the machine's C library may be older
                // than the one that it was built with.
                "at=$BASE/program; exec \"$at/loader\" --library-path \"$at\" \"$at/walvisor\" \
                 \"$@\""
                    .to_owned()
            }
        };
        let start = format!("#!/bin/sh\n{start}\n");
        write("bin/walvisor", start.as_bytes(), 0o755)
    }

    /// Runs the script on this machine. Returns `None` if a guest hung at boot.
    fn run_direct(
        &self,
        base: &Path,
        images: &GuestImages,
        mut line: impl FnMut(&str),
    ) -> Result<Option<i32>> {
        let mut command = Command::new("sh");
        command
            .args(["-c", "exec sh \"$BASE/run.sh\" 2>&1"])
            .env("BASE", base)
            .env("IMAGES", &images.directory)
            .env("PATH", search_path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut shell = LeashedChild::spawn(&mut command, true)?;
        let start = Instant::now();
        let status = shell.watch(|text| {
            text.into_iter().for_each(&mut line);
            if start.elapsed() > self.limit {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        stop::check()?;
        let status = status
            .at("wait for", "sh")?
            .ok_or_else(|| self.timed_out())?;
        status
            .code()
            .map(none_if_retry)
            .ok_or_else(|| Error::Unusable(format!("the job's shell was killed: {status}")))
    }

    /// Runs the script in QEMU's emulation. `system`: the directory with the machine's kernel.
    /// Returns `None` if the machine or a guest on it hung or crashed.
    fn run_nested(
        &self,
        base: &Path,
        system: &Path,
        disk: &Path,
        mut line: impl FnMut(&str),
    ) -> Result<Option<i32>> {
        // The image is beside `base` and not below it, because it must not contain itself.
        let work = base.with_extension("ext4");
        make_ext4(base, &work, self.disk_mebibytes + 256)?;
        let boot = NestedBoot {
            kernel: &system.join("vmlinuz"),
            initramfs: &system.join("initramfs-outer.cpio"),
            images: disk,
            work: &work,
            limit: self.limit,
            disks: &self.disks,
            network: self.network.as_deref(),
            terminal: self.terminal,
        };
        let mut no_kvm = false;
        let end = boot.run(|text| {
            no_kvm |= text.contains(NO_KVM);
            line(text);
        })?;
        match end {
            BootEnd::Hung => return Ok(None),
            BootEnd::TimedOut => return Err(self.timed_out()),
            BootEnd::GivenUp => {
                return Err(Error::Unusable(
                    "Ctrl-A x: the machine that QEMU emulates around the guest went on, and was \
                     killed; the guest's disks are as after a power cut"
                        .to_owned(),
                ));
            }
            BootEnd::PoweredOff => {}
        }
        // debugfs creates the directory, and fails if it exists.
        let results = base.join("results");
        fs::remove_dir(&results).at("remove", &results)?;
        match extract(&work, "status", base) {
            Err(Error::Unusable(_)) if no_kvm => {
                return Err(Error::Unusable(format!(
                    "{NO_KVM}: QEMU's processor model has no SVM"
                )));
            }
            // The machine crashed before the job ended.
            Err(Error::Unusable(reason)) => {
                line(&format!("outer: crashed: {reason}"));
                return Ok(None);
            }
            other => other?,
        }
        extract(&work, "results", base)?;
        let file = base.join("status");
        let status = fs::read_to_string(&file).at("read", &file)?;
        let status = status.trim().parse().map_err(|_| {
            Error::Unusable(format!(
                "the nested machine's exit status is not a number: {status:?}"
            ))
        })?;
        Ok(none_if_retry(status))
    }

    fn timed_out(&self) -> Error {
        Error::TimedOut {
            seconds: self.limit.as_secs(),
        }
    }
}

fn none_if_retry(status: i32) -> Option<i32> {
    (status != TRY_AGAIN).then_some(status)
}

/// Copies a program with its libraries to `directory`: the program as `walvisor`, its dynamic
/// loader as `loader`.
fn copy_with_libraries(program: &Path, directory: &Path) -> Result<()> {
    let copy = |from: &Path, name: &str| {
        fs::copy(from, directory.join(name))
            .map(drop)
            .at("copy", from)
    };
    // Strips the debug information if binutils is installed, because the nested machine reads from
    // an emulated disk.
    let stripped = directory.join("walvisor");
    let strip = Command::new("strip")
        .arg("-o")
        .arg(&stripped)
        .arg(program)
        .output();
    if !strip.is_ok_and(|output| output.status.success()) {
        copy(program, "walvisor")?;
    }
    copy(Path::new("/lib64/ld-linux-x86-64.so.2"), "loader")?;
    for (name, path) in needed_libraries(Command::new("ldd").arg(program))? {
        copy(&path, &name)?;
    }
    Ok(())
}

/// The result of a job.
#[derive(Debug)]
pub struct JobOutcome {
    /// The exit status of the script.
    pub status: i32,
    /// All output of the script, the guests' consoles included.
    pub console: String,
    /// Attempts given up because a guest hung or crashed.
    pub hung_boots: u32,
    /// The machine that the job ran on.
    pub machine: Machine,
    scratch: ScratchDir,
}

impl JobOutcome {
    /// Reads the file `name` that the script put into `$RESULTS`.
    ///
    /// # Errors
    /// The file does not exist, or is not text.
    pub fn result(&self, name: &str) -> Result<String> {
        let path = self.results().join(name);
        fs::read_to_string(&path).at("read", &path)
    }

    /// Copies the files in `$RESULTS` into directory `target`, which is created if it is missing.
    ///
    /// # Errors
    /// A file cannot be copied.
    pub fn keep_results(&self, target: &Path) -> Result<()> {
        fs::create_dir_all(target).at("create", target)?;
        let results = self.results();
        for entry in fs::read_dir(&results).at("read", &results)? {
            let entry = entry.at("read", &results)?;
            fs::copy(entry.path(), target.join(entry.file_name())).at("copy", entry.path())?;
        }
        Ok(())
    }

    /// The directory that was `$RESULTS`. It is removed when this value is dropped.
    #[must_use]
    pub fn results(&self) -> PathBuf {
        self.scratch.path().join(BASE).join("results")
    }
}
