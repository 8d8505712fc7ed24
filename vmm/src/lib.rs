//! The virtual machine monitor: KVM, boot, buses, interrupts, command line.
