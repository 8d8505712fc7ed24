//! The parts that all daemons share: their arguments, giving up rights, and their end.

use std::io::Write;
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use walvisor_devices::event_loop::EventSet;
use walvisor_devices::listen::{Stop, Waiter};

use crate::commands::CommandError;
use crate::commands::metrics_file::MetricsFile;
use crate::commands::process::ProcessArguments;
use crate::commands::socket_names::SocketNames;
use crate::control_socket::{Controlled, Power, Server as ControlServer};
use crate::disk::{DiskInUse, OpenDisk};
use crate::disk_spec::{DiskArgument, DiskCommand, DiskSpec};
use crate::disks::{self, OpenLogs};
use crate::landlock::Places;
use crate::metrics::{DiskMetrics, render_served};
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
    /// Metrics, control, and what the process gives up.
    #[command(flatten)]
    pub process: ProcessArguments,
}

/// Parses the argument of `--mode`.
fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok();
    mode.filter(|mode| *mode <= 0o777)
        .ok_or_else(|| "give permissions as three octal digits, such as 660".to_owned())
}

impl DaemonArguments {
    /// Gives up every right that a daemon does not need, except those that `more` adds. To be called while
    /// there is one thread, after its sockets are bound and before the disks are opened.
    pub(super) fn restrict(
        &self,
        names: &mut SocketNames,
        more: impl FnOnce(&mut Places),
    ) -> Result<(), CommandError> {
        names.entrust().map_err(CommandError::failed)?;
        disks::make_logs(&self.disks).map_err(CommandError::failed)?;
        let mut places = Places::of(&self.disks);
        more(&mut places);
        places.restrict(self.process.landlock);
        Ok(())
    }
}

/// Ends a daemon however serving has ended: writes the metrics, and closes the disks, which must no longer be
/// in use. The first error is returned.
pub(super) fn conclude(
    served: Result<Vec<DiskMetrics>, CommandError>,
    metrics: Option<MetricsFile>,
    open: Vec<OpenDisk>,
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

    /// Lets `disks` be controlled, and waits until a signal or a control client asks for the end.
    pub(super) fn wait(mut self, disks: Vec<DiskInUse>) -> Result<(), CommandError> {
        let stop = Stop::new().map_err(CommandError::failed)?;
        let mut waiter = Waiter::new(&self.signals, &stop).map_err(CommandError::failed)?;
        let power = Power::Daemon(Box::new(move || stop.tell()));
        let controlled = Arc::new(Controlled::new(self.kind, self.started, disks, power));
        let server = self.socket.take();
        let server = server.map(|listener| ControlServer::start(listener, Arc::clone(&controlled)));
        let _server = server.transpose().map_err(CommandError::failed)?;
        let ended = waiter.wait(&self.signals, EventSet::IN, None);
        controlled.lift_limits();
        ended.map(drop).map_err(CommandError::failed)
    }
}
