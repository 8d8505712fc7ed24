//! Disk SPECs: a disk on the command line, such as `path=disk.img,transport=pci,queues=4`.
//!
//! ```text
//!   --disk SPEC ──▶ argument (clap) ──▶ parse ──▶ spec: DiskSpec
//!                       │ help            │
//!                       └───────▶ table ◀─┘  one row a key: its values, default, commands, backends, help
//!                                   │
//!                                  key       a row: how it is parsed and shown
//! ```

mod argument;
mod key;
mod parse;
mod spec;
mod table;
#[cfg(test)]
mod tests;

pub use argument::{DiskArgument, disk_help, key_words};
pub(crate) use parse::split_parts;
pub use parse::{DiskSpecError, WrittenDisk};
pub use spec::{BackendKind, DiskCache, DiskCommand, DiskSpec, Fabric};
pub use table::{LOG_KEYS, MAX_QUEUES, MAX_SERIAL_BYTES, is_backstore_name, time};
pub use walvisor_vmm::disk::{Notifications, TransportKind};
