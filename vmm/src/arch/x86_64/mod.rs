//! x86-64: start states, tables and registers.

pub mod acpi;
pub mod cpuid;
pub mod crash;
pub mod layout;
pub mod linux;
pub mod long_mode;
pub mod start_state;
