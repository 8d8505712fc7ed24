//! Code shared by the fuzz targets of the device.
//!
//! ```text
//!   requests: any chains, one transport, a model of the disk      mmio: any register accesses    pci: config and BAR access
//!                                                                    └───── registers.rs: a model of the registers ──┘
//!                                                                    └───── driver.rs: a correct driver ─────────────┘
//!   cdb: any SCSI commands
//!   tcmu_ring: any bytes in a command ring, a model of the kernel
//!   bounded.rs: a limit on allocations     guest.rs: memory between guard pages      input.rs
//! ```

pub mod bounded;
pub mod driver;
pub mod guest;
pub mod input;
pub mod registers;
