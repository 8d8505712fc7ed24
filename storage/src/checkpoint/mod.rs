//! Checkpoints: copying the log to the base images, so that its segments become free.

pub(crate) mod copy;
pub(crate) mod pace;
mod preallocate;
pub(crate) mod readahead;
mod runs;
