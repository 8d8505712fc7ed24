//! The embedded guest: loads it into a VM, and runs it to its end.

use std::io::Cursor;
use std::sync::{Arc, OnceLock, mpsc};

use linux_loader::loader::{Elf, KernelLoader};
use vm_memory::{Bytes, GuestAddress};
use walvisor_vmm::arch::x86_64::layout;
use walvisor_vmm::arch::x86_64::long_mode::{self, PrivilegeLevel};
use walvisor_vmm::control::RunEnd;
use walvisor_vmm::devices::acpi_pm;
use walvisor_vmm::devices::console::Console;
use walvisor_vmm::seccomp::Seccomp;
use walvisor_vmm::vm::kvm_stats::KvmCounter;
use walvisor_vmm::vm::{DiskConfig, Vm, VmBuilder};

use super::error::DemoError;
use super::listener::{self, Listener, Transcript};
use super::recorder::{CountSources, Recorder};
use crate::disks::prepare_rings;
use walvisor_guest::IMAGE;
use walvisor_guest::contract::{BootInfo, MMIO_SLOTS, Task};

/// Bytes of guest memory: enough for the image, and a MiB of rings and buffers.
const MEMORY: u64 = 64 << 20;

/// Address of the guest's boot information, behind the tables of [`long_mode`].
const BOOT_INFO: u64 = 0xe000;

/// The keyboard controller's command port, and the command that resets.
const RESET: (u16, u8) = (0x64, 0xfe);

/// Runs the guest for `task` on these disks until it powers off. Each disk has the guest's name for
/// its transport.
pub(super) fn run_guest(
    disks: impl IntoIterator<Item = DiskConfig>,
    task: Task,
    seccomp: Seccomp,
    say: impl FnMut(&str) + Send + 'static,
) -> Result<Transcript, DemoError> {
    let (events, received) = mpsc::channel();
    let sources = Arc::new(OnceLock::new());
    let recorder = Recorder::new(sources.clone(), events);
    let builder = VmBuilder::new()
        .memory(MEMORY)
        .seccomp(seccomp)
        .console(Console::writer(recorder));
    let disks: Vec<_> = disks.into_iter().collect();
    prepare_rings(disks.iter().map(|disk| &disk.disk));
    let vm = disks.into_iter().fold(builder, VmBuilder::disk).build()?;
    load(&vm, task)?;
    // A vCPU's filter does not allow reading these counters. A load runs without a filter.
    let loads = matches!(task, Task::Load(_));
    let all_exits = |vcpu| KvmCounter::of(vcpu, "exits");
    sources.get_or_init(|| CountSources {
        exits: vm.exits().to_vec(),
        kvm_exits: vm.vcpu(0).filter(|_| loads).and_then(all_exits),
        host_cpu: loads,
        disks: vm.disks().to_vec(),
    });
    let counters = vm.exits().to_vec();
    let exits = move || counters.iter().map(|vcpu| vcpu.total()).sum();
    let listener = Listener::start(received, vm.control(), listener::PATIENCE, exits, say)
        .map_err(|error| {
            DemoError::Guest(format!(
                "cannot start the thread that listens to it: {error}"
            ))
        })?;
    let outcome = vm.run()?;
    let transcript = listener.finish();

    let ended = |reason| Err(DemoError::Ended(reason));
    if let Some((disk, error)) = outcome.flush_failures.first() {
        return ended(format!(
            "is gone, but disk '{disk}' cannot be flushed: {error}"
        ));
    }
    let last = &transcript.last_line;
    match outcome.ended {
        RunEnd::PowerOff => Ok(transcript),
        RunEnd::Reset | RunEnd::Quit => ended(match transcript.silence {
            Some(silence) => {
                let seconds = silence.as_secs();
                format!("said nothing for {seconds} s; its last line: {last}")
            }
            None => format!("gave up; its last line: {last}"),
        }),
        RunEnd::Panicked => ended("panicked".to_owned()),
        RunEnd::Signal(signal) => Err(DemoError::Stopped(signal)),
        RunEnd::Crashed(crash) => ended(format!("cannot run here: {crash}")),
    }
}

/// Loads the image, its tables and its boot information into guest memory, and sets the vCPU's
/// registers.
fn load(vm: &Vm, task: Task) -> Result<(), DemoError> {
    let failed = |error: &dyn std::fmt::Display| DemoError::Guest(error.to_string());
    let memory = vm.memory();
    let loaded = Elf::load(memory, None, &mut Cursor::new(IMAGE), None).map_err(|e| failed(&e))?;
    long_mode::write_tables(memory).map_err(|e| failed(&e))?;

    let mut mmio_lines = [0; MMIO_SLOTS];
    let mmio = vm.mmio_slots().iter().map(|slot| slot.gsi as u8);
    mmio_lines
        .iter_mut()
        .zip(mmio)
        .for_each(|(line, gsi)| *line = gsi);
    let info = BootInfo {
        memory_end: MEMORY,
        idt: long_mode::IDT,
        mmio_base: layout::MMIO_DEVICES,
        mmio_lines,
        ecam: layout::ECAM,
        off_port: layout::ACPI_PM + acpi_pm::CONTROL as u16,
        off_value: acpi_pm::POWER_OFF,
        reset_port: RESET.0,
        reset_value: RESET.1,
        task,
    };
    for (index, word) in (0..).zip(info.to_words()) {
        memory
            .write_obj(word, GuestAddress(BOOT_INFO + index * 8))
            .map_err(|e| failed(&e))?;
    }
    let vcpu = vm.vcpu(0).ok_or_else(|| failed(&"the VM has no vCPU"))?;
    let entry = loaded.kernel_load.0;
    // The guest sets up its own stack.
    long_mode::set_registers(vcpu, PrivilegeLevel::User, entry, 0, BOOT_INFO)
        .map_err(|e| failed(&e))
}
