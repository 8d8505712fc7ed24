//! A daemon: one process that serves disks behind any doors. Its steps from start to end:
//!
//! ```text
//!   sockets of a service manager ─▶ pool::plan ─▶ Shutdown::prepare ─▶ Doors::bind
//!     ─▶ ProcessArguments::open_disks (as `walvisor run`):
//!        no root ─▶ Pushes::start ─▶ Landlock ─▶ disks::open ─▶ Pushes::begin
//!     ─▶ seccomp ─▶ Doors::start ─▶ Shutdown::wait ─▶ Doors::stop
//!     ─▶ names of sockets are removed ─▶ logs are closed ─▶ Pushes::finish ─▶ Doors::logs_closed
//! ```

use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::Instant;

use clap::Args;
use walvisor_devices::backend::SECTOR_SIZE;
use walvisor_devices::event_loop::EventSet;
use walvisor_devices::listen::{Stop, Threads, Waiter, WakeReason};
use walvisor_vmm::disk::{DiskInUse, OpenDisk};
use walvisor_vmm::seccomp;
use walvisor_vmm::vm::TerminationSignals;

use super::config::PoolFile;
use super::door::Doors;
use super::ending::Ending;
use super::hotplug::{Hotplug, ServedDisks, SharedLogs};
use super::nbd::TlsArguments;
use super::pool::{self, PoolDisk};
use crate::archiving::Pushes;
use crate::commands::CommandError;
use crate::commands::metrics_file::MetricsFile;
use crate::commands::process::ProcessArguments;
use crate::commands::socket::{Sockets, remove_dead};
use crate::commands::socket_names::SocketNames;
use crate::control_socket::{ControlledProcess, Power, Server as ControlServer};
use crate::disk_spec::{DiskArgument, DiskCommand, DiskSpec};
use crate::memory_limit;
use crate::metrics::{DiskMetrics, render_served};
use crate::metrics_server::MetricsServer;
use crate::plan::{Plan, longest_close_time};
use crate::point::retain_text;
use crate::repeats;
use crate::size::{human_size, parse_size};

/// The arguments of every daemon.
#[derive(Args, Debug)]
#[command(next_help_heading = "Disks")]
pub struct DaemonArguments {
    /// A disk and how clients reach it: path=FILE,door=nbd,socket=PATH ...; may be given several
    /// times; 'help' lists the keys
    #[arg(
        long = "disk",
        value_name = "SPEC",
        required_unless_present = "config",
        value_parser = DiskArgument(DiskCommand::Serve)
    )]
    pub disks: Vec<DiskSpec>,
    /// Serve the disks of this TOML file too; SIGHUP reads it again
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Permissions of the sockets, octal
    #[arg(long, value_name = "MODE", default_value = "600", value_parser = parse_mode)]
    pub mode: u32,
    /// Let disks be added beneath this directory, by 'walvisor ctl SOCKET add-disk' or --config;
    /// may be given several times
    #[arg(long = "disk-dir", value_name = "DIR", value_parser = parse_directory)]
    pub disk_dirs: Vec<PathBuf>,
    /// Memory that the process may use, such as 512M: at the limit, the clients that ask for most
    /// wait. Default: three quarters of what its cgroup and this machine have
    #[arg(long, value_name = "SIZE", help_heading = "Process", value_parser = parse_size)]
    pub memory_limit: Option<u64>,
    /// TLS of disks with door=nbd.
    #[command(flatten)]
    pub tls: TlsArguments,
    /// Metrics, control, and what the process gives up.
    #[command(flatten)]
    pub process: ProcessArguments,
}

/// Parses the argument of `--disk-dir`.
fn parse_directory(text: &str) -> Result<PathBuf, String> {
    let found = Path::new(text).canonicalize();
    let found = found.map_err(|error| format!("{error}: give a directory that exists"))?;
    if found.is_dir() {
        Ok(found)
    } else {
        Err("not a directory: give a directory that exists".to_owned())
    }
}

/// Parses the argument of `--mode`.
fn parse_mode(text: &str) -> Result<u32, String> {
    let mode = u32::from_str_radix(text, 8).ok();
    mode.filter(|mode| *mode <= 0o777)
        .ok_or_else(|| "give permissions as three octal digits, such as 660".to_owned())
}

impl DaemonArguments {
    /// Serves until a signal or a control client asks it to stop. `kind`: the command, which is
    /// also the door of a disk that names none.
    ///
    /// # Errors
    /// If the disks cannot be served or closed.
    pub(super) fn run(&self, kind: DiskCommand, started: Instant) -> Result<(), CommandError> {
        if !self.disk_dirs.is_empty() && self.process.control.is_none() && self.config.is_none() {
            return Err(CommandError::Usage(
                "--disk-dir is for disks that are added later: \
                 give --control SOCKET or --config FILE too"
                    .to_owned(),
            ));
        }
        let mut sockets = Sockets::take(self.mode)?;
        let mut disks: Vec<_> = self
            .disks
            .iter()
            .map(|spec| PoolDisk::of_command_line(spec.clone()))
            .collect();
        let mut plan = pool::plan(&disks, None).map_err(CommandError::Usage)?;
        let mut file = None;
        if let Some(path) = &self.config {
            let (opened, all) = PoolFile::open(path, kind, &mut disks)?;
            (file, plan) = (Some(opened), all);
        }
        let specs = &plan.disks;
        let opens = !self.disk_dirs.is_empty();
        if self.tls.is_given() && specs.iter().all(|spec| spec.door != DiskCommand::Nbd) {
            return Err(CommandError::Usage(
                "--tls and --tls-certificates are for door=nbd, which no disk has: leave them out"
                    .to_owned(),
            ));
        }
        // The kernel's target wants root.
        let wants_root = specs.iter().any(|spec| spec.door == DiskCommand::Tcmu);
        if wants_root && self.process.user.is_some() {
            return Err(CommandError::Usage(
                "--user is for daemons without door=tcmu, which needs root: leave it out"
                    .to_owned(),
            ));
        }
        let tls = self.tls.read()?;
        // Declared first, so that a socket's name is removed after its listener is dropped.
        let mut names = SocketNames::default();
        let mut doors = Doors::new(specs, self.mode, opens, &tls);
        let limit = self.memory_limit;
        let limit = limit.or_else(|| file.as_ref()?.memory_limit());
        let _memory = memory_limit::set(limit, &plan).map_err(CommandError::Usage)?;
        let metrics = self.process.metrics()?;
        self.disk_dirs.iter().for_each(|dir| remove_dead(dir));
        let shutdown = Shutdown::prepare(self, &mut names, kind, started)?;
        doors.bind(specs, &mut sockets, &mut names)?;
        let listen = file.as_ref().and_then(PoolFile::metrics_listen);
        let scraped = self
            .process
            .metrics_sockets(listen, &mut sockets, &mut names)?;
        sockets.finish()?;
        let config = file.iter().flat_map(PoolFile::places);
        let needs = self.disk_dirs.iter().chain(config);
        let needs: Vec<_> = needs.map(PathBuf::as_path).collect();
        let opened = self
            .process
            .open_disks(&plan, 1, &mut names, &needs, wants_root, |paths| {
                self.disk_dirs.iter().for_each(|dir| paths.disks_in(dir));
                doors.allow(paths);
                file.iter().for_each(|file| file.allow(paths));
            });
        let (open, logs, pushes) = opened?;
        let pushes = Arc::new(pushes);
        let logs = SharedLogs::new(logs);
        let profile = doors.profile();
        let served = ServedDisks::new(doors, disks);
        let hotplug = Hotplug::new(kind, served, &self.disk_dirs, &logs, file.as_ref());
        let served = seccomp::restrict(self.process.seccomp, profile, opens)
            .map_err(CommandError::failed)
            .and_then(|()| serve(&hotplug, &plan, open))
            .and_then(|disks| shutdown.wait(disks, &hotplug, file, scraped, &pushes));
        let (served, ending) = match served {
            Ok((disks, ending)) => (Ok(disks), Some(ending)),
            Err(error) => (Err(error), None),
        };
        let mut doors = std::mem::take(&mut hotplug.lock().doors);
        let stopped = doors.stop();
        let served = served.map(|disks| disks.iter().map(DiskMetrics::from).collect());
        drop(names);
        if let Some(ending) = &ending {
            let disks = &hotplug.lock().disks;
            ending.close_logs(longest_close_time(disks.iter().map(PoolDisk::spec)));
        }
        let finished = finish(served, metrics, &logs, &pushes);
        drop(ending);
        pushes.finish();
        finished.and(stopped)?;
        doors.logs_closed()
    }
}

/// Starts to serve open disks, and prints where clients find them.
fn serve(
    hotplug: &Hotplug,
    plan: &Plan,
    disks: Vec<OpenDisk>,
) -> Result<Vec<DiskInUse>, CommandError> {
    let doors = &mut hotplug.lock().doors;
    assert_eq!(plan.disks.len(), disks.len(), "each disk is open");
    let (mut lines, mut in_use) = (String::new(), Vec::new());
    for (spec, disk) in plan.disks.iter().zip(&disks) {
        let door = doors.of_mut(spec).map_err(CommandError::Failed)?;
        let added = door.add(spec, disk).map_err(CommandError::Failed)?;
        let size = human_size(disk.backend.sectors() * SECTOR_SIZE);
        let (name, place) = (&added.disk.name, &added.place);
        lines.push_str(&format!("serving {name}: {size} at {place}\n"));
        in_use.push(added.disk);
    }
    for log in &plan.logs {
        if let Some(retain) = log.options.retain {
            let (log, kept) = (log.directory.display(), retain_text(retain));
            lines.push_str(&format!("log {log}: keeps {kept}\n"));
        }
    }
    doors.start()?;
    announce(&lines);
    Ok(in_use)
}

/// Ends a daemon, whether serving succeeded or failed: writes the metrics, and closes the disks,
/// which nobody may use any more. Returns the first error.
fn finish(
    served: Result<Vec<DiskMetrics>, CommandError>,
    metrics: Option<MetricsFile>,
    logs: &SharedLogs,
    pushes: &Pushes,
) -> Result<(), CommandError> {
    let written = match (&served, metrics) {
        (Ok(disks), Some(metrics)) => metrics.write(&render_served(disks, &pushes.states())),
        _ => Ok(()),
    };
    let closed = logs.close().map_err(CommandError::failed);
    served.map(|_| ()).and(written).and(closed)
}

/// Prints text on stdout.
pub(super) fn announce(lines: &str) {
    let mut stdout = std::io::stdout();
    // It is fine if nobody reads the output.
    let _ = stdout
        .write_all(lines.as_bytes())
        .and_then(|()| stdout.flush());
}

/// What ends a daemon: a signal, or a request on its control socket.
struct Shutdown {
    signals: TerminationSignals,
    /// The socket that listens for `walvisor ctl`.
    socket: Option<UnixListener>,
    kind: DiskCommand,
    started: Instant,
}

impl Shutdown {
    /// Blocks the signals, and makes the control socket. Call it while there is one thread, so that
    /// all later threads inherit the blocked signals.
    fn prepare(
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

    /// Serves the control socket, and metrics at the sockets `scraped`, and waits until a signal or
    /// a control client asks to stop. With a `file`, SIGHUP reads it again instead, in a thread of
    /// its own: the removal of a disk may take long. Returns the disks that are left at the end.
    fn wait(
        mut self,
        disks: Vec<DiskInUse>,
        hotplug: &Hotplug,
        file: Option<PoolFile>,
        scraped: Vec<OwnedFd>,
        pushes: &Arc<Pushes>,
    ) -> Result<(Vec<DiskInUse>, Ending), CommandError> {
        let stop = Stop::new().map_err(CommandError::failed)?;
        let mut waiter = Waiter::new(&self.signals, &stop).map_err(CommandError::failed)?;
        let power = Power::Daemon {
            end: Box::new(move || stop.tell()),
            hotplug: Some(Box::new(hotplug.clone())),
        };
        let controlled = ControlledProcess::new(self.kind, self.started, disks, power);
        let controlled = Arc::new(controlled.with_pushes(Arc::clone(pushes)));
        let server = self.socket.take();
        let server = server.map(|listener| ControlServer::start(listener, Arc::clone(&controlled)));
        let server = server.transpose().map_err(CommandError::failed)?;
        let shown = Arc::clone(&controlled);
        let metrics = MetricsServer::start(scraped, move || shown.metrics_text());
        let metrics = metrics.map_err(CommandError::failed)?;
        let reloads = file.map(|file| Reloads::start(file, &controlled, hotplug));
        let reloads = reloads.transpose().map_err(CommandError::failed)?;
        let ended = loop {
            let minute = Some(Instant::now() + repeats::MINUTE);
            match waiter.wait(&self.signals, EventSet::IN, minute) {
                Ok(WakeReason::TimedOut) => repeats::flush(false),
                Ok(WakeReason::Ready) => match (self.signals.take(), &reloads) {
                    (Ok(libc::SIGHUP), Some(reloads)) => reloads.ask(),
                    (taken, _) => break taken.map(|_| ()),
                },
                ended => break ended.map(|_| ()),
            }
        };
        drop(waiter);
        let (in_use, changing) = (controlled.throttles(), hotplug.clone());
        let silent = move || {
            let busy = in_use.iter().filter(|(_, throttle)| throttle.is_busy());
            let busy = busy.map(|(name, _)| name.clone());
            let disks = busy.chain(changing.changing());
            let disks = disks.map(|name| format!("disk '{name}' does not answer"));
            let disks: Vec<_> = disks.collect();
            if !disks.is_empty() {
                return disks;
            }
            let logs = changing.open_logs().into_iter();
            let logs = logs.map(|log| format!("log {} is not closed", log.display()));
            logs.collect()
        };
        let ending = Ending::watch(self.signals, silent).map_err(CommandError::failed)?;
        controlled.lift_limits();
        drop((server, metrics, reloads));
        let disks = Arc::into_inner(controlled).map(ControlledProcess::into_disks);
        ended.map_err(CommandError::failed)?;
        Ok((disks.into_iter().flatten().collect(), ending))
    }
}

/// Reads the file of `--config` again. Dropping this waits until the one under way has ended.
struct Reloads {
    asked: Sender<()>,
    _thread: Threads,
}

impl Reloads {
    fn start(
        mut file: PoolFile,
        controlled: &Arc<ControlledProcess>,
        hotplug: &Hotplug,
    ) -> std::io::Result<Self> {
        let (asked, asks) = channel();
        let (controlled, hotplug) = (Arc::clone(controlled), hotplug.clone());
        let mut thread = Threads::new("the daemon");
        thread.start(thread::Builder::new().name("reload".into()), move || {
            // What was asked for while the file was read may be newer than what was read.
            while asks.recv().is_ok() && !controlled.is_ending() {
                asks.try_iter().for_each(drop);
                file.reload(&controlled, &hotplug);
            }
        })?;
        Ok(Self {
            asked,
            _thread: thread,
        })
    }

    fn ask(&self) {
        // The thread ends only after this is dropped.
        let _ = self.asked.send(());
    }
}
