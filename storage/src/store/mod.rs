//! Opening and closing logs, and all operations on disks and logs that are not in use.

pub(crate) mod attach;
pub(crate) mod changes;
pub(crate) mod create;
pub(crate) mod discard;
pub(crate) mod dump;
pub(crate) mod follow;
pub(crate) mod image;
pub(crate) mod inspect;
pub(crate) mod log_root;
pub(crate) mod log_size;
pub(crate) mod look;
pub(crate) mod members;
pub(crate) mod open;
pub(crate) mod other_format;
pub(crate) mod part_file;
pub(crate) mod points;
pub(crate) mod resize;
pub(crate) mod rewind;
pub(crate) mod view;
