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
mod log_options;
mod parse;
mod spec;
mod table;
#[cfg(test)]
mod tests;

pub use argument::{DiskArgument, disk_help, key_words};
pub use log_options::{Disagreement, LogOptions};
pub use parse::{DiskSpecError, WrittenDisk};
pub(crate) use parse::{split_keys, split_parts, take_size};
pub use spec::{BackendKind, DiskCache, DiskCommand, DiskSpec, Fabric};
pub use table::{MAX_QUEUES, MAX_SERIAL_BYTES, is_backstore_name, is_log_key, time};
pub use walvisor_vmm::disk::{Notifications, TransportKind};
