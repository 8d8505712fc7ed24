//! Jobs: shell scripts that run `walvisor run` on a machine whose KVM can run Linux.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::slice;
use std::sync::Arc;
use std::time::Duration;

use crate::cache::Cache;
use crate::error::{FileContext, Result};
use crate::images::NewerKernel;
use crate::machine::Machine;
use crate::reporter::Reporter;
use crate::scratch::ScratchDir;
use crate::session::Session;

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
        let mut ends = Self::run_all(slice::from_ref(self), machine, cache, reporter)?;
        ends.remove(0)
    }

    /// Runs `jobs` as [`run_on`](Self::run_on) does, one after the other. Nested jobs share a
    /// machine, which boots once for each kernel, unless they need devices of their own. If a job
    /// hangs or crashes the machine, those that have ended are kept, and it is retried on a new
    /// machine, together with those after it. Returns how each job ended.
    ///
    /// # Errors
    /// The images cannot be built, or no machine can be started.
    pub fn run_all(
        jobs: &[Self],
        machine: Machine,
        cache: &Cache,
        reporter: &Reporter,
    ) -> Result<Vec<Result<JobOutcome>>> {
        Session::new(jobs, machine, cache, reporter)?.run()
    }

    /// Whether two jobs can share a nested machine.
    pub(crate) fn shares_machine_with(&self, other: &Self) -> bool {
        let [first, second] = [self, other].map(|job| {
            let own = !job.disks.is_empty() || job.network.is_some() || job.terminal;
            (!own).then_some(job.kernel)
        });
        first.is_some() && first == second
    }
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
    /// The directory that was `$BASE`, and the one that it is in.
    pub(crate) base: PathBuf,
    pub(crate) _scratch: Arc<ScratchDir>,
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

    /// The directory that was `$RESULTS`. It is removed when the outcomes of all jobs that ran on
    /// that machine are dropped.
    #[must_use]
    pub fn results(&self) -> PathBuf {
        self.base.join("results")
    }
}
