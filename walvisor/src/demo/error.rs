//! Errors of a demo that ends without a report.

use std::io;
use std::path::PathBuf;

use walvisor_vmm::probe::ProbeError;
use walvisor_vmm::vm::VmError;

/// Why there is no report.
#[derive(Debug, thiserror::Error)]
pub enum DemoError {
    /// There is no usable KVM.
    #[error(transparent)]
    NoKvm(#[from] ProbeError),
    /// The temporary directory cannot be made.
    #[error("{0}: cannot make a temporary directory: {1}; name another directory with --dir")]
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
    /// The guest cannot be loaded into its memory.
    #[error("cannot start the embedded guest: {0}")]
    Guest(String),
    /// A signal that asks the process to end has ended the guest.
    #[error("the embedded guest was stopped by signal {0}")]
    Stopped(i32),
    /// The guest ended without finishing its task.
    #[error("the embedded guest {0}")]
    Ended(String),
}
