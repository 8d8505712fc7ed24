//! The virtual machine monitor: KVM, boot, buses, interrupts, command line.

pub mod arch;
pub mod probe;
