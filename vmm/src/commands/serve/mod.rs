//! `walvisor serve`: disks for programs other than this monitor's guests.

mod nbd;
mod tcmu;
mod vhost_user;

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::{Args, Subcommand};

use super::CommandError;
use super::metrics_file::MetricsFile;
use super::socket;
use super::socket_names::SocketNames;
use crate::control_socket::{
    CONTROL_MODE, Controlled, ControlledDisk, Kind, Power, Server as ControlServer,
};
use crate::disk_spec::DiskSpec;
use crate::disks::{self, OpenLogs};
use crate::landlock::{Landlock, Places};
use crate::metrics::{DiskMetrics, render_served};
use crate::seccomp::Seccomp;
use crate::vm::{DiskConfig, TerminationSignals, readiness};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

/// The arguments of `walvisor serve`.
#[derive(Args, Debug)]
pub struct ServeArguments {
    /// How clients reach the disks.
    #[command(subcommand)]
    pub door: Door,
}

/// The protocols.
#[derive(Debug, Subcommand)]
pub enum Door {
    /// NBD, until SIGTERM or SIGINT; prints where each disk is, as a URI, when it can be had
    Nbd(nbd::NbdArguments),
    /// vhost-user-blk, until SIGTERM or SIGINT; prints where each disk is when it can be had
    VhostUser(DaemonArguments),
    /// The kernel's SCSI target (TCMU), until SIGTERM or SIGINT; prints which disk each one is when it can be had
    #[command(
        mut_arg("disks", |arg| arg
            .required(false)
            .required_unless_present_any(["list", "remove"])
            .help("A disk: path=FILE[,name=NAME][,fabric=loop|vhost|none][,wwn=naa.N]; may be given several times")),
        mut_arg("mode", |arg| arg.hide(true))
    )]
    Tcmu(tcmu::TcmuArguments),
}

/// What every daemon takes.
#[derive(Args, Debug)]
pub struct DaemonArguments {
    /// A disk and where to serve it: path=FILE,socket=PATH or, NBD only, path=FILE,port=N[,address=IP]; may be given several times
    #[arg(long = "disk", value_name = "SPEC", required = true)]
    pub disks: Vec<DiskSpec>,
    /// Permissions of the sockets, octal
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = parse_mode)]
    pub mode: u32,
    /// Write metrics in Prometheus text at the end, to a file or - for stdout
    #[arg(long, value_name = "FILE")]
    pub metrics: Option<PathBuf>,
    /// Listen here for 'walvisor ctl'; only this user can connect
    #[arg(long, value_name = "SOCKET")]
    pub control: Option<PathBuf>,
    /// Seccomp filter: on, log or off. It stops system calls that the daemon does not need
    #[arg(long, value_name = "MODE", value_enum, default_value_t)]
    pub seccomp: Seccomp,
    /// Landlock: on or off. It takes away all files and ports that the daemon does not need, as far as the kernel supports that
    #[arg(long, value_name = "MODE", value_enum, default_value_t)]
    pub landlock: Landlock,
}

/// Parses the argument of `--mode`.
fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok();
    mode.filter(|mode| *mode <= 0o777)
        .ok_or_else(|| "give permissions as three octal digits, such as 660".to_owned())
}

impl DaemonArguments {
    /// Gives up what a daemon does not need, but for what `more` adds. To be called while there is one thread, when its sockets
    /// are bound, before the disks are opened.
    fn restrict(
        &self,
        names: &mut SocketNames,
        more: impl FnOnce(&mut Places),
    ) -> Result<(), CommandError> {
        names.entrust().map_err(CommandError::failed)?;
        disks::make_logs(&self.disks).map_err(CommandError::failed)?;
        let mut places = Places::of(&self.disks);
        more(&mut places);
        places.restrict(self.landlock);
        Ok(())
    }

    /// Where metrics go, if they are wanted.
    fn metrics(&self) -> Result<Option<MetricsFile>, CommandError> {
        self.metrics.as_deref().map(MetricsFile::open).transpose()
    }
}

/// Serves until a signal asks to stop.
///
/// # Errors
/// If the disks cannot be served, or not be closed.
pub fn run(arguments: &ServeArguments, started: Instant) -> Result<(), CommandError> {
    match &arguments.door {
        Door::Nbd(arguments) => nbd::run(arguments, started),
        Door::VhostUser(arguments) => vhost_user::run(arguments, started),
        Door::Tcmu(arguments) => tcmu::run(arguments, started),
    }
}

/// Ends a daemon however serving has ended: tells what was done, and closes the disks, which nobody may use any more.
/// What went wrong first is what is told.
fn conclude(
    served: Result<Vec<DiskMetrics>, CommandError>,
    metrics: Option<MetricsFile>,
    open: Vec<DiskConfig>,
    logs: OpenLogs,
) -> Result<(), CommandError> {
    let told = match (&served, metrics) {
        (Ok(disks), Some(metrics)) => metrics.write(&render_served(disks)),
        _ => Ok(()),
    };
    drop(open);
    let closed = logs.close().map_err(CommandError::failed);
    served.map(|_| ()).and(told).and(closed)
}

/// Says where the disks are.
fn announce(lines: &str) {
    let mut stdout = std::io::stdout();
    // Nobody has to listen.
    let _ = stdout
        .write_all(lines.as_bytes())
        .and_then(|()| stdout.flush());
}

/// What ends a daemon: signals, and its control socket.
struct Ending {
    signals: TerminationSignals,
    /// Where to listen for `walvisor ctl`.
    socket: Option<UnixListener>,
    kind: Kind,
    started: Instant,
}

impl Ending {
    /// Blocks the signals, and makes the control socket. To be called while there is one thread: a signal is for the one
    /// that waits for it.
    fn prepare(
        arguments: &DaemonArguments,
        names: &mut SocketNames,
        kind: Kind,
        started: Instant,
    ) -> Result<Self, CommandError> {
        let signals = TerminationSignals::block().map_err(CommandError::failed)?;
        let bound = arguments.control.as_deref();
        let bound = bound.map(|path| socket::bind(path, CONTROL_MODE));
        let socket = bound.transpose()?.map(|(listener, file)| {
            names.add(file);
            listener
        });
        Ok(Self {
            signals,
            socket,
            kind,
            started,
        })
    }

    /// Lets `disks` be controlled, and waits until a signal or a client asks for the end.
    fn wait(mut self, disks: Vec<ControlledDisk>) -> Result<(), CommandError> {
        let asked = EventFd::new(EFD_NONBLOCK).map_err(CommandError::failed)?;
        let asks = asked.try_clone().map_err(CommandError::failed)?;
        // A full counter is readable all the same.
        let power = Power::Daemon(Box::new(move || drop(asks.write(1))));
        let controlled = Arc::new(Controlled::new(self.kind, self.started, disks, power));
        let server = self.socket.take();
        let server = server.map(|listener| ControlServer::start(listener, Arc::clone(&controlled)));
        let _server = server.transpose().map_err(CommandError::failed)?;
        let ended = readiness::wait([self.signals.as_fd(), readiness::descriptor(&asked)]);
        controlled.lift_limits();
        ended.map(drop).map_err(CommandError::failed)
    }
}
