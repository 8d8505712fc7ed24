//! A small virtual machine monitor as a library: KVM, boot, buses, interrupts, and disks over
//! virtio-mmio and virtio-pci.
//!
//! ```text
//!   vm::VmBuilder ─▶ Vm ── one thread per vCPU ──▶ KVM_RUN
//!        │                       │ exits
//!   arch::x86_64 (boot, ACPI, CPUID)  ▼
//!                             bus (PIO, MMIO) ─▶ serial, i8042, ACPI, PCI, virtio transports
//! ```
//! It opens no disks: the program that embeds it passes in any [`Backend`](backend::Backend).
//! `walvisor` passes in disks with a log. `examples/boot.rs` boots a kernel in twenty lines.
//! The terms are those of `docs/glossary.md` in the repository.

pub mod arch;
pub mod bus;
pub mod control;
pub mod devices;
pub mod disk;
pub mod pci;
pub mod probe;
pub mod readiness;
pub mod seccomp;
pub mod vm;

pub use walvisor_devices::backend;
