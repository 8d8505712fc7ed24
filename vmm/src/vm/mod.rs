//! A virtual machine: built from its parts, given a guest, run until it ends.
//!
//! ```text
//!   VmBuilder ── build ──▶ Vm ── load a guest, set the vCPUs' first state ──▶ run ──▶ RunOutcome
//!                           │
//!                           ├─ memory(), vcpu(n), disks(), exits()
//!                           └─ vCPU threads + the thread that called run: waits for the end, then stops
//!                              the vCPUs, drains the devices, flushes the disks
//! ```

mod builder;
pub mod exits;
pub mod interrupts;
pub mod kvm_stats;
mod machine;
pub mod memory_use;
mod signals;
mod starter;
mod vcpu;

pub use builder::{DiskConfig, NetworkConfig, VmBuilder};
pub use machine::{RunOutcome, Series, Vm, VmError};
pub use signals::{TerminationSignals, block_termination_signals};
