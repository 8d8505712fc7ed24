//! Runs jobs, nested ones on machines that they share.
//!
//! ```text
//!   jobs ──▶ those that can share a machine ──▶ boot ──▶ job 00, job 01, ... ──▶ outcomes
//!                        ▲                                  │ hung or crashed: counted
//!                        └───── that job and those after it ◀┘
//! ```

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use crate::cache::Cache;
use crate::error::{Error, FileContext, Result};
use crate::images::{BUILD_NEEDS, GuestImages, images_disk};
use crate::job::{GuestJob, JobOutcome};
use crate::machine::Machine;
use crate::nested::{BootEnd, NestedBoot, extract, replay_journal};
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
/// Host programs needed to run a job, each with its package.
const DIRECT_NEEDS: [(&str, &str); 2] = [("setpriv", "util-linux"), ("cpio", "cpio")];
const NESTED_NEEDS: [(&str, &str); 2] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("debugfs", "e2fsprogs"),
];
/// Space on a nested machine's disk for what each job has beside its guests' disks, in MiB.
const FILES_MEBIBYTES: u64 = 256;

/// Jobs, and how far they are.
pub(crate) struct Session<'a> {
    jobs: &'a [GuestJob],
    machine: Machine,
    cache: &'a Cache,
    reporter: &'a Reporter,
    images: GuestImages,
    /// How each job has ended.
    ends: Vec<Option<Result<JobOutcome>>>,
    /// The attempts of each job that were given up.
    given_up: Vec<u32>,
}

impl<'a> Session<'a> {
    /// Installs what the machine needs, and builds the images.
    pub(crate) fn new(
        jobs: &'a [GuestJob],
        machine: Machine,
        cache: &'a Cache,
        reporter: &'a Reporter,
    ) -> Result<Self> {
        let needs: &[_] = match machine {
            Machine::Direct => &DIRECT_NEEDS,
            Machine::Nested => &NESTED_NEEDS,
        };
        // All at once: each apt-get takes seconds.
        install_missing(&[needs, &BUILD_NEEDS].concat(), reporter)?;
        Ok(Self {
            images: GuestImages::ensure(cache, reporter)?,
            jobs,
            machine,
            cache,
            reporter,
            ends: jobs.iter().map(|_| None).collect(),
            given_up: vec![0; jobs.len()],
        })
    }

    /// Runs the jobs until each has ended.
    pub(crate) fn run(mut self) -> Result<Vec<Result<JobOutcome>>> {
        while let Some(first) = self.ends.iter().position(Option::is_none) {
            stop::check()?;
            let scratch = Arc::new(ScratchDir::new(self.cache, self.reporter)?);
            match self.machine {
                Machine::Direct => self.run_direct(first, &scratch)?,
                Machine::Nested => self.run_nested(first, &scratch)?,
            }
        }
        Ok(self.ends.into_iter().flatten().collect())
    }

    /// Keeps how an attempt of the job ended. `status`: of its script; `None`: it hung or crashed.
    fn end_attempt(
        &mut self,
        number: usize,
        status: Option<i32>,
        console: String,
        base: PathBuf,
        scratch: &Arc<ScratchDir>,
    ) {
        match status {
            Some(status) if status != TRY_AGAIN => {
                self.ends[number] = Some(Ok(JobOutcome {
                    status,
                    console,
                    hung_boots: self.given_up[number],
                    machine: self.machine,
                    base,
                    _scratch: Arc::clone(scratch),
                }));
            }
            _ => {
                let attempts = self.jobs[number].attempts;
                self.given_up[number] += 1;
                self.reporter.note(&format!(
                    "a guest hung or crashed: attempt {} of {attempts}",
                    self.given_up[number]
                ));
                if self.given_up[number] >= attempts {
                    self.ends[number] = Some(Err(Error::Hung {
                        what: "the machine or a guest on it",
                        attempts,
                    }));
                }
            }
        }
    }

    /// Shows a line of the console, and keeps it in `console`.
    fn show(&self, text: &str, console: &mut String) {
        console.push_str(text);
        console.push('\n');
        match text.strip_prefix("progress: ") {
            Some(progress) => self.reporter.progress(progress),
            None => self.reporter.console(text),
        }
    }

    /// Runs a job on this machine.
    fn run_direct(&mut self, number: usize, scratch: &Arc<ScratchDir>) -> Result<()> {
        let job = &self.jobs[number];
        let base = directory(scratch, 0);
        write_files(job, &base, self.machine, &mut BTreeMap::new())?;
        let mut command = Command::new("sh");
        command
            .args(["-c", "exec sh \"$BASE/run.sh\" 2>&1"])
            .env("BASE", &base)
            .env("IMAGES", &self.images.directory)
            .env("PATH", search_path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut shell = LeashedChild::spawn(&mut command, true)?;
        let start = Instant::now();
        let mut console = String::new();
        let status = shell.watch(|text| {
            if let Some(text) = text {
                self.show(text, &mut console);
            }
            if start.elapsed() > job.limit {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        });
        stop::check()?;
        let Some(status) = status.at("wait for", "sh")? else {
            self.ends[number] = Some(Err(timed_out(job)));
            return Ok(());
        };
        match status.code() {
            Some(code) => self.end_attempt(number, Some(code), console, base, scratch),
            None => {
                let reason = format!("the job's shell was killed: {status}");
                self.ends[number] = Some(Err(Error::Unusable(reason)));
            }
        }
        Ok(())
    }

    /// Runs the job `first`, and after it those that can share its machine, in QEMU's emulation,
    /// until all have ended or one hangs or crashes.
    fn run_nested(&mut self, first: usize, scratch: &Arc<ScratchDir>) -> Result<()> {
        let leader = &self.jobs[first];
        let batch: Vec<usize> = (first..self.jobs.len())
            .filter(|&number| self.ends[number].is_none())
            .filter(|&number| number == first || leader.shares_machine_with(&self.jobs[number]))
            .collect();
        let jobs: Vec<_> = batch.iter().map(|&number| &self.jobs[number]).collect();
        let mut programs = BTreeMap::new();
        for (place, job) in jobs.iter().enumerate() {
            let base = directory(scratch, place);
            write_files(job, &base, self.machine, &mut programs)?;
        }
        // One nested machine at a time: two would starve each other.
        let _session = self.cache.lock("session", self.reporter)?;
        let disk = images_disk(self.cache, &self.images, self.reporter)?;
        let system = match leader.kernel {
            Some(kernel) => GuestImages::ensure_newer(self.cache, kernel, self.reporter)?,
            None => self.images.clone(),
        };
        self.reporter.progress("booting the outer machine");
        if leader.terminal {
            self.reporter
                .note("booting the outer machine, which takes some seconds");
            self.reporter.clear();
        }
        // A job's disks are gone when the next one begins.
        let largest = jobs.iter().map(|job| job.disk_mebibytes).max();
        let mebibytes = largest.unwrap_or(0) + FILES_MEBIBYTES * jobs.len() as u64;
        let work = scratch.path().join("work.ext4");
        make_ext4(&scratch.path().join(JOBS), &work, mebibytes)?;
        let boot = NestedBoot {
            kernel: &system.path("vmlinuz"),
            initramfs: &system.path("initramfs-outer.cpio"),
            images: &disk,
            work: &work,
            pulse: &scratch.path().join("pulse"),
            limits: &jobs.iter().map(|job| job.limit).collect::<Vec<_>>(),
            disks: &leader.disks,
            network: leader.network.as_deref(),
            terminal: leader.terminal,
        };
        let mut consoles = vec![String::new(); batch.len()];
        let end = boot.run(|place, text| self.show(text, &mut consoles[place]))?;
        if let BootEnd::GivenUp = end {
            return Err(Error::Unusable(
                "Ctrl-A x: the machine that QEMU emulates around the guest went on, and was \
                 killed; the guest's disks are as after a power cut"
                    .to_owned(),
            ));
        }
        if consoles.iter().any(|console| console.contains(NO_KVM)) {
            return Err(Error::Unusable(format!(
                "{NO_KVM}: QEMU's processor model has no SVM"
            )));
        }
        replay_journal(&work);
        for ((place, number), mut console) in batch.into_iter().enumerate().zip(consoles) {
            let base = directory(scratch, place);
            let status = match take_results(&work, place, &base)? {
                Ok(status) => Some(status),
                // The job that ran when the machine ended.
                Err(_) if matches!(end, BootEnd::TimedOut) => {
                    self.ends[number] = Some(Err(timed_out(&self.jobs[number])));
                    break;
                }
                Err(reason) => {
                    let line = format!("outer: hung or crashed: {reason}");
                    self.show(&line, &mut console);
                    None
                }
            };
            self.end_attempt(number, status, console, base, scratch);
            if status.is_none_or(|status| status == TRY_AGAIN) {
                // Those after it have not begun.
                break;
            }
        }
        Ok(())
    }
}

fn timed_out(job: &GuestJob) -> Error {
    Error::TimedOut {
        seconds: job.limit.as_secs(),
    }
}

/// The folder of a machine's jobs.
const JOBS: &str = "jobs";

/// The directory `$BASE` of the job at this place among those of its machine.
fn directory(scratch: &ScratchDir, place: usize) -> PathBuf {
    scratch.path().join(JOBS).join(format!("{place:02}"))
}

/// Takes the results of the job at `place` and its status from the machine's disk. `Ok(Err)`: it has
/// not ended there.
fn take_results(
    work: &Path,
    place: usize,
    base: &Path,
) -> Result<std::result::Result<i32, String>> {
    match extract(work, &format!("{place:02}/status"), base) {
        Err(Error::Unusable(reason)) => return Ok(Err(reason)),
        other => other?,
    }
    // debugfs creates the directory, and fails if it exists.
    let results = base.join("results");
    fs::remove_dir(&results).at("remove", &results)?;
    extract(work, &format!("{place:02}/results"), base)?;
    let file = base.join("status");
    let status = fs::read_to_string(&file).at("read", &file)?;
    match status.trim().parse() {
        Ok(status) => Ok(Ok(status)),
        Err(_) => Err(Error::Unusable(format!(
            "the nested machine's exit status is not a number: {status:?}"
        ))),
    }
}

/// Writes the job's files below `base`. The layout is the same on both machines. `programs`: where
/// other jobs of the same nested machine have the programs.
fn write_files(
    job: &GuestJob,
    base: &Path,
    machine: Machine,
    programs: &mut BTreeMap<PathBuf, PathBuf>,
) -> Result<()> {
    for directory in ["job", "files", "results", "bin"] {
        let path = base.join(directory);
        fs::create_dir_all(&path).at("create", &path)?;
    }
    let write = |name: &str, content: &[u8], mode: u32| {
        let path = base.join(name);
        fs::write(&path, content).at("write", &path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).at("set the mode of", &path)
    };
    let kind = match machine {
        Machine::Direct => "direct",
        Machine::Nested => "nested",
    };
    write("machine", kind.as_bytes(), 0o644)?;
    write("run.sh", RUN.as_bytes(), 0o644)?;
    write("guest-functions.sh", GUEST_FUNCTIONS.as_bytes(), 0o644)?;
    write("job/job.sh", job.script.as_bytes(), 0o644)?;
    for (name, content) in &job.files {
        write(&format!("job/{name}"), content, 0o644)?;
    }
    let walvisor = job.walvisor.canonicalize().at("find", &job.walvisor)?;
    let start = match machine {
        // The guest must not outlive the job's shell.
        Machine::Direct => format!(
            "exec setpriv --pdeathsig KILL '{}' \"$@\"",
            walvisor.display()
        ),
        Machine::Nested => {
            let program = base.join("program");
            fs::create_dir(&program).at("create", &program)?;
            match programs.get(&walvisor) {
                Some(copied) => link_files(copied, &program)?,
                None => {
                    copy_with_libraries(&walvisor, &program)?;
                    programs.insert(walvisor, program);
                }
            }
            // The program brings its libraries, because the machine's C library may be older
            // than the one that it was built with.
            "at=$BASE/program; exec \"$at/loader\" --library-path \"$at\" \"$at/walvisor\" \"$@\""
                .to_owned()
        }
    };
    let start = format!("#!/bin/sh\n{start}\n");
    write("bin/walvisor", start.as_bytes(), 0o755)
}

/// Gives the files in `from` a second name in the directory `to`.
fn link_files(from: &Path, to: &Path) -> Result<()> {
    for entry in fs::read_dir(from).at("read", from)? {
        let entry = entry.at("read", from)?;
        fs::hard_link(entry.path(), to.join(entry.file_name())).at("link", entry.path())?;
    }
    Ok(())
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
