//! What the fuzz targets of the device share.
//!
//! ```text
//!   requests: any chains, one transport, a model of the disk      mmio: any register accesses    pci: any of space and BARs
//!                                                                    └───── registers.rs: a model of the registers ──┘
//!                                                                    └───── driver.rs: how a driver does it right ───┘
//!   cdb: any SCSI commands
//!   tcmu_ring: any bytes in a command ring, a model of the kernel
//!   bounded.rs: what may be allocated      guest.rs: memory between pages that nobody may touch      input.rs
//! ```

pub mod bounded;
pub mod driver;
pub mod guest;
pub mod input;
pub mod registers;
