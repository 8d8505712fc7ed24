//! Opens the disks of a command line. Disks that name the same log directory share the log. Closes
//! the logs at the end.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use walvisor_archive::ArchiveUrl;
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::backend::{Backend, MemoryBudget, MemoryReservation, SECTOR_SIZE};
use walvisor_devices::block::BlockConfig;
use walvisor_storage::{
    CommitWait, Disk, DiskOptions, Image, Look, Point, RawCache, RawDisk, ReplicaOptions,
    Retention, Store, StoreOptions, has_log, scratch_file,
};
use walvisor_vmm::disk::{DeviceKind, OpenDisk};

use crate::archiving::LogToArchive;
use crate::disk_spec::{
    BackendKind, DiskCache, DiskCommand, DiskSpec, LOG_KEYS, MAX_QUEUES, MAX_SERIAL_BYTES,
};
use crate::machine_memory::machine_memory;
use crate::point::refuse_retention;
use crate::progress::with_bar;

/// How long closing a log may copy it to the images by default.
pub const DEFAULT_CLOSE_TIME: Duration = Duration::from_secs(10);

/// The logs of a process's disks. Dropping them closes them too, but ignores errors.
#[derive(Default)]
pub struct OpenLogs {
    logs: Vec<OpenLog>,
    /// The directories of logs whose requests wait for their archives, with links resolved. If one
    /// is closed and opened again, they would not.
    awaits_archive: Vec<PathBuf>,
}

/// A log, which has at least one disk.
struct OpenLog {
    /// Its directory, with links resolved.
    directory: PathBuf,
    store: Store,
    /// What the log may take of the process's memory.
    _memory: Option<MemoryReservation>,
}

/// Where the data of a removed disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemovedDisk {
    /// All of it is in the image.
    Complete,
    /// The newest records are in the log, which keeps history.
    InLog,
    /// What the image lacks is in a file beside the log.
    Kept,
    /// A restore has not fetched all of the image.
    Unfetched,
}

impl OpenLogs {
    /// Closes all logs in parallel. Each is copied to the base images, as far as its close time
    /// allows. Nobody may use the disks any more.
    ///
    /// # Errors
    /// The first log's that cannot be closed. The other logs are closed all the same.
    pub fn close(self) -> Result<(), walvisor_storage::Error> {
        let stores = self.logs.into_iter().map(|log| log.store);
        Store::close_all(stores.collect())
    }

    /// Each log on its own, with its directory.
    pub fn split(self) -> impl Iterator<Item = (PathBuf, Self)> {
        let (logs, awaits_archive) = (self.logs.into_iter(), self.awaits_archive);
        logs.map(move |log| {
            let directory = log.directory.clone();
            let one = Self {
                logs: vec![log],
                awaits_archive: awaits_archive.clone(),
            };
            (directory, one)
        })
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.logs.is_empty()
    }

    /// The directory of the log that opens with a disk, with links resolved. `None`: the disk has
    /// no log, or is a look at the past.
    pub fn directory_of(spec: &DiskSpec) -> Option<PathBuf> {
        let directory = spec.log_directory().filter(|_| spec.at.is_none())?;
        Some(real_log(&directory))
    }

    /// Notes that requests to the log in this directory wait for its archive.
    pub fn note_awaits_archive(&mut self, directory: &Path) {
        self.awaits_archive.push(real_path(directory));
    }

    /// A disk of the log in this directory.
    pub fn disk_of(&self, directory: &Path) -> Option<&Disk> {
        let directory = real_path(directory);
        let mut logs = self.logs.iter();
        let log = logs.find(|log| log.directory == directory)?;
        log.store.disks().first()
    }

    fn log_of(&self, spec: &DiskSpec) -> Option<usize> {
        let directory = Self::directory_of(spec)?;
        let mut logs = self.logs.iter();
        logs.position(|log| log.directory == directory)
    }

    /// Opens another disk. It joins its log if that is open, and opens it otherwise.
    ///
    /// # Errors
    /// One line: if the disk or its log cannot be opened, or the disk sets options of a log that is
    /// already open.
    pub fn add(&mut self, spec: &DiskSpec, cpus: u8) -> Result<OpenDisk, String> {
        let one = std::slice::from_ref(spec);
        let failed = |error: walvisor_storage::Error| error.to_string();
        let Some(place) = self.log_of(spec) else {
            if spec.archive.is_some() {
                return Err(format!(
                    "disk '{}': archive= starts a process, which only the start of this one may: \
                     leave archive= out, and run 'walvisor archive push'; or start this process \
                     again with the disk",
                    spec.name()
                ));
            }
            let directory = Self::directory_of(spec);
            if directory.is_some_and(|directory| self.awaits_archive.contains(&directory)) {
                return Err(format!(
                    "disk '{}': its log was closed when its last disk was removed, and can wait \
                     for its archive only from the start on: start this process again with the \
                     disk",
                    spec.name()
                ));
            }
            check_free_memory(spec)?;
            let scratch = make_files(one).map_err(failed)?;
            let mut disks = self.open(one, cpus, scratch).map_err(failed)?;
            if let Err(why) = self.keep(one) {
                drop(self.logs.pop());
                return Err(why);
            }
            return disks.pop().ok_or_else(|| "no disk was opened".to_owned());
        };
        if let Some(key) = log_key(spec) {
            return Err(format!(
                "disk '{}': {key}= belongs to its log, which is open already: leave {key}= out",
                spec.name()
            ));
        }
        let store = &mut self.logs[place].store;
        let disk = store.add_disk(&disk_options(spec)).map_err(failed)?;
        Ok(open_disk(spec, Arc::new(disk.clone()), cpus))
    }

    /// Sets how much history the logs of these disks keep, where a disk says so.
    ///
    /// # Errors
    /// One line: a log would give up history that it keeps.
    pub fn keep(&self, specs: &[DiskSpec]) -> Result<(), String> {
        for spec in specs.iter().filter(|spec| !spec.read_only) {
            let (Some(retain), Some(place)) = (spec.retain, self.log_of(spec)) else {
                continue;
            };
            let Some(disk) = self.logs[place].store.disks().first() else {
                continue;
            };
            if disk.gives_up_history(retain) {
                let members = disk.members().map_err(|error| error.to_string())?;
                let paths = members.iter().map(|(_, path)| path.display().to_string());
                return Err(format!(
                    "disk '{}': {}; open it without retain=, then 'walvisor disk retain DISK \
                     {retain} --give-up-history'",
                    spec.name(),
                    refuse_retention(&disk.history(), retain, paths.collect())
                ));
            }
            let set = disk.set_retain(retain);
            set.map_err(|error| format!("disk '{}': {error}", spec.name()))?;
        }
        Ok(())
    }

    /// Opens a disk of an open log again, after it could not be [removed](Self::remove).
    pub fn reopen(&mut self, spec: &DiskSpec, cpus: u8) -> Option<OpenDisk> {
        let place = self.log_of(spec)?;
        let mut disks = self.logs[place].store.disks().iter();
        let disk = disks.find(|disk| Some(disk.path()) == spec.path.as_deref())?;
        Some(open_disk(spec, Arc::new(disk.clone()), cpus))
    }

    /// Closes a disk that nobody uses any more. The last disk of a log closes the log too.
    ///
    /// # Errors
    /// If the disk's records cannot be copied to its image, or with `keep_records` to a file beside
    /// the log. The disk then stays open.
    pub fn remove(
        &mut self,
        spec: &DiskSpec,
        keep_records: bool,
    ) -> Result<RemovedDisk, walvisor_storage::Error> {
        let (Some(place), Some(path)) = (self.log_of(spec), &spec.path) else {
            return Ok(RemovedDisk::Complete);
        };
        let store = &mut self.logs[place].store;
        let keeps =
            |disk: &Disk| disk.retain() != Retention::Nothing || !disk.snapshots().is_empty();
        let keeps_history = store.disks().iter().any(keeps);
        let mut removed = store.disks().iter().filter(|disk| disk.path() == path);
        let unfetched = removed.any(|disk| disk.unfetched() > 0);
        if keep_records {
            store.remove_disk_keeping_records(path)?;
        } else {
            store.remove_disk(path)?;
        }
        if store.disks().is_empty() {
            drop(self.logs.remove(place));
        }
        Ok(if keeps_history {
            RemovedDisk::InLog
        } else if keep_records {
            RemovedDisk::Kept
        } else if unfetched {
            RemovedDisk::Unfetched
        } else {
            RemovedDisk::Complete
        })
    }

    /// See [`open`].
    fn open(
        &mut self,
        specs: &[DiskSpec],
        cpus: u8,
        mut scratch: ScratchFiles,
    ) -> Result<Vec<OpenDisk>, walvisor_storage::Error> {
        let mut backends: HashMap<usize, Arc<dyn Backend>> = HashMap::new();
        for (log, members) in group_by_log(specs) {
            let members_options = members.iter().map(|member| disk_options(&specs[*member]));
            let detached = members.iter().flat_map(|member| &specs[*member].detached);
            let options: Vec<_> = members_options
                .chain(detached.map(DiskOptions::detached))
                .collect();
            // `check` has already refused disks that disagree.
            let mut store_options = log_options(specs, &members).unwrap_or_default();
            // Set once the log is open and says what that would lose.
            store_options.retain = None;
            let memory =
                MemoryBudget::of_process().reserve(memory_of_log(store_options.index_memory));
            let mut read = 0;
            let store = if reads_only(specs, &members) {
                if !has_log(&log) {
                    continue;
                }
                Store::open_read_only(&log, &options, &store_options)?
            } else {
                with_bar("recovering", |progress| {
                    Store::open_with_progress(
                        &log,
                        &options,
                        &store_options,
                        &mut |passed, total| {
                            read = total;
                            progress(passed, total);
                        },
                    )
                })?
            };
            if read > 0 {
                let log = log.display();
                tracing::info!("log {log}: recovered from {read} bytes of segments");
            }
            assert_eq!(
                members.len(),
                store.disks().len(),
                "a log opens all its disks, in order"
            );
            for (member, disk) in members.iter().zip(store.disks()) {
                backends.insert(*member, Arc::new(disk.clone()));
            }
            let directory = real_log(&log);
            self.logs.push(OpenLog {
                directory,
                store,
                _memory: memory,
            });
        }
        let disks = specs.iter().enumerate().map(|(index, spec)| {
            let backend = match (backends.remove(&index), spec.at) {
                (Some(backend), _) => backend,
                (None, Some(point)) => look(spec, point, scratch.0.remove(&index))?,
                (None, None) => open_without_log(spec)?,
            };
            Ok(open_disk(spec, backend, cpus))
        });
        disks.collect()
    }
}

/// Opens disks for a VM with `cpus` vCPUs. `scratch`: what [`make_files`] returned for them.
/// Returns the disks in the same order, and their logs.
///
/// # Errors
/// If a disk or its log cannot be opened. Logs that are open by then are closed again.
pub fn open(
    specs: &[DiskSpec],
    cpus: u8,
    scratch: ScratchFiles,
) -> Result<(Vec<OpenDisk>, OpenLogs), walvisor_storage::Error> {
    raise_descriptor_limit();
    let mut logs = OpenLogs::default();
    let disks = logs.open(specs, cpus, scratch)?;
    Ok((disks, logs))
}

/// Raises the limit on descriptors. A log opens each segment twice, with and without the page
/// cache. A vhost-user front-end may bring hundreds more, and must not use up those that the logs
/// need.
fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit {
        current: limit.maximum,
        ..limit
    };
    if let Err(error) = setrlimit(Resource::Nofile, raised) {
        tracing::warn!(
            "the limit on open files stays at {:?}: {error}",
            limit.current
        );
    }
}

/// Rings for what comes and goes: clients, looks, exports and disks that are added.
const SPARE_RINGS: usize = 64;
/// Most rings of a process; each takes about 30 KiB of the kernel's memory.
const MOST_RINGS: usize = 512;

/// Makes the rings with which these disks are read and written, before the process gives up the
/// right to make more.
pub fn prepare_rings<'a>(disks: impl IntoIterator<Item = &'a OpenDisk>) {
    let queues = disks
        .into_iter()
        .map(|disk| usize::from(disk.device.queues));
    let rings = queues.sum::<usize>() + SPARE_RINGS;
    walvisor_storage::prepare_rings(rings.min(MOST_RINGS));
}

fn open_disk(spec: &DiskSpec, backend: Arc<dyn Backend>, cpus: u8) -> OpenDisk {
    backend.set_weight(spec.limits.weight);
    OpenDisk {
        name: disk_name(spec),
        kind: spec.device,
        backend,
        device: BlockConfig {
            queues: queues(spec, cpus),
            queue_size: spec.queue_size,
            serial: serial(spec),
            block_size: spec.block_size,
            in_order: spec.in_order,
            worker_cpus: spec.worker_cpus.clone(),
            poll: spec.poll,
            answer: spec.answer,
        },
        limits: spec.limits,
    }
}

/// The queues of a disk. Unless its spec says otherwise: one for each vCPU. For a vhost-user disk,
/// whose front-end isn't known yet, one for each CPU of the host: a front-end uses no more queues
/// than its guest has CPUs, and an unused queue costs nothing. For the kernel, as many as threads
/// serve them.
pub fn queues(spec: &DiskSpec, cpus: u8) -> u16 {
    let host = std::thread::available_parallelism().map_or(1, NonZero::get);
    let usual = match spec.door {
        DiskCommand::VhostUser => host.min(MAX_QUEUES.into()) as u16,
        DiskCommand::Ublk => host.div_ceil(2).min(MAX_QUEUES.into()) as u16,
        _ => u16::from(cpus),
    };
    spec.queues.unwrap_or(usual)
}

/// The name of a disk in messages, metrics and control requests.
pub fn disk_name(spec: &DiskSpec) -> String {
    spec.serial.clone().unwrap_or_else(|| spec.name())
}

/// A key of this disk that sets an option of its log.
fn log_key(spec: &DiskSpec) -> Option<&'static str> {
    let given = [
        spec.commit_wait.longest.is_some(),
        spec.commit_wait.count.is_some(),
        spec.close_time.is_some(),
        spec.index_memory.is_some(),
        spec.spill_limit.is_some(),
        spec.retain.is_some(),
        spec.on_full.is_some(),
        spec.archive.is_some(),
        spec.archive_interval.is_some(),
        spec.archive_sync,
        spec.archive_limit.is_some(),
    ];
    let found = LOG_KEYS.into_iter().zip(given).find(|(_, given)| *given);
    found.map(|(key, _)| key)
}

/// The scratch files of disks with `scratch=on`, by index of the disk.
#[derive(Default)]
pub struct ScratchFiles(HashMap<usize, File>);

/// Makes missing logs and scratch files, so that a process that has given up the right to make
/// files can open the disks.
///
/// # Errors
/// If a disk of a new log cannot be opened, or its log or a scratch file cannot be made.
pub fn make_files(specs: &[DiskSpec]) -> Result<ScratchFiles, walvisor_storage::Error> {
    for (log, members) in group_by_log(specs) {
        if reads_only(specs, &members) {
            continue;
        }
        let disks: Vec<_> = members
            .iter()
            .map(|member| disk_options(&specs[*member]))
            .collect();
        Store::make_log(&log, &disks, &StoreOptions::default())?;
    }
    let scratch = specs.iter().enumerate().filter(|(_, spec)| spec.scratch);
    let files = scratch.map(|(index, _)| Ok((index, scratch_file()?)));
    Ok(ScratchFiles(files.collect::<Result<_, _>>()?))
}

/// Whether all these disks of one log are read-only. Then nothing is written, and if there is no
/// log the images are served without one.
fn reads_only(specs: &[DiskSpec], members: &[usize]) -> bool {
    members.iter().all(|member| specs[*member].read_only)
}

/// What a log takes beside its index and its checksums, in bytes: records on their way to the
/// medium.
const LOG_BYTES: u64 = 4 << 20;
/// What the checksums of a log of the usual size take. The log reserves it.
const USUAL_CHECKSUMS: u64 = 2 << 20;

/// What a log with an index of so many bytes may take of the process's memory. Looks may take as
/// much as the index.
fn memory_of_log(index: u64) -> u64 {
    index.saturating_mul(2).saturating_add(LOG_BYTES)
}

/// What these disks take of a process with a memory limit of `limit` bytes: logs, and disks in
/// memory.
pub(crate) fn memory_of(specs: &[DiskSpec], limit: u64) -> u64 {
    let in_memory = specs.iter().filter(|spec| !spec.read_only);
    let in_memory = in_memory.filter_map(|spec| spec.size);
    in_memory.fold(memory_of_logs(specs, limit), u64::saturating_add)
}

fn memory_of_logs(specs: &[DiskSpec], limit: u64) -> u64 {
    let groups = group_by_log(specs);
    let usual = index_memory(Some(limit), groups.len());
    let indexes = groups.iter().map(|(_, members)| {
        let given = members
            .iter()
            .find_map(|member| specs[*member].index_memory);
        memory_of_log(given.unwrap_or(usual)) + USUAL_CHECKSUMS
    });
    indexes.fold(0, u64::saturating_add)
}

/// The memory of an index that no disk of its log limits. Of a process with a memory limit, the
/// indexes get a twelfth together.
fn index_memory(limit: Option<u64>, logs: usize) -> u64 {
    let most = StoreOptions::default().index_memory;
    let share = limit.map_or(most, |limit| limit / 12 / logs.max(1) as u64);
    share.clamp(1 << 20, most)
}

/// Refuses a disk that needs, or whose log needs, more memory than the process has.
fn check_free_memory(spec: &DiskSpec) -> Result<(), String> {
    let budget = MemoryBudget::of_process();
    let Some(limit) = budget.limit() else {
        return Ok(());
    };
    let needed = memory_of(std::slice::from_ref(spec), limit);
    if budget.reserve(needed).is_some() {
        return Ok(());
    }
    let (name, free) = (spec.name(), budget.free());
    let (who, smaller) = match spec.backend {
        BackendKind::Ram => ("it", "it a smaller size="),
        _ => (
            "its log",
            "the disk the log= of another one, or a smaller index-memory=",
        ),
    };
    Err(format!(
        "disk '{name}': {who} needs {needed} bytes of memory, and of this daemon's {limit} bytes \
         {free} are free: give {smaller}, or the daemon a larger --memory-limit"
    ))
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

/// Refuses looks at logs that other disks write.
fn check_looks(specs: &[DiskSpec], groups: &[(PathBuf, Vec<usize>)]) -> Result<(), String> {
    let written: Vec<PathBuf> = groups.iter().map(|(log, _)| real_log(log)).collect();
    let mut looks = specs.iter().filter(|spec| spec.at.is_some());
    let clash = looks.find(|spec| {
        let log = spec.log_directory();
        log.is_some_and(|log| written.contains(&real_log(&log)))
    });
    match clash {
        None => Ok(()),
        Some(spec) => Err(format!(
            "disk '{}' has at=, and another disk writes to the same log: give at= to all disks of \
             that log, or to none",
            spec.name()
        )),
    }
}

/// Refuses disks that contradict each other, or do not fit this machine.
///
/// # Errors
/// One line that names the disks.
pub fn check(specs: &[DiskSpec]) -> Result<(), String> {
    check_memory(specs)?;
    let groups = group_by_log(specs);
    check_looks(specs, &groups)?;
    let mut archives: Vec<String> = Vec::new();
    for (log, members) in &groups {
        let agreed = log_options(specs, members).and(archive_of(specs, log, members));
        let archive = agreed.map_err(|key| {
            let log = log.display();
            format!(
                "the disks on the log {log} disagree about {key}, which belongs to the log: \
                     give it once"
            )
        })?;
        let unsafe_sync = |spec: &&DiskSpec| spec.cache == DiskCache::Unsafe;
        let synchronous = archive.as_ref().is_some_and(|archive| archive.waits.sync);
        let mut of_log = members.iter().map(|member| &specs[*member]);
        if let Some(spec) = of_log.find(unsafe_sync).filter(|_| synchronous) {
            return Err(format!(
                "disk '{}' has cache=unsafe, so none of its FLUSHes waits for the log, and the log \
                 {} has archive-sync=on: leave one of them out",
                spec.name(),
                log.display()
            ));
        }
        let mut with = members.iter().map(|member| &specs[*member]);
        let depends = with.find_map(|spec| {
            let given = [
                (spec.archive_interval.is_some(), "archive-interval"),
                (spec.archive_sync, "archive-sync"),
                (spec.archive_limit.is_some(), "archive-limit"),
            ];
            given
                .into_iter()
                .find(|(given, _)| *given)
                .map(|(_, key)| key)
        });
        if let Some(archive) = archive {
            let url = archive.url.parse::<ArchiveUrl>();
            url.map_err(|error| format!("archive=: {error}"))?;
            let log = log.display();
            if reads_only(specs, members) {
                return Err(format!(
                    "archive= is for a log that is written, and all disks on the log {log} are \
                     read-only: leave it out"
                ));
            }
            if archives.contains(&archive.url) {
                return Err(format!(
                    "the archive of the log {log} is that of another log too: give each log an \
                     archive of its own"
                ));
            }
            archives.push(archive.url);
        } else if let Some(key) = depends {
            return Err(format!("{key}= needs an archive: give archive=URL too"));
        }
    }
    Ok(())
}

/// The logs that are to be archived. `check` has accepted these disks.
pub(crate) fn logs_to_archive(specs: &[DiskSpec]) -> Vec<LogToArchive> {
    let groups = group_by_log(specs).into_iter();
    let archives = groups.map(|(log, members)| archive_of(specs, &log, &members));
    archives
        .filter_map(|archive| archive.ok().flatten())
        .collect()
}

/// What these disks of one log say of its archive.
///
/// # Errors
/// The key about which two disks disagree.
fn archive_of(
    specs: &[DiskSpec],
    log: &Path,
    members: &[usize],
) -> Result<Option<LogToArchive>, &'static str> {
    let specs = || members.iter().map(|member| &specs[*member]);
    let url = common_value(specs().filter_map(|spec| spec.archive.as_ref())).ok_or("archive")?;
    let intervals = specs().filter_map(|spec| spec.archive_interval);
    let interval = common_value(intervals).ok_or("archive-interval")?;
    let limits = specs().filter_map(|spec| spec.archive_limit);
    let limit = common_value(limits).ok_or("archive-limit")?;
    Ok(url.map(|url| LogToArchive {
        log: log.to_path_buf(),
        url: url.clone(),
        interval,
        waits: ReplicaOptions {
            sync: specs().any(|spec| spec.archive_sync),
            limit,
        },
    }))
}

/// The options that these disks of one log set for it.
///
/// # Errors
/// The key about which two disks disagree.
fn log_options(specs: &[DiskSpec], members: &[usize]) -> Result<StoreOptions, &'static str> {
    let logs = group_by_log(specs).len();
    let specs = || members.iter().map(|member| &specs[*member]);
    let longest = common_value(specs().filter_map(|spec| spec.commit_wait.longest));
    let count = common_value(specs().filter_map(|spec| spec.commit_wait.count));
    let close_time =
        common_value(specs().filter_map(|spec| spec.close_time)).ok_or("close-seconds")?;
    let given = common_value(specs().filter_map(|spec| spec.index_memory)).ok_or("index-memory")?;
    let limit = MemoryBudget::of_process().limit();
    let retain = common_value(specs().filter_map(|spec| spec.retain)).ok_or("retain")?;
    let spill_limit =
        common_value(specs().filter_map(|spec| spec.spill_limit)).ok_or("spill-limit")?;
    let on_full = common_value(specs().filter_map(|spec| spec.on_full)).ok_or("on-full")?;
    let usual = StoreOptions::default();
    Ok(StoreOptions {
        on_full: on_full.unwrap_or_default(),
        spill_limit,
        commit_wait: CommitWait {
            longest: longest.ok_or("commit-wait-usec")?,
            count: count.ok_or("commit-wait-count")?,
        },
        close_time: Some(close_time.unwrap_or(DEFAULT_CLOSE_TIME)),
        index_memory: given.unwrap_or_else(|| index_memory(limit, logs)),
        retain,
        await_replica: specs().any(|spec| spec.archive_limit.is_some()),
        ..usual
    })
}

/// The longest time that closing a log of these disks copies.
pub(crate) fn longest_close_time<'a>(specs: impl Iterator<Item = &'a DiskSpec>) -> Duration {
    let times = specs.map(|spec| spec.close_time.unwrap_or(DEFAULT_CLOSE_TIME));
    times.max().unwrap_or_default()
}

/// The value that all items share, `Some(None)` if there are no items, or `None` if two differ.
fn common_value<T: PartialEq>(mut said: impl Iterator<Item = T>) -> Option<Option<T>> {
    let first = said.next();
    said.all(|other| Some(&other) == first.as_ref())
        .then_some(first)
}

/// Groups the disks that write to a log by its directory, in the order of the first disk of each.
pub(crate) fn group_by_log(specs: &[DiskSpec]) -> Vec<(PathBuf, Vec<usize>)> {
    let mut groups: Vec<(PathBuf, PathBuf, Vec<usize>)> = Vec::new();
    let written = |(_, spec): &(usize, &DiskSpec)| spec.at.is_none();
    for (index, spec) in specs.iter().enumerate().filter(written) {
        let Some(log) = spec.log_directory() else {
            continue;
        };
        let real = real_log(&log);
        match groups.iter_mut().find(|(_, known, _)| *known == real) {
            Some((_, _, members)) => members.push(index),
            None => groups.push((log, real, vec![index])),
        }
    }
    groups
        .into_iter()
        .map(|(log, _, members)| (log, members))
        .collect()
}

/// Where the directories of logs are, by the path that a disk has named. To look again would wait
/// for a file system that does not answer.
static LOGS: Mutex<BTreeMap<PathBuf, PathBuf>> = Mutex::new(BTreeMap::new());

fn known_logs() -> MutexGuard<'static, BTreeMap<PathBuf, PathBuf>> {
    LOGS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The directory of a log, with links resolved as they were when a disk last
/// [named](look_for_log) it.
fn real_log(log: &Path) -> PathBuf {
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

/// The store's options for a disk.
fn disk_options(spec: &DiskSpec) -> DiskOptions {
    let mut options = DiskOptions::new(spec.path.clone().unwrap_or_default());
    options.read_only = spec.read_only;
    options.format = spec.format;
    options.cache = match spec.cache {
        DiskCache::Writeback => walvisor_storage::CacheMode::Writeback,
        DiskCache::Writethrough => walvisor_storage::CacheMode::Writethrough,
        DiskCache::Unsafe => walvisor_storage::CacheMode::Unsafe,
    };
    options
}

/// Opens a disk as of a point.
fn look(
    spec: &DiskSpec,
    at: Point,
    scratch: Option<File>,
) -> Result<Arc<dyn Backend>, walvisor_storage::Error> {
    let log = spec.log_directory().unwrap_or_default();
    let usual = || index_memory(MemoryBudget::of_process().limit(), 1);
    let options = StoreOptions {
        index_memory: spec.index_memory.unwrap_or_else(usual),
        ..StoreOptions::default()
    };
    let look = Look::open(&disk_options(spec), &log, at, scratch, &options)?;
    Ok(Arc::new(look))
}

/// Opens a disk without a log: an image, or memory. A RAM disk has no cache modes, because nothing
/// in memory is durable.
fn open_without_log(spec: &DiskSpec) -> Result<Arc<dyn Backend>, walvisor_storage::Error> {
    if spec.backend != BackendKind::Ram {
        let path = spec.path.clone().unwrap_or_default();
        let cache = match spec.cache {
            DiskCache::Writeback => RawCache::Writeback,
            DiskCache::Writethrough => RawCache::Writethrough,
            DiskCache::Unsafe => RawCache::Unsafe,
        };
        let image = Image::open_as(&path, spec.read_only, spec.format)?;
        return Ok(Arc::new(RawDisk::new(image, cache)));
    }
    let bytes = spec.size.unwrap_or(0);
    Ok(if spec.read_only {
        Arc::new(RamDisk::empty_read_only(bytes / SECTOR_SIZE))
    } else {
        match MemoryBudget::of_process().reserve(bytes) {
            Some(memory) => Arc::new(RamDisk::reserved(bytes / SECTOR_SIZE, memory)),
            // `check_free_memory`, or the check of the limit, has let it pass.
            None => Arc::new(RamDisk::new(bytes / SECTOR_SIZE)),
        }
    })
}

/// The serial number of a disk's device.
pub(crate) fn serial(spec: &DiskSpec) -> String {
    spec.serial.clone().unwrap_or_else(|| default_serial(spec))
}

/// A number that identifies a disk, the same at every start (FNV-1a).
pub(crate) fn identity(name: &str, image: &str) -> u64 {
    let bytes = name.bytes().chain([0]).chain(image.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The image's file name, cut to the length of a serial. Initiators take SCSI units with the same
/// serial for paths to one disk, so theirs is made from the whole path.
fn default_serial(spec: &DiskSpec) -> String {
    if let (DeviceKind::Scsi, Some(path)) = (spec.device, &spec.path) {
        let image = real_path(path).display().to_string();
        return format!("{:016x}", identity("", &image));
    }
    let name = spec
        .path
        .as_deref()
        .and_then(Path::file_name)
        .unwrap_or_default();
    let printable = |character: &char| character.is_ascii_graphic();
    name.to_string_lossy()
        .chars()
        .filter(printable)
        .take(MAX_SERIAL_BYTES)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk_spec::DiskCommand;

    fn specs(texts: &[&str]) -> Vec<DiskSpec> {
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
        let groups = group_by_log(&specs);
        assert_eq!(
            groups,
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
                let error = check(&specs(&[&text])).unwrap_err();
                assert!(error.contains("give a smaller size="), "{text}: {error}");
            }
        }
        let error = check(&specs(&["backend=ram,size=15E", "backend=ram,size=1E"]));
        assert!(error.is_err(), "together");
        let small = ["backend=ram,size=512", "backend=ram,size=1M,readonly=on"];
        check(&specs(&small)).unwrap();
        let (disks, _) = open(&specs(&small), 3, ScratchFiles::default()).unwrap();
        assert_eq!(disks[0].device.queues, 3);
        let sectors: Vec<u64> = disks.iter().map(|disk| disk.backend.sectors()).collect();
        assert_eq!(sectors, [1, 2048]);
    }

    #[test]
    fn a_log_gets_the_options_that_its_disks_agree_on() {
        let agreed = specs(&[
            "path=a,log=l,commit-wait-usec=5",
            "path=b,log=l,commit-wait-count=2,close-seconds=0",
            "path=c,log=l,commit-wait-usec=5",
            "path=d,commit-wait-usec=7,index-memory=3M",
        ]);
        check(&agreed).unwrap();
        let options = log_options(&agreed, &[0, 1, 2]).unwrap();
        let wait = options.commit_wait;
        assert_eq!(
            (wait.longest, wait.count),
            (Some(Duration::from_micros(5)), Some(2))
        );
        assert_eq!(options.close_time, Some(Duration::ZERO));
        let alone = log_options(&agreed, &[3]).unwrap();
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
        ] {
            let two = [1, 2].map(|value| format!("path=disk-{value},log=l,{key}={value}{unit}"));
            let error = check(&specs(&[&two[0], &two[1]])).unwrap_err();
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
        check(&some).unwrap();
        let target = LogToArchive {
            log: "l".into(),
            url: "s3://bucket/b".to_owned(),
            interval: Some(Duration::from_secs(5)),
            waits: ReplicaOptions {
                sync: true,
                limit: Some(1 << 30),
            },
        };
        assert_eq!(logs_to_archive(&some), [target]);
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
            let error = check(&specs(&[text])).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        let two = ["path=a,archive=s3://b/c", "path=d,archive=s3://b/c"];
        let error = check(&specs(&two)).unwrap_err();
        assert!(
            error.contains("the log d.wal is that of another log too"),
            "{error}"
        );
    }

    #[test]
    fn a_look_at_a_log_that_another_disk_writes_is_refused() {
        let error = check(&specs(&["path=a,log=l", "path=b,log=./l,at=cid:1"])).unwrap_err();
        assert!(error.starts_with("disk 'b' has at=, and"), "{error}");
        check(&specs(&["path=a,at=cid:1", "path=a,at=cid:2", "path=c"])).unwrap();
    }

    #[test]
    fn the_default_serial_is_the_file_name() {
        let specs = specs(&[
            "path=/x/a b.img",
            "path=a-very-long-name-of-an-image.img",
            "backend=ram,size=1M",
        ]);
        let serials: Vec<String> = specs.iter().map(default_serial).collect();
        assert_eq!(serials, ["ab.img", "a-very-long-name-of-", ""]);
    }
}
