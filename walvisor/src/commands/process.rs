//! The arguments of every process with disks in use, `walvisor run` or a daemon: metrics, control
//! socket, and what the process gives up before it opens its disks.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Args;
use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use walvisor_vmm::disk::OpenDisk;
use walvisor_vmm::seccomp::Seccomp;

use super::metrics_file::MetricsFile;
use super::socket::Sockets;
use super::socket_names::SocketNames;
use super::{CommandError, socket};
use crate::archiving::Pushes;
use crate::control_socket::CONTROL_MODE;
use crate::disk_spec::DiskSpec;
use crate::disks::{self, OpenLogs};
use crate::landlock::{AllowedPaths, Landlock};
use crate::plan::Plan;
use crate::privileges::{self, ServiceUser};

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
    /// Become this user once the sockets are bound: a name, UID or UID:GID. Images, logs and
    /// their directories have to belong to it
    #[arg(long, value_name = "USER", value_parser = ServiceUser::parse)]
    pub user: Option<ServiceUser>,
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

    /// Gives up root, starts the pushes of the disks' logs, gives up all files and ports that the
    /// process doesn't need, and opens its disks.
    /// Call it while the process has one thread, and after all its sockets are bound: their names
    /// now belong to a child. System calls are still to be given up, by the seccomp filter.
    ///
    /// `allow` adds the other paths that the process uses later; those that it opens as its user
    /// are in `needs`. `wants_root`: a door needs root's capabilities, so they stay.
    pub(super) fn open_disks(
        &self,
        plan: &Plan,
        cpus: u8,
        names: &mut SocketNames,
        needs: &[&Path],
        wants_root: bool,
        allow: impl FnOnce(&mut AllowedPaths),
    ) -> Result<(Vec<OpenDisk>, OpenLogs, Pushes), CommandError> {
        if let Some(user) = &self.user {
            let given = names.give_to(user.ids());
            given.map_err(|error| self.cannot_become(&error))?;
        }
        names.hand_over().map_err(CommandError::failed)?;
        if !wants_root {
            let specs = plan.disks.iter();
            let logs: Vec<_> = specs.clone().filter_map(DiskSpec::log_directory).collect();
            let images = specs.clone().filter_map(|spec| spec.path.as_ref());
            let detached = specs.flat_map(|spec| &spec.detached);
            let paths = images.chain(detached).chain(&logs).map(PathBuf::as_path);
            let dropped =
                privileges::drop_root(self.user.as_ref(), paths.chain(needs.iter().copied()));
            dropped.map_err(|error| self.cannot_become(&error))?;
        }
        let made = disks::make_files(plan);
        let scratch = made.map_err(|error| self.cannot_open(&error))?;
        let directories: Vec<_> = needs.iter().copied().filter(|path| path.is_dir()).collect();
        let pushes = Pushes::start(plan.archives(), &directories, self.seccomp, self.landlock);
        let pushes = pushes.map_err(CommandError::Failed)?;
        let mut paths = AllowedPaths::of(&plan.disks);
        allow(&mut paths);
        paths.restrict(self.landlock);
        let opened = disks::open(plan, cpus, scratch);
        let (open, mut logs) = opened.map_err(|error| self.cannot_open(&error))?;
        logs.keep(plan).map_err(CommandError::Failed)?;
        let begun = pushes.begin(|log| logs.disk_of(log));
        begun.map_err(CommandError::Failed)?;
        pushes
            .awaited()
            .for_each(|log| logs.note_awaits_archive(log));
        disks::prepare_rings(&open);
        Ok((open, logs, pushes))
    }

    /// The error for disks that the process may not open as its user.
    fn cannot_open(&self, error: &walvisor_storage::Error) -> CommandError {
        let hint = self.user.as_ref().map_or_else(String::new, |user| {
            let name = user.name();
            format!(
                "; with --user {name} the images, the logs and their directories have to belong to \
                 it: chown -R {name} them"
            )
        });
        CommandError::Failed(format!("{error}{hint}"))
    }

    /// The error for a user that the process may not become.
    fn cannot_become(&self, error: &io::Error) -> CommandError {
        CommandError::Failed(match &self.user {
            Some(user) => format!(
                "--user {}: {error}: start it as root, or leave --user out",
                user.name()
            ),
            None => format!("capabilities: {error}"),
        })
    }
}
