//! The arguments of every process with disks in use: metrics, control socket, seccomp filter and
//! Landlock.

use std::os::unix::net::UnixListener;
use std::path::PathBuf;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use walvisor_vmm::seccomp::Seccomp;

use super::metrics_file::MetricsFile;
use super::socket_names::SocketNames;
use super::{CommandError, socket};
use crate::control_socket::CONTROL_MODE;
use crate::landlock::Landlock;

/// The values of `--seccomp`.
pub(super) fn seccomp_modes() -> impl TypedValueParser<Value = Seccomp> {
    let modes = [
        ("on", "Kill the process"),
        ("off", "Install no filter"),
        ("log", "Let the kernel log the call and execute it"),
    ];
    let modes = modes.map(|(name, help)| PossibleValue::new(name).help(help));
    PossibleValuesParser::new(modes).try_map(|mode| mode.parse::<Seccomp>())
}

/// The arguments that `walvisor run` and the daemons share.
#[derive(Args, Debug)]
pub struct ProcessArguments {
    /// Write metrics as Prometheus text at the end, to a file, or to stdout with -
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Listen here for 'walvisor ctl'; only this user can connect
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// Seccomp filter against system calls that the process does not need: on, log or off
    #[arg(long, value_name = "MODE", default_value = "on", value_parser = seccomp_modes())]
    pub seccomp: Seccomp,
    /// Landlock against files and ports that the process does not need: on or off. It does as much
    /// as the kernel supports
    #[arg(long, value_name = "MODE", value_enum, default_value_t)]
    pub landlock: Landlock,
}

impl ProcessArguments {
    /// Opens the destination of the metrics, if `--metrics` was given.
    pub(super) fn metrics(&self) -> Result<Option<MetricsFile>, CommandError> {
        self.metrics.as_deref().map(MetricsFile::open).transpose()
    }

    /// Makes the control socket, if `--control` was given, and adds its name to `names`. Call it
    /// while the process has one thread.
    pub(super) fn control(
        &self,
        names: &mut SocketNames,
    ) -> Result<Option<UnixListener>, CommandError> {
        let Some(path) = &self.control else {
            return Ok(None);
        };
        let (listener, file) = socket::bind(path, CONTROL_MODE)?;
        names.add(file);
        Ok(Some(listener))
    }
}
