//! The machine that a comparison ran on, without which its figures mean nothing.

use std::fmt;
use std::fs;
use std::path::Path;

use serde::Serialize;

use walvisor_vmm::probe::{self, Ring0};

/// The properties of the machine.
#[derive(Clone, Debug, Serialize)]
pub struct MachineInfo {
    /// The version of this program.
    pub walvisor: &'static str,
    /// The processor's name.
    pub processor: String,
    /// Processors that this process may use.
    pub processors: usize,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// The kernel's release.
    pub kernel: String,
    /// How KVM runs guests here, or why it can't.
    pub kvm: String,
    /// File system and device of the directory that the disks were in.
    pub medium: String,
}

impl MachineInfo {
    /// This machine; the disks are in `dir`.
    pub fn current(dir: &Path) -> Self {
        let kvm = match probe::ring0() {
            Ok(Ring0::Native) => "on the processor (VMX or SVM)".to_owned(),
            Ok(Ring0::Interpreted) => {
                "page tables only: ring 3 on the processor, ring 0 interpreted".to_owned()
            }
            Err(error) => {
                let text = error.to_string();
                text.split(": ").next().unwrap_or(&text).to_owned()
            }
        };
        let memory = field("/proc/meminfo", "MemTotal");
        let memory = memory.split(' ').next().and_then(|kib| kib.parse().ok());
        Self {
            walvisor: env!("CARGO_PKG_VERSION"),
            processor: field("/proc/cpuinfo", "model name"),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: memory.unwrap_or(0) / 1024,
            kernel: rustix::system::uname().release().to_string_lossy().into(),
            kvm,
            medium: medium(dir).unwrap_or_else(|| "unknown".to_owned()),
        }
    }
}

/// The value after `name:` in a file of /proc.
fn field(path: &str, name: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    let value = line.and_then(|line| line.split_once(':'));
    value
        .map_or("unknown", |(_, value)| value.trim())
        .to_owned()
}

/// The file system that contains `dir`: the mount whose path is the longest prefix of the path of
/// `dir`.
fn medium(dir: &Path) -> Option<String> {
    let dir = dir.canonicalize().ok()?;
    let mounts = fs::read_to_string("/proc/self/mounts").ok()?;
    let mut best: Option<(&Path, &str, &str)> = None;
    for line in mounts.lines() {
        let mut words = line.split(' ');
        let (device, place, kind) = (words.next()?, Path::new(words.next()?), words.next()?);
        // The last mount at a path hides earlier ones.
        let deeper = |(than, ..): &(&Path, _, _)| place.as_os_str().len() >= than.as_os_str().len();
        if dir.starts_with(place) && best.as_ref().is_none_or(deeper) {
            best = Some((place, device, kind));
        }
    }
    let (_, device, kind) = best?;
    let name = device.rsplit('/').next().unwrap_or(device);
    let scheduler = fs::read_to_string(format!("/sys/block/{name}/queue/scheduler"));
    Some(match scheduler.ok().as_deref().and_then(chosen) {
        Some(scheduler) => format!("{kind} on {name}, I/O scheduler {scheduler}"),
        None => format!("{kind} on {name}"),
    })
}

/// The word in brackets: `mq-deadline` of `none [mq-deadline]`.
pub fn chosen(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0)
}

impl fmt::Display for MachineInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            walvisor,
            processor,
            processors,
            memory_mib,
            kernel,
            kvm,
            medium,
        } = self;
        writeln!(
            f,
            "walvisor {walvisor}; {processors} x {processor}, {memory_mib} MiB; Linux {kernel}"
        )?;
        writeln!(f, "KVM: {kvm}")?;
        write!(f, "disks: {medium}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_is_described() {
        let machine = MachineInfo::current(Path::new("/"));
        assert!(
            machine.processors > 0 && machine.memory_mib > 0,
            "{machine:?}"
        );
        assert_ne!(machine.medium, "unknown");
        assert_ne!(machine.processor, "");
        assert_eq!(chosen("none [mq-deadline] kyber\n"), Some("mq-deadline"));
        assert_eq!(chosen("none"), None);
    }
}
