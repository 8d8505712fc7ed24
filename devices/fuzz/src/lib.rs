//! Code shared by the fuzz targets of the device.
//!
//! ```text
//!   requests: any chains, one transport, a model of the disk      mmio: any register accesses    pci: config and BAR access
//!                                                                    └───── registers.rs: a model of the registers ──┘
//!                                                                    └───── driver.rs: a correct driver ─────────────┘
//!   net: any chains and frames, a model of the network device
//!   cdb: any SCSI commands
//!   tcmu_ring: any bytes in a command ring, a model of the kernel
//!   bounded.rs: a limit on allocations     chain.rs: a model of descriptor chains     guest.rs: memory between guard pages      input.rs
//! ```

pub mod bounded;
pub mod chain;
pub mod driver;
pub mod guest;
pub mod input;
pub mod registers;
