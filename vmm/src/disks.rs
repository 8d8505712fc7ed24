//! Opens the disks of a command line. All disks that name the same log directory share one log; the logs are
//! closed in order at the end.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use walvisor_devices::backend::ram::RamDisk;
use walvisor_devices::backend::{Backend, SECTOR_SIZE};
use walvisor_devices::block::BlockConfig;
use walvisor_storage::{CommitWait, DiskOptions, Image, RawCache, RawDisk, Store, StoreOptions};

use crate::disk::OpenDisk;
use crate::disk_spec::{BackendKind, DiskCache, DiskSpec, MAX_SERIAL_BYTES};
use crate::progress::with_bar;

/// How long closing a log may copy it to the images if no disk says.
pub const DEFAULT_CLOSE_TIME: Duration = Duration::from_secs(10);

/// The logs of a command line's disks. Dropping them closes them too, but ignores errors.
#[derive(Default)]
pub struct OpenLogs {
    stores: Vec<Store>,
}

impl OpenLogs {
    /// Closes the logs at the same time, which copies their contents to the base images, or as much as the time of
    /// each log allows. The VM that used the disks must have been dropped.
    ///
    /// # Errors
    /// The error of the first log that cannot be closed; the other logs are closed all the same.
    pub fn close(self) -> Result<(), walvisor_storage::Error> {
        Store::close_all(self.stores)
    }
}

/// Opens the disks that `specs` describe, for a VM of `cpus` vCPUs. Returns the disks in the same order, and
/// their logs.
///
/// # Errors
/// If a disk or its log cannot be opened. The logs that were opened before are closed again.
pub fn open(
    specs: &[DiskSpec],
    cpus: u8,
) -> Result<(Vec<OpenDisk>, OpenLogs), walvisor_storage::Error> {
    let mut logs = OpenLogs::default();
    let mut backends: HashMap<usize, Arc<dyn Backend>> = HashMap::new();
    for (log, members) in group_by_log(specs) {
        let options: Vec<DiskOptions> = members
            .iter()
            .map(|member| disk_options(&specs[*member]))
            .collect();
        // `check` has refused disks that disagree.
        let store_options = log_options(specs, &members).unwrap_or_default();
        let mut read = 0;
        let store = with_bar("recovering", |progress| {
            Store::open_telling(&log, &options, &store_options, &mut |passed, total| {
                read = total;
                progress(passed, total);
            })
        })?;
        if read > 0 {
            let log = log.display();
            tracing::info!("log {log}: recovered from {read} bytes of segments");
        }
        for (member, disk) in members.iter().zip(store.disks()) {
            backends.insert(*member, Arc::new(disk.clone()));
        }
        logs.stores.push(store);
    }
    let disks = specs.iter().enumerate().map(|(index, spec)| {
        let backend = match backends.remove(&index) {
            Some(backend) => backend,
            None => open_without_log(spec)?,
        };
        Ok(OpenDisk {
            name: spec.serial.clone().unwrap_or_else(|| spec.name()),
            backend,
            device: BlockConfig {
                queues: spec.queues.unwrap_or_else(|| u16::from(cpus)),
                queue_size: spec.queue_size,
                serial: spec.serial.clone().unwrap_or_else(|| default_serial(spec)),
                block_size: spec.block_size,
                in_order: spec.in_order,
                worker_cpus: spec.worker_cpus.clone(),
                poll: spec.poll,
                answer: spec.answer,
            },
            limits: spec.limits,
        })
    });
    let disks = disks.collect::<Result<_, _>>()?;
    Ok((disks, logs))
}

/// Makes the logs that do not exist yet, so that a process that has given up the right to make files can open
/// them.
///
/// # Errors
/// If a disk of a new log cannot be opened, or its log cannot be made.
pub fn make_logs(specs: &[DiskSpec]) -> Result<(), walvisor_storage::Error> {
    for (log, members) in group_by_log(specs) {
        let disks: Vec<_> = members
            .iter()
            .map(|member| disk_options(&specs[*member]))
            .collect();
        Store::make_log(&log, &disks, &StoreOptions::default())?;
    }
    Ok(())
}

/// This machine's memory and swap together, in bytes.
pub(crate) fn machine_memory() -> u64 {
    let told = rustix::system::sysinfo();
    let unit = u64::from(told.mem_unit);
    (told.totalram + told.totalswap).saturating_mul(unit)
}

/// Refuses RAM disks that are larger than this machine's memory and swap together.
fn check_memory(specs: &[DiskSpec]) -> Result<(), String> {
    let most = machine_memory();
    let sizes = specs.iter().filter_map(|spec| spec.size);
    let all = sizes.fold(0, u64::saturating_add);
    match all > most {
        false => Ok(()),
        true => Err(format!(
            "backend=ram: {all} bytes, and this machine has {most} bytes of memory and swap: give a smaller size=, or an image"
        )),
    }
}

/// Refuses disks that contradict each other, or that this machine cannot hold.
///
/// # Errors
/// One line that names the disks.
pub fn check(specs: &[DiskSpec]) -> Result<(), String> {
    check_memory(specs)?;
    let groups = group_by_log(specs);
    groups
        .iter()
        .try_for_each(|(log, members)| match log_options(specs, members) {
            Ok(_) => Ok(()),
            Err(key) => Err(format!(
                "the disks on the log {} disagree about {key}: it has one, give it once",
                log.display()
            )),
        })
}

/// The options of the log of these disks, as any of the disks says them.
///
/// # Errors
/// The key about which two disks disagree.
fn log_options(specs: &[DiskSpec], members: &[usize]) -> Result<StoreOptions, &'static str> {
    let specs = || members.iter().map(|member| &specs[*member]);
    let longest = agreed(specs().filter_map(|spec| spec.commit_wait.longest));
    let count = agreed(specs().filter_map(|spec| spec.commit_wait.count));
    let close_time = agreed(specs().filter_map(|spec| spec.close_time)).ok_or("close-seconds")?;
    let index_memory = agreed(specs().filter_map(|spec| spec.index_memory));
    let index_memory = index_memory.ok_or("index-memory")?;
    let usual = StoreOptions::default();
    Ok(StoreOptions {
        commit_wait: CommitWait {
            longest: longest.ok_or("commit-wait-usec")?,
            count: count.ok_or("commit-wait-count")?,
        },
        close_time: Some(close_time.unwrap_or(DEFAULT_CLOSE_TIME)),
        index_memory: index_memory.unwrap_or(usual.index_memory),
        ..usual
    })
}

/// The value that all items share; `Some(None)` if there are no items, and `None` if two differ.
fn agreed<T: PartialEq>(mut said: impl Iterator<Item = T>) -> Option<Option<T>> {
    let first = said.next();
    said.all(|other| Some(&other) == first.as_ref())
        .then_some(first)
}

/// Groups the disks with a log by its directory, in the order in which the directories are first named.
fn group_by_log(specs: &[DiskSpec]) -> Vec<(PathBuf, Vec<usize>)> {
    let mut groups: Vec<(PathBuf, PathBuf, Vec<usize>)> = Vec::new();
    for (index, spec) in specs.iter().enumerate() {
        let Some(log) = spec.log_directory() else {
            continue;
        };
        let real = real_path(&log);
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

/// A path that is the same for two names of one directory; the directory itself need not exist.
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

/// The options with which the store opens a disk.
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

/// Opens a disk without a log: a raw image, or memory. Nothing in memory is durable, so a RAM disk has no cache
/// modes.
fn open_without_log(spec: &DiskSpec) -> Result<Arc<dyn Backend>, walvisor_storage::Error> {
    if spec.backend == BackendKind::Raw {
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
    Ok(match spec.read_only {
        true => Arc::new(RamDisk::empty_read_only(bytes / SECTOR_SIZE)),
        false => Arc::new(RamDisk::new(bytes / SECTOR_SIZE)),
    })
}

/// The image's file name, cut to the length of a serial.
fn default_serial(spec: &DiskSpec) -> String {
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
    fn disks_in_memory_fit_the_machine() {
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
        let (disks, _) = open(&specs(&small), 1).unwrap();
        let sectors: Vec<u64> = disks.iter().map(|disk| disk.backend.sectors()).collect();
        assert_eq!(sectors, [1, 2048]);
    }

    #[test]
    fn a_log_has_the_options_that_its_disks_agree_about() {
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
        ] {
            let two = [1, 2].map(|value| format!("path=disk-{value},log=l,{key}={value}{unit}"));
            let error = check(&specs(&[&two[0], &two[1]])).unwrap_err();
            let told = format!("the disks on the log l disagree about {key}: ");
            assert!(error.starts_with(&told), "{error}");
        }
    }

    #[test]
    fn a_serial_that_nobody_gave_is_the_file_name() {
        let specs = specs(&[
            "path=/x/a b.img",
            "path=a-very-long-name-of-an-image.img",
            "backend=ram,size=1M",
        ]);
        let serials: Vec<String> = specs.iter().map(default_serial).collect();
        assert_eq!(serials, ["ab.img", "a-very-long-name-of-", ""]);
    }

    #[test]
    fn one_log_serves_two_disks_and_closes() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        let options = StoreOptions {
            segment_size: 1 << 20,
            ..StoreOptions::default()
        };
        for name in ["a.img", "b.img"] {
            walvisor_storage::create_disk(&at(name), 1 << 20, &at("log"), &options).unwrap();
        }
        let text = |name: &str| format!("path={},log={}", at(name).display(), at("log").display());
        let (a, b) = (text("a.img"), text("b.img"));
        std::fs::write(at("raw.img"), [0; 1024]).unwrap();
        let raw = format!("backend=raw,path={}", at("raw.img").display());
        let (disks, logs) = open(&specs(&[&a, "backend=ram,size=1M", &b, &raw]), 3).unwrap();
        assert_eq!(logs.stores.len(), 1);
        let sectors: Vec<u64> = disks.iter().map(|disk| disk.backend.sectors()).collect();
        assert_eq!(sectors, [2048, 2048, 2048, 2]);
        assert!(disks[3].backend.log_counters().is_none());
        assert!(
            disks[1].backend.log_counters().is_none() && disks[2].backend.log_counters().is_some()
        );
        assert_eq!(disks[0].device.queues, 3);
        drop(disks);
        logs.close().unwrap();
    }
}
