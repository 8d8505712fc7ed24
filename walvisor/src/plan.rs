//! What a process is to serve: its disks, and the logs that they share. Command line,
//! configuration file and control requests all become a plan, which is checked once.
//!
//! ```text
//!   --disk, --config, SIGHUP, add-disk ─▶ Plan::new ─▶ memory, files, pushes, Landlock, OpenLogs, messages
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use walvisor_archive::ArchiveUrl;
use walvisor_devices::backend::MemoryBudget;
use walvisor_storage::{CommitWait, ReplicaOptions, StoreOptions};

use crate::archiving::LogToArchive;
use crate::disk_spec::{DiskCache, DiskSpec, LogOptions};
use crate::machine_memory::machine_memory;

/// How long closing a log may copy it to the images by default.
const DEFAULT_CLOSE_TIME: Duration = Duration::from_secs(10);
/// What a log takes beside its index and its checksums, in bytes: records on their way to the
/// medium.
const LOG_BYTES: u64 = 4 << 20;
/// What the checksums of a log of the usual size take. The log reserves it.
const USUAL_CHECKSUMS: u64 = 2 << 20;

/// Disks that can be served together, and their logs.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The disks.
    pub disks: Vec<DiskSpec>,
    /// The logs that are opened with them, in the order of the first disk of each. A log at which
    /// disks only look is none of them.
    pub logs: Vec<LogPlan>,
}

/// A log of a [`Plan`].
#[derive(Clone, Debug)]
pub struct LogPlan {
    /// Its directory, as its first disk names it.
    pub directory: PathBuf,
    /// Its directory, with links resolved.
    pub place: PathBuf,
    /// Its disks, by their places in the plan.
    pub disks: Vec<usize>,
    /// Whether all its disks are read-only. Then nothing is written, and if there is no log the
    /// images are served without one.
    pub read_only: bool,
    /// The options that its disks set.
    pub options: LogOptions,
}

impl Plan {
    /// Plans to serve disks together. Nothing is opened.
    ///
    /// # Errors
    /// One line that names the disks: if they contradict each other, or don't fit this machine.
    pub fn new(disks: &[DiskSpec]) -> Result<Self, String> {
        check_memory(disks)?;
        let mut logs: Vec<LogPlan> = Vec::new();
        let written = |(_, spec): &(usize, &DiskSpec)| spec.at.is_none();
        for (index, spec) in disks.iter().enumerate().filter(written) {
            let Some(directory) = spec.log_directory() else {
                continue;
            };
            let place = real_log(&directory);
            let known = logs.iter().position(|log| log.place == place);
            let known = known.unwrap_or_else(|| {
                logs.push(LogPlan {
                    directory,
                    place,
                    disks: Vec::new(),
                    read_only: true,
                    options: LogOptions::default(),
                });
                logs.len() - 1
            });
            logs[known].join(index, spec)?;
        }
        let plan = Self {
            disks: disks.to_vec(),
            logs,
        };
        plan.check_looks()?;
        plan.check_archives()?;
        Ok(plan)
    }

    /// Refuses looks at logs that other disks write.
    fn check_looks(&self) -> Result<(), String> {
        let mut looks = self.disks.iter().filter(|spec| spec.at.is_some());
        let written = |log: &Path| {
            let place = real_log(log);
            self.logs.iter().any(|log| log.place == place)
        };
        let clash = looks.find(|spec| spec.log_directory().is_some_and(|log| written(&log)));
        clash.map_or(Ok(()), |spec| {
            Err(format!(
                "disk '{}' has at=, and another disk writes to the same log: give at= to all disks \
                 of that log, or to none",
                spec.name()
            ))
        })
    }

    /// Refuses archives that can't be had.
    fn check_archives(&self) -> Result<(), String> {
        let mut archives: Vec<&String> = Vec::new();
        for log in &self.logs {
            let (options, directory) = (&log.options, log.directory.display());
            let Some(archive) = &options.archive else {
                let depends = [
                    (options.archive_interval.is_some(), "archive-interval"),
                    (options.archive_sync == Some(true), "archive-sync"),
                    (options.archive_limit.is_some(), "archive-limit"),
                ];
                let depends = depends.into_iter().find(|(given, _)| *given);
                if let Some((_, key)) = depends {
                    return Err(format!("{key}= needs an archive: give archive=URL too"));
                }
                continue;
            };
            let is_unsafe = |spec: &&DiskSpec| spec.cache == DiskCache::Unsafe;
            let mut disks = log.disks.iter().map(|disk| &self.disks[*disk]);
            if options.archive_sync == Some(true)
                && let Some(spec) = disks.find(is_unsafe)
            {
                return Err(format!(
                    "disk '{}' has cache=unsafe, so none of its FLUSHes waits for the log, and the \
                     log {directory} has archive-sync=on: leave one of them out",
                    spec.name()
                ));
            }
            let url = archive.parse::<ArchiveUrl>();
            url.map_err(|error| format!("archive=: {error}"))?;
            if log.read_only {
                return Err(format!(
                    "archive= is for a log that is written, and all disks on the log {directory} \
                     are read-only: leave it out"
                ));
            }
            if archives.contains(&archive) {
                return Err(format!(
                    "the archive of the log {directory} is that of another log too: give each log \
                     an archive of its own"
                ));
            }
            archives.push(archive);
        }
        Ok(())
    }

    /// The logs that are to be archived.
    pub fn archives(&self) -> Vec<LogToArchive> {
        let archived = |log: &LogPlan| {
            Some(LogToArchive {
                log: log.directory.clone(),
                url: log.options.archive.clone()?,
                interval: log.options.archive_interval,
                waits: ReplicaOptions {
                    sync: log.options.archive_sync == Some(true),
                    limit: log.options.archive_limit,
                },
            })
        };
        self.logs.iter().filter_map(archived).collect()
    }

    /// The store's options for a log. What history it keeps is set once it is open.
    pub fn store_options(&self, log: &LogPlan) -> StoreOptions {
        let options = &log.options;
        let usual = || usual_index(MemoryBudget::of_process().limit(), self.logs.len());
        StoreOptions {
            on_full: options.on_full.unwrap_or_default(),
            spill_limit: options.spill_limit,
            commit_wait: CommitWait {
                longest: options.commit_wait,
                count: options.commit_count,
            },
            close_time: Some(options.close_time.unwrap_or(DEFAULT_CLOSE_TIME)),
            index_memory: options.index_memory.unwrap_or_else(usual),
            await_replica: options.archive_limit.is_some(),
            ..StoreOptions::default()
        }
    }

    /// What the disks and logs take of a process with a memory limit of `limit` bytes.
    pub fn memory(&self, limit: u64) -> u64 {
        let usual = usual_index(Some(limit), self.logs.len());
        let logs = self
            .logs
            .iter()
            .map(|log| memory_of_log(log.options.index_memory.unwrap_or(usual)) + USUAL_CHECKSUMS);
        let written = self.disks.iter().filter(|spec| !spec.read_only);
        let all = logs.chain(written.filter_map(|spec| spec.size));
        all.fold(0, u64::saturating_add)
    }
}

impl LogPlan {
    /// Adds a disk.
    ///
    /// # Errors
    /// If the others set an option of the log to another value.
    fn join(&mut self, index: usize, spec: &DiskSpec) -> Result<(), String> {
        let joined = self.options.join(&spec.log_options);
        joined.map_err(|differ| {
            format!(
                "the disks on the log {} disagree about {}, which belongs to the log: {} and {}: \
                 give it once",
                self.directory.display(),
                differ.key,
                differ.values[0],
                differ.values[1]
            )
        })?;
        self.disks.push(index);
        self.read_only &= spec.read_only;
        Ok(())
    }
}

/// What a log with an index of so many bytes may take of the process's memory. Looks may take as
/// much as the index.
pub fn memory_of_log(index: u64) -> u64 {
    index.saturating_mul(2).saturating_add(LOG_BYTES)
}

/// The memory of an index that no disk of its log limits. Of a process with a memory limit, the
/// indexes get a twelfth together.
pub fn usual_index(limit: Option<u64>, logs: usize) -> u64 {
    let most = StoreOptions::default().index_memory;
    let share = limit.map_or(most, |limit| limit / 12 / logs.max(1) as u64);
    share.clamp(1 << 20, most)
}

/// The longest time that closing a log of these disks copies.
pub fn longest_close_time<'a>(specs: impl Iterator<Item = &'a DiskSpec>) -> Duration {
    let times = specs.map(|spec| spec.log_options.close_time.unwrap_or(DEFAULT_CLOSE_TIME));
    times.max().unwrap_or_default()
}

/// Refuses RAM disks that are larger than this machine's memory and swap together.
fn check_memory(specs: &[DiskSpec]) -> Result<(), String> {
    let most = machine_memory();
    let sizes = specs.iter().filter_map(|spec| spec.size);
    let all = sizes.fold(0, u64::saturating_add);
    if all > most {
        return Err(format!(
            "backend=ram: {all} bytes, and this machine has {most} bytes of memory and swap: \
             give a smaller size=, or an image"
        ));
    }
    Ok(())
}

/// Where the directories of logs are, by the path that a disk has named. To look again would wait
/// for a file system that does not answer.
static LOGS: Mutex<BTreeMap<PathBuf, PathBuf>> = Mutex::new(BTreeMap::new());

fn known_logs() -> MutexGuard<'static, BTreeMap<PathBuf, PathBuf>> {
    LOGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The directory of a log, with links resolved as they were when a disk last named it.
pub fn real_log(log: &Path) -> PathBuf {
    let known = known_logs().get(log).cloned();
    // Looks without the lock.
    known.unwrap_or_else(|| look_for_log(log))
}

/// Resolves the directory of a log that a disk names.
pub(crate) fn look_for_log(log: &Path) -> PathBuf {
    let real = real_path(log);
    known_logs().insert(log.to_owned(), real.clone());
    real
}

/// A canonical path. The last part need not exist.
pub(crate) fn real_path(path: &Path) -> PathBuf {
    if let Ok(real) = path.canonicalize() {
        return real;
    }
    let parent = match path.parent() {
        Some(parent) if parent != Path::new("") => parent,
        _ => Path::new("."),
    };
    match (parent.canonicalize(), path.file_name()) {
        (Ok(parent), Some(name)) => parent.join(name),
        _ => path.to_owned(),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::disk_spec::DiskCommand;

    pub(crate) fn specs(texts: &[&str]) -> Vec<DiskSpec> {
        texts
            .iter()
            .map(|text| DiskSpec::parse(text, DiskCommand::Run).unwrap())
            .collect()
    }

    #[test]
    fn disks_that_name_one_log_in_different_ways_share_it() {
        let specs = specs(&[
            "path=a.img,log=logs",
            "path=b.img",
            "backend=ram,size=1M",
            "path=c.img,log=./logs",
            "path=d.img,log=b.img.wal",
        ]);
        let plan = Plan::new(&specs).unwrap();
        let logs = plan.logs.into_iter().map(|log| (log.directory, log.disks));
        assert_eq!(
            logs.collect::<Vec<_>>(),
            [
                (PathBuf::from("logs"), vec![0, 3]),
                (PathBuf::from("b.img.wal"), vec![1, 4])
            ]
        );
    }

    #[test]
    fn disks_in_memory_must_fit_the_machine() {
        for size in [
            "8E",
            "15E",
            "7E",
            "9223372036854775296",
            "18446744073709551104",
            "1P",
        ] {
            let readonly = format!("backend=ram,size={size},readonly=on");
            for text in [format!("backend=ram,size={size}"), readonly] {
                let error = Plan::new(&specs(&[&text])).unwrap_err();
                assert!(error.contains("give a smaller size="), "{text}: {error}");
            }
        }
        let error = Plan::new(&specs(&["backend=ram,size=15E", "backend=ram,size=1E"]));
        assert!(error.is_err(), "together");
        Plan::new(&specs(&["backend=ram,size=512"])).unwrap();
    }

    #[test]
    fn a_log_gets_the_options_that_its_disks_agree_on() {
        let agreed = specs(&[
            "path=a,log=l,commit-wait-usec=5",
            "path=b,log=l,commit-wait-count=2,close-seconds=0",
            "path=c,log=l,commit-wait-usec=5",
            "path=d,commit-wait-usec=7,index-memory=3M",
        ]);
        let plan = Plan::new(&agreed).unwrap();
        let [options, alone] = [0, 1].map(|log| plan.store_options(&plan.logs[log]));
        let wait = options.commit_wait;
        assert_eq!(
            (wait.longest, wait.count),
            (Some(Duration::from_micros(5)), Some(2))
        );
        assert_eq!(options.close_time, Some(Duration::ZERO));
        assert_eq!(alone.close_time, Some(Duration::from_secs(10)));
        assert_eq!(
            (options.index_memory, alone.index_memory),
            (64 << 20, 3 << 20)
        );
        for (key, unit) in [
            ("commit-wait-usec", ""),
            ("commit-wait-count", ""),
            ("close-seconds", ""),
            ("index-memory", "M"),
            ("spill-limit", "M"),
            ("retain", "h"),
            ("archive", ""),
            ("archive-interval", "s"),
            ("archive-limit", "M"),
        ] {
            let two = [1, 2].map(|value| format!("path=disk-{value},log=l,{key}={value}{unit}"));
            let error = Plan::new(&specs(&[&two[0], &two[1]])).unwrap_err();
            let begin = format!("the disks on the log l disagree about {key}, ");
            assert!(error.starts_with(&begin), "{error}");
        }
    }

    #[test]
    fn each_log_has_one_archive_whichever_of_its_disks_names_it() {
        let some = specs(&[
            "path=a,log=l",
            "path=b,log=l,archive=s3://bucket/b,archive-interval=5s",
            "path=d,log=l,archive-sync=on",
            "path=c,log=l,archive-limit=1G",
            "path=e",
        ]);
        let target = LogToArchive {
            log: "l".into(),
            url: "s3://bucket/b".to_owned(),
            interval: Some(Duration::from_secs(5)),
            waits: ReplicaOptions {
                sync: true,
                limit: Some(1 << 30),
            },
        };
        assert_eq!(Plan::new(&some).unwrap().archives(), [target]);
        for (text, part) in [
            (
                "path=a,archive=http://x",
                "archive=: 'http://x' is not the address",
            ),
            (
                "path=a,archive-interval=5s",
                "archive-interval= needs an archive: give archive=URL too",
            ),
            (
                "path=a,cache=unsafe,archive=file:///c,archive-sync=on",
                "disk 'a' has cache=unsafe, so none of its FLUSHes waits",
            ),
            (
                "path=a,archive-sync=on",
                "archive-sync= needs an archive: give archive=URL too",
            ),
            (
                "path=a,archive-limit=1G",
                "archive-limit= needs an archive: give archive=URL too",
            ),
            (
                "path=a,readonly=on,archive=file:///c",
                "all disks on the log a.wal are read-only",
            ),
        ] {
            let error = Plan::new(&specs(&[text])).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        let two = ["path=a,archive=s3://b/c", "path=d,archive=s3://b/c"];
        let error = Plan::new(&specs(&two)).unwrap_err();
        assert!(
            error.contains("the log d.wal is that of another log too"),
            "{error}"
        );
    }

    #[test]
    fn a_look_at_a_log_that_another_disk_writes_is_refused() {
        let error = Plan::new(&specs(&["path=a,log=l", "path=b,log=./l,at=cid:1"])).unwrap_err();
        assert!(error.starts_with("disk 'b' has at=, and"), "{error}");
        Plan::new(&specs(&["path=a,at=cid:1", "path=a,at=cid:2", "path=c"])).unwrap();
    }
}
