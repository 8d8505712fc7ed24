//! The medium: files and their locks, segments, the engines that reach them. It knows nothing of
//! disks.

pub(crate) mod checksum;
pub(crate) mod copying;
pub(crate) mod cost;
pub(crate) mod directory;
pub(crate) mod engine;
pub(crate) mod fetch_map;
pub(crate) mod file;
pub(crate) mod filesystem;
pub(crate) mod holes;
pub(crate) mod host;
pub(crate) mod io_ring;
pub(crate) mod lock;
pub(crate) mod mark;
pub(crate) mod owner;
pub(crate) mod pace;
pub(crate) mod partial_file;
pub(crate) mod qemu;
pub(crate) mod segment;
