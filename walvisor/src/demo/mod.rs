//! The embedded guest on fresh write-ahead-logged disks: one behind virtio-mmio, one behind
//! virtio-pci.
//!
//! ```text
//!   temporary directory ─▶ two disks, each with its log ─▶ VM ◀─ the guest's image, in ring 3
//!                                                          │ serial line
//!                     report ◀─ listener ◀─ recorder ◀─────┘ (counters at the start and end of each job)
//!                       ▲
//!   disk images, read again once the guest and the logs are gone
//! ```
//!
//! The guest compares every byte that it reads with the byte that it wrote, and reports a digest.
//! Afterwards the VMM checks that the images hold the same bytes.

mod conformance;
mod disks;
mod error;
mod guest;
mod listener;
mod load;
mod recorder;
mod report;

use std::path::Path;

use tempfile::TempDir;

pub use conformance::{CaseReport, ConformanceReport};
pub use error::DemoError;
pub use load::{ALL_EXITS, LoadReport, run_load, ticks};
pub use report::{DemoReport, TransportReport};
pub use walvisor_guest::contract;

use disks::DemoDisks;
use guest::run_guest;
use walvisor_guest::contract::Task;
use walvisor_vmm::probe;
use walvisor_vmm::seccomp::Seccomp;
use walvisor_vmm::vm::{VmError, block_termination_signals};

/// Runs the embedded guest and returns the counts of the guest and the VMM. `say` gets each line of
/// the guest's that is not a report. The disks are made in a new directory under `parent`, which is
/// removed afterwards. `seccomp` applies to the whole process, for good.
///
/// # Errors
/// If there is no usable KVM, or the guest cannot run to its end. A guest that ends but finds a
/// wrong byte is not an error: see [`TransportReport::verified`].
pub fn run(
    parent: &Path,
    seccomp: Seccomp,
    say: impl FnMut(&str) + Send + 'static,
) -> Result<DemoReport, DemoError> {
    let (_directory, disks) = prepare(parent, Task::Job)?;
    let transcript = run_guest(disks.configs(), Task::Job, seccomp, say)?;
    report::assemble(transcript, &disks.close()?)
}

/// Runs the embedded guest as a driver that tries what the specification allows and what it
/// forbids, case by case, on disks as those of [`run`].
///
/// # Errors
/// If there is no usable KVM, or the guest cannot run to its end. A case that fails is not an
/// error: see [`ConformanceReport::failure`].
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

/// Makes the disks for `task` in a new directory under `parent`.
fn prepare(parent: &Path, task: Task) -> Result<(TempDir, DemoDisks), DemoError> {
    // Without KVM nothing must be created, so it is checked first.
    probe::open()?;
    // Blocked before the logs' threads start and inherit the mask. So a signal ends the guest, not
    // the process, and the directory is removed.
    block_termination_signals().map_err(|error| VmError::System("take signals", error))?;
    let directory = tempfile::Builder::new()
        .prefix("walvisor-demo-")
        .tempdir_in(parent)
        .map_err(|error| DemoError::Directory(parent.to_owned(), error))?;
    let disks = DemoDisks::create(directory.path(), task)?;
    Ok((directory, disks))
}

#[cfg(test)]
mod tests;
