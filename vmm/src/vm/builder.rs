//! Builds a [`Vm`]: KVM's side, guest memory, devices and their interrupts, firmware tables.

use std::io;
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::Duration;

use kvm_bindings::{
    KVM_MAX_CPUID_ENTRIES, KVM_PIT_SPEAKER_DUMMY, kvm_pit_config, kvm_userspace_memory_region,
};
use kvm_ioctls::{Cap, IoEventAddress, Kvm, VcpuFd, VmFd};
use vm_memory::{GuestMemoryBackend, GuestMemoryMmap, GuestMemoryRegion};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};
use walvisor_devices::block::{VirtioBlock, WorkerPool};
use walvisor_devices::control::DeviceControl;
use walvisor_devices::net::{Link, NetConfig, VirtioNet};
use walvisor_devices::transport::{self, Bar, MmioTransport, PciDoorbell, PciTransport};
use walvisor_devices::virtio_scsi::VirtioScsi;

use super::exits::ExitCounters;
use super::interrupts::{FunctionVectors, GsiRouter};
use super::machine::{SerialLine, Series, Vm, VmError};
use super::memory_use;
use super::signals::TerminationSignals;
use super::starter::StarterHandle;
use super::vcpu::SharedMachine;
use crate::arch::x86_64::acpi::{self, MmioSlot};
use crate::arch::x86_64::{cpuid, layout};
use crate::bus::{Bus, BusDevice, SharedDevice};
use crate::control::RunControl;
use crate::devices::acpi_pm::{self, AcpiPm};
use crate::devices::console::Console;
use crate::devices::keyboard::Keyboard;
use crate::devices::panic::{self, PanicPort};
use crate::devices::serial::{self, SerialPort};
use crate::disk::{DeviceKind, DiskInUse, NetworkInUse, Notifications, OpenDisk, TransportKind};
use crate::pci::{ConfigPorts, Ecam, PciBus, PciFunction};
use crate::probe;
use crate::seccomp::Seccomp;

/// Ports of the keyboard controller.
const KEYBOARD_SIZE: u64 = 5;
/// Ports of PCI configuration mechanism 1.
const PCI_PORTS_SIZE: u64 = 8;

/// A disk of the VM.
pub struct DiskConfig {
    /// The open disk.
    pub disk: OpenDisk,
    /// The transport through which the guest reaches the disk.
    pub transport: TransportKind,
    /// How doorbells and interrupts travel between the guest and the device.
    pub notifications: Notifications,
}

impl From<OpenDisk> for DiskConfig {
    /// The disk over virtio-mmio, with eventfds.
    fn from(disk: OpenDisk) -> Self {
        Self {
            disk,
            transport: TransportKind::default(),
            notifications: Notifications::default(),
        }
    }
}

/// A network device of the VM.
pub struct NetworkConfig {
    /// What carries its frames.
    pub link: Link,
    /// Its address and sizes.
    pub device: NetConfig,
    /// The transport through which the guest reaches the device.
    pub transport: TransportKind,
    /// How doorbells and interrupts travel between the guest and the device.
    pub notifications: Notifications,
}

/// The configuration of a VM. The defaults are one vCPU, 512 MiB of memory, no console, disk or
/// network.
pub struct VmBuilder {
    kvm: Option<Arc<Kvm>>,
    cpus: u8,
    memory: u64,
    console: Console,
    disks: Vec<DiskConfig>,
    networks: Vec<NetworkConfig>,
    measure_memory: bool,
    power_down: Duration,
    seccomp: Seccomp,
    series: Series,
}

impl Default for VmBuilder {
    fn default() -> Self {
        Self {
            kvm: None,
            cpus: 1,
            memory: 512 << 20,
            console: Console::off(),
            disks: Vec::new(),
            networks: Vec::new(),
            measure_memory: false,
            power_down: Duration::ZERO,
            seccomp: Seccomp::Off,
            series: Series::default(),
        }
    }
}

impl VmBuilder {
    /// A VM with the default configuration.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes a KVM that is open, for a process that may not open `/dev/kvm` any more.
    pub fn kvm(mut self, kvm: Arc<Kvm>) -> Self {
        self.kvm = Some(kvm);
        self
    }

    /// Number of vCPUs, at least 1.
    pub fn cpus(mut self, cpus: u8) -> Self {
        self.cpus = cpus;
        self
    }

    /// Guest memory in bytes, a multiple of 4096 from [`layout::LEAST_MEMORY`] to
    /// [`layout::MOST_MEMORY`].
    pub fn memory(mut self, bytes: u64) -> Self {
        self.memory = bytes;
        self
    }

    /// Sets the other end of the serial line.
    pub fn console(mut self, console: Console) -> Self {
        self.console = console;
        self
    }

    /// Attaches a disk, after those attached before.
    pub fn disk(mut self, disk: DiskConfig) -> Self {
        self.disks.push(disk);
        self
    }

    /// Attaches a network device, after those attached before.
    pub fn network(mut self, network: NetworkConfig) -> Self {
        self.networks.push(network);
        self
    }

    /// Measures resident memory when the guest ends, which takes some milliseconds.
    pub fn measure_memory(mut self, measure: bool) -> Self {
        self.measure_memory = measure;
        self
    }

    /// Sets how long the guest may take to power off when a signal or
    /// [`RunControl::ask_for_power_down`] presses its power button. With zero, the default, the
    /// guest is stopped at once.
    pub fn power_down(mut self, limit: Duration) -> Self {
        self.power_down = limit;
        self
    }

    /// Says which of the VMs of this process this one is, if there are several, one after the
    /// other.
    pub fn series(mut self, series: Series) -> Self {
        self.series = series;
        self
    }

    /// Restricts the system calls of the process for good, from the start of the run. Off by
    /// default.
    pub fn seccomp(mut self, mode: Seccomp) -> Self {
        self.seccomp = mode;
        self
    }

    /// Builds the VM. Blocks the signals that ask the process to end, so that [`Vm::run`] can read
    /// them.
    ///
    /// # Errors
    /// If there is no usable KVM, or KVM or the system refuses a step.
    pub fn build(self) -> Result<Vm, VmError> {
        // Signals are blocked before any thread starts, because threads inherit the mask.
        let signals =
            TerminationSignals::block().map_err(|error| VmError::System("take signals", error))?;
        let kvm = match self.kvm {
            Some(kvm) => kvm,
            None => Arc::new(probe::open()?),
        };
        let most = kvm.get_max_vcpus();
        if usize::from(self.cpus) > most {
            return Err(VmError::TooManyCpus {
                cpus: self.cpus,
                most,
            });
        }
        let vm = Arc::new(create_vm(&kvm)?);
        // Memory comes first: once interrupt controllers exist, KVM takes milliseconds to change
        // memory.
        let memory = Arc::new(map_memory(&vm, self.memory)?);
        create_interrupt_controllers(&kvm, &vm)?;
        let vcpus = create_vcpus(&kvm, &vm, self.cpus)?;
        let control =
            Arc::new(RunControl::new().map_err(|error| VmError::System("create an event", error))?);
        let router = Arc::new(GsiRouter::new(vm.clone()));

        let sci = {
            let vm = vm.clone();
            Box::new(move |level| {
                if let Err(error) = vm.set_irq_line(layout::SCI.into(), level) {
                    tracing::warn!("KVM refused an ACPI interrupt: {error}");
                }
            })
        };
        let power = Arc::new(Mutex::new(AcpiPm::new(control.clone(), sci)));
        let (starter, jobs) = StarterHandle::new();
        let mut attachment = DeviceAttachment {
            workers: Arc::new(WorkerPool::with_starter(Arc::new(starter))),
            pci: Arc::new(PciBus::new(vm.clone())),
            vm,
            memory,
            router,
            mmio: Bus::new(),
            slots: Vec::new(),
            disks: Vec::new(),
            networks: Vec::new(),
        };
        for disk in self.disks {
            attachment.attach(disk)?;
        }
        for network in self.networks {
            attachment.attach_network(network)?;
        }
        let DeviceAttachment {
            pci,
            memory,
            router,
            mut mmio,
            slots,
            disks,
            networks,
            ..
        } = attachment;
        acpi::write_tables(&memory, self.cpus, &slots)?;
        insert(
            &mut mmio,
            layout::ECAM,
            layout::ECAM_SIZE,
            Ecam(pci.clone()),
        );

        let stdin = self.console.stdin;
        let system = |error| VmError::System("create the serial line", error);
        let room = Arc::new(EventFd::new(EFD_NONBLOCK).map_err(system)?);
        let interrupt = router.pin(layout::COM1_GSI).map_err(system)?;
        let port = Arc::new(Mutex::new(SerialPort::new(
            self.console.output,
            interrupt,
            room.clone(),
        )));
        let mut ports = Bus::new();
        insert_shared(
            &mut ports,
            u64::from(layout::COM1),
            serial::SIZE,
            port.clone(),
        );
        insert(
            &mut ports,
            u64::from(layout::I8042),
            KEYBOARD_SIZE,
            Keyboard::new(control.clone()),
        );
        insert_shared(
            &mut ports,
            u64::from(layout::ACPI_PM),
            acpi_pm::SIZE,
            power.clone(),
        );
        insert(
            &mut ports,
            u64::from(layout::PANIC),
            panic::SIZE,
            PanicPort::new(control.clone()),
        );
        let config_ports = ConfigPorts::new(pci.clone(), control.clone());
        insert(
            &mut ports,
            u64::from(layout::PCI_PORTS),
            PCI_PORTS_SIZE,
            config_ports,
        );

        let exits = vcpus
            .iter()
            .map(|_| Arc::new(ExitCounters::default()))
            .collect();
        let machine = SharedMachine {
            memory,
            ports,
            mmio,
            pci,
            control,
            first_run: Arc::new(OnceLock::new()),
            exits,
        };
        Ok(Vm {
            vcpus,
            machine: Arc::new(machine),
            serial: SerialLine { port, room, stdin },
            disks,
            networks,
            slots,
            measure_memory: self.measure_memory,
            signals,
            power,
            power_down: self.power_down,
            companions: Vec::new(),
            seccomp: self.seccomp,
            series: self.series,
            jobs: Some(jobs),
        })
    }
}

/// Puts `device` on `bus` at an address range from [`layout`], where there is no other device.
fn insert(bus: &mut Bus, base: u64, length: u64, device: impl BusDevice + 'static) {
    insert_shared(bus, base, length, Arc::new(Mutex::new(device)));
}

/// As [`insert`], for a device with another owner.
fn insert_shared(bus: &mut Bus, base: u64, length: u64, device: SharedDevice) {
    bus.insert(base, length, device)
        .expect("the address map has no overlaps");
}

/// Adds the name of the step that KVM refused to its error.
fn kvm_error(step: &'static str) -> impl Fn(kvm_ioctls::Error) -> VmError {
    move |error| VmError::Kvm(step, error)
}

/// How many times an interrupted KVM_CREATE_VM is retried.
const CREATE_ATTEMPTS: u32 = 100;

/// Creates an empty VM.
fn create_vm(kvm: &Kvm) -> Result<VmFd, VmError> {
    // A signal, or a completed io_uring request of an open disk, interrupts KVM_CREATE_VM. The
    // kernel handles either on the way back to user space, so the next attempt or the one after it
    // succeeds.
    type Created = Result<VmFd, kvm_ioctls::Error>;
    let interrupted = |created: &Created| {
        created
            .as_ref()
            .is_err_and(|error| error.errno() == libc::EINTR)
    };
    let mut created = kvm.create_vm();
    for _ in 0..CREATE_ATTEMPTS {
        if !interrupted(&created) {
            break;
        }
        created = kvm.create_vm();
    }
    created.map_err(kvm_error("create a VM"))
}

/// Creates the interrupt controllers and, where KVM has one, the timer of a PC.
fn create_interrupt_controllers(kvm: &Kvm, vm: &VmFd) -> Result<(), VmError> {
    vm.set_identity_map_address(layout::KVM_IDENTITY_MAP)
        .map_err(kvm_error("place the identity map"))?;
    vm.set_tss_address(layout::KVM_TSS as usize)
        .map_err(kvm_error("place the TSS"))?;
    vm.create_irq_chip()
        .map_err(kvm_error("create interrupt controllers"))?;
    if kvm.check_extension(Cap::Pit2) {
        let config = kvm_pit_config {
            flags: KVM_PIT_SPEAKER_DUMMY,
            ..Default::default()
        };
        vm.create_pit2(config)
            .map_err(kvm_error("create a timer"))?;
    }
    Ok(())
}

/// Maps `size` bytes of guest memory and registers them with KVM.
fn map_memory(vm: &VmFd, size: u64) -> Result<GuestMemoryMmap, VmError> {
    let error = |reason: String| VmError::Memory(size >> 20, reason);
    let memory = memory_use::map(size).map_err(|reason| error(reason.to_string()))?;
    for (slot, region) in (0u32..).zip(memory.iter()) {
        let address = memory
            .get_host_address(region.start_addr())
            .map_err(|reason| error(reason.to_string()))?;
        let region = kvm_userspace_memory_region {
            slot,
            flags: 0,
            guest_phys_addr: region.start_addr().0,
            memory_size: region.len(),
            userspace_addr: address as u64,
        };
        // SAFETY: the region is a private mapping of this size that only guest memory accesses
        // reach. vCPUs run only in threads that hold the `SharedMachine`, which keeps it mapped.
        unsafe { vm.set_user_memory_region(region) }.map_err(kvm_error("give memory to a VM"))?;
    }
    Ok(memory)
}

/// Creates vCPUs 0 to `cpus` - 1 and sets their CPUID.
fn create_vcpus(kvm: &Kvm, vm: &VmFd, cpus: u8) -> Result<Vec<VcpuFd>, VmError> {
    let supported = kvm
        .get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)
        .map_err(kvm_error("read the CPUID"))?;
    let tsc_deadline = kvm.check_extension(Cap::TscDeadlineTimer);
    (0..cpus)
        .map(|id| {
            let vcpu = vm
                .create_vcpu(u64::from(id))
                .map_err(kvm_error("create a vCPU"))?;
            let cpuid = cpuid::of_vcpu(&supported, id, cpus, tsc_deadline);
            vcpu.set_cpuid2(&cpuid)
                .map_err(kvm_error("set the CPUID"))?;
            Ok(vcpu)
        })
        .collect()
}

/// Attaches devices: what that needs, and what it has made so far.
struct DeviceAttachment {
    workers: Arc<WorkerPool>,
    vm: Arc<VmFd>,
    memory: Arc<GuestMemoryMmap>,
    router: Arc<GsiRouter>,
    pci: Arc<PciBus>,
    mmio: Bus,
    slots: Vec<MmioSlot>,
    disks: Vec<DiskInUse>,
    networks: Vec<NetworkInUse>,
}

impl DeviceAttachment {
    /// Attaches a disk: makes its device and puts the device behind its transport.
    fn attach(&mut self, disk: DiskConfig) -> Result<(), VmError> {
        let DiskConfig {
            disk,
            transport,
            notifications,
        } = disk;
        let OpenDisk {
            name,
            kind,
            backend,
            device,
            limits,
        } = disk;
        let failed = |error: &dyn std::fmt::Display| VmError::Disk(name.clone(), error.to_string());
        let (metrics, throttle, control) = match kind {
            DeviceKind::Blk => {
                let device = VirtioBlock::new(backend.clone(), device);
                let mut device = device.map_err(|error| failed(&error))?;
                device.serve_with(Arc::clone(&self.workers));
                let (metrics, throttle) = (device.metrics(), device.throttle());
                let control: Arc<dyn DeviceControl> = match transport {
                    TransportKind::Mmio => {
                        let device = self.attach_mmio(device, notifications)?;
                        Arc::new(device.map_err(|error| failed(&error))?)
                    }
                    TransportKind::Pci => Arc::new(self.attach_pci(device, notifications)?),
                };
                (metrics, throttle, control)
            }
            DeviceKind::Scsi => {
                let target = VirtioScsi::new(backend.clone(), device);
                let mut target = target.map_err(|error| failed(&error))?;
                target.serve_with(Arc::clone(&self.workers));
                let unit = target.first_unit();
                match transport {
                    TransportKind::Mmio => {
                        let device = self.attach_mmio(target, notifications)?;
                        device.map_err(|error| failed(&error))?;
                    }
                    TransportKind::Pci => drop(self.attach_pci(target, notifications)?),
                }
                (unit.metrics, unit.throttle, unit.control)
            }
        };
        throttle.set(limits);
        self.disks.push(DiskInUse {
            name,
            transport: transport.name(),
            backend,
            metrics,
            throttle,
            device: control,
        });
        Ok(())
    }

    /// Puts a device behind the next free virtio-mmio slot.
    fn attach_mmio<D: transport::Device + 'static>(
        &mut self,
        device: D,
        notifications: Notifications,
    ) -> Result<io::Result<Weak<Mutex<Transport<D>>>>, VmError> {
        let slot = self.next_slot()?;
        Ok(self.mmio(device, slot, notifications))
    }

    /// Puts a device behind a new PCI function.
    fn attach_pci<D: transport::Device + 'static>(
        &mut self,
        device: D,
        notifications: Notifications,
    ) -> Result<Weak<Mutex<Function<D>>>, VmError> {
        let vectors = Arc::new(FunctionVectors::new(self.router.clone(), notifications));
        let function = PciTransport::new(device, self.memory.clone(), vectors);
        let function = Arc::new(Mutex::new(function));
        let device = Arc::downgrade(&function);
        self.pci.add(function, notifications)?;
        Ok(device)
    }

    /// Attaches a network device.
    fn attach_network(&mut self, network: NetworkConfig) -> Result<(), VmError> {
        let NetworkConfig {
            link,
            device,
            transport,
            notifications,
        } = network;
        let failed = |error: String| VmError::Network(error);
        let mut device = VirtioNet::new(link, device).map_err(|error| failed(error.to_string()))?;
        device.serve_with(Arc::clone(&self.workers));
        let metrics = device.metrics();
        match transport {
            TransportKind::Mmio => {
                let device = self.attach_mmio(device, notifications)?;
                device.map_err(|error| failed(error.to_string()))?;
            }
            TransportKind::Pci => drop(self.attach_pci(device, notifications)?),
        }
        self.networks.push(NetworkInUse {
            transport: transport.name(),
            metrics,
        });
        Ok(())
    }

    /// The next free virtio-mmio slot.
    fn next_slot(&mut self) -> Result<MmioSlot, VmError> {
        let index = self.slots.len();
        let most = layout::MMIO_GSIS.len();
        let gsi = *layout::MMIO_GSIS
            .get(index)
            .ok_or(VmError::TooManyMmioDevices(most))?;
        let base = layout::MMIO_DEVICES + index as u64 * Transport::<VirtioBlock>::SIZE;
        let slot = MmioSlot { base, gsi };
        self.slots.push(slot);
        Ok(slot)
    }

    /// Puts a device behind virtio-mmio registers, with eventfds also an ioeventfd per queue and an
    /// irqfd.
    fn mmio<D: transport::Device + 'static>(
        &mut self,
        device: D,
        slot: MmioSlot,
        notifications: Notifications,
    ) -> io::Result<Weak<Mutex<Transport<D>>>> {
        let memory = self.memory.clone();
        let transport = match notifications {
            Notifications::Exits => Transport::<D>::new(device, memory, self.router.line(slot.gsi)),
            Notifications::Eventfds => {
                let transport = Transport::<D>::new(device, memory, self.router.pin(slot.gsi)?);
                let notify = IoEventAddress::Mmio(slot.base + Transport::<D>::QUEUE_NOTIFY);
                for (queue, doorbell) in (0u32..).zip(transport.doorbells()?) {
                    self.vm.register_ioevent(&doorbell, &notify, queue)?;
                }
                transport
            }
        };
        let transport = Arc::new(Mutex::new(transport));
        let device = Arc::downgrade(&transport);
        insert_shared(&mut self.mmio, slot.base, Transport::<D>::SIZE, transport);
        Ok(device)
    }
}

type Transport<D> = MmioTransport<Arc<GuestMemoryMmap>, D>;
type Function<D> = PciTransport<Arc<GuestMemoryMmap>, D>;

impl<D: transport::Device> BusDevice for Transport<D> {
    fn read(&mut self, offset: u64, data: &mut [u8]) {
        self.read(offset, data);
    }

    fn write(&mut self, offset: u64, data: &[u8]) {
        self.write(offset, data);
    }
}

impl<D: transport::Device> PciFunction for Function<D> {
    fn config_read(&mut self, offset: u16, data: &mut [u8]) {
        self.config_read(offset, data);
    }

    fn config_write(&mut self, offset: u16, data: &[u8]) {
        self.config_write(offset, data);
    }

    fn bars(&self) -> Vec<Bar> {
        self.bars()
    }

    fn set_bar(&mut self, index: usize, address: u64) {
        self.set_bar(index, address);
    }

    fn bar_read(&mut self, bar: usize, offset: u64, data: &mut [u8]) {
        self.bar_read(bar, offset, data);
    }

    fn bar_write(&mut self, bar: usize, offset: u64, data: &[u8]) {
        self.bar_write(bar, offset, data);
    }

    fn doorbells(&self) -> io::Result<Vec<PciDoorbell>> {
        self.doorbells()
    }
}
