//! The arguments of every process with disks in use: metrics, control socket, seccomp filter and
//! Landlock.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use walvisor_vmm::seccomp::Seccomp;

use super::metrics_file::MetricsFile;
use super::socket::Sockets;
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

/// Where metrics are served over HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// At a Unix socket.
    Unix(PathBuf),
    /// At a TCP port.
    Tcp(SocketAddr),
}

impl FromStr for MetricsAddress {
    type Err = String;

    /// Parses `unix:PATH` or `IP:PORT`.
    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("unix:") {
            Some("") => Err("'unix:' names no socket: give unix:PATH".to_owned()),
            Some(path) => Ok(Self::Unix(path.into())),
            None => {
                // A resolver of names would make sockets, and a configuration file is read again by
                // a process that may not.
                let number = match text.strip_prefix("localhost:") {
                    Some(port) => format!("127.0.0.1:{port}"),
                    None => text.to_owned(),
                };
                let address = number
                    .parse()
                    .ok()
                    .filter(|address: &SocketAddr| address.port() != 0);
                address.map(Self::Tcp).ok_or_else(|| {
                    format!(
                        "'{text}' is neither unix:PATH nor an address and a port: give one such as \
                         127.0.0.1:9790, [::1]:9790 or 0.0.0.0:9790"
                    )
                })
            }
        }
    }
}

/// The arguments that `walvisor run` and the daemons share.
#[derive(Args, Debug)]
#[command(next_help_heading = "Process")]
pub struct ProcessArguments {
    /// Write metrics as Prometheus text at the end, to a file, or to stdout with -
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Serve metrics over HTTP, as /metrics, at unix:PATH or IP:PORT, to all who can connect; may
    /// be given several times
    #[arg(long, value_name = "ADDRESS")]
    pub metrics_listen: Vec<MetricsAddress>,
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

    /// Makes the sockets of `--metrics-listen` and `more`, and adds their names to `names`. Call it
    /// while the process has one thread.
    pub(super) fn metrics_sockets(
        &self,
        more: Option<&MetricsAddress>,
        sockets: &mut Sockets,
        names: &mut SocketNames,
    ) -> Result<Vec<OwnedFd>, CommandError> {
        let addresses = self.metrics_listen.iter().chain(more);
        let sockets = addresses.map(|address| match address {
            MetricsAddress::Unix(path) => sockets.unix(path, names).map(OwnedFd::from),
            MetricsAddress::Tcp(address) => sockets.tcp(*address).map(OwnedFd::from),
        });
        sockets.collect()
    }
}
