//! A log's catalog: the control file, the options, and which base image belongs to which disk.

pub(crate) mod control;
pub(crate) mod identity;
pub(crate) mod log_location;
pub(crate) mod mark_text;
pub(crate) mod options;
pub(crate) mod readable;
pub(crate) mod retention;
pub(crate) mod rewind;
pub(crate) mod snapshot;
