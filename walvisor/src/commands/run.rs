//! `walvisor run`: boots a Linux kernel and runs until the guest powers off.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args;
use walvisor_vmm::arch::x86_64::linux::{self, LinuxImage};
use walvisor_vmm::arch::x86_64::{crash, start_state};
use walvisor_vmm::control::RunEnd;
use walvisor_vmm::devices::console::Console;
use walvisor_vmm::disk::OpenDisk;
use walvisor_vmm::probe::{self, Kvm};
use walvisor_vmm::vm::{
    DiskConfig, NetworkConfig, RunOutcome, Series, VmBuilder, block_termination_signals,
};

use super::CommandError;
use super::metrics_file::MetricsFile;
use super::process::ProcessArguments;
use super::socket::Sockets;
use super::socket_names::SocketNames;
use crate::archiving::Pushes;
use crate::control_socket::{CONTROL_MODE, ControlledProcess, Server};
use crate::disk_spec::{DiskArgument, DiskCommand, DiskSpec};
use crate::machine_memory::{check_guest_memory, machine_memory};
use crate::metrics::{DiskMetrics, RunMetrics, render};
use crate::metrics_server::MetricsServer;
use crate::net_spec::{NetArgument, NetSpec};
use crate::network::OpenNetwork;
use crate::plan::Plan;
use crate::size::parse_size;

/// The destination of the guest's serial console.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConsoleTarget {
    /// Stdin and stdout, which are usually the terminal.
    Stdio,
    /// No output and no input.
    Off,
    /// Output appended to a file, and no input.
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

/// What follows when the guest asks for a reset.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum OnReboot {
    /// The process ends
    #[default]
    Exit,
    /// The guest boots again, in the same process and on the same disks
    Restart,
}

/// The arguments of `walvisor run`.
#[derive(Args, Debug)]
#[command(next_help_heading = "Guest")]
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
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1,
        value_parser = clap::value_parser!(u8).range(1..=64)
    )]
    pub cpus: u8,
    /// Guest memory, with K, M or G
    #[arg(long, value_name = "SIZE", default_value = "512M", value_parser = parse_size)]
    pub memory: u64,
    /// Allow more guest memory than this machine has memory and swap
    #[arg(long)]
    pub overcommit: bool,
    /// A disk: path=FILE[,key=value ...]; may be given several times; 'help' lists the keys
    #[arg(
        long = "disk",
        value_name = "SPEC",
        help_heading = "Devices",
        value_parser = DiskArgument(DiskCommand::Run)
    )]
    pub disks: Vec<DiskSpec>,
    /// A network device: passt, tap=NAME or stream=SOCKET, and [,key=value ...]; may be given
    /// several times; 'help' lists the keys
    #[arg(long = "net", value_name = "SPEC", help_heading = "Devices", value_parser = NetArgument)]
    pub networks: Vec<NetSpec>,
    /// Serial console: stdio, off or file:PATH
    #[arg(
        long,
        value_name = "WHERE",
        default_value = "stdio",
        help_heading = "Devices",
        value_parser = parse_console
    )]
    pub console: ConsoleTarget,
    /// What follows when the guest reboots: exit or restart
    #[arg(long, value_name = "WHAT", value_enum, default_value_t)]
    pub on_reboot: OnReboot,
    /// Metrics, control, and what the process gives up.
    #[command(flatten)]
    pub process: ProcessArguments,
    /// Seconds that the guest may take to power off after a signal or 'walvisor ctl shutdown'; 0:
    /// stop it at once
    #[arg(long, value_name = "SECONDS", default_value_t = 30)]
    pub power_down_seconds: u32,
}

/// Boots the guest. Returns when it has powered off, when a signal has stopped it, or when it has
/// reset, unless that is followed by another boot.
///
/// # Errors
/// If the guest cannot be started, cannot run on this machine, or reports that its kernel panicked.
pub fn run(arguments: &RunArguments, started: Instant) -> Result<(), CommandError> {
    let plan = check(arguments)?;
    let image = LinuxImage {
        kernel: arguments.kernel.clone(),
        initrd: arguments.initrd.clone(),
        command_line: arguments.cmdline.clone(),
    };
    // Bad input must change nothing, and opening a disk may give it a log, so the check comes
    // first.
    linux::check(&image).map_err(CommandError::failed)?;
    // The process may not open it once it has given up root.
    let kvm = Arc::new(probe::open().map_err(CommandError::failed)?);
    let console = ConsoleOutput::new(&arguments.console)?;
    let metrics = arguments.process.metrics()?;
    // passt starts before this process has threads, filters or further descriptors.
    let mut networks = open_networks(arguments)?;
    // The socket is made while there is one thread, and before the disks are opened, whose recovery
    // may take long.
    let mut names = SocketNames::default();
    let control = arguments.process.control(&mut names)?;
    let mut sockets = Sockets::new(CONTROL_MODE);
    let scraped = arguments
        .process
        .metrics_sockets(None, &mut sockets, &mut names)?;
    // Blocked here already, because the logs' threads start before the VM is built and inherit the
    // mask.
    block_termination_signals().map_err(CommandError::failed)?;
    let kernel = [&arguments.kernel].into_iter().chain(&arguments.initrd);
    let kernel: Vec<_> = kernel.map(PathBuf::as_path).collect();
    let opened =
        arguments
            .process
            .open_disks(&plan, arguments.cpus, &mut names, &kernel, false, |paths| {
                kernel.iter().for_each(|file| paths.read(file));
                paths.read(Path::new("/proc/cpuinfo"));
            });
    let (disks, logs, pushes) = opened?;
    let pushes = Arc::new(pushes);
    let checked = networks.iter_mut().try_for_each(OpenNetwork::check);
    let ran = checked.map_err(CommandError::Failed).and_then(|()| {
        let guest = Guest {
            kvm,
            image,
            disks,
            networks,
            console,
            control,
            scraped,
            pushes: Arc::clone(&pushes),
        };
        run_on(arguments, started, guest, metrics)
    });
    drop(names);
    // The logs are closed however the run ended, and the first error is returned.
    let closed = logs.close().map_err(CommandError::failed);
    pushes.finish();
    ran.and(closed)
}

/// Refuses arguments that make no VM. Returns the plan of its disks.
fn check(arguments: &RunArguments) -> Result<Plan, CommandError> {
    let plan = Plan::new(&arguments.disks).map_err(CommandError::Usage)?;
    let memory = arguments.memory;
    check_guest_memory(memory)
        .map_err(|reason| CommandError::Usage(format!("--memory {memory}: {reason}")))?;
    let machine = machine_memory();
    if memory > machine && !arguments.overcommit {
        return Err(CommandError::Usage(format!(
            "--memory {memory}: this machine has {machine} bytes of memory and swap: give less, or \
             give --overcommit if the guest will not use all of it"
        )));
    }
    Ok(plan)
}

/// Opens the links of the guest's network devices.
fn open_networks(arguments: &RunArguments) -> Result<Vec<OpenNetwork>, CommandError> {
    let first = arguments
        .disks
        .first()
        .and_then(|disk| disk.path.as_deref());
    let place = first.unwrap_or(&arguments.kernel);
    let specs = arguments.networks.iter().enumerate();
    let opened = specs.map(|(index, spec)| OpenNetwork::open(spec, index, place));
    opened
        .collect::<Result<_, _>>()
        .map_err(CommandError::Failed)
}

/// What a guest is made of.
struct Guest {
    kvm: Arc<Kvm>,
    image: LinuxImage,
    disks: Vec<OpenDisk>,
    networks: Vec<OpenNetwork>,
    console: ConsoleOutput,
    /// The control socket.
    control: Option<UnixListener>,
    /// The sockets where metrics are served.
    scraped: Vec<OwnedFd>,
    pushes: Arc<Pushes>,
}

/// Runs the guest, and boots it again after a reset if that is wanted.
fn run_on(
    arguments: &RunArguments,
    started: Instant,
    guest: Guest,
    metrics: Option<MetricsFile>,
) -> Result<(), CommandError> {
    let mut series = match arguments.on_reboot {
        OnReboot::Exit => Series::Only,
        OnReboot::Restart => Series::First,
    };
    let caches: Vec<_> = guest
        .disks
        .iter()
        .map(|disk| disk.backend.write_cache())
        .collect();
    let (outcome, metrics_text) = loop {
        let (outcome, text) = boot(arguments, started, &guest, series, metrics.is_some())?;
        let resets = matches!(outcome.ended, RunEnd::Reset) && !outcome.end_wanted;
        if series == Series::Only || !resets || !outcome.flush_failures.is_empty() {
            break (outcome, text);
        }
        tracing::info!("the guest has reset: it boots again");
        series = Series::Later;
        // The driver of the guest that is gone may have chosen another mode.
        for (disk, cache) in guest.disks.iter().zip(&caches) {
            if disk.backend.capabilities().write_cache_toggle {
                disk.backend.set_write_cache(*cache);
            }
        }
    };
    if let Some(metrics) = metrics {
        metrics.write(&metrics_text)?;
    }
    match &outcome.ended {
        RunEnd::Crashed(crash) => return Err(CommandError::failed(crash)),
        RunEnd::Panicked => {
            return Err(CommandError::Failed(
                "the guest's kernel panicked: its console tells why; the disks are closed and need \
                 no repair"
                    .to_owned(),
            ));
        }
        _ => {}
    }
    match outcome.flush_failures.first() {
        Some((disk, error)) => Err(CommandError::Failed(format!(
            "disk '{disk}': the last flush failed: {error}; check the disk with 'walvisor disk \
             check'"
        ))),
        None => Ok(()),
    }
}

/// Boots the guest once. Returns its end and, if they are `measured`, its metrics as text.
fn boot(
    arguments: &RunArguments,
    started: Instant,
    guest: &Guest,
    series: Series,
    measured: bool,
) -> Result<(RunOutcome, String), CommandError> {
    let mut builder = VmBuilder::new()
        .kvm(Arc::clone(&guest.kvm))
        .cpus(arguments.cpus)
        .memory(arguments.memory)
        .console(guest.console.open().map_err(CommandError::failed)?)
        .measure_memory(measured)
        .series(series)
        .seccomp(arguments.process.seccomp)
        .power_down(Duration::from_secs(arguments.power_down_seconds.into()));
    for (disk, spec) in guest.disks.iter().zip(&arguments.disks) {
        builder = builder.disk(DiskConfig {
            disk: disk.clone(),
            transport: spec.transport,
            notifications: spec.notifications,
        });
    }
    for (network, spec) in guest.networks.iter().zip(&arguments.networks) {
        builder = builder.network(NetworkConfig {
            link: network.link.try_clone().map_err(CommandError::failed)?,
            device: network.device.clone(),
            transport: spec.transport,
            notifications: spec.notifications,
        });
    }
    let mut vm = builder.build().map_err(CommandError::failed)?;
    let entry = linux::load(vm.memory(), &guest.image).map_err(CommandError::failed)?;
    let boot_cpu = vm.vcpu(0).expect("a VM has at least one vCPU");
    start_state::set(boot_cpu, vm.memory(), entry).map_err(CommandError::failed)?;

    if series != Series::Later && !crash::hardware_virtualisation() {
        eprintln!(
            "walvisor: warning: this KVM has no VMX or SVM: it interprets ring 0, slowly and not \
             completely; a stock Linux kernel will hardly boot here; 'walvisor-guest-images boot \
             IMAGE' boots a root image nested"
        );
    }
    let controlled = ControlledProcess::vm(&vm, started);
    let controlled = Arc::new(controlled.with_pushes(Arc::clone(&guest.pushes)));
    if let Some(listener) = &guest.control {
        let listener = listener.try_clone().map_err(CommandError::failed)?;
        let server = Server::start(listener, Arc::clone(&controlled));
        vm.drop_at_end(server.map_err(CommandError::failed)?);
    }
    let scraped = guest.scraped.iter().map(OwnedFd::try_clone);
    let scraped: io::Result<_> = scraped.collect();
    let server = scraped
        .and_then(|sockets| MetricsServer::start(sockets, move || controlled.metrics_text()));
    vm.drop_at_end(server.map_err(CommandError::failed)?);
    let (attached, exits) = (vm.disks().to_vec(), vm.exits().to_vec());
    let networks = vm.networks().to_vec();
    let outcome = vm.run().map_err(CommandError::failed)?;
    let metrics = RunMetrics {
        started,
        first_run: outcome.first_run,
        exits: &exits,
        disks: attached.iter().map(DiskMetrics::from).collect(),
        pushes: &guest.pushes.states(),
        networks: &networks,
        memory: outcome.memory,
    };
    let text = if measured {
        render(&metrics)
    } else {
        String::new()
    };
    Ok((outcome, text))
}

/// Where the console's output goes, for each boot.
enum ConsoleOutput {
    Stdio,
    Off,
    File(File),
}

impl ConsoleOutput {
    /// Opens what `--console` names.
    fn new(target: &ConsoleTarget) -> Result<Self, CommandError> {
        match target {
            ConsoleTarget::Stdio => Ok(Self::Stdio),
            ConsoleTarget::Off => Ok(Self::Off),
            ConsoleTarget::File(path) => {
                let file = OpenOptions::new().create(true).append(true).open(path);
                let path = path.display();
                file.map(Self::File).map_err(|error| {
                    CommandError::Failed(format!(
                        "console '{path}': {error}: give a path that can be written"
                    ))
                })
            }
        }
    }

    /// The console of one boot.
    fn open(&self) -> io::Result<Console> {
        Ok(match self {
            Self::Stdio => Console::stdio(),
            Self::Off => Console::off(),
            Self::File(file) => Console::writer(file.try_clone()?),
        })
    }
}
