//! Code shared by the fuzz targets of the device.
//!
//! ```text
//!   requests: any chains, a model of the disk                   ─┬─ machine.rs: a device over MMIO, and its guest's memory
//!   net: any chains and frames, a model of the network device   ─┤
//!   virtio_scsi: any chains of a SCSI target, and its owner     ─┘
//!   mmio: any register accesses                                 ─┬─ registers.rs: a model of the registers
//!   pci: any accesses of configuration space and BARs           ─┴─ driver.rs: a correct driver
//!   cdb: any SCSI commands
//!   tcmu_ring: any bytes in a command ring, a model of the kernel
//!   bounded.rs: a limit on allocations     chain.rs: a model of descriptor chains     guest.rs: memory between guard pages      input.rs
//! ```

pub mod bounded;
pub mod chain;
pub mod driver;
pub mod guest;
pub mod input;
pub mod machine;
pub mod registers;
