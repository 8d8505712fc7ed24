//! The harnesses of the devices' fuzz targets. Each module of a target has a function `run` that
//! takes an input.
//!
//! `make fuzz` builds the targets in `bin` on stable Rust, with libFuzzer, and runs each for a while
//! on the seeds in `corpus`. It leaves an input that fails there. An ordinary test (`tests/corpus.rs`)
//! runs all of these, and others that it makes of them by chance; a target with a file as its only
//! argument runs that input alone.
//!
//! ```text
//!   requests: any chains, a model of the disk                   ─┬─ machine.rs: a device over MMIO, and its guest's memory
//!   net: any chains and frames, a model of the network device   ─┤
//!   virtio_scsi: any chains of a SCSI target, and its owner     ─┘
//!   mmio: any register accesses                                 ─┬─ registers.rs: a model of the registers
//!   pci: any accesses of configuration space and BARs           ─┴─ driver.rs: a correct driver
//!   cdb: any SCSI commands
//!   tcmu_ring: any bytes in a command ring, a model of the kernel
//!   bounded.rs: a limit on allocations     corpus.rs: inputs from files     chain.rs: a model of descriptor chains     guest.rs: memory between guard pages      input.rs
//! ```

pub mod bounded;
pub mod cdb;
pub mod chain;
pub mod corpus;
pub mod driver;
pub mod guest;
pub mod input;
pub mod machine;
pub mod mmio;
pub mod net;
pub mod pci;
pub mod registers;
pub mod requests;
pub mod tcmu_ring;
pub mod virtio_scsi;
