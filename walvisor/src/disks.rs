//! Opens the disks of a [`Plan`]. Disks that name the same log directory share the log. Closes the
//! logs at the end.

use std::collections::HashMap;
use std::fs::File;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::backend::{Backend, MemoryBudget, MemoryReservation, SECTOR_SIZE};
use walvisor_devices::block::BlockConfig;
use walvisor_storage::{
    Disk, DiskOptions, Image, Look, Point, RawCache, RawDisk, Retention, Store, StoreOptions,
    has_log, scratch_file,
};
use walvisor_vmm::disk::{DeviceKind, OpenDisk};

use crate::disk_spec::{
    BackendKind, DiskCache, DiskCommand, DiskSpec, LogOptions, MAX_QUEUES, MAX_SERIAL_BYTES,
};
use crate::plan::{LogPlan, Plan, memory_of_log, real_log, real_path, usual_index};
use crate::point::refuse_retention;
use crate::progress::with_bar;

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
    /// The options with which it was opened.
    options: LogOptions,
    /// What the log may take of the process's memory.
    _memory: Option<MemoryReservation>,
}

impl OpenLog {
    /// Refuses a disk that sets an option of the log to another value.
    fn check_options(&self, spec: &DiskSpec) -> Result<(), String> {
        let said = &spec.log_options;
        // 'disk retain' may have changed its retention since.
        let retain = self.store.disks().first().map(Disk::retain);
        let now = LogOptions {
            retain,
            ..self.options.clone()
        };
        let known = now
            .covers(said)
            .or_else(|differ| self.options.covers(said).map_err(|_| differ));
        known.map_err(|differ| {
            let (name, key, [ours, theirs]) = (spec.name(), differ.key, differ.values);
            format!(
                "disk '{name}': {key}={theirs} differs from {key}= of its log, which is open with \
                 {ours}: leave {key}= out"
            )
        })
    }
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
            if spec.log_options.archive.is_some() {
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
            let plan = Plan::new(one)?;
            check_free_memory(&plan, spec)?;
            let scratch = make_files(&plan).map_err(failed)?;
            let mut disks = self.open(&plan, cpus, scratch).map_err(failed)?;
            if let Err(why) = self.keep(&plan) {
                drop(self.logs.pop());
                return Err(why);
            }
            return disks.pop().ok_or_else(|| "no disk was opened".to_owned());
        };
        let log = &mut self.logs[place];
        log.check_options(spec)?;
        let disk = log.store.add_disk(&disk_options(spec)).map_err(failed)?;
        Ok(open_disk(spec, Arc::new(disk.clone()), cpus))
    }

    /// Sets the retention of each log for which the plan names one.
    ///
    /// # Errors
    /// One line: a log would give up history that it keeps.
    pub fn keep(&self, plan: &Plan) -> Result<(), String> {
        for log in plan.logs.iter().filter(|log| !log.read_only) {
            let open = self.logs.iter().find(|open| open.directory == log.place);
            let disk = open.and_then(|open| open.store.disks().first());
            let (Some(retain), Some(disk)) = (log.options.retain, disk) else {
                continue;
            };
            let name = plan.disks[log.disks[0]].name();
            if disk.gives_up_history(retain) {
                let members = disk.members().map_err(|error| error.to_string())?;
                let paths = members.iter().map(|(_, path)| path.display().to_string());
                return Err(format!(
                    "disk '{name}': {}; open it without retain=, then 'walvisor disk retain DISK \
                     {retain} --give-up-history'",
                    refuse_retention(&disk.history(), retain, paths.collect())
                ));
            }
            let set = disk.set_retain(retain);
            set.map_err(|error| format!("disk '{name}': {error}"))?;
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
        plan: &Plan,
        cpus: u8,
        mut scratch: ScratchFiles,
    ) -> Result<Vec<OpenDisk>, walvisor_storage::Error> {
        let mut backends: HashMap<usize, Arc<dyn Backend>> = HashMap::new();
        for log in &plan.logs {
            let LogPlan {
                directory, place, ..
            } = log;
            let members = log.disks.iter().map(|disk| &plan.disks[*disk]);
            let detached = members.clone().flat_map(|spec| &spec.detached);
            let members = members.map(disk_options);
            let options: Vec<_> = members.chain(detached.map(DiskOptions::detached)).collect();
            let store_options = plan.store_options(log);
            let memory =
                MemoryBudget::of_process().reserve(memory_of_log(store_options.index_memory));
            let mut read = 0;
            let store = if log.read_only {
                if !has_log(directory) {
                    continue;
                }
                Store::open_read_only(directory, &options, &store_options)?
            } else {
                with_bar("recovering", |progress| {
                    Store::open_with_progress(
                        directory,
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
                let log = directory.display();
                tracing::info!("log {log}: recovered from {read} bytes of segments");
            }
            assert_eq!(
                log.disks.len(),
                store.disks().len(),
                "a log opens all its disks, in order"
            );
            for (member, disk) in log.disks.iter().zip(store.disks()) {
                backends.insert(*member, Arc::new(disk.clone()));
            }
            self.logs.push(OpenLog {
                directory: place.clone(),
                store,
                options: LogOptions {
                    close_time: store_options.close_time,
                    index_memory: Some(store_options.index_memory),
                    on_full: Some(store_options.on_full),
                    archive_sync: Some(log.options.archive_sync == Some(true)),
                    ..log.options.clone()
                },
                _memory: memory,
            });
        }
        let disks = plan.disks.iter().enumerate().map(|(index, spec)| {
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

/// Opens the disks of a plan, for a VM with `cpus` vCPUs. `scratch`: what [`make_files`] returned
/// for it. Returns the disks in the same order, and their logs.
///
/// # Errors
/// If a disk or its log cannot be opened. Logs that are open by then are closed again.
pub fn open(
    plan: &Plan,
    cpus: u8,
    scratch: ScratchFiles,
) -> Result<(Vec<OpenDisk>, OpenLogs), walvisor_storage::Error> {
    raise_descriptor_limit();
    let mut logs = OpenLogs::default();
    let disks = logs.open(plan, cpus, scratch)?;
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

/// The scratch files of disks with `scratch=on`, by index of the disk.
#[derive(Default)]
pub struct ScratchFiles(HashMap<usize, File>);

/// Makes missing logs and scratch files, so that a process that has given up the right to make
/// files can open the disks.
///
/// # Errors
/// If a disk of a new log cannot be opened, or its log or a scratch file cannot be made.
pub fn make_files(plan: &Plan) -> Result<ScratchFiles, walvisor_storage::Error> {
    for log in plan.logs.iter().filter(|log| !log.read_only) {
        let disks = log
            .disks
            .iter()
            .map(|disk| disk_options(&plan.disks[*disk]));
        let disks: Vec<_> = disks.collect();
        Store::make_log(&log.directory, &disks, &StoreOptions::default())?;
    }
    let scratch = plan.disks.iter().enumerate();
    let scratch = scratch.filter(|(_, spec)| spec.scratch);
    let files = scratch.map(|(index, _)| Ok((index, scratch_file()?)));
    Ok(ScratchFiles(files.collect::<Result<_, _>>()?))
}

/// Refuses a disk that needs, or whose log needs, more memory than the process has.
fn check_free_memory(plan: &Plan, spec: &DiskSpec) -> Result<(), String> {
    let budget = MemoryBudget::of_process();
    let Some(limit) = budget.limit() else {
        return Ok(());
    };
    let needed = plan.memory(limit);
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
    let usual = || usual_index(MemoryBudget::of_process().limit(), 1);
    let options = StoreOptions {
        index_memory: spec.log_options.index_memory.unwrap_or_else(usual),
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
    use crate::plan::tests::specs;

    #[test]
    fn a_disk_in_memory_has_a_queue_for_each_vcpu() {
        let small = ["backend=ram,size=512", "backend=ram,size=1M,readonly=on"];
        let plan = Plan::new(&specs(&small)).unwrap();
        let (disks, _) = open(&plan, 3, ScratchFiles::default()).unwrap();
        assert_eq!(disks[0].device.queues, 3);
        let sectors: Vec<u64> = disks.iter().map(|disk| disk.backend.sectors()).collect();
        assert_eq!(sectors, [1, 2048]);
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
