//! The few devices of a PC that a Linux guest needs besides its disks.

pub mod acpi_pm;
pub mod console;
pub mod keyboard;
pub mod panic;
pub mod serial;
pub mod terminal;
