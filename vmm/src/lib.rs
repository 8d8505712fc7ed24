//! The virtual machine monitor: KVM, boot, buses, interrupts, command line.
//!
//! ```text
//!   main ─▶ cli ─▶ commands::run ─▶ vm::VmBuilder ─▶ Vm ── one thread per vCPU ──▶ KVM_RUN
//!                                        │                       │ exits
//!                      arch::x86_64 (boot, ACPI, CPUID)          ▼
//!                                                    bus (PIO, MMIO) ─▶ serial, i8042, ACPI, PCI,
//!                                                                       virtio transports
//! ```

pub mod arch;
pub mod bus;
mod child;
pub mod cli;
pub mod commands;
pub mod control;
pub mod control_socket;
pub mod demo;
pub mod devices;
pub mod disk;
pub mod disk_spec;
pub mod disks;
pub mod landlock;
pub mod lio;
pub mod metrics;
pub mod pci;
pub mod point;
pub mod probe;
pub mod processor_time;
pub mod progress;
pub mod readiness;
pub mod seccomp;
pub mod size;
pub mod vm;
