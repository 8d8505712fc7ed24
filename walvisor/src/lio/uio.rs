//! The UIO device of a back store: its ring, and the notifications in both directions.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use walvisor_devices::tcmu::Mapping;

use super::backstore::Backstore;
use super::opener::open_device;
use super::target::{Result, StepContext, TargetError, get, name_of};

/// An open UIO device.
pub struct Uio {
    /// A read waits for commands, a write reports answers.
    pub device: OwnedFd,
    /// The memory shared with the kernel.
    pub memory: Arc<Mapping>,
}

impl Uio {
    /// Opens the device of `store`. Only one process can have it open.
    ///
    /// # Errors
    /// If there is none, another process has it open, or it cannot be mapped.
    pub fn open(store: &Backstore) -> Result<Self> {
        let Some(sys) = find(store) else {
            return Err(TargetError::Taken(format!(
                "{} has no UIO device in {}",
                store.directory.display(),
                store.target.uio.display()
            )));
        };
        let name = name_of(&sys);
        let path = Path::new("/dev").join(&name);
        let number = name
            .strip_prefix("uio")
            .and_then(|number| number.parse().ok());
        let opened = match (&store.target.opener, number) {
            (Some(opener), Some(number)) => opener.open(number),
            _ => open_device(&path).map_err(Into::into),
        };
        let busy = |error: &std::io::Error| error.raw_os_error() == Some(libc::EBUSY);
        if opened.as_ref().is_err_and(busy) {
            let by = match server_of(&path) {
                Some(process) => format!("by process {process}"),
                None => "by another process".to_owned(),
            };
            let name = &store.name;
            return Err(TargetError::Taken(format!(
                "disk '{name}' is already served {by}"
            )));
        }
        let device = opened.during("open", &path)?;
        let attribute = sys.join("maps/map0/size");
        let size = get(&attribute);
        let len = usize::from_str_radix(size.trim_start_matches("0x"), 16).unwrap_or(0);
        let memory = Mapping::of_device(&device, len).during("map", &path)?;
        Ok(Self {
            device,
            memory: Arc::new(memory),
        })
    }

    /// The process that has the device of `store` open, if this process may see it.
    pub fn server(store: &Backstore) -> Option<u32> {
        server_of(&Path::new("/dev").join(name_of(&find(store)?)))
    }
}

/// Finds the device in sysfs by its name: `tcm-user/<hba>/<name>/<configuration>`.
fn find(store: &Backstore) -> Option<PathBuf> {
    let name = format!("tcm-user/{}/{}", store.hba, store.name);
    let devices = fs::read_dir(&store.target.uio).ok()?.flatten();
    let is = |path: &PathBuf| {
        let rest = get(&path.join("name"))
            .strip_prefix(&name)
            .map(str::to_owned);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
    };
    devices.map(|entry| entry.path()).find(is)
}

fn server_of(device: &Path) -> Option<u32> {
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let numbers = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let has = |process: &u32| {
        let files = fs::read_dir(format!("/proc/{process}/fd"));
        let mut files = files.into_iter().flatten().flatten();
        files.any(|file| fs::read_link(file.path()).is_ok_and(|to| to == device))
    };
    let mut numbers = numbers;
    numbers.find(has)
}
