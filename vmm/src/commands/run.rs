//! `walvisor run`: boots a Linux kernel and stays until the guest powers off.

use std::path::PathBuf;
use std::time::Instant;

use clap::Args;

use super::CommandError;
use crate::disk_spec::DiskSpec;
use crate::size::parse_size;

/// Where the guest's serial console goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConsoleTarget {
    /// The terminal, or whatever stdin and stdout are.
    Stdio,
    /// Nowhere.
    Off,
    /// Appended to a file; no input.
    File(PathBuf),
}

/// Parses the argument of `--console`.
fn parse_console(text: &str) -> Result<ConsoleTarget, String> {
    match text {
        "stdio" => Ok(ConsoleTarget::Stdio),
        "off" => Ok(ConsoleTarget::Off),
        _ => match text.strip_prefix("file:") {
            Some(path) if !path.is_empty() => Ok(ConsoleTarget::File(PathBuf::from(path))),
            _ => Err("give stdio, off or file:PATH".to_owned()),
        },
    }
}

/// The arguments of `walvisor run`.
#[derive(Args, Debug)]
pub struct RunArguments {
    /// Kernel: a bzImage, or an ELF vmlinux with a PVH entry
    #[arg(long, value_name = "FILE")]
    pub kernel: PathBuf,
    /// Initial RAM disk
    #[arg(long, value_name = "FILE")]
    pub initrd: Option<PathBuf>,
    /// Kernel command line
    #[arg(
        long,
        value_name = "TEXT",
        default_value = "console=ttyS0 reboot=t panic=-1"
    )]
    pub cmdline: String,
    /// Virtual CPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=64))]
    pub cpus: u8,
    /// Guest memory, with K, M or G
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_size)]
    pub memory: u64,
    /// A disk: path=FILE[,key=value ...]; may be given several times
    #[arg(long = "disk", value_name = "SPEC")]
    pub disks: Vec<DiskSpec>,
    /// Serial console: stdio, off or file:PATH
    #[arg(long, value_name = "WHERE", default_value = "stdio", value_parser = parse_console)]
    pub console: ConsoleTarget,
    /// Write metrics in Prometheus text when the guest ends, to a file or - for stdout
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
}

/// Boots the guest and returns when it has powered off, rebooted or been stopped by a signal.
///
/// # Errors
/// If the guest cannot be started, or cannot run on this machine.
pub fn run(arguments: &RunArguments, _started: Instant) -> Result<(), CommandError> {
    if !arguments.kernel.exists() {
        return Err(CommandError::Failed(format!(
            "kernel '{}' does not exist: give the path of a bzImage or of a vmlinux",
            arguments.kernel.display()
        )));
    }
    Err(CommandError::Failed(
        "this build cannot start a guest yet".to_owned(),
    ))
}
