//! A virtual machine that has been built, and its run.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kvm_ioctls::VcpuFd;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;
use vmm_sys_util::signal::Killable;
use walvisor_devices::backend::flush;
use walvisor_devices::event_loop::{Event, EventLoop, EventSet};
use walvisor_devices::throttle::Limits;

use super::exits::ExitCounters;
use super::memory_use::{self, MemoryUse};
use super::signals::TerminationSignals;
use super::starter::StarterJobs;
use super::vcpu::{SharedMachine, VcpuThread, install_kick_handler};
use crate::arch::x86_64::acpi::{AcpiError, MmioSlot};
use crate::control::{RunControl, RunEnd, kick_signal};
use crate::devices::acpi_pm::AcpiPm;
use crate::devices::console::ConsoleInput;
use crate::devices::serial::SerialPort;
use crate::disk::{DiskInUse, NetworkInUse};
use crate::pci::PciError;
use crate::probe::ProbeError;
use crate::readiness;
use crate::seccomp::{self, Seccomp, SeccompError, SyscallProfile};

/// Why a VM could not be built or run. Its text is one line: what, where, what to do.
#[derive(Debug, thiserror::Error)]
pub enum VmError {
    /// There is no usable KVM.
    #[error(transparent)]
    NoKvm(#[from] ProbeError),
    /// KVM refused a step.
    #[error("/dev/kvm: cannot {0}: {1}; see the host's kernel log")]
    Kvm(&'static str, kvm_ioctls::Error),
    /// More vCPUs than KVM runs.
    #[error("{cpus} vCPUs are more than this KVM runs ({most}): give fewer with --cpus")]
    TooManyCpus {
        /// The number that was asked for.
        cpus: u8,
        /// The largest number that KVM allows.
        most: usize,
    },
    /// Guest memory could not be mapped.
    #[error("cannot map {0} MiB of guest memory: {1}; give less with --memory")]
    Memory(u64, String),
    /// More virtio-mmio devices than there are interrupts for.
    #[error(
        "more than {0} disks and network devices with transport=mmio: give the others transport=pci"
    )]
    TooManyMmioDevices(usize),
    /// A network device cannot be made.
    #[error("network: {0}")]
    Network(String),
    /// A disk's device cannot be made.
    #[error("disk '{0}': {1}")]
    Disk(String, String),
    /// The PCI bus or its memory window is full, or a doorbell cannot be registered.
    #[error(transparent)]
    Pci(#[from] PciError),
    /// The firmware's tables could not be written.
    #[error(transparent)]
    Acpi(#[from] AcpiError),
    /// The system call filter cannot be installed.
    #[error(transparent)]
    Seccomp(#[from] SeccompError),
    /// The system refused a descriptor, a thread or a terminal mode.
    #[error("cannot {0}: {1}")]
    System(&'static str, io::Error),
}

/// The serial line, its input event, and whether stdin feeds it.
pub(super) struct SerialLine {
    pub(super) port: Arc<Mutex<SerialPort>>,
    pub(super) room: Arc<EventFd>,
    pub(super) stdin: bool,
}

/// Which VM of its process a VM is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Series {
    /// The only one.
    #[default]
    Only,
    /// The first one. Others follow on the same disks, each once the guest of the one before has
    /// asked for a reset.
    First,
    /// One of those that follow.
    Later,
}

/// A virtual machine that has not run yet.
pub struct Vm {
    pub(super) vcpus: Vec<VcpuFd>,
    pub(super) machine: Arc<SharedMachine>,
    pub(super) serial: SerialLine,
    pub(super) disks: Vec<DiskInUse>,
    pub(super) networks: Vec<NetworkInUse>,
    pub(super) slots: Vec<MmioSlot>,
    pub(super) measure_memory: bool,
    pub(super) signals: TerminationSignals,
    pub(super) power: Arc<Mutex<AcpiPm>>,
    pub(super) power_down: Duration,
    /// Dropped when the guest has ended, before its devices.
    pub(super) companions: Vec<Box<dyn Send>>,
    pub(super) seccomp: Seccomp,
    pub(super) series: Series,
    pub(super) jobs: Option<StarterJobs>,
}

/// The result of a run. The VM's devices are drained and dropped, and its disks are flushed.
pub struct RunOutcome {
    /// Why the run ended.
    pub ended: RunEnd,
    /// A signal or a user has asked for the end, whatever came first.
    pub end_wanted: bool,
    /// The moment just before the first KVM_RUN.
    pub first_run: Option<Instant>,
    /// Resident memory when the guest ended, if
    /// [`VmBuilder::measure_memory`](super::VmBuilder::measure_memory) asked for it.
    pub memory: Option<MemoryUse>,
    /// Disks that could not be flushed: name and reason.
    pub flush_failures: Vec<(String, String)>,
}

impl Vm {
    /// Ends or pauses the run from outside the guest.
    pub fn control(&self) -> Arc<RunControl> {
        self.machine.control.clone()
    }

    /// The moment just before the first KVM_RUN, once it has come.
    pub fn first_run(&self) -> Arc<OnceLock<Instant>> {
        self.machine.first_run.clone()
    }

    /// Drops `companion` when the guest has ended, before the devices are drained.
    pub fn drop_at_end(&mut self, companion: impl Send + 'static) {
        self.companions.push(Box::new(companion));
    }

    /// Guest memory. Untouched pages take no space.
    pub fn memory(&self) -> &GuestMemoryMmap {
        &self.machine.memory
    }

    /// vCPU `index`, for setting its initial state. All but vCPU 0 wait for INIT and SIPI unless
    /// their MP state is set.
    pub fn vcpu(&self, index: usize) -> Option<&VcpuFd> {
        self.vcpus.get(index)
    }

    /// The disks, in the order they were given.
    pub fn disks(&self) -> &[DiskInUse] {
        &self.disks
    }

    /// The network devices, in the order they were given.
    pub fn networks(&self) -> &[NetworkInUse] {
        &self.networks
    }

    /// Registers and interrupts of the devices behind virtio-mmio: the disks, then the network
    /// devices.
    pub fn mmio_slots(&self) -> &[MmioSlot] {
        &self.slots
    }

    /// Exits of each vCPU. The counters stay readable after the VM is gone.
    pub fn exits(&self) -> &[Arc<ExitCounters>] {
        &self.machine.exits
    }

    /// Runs the guest until it powers off, resets or crashes, or until a signal comes. Then stops
    /// the vCPUs, drains the devices and flushes the disks.
    ///
    /// # Errors
    /// If the system refuses a thread, a descriptor or a terminal mode. A crash of the guest is not
    /// an error: see [`RunOutcome::ended`].
    pub fn run(mut self) -> Result<RunOutcome, VmError> {
        // The process of a later VM is restricted already.
        if self.series != Series::Later {
            let again = self.series == Series::First;
            seccomp::restrict(self.seccomp, SyscallProfile::Vm { again }, false)?;
        }
        let jobs = self.jobs.take().expect("a VM runs once");
        let starter = jobs.start(self.seccomp);
        let starter = starter.map_err(|error| VmError::System("start the disks", error))?;
        install_kick_handler().map_err(|error| VmError::System("handle a signal", error))?;
        let input = if self.serial.stdin {
            let started = ConsoleInput::start(
                self.serial.port.clone(),
                self.serial.room.clone(),
                self.machine.control.clone(),
            );
            Some(started.map_err(|error| VmError::System("read the console", error))?)
        } else {
            None
        };
        let (threads, failed) = self.start_vcpus();
        let waited = if failed.is_none() {
            self.wait()
        } else {
            Ok(())
        };
        let control = self.machine.control.clone();
        if control.end_reason().is_none() {
            // The wait itself has failed, which leaves the vCPUs running.
            control.end(RunEnd::Quit);
        }
        // A limit that holds back requests would delay vCPUs that reset a device, and the draining
        // of all devices.
        let reset = matches!(control.end_reason(), Some(RunEnd::Reset));
        for disk in &self.disks {
            disk.throttle.set(Limits::default());
            // Disks that another VM will use go on to wait for space, unless they do so now.
            let condition = disk.backend.condition();
            let waits = condition
                .trouble()
                .is_some_and(|trouble| trouble.pauses_writes);
            if waits || !reset || self.series == Series::Only {
                disk.backend.end_pauses();
            } else {
                disk.backend.limit_waits();
            }
        }
        stop(threads);
        drop(input);
        self.companions.clear();

        let first_run = self.machine.first_run.get().copied();
        let memory = if self.measure_memory {
            memory_use::measure(&self.machine.memory)
        } else {
            None
        };
        let Self {
            machine,
            serial,
            disks,
            vcpus,
            ..
        } = self;
        // Dropping the devices finishes the guest's requests. After that nothing writes to the
        // disks.
        drop((machine, serial, vcpus));
        // The devices were the only senders of jobs, so the thread ends. A panic of that thread has
        // been printed.
        let _ = starter.join();
        let mut flush_failures = Vec::new();
        for disk in &disks {
            disk.backend.limit_waits();
            if let Err(error) = flush(&*disk.backend) {
                flush_failures.push((disk.name.clone(), error.to_string()));
            }
        }
        if let Some(error) = failed {
            return Err(VmError::System("start a vCPU thread", error));
        }
        waited.map_err(|error| VmError::System("wait for the guest", error))?;
        let ended = control.end_reason().cloned().unwrap_or(RunEnd::Quit);
        Ok(RunOutcome {
            ended,
            end_wanted: control.is_end_wanted(),
            first_run,
            memory,
            flush_failures,
        })
    }

    /// Starts a thread per vCPU. Returns the threads that run, and the error if one could not be
    /// started.
    fn start_vcpus(&mut self) -> (Vec<JoinHandle<()>>, Option<io::Error>) {
        let mut threads = Vec::new();
        // The other vCPUs wait for vCPU 0 to start them, so its thread starts last.
        while let Some(fd) = self.vcpus.pop() {
            let index = self.vcpus.len();
            let vcpu = VcpuThread {
                id: index as u8,
                fd,
                machine: self.machine.clone(),
                seccomp: self.seccomp,
            };
            let name = format!("vcpu{index}");
            match std::thread::Builder::new()
                .name(name)
                .spawn(move || vcpu.run())
            {
                Ok(thread) => threads.push(thread),
                Err(error) => return (threads, Some(error)),
            }
        }
        (threads, None)
    }

    /// Waits until the run ends. A signal or [`RunControl::ask_for_power_down`] presses the power
    /// button. The run is ended if the guest ignores the button, is asked a second time, or takes
    /// too long.
    fn wait(&mut self) -> io::Result<()> {
        let control = self.machine.control.clone();
        let mut events = EventLoop::<_, ()>::new()?;
        for (source, fd) in [
            (WakeSource::Ended, readiness::descriptor(control.event())),
            (WakeSource::Signal, self.signals.as_fd()),
            (
                WakeSource::PowerDown,
                readiness::descriptor(control.power_down()),
            ),
        ] {
            events.watch(fd, source, EventSet::IN)?;
        }
        let mut happened = Vec::new();
        // The deadline for the guest to power off, and why it was asked to.
        let mut pending: Option<(Instant, RunEnd)> = None;
        while control.end_reason().is_none() {
            let left = pending
                .as_ref()
                .map(|(end, _)| end.saturating_duration_since(Instant::now()));
            events.wait(left, &mut happened)?;
            let sources = happened.iter().filter_map(|event| match event {
                Event::Ready(source, _) => Some(*source),
                Event::Message(()) => None,
            });
            let reason = match sources.min() {
                Some(WakeSource::Ended) => continue,
                Some(WakeSource::Signal) => RunEnd::Signal(self.signals.take()?),
                Some(WakeSource::PowerDown) => {
                    // The event is readable, and only this thread reads it.
                    let _ = control.power_down().read();
                    RunEnd::Quit
                }
                None => {
                    if let Some((_, reason)) = pending.take_if(|_| left == Some(Duration::ZERO)) {
                        let seconds = self.power_down.as_secs();
                        tracing::warn!(
                            "the guest has not powered off within {seconds} s: stopping it"
                        );
                        control.end(reason);
                    }
                    continue;
                }
            };
            if matches!(reason, RunEnd::Signal(_)) {
                control.want_end();
            }
            let again = pending.is_some() || self.power_down.is_zero() || control.is_paused();
            let heard = !again && {
                let power = self.power.lock();
                // The lock is poisoned only by a vCPU that panicked, and that has ended the run.
                power.is_ok_and(|mut power| power.press_power_button())
            };
            if heard {
                pending = Some((Instant::now() + self.power_down, reason));
                continue;
            }
            if !again {
                tracing::warn!(
                    "the guest ignores the power button (no ACPI, or not booted far enough): \
                     stopping it"
                );
            }
            control.end(reason);
        }
        Ok(())
    }
}

/// What wakes the main thread, the most urgent first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum WakeSource {
    Ended,
    Signal,
    PowerDown,
}

/// Takes the vCPU threads out of the guest and joins them.
pub(super) fn stop(threads: Vec<JoinHandle<()>>) {
    for thread in &threads {
        // The signal fails only for a thread that has ended.
        let _ = thread.kill(kick_signal());
    }
    for thread in threads {
        // A panic of that thread has been printed, and has ended the run.
        let _ = thread.join();
    }
}
