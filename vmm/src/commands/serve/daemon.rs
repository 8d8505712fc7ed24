//! The parts that all daemons share: their arguments, giving up rights, and their end.

use std::io::Write;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use walvisor_devices::event_loop::EventSet;
use walvisor_devices::listen::{Stop, Waiter};

use super::members::SharedLogs;
use crate::commands::CommandError;
use crate::commands::metrics_file::MetricsFile;
use crate::commands::process::ProcessArguments;
use crate::commands::socket_names::SocketNames;
use crate::control_socket::{Controlled, Members, Power, Server as ControlServer};
use crate::disk::DiskInUse;
use crate::disk_spec::{DiskArgument, DiskCommand, DiskSpec};
use crate::disks::{self, ScratchFiles};
use crate::landlock::Places;
use crate::metrics::{DiskMetrics, render_served};
use crate::seccomp::{self, Duty};
use crate::vm::TerminationSignals;

/// What every daemon takes.
#[derive(Args, Debug)]
pub struct DaemonArguments {
    /// The disks. [`Door`](super::Door) gives each daemon help and keys of its own.
    #[arg(long = "disk", value_name = "SPEC", required = true, value_parser = DiskArgument(DiskCommand::Nbd))]
    pub disks: Vec<DiskSpec>,
    /// Permissions of the sockets, octal
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = parse_mode)]
    pub mode: u32,
    /// Let 'walvisor ctl SOCKET add-disk' add disks beneath this directory; may be given several times
    #[arg(long = "disk-dir", value_name = "DIR", requires = "control", value_parser = parse_directory)]
    pub disk_dirs: Vec<PathBuf>,
    /// Metrics, control, and what the process gives up.
    #[command(flatten)]
    pub process: ProcessArguments,
}

/// Parses the argument of `--disk-dir`.
fn parse_directory(text: &str) -> Result<PathBuf, String> {
    let found = Path::new(text).canonicalize();
    let found = found.map_err(|error| format!("{error}: give a directory that exists"))?;
    match found.is_dir() {
        true => Ok(found),
        false => Err("it is no directory: give one".to_owned()),
    }
}

/// Parses the argument of `--mode`.
fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok();
    mode.filter(|mode| *mode <= 0o777)
        .ok_or_else(|| "give permissions as three octal digits, such as 660".to_owned())
}

impl DaemonArguments {
    /// Gives up every right that a daemon does not need, except those that `more` adds. To be called while
    /// there is one thread, after its sockets are bound and before the disks are opened. Returns the files that were made
    /// for the disks before.
    pub(super) fn restrict(
        &self,
        names: &mut SocketNames,
        more: impl FnOnce(&mut Places),
    ) -> Result<ScratchFiles, CommandError> {
        names.entrust().map_err(CommandError::failed)?;
        let scratch = disks::make_files(&self.disks).map_err(CommandError::failed)?;
        let mut places = Places::of(&self.disks);
        self.disk_dirs.iter().for_each(|dir| places.disks_in(dir));
        more(&mut places);
        places.restrict(self.process.landlock);
        Ok(scratch)
    }

    /// Gives up every system call that a daemon does not need. To be called once the disks are open.
    pub(super) fn filter(&self, duty: Duty) -> Result<(), CommandError> {
        seccomp::restrict(self.process.seccomp, duty, !self.disk_dirs.is_empty())
            .map_err(CommandError::failed)
    }
}

/// Ends a daemon however serving has ended: writes the metrics, and closes the disks, which must no longer be
/// in use. The first error is returned.
pub(super) fn conclude(
    served: Result<Vec<DiskMetrics>, CommandError>,
    metrics: Option<MetricsFile>,
    logs: &SharedLogs,
) -> Result<(), CommandError> {
    let told = match (&served, metrics) {
        (Ok(disks), Some(metrics)) => metrics.write(&render_served(disks)),
        _ => Ok(()),
    };
    let closed = logs.take().close().map_err(CommandError::failed);
    served.map(|_| ()).and(told).and(closed)
}

/// Prints where the disks can be reached.
pub(super) fn announce(lines: &str) {
    let mut stdout = std::io::stdout();
    // A failed write is ignored: the output need not be read.
    let _ = stdout
        .write_all(lines.as_bytes())
        .and_then(|()| stdout.flush());
}

/// The two things that end a daemon: a signal, or a request on its control socket.
pub(super) struct Ending {
    signals: TerminationSignals,
    /// The socket that listens for `walvisor ctl`.
    socket: Option<UnixListener>,
    kind: DiskCommand,
    started: Instant,
}

impl Ending {
    /// Blocks the signals, and makes the control socket. To be called while there is one thread, so that every
    /// later thread inherits the blocked signals.
    pub(super) fn prepare(
        arguments: &DaemonArguments,
        names: &mut SocketNames,
        kind: DiskCommand,
        started: Instant,
    ) -> Result<Self, CommandError> {
        let signals = TerminationSignals::block().map_err(CommandError::failed)?;
        let socket = arguments.process.control(names)?;
        Ok(Self {
            signals,
            socket,
            kind,
            started,
        })
    }

    /// Lets `disks` be controlled, and waits until a signal or a control client asks for the end. Then `members`, which
    /// serves the disks, is dropped. Returns the metrics of the disks that there are at the end.
    pub(super) fn wait(
        mut self,
        disks: Vec<DiskInUse>,
        members: Option<Box<dyn Members>>,
    ) -> Result<Vec<DiskMetrics>, CommandError> {
        let stop = Stop::new().map_err(CommandError::failed)?;
        let mut waiter = Waiter::new(&self.signals, &stop).map_err(CommandError::failed)?;
        let power = Power::Daemon {
            end: Box::new(move || stop.tell()),
            members,
        };
        let controlled = Arc::new(Controlled::new(self.kind, self.started, disks, power));
        let server = self.socket.take();
        let server = server.map(|listener| ControlServer::start(listener, Arc::clone(&controlled)));
        let server = server.transpose().map_err(CommandError::failed)?;
        let ended = waiter.wait(&self.signals, EventSet::IN, None);
        controlled.lift_limits();
        drop(server);
        let disks = Arc::into_inner(controlled).map(Controlled::into_disks);
        let disks = disks.into_iter().flatten();
        ended.map_err(CommandError::failed)?;
        Ok(disks.map(|disk| DiskMetrics::from(&disk)).collect())
    }
}
