//! What a log says of itself and its disks: the control file, options, and which image is which disk.

pub(crate) mod control;
pub(crate) mod identity;
pub(crate) mod options;
