//! The embedded guest on fresh write-ahead-logged disks: one behind virtio-mmio, one behind virtio-pci.
//!
//! ```text
//!   temporary directory ─▶ two disks, each with its log ─▶ VM ◀─ the guest's image, in ring 3
//!                                                          │ serial line
//!                     report ◀─ listener ◀─ recorder ◀─────┘ (counters at the start and end of each job)
//!                       ▲
//!   disk images, read again once the guest and the logs are gone
//! ```
//!
//! The guest compares every byte that it reads with what it wrote. That the same bytes are on the medium
//! afterwards is checked here, from a digest that the guest reports.

mod conformance;
#[path = "../../../guest-images/guest/src/contract.rs"]
pub mod contract;
mod disks;
mod listener;
mod load;
mod recorder;
mod report;

use std::io::{self, Cursor};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock, mpsc};

use linux_loader::loader::{Elf, KernelLoader};
use tempfile::TempDir;
use vm_memory::{Bytes, GuestAddress};

pub use conformance::{CaseReport, ConformanceReport};
pub use load::{ALL_EXITS, LoadReport, run_load, ticks};
pub use report::{DemoReport, TransportReport};

use crate::arch::x86_64::layout;
use crate::arch::x86_64::long_mode::{self, Ring};
use crate::devices::acpi_pm;
use crate::devices::console::Console;
use crate::probe::{self, ProbeError};
use crate::seccomp::Seccomp;
use crate::vm::control::Ended;
use crate::vm::kvm_stats::KvmCounter;
use crate::vm::{DiskConfig, DiskLocation, Vm, VmBuilder, VmError, block_termination_signals};
use contract::{BootInfo, MMIO_SLOTS, Task};
use disks::DemoDisks;
use listener::{Listener, Transcript};
use recorder::{Recorder, Sources};

/// The guest, as `build.rs` built it.
static IMAGE: &[u8] = include_bytes!(env!("WALVISOR_GUEST_IMAGE"));

/// Guest memory: the image, a MiB of rings and buffers, and room.
const MEMORY: u64 = 64 << 20;
/// Where the guest finds its boot information: behind the tables of [`long_mode`].
const BOOT_INFO: u64 = 0xe000;
/// The keyboard controller's command port, and the command that resets.
const RESET: (u16, u8) = (0x64, 0xfe);

/// Why there is nothing to report.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// There is no usable KVM.
    #[error(transparent)]
    NoKvm(#[from] ProbeError),
    /// The temporary directory cannot be made.
    #[error("{0}: cannot make a temporary directory: {1}; name another place with --dir")]
    Directory(PathBuf, io::Error),
    /// A disk cannot be made, opened or closed.
    #[error(transparent)]
    Disk(#[from] walvisor_storage::Error),
    /// A disk's image cannot be read after the run.
    #[error("{0}: cannot read the disk's image: {1}")]
    Image(PathBuf, io::Error),
    /// The VM cannot be built or run.
    #[error(transparent)]
    Vm(#[from] VmError),
    /// The guest cannot be put into its memory.
    #[error("cannot start the embedded guest: {0}")]
    Guest(String),
    /// A signal that asks the process to end has ended the guest.
    #[error("the embedded guest was stopped by signal {0}")]
    Stopped(i32),
    /// The guest did not come to its end.
    #[error("the embedded guest {0}")]
    Ended(String),
}

/// Runs the embedded guest and tells what it and the VMM counted. `say` gets each line that the guest says to
/// people. The disks are made in a directory of their own under `parent`, and removed again. `seccomp` is for the whole
/// process, for good.
///
/// # Errors
/// If there is no usable KVM, or the guest cannot run to its end. A guest that ends but finds a wrong byte is
/// no error here: see [`TransportReport::verified`].
pub fn run(
    parent: &Path,
    seccomp: Seccomp,
    say: impl FnMut(&str) + Send + 'static,
) -> Result<DemoReport, DemoError> {
    let (_directory, disks) = prepare(parent, Task::Job)?;
    let transcript = run_guest(disks.configs(), Task::Job, seccomp, say)?;
    report::assemble(transcript, &disks.close()?)
}

/// Runs the embedded guest as a driver that does what a driver may and what it must not, case by case, on disks as
/// [`run`] makes them.
///
/// # Errors
/// If there is no usable KVM, or the guest cannot run to its end. A case that fails is no error here: see
/// [`ConformanceReport::failure`].
pub fn check_conformance(
    parent: &Path,
    seccomp: Seccomp,
    say: impl FnMut(&str) + Send + 'static,
) -> Result<ConformanceReport, DemoError> {
    let (_directory, disks) = prepare(parent, Task::Conformance)?;
    let transcript = run_guest(disks.configs(), Task::Conformance, seccomp, say)?;
    disks.close()?;
    Ok(ConformanceReport::new(transcript, &disks::NAMES))
}

/// Makes the disks for `task` in a directory of their own under `parent`.
fn prepare(parent: &Path, task: Task) -> Result<(TempDir, DemoDisks), DemoError> {
    // First of all: without KVM nothing is touched.
    probe::open()?;
    // The logs' threads start with the disks; a signal is to end the guest, not the process, so that the
    // directory goes.
    block_termination_signals().map_err(|error| VmError::System("take signals", error))?;
    let directory = tempfile::Builder::new()
        .prefix("walvisor-demo-")
        .tempdir_in(parent)
        .map_err(|error| DemoError::Directory(parent.to_owned(), error))?;
    let disks = DemoDisks::create(directory.path(), task)?;
    Ok((directory, disks))
}

/// Runs the guest for `task` on these disks, named as it names their transports, until it powers off.
fn run_guest(
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
    let vm = disks.into_iter().fold(builder, VmBuilder::disk).build()?;
    load(&vm, task)?;
    // Files are read for that, which a vCPU's filter of system calls has no room for; a load has none.
    let loads = matches!(task, Task::Load(_));
    let all_exits = |vcpu| KvmCounter::of(vcpu, "exits");
    sources.get_or_init(|| Sources {
        exits: vm.exits().to_vec(),
        kvm_exits: vm.vcpu(0).filter(|_| loads).and_then(all_exits),
        host_cpu: loads,
        disks: vm.disks().to_vec(),
    });
    let listener = Listener::start(received, vm.control(), listener::PATIENCE, say)
        .map_err(|error| DemoError::Guest(format!("no thread to listen to it: {error}")))?;
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
        Ended::PowerOff => Ok(transcript),
        Ended::Quit if transcript.stalled => {
            let seconds = listener::PATIENCE.as_secs();
            ended(format!(
                "said nothing for {seconds} s; its last line: {last}"
            ))
        }
        Ended::Reset | Ended::Quit => ended(format!("gave up; its last line: {last}")),
        Ended::Panicked => ended("panicked".to_owned()),
        Ended::Signal(signal) => Err(DemoError::Stopped(signal)),
        Ended::Crashed(crash) => ended(format!("cannot run here: {crash}")),
    }
}

/// Puts the image, its tables and its boot information into guest memory, and points the vCPU at it.
fn load(vm: &Vm, task: Task) -> Result<(), DemoError> {
    let failed = |error: &dyn std::fmt::Display| DemoError::Guest(error.to_string());
    let memory = vm.memory();
    let loaded = Elf::load(memory, None, &mut Cursor::new(IMAGE), None).map_err(|e| failed(&e))?;
    long_mode::write_tables(memory).map_err(|e| failed(&e))?;

    let mut mmio_lines = [0; MMIO_SLOTS];
    let mmio = vm.disks().iter().filter_map(|disk| match disk.location {
        DiskLocation::Mmio(slot) => Some(slot.gsi as u8),
        DiskLocation::Pci(_) => None,
    });
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
    // The guest sets its own stack up.
    long_mode::set_registers(vcpu, Ring::User, entry, 0, BOOT_INFO).map_err(|e| failed(&e))
}

#[cfg(test)]
mod tests;
