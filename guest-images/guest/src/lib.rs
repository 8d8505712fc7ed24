//! The freestanding guest of `walvisor demo`: the part that needs no privileged instruction.
//!
//! ```text
//!   main.rs, interrupt.rs, console.rs     the image: entry, ring-0 stubs, serial port
//!        │
//!      job ──▶ block ──▶ queue            what is asked of the disk; requests; split virtqueues
//!     load ──▶   └─────▶ transport        mmio (registers) or pci (capabilities, BARs, MSI-X)
//!   histogram                             how long the requests of a load took
//!  conformance ───────────▶              the same transports, driven by every rule and against every rule
//!     pattern                             what every block must read as
//!   contract                              what the VMM and the guest agree on
//! ```
//!
//! The library builds on the host too: its tests run there, and the VMM takes the [`contract`] and
//! the `IMAGE` from it. Over a [`Bus`](register::Bus) its drivers and the conformance cases run
//! against a device in the same process.
#![cfg_attr(not(test), no_std)]

/// The image: a static ELF executable, whose entry takes the address of a [`contract::BootInfo`].
#[cfg(feature = "image")]
pub static IMAGE: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/walvisor-guest"));

pub mod block;
pub mod conformance;
pub mod contract;
pub mod error;
pub mod histogram;
pub mod job;
pub mod load;
pub mod memory;
pub mod mmio;
pub mod pattern;
pub mod pci;
pub mod queue;
pub mod register;
pub mod transport;
